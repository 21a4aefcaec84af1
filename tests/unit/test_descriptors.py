"""Descriptors travel with a datagram, and those that find no room are not left open."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvstore.descriptors import receive_datagram, send_datagram

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


def test_what_is_received_is_the_same_file_and_no_childs(ends: Ends) -> None:
    buffer = bytearray(8)
    with open(os.devnull, "rb") as file:
        send_datagram(ends[0], b"data", [file.fileno(), file.fileno()])
        size, received, is_cut = receive_datagram(ends[1], buffer, 2)
        assert (bytes(buffer[:size]), len(received), is_cut) == (b"data", 2, False)
        for fd in received:
            assert os.path.samestat(os.fstat(fd), os.fstat(file.fileno()))
            assert not os.get_inheritable(fd)
            os.close(fd)


@pytest.mark.parametrize("count_max", [0, 1, 3])
def test_more_than_there_is_room_for_are_cut(ends: Ends, count_max: int) -> None:
    before = os.listdir("/proc/self/fd")
    with open(os.devnull, "rb") as file:
        send_datagram(ends[0], b"data", [file.fileno()] * 4)
    size, received, is_cut = receive_datagram(ends[1], bytearray(8), count_max)
    assert (size, len(received), is_cut) == (4, count_max, True)
    for fd in received:
        os.close(fd)
    assert os.listdir("/proc/self/fd") == before


def fill(end: socket.socket) -> None:
    for _ in range(10_000):
        send_datagram(end, bytes(1000), flags=socket.MSG_DONTWAIT)


def test_flags_count_both_ways(ends: Ends) -> None:
    with pytest.raises(BlockingIOError):
        receive_datagram(ends[1], bytearray(8), 1, flags=socket.MSG_DONTWAIT)
    with pytest.raises(BlockingIOError):
        fill(ends[0])

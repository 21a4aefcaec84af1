"""The door of a process or a machine that has no room for another connection."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import traceback
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from kvstore.engine.events import Received
from kvstore.node import attach as attach_module
from kvstore.types import ConnectionId
from tests.kit.set_clock import SetClock
from tests.unit.node.conftest import (
    MakeAttach,
    Peer,
    all_events,
    hello_rank,
    this_process,
)

Connect = Callable[[], Peer]


class Reluctant:
    """An epoll for which there is no memory."""

    def register(self, fd: int, mask: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def in_a_fork(body: Callable[[], None]) -> None:
    """Run it in a child with one thread: threads that earlier tests left would open and close
    descriptors while they are counted, and would miss those that are not there."""
    gc.collect()
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:  # noqa: BLE001 -- said by this process, before it ends
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, "see what the child printed"


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """No more may be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest free ones, between which others may be in use.
    lowest = [os.dup(0) for _ in range(count + 1)]
    for each in lowest:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_the_door_waits_instead_of_spinning(
    make_attach: MakeAttach,
    connect: Connect,
    clock: SetClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body() -> None:
        attach = make_attach()
        peer = connect()
        peer.introduce(hello_rank())
        with descriptors_left(0):
            assert all_events(attach) == []
        assert "Too many open files" in caplog.text
        assert all_events(attach) == [], "not yet"
        clock.ns += attach_module.ACCEPT_PAUSE_NS
        epoll, attach._epoll = attach._epoll, cast("select.epoll", Reluctant())
        with pytest.raises(OSError, match="Cannot allocate memory"):
            attach.expire(clock.ns)
        attach._epoll = epoll
        attach.expire(clock.ns)
        assert all_events(attach) == [Received(ConnectionId(1), hello_rank(), this_process())]

    in_a_fork(body)


@pytest.mark.parametrize("left", [1, 2])
def test_a_hello_that_takes_the_last_descriptors_is_not_refused_for_good(
    make_attach: MakeAttach, connect: Connect, left: int
) -> None:
    """One for its pidfd, one to see whose it is; who sent it is known without another."""

    def body() -> None:
        attach = make_attach()
        peer = connect()
        assert all_events(attach) == []
        peer.introduce(hello_rank())
        with descriptors_left(left):
            events = all_events(attach)
        if left == 1:
            assert (events, peer.hear()) == ([], b""), "hung up on: it comes again"
        else:
            assert events == [Received(ConnectionId(1), hello_rank(), this_process())]

    in_a_fork(body)

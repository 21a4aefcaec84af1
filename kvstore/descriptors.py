"""Datagrams of unix sockets with descriptors in them, which have one owner at any time.

Covers: sending and receiving one. Does not cover: messages (`wire`,
`supervisor.control`), what is done with a descriptor.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence

_FD_BYTES = array.array("i").itemsize


def send_datagram(
    sock: socket.socket, data: bytes, descriptors: Sequence[int] = (), *, flags: int = 0
) -> None:
    """Send one datagram, with copies of these descriptors. Raises OSError; BlockingIOError when the
    socket or `flags` say not to wait and there is no room."""
    # Not `socket.send_fds` and `recv_fds`: in Python 3.11 they forget the flags.
    passed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    sock.sendmsg([data], [passed] if descriptors else [], flags | socket.MSG_NOSIGNAL)


def receive_datagram(
    sock: socket.socket, buffer: bytearray, count_max: int, *, flags: int = 0
) -> tuple[int, list[int], bool]:
    """Receive one datagram. Returns its size in `buffer`, 0 at the end; its descriptors, at most
    `count_max`, which are the caller's; and whether others were lost, because there were more or
    this process has no room for them. Raises OSError."""
    size, ancillary, received, _ = sock.recvmsg_into(
        [buffer], socket.CMSG_LEN(count_max * _FD_BYTES), flags | socket.MSG_CMSG_CLOEXEC
    )
    found = array.array("i")
    for level, kind, passed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(passed[: len(passed) - len(passed) % _FD_BYTES])
    return size, found.tolist(), bool(received & socket.MSG_CTRUNC)

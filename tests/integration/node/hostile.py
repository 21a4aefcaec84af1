"""A process that attached as an engine and does what it likes with the descriptor of the arena."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import signal
import socket
import struct
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from kvstore.testing.raw_engine import BLOCK_BYTES, make_space
from kvstore.types import Shard
from kvstore.wire.messages import encode
from kvstore.wire.space import Group
from tests.kit.hello import rank_hello

KEEP_SIZE, PUNCH_HOLE = 1, 2


def lock(fd: int, kind: int) -> None:
    """An OFD lock on all of it; it lives as long as the open file, which the node shares."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


def punch(fd: int, times: int) -> None:
    """Give all of its pages back to the kernel, again and again."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_long(os.fstat(fd).st_size)
    for _ in range(times):
        if libc.fallocate(fd, PUNCH_HOLE | KEEP_SIZE, ctypes.c_long(0), size):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _live(path: Path, pipe: Connection) -> None:
    """In the child: attach as a rank, then do as told."""
    group = Group(make_space(model="hostile"), Shard(0, 4, 0, 4), BLOCK_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))
        socket.send_fds(
            sock, [encode(rank_hello(group, name="hostile"))], [os.pidfd_open(os.getpid())]
        )
        _, (arena, _), _, _ = socket.recv_fds(sock, 64 << 10, 4)
        pipe.send(os.getpid())
        while True:
            deed, argument = pipe.recv()
            deed(arena, argument)
            pipe.send(deed.__name__)


class Hostile:
    """Use as a context: the process is gone at its end."""

    def __init__(self, path: Path) -> None:
        context: Any = multiprocessing.get_context("fork")
        self._pipe, its = context.Pipe()
        self._child = context.Process(target=_live, args=(path, its))
        self._child.start()
        its.close()
        assert self._pipe.poll(30), "it was not let in"
        self._pipe.recv()

    def begin(self, deed: Any, argument: int) -> None:
        """Have it done while others go on."""
        self._pipe.send((deed, argument))

    def end(self) -> None:
        """Wait until it is done."""
        assert self._pipe.poll(60), "it did not do it"
        self._pipe.recv()

    def does(self, deed: Any, argument: int) -> None:
        self.begin(deed, argument)
        self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._child.pid, signal.SIGKILL)
        self._child.join(10)
        self._child.close()
        self._pipe.close()

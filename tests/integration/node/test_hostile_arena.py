"""An engine turns the arena's descriptor against the node: it costs the node neither its process
nor what it holds."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import re
import signal
import socket
import struct
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from kvstore.supervisor.sockets import ask_for_upgrade
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_BYTES, RawEngine, make_keys, make_space
from kvstore.types import Shard
from kvstore.wire.messages import encode
from kvstore.wire.space import Group
from tests.integration.node.conftest import eventually
from tests.kit.hello import rank_hello

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

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
    """A process that attached as an engine and does what it likes with the descriptor of the arena.
    Use as a context: the process is gone at its end."""

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


COUNT = 20


@pytest.mark.parametrize("kind", [fcntl.F_RDLCK, fcntl.F_WRLCK], ids=["read", "write"])
@pytest.mark.parametrize("end", ["killed", "upgraded"])
def test_a_lock_on_the_arena_is_nobodys_business(tmp_path: Path, kind: int, end: str) -> None:
    keys = make_keys(COUNT)
    with NodeProcess.start(tmp_path) as node:
        with RawEngine(node.socket) as engine, Hostile(node.socket) as hostile:
            engine.open()
            engine.store(keys)
            engine.lease_stored(keys)
            hostile.does(lock, kind)
        # Its process is gone, and its lock is not: the open file is the supervisor's, too.
        if end == "killed":
            node.crash()
        else:
            assert f": {COUNT} blocks" in ask_for_upgrade(node.socket)
        with RawEngine(node.socket, timeout_s=30) as engine:
            engine.open()
            assert engine.read(engine.lease(keys)) == [engine.contents(key) for key in keys]
        assert "lost" not in node.log


ROUNDS = 20


def is_right(engine: RawEngine, keys: list[bytes]) -> tuple[int, int]:
    """Of what is leased of these keys: blocks, and those that a reader that verifies them takes."""
    reply = engine.lease(keys)
    blocks = engine.read(reply)
    good = sum(
        engine._checksum(0, key, np.frombuffer(block, np.uint64)) == engine.checksum(0, key)
        for key, block in zip(keys, blocks, strict=False)
    )
    assert good == sum(
        block == engine.contents(key) for key, block in zip(keys, blocks, strict=False)
    ), "its checksum is right and its bytes are not"
    engine.release(reply)
    return len(blocks), good


def test_an_arena_full_of_holes_costs_blocks_and_never_the_node(tmp_path: Path) -> None:
    flags = ["--file", f"{tmp_path / 'files'}:64MiB", "--scrub", "1GiB"]
    old, spared = make_keys(COUNT), make_keys(COUNT, seed="spared")
    with NodeProcess.start(tmp_path, dram="16MiB", flags=flags) as node:
        pid = node.pid
        with RawEngine(node.socket) as engine, Hostile(node.socket) as hostile:
            engine.open()
            engine.store(old)
            engine.lease_stored(old)
            for number in range(ROUNDS):
                # While it serves, stores, writes to disk, scrubs, and reads from disk what it lost.
                hostile.begin(punch, 50)
                engine.store(make_keys(2, seed=f"round {number}"))
                is_right(engine, old)
                hostile.end()
            assert eventually(lambda: "an attached engine gave" in node.log, timeout_s=60)
            hostile.does(punch, 1)
            engine.store(spared)
            engine.lease_stored(spared)
            assert is_right(engine, spared) == (COUNT, COUNT), "it serves as ever"
            found = re.compile(r"scrub of dram: .* \(first: ")
            assert eventually(lambda: found.search(node.log) is not None, timeout_s=60)
        assert node.pid == pid, "the same process"
        assert "Traceback" not in node.log
        assert node.stop() == 0

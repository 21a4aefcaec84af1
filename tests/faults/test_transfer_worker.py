"""The node's end of a transfer worker, with real children: each transfer ends once, and when it is
quiet."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
import psutil
import pytest

from kvstore.arena import Arena, wait_for_holders
from kvstore.node.node import MonotonicClock
from kvstore.peers import transfer_worker as worker_module
from kvstore.peers.transfer_worker import (
    TransferWorker,
    TransferWorkerChild,
)
from kvstore.testing.process import Lab, stop_process
from kvstore.transport import guests
from kvstore.transport.tcp import Address
from kvstore.types import Incarnation
from kvstore.units import NS_PER_S
from kvstore.wire.transfer_worker import DESCRIPTOR_BYTES_MAX, Begin, decode_descriptor
from tests.kit.processes import transport_options
from tests.kit.transport_checks import ALL, ARENA_BYTES
from tests.kit.transport_parties import LIMIT_S, TransferWorkerParty

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Settings(NamedTuple):
    """A back end, for a transfer worker of this name."""

    backend: str
    name: str
    options: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}


TCP = Settings(backend="tcp", name="a", options={"insecure": "yes"})
NIXL = Settings(backend="nixl", name="a", environment={"UCX_TLS": "tcp"})
UCX = Settings(backend="ucx", name="a", environment={"UCX_TLS": "tcp"})


class Node:
    """A transfer worker, its arena and its loop, and all that it logged. Its children end with the
    thread of the test."""

    def __init__(self, opened: ExitStack, settings: Settings) -> None:
        self.memory = memory = Arena(arena_bytes=ARENA_BYTES, incarnation=Incarnation(1))
        opened.callback(memory.close)
        self.worker = TransferWorker(
            memory.arena_fd,
            memory.hold_fd,
            Begin(
                settings.backend, settings.name, ARENA_BYTES, dict(settings.options), paced=False
            ),
            MonotonicClock(),
        )
        opened.enter_context(patch.dict(os.environ, settings.environment))
        self._loop = opened.enter_context(asyncio.Runner()).get_loop()
        opened.callback(lambda: self._loop.run_until_complete(self._close()))
        self._loop.call_soon(self.worker.start)
        self.until(lambda: self.worker.pid)

    async def _close(self) -> None:
        self.worker.close()

    @property
    def pid(self) -> int:
        assert self.worker.pid is not None
        return self.worker.pid

    def until(self, done: Callable[[], object]) -> None:
        """Runs the loop until this is so."""
        end_s = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < end_s, self.worker.trouble
            self._loop.run_until_complete(asyncio.sleep(0.01))

    def is_up(self, restarts: int = 0) -> None:
        """Runs the loop until a transfer worker is ready after so many before it."""
        self.until(lambda: self.worker.restarts == restarts and self.worker.descriptor)

    def begin(self, descriptor: bytes, *, after_s: float = LIMIT_S) -> asyncio.Task[str]:
        """Begins to read all from `b`; it must end in time."""
        read = self.worker.move("b", descriptor, ALL, timeout_s=after_s)
        return self._loop.create_task(read)

    def end(self, *reads: asyncio.Task[str]) -> list[str]:
        """Why these reads failed; empty: they did not."""
        return self._loop.run_until_complete(asyncio.wait_for(asyncio.gather(*reads), LIMIT_S))

    def read(self, descriptor: bytes) -> str:
        """Why a read of all from `b` failed."""
        return self.end(self.begin(descriptor))[0]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _node(opened: ExitStack, settings: Settings) -> Node:
    node = Node(opened, settings)
    node.is_up()
    return node


def _peer(opened: ExitStack, settings: Settings, name: str = "b") -> TransferWorkerParty:
    party = TransferWorkerParty(
        name,
        settings.backend,
        options=settings.options,
        environment=settings.environment,
    )
    opened.callback(party.close)
    party.arena[:] = np.random.default_rng(1).integers(0, 256, ARENA_BYTES, np.uint8)
    return party


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _resident_bytes(pid: int, name: str) -> int:
    """Of the mappings of a file, what is in the page tables of a process."""
    found, is_it = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text("ascii").splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_it = name in line
        elif is_it and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_what_was_under_way_has_ended_when_the_child_is_dead(opened: ExitStack) -> None:
    node, peer = _node(opened, TCP), _peer(opened, TCP)
    peer.pause()
    reads = [node.begin(peer.descriptor()) for _ in range(2)]
    node.until(lambda: len(node.worker._watch.transfers) == 2)
    pid = node.pid
    os.kill(pid, signal.SIGKILL)
    assert node.end(*reads) == ["it ended with status -9"] * 2
    assert _is_gone(pid)
    peer.resume()
    node.is_up(restarts=1)
    assert node.pid != pid
    assert node.read(peer.descriptor()) == ""


def test_a_peer_that_stopped_costs_no_transfer_worker_where_its_reads_can_be_ended(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a transfer worker needs more than a second to end a read.
    monkeypatch.setattr(worker_module, "GRACE_NS", 60 * NS_PER_S)
    node, peer = _node(opened, TCP), _peer(opened, TCP)
    peer.pause()
    assert node.end(node.begin(peer.descriptor(), after_s=0.2)) != [""]
    assert node.worker.restarts == 0
    peer.resume()
    assert node.read(peer.descriptor()) == ""


def test_a_peer_that_stopped_costs_a_transfer_worker_where_they_cannot(opened: ExitStack) -> None:
    node, peer = _node(opened, NIXL), _peer(opened, NIXL)
    peer.pause()
    pid = node.pid
    (trouble,) = node.end(node.begin(peer.descriptor(), after_s=0.2))
    assert "no end" in trouble
    assert _is_gone(pid)
    peer.resume()
    node.memory.array[:] = 0xA5
    node.is_up(restarts=1)
    assert (node.memory.array == 0xA5).all()


@pytest.mark.parametrize("settings", [TCP, NIXL], ids=["tcp", "nixl"])
def test_a_descriptor_that_is_too_long_costs_its_peer_only(
    opened: ExitStack, settings: Settings
) -> None:
    node, peer = _node(opened, settings), _peer(opened, settings)
    assert node.read(bytes(DESCRIPTOR_BYTES_MAX + 1)) == "the descriptor of b is too long"
    assert node.read(peer.descriptor()) == ""
    assert np.array_equal(node.memory.array, peer.arena)
    assert node.worker.restarts == 0


def test_those_who_say_nothing_keep_no_peer_out(opened: ExitStack, tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    settings = [
        Settings(backend="tcp", name=name, options=transport_options(lab, name))
        for name in ("a", "b")
    ]
    node, peer = _node(opened, settings[0]), _peer(opened, settings[1])
    place = msgspec.msgpack.decode(decode_descriptor(peer.descriptor()).details, type=Address)
    for _ in range(guests.ARRIVING_MAX + 64):
        opened.enter_context(socket.create_connection((place.host, place.port), timeout=LIMIT_S))
    assert node.read(peer.descriptor()) == ""


def test_a_child_that_stopped_is_killed(opened: ExitStack) -> None:
    node = _node(opened, TCP)
    pid = node.pid
    stop_process(pid)
    node.until(lambda: node.worker.restarts)
    assert _is_gone(pid)
    assert node.worker.trouble == "the transfer worker ended: it is silent"


def test_what_an_operator_must_mend_is_not_tried_again(
    opened: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(opened, Settings(backend="tcp", name="a"))
    node.until(lambda: node.worker.restarts)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "insecure=yes" in said
    assert node.worker.pid is None
    assert "insecure=yes" in node.read(b"its")


def test_what_has_worked_is_tried_again(opened: ExitStack, tmp_path: Path) -> None:
    # Certificates that are being replaced while a transfer worker is started again.
    options = transport_options(Lab(tmp_path), "a")
    node = _node(opened, Settings(backend="tcp", name="a", options=options))
    key, aside = Path(options["key"]), tmp_path / "aside"
    key.rename(aside)
    node.worker.recycle("it is in the way")
    node.until(lambda: node.worker.restarts == 2)
    assert "cannot be used" in node.worker.trouble
    aside.rename(key)
    node.until(lambda: node.worker.descriptor)


def test_the_end_of_one_that_was_killed_is_awaited_without_haste(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, peer = _node(opened, TCP), _peer(opened, TCP)
    peer.pause()
    read = node.begin(peer.descriptor())
    node.until(lambda: node.worker._watch.transfers)
    stop_process(node.pid)
    monkeypatch.setattr(TransferWorkerChild, "signal", lambda *_: None)  # a kernel that is busy
    node.worker.recycle("for this")
    turns = []
    monkeypatch.setattr(TransferWorkerChild, "flush", lambda _: turns.append(1))
    seen_s = time.monotonic()
    node.until(lambda: time.monotonic() - seen_s > 1)
    assert len(turns) < 30
    monkeypatch.undo()
    os.kill(node.pid, signal.SIGKILL)
    assert node.end(read) == ["for this"]


def test_the_arena_is_mapped_before_anything_is_read(opened: ExitStack) -> None:
    party = _peer(opened, TCP)
    if party.has_huge_pages:
        pytest.skip("on huge pages there is nothing to map ahead")
    party.ends_by_now()  # some beats
    # To be written to, and to be read from.
    assert _resident_bytes(party.child.pid, "kvstore-arena") == 2 * ARENA_BYTES


@pytest.mark.parametrize("settings", [TCP, NIXL, UCX], ids=["tcp", "nixl", "ucx"])
def test_a_transfer_worker_without_work_rests(opened: ExitStack, settings: Settings) -> None:
    party = _peer(opened, settings)
    party.ends_by_now()  # some beats: it has begun
    process, begun_s = psutil.Process(party.child.pid), time.monotonic()
    used_s = sum(process.cpu_times()[:2])
    party.ends_by_now()
    party.ends_by_now()
    # A thread that looks without a pause takes all of a core that it can get.
    assert sum(process.cpu_times()[:2]) - used_s < 0.3 * (time.monotonic() - begun_s)


def test_a_transfer_worker_says_that_it_may_write_for_as_long_as_it_lives(
    opened: ExitStack,
) -> None:
    node = _node(opened, TCP)
    memory, fd = node.memory, node.memory.holders_fd
    os.dup2(fd, memory.hold_fd)  # as if the node had ended
    stop_process(node.pid)
    assert not wait_for_holders(fd, timeout_s=0)
    node.worker.recycle("the test is over")
    assert wait_for_holders(fd, timeout_s=LIMIT_S)


def test_a_child_ends_with_its_node() -> None:
    program = """if True:
        import asyncio, os
        from kvstore.arena import Arena
        from kvstore.node.node import MonotonicClock
        from kvstore.peers.transfer_worker import TransferWorker
        from kvstore.types import Incarnation
        from kvstore.wire.transfer_worker import Begin
        arena = Arena(arena_bytes=1 << 20, incarnation=Incarnation(1))
        begin = Begin("tcp", "a", 1 << 20, {"insecure": "yes"})
        worker = TransferWorker(arena.arena_fd, arena.hold_fd, begin, MonotonicClock())
        async def main():
            worker.start()
            print(worker.pid, flush=True)
            input()
            os._exit(0)
        asyncio.run(main())
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as node:
        assert node.stdout is not None
        pidfd = os.pidfd_open(int(node.stdout.readline()))
        node.communicate(b"\n")
    try:
        assert select.select([pidfd], [], [], LIMIT_S)[0]
    finally:
        os.close(pidfd)


_WRITER = """if True:
    import sys
    import nixl_cu13._api as api
    import numpy as np
    from kvstore.wire.transfer_worker import decode_descriptor
    found = decode_descriptor(bytes.fromhex(sys.argv[1]))
    agent = api.nixl_agent("writer", api.nixl_agent_config(backends=["UCX"]))
    mine = np.full(1 << 20, 0xA5, np.uint8)
    agent.register_memory([(mine.ctypes.data, len(mine), 0, "")], "DRAM")
    name = agent.add_remote_agent(found.details)
    lists = [agent.get_xfer_descs([(at, len(mine), 0)], "DRAM") for at in
             (mine.ctypes.data, found.base)]
    try:
        handle = agent.initialize_xfer("WRITE", *lists, name)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
    except Exception as error:
        state = type(error).__name__
    print(state)
    sys.stdout.flush()
    import os
    os._exit(0)
"""


@pytest.mark.parametrize("tls", ["tcp", "^cma"])
def test_a_remote_write_changes_nothing(opened: ExitStack, tls: str) -> None:
    environment = {"UCX_TLS": tls}
    peer = _peer(opened, Settings("nixl", "b", environment=environment))
    before = peer.arena.copy()
    done = subprocess.run(
        [sys.executable, "-c", _WRITER, peer.descriptor().hex()],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    assert np.array_equal(peer.arena, before)
    assert done.stdout.strip().splitlines()[-1] != ""

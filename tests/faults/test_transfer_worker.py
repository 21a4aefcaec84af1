"""The node's end of a transfer worker, with real children: each transfer ends once, and when it is
quiet."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from kvstore.arena import Arena, wait_for_holders
from kvstore.peers.transfer_worker import (
    Down,
    PeerUnreachable,
    TransferEnded,
    TransferWorker,
    TransferWorkerEvent,
    TransferWorkerSettings,
    Unusable,
    Up,
)
from kvstore.testing.process import Lab
from kvstore.transport import guests, watch
from kvstore.transport.pieces import make_pieces
from kvstore.transport.tcp_ends import Address
from kvstore.types import Incarnation
from kvstore.units import NS_PER_S
from kvstore.wire.transfer_worker import DESCRIPTOR_BYTES_MAX, decode_descriptor
from tests.kit.transport_checks import ALL, ARENA_BYTES
from tests.kit.transport_parties import LIMIT_S, TransferWorkerParty

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TCP = TransferWorkerSettings(backend="tcp", name="a", options={"insecure": "yes"})
NIXL = TransferWorkerSettings(backend="nixl", name="a", environment={"UCX_TLS": "tcp"})
UCX = TransferWorkerSettings(backend="ucx", name="a", environment={"UCX_TLS": "tcp"})


class Clock:
    """Real time, and what is added to it."""

    def __init__(self) -> None:
        self.added_ns = 0

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.added_ns


class Node:
    """A transfer worker, its arena, and all that it told."""

    def __init__(self, settings: TransferWorkerSettings) -> None:
        self.memory = Arena(arena_bytes=ARENA_BYTES, incarnation=Incarnation(1))
        self.clock = Clock()
        memory = self.memory
        self.transfer_worker = TransferWorker(
            memory.arena_fd, memory.hold_fd, ARENA_BYTES, settings, self.clock
        )
        self.told: list[TransferWorkerEvent] = []
        self.transfer_worker.start()

    def until(self, kind: type[TransferWorkerEvent], count: int = 1) -> list[TransferWorkerEvent]:
        """Waits for so many of a kind."""
        end_s = time.monotonic() + LIMIT_S
        while len(found := [each for each in self.told if isinstance(each, kind)]) < count:
            assert time.monotonic() < end_s, self.told
            wait_s = max(0.0, (self.transfer_worker.next_ns() - self.clock.now_ns()) / NS_PER_S)
            select.select([self.transfer_worker.fileno()], [], [], min(wait_s, 0.1))
            self.told += self.transfer_worker.read()
        return found

    def post(self, transfer: int, peer: str, *, after_s: float = LIMIT_S) -> None:
        deadline_ns = self.clock.now_ns() + int(after_s * NS_PER_S)
        assert self.transfer_worker.post(transfer, peer, ALL, deadline_ns=deadline_ns)

    def close(self) -> None:
        self.told += self.transfer_worker.close()
        self.memory.close()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _node(opened: ExitStack, settings: TransferWorkerSettings) -> Node:
    node = Node(settings)
    opened.callback(node.close)
    node.until(Up)
    return node


def _peer(
    opened: ExitStack, settings: TransferWorkerSettings, name: str = "b"
) -> TransferWorkerParty:
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


@pytest.mark.parametrize("settings", [TCP, NIXL], ids=["tcp", "nixl"])
def test_a_transfer_ends_once(opened: ExitStack, settings: TransferWorkerSettings) -> None:
    node, peer = _node(opened, settings), _peer(opened, settings)
    node.transfer_worker.connect("b", peer.descriptor())
    node.post(7, "b")
    (ended,) = node.until(TransferEnded)
    assert isinstance(ended, TransferEnded)
    assert (ended.transfer, ended.good) == (7, True)
    assert np.array_equal(node.memory.array, peer.arena)


def test_what_was_under_way_has_ended_when_the_child_is_dead(opened: ExitStack) -> None:
    node, peer = _node(opened, TCP), _peer(opened, TCP)
    node.transfer_worker.connect("b", peer.descriptor())
    peer.pause()
    node.post(1, "b")
    node.post(2, "b")
    pid = node.transfer_worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert [
        each.transfer for each in node.until(TransferEnded, 2) if isinstance(each, TransferEnded)
    ] == [1, 2]
    assert _is_gone(pid)
    node.until(Down)
    peer.resume()
    node.until(Up, 2)
    assert node.transfer_worker.pid != pid
    node.transfer_worker.connect("b", peer.descriptor())
    node.post(3, "b")
    last = node.until(TransferEnded, 3)[-1]
    assert isinstance(last, TransferEnded)
    assert (last.transfer, last.good) == (3, True)


def test_a_peer_that_stopped_costs_no_transfer_worker_where_its_reads_can_be_ended(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a transfer worker needs more than a second to end a read.
    monkeypatch.setattr(watch, "GRACE_NS", 60 * NS_PER_S)
    node, peer = _node(opened, TCP), _peer(opened, TCP)
    node.transfer_worker.connect("b", peer.descriptor())
    peer.pause()
    node.post(1, "b", after_s=0.2)
    (ended,) = node.until(TransferEnded)
    assert isinstance(ended, TransferEnded)
    assert not ended.good
    assert node.transfer_worker.restarts == 0


def test_a_peer_that_stopped_costs_a_transfer_worker_where_they_cannot(opened: ExitStack) -> None:
    node, peer = _node(opened, NIXL), _peer(opened, NIXL)
    node.transfer_worker.connect("b", peer.descriptor())
    peer.pause()
    node.post(1, "b", after_s=0.2)
    pid = node.transfer_worker.pid
    assert pid is not None
    (ended,) = node.until(TransferEnded)
    assert isinstance(ended, TransferEnded)
    assert not ended.good
    assert _is_gone(pid)
    peer.resume()
    node.memory.array[:] = 0xA5
    node.until(Up, 2)
    assert (node.memory.array == 0xA5).all()


@pytest.mark.parametrize("settings", [TCP, NIXL], ids=["tcp", "nixl"])
def test_a_descriptor_that_is_too_long_costs_its_peer_only(
    opened: ExitStack, settings: TransferWorkerSettings
) -> None:
    node, peer = _node(opened, settings), _peer(opened, settings)
    node.transfer_worker.connect("liar", bytes(DESCRIPTOR_BYTES_MAX + 1))
    (lost,) = node.until(PeerUnreachable)
    assert isinstance(lost, PeerUnreachable)
    assert lost.peer == "liar"
    node.transfer_worker.connect("b", peer.descriptor())
    node.post(1, "b")
    (ended,) = node.until(TransferEnded)
    assert isinstance(ended, TransferEnded)
    assert ended.good
    assert node.transfer_worker.restarts == 0


def test_those_who_say_nothing_keep_no_peer_out(opened: ExitStack, tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    node, peer = (
        make(opened, TransferWorkerSettings(backend="tcp", name=name, options=lab.options(name)))
        for make, name in ((_node, "a"), (_peer, "b"))
    )
    assert isinstance(node, Node)
    assert isinstance(peer, TransferWorkerParty)
    place = msgspec.msgpack.decode(decode_descriptor(peer.descriptor()).details, type=Address)
    for _ in range(guests.ARRIVING_MAX + 64):
        opened.enter_context(socket.create_connection((place.host, place.port), timeout=LIMIT_S))
    node.transfer_worker.connect("b", peer.descriptor())
    node.post(1, "b")
    (ended,) = node.until(TransferEnded)
    assert isinstance(ended, TransferEnded)
    assert ended.good


def test_a_child_that_stopped_is_killed(opened: ExitStack) -> None:
    node = _node(opened, TCP)
    pid = node.transfer_worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for _ in range(9):
        node.clock.added_ns += NS_PER_S * 8 // 10
        node.told += node.transfer_worker.read()
    node.until(Down)
    assert _is_gone(pid)


def test_what_an_operator_must_mend_is_not_tried_again(opened: ExitStack) -> None:
    node = Node(TransferWorkerSettings(backend="tcp", name="a"))
    opened.callback(node.close)
    (unusable,) = node.until(Unusable)
    assert isinstance(unusable, Unusable)
    assert "insecure=yes" in unusable.reason
    node.until(Down)
    assert node.transfer_worker.next_ns() == 0
    assert not node.transfer_worker.post(1, "b", make_pieces([0], [0], [1]), deadline_ns=1)


def test_what_has_worked_is_tried_again(opened: ExitStack, tmp_path: Path) -> None:
    # Certificates that are being replaced while a transfer worker is started again.
    options = Lab(tmp_path).options("a")
    node = Node(TransferWorkerSettings(backend="tcp", name="a", options=options))
    opened.callback(node.close)
    node.until(Up)
    key, aside = Path(options["key"]), tmp_path / "aside"
    key.rename(aside)
    node.transfer_worker.kill("it is in the way")
    _, down = node.until(Down, 2)
    assert isinstance(down, Down)
    assert "cannot be used" in down.reason
    aside.rename(key)
    node.until(Up, 2)
    assert not any(isinstance(each, Unusable) for each in node.told)


def test_the_end_of_one_that_was_killed_is_awaited_without_haste(opened: ExitStack) -> None:
    node = Node(TCP)
    opened.callback(node.close)
    node.until(Up)
    node.post(1, "b")
    node.clock.added_ns += int(2 * LIMIT_S) * NS_PER_S  # its deadline has long passed
    node.transfer_worker.kill("for this")
    assert node.transfer_worker.next_ns() > node.clock.now_ns()


def test_the_arena_is_mapped_before_anything_is_read(opened: ExitStack) -> None:
    party = _peer(opened, TCP)
    if party.has_huge_pages:
        pytest.skip("on huge pages there is nothing to map ahead")
    party.ends_by_now()  # some beats
    # To be written to, and to be read from.
    assert _resident_bytes(party.child.pid, "kvstore-arena") == 2 * ARENA_BYTES


@pytest.mark.parametrize("settings", [TCP, NIXL, UCX], ids=["tcp", "nixl", "ucx"])
def test_a_transfer_worker_without_work_rests(
    opened: ExitStack, settings: TransferWorkerSettings
) -> None:
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
    assert node.transfer_worker.pid is not None
    os.kill(node.transfer_worker.pid, signal.SIGSTOP)
    assert not wait_for_holders(fd, timeout_s=0)
    node.transfer_worker.kill("the test is over")
    assert wait_for_holders(fd, timeout_s=LIMIT_S)


def test_a_child_ends_with_its_node() -> None:
    program = """if True:
        import os
        from kvstore.arena import Arena, wait_for_holders
        from kvstore.node.node import MonotonicClock
        from kvstore.peers.transfer_worker import TransferWorker, TransferWorkerSettings
        from kvstore.types import Incarnation
        arena = Arena(arena_bytes=1 << 20, incarnation=Incarnation(1))
        settings = TransferWorkerSettings(backend="tcp", name="a", options={"insecure": "yes"})
        worker = TransferWorker(arena.arena_fd, arena.hold_fd, 1 << 20, settings, MonotonicClock())
        worker.start()
        print(worker.pid, flush=True)
        input()
        os._exit(0)
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
    peer = _peer(opened, TransferWorkerSettings("nixl", "b", environment=environment))
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

"""What a node process takes over from the one before, and when it makes new memory instead."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.arena import GenerationView
from kvstore.config.node import NodeConfig, load_config
from kvstore.errors import ConfigError
from kvstore.net.process import pair
from kvstore.node.node import MonotonicClock, _make_engine, _open_files
from kvstore.node.warm import GENERATIONS_PER_LIFE, NodeMemory, take_memory
from kvstore.supervisor import control
from kvstore.supervisor.child import Kept
from kvstore.supervisor.handover import Handover
from kvstore.tiers.file.directory import Directory
from kvstore.types import PAGES_PER_GENERATION, Incarnation
from kvstore.units import MIB
from kvstore.wire.messages import encode
from tests.unit.node.conftest import hello_rank

DRAM = 2 * MIB
SLOTS = np.arange(DRAM >> 16, dtype=np.uint32) * np.uint32(PAGES_PER_GENERATION)


class Host:
    """A supervisor that holds what it is given and starts processes in this one."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.life = 0
        self.prepared: control.Prepared | None = None
        self.dropped = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stack = contextlib.ExitStack()

    def start(self) -> Handover:
        """What the next process begins with; its messages are taken by a thread."""
        ours, its = pair()
        begin = control.BeginServing(
            settings={}, dram_bytes=DRAM, dram_note="", life=self.life, died_ns=0,
            places=control.Addresses(),
        )  # fmt: skip
        self.life += 1
        for name, fd in (self.kept.memory | self.kept.places).items():
            control.send(ours, control.Held(name), fd)
        for number, (hello, pidfd) in self.kept.writers.items():
            control.send(ours, control.RegisteredWriter(number, hello), pidfd)
        control.send(ours, begin, self._listener.fileno())
        thread = threading.Thread(target=self._serve, args=(ours,))
        thread.start()
        handover = Handover(its)
        os.close(handover.listener_fd)
        self._stack.callback(thread.join, 10)
        self._stack.enter_context(handover)
        return handover

    def _serve(self, ours: socket.socket) -> None:
        with ours:
            while (heard := control.receive(ours, control.from_node)) is not None:
                match heard:
                    case control.GenerationPage(), fd:
                        self.kept.take_page(fd)
                        control.send(ours, control.PageTaken())
                    case control.Keep(name=name), fd:
                        self.kept.hold(name, fd)
                    case control.DropKept(), _:
                        self.dropped += 1
                        self.kept.forget()
                    case control.Attached(number=number, hello=hello), fd:
                        self.kept.attached(number, hello, fd)
                    case control.Released(number=number), _:
                        self.kept.released(number)
                    case control.Prepared() as prepared, _:
                        self.prepared = prepared

    def end_process(self) -> None:
        """The process is gone; what it said is taken."""
        self._stack.close()

    def close(self) -> None:
        self.end_process()
        self.kept.close()
        self._listener.close()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    settings = {"socket": str(tmp_path / "s"), "metrics": "off", "quota": {"a": "25%"}}
    return load_config(None, settings, arena=(DRAM, ""))


def begin(host: Host, config: NodeConfig, incarnation: int = 1) -> tuple[NodeMemory, Handover]:
    handover = host.start()
    return take_memory(config, Incarnation(incarnation), handover), handover


def view(memory: NodeMemory, incarnation: int = 1) -> GenerationView:
    arena = memory.arena
    return GenerationView(
        arena.generation_fd,
        size_bytes=arena.generation_bytes,
        arena_bytes=DRAM,
        incarnation=incarnation,
    )


def test_each_process_has_secrets_of_its_own_in_its_table(host: Host, config: NodeConfig) -> None:
    memory, _ = begin(host, config)
    parts: Any = SimpleNamespace(files=None, member=None, hbm=None)
    engines = [_make_engine(config, memory, 0, parts) for _ in range(2)]
    tables = [engine._state.residency.table for engine in engines]
    assert tables[0]._secrets.tolist() != tables[1]._secrets.tolist()
    memory.arena.close()


def test_the_next_one_finds_the_same_bytes_and_voids_the_old_page(
    host: Host, config: NodeConfig
) -> None:
    first, _ = begin(host, config)
    first.arena.populate(0, DRAM)
    first.arena.array[:5] = b"bytes"[0]
    first.arena.beat(77)
    first.journal.set_ready(DRAM)
    old = view(first)
    assert (old.generations(SLOTS) == 1).all()
    first.arena.close()
    host.end_process()
    second, _ = begin(host, config, incarnation=2)
    assert second.adopt is not None
    assert second.journal.ready_bytes == DRAM
    assert (second.arena.array[:5] == b"bytes"[0]).all()
    assert not old.generations(SLOTS).any(), "whoever still copies throws it away"
    assert old.heartbeat_ns() == 77
    assert (view(second, 2).generations(SLOTS) == 1 + GENERATIONS_PER_LIFE).all()
    second.arena.close()


def test_ranks_come_with_their_pidfds(host: Host, config: NodeConfig) -> None:
    memory, handover = begin(host, config)
    pidfd = os.pidfd_open(os.getpid())
    hello = hello_rank()
    for number in (4, 5):
        assert handover.attached(number, encode(hello), pidfd)
    handover.released(4)
    os.close(pidfd)
    memory.arena.close()
    host.end_process()
    again, handover = begin(host, config)
    assert again.adopt is not None
    (writer,) = again.adopt.writers
    assert (writer.connection, writer.hello) == (5, hello)
    assert [*handover.writers] == [5]
    again.arena.close()


def broken_version(host: Host, _: NodeMemory) -> None:
    os.pwrite(host.kept.memory["journal"], b"\x63", 8)


def named_stranger(_: Host, memory: NodeMemory) -> None:
    memory.journal.cut(0, 64 << 10)
    memory.journal.name_writer(np.array([0]), 99)


def no_hello(host: Host, _: NodeMemory) -> None:
    host.kept.attached(3, b"no hello", os.pidfd_open(os.getpid()))


def no_journal(host: Host, _: NodeMemory) -> None:
    os.close(host.kept.memory.pop("journal"))


def another_size(host: Host, _: NodeMemory) -> None:
    fd = os.memfd_create("journal")
    os.ftruncate(fd, 4096)
    host.kept.hold("journal", fd)


@pytest.mark.parametrize(
    "harm", [broken_version, named_stranger, no_hello, no_journal, another_size]
)
def test_what_cannot_be_believed_is_let_go_arena_and_all(
    host: Host, config: NodeConfig, harm: object, caplog: pytest.LogCaptureFixture
) -> None:
    memory, _ = begin(host, config)
    memory.arena.array[0] = 7
    memory.arena.close()
    host.end_process()
    assert callable(harm)
    harm(host, memory)
    with caplog.at_level(logging.ERROR):
        fresh, _ = begin(host, config)
    assert "all that was in memory is lost: its journal cannot be used" in caplog.text
    assert fresh.adopt is None
    assert fresh.arena.array[0] == 0, "another arena: somebody may write to the old one"
    fresh.arena.close()
    host.end_process()
    assert (host.dropped, set(host.kept.memory)) == (1, {"arena", "journal", "holders"})
    assert host.kept.writers == {}


def test_a_transfer_worker_that_does_not_end_costs_the_memory_and_not_the_node(
    host: Host,
    config: NodeConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, _ = begin(host, config)
    transfer_worker = os.dup(memory.arena.hold_fd)
    memory.arena.close()
    host.end_process()
    monkeypatch.setattr("kvstore.node.warm.HOLDERS_WAIT_S", 0.0)
    with caplog.at_level(logging.ERROR):
        fresh, _ = begin(host, config)
    assert "a transfer worker of the last process has not ended within 0 s" in caplog.text
    assert fresh.adopt is None
    fresh.arena.close()
    host.end_process()
    monkeypatch.undo()
    again, _ = begin(host, config)
    assert again.adopt is not None, "the old transfer worker has nothing to do with the new memory"
    again.arena.close()
    os.close(transfer_worker)


def test_a_supervisor_that_does_not_read_makes_nobody_wait(host: Host) -> None:
    ours, its = pair()
    with ours:
        control.send(
            ours, control.BeginServing({}, DRAM, "", 0, 0, control.Addresses()), ours.fileno()
        )
        with Handover(its) as handover:
            os.close(handover.listener_fd)
            pidfd = os.pidfd_open(os.getpid())
            count = 0
            while handover.attached(count, bytes(2000), pidfd):
                count += 1
            assert count > 50
            for number in range(3):
                handover.released(number)
            heard = [control.receive(ours, control.from_node) for _ in range(count + 2)]
            handover.released(3)
            late = [control.receive(ours, control.from_node) for _ in range(4)]
            os.close(pidfd)
            for message in heard:
                assert message is not None
                if message[1] >= 0:
                    os.close(message[1])
        said = [m[0].number for m in late if m and isinstance(m[0], control.Released)]
        assert said == [0, 1, 2, 3], "said with the next one"


def test_a_directory_that_cannot_be_read_at_a_restart_costs_no_memory(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"socket": str(tmp_path / "s"), "metrics": "off", "file": f"{tmp_path}/f:8MiB"}
    config = load_config(None, settings, arena=(DRAM, ""))

    def open_files() -> str:
        memory, handover = begin(host, config)
        with contextlib.ExitStack() as stack:
            stack.callback(host.end_process)
            stack.callback(memory.arena.close)
            files = _open_files(config, memory.arena, MonotonicClock(), handover, stack)
            assert files is not None
            list(files.read(0))
            return files.trouble

    def fail(_directory: Directory, *, keep_bytes: int) -> dict[int, int]:
        raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN))

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "segments", fail)
        with pytest.raises(ConfigError, match="cannot read"):
            open_files()
        assert "takes no reads and writes: the disk tier cannot read" in open_files()
    assert "takes no" not in open_files()

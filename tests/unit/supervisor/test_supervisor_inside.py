"""The supervisor in this process, step by step: no room for descriptors, a heart that may stand."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvstore.net.process import Spawned, pair
from kvstore.supervisor import control
from kvstore.supervisor.child import (
    DEATHS_MAX,
    PAUSES_NS,
    REFUSAL_PAUSES_NS,
    SOON_NS,
    WARM_ATTEMPTS_MAX,
    Again,
    Kept,
    Process,
    Restarts,
)
from kvstore.supervisor.sockets import TAKEN, UPGRADE_SUFFIX, UpgradeReport
from kvstore.supervisor.supervisor import (
    EXIT_GAVE_UP,
    LOOK_NS,
    STILL_LOOKS_MAX,
    STOP_LIMIT_NS,
    Start,
    Supervisor,
)
from kvstore.types import PAGE_BYTES
from kvstore.units import NS_PER_S


class Inside(Supervisor):
    """A supervisor without its loop, and what its node process says, which does nothing itself."""

    def __init__(self, directory: Path, *, drain_s: int = 0) -> None:
        self.socket = directory / "node.sock"
        start = Start(
            control.BeginServing({}, 1, ""),
            socket=str(self.socket),
            others_may_connect=False,
            log_level="info",
            drain_s=drain_s,
        )
        self.children: list[subprocess.Popen[bytes]] = []
        self.ends: list[socket.socket] = []
        super().__init__(start, spawn=self.spawn)

    def spawn(self) -> Spawned:
        ours, its = pair()
        its.settimeout(20)
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.ends.append(its)
        self.children.append(child)
        return Spawned(child.pid, child.wait, ours)

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    @property
    def store(self) -> Kept:
        return self._store

    @property
    def serves(self) -> bool:
        return self._serves

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    def look(self, now_ns: int) -> None:
        self._look(now_ns)

    def ask_to_end(self) -> None:
        self._end_process(self.process, 0)

    def pass_time(self, now_ns: int) -> None:
        self._time_passes(now_ns)

    def turn(self) -> int:
        """What is ready is served; how much that was."""
        ready = self._selector.select(0)
        for key, _ in ready:
            key.data()
        return len(ready)

    def wait_for_room(self) -> None:
        self._time_passes(1 << 62)

    def serve(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """A first process, until it serves."""
        self._begin_process()
        meanwhile()
        self.say(control.Prepared(control.CONTROL_VERSION, 1, "inside"), control.Begun())
        with open(os.devnull) as file:
            for name in ("arena", "journal"):
                self.say(control.Keep(name), fd=file.fileno())
        self.say(control.Serving(control.Addresses(), blocks=0, size_bytes=0))
        assert self.serves

    def say(self, *messages: control.Control, fd: int | None = None) -> None:
        """Something that the supervisor hears at once."""
        for message in messages:
            control.send(self.ends[-1], message, fd)
        self._hear(self.process)

    def close(self) -> None:
        for child in self.children:
            child.kill()
        self._close()
        for child in self.children:
            child.communicate()
        for end in self.ends:
            end.close()


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    made = Inside(tmp_path)
    yield made
    made.close()


@pytest.fixture
def draining(tmp_path: Path) -> Iterator[Inside]:
    """One that serves, and may drain for 30 s."""
    made = Inside(tmp_path, drain_s=30)
    made.serve()
    yield made
    made.close()


@contextlib.contextmanager
def no_room_for_descriptors(*, but: int = 0) -> Iterator[None]:
    """This process may open `but` descriptors more, and no other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = [os.dup(0) for _ in range(but + 1)]
    for fd in lowest:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_rank_of_which_no_pidfd_can_be_had_costs_the_memory_and_nothing_else(
    inside: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    inside.serve()
    store, before = inside.store, open_descriptors()
    pidfd = os.pidfd_open(os.getpid())
    inside.say(control.Attached(1, b"hello"), fd=pidfd)
    assert list(store.writers) == [1]
    for number in (2, 3):
        with no_room_for_descriptors():
            inside.say(control.Attached(number, b"hello"), fd=pidfd)
    inside.say(control.Attached(4, b"hello"), fd=pidfd)
    os.close(pidfd)
    assert (store.writers, store.memory) == ({}, {}), "the next process begins with empty memory"
    assert open_descriptors() == before - 2
    assert caplog.text.count("ends with its process; raise 'ulimit -n'") == 1
    inside.say(control.Released(2))
    assert inside.children[0].poll() is None, "this one goes on"
    assert inside.serves


def test_a_process_whose_memory_cannot_be_held_is_ended(inside: Inside) -> None:
    inside.serve()
    with open(os.devnull) as file, no_room_for_descriptors():
        inside.say(control.Keep("arena"), fd=file.fileno())
    assert inside.children[0].wait(20) == -signal.SIGKILL
    assert -1 not in inside.store.memory.values()


def test_a_process_whose_page_cannot_be_mapped_is_ended_and_the_page_before_stays(
    inside: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    inside.serve()
    page = os.memfd_create("page")
    os.pwrite(page, bytes(range(1, 33)).ljust(2 * PAGE_BYTES), 0)
    inside.say(control.GenerationPage(), fd=page)
    beats = inside.store.heartbeat()
    assert beats == bytes(range(25, 33))
    before = open_descriptors()
    with no_room_for_descriptors(but=1):  # for the one that comes, not for its mapping
        inside.say(control.GenerationPage(), fd=page)
    assert open_descriptors() == before
    os.close(page)
    assert "no room for the node's generation page" in caplog.text
    assert inside.children[0].wait(20) == -signal.SIGKILL
    assert inside.store.heartbeat() == beats


def test_the_heart_of_one_that_was_asked_to_end_may_stand_still(inside: Inside) -> None:
    inside.serve()
    process, looks = inside.process, range(1, 3 * STILL_LOOKS_MAX)
    inside.ask_to_end()
    for look in looks:
        inside.look(look * LOOK_NS)
    assert not process.was_killed, "it has a deadline"
    process.was_killed = True  # as when that has passed
    for look in range(looks.stop, looks.stop + STILL_LOOKS_MAX - 1):
        inside.look(look * LOOK_NS)
    assert not process.hangs_told, "it has as long to be gone as any other"
    inside.look((looks.stop + STILL_LOOKS_MAX) * LOOK_NS)
    assert process.hangs_told


def test_a_first_sigterm_lets_a_node_drain_and_another_signal_does_not(draining: Inside) -> None:
    draining.stop(signal.SIGTERM)
    draining.pass_time(NS_PER_S)
    assert draining.process.asked_to_end == signal.SIGTERM
    assert draining.process.deadline_ns == STOP_LIMIT_NS + 31 * NS_PER_S
    draining.stop(signal.SIGTERM)
    draining.pass_time(2 * NS_PER_S)
    assert draining.process.asked_to_end == signal.SIGHUP
    assert draining.process.deadline_ns == STOP_LIMIT_NS + 2 * NS_PER_S


def test_ctrl_c_drains_nothing(draining: Inside) -> None:
    draining.stop(signal.SIGINT)
    draining.pass_time(NS_PER_S)
    assert draining.process.asked_to_end == signal.SIGHUP


def test_a_process_that_ends_for_an_upgrade_does_not_begin_to_drain(draining: Inside) -> None:
    draining.ask_to_end()  # as an upgrade does
    assert draining.process.asked_to_end == signal.SIGHUP
    draining.stop(signal.SIGTERM)
    draining.pass_time(NS_PER_S)
    assert draining.process.asked_to_end == signal.SIGHUP
    assert draining.process.deadline_ns == STOP_LIMIT_NS


def test_an_upgrade_does_not_cut_a_drain_short(
    draining: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining.process, "signal", lambda _: None)  # it drains
    draining.stop(signal.SIGTERM)
    draining.pass_time(NS_PER_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asker:
        asker.settimeout(20)
        asker.connect(str(draining.socket) + UPGRADE_SUFFIX)
        draining.turn()
        assert asker.recv(1000) == TAKEN
        answer = msgspec.json.decode(asker.recv(1000), type=UpgradeReport)
    assert answer.text.startswith("the node is ending")
    draining.pass_time(2 * NS_PER_S)
    assert draining.process.asked_to_end == signal.SIGTERM
    assert draining.process.deadline_ns == STOP_LIMIT_NS + 31 * NS_PER_S
    assert len(draining.children) == 1


def test_a_process_that_hangs_in_a_drain_has_the_limit_of_any_end(draining: Inside) -> None:
    draining.stop(signal.SIGTERM)
    begin_ns = time.monotonic_ns()
    draining.pass_time(begin_ns)
    for second in range(1, STILL_LOOKS_MAX + 9):
        draining.look(begin_ns + second * LOOK_NS)
    assert not draining.process.was_killed, "it may be about to end"
    late_ns = draining.process.deadline_ns - begin_ns - STOP_LIMIT_NS
    assert late_ns in range(STILL_LOOKS_MAX * LOOK_NS, (STILL_LOOKS_MAX + 2) * LOOK_NS)


def test_a_process_that_serves_after_it_was_asked_to_end_keeps_its_limit(inside: Inside) -> None:
    def stop() -> None:
        inside.stop(signal.SIGTERM)
        inside.pass_time(NS_PER_S)

    inside.serve(stop)
    assert inside.process.asked_to_end == signal.SIGTERM
    assert inside.process.deadline_ns == STOP_LIMIT_NS + NS_PER_S


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, EXIT_GAVE_UP), (signal.SIGTERM, 0)])
def test_an_end_that_was_not_orderly_is_the_exit_status(
    inside: Inside, number: signal.Signals, code: int
) -> None:
    inside.serve()
    inside.process.signal(number)
    inside.stop(signal.SIGTERM)
    (child,) = inside.children
    child.wait(20)
    inside.turn()
    inside.pass_time(NS_PER_S)
    assert inside.exit_code == code


def test_who_asks_while_there_is_no_room_is_let_in_later(inside: Inside) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asker:
        asker.settimeout(20)
        asker.connect(str(inside.socket) + UPGRADE_SUFFIX)
        with no_room_for_descriptors():
            assert [inside.turn(), inside.turn()] == [1, 0], "it does not spin"
        inside.wait_for_room()
        assert inside.turn() == 1
        assert asker.recv(1000) == TAKEN
        answer = msgspec.json.decode(asker.recv(1000), type=UpgradeReport)
        assert "retry when it serves" in answer.text


# ── when another process is started, with what, and when no more ──────────────────────────────────


def test_the_first_death_is_followed_at_once_and_with_everything() -> None:
    assert Restarts().ended(served_ns=1) == Again(0, keep=True)
    assert Restarts().ended(served_ns=SOON_NS + 1) == Again(0, keep=True)


def test_deaths_soon_after_the_start_wait_longer_and_end() -> None:
    restarts = Restarts()
    outcomes = [restarts.ended(served_ns=1) for _ in range(DEATHS_MAX + 1)]
    pauses = [again.pause_ns for again in outcomes if isinstance(again, Again)]
    assert len(pauses) == DEATHS_MAX
    assert pauses == sorted(pauses)
    assert pauses[-1] == PAUSES_NS[-1]
    assert outcomes[-1] is None


def test_a_process_that_served_long_begins_the_count_anew() -> None:
    restarts = Restarts()
    for _ in range(10 * DEATHS_MAX):
        assert restarts.ended(served_ns=1) == Again(0, keep=True)
        assert isinstance(restarts.ended(served_ns=1), Again)
        assert restarts.ended(served_ns=SOON_NS + 1) == Again(0, keep=True)


def test_memory_with_which_none_comes_to_serve_is_let_go() -> None:
    restarts = Restarts()
    kept = []
    for _ in range(WARM_ATTEMPTS_MAX + 1):
        again = restarts.ended(served_ns=0)
        assert isinstance(again, Again)
        kept.append(again.keep)
    assert kept == [True] * (WARM_ATTEMPTS_MAX - 1) + [False] * 2
    assert restarts.ended(served_ns=1) == Again(PAUSES_NS[3], keep=True), "one that served"


def test_one_that_says_why_it_cannot_start_is_tried_for_ever_with_all_that_was_kept() -> None:
    restarts = Restarts()
    outcomes = [restarts.refused() for _ in range(10 * DEATHS_MAX)]
    assert all(again.keep for again in outcomes)
    pauses = [again.pause_ns for again in outcomes]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (REFUSAL_PAUSES_NS[0], REFUSAL_PAUSES_NS[-1])
    assert restarts.ended(served_ns=0) == Again(0, keep=True), "nor does it count for others"
    assert restarts.refused().pause_ns == REFUSAL_PAUSES_NS[0]

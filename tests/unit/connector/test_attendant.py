"""An idle engine attaches by itself: its scheduler makes no step, a thread looks instead."""

from __future__ import annotations

import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client.link import Lost
from kvstore.connector.scheduler_side import TURN, Attendant, SchedulerSide
from kvstore.errors import AttachError
from kvstore.units import NS_PER_MS, NS_PER_S
from tests.unit.connector.test_scheduler_side import FullSocket, MakeSide, clock, make_side, step

__all__ = ["clock", "make_side"]

WAIT_S = 30.0


class Node:
    """Its socket: there or not. Counts who knocks."""

    def __init__(self) -> None:
        self.is_there = False
        self.knocks = 0

    def connect(self, _path: object, _hello: object) -> FullSocket:
        self.knocks += 1
        if not self.is_there:
            raise AttachError("no kvstore node")
        return FullSocket(room=100)


class Owner:
    """Whose attention it is."""

    def __init__(self, looks: int = 1) -> None:
        self.looks = looks
        self.enough = threading.Event()

    def attend(self) -> None:
        self.looks -= 1
        if self.looks <= 0:
            self.enough.set()


@pytest.fixture
def lost(make_side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> tuple[SchedulerSide, Node]:
    """An engine that was attached, and whose node has just ended."""
    link, node = FullSocket(room=100), Node()
    side = make_side(link)
    assert side._core.attachment.session
    monkeypatch.setattr("kvstore.connector.scheduler_side.Link.connect", node.connect)
    lost: Any = Lost("the node closed the connection")
    link.inbox.append(lost)
    return side, node


def is_open(side: SchedulerSide) -> bool:
    return side._core.attachment.session != 0


def idle(side: SchedulerSide, clock: SimpleNamespace, ns: int) -> None:
    end_ns = clock.now_ns + ns
    while clock.now_ns < end_ns:
        clock.now_ns += 100 * NS_PER_MS
        side.attend()


def test_an_idle_scheduler_attaches_again(
    lost: tuple[SchedulerSide, Node], clock: SimpleNamespace
) -> None:
    side, node = lost
    idle(side, clock, 60 * NS_PER_S)
    assert is_open(side) is False
    assert 30 < node.knocks < 80, "about once a second"
    node.is_there = True
    idle(side, clock, 2 * NS_PER_S)
    assert is_open(side), "before any request"


def test_nothing_is_done_after_a_shutdown(
    lost: tuple[SchedulerSide, Node], clock: SimpleNamespace
) -> None:
    side, node = lost
    node.is_there = True
    side.close()
    idle(side, clock, 10 * NS_PER_S)
    step(side)
    assert node.knocks == 0


def start(owner: Owner) -> Attendant:
    made = Attendant(weakref.WeakMethod(owner.attend), tick_s=0)
    made.start()
    return made


def test_the_thread_ends_with_its_owner() -> None:
    owner = Owner()
    attendant = start(owner)
    assert owner.enough.wait(WAIT_S)
    del owner
    attendant._thread.join(WAIT_S)
    assert not attendant._thread.is_alive()


def test_the_thread_skips_a_look_while_the_engine_has_its_turn() -> None:
    owner = Owner()
    with TURN:
        attendant = start(owner)
        attendant.stop()
    assert not owner.enough.is_set()
    assert not attendant._thread.is_alive()


def test_a_look_may_stop_the_thread() -> None:
    """As the guard does after an error of ours."""

    class Failing(Owner):
        def attend(self) -> None:
            attendant.stop()
            super().attend()

    owner = Failing()
    attendant = Attendant(weakref.WeakMethod(owner.attend), tick_s=0)
    attendant.start()
    attendant._thread.join(WAIT_S)
    assert owner.enough.is_set()
    assert not attendant._thread.is_alive()


def test_a_fork_waits_for_a_look_and_the_child_has_its_turn() -> None:
    looking, may_end = threading.Event(), threading.Event()

    class Slow(Owner):
        def attend(self) -> None:
            looking.set()
            may_end.wait(WAIT_S)
            super().attend()

    owner = Slow()
    attendant = start(owner)
    assert looking.wait(WAIT_S)
    threading.Timer(0.05, may_end.set).start()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if may_end.is_set() and TURN.acquire(blocking=False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    attendant.stop()

"""The loop asks for a better place among threads; what it does not get does not hurt."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import pytest

from kvstore.node.turns import LOOK_NS, LOOP_NICE, ThreadPriority


class Kernel:
    """Writes down what it is asked for, and refuses the first so many calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = 0
        self.asked: list[tuple[str, Any]] = []
        monkeypatch.setattr(os, "sched_setscheduler", self.sched_setscheduler)
        monkeypatch.setattr(os, "setpriority", self.setpriority)

    def sched_setscheduler(self, thread: int, policy: int, param: os.sched_param) -> None:
        self._ask("real-time", (thread, policy, param.sched_priority))

    def setpriority(self, *call: int) -> None:
        self._ask("nice", call)

    def _ask(self, what: str, call: tuple[int, ...]) -> None:
        self.asked.append((what, call))
        if len(self.asked) <= self.refuses:
            raise PermissionError(1, "Operation not permitted")


ORDINARY = ("real-time", (0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, 0))
LEAST = ("real-time", (0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, 1))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@pytest.mark.parametrize("refuses", [1, 2])
def test_a_refusal_is_harmless_and_told_to_who_debugs(
    kernel: Kernel, caplog: pytest.LogCaptureFixture, refuses: int
) -> None:
    kernel.refuses = refuses
    with caplog.at_level(logging.DEBUG, logger="kvstore"):
        ThreadPriority(0)
    nice = ("nice", (os.PRIO_PROCESS, threading.get_native_id(), LOOP_NICE))
    assert kernel.asked == [LEAST, nice]
    said = ["the loop runs without real-time priority: Operation not permitted"]
    assert caplog.messages == (said if refuses == 2 else [])
    assert {record.levelno for record in caplog.records} <= {logging.DEBUG}


def test_a_loop_that_hardly_sleeps_goes_back_among_the_others_until_it_sleeps_again(
    kernel: Kernel,
) -> None:
    place = ThreadPriority(0)
    nice = ("nice", (os.PRIO_PROCESS, threading.get_native_id(), LOOP_NICE))
    slept_ns = 0
    for second, (part, asked) in enumerate(
        [
            (0.9, []),
            (0.3, []),  # much is asked of it
            (0.1, [ORDINARY, nice]),
            (0.0, []),
            (0.4, []),
            (0.6, [LEAST]),
            (0.3, []),
            (0.1, [ORDINARY, nice]),
        ]
    ):
        kernel.asked.clear()
        slept_ns += int(part * LOOK_NS)
        place.look(second * LOOK_NS + LOOK_NS // 2, slept_ns)  # too early to tell
        place.look((second + 1) * LOOK_NS, slept_ns)
        assert kernel.asked == asked, second


def test_who_was_refused_once_does_not_ask_again(kernel: Kernel) -> None:
    kernel.refuses = 1
    place = ThreadPriority(0)
    kernel.asked.clear()
    for second in range(1, 5):
        place.look(second * LOOK_NS, second // 3 * LOOK_NS)
    assert not kernel.asked

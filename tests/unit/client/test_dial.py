"""When a process connects to the node, and when it hangs up."""

from __future__ import annotations

import pytest

from kvstore.client.core.dial import (
    GONE_TIMES,
    GREETING_NS_MAX,
    Dial,
    DialState,
)
from kvstore.units import NS_PER_MS

LIMIT_MS = 250
START_NS = 10**13


def welcomed(now_ns: int = START_NS, node_now_ns: int = START_NS) -> Dial:
    dial = Dial(LIMIT_MS)
    dial.connected(now_ns)
    dial.welcomed(now_ns, node_now_ns)
    return dial


def test_a_greeting_without_an_answer_ends() -> None:
    dial = Dial(LIMIT_MS)
    dial.connected(START_NS)
    assert dial.check_heartbeat(START_NS + GREETING_NS_MAX, 0) == ""
    assert dial.check_heartbeat(START_NS + GREETING_NS_MAX + 1, 0) == "the node does not answer"
    dial.ended(START_NS)
    assert (dial.state, dial.check_heartbeat(START_NS + 2 * GREETING_NS_MAX, 0)) == (
        DialState.DOWN,
        "",
    )


@pytest.mark.parametrize("offset_ns", [-(10**12), 0, 10**12])
@pytest.mark.parametrize("late_ns", [0, 5 * 10**9])
def test_silence_does_not_depend_on_the_clocks(offset_ns: int, late_ns: int) -> None:
    """`late_ns`: before the Welcome was read."""
    dial = welcomed(START_NS, START_NS - late_ns + offset_ns)
    assert dial.check_heartbeat(START_NS, 0) == ""
    beat_ns = START_NS + offset_ns
    assert dial.check_heartbeat(START_NS, beat_ns) == ""
    for age_ms, is_silent, is_gone in (
        (LIMIT_MS, False, False),
        (LIMIT_MS + 1, True, False),
        (GONE_TIMES * LIMIT_MS, True, False),
        (GONE_TIMES * LIMIT_MS + 1, True, True),
    ):
        reason = dial.check_heartbeat(START_NS + age_ms * NS_PER_MS, beat_ns)
        assert (bool(dial.silent_since_ns), bool(reason)) == (is_silent, is_gone)
    assert dial.check_heartbeat(START_NS + 3 * 10**9, START_NS + 3 * 10**9 + offset_ns) == ""
    assert not dial.silent_since_ns

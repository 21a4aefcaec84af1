"""When a process connects to the node, and when it hangs up."""

from __future__ import annotations

import pytest

from kvstore.client.core.attachment import (
    GONE_TIMES,
    GREETING_NS_MAX,
    REFUSED_RETRY_NS,
    RETRY_NS_MAX,
    RETRY_NS_MIN,
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


def waits(dial: Dial, tries: int) -> list[int]:
    """From each try that fails to the next."""
    now_ns, found = START_NS, []
    for _ in range(tries):
        dial.ended(now_ns)
        wait_ns = next(n for n in range(0, 10**11, RETRY_NS_MIN) if dial.is_due(now_ns + n))
        assert not dial.is_due(now_ns + wait_ns - 1)
        now_ns += wait_ns
        found.append(wait_ns)
    return found


def test_tries_become_rarer_up_to_a_limit_and_begin_anew_once_served() -> None:
    dial = Dial(LIMIT_MS)
    found = waits(dial, 8)
    assert found[:3] == [RETRY_NS_MIN, 2 * RETRY_NS_MIN, 4 * RETRY_NS_MIN]
    assert found[-1] == RETRY_NS_MAX
    dial.served()
    assert waits(dial, 1) == [RETRY_NS_MIN]


def test_a_refusal_waits_long_and_makes_no_later_wait_longer() -> None:
    dial = Dial(LIMIT_MS)
    dial.ended(START_NS, is_refused=True)
    assert not dial.is_due(START_NS + REFUSED_RETRY_NS - 1)
    assert dial.is_due(START_NS + REFUSED_RETRY_NS)
    assert waits(dial, 2) == [RETRY_NS_MIN, 2 * RETRY_NS_MIN]


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

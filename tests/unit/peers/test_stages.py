"""Durations of the stages of pushes: counted, and told when nothing explains them."""

from __future__ import annotations

import pytest

from kvstore.peers.pushes import FRESH_NS, SLOW_S, SLOW_TCP_S, Stages
from kvstore.units import NS_PER_S
from tests.kit.set_clock import SetClock

KINDS = ("push_grant", "push_first", "write", "push_seal", "push_token")


@pytest.mark.parametrize("kind", ["push_grant", "write", "push_seal", "push_token"])
@pytest.mark.parametrize("slow_s", [SLOW_S, SLOW_TCP_S])
def test_a_stage_above_its_limit_is_told_for_a_while(
    kind: str, slow_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SetClock(5 * NS_PER_S)
    stages = Stages(KINDS, clock, slow_s=slow_s)
    stages.took(kind, int(slow_s * NS_PER_S), node="p")
    assert (stages.trouble, caplog.messages) == ("", [])
    stages.took(kind, int((slow_s + 1) * NS_PER_S), 1 << 20, node="p")
    (line,) = caplog.messages
    assert "node p" in line
    assert f"{slow_s + 1:.1f} s" in line
    clock.ns += 9 * NS_PER_S
    assert stages.trouble == f"{line} (9 s ago)"
    clock.ns += FRESH_NS
    assert stages.trouble == ""
    assert stages.timings[kind].count == 2


def test_a_stage_that_follows_a_prefill_is_never_slow(caplog: pytest.LogCaptureFixture) -> None:
    clock = SetClock(5 * NS_PER_S)
    stages = Stages(KINDS, clock, slow_s=SLOW_S)
    stages.since("push_first", clock.ns - 60 * NS_PER_S)
    assert (stages.trouble, caplog.messages) == ("", [])
    assert stages.timings["push_first"].count == 1

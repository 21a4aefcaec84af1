"""Blocks that come from disk: who waits for them, how long, and for what it is worth."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.client.core.costs import SAMPLES, STEP_TOKENS_MIN, Pace
from kvstore.client.core.plan import RankReport
from kvstore.wire import messages as m
from tests.unit.client.conftest import BLOCK_TOKENS, AnsweredCore, chain

COMPUTE_NS_PER_TOKEN = 100_000
"""A block of 128 tokens takes 12.8 ms, half of it is 6.4 ms."""


class SlowDisk(AnsweredCore):
    """Has `keys` in dram and says that `coming` more are on their way."""

    def __init__(self, *, coming: int, promoting_ms: int = 1, **changes: Any) -> None:
        super().__init__(prefill_ns_per_token=COMPUTE_NS_PER_TOKEN, **changes)
        self.coming = coming
        self.promoting_ms = promoting_ms
        self.asked: m.LeaseAsk | None = None

    def lease_reply(self, ask: m.LeaseAsk) -> m.LeaseReply:
        self.asked = ask
        reply = super().lease_reply(ask)
        return msgspec.structs.replace(reply, promoting=self.coming, promoting_ms=self.promoting_ms)

    def bring(self, count: int, *, left: int = 0) -> None:
        """So many blocks have come."""
        assert self.asked is not None
        more = m.LeaseMore(
            lease=self.asked.lease,
            slots=np.arange(1600, 1600 + 16 * count, 16, dtype="<u4").tobytes(),
            generations=np.full(count, 6, dtype="<u8").tobytes(),
            checksums=b"x" * 16 * count if self.asked.with_checksums else b"",
            promoting=left,
        )
        assert self.give(more) is None

    def ask(self) -> object:
        return self.core.match("r", local_tokens=0, now_ns=self.now_ns)


def waiting(keys: list[bytes], held: int = 0, **changes: Any) -> SlowDisk:
    """A request that waits for what follows its first `held` blocks."""
    changes.setdefault("coming", len(keys) - held)
    has_measured = changes.pop("has_measured", False)
    node = SlowDisk(**changes)
    node.attach()
    if has_measured:
        step = node.core.costs.compute.planned(1000, node.now_ns)
        node.core.costs.reported(step, node.now_ns + 1000 * COMPUTE_NS_PER_TOKEN)
    node.keys = set(keys[:held])
    node.core.new_request("r", keys, prompt_tokens=len(keys) * BLOCK_TOKENS, now_ns=node.now_ns)
    assert node.ask() is None
    node.exchange()
    return node


def test_a_request_waits_for_what_comes_from_disk_and_loads_all_of_it() -> None:
    keys = chain("p", 10)
    node = waiting(keys, held=4)
    assert node.ask() is None
    node.bring(3, left=3)
    assert node.ask() is None
    node.bring(3)
    assert node.ask() == 10 * BLOCK_TOKENS
    node.core.allocated(
        "r", tables=(range(10),), external_tokens=10 * BLOCK_TOKENS, now_ns=node.now_ns
    )
    (job,) = node.core.plan((), node.now_ns).loads
    slots = np.frombuffer(job.slots, "<u4").tolist()
    assert slots == [*range(0, 64, 16), *range(1600, 1648, 16), *range(1600, 1648, 16)]
    assert np.frombuffer(job.generations, "<u8").tolist() == [5] * 4 + [6] * 6


def test_what_was_there_is_loaded_when_the_rest_takes_too_long() -> None:
    keys = chain("p", 10)
    node = waiting(keys, held=4, promoting_ms=15)
    node.wait(41)
    assert node.ask() is None, "six blocks take 76.8 ms: half of it, and 4 %"
    node.wait(1)
    assert node.ask() == 4 * BLOCK_TOKENS
    assert node.core.stats.take()["promotions_given_up"] == 1
    node.bring(6)
    assert node.ask() == 4 * BLOCK_TOKENS, "an answer that was given stays"


def test_nothing_in_time_is_a_miss_and_the_lease_goes_back() -> None:
    keys = chain("p", 10)
    node = waiting(keys)
    node.wait(70)  # ten blocks take 128 ms
    assert node.ask() == "promotion deadline"
    node.exchange()
    assert node.of(m.LeaseRelease) == [m.LeaseRelease([1])]
    node.bring(10)
    assert node.core.lookups.leases_open == 0


def test_what_comes_is_worth_the_wait_however_long_the_rest_takes() -> None:
    keys = chain("p", 1000)  # 12.8 s
    node = waiting(keys, promoting_ms=3000, has_measured=True)
    node.wait(2000)
    node.bring(30, left=970)
    assert node.ask() is None
    node.wait(6400 + 512 + 384 - 2000 - 1)  # half of it, 4 %, and what 30 blocks saved
    assert node.ask() is None
    node.wait(2)
    assert node.ask() == 30 * BLOCK_TOKENS


@pytest.mark.parametrize("says_it_again", [False, True])
def test_a_node_that_promises_more_than_was_asked_for_holds_nobody_longer(
    *, says_it_again: bool
) -> None:
    """Else a request would wait for as long as 10^12 blocks take to compute."""
    keys = chain("p", 10)
    node = waiting(keys, coming=10**12)
    for _ in range(14):  # ten blocks take 128 ms
        node.wait(5)
        if says_it_again:
            node.bring(0, left=10**12)
    assert isinstance(node.ask(), str)


def test_a_wait_in_its_turn_is_no_reason_to_ask_no_more() -> None:
    """A node that is upgraded meanwhile has answered in time, so it is asked again."""
    node = SlowDisk(coming=0)
    node.attach()
    step = node.core.costs.compute.planned(1000, node.now_ns)
    node.core.costs.reported(step, node.now_ns + 1000 * COMPUTE_NS_PER_TOKEN)
    node.look_up("before it", chain("q", 800))
    assert isinstance(node.match("before it"), str), "ten seconds of computing"
    node.coming, node.promoting_ms = 10, 8000
    node.look_up("r", chain("p", 10))
    assert node.match("r") is None
    node.wait(5000)
    assert node.match("r") is None
    node.reopen("upgraded")
    assert node.match("r") is None
    node.exchange()
    assert node.core.requests["r"].wait is not None, "it was asked again"


# ── pace ─────────────────────────────────────────────────────────────────────────────────────────


def time_steps(pace: Pace, *durations: int, tokens: int = STEP_TOKENS_MIN) -> None:
    """One after the other, each planned when the one before has ended."""
    now_ns = 10**9
    for duration in durations:
        step, now_ns = pace.planned(tokens, now_ns), now_ns + duration * tokens
        pace.reported(step, now_ns)


def test_a_pace_is_the_median_of_long_steps() -> None:
    pace = Pace(7)
    assert (pace.ns_per_token, pace.is_known) == (7, False)
    time_steps(pace, 10**6, tokens=STEP_TOKENS_MIN - 1)
    assert (pace.ns_per_token, pace.is_known) == (7, False), "short steps say nothing"
    time_steps(pace, 100, 100, 100_000)
    assert (pace.ns_per_token, pace.is_known) == (100, True)
    assert not pace.reported(0, 10**15)
    assert not pace.reported(99, 10**15)
    assert pace.ns_per_token == 100, "reports without a step say nothing"
    time_steps(pace, *[3] * SAMPLES)
    assert pace.ns_per_token == 3, "what is old is forgotten"


def test_a_step_that_is_planned_while_another_runs_begins_with_that_ones_end() -> None:
    pace, tokens = Pace(7), STEP_TOKENS_MIN
    first = pace.planned(tokens, 0)
    second = pace.planned(tokens, 1)
    assert pace.planned(1, 2) == 0, "decoding, planned before either was reported"
    assert pace.reported(first, 50 * tokens)
    assert not pace.reported(first, 51 * tokens), "by another rank"
    assert pace.reported(second, 100 * tokens)
    assert pace.ns_per_token == 50


def test_steps_of_the_engine_set_the_pace() -> None:
    keys = chain("p", 10)
    node = SlowDisk(coming=10, promoting_ms=26)
    node.attach()
    plan = node.core.plan((), node.now_ns, computed_tokens=1000)
    node.wait(20)  # 20 µs a token: ten blocks take 25.6 ms
    node.core.reported(RankReport(rank=0, step=plan.step), node.now_ns)
    node.core.new_request("r", keys, prompt_tokens=1280, now_ns=node.now_ns)
    assert node.ask() is None
    node.exchange()
    assert isinstance(node.ask(), str)

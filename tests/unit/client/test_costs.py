"""Load or compute: by what the engine measured and what the node told, never by a wild guess."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.client.core.costs import PROBE_EVERY, SOURCES_MAX, TELL_EVERY, Costs
from kvstore.client.core.plan import (
    LoadResult,
    Outcome,
    RankReport,
)
from kvstore.wire import messages as m
from kvstore.wire.load import COMPUTE_NS_MAX, COMPUTE_NS_MIN
from tests.unit.client.conftest import BLOCK_TOKENS, AnsweredCore, chain

COMPUTE_NS = 100_000


def report(blocks: int, ns_per_token: int, session: int = 1) -> RankReport:
    """A rank copied so many blocks."""
    tokens = blocks * BLOCK_TOKENS
    load = LoadResult("x", 99, blocks, (), tokens, tokens * ns_per_token)
    return RankReport(rank=0, loads=(load,))


def attached(*, load_ns: int = 0, computed: bool = True, **changes: Any) -> AnsweredCore:
    """An engine that has computed tokens in COMPUTE_NS each, and has copied some in `load_ns`."""
    node = AnsweredCore(**{"prefill_ns_per_token": COMPUTE_NS, **changes})
    node.attach()
    if computed:
        node.core.costs.compute.told(changes.get("prefill_ns_per_token", COMPUTE_NS))
    for _ in range(3 if load_ns else 0):
        node.core.reported(report(4, load_ns), node.now_ns)
    node.exchange()
    return node


def asks(node: AnsweredCore, request: str, keys: list[bytes]) -> Outcome:
    """A whole lookup."""
    tokens = len(keys) * BLOCK_TOKENS
    node.core.new_request(request, keys, prompt_tokens=tokens, now_ns=node.now_ns)
    outcome = node.match(request)
    if outcome is None:
        node.exchange()
        outcome = node.match(request)
    node.core.finished(request)
    return outcome


def step(node: AnsweredCore, *, tokens: int = 1000, ns_per_token: int = 50_000) -> None:
    """The engine computes."""
    plan = node.core.plan((), node.now_ns, computed_tokens=tokens)
    node.now_ns += tokens * ns_per_token
    node.core.reported(RankReport(rank=0, step=plan.step), node.now_ns)


# ── dram ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("load_ns", "outcome"),
    [(COMPUTE_NS - 1, 10 * BLOCK_TOKENS), (COMPUTE_NS + 1, "cost gate")],
)
def test_what_is_in_dram_is_loaded_when_copying_takes_less_than_computing(
    load_ns: int, outcome: Outcome
) -> None:
    node, keys = attached(load_ns=load_ns), chain("p", 10)
    node.keys = set(keys)
    assert asks(node, "r", keys) == outcome
    assert bool(node.of(m.LeaseAsk)) == isinstance(outcome, int), "else nobody is asked"


def test_now_and_then_a_little_is_loaded_to_see_whether_it_pays_by_now() -> None:
    node, keys = attached(load_ns=2 * COMPUTE_NS), chain("p", 50)
    node.keys = set(keys)
    outcomes = [asks(node, f"r{i}", keys) for i in range(2 * PROBE_EVERY)]
    assert outcomes.count(BLOCK_TOKENS) == 2, "one block of 50: 4 % of computing them"
    assert outcomes.count("cost gate") == 2 * PROBE_EVERY - 2
    for _ in range(8):
        node.core.reported(report(1, COMPUTE_NS // 10), node.now_ns)
    assert asks(node, "r", keys) == 50 * BLOCK_TOKENS


def test_a_request_for_which_a_probe_is_dear_makes_none() -> None:
    node, keys = attached(load_ns=2 * COMPUTE_NS), chain("p", 49)
    node.keys = set(keys)
    assert {asks(node, f"r{i}", keys) for i in range(2 * PROBE_EVERY)} == {"cost gate"}


# ── disk ─────────────────────────────────────────────────────────────────────────────────────────


def costs(load_ns: int) -> Costs:
    made = AnsweredCore(prefill_ns_per_token=COMPUTE_NS).core.costs
    for _ in range(3):
        made.load.loaded(100, 100 * load_ns)
    return made


def test_what_a_copy_costs_is_no_gain_of_waiting() -> None:
    assert costs(1).wait("", 1000, 99_000_000, 0) is not None, "computing takes 100 ms"
    assert costs(COMPUTE_NS // 5).wait("", 1000, 80_000_000, 0) is None, "of which it saves 80"
    assert costs(2 * COMPUTE_NS).wait("", 1000, 0, 0) is None


def test_each_source_has_an_account_of_its_own() -> None:
    made = costs(0)
    slow = made.wait("n1", 1000, 10_000_000, 0)
    assert slow is not None
    slow.ended(0, 54_000_000)
    assert made.wait("n1", 1000, 10_000_000, 0) is None, "4 % of 100 ms are its own: paid back"
    assert made.wait("n1", 1000, 1_000_000, 0).until_ns == 4_000_000  # type: ignore[union-attr]
    assert made.wait("n2", 1000, 10_000_000, 0).until_ns > 50_000_000  # type: ignore[union-attr]
    for number in range(2 * SOURCES_MAX):
        if (wait := made.wait(f"other{number}", 1000, 10_000_000, 0)) is not None:
            wait.ended(0, 54_000_000)
    assert made.wait("n1", 1000, 10_000_000, 0) is None, "debts are not forgotten"
    assert made.wait("yet another", 1000, 10_000_000, 0) is None, "nor those of many sources"


def test_a_source_that_owes_nothing_gives_way_to_a_new_one() -> None:
    made = costs(0)
    for number in range(3 * SOURCES_MAX):
        wait = made.wait(f"n{number}", 1000, 10_000_000, 0)
        assert wait is not None
        if number == SOURCES_MAX:
            wait.ended(0, 54_000_000)
        else:
            wait.dropped()
    assert made.wait(f"n{SOURCES_MAX}", 1000, 10_000_000, 0) is None, "its debt stays"


def test_a_prompt_that_takes_long_to_copy_is_waited_for_all_the_same() -> None:
    """Told a pace of a millisecond a token: the copy takes longer than what is weighed at most."""
    made = costs(25_000)
    made.opened(m.SessionOpen(1, (1,), compute_ns_per_token=1_000_000))
    assert made.wait("", 100_000, 1_000_000, 0) is not None


def test_a_lookup_weighs_and_owes_once_however_many_waits_it_has() -> None:
    made = costs(0)
    first = made.wait("", 1000, 10_000_000, 0)
    assert first is not None
    lost_ns = first.ended(0, 54_000_000)
    assert lost_ns == 54_000_000
    assert made.wait("", 1000, 1_000_000, 0, is_first=False) is None, "the account is in debt"
    made = costs(0)
    for number in range(30):
        (made.wait("", 1000, 10_000_000, 0, is_first=number == 0) or first).dropped()
    second = made.wait("", 1000, 10_000_000, 0, lost_ns=99_000_000, is_first=False)
    assert second is not None
    assert second.until_ns == 1_000_000, "no more than computing in all"


def test_what_was_told_is_waited_for_as_if_it_saved_two_seconds_at_most() -> None:
    made = costs(0)
    made.opened(m.SessionOpen(1, (1,), compute_ns_per_token=10**8))
    wait = made.wait("", 8192, 1_000_000, 0)
    assert wait is not None
    assert wait.until_ns <= 1_100_000_000, "half of two seconds, and 4 %"
    made.reported(made.compute.planned(1000, 0), 10**8 * 1000)
    wait = made.wait("", 8192, 1_000_000, 0)
    assert wait is not None
    assert wait.until_ns > 10**11, "it has measured that itself"


# ── what other engines measured ──────────────────────────────────────────────────────────────────


def test_a_session_begins_with_what_the_node_knows() -> None:
    node = AnsweredCore()
    node.attach()
    assert node.core.costs.compute.ns_per_token == 10_000, "a quick one, until it is known"
    node.give(
        m.SessionOpen(
            session=2, shard_counts=(1,), compute_ns_per_token=77_000, load_ns_per_token=900
        )
    )
    assert node.core.costs.compute.ns_per_token == 77_000
    assert node.core.costs.load.ns_per_token == 900
    step(node, ns_per_token=50_000)
    assert node.core.costs.compute.ns_per_token == 50_000, "its own measurement outranks it"
    node.give(m.SessionOpen(session=3, shard_counts=(1,)))
    assert node.core.costs.load.ns_per_token == 900, "nothing new is no news"


def test_absurd_words_of_the_node_are_moved_into_bounds() -> None:
    node = AnsweredCore()
    node.attach()
    for told, expected in ((1, COMPUTE_NS_MIN), (2**62, COMPUTE_NS_MAX)):
        node.give(m.SessionOpen(session=2, shard_counts=(1,), compute_ns_per_token=told))
        assert node.core.costs.compute.ns_per_token == expected


def test_the_node_is_told_at_the_start_and_rarely_afterwards() -> None:
    node = attached()
    assert node.of(m.Measured) == []
    step(node, ns_per_token=50_000)
    node.core.reported(report(4, 700), node.now_ns)
    node.exchange()
    assert node.of(m.Measured) == [m.Measured(50_000, 0)]
    for _ in range(2):
        node.core.reported(report(4, 700), node.now_ns)
    for _ in range(TELL_EVERY - 1):
        step(node, ns_per_token=50_000)
    node.exchange()
    assert len(node.of(m.Measured)) == 1
    step(node, ns_per_token=50_000)
    node.exchange()
    assert node.of(m.Measured)[1:] == [m.Measured(50_000, 700)]


# ── how long to wait for the node's word ─────────────────────────────────────────────────────────


def waited_ms(node: AnsweredCore, keys: list[bytes]) -> int:
    """Until a question that the node does not answer is given up."""
    node.core.new_request("slow", keys, prompt_tokens=10**6, now_ns=node.now_ns)
    for ms in range(2000):
        if node.match("slow") is not None:
            node.core.finished("slow")
            return ms
        node.wait(1)
    raise AssertionError("it waits on")


def test_the_node_is_waited_for_as_long_as_four_percent_of_computing() -> None:
    for ns_per_token, expected in ((10_000, 20), (1_000_000, 103), (10**7, 250)):
        node = attached(prefill_ns_per_token=ns_per_token)
        assert waited_ms(node, chain("p", 20)) == expected


def test_a_deadline_beyond_the_heartbeats_limit_is_kept() -> None:
    assert waited_ms(attached(lookup_deadline_ms=1000), chain("p", 20)) == 1000


def silent(**changes: Any) -> AnsweredCore:
    """A node that was heard of 251 ms ago."""
    node = attached(**changes)
    node.core.attachment.check_heartbeat(node.now_ns, node.now_ns)
    beat = node.now_ns
    node.wait(251)
    node.core.attachment.check_heartbeat(node.now_ns, beat)
    return node


def test_a_silent_node_is_asked_nothing() -> None:
    node, keys = silent(), chain("p", 20)
    assert waited_ms(node, keys) == 20
    node.wait(500)
    assert waited_ms(node, keys) == 0
    node.exchange()
    assert not node.of(m.LeaseAsk)

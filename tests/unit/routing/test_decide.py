"""Filter, score, choose: seconds, guards, receipts that replay."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from bench.routing.baselines import other_router
from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Match
from kvstore.routing.costs import terms
from kvstore.routing.decide import replay
from kvstore.routing.events import Ending, FirstToken, Joined, RequestEnded, Scraped
from kvstore.routing.features import TRUSTS, Case
from kvstore.routing.policy import PolicyCosts, PolicyName, RoutingPolicy, parse
from kvstore.routing.receipts import Receipt
from kvstore.routing.rows import Term
from kvstore.routing.values import (
    LoadSample,
    PrefixAnswer,
    PrefixTrust,
    RouteRequest,
)
from tests.unit.routing.fleets import (
    MS,
    S,
    answer,
    arrive,
    columns,
    core_of,
    explain,
    hbm,
    rejected,
    request,
    routed,
    spec,
)

COSTS = PolicyCosts(
    prefill_tokens_per_s=1000,
    attention_tokens=1e12,
    kv_bytes_per_token=1000,
    dram_bytes_per_s=1e7,
    file_bytes_per_s=1e6,
    network_bytes_per_s=2e6,
    base_s=0.0,
    stream_share=0.01,
)


def made(prompt: int = 1000, costs: PolicyCosts = COSTS, **given_: Any) -> dict[str, list[float]]:
    case = Case(prompt_tokens=prompt, output_tokens=0, number=0, seed=0)
    found, _ = terms(columns(**given_), RoutingPolicy(costs=costs), case)
    return {term.name.lower(): found[term].round(6).tolist() for term in Term}


def test_seconds_of_a_prefix_by_tier() -> None:
    found = made(
        hbm=[0, 500, 0, 0, 0],
        dram=[0, 0, 500, 0, 0],
        file=[0, 0, 0, 500, 0],
        remote=[0, 0, 0, 0, 500],
    )
    # Nothing: 1 s. hbm: free. dram: 500 kB at 10 MB/s. File: 0.5 s, no better than computing, and
    # dram of another node: 1 ms + 250 ms, and 50 ms from there to the engine.
    assert found["compute"][:3] == [1.0, 0.5, 0.5]
    assert found["load"][:3] == [0, 0, 0.05]
    assert found["compute"][3] + found["load"][3] == 1.0
    assert found["compute"][4] == 0.5
    assert found["load"][4] == pytest.approx(0.301)


def test_a_load_hides_behind_the_queue() -> None:
    assert made(dram=[500], queue_s=[0.04])["load"] == [pytest.approx(0.01)]
    assert made(dram=[500], queue_s=[1.0])["load"] == [0]


def test_trust_and_observed_hits_lower_the_prefix() -> None:
    stale = TRUSTS.index(PrefixTrust.STALE)
    assert made(hbm=[800, 800], trust=[0, stale])["compute"] == [0.2, 0.6]
    assert made(hbm=[800], hit_ratio=[0.5])["compute"] == [0.6]
    # 500 tokens are here, 400 more on another node.
    more = made(dram=[500, 500], remote=[900, 900], fetch_ratio=[0.5, 0])
    assert more["compute"] == [0.3, 0.5]
    assert more["load"] == [pytest.approx(0.05 + 0.001 + 0.1 + 0.02), 0.05]


def test_streams_slow_a_prefill_down() -> None:
    assert made(streams=[0, 20])["interference"] == [0, 0.2]


def test_a_hot_worker_loses_its_credit_for_this_request_alone() -> None:
    hot: dict[str, Any] = {"hbm": [900, 0, 0, 0], "queue_s": [60, 0, 0, 0]}
    assert made(**hot)["compute"][0] == 1.0
    # A prompt that takes longer to compute than the hot worker's queue keeps the credit.
    long = made(prompt=100_000, **{**hot, "hbm": [90_000, 0, 0, 0]})
    assert long["compute"][0] == pytest.approx(10.0)


def test_the_longest_prefix_wins_until_its_queue_costs_more() -> None:
    core = core_of(spec(0), spec(1))
    counts = Counter(
        routed(arrive(core, request(f"r{n}", 4096), answer(hbm(1, 200)))).worker for n in range(12)
    )
    assert counts["w1"] > counts["w0"] > 0


def test_among_idle_equals_the_one_that_rested_longest_is_next() -> None:
    core = core_of(*(spec(n) for n in range(4)), policy=parse({"choice": {"top_k": 1}}))
    order = []
    for n in range(8):
        order.append(routed(arrive(core, request(f"r{n}", 16), now_ns=(n + 1) * 20 * S)).worker)
        core.step(RequestEnded(f"r{n}", Ending.DONE), (n + 1) * 20 * S)
    assert len(set(order[:4])) == 4
    assert order[:4] == order[4:]


def test_only_near_equals_are_chosen_by_seed() -> None:
    def chosen(seed: int, blocks: int) -> str:
        core = core_of(spec(0), spec(1), seed=seed)
        prefix = answer(hbm(0, 100), hbm(1, blocks))
        return routed(arrive(core, request("r", 4096), prefix)).worker

    assert {chosen(seed, 100) for seed in range(12)} == {"w0", "w1"}
    assert {chosen(seed, 0) for seed in range(12)} == {"w0"}
    assert chosen(3, 100) == chosen(3, 100)


def test_a_subset_is_kept_to_by_name_and_by_address() -> None:
    core = core_of(spec(0), spec(1), spec(2))
    for n in range(6):
        assert routed(arrive(core, request(f"a{n}", subset=("w1",)))).worker == "w1"
        assert routed(arrive(core, request(f"b{n}", subset=("10.0.0.2:80",)))).worker == "w2"
    assert rejected(arrive(core, request("c", subset=()))).status == 503


def test_red_parity_means_load_only() -> None:
    core = core_of(spec(0), spec(1))
    core.step(Joined(spec(0, is_red=True)), S)
    receipt = routed(arrive(core, request("r"), answer(hbm(0, 256), hbm(1, 10)))).draft.receipt()
    assert receipt.chosen == "w1"
    assert receipt.features["hbm"] == [0, 160]


def test_of_a_worker_that_the_index_does_not_follow_counts_what_was_sent_there() -> None:
    core = core_of(spec(0), spec(1, node="", engine=""))
    for worker in ("w0", "w1"):
        routed(arrive(core, request(worker, prefix="x", subset=(worker,)), answer()))
        core.step(RequestEnded(worker, Ending.DONE), S)
    later = arrive(core, request("r", prefix="x"), answer(), now_ns=60 * S)
    receipt = routed(later).draft.receipt()
    assert receipt.features["hbm"] == [0, 4095], "the index knows what is at w0: nothing"


def test_a_worker_may_be_load_only_for_one_request() -> None:
    core = core_of(spec(0), spec(1))
    found = answer(hbm(0, 256), hbm(1, 10))
    asked = msgspec.structs.replace(request("r"), load_only={"w0": "other weights", "gone": "x"})
    receipt = routed(arrive(core, asked, found)).draft.receipt()
    assert (receipt.chosen, receipt.features["hbm"]) == ("w1", [0, 160])
    assert receipt.load_only["w0"] == "other weights"
    receipt = routed(arrive(core, request("s"), found)).draft.receipt()
    assert receipt.features["hbm"] == [4095, 160]


def test_stale_numbers_decay_to_the_mean_of_the_pool() -> None:
    core = core_of(spec(0), spec(1), spec(2))
    core.step(Scraped("w0", LoadSample(waiting=40, running=40), 1 * S), 1 * S)
    for n in (1, 2):
        core.step(Scraped(f"w{n}", LoadSample(waiting=4, running=4), 100 * S), 100 * S)

    def queued(now_ns: int) -> float:
        return explain(core, request("x"), None, now_ns).features["queued"][0]

    assert queued(2 * S) == 40
    assert queued(101 * S) == pytest.approx(4, abs=0.01)
    assert 10 < queued(5 * S) < 40  # nobody else was fresh then: nothing is known of them


def test_a_number_that_is_not_said_is_not_0_and_what_was_known_decays() -> None:
    core = core_of(spec(0), spec(1))
    core.step(Scraped("w0", LoadSample(waiting=40, running=40), 1 * S), 1 * S)
    for second in range(2, 100):
        core.step(Scraped("w0", LoadSample(running=40, adapters=("a",)), second * S), second * S)
        core.step(Scraped("w1", LoadSample(waiting=4, running=4), second * S), second * S)

    def queued(now_ns: int) -> float:
        return explain(core, request("x"), None, now_ns).features["queued"][0]

    assert queued(2 * S) == 40
    assert queued(99 * S) == pytest.approx(4, abs=0.01)


def test_dram_of_another_node_counts_for_everybody_with_a_node() -> None:
    core = core_of(spec(0), spec(1), spec(2, node="", engine=""))
    receipt = explain(
        core,
        request("x"),
        answer(Match(Holder("n0"), 0, 100), Match(Holder("n1"), 0, 40)),
        S,
    )
    assert receipt.features["dram"] == [1600, 640, 0]
    assert receipt.features["remote"] == [640, 1600, 0]


def test_a_node_without_peers_neither_serves_nor_fetches() -> None:
    core = core_of(spec(0), spec(1), spec(2))
    matches = [Match(Holder("n0"), 0, 100), Match(Holder("n1"), 0, 40)]

    def remote(*peers: str) -> list[float]:
        found = PrefixAnswer(Trust.EXACT, matches, peers=frozenset(peers))
        receipt = explain(core, request("x"), found, S)
        assert receipt.features["dram"] == [1600, 640, 0]
        return receipt.features["remote"]

    assert remote() == [0, 0, 0]
    assert remote("n0", "n1") == [640, 1600, 0]
    assert remote("n1", "n2") == [0, 0, 640]


def test_without_an_answer_the_own_tree_is_used_and_said() -> None:
    core = core_of(spec(0), spec(1))
    first = routed(arrive(core, request("a", prefix="x")))
    again = routed(arrive(core, request("b", prefix="x"), now_ns=30 * S))
    assert again.worker == first.worker
    assert again.draft.plain.index_trust == "none"
    assert "prefix-approximate" in again.draft.plain.degraded


def test_a_prompt_that_nobody_has_is_degraded_only_if_something_is() -> None:
    core = core_of(spec(0))

    def degraded(its: RouteRequest, prefix: PrefixAnswer | None) -> list[str]:
        return list(explain(core, its, prefix, S).degraded)

    assert degraded(request("a", 1), None) == degraded(request("a", 1), answer()) == []
    assert degraded(request("a", 16), None) == [], "its last token is computed in any case"
    assert degraded(request("a", 17), None) == ["prefix-approximate"]
    assert degraded(request("a"), answer()) == []
    assert degraded(request("a"), answer(trust=Trust.STALE)) == ["prefix-stale"]
    assert explain(core, request("a"), answer(trust=Trust.STALE), S).index_trust == "stale"
    assert degraded(request("a", keys=b""), None) == ["load-only"], "not rendered"
    assert degraded(request("a", load_only={"w0": "other keys"}), answer()) == ["load-only"]
    core.step(Joined(spec(0, is_red=True)), S)
    assert degraded(request("a"), answer()) == ["load-only"]
    stranger = core_of(spec(0, node="", engine=""))
    assert explain(stranger, request("a"), answer(), S).degraded == ("prefix-approximate",)


@pytest.mark.parametrize("is_of_bytes", [False, True])
def test_a_receipt_says_whether_its_tokens_are_estimated(is_of_bytes: bool) -> None:
    core = core_of(spec(0))
    sent = routed(arrive(core, request("a", text_bytes=int(is_of_bytes))))
    assert sent.draft.plain.prompt_is_estimated is is_of_bytes


def test_a_receipt_has_the_tokens_that_were_expected_to_be_cached() -> None:
    core = core_of(*(spec(n) for n in range(3)))
    found = answer(hbm(0, 100), hbm(1, 100, Trust.STALE))
    receipt = explain(core, request("a"), found, S)
    assert receipt.cached == [1600.0, 800.0, 0.0]
    least = replay(receipt, parse({"policy": "least-load"}))
    assert least.cached == receipt.cached


def test_blocks_that_were_just_sent_count_beside_the_index() -> None:
    core = core_of(*(spec(n) for n in range(4)))
    first = routed(arrive(core, request("a", 30_000, prefix="x"), answer()))
    again = routed(arrive(core, request("b", 30_000, prefix="x"), answer(), S + 100 * MS))
    assert again.worker == first.worker
    later = explain(core, request("c", 30_000, prefix="x"), answer(), 60 * S)
    assert max(later.features["hbm"]) == 0


policies = st.sampled_from(get_args(PolicyName))


@settings(max_examples=30)
@given(
    policies,
    policies,
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2000), st.integers(0, 120)), max_size=12),
    st.integers(0, 50),
)
def test_a_receipt_replays_its_own_decision(
    name: Any, other: Any, sent: list[tuple[int, int, int]], seed: int
) -> None:
    policy = RoutingPolicy(policy=name)
    core = core_of(*(spec(n) for n in range(4)), policy=policy, seed=seed)
    for number, (worker, tokens, blocks) in enumerate([*sent, (0, 3000, 100)]):
        its = request(f"r{number}", tokens * 16, prefix=f"p{worker}", session=f"s{worker}")
        command = arrive(core, its, answer(hbm(worker, min(blocks, tokens))), S + number * MS)
        receipt = routed(command).draft.receipt()
        decoded = msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt)
        assert decoded == receipt
        assert replay(decoded, policy) == receipt
        changed = replay(decoded, RoutingPolicy(policy=other))
        assert changed.policy == other
        assert changed.chosen in receipt.workers
        if number % 3 == 0:
            core.step(FirstToken(f"r{number}"), S + (number + 300) * MS)


def test_a_replay_under_another_policy_decides_otherwise() -> None:
    core = core_of(spec(0), spec(1))
    for n in range(3):
        routed(arrive(core, request(f"r{n}", 4000, subset=("w0",))))
    receipt = routed(arrive(core, request("x", 16_000), answer(hbm(0, 900)))).draft.receipt()
    assert receipt.chosen == "w0"
    assert replay(receipt, parse({"policy": "least-load"})).chosen == "w1"
    fast = parse({"costs": {"prefill_tokens_per_s": 1e9, "attention_tokens": 1e9}})
    assert replay(receipt, fast).chosen == "w1", "no prefix is worth a queue"


def test_round_robin_takes_turns() -> None:
    core = core_of(*(spec(n) for n in range(4)), policy=RoutingPolicy(policy="round-robin"))
    turns = [routed(arrive(core, request(f"r{n}"))).worker for n in range(8)]
    assert len(set(turns[:4])) == 4
    assert turns[:4] == turns[4:]


def test_a_session_leaves_a_worker_with_more_than_its_share() -> None:
    core = core_of(*(spec(n) for n in range(4)), policy=RoutingPolicy(policy="session"))
    counts = Counter(
        routed(arrive(core, request(f"s{n}", 160, session="one"))).worker for n in range(40)
    )
    assert max(counts.values()) <= 14


def test_the_weights_of_other_routers() -> None:
    core = core_of(spec(0), spec(1), policy=other_router("weighted"))
    receipt = explain(core, request("x", 1600), answer(hbm(1, 50)), S)
    assert receipt.terms["prefix"] == [0, -50]
    assert receipt.terms["load"] == [-50, -50]
    assert receipt.terms["memory"] == [-30, -30]


def test_a_column_that_an_older_receipt_does_not_have_changes_nothing() -> None:
    costs = {"prefill_tokens_per_s": 1000, "kv_bytes_per_token": 1000}
    policy = parse({"costs": costs, "choice": {"top_k": 1}})
    core = core_of(spec(0), spec(1), policy=policy)
    prefix = answer(Match(Holder("n9"), dram_blocks=200))
    now = routed(arrive(core, request("r"), prefix)).draft.receipt()
    assert max(now.features["remote"]) > 0
    older = {k: v for k, v in now.features.items() if k not in ("fetch_ratio", "stays")}
    again = replay(msgspec.structs.replace(now, features=older), policy)
    assert (again.terms, again.scores) == (now.terms, now.scores)


def test_a_burst_of_short_prompts_is_spread_evenly() -> None:
    """Their costs differ by less than what counts as equal, whoever computes how many of them."""
    core = core_of(spec(0), spec(1))
    for burst in range(20):
        names = [f"{burst} {n}" for n in range(8)]
        sent = [routed(arrive(core, request(name, 16, is_streamed=False))) for name in names]
        assert Counter(each.worker for each in sent) == {"w0": 4, "w1": 4}
        for name in names:
            core.step(RequestEnded(name, Ending.DONE), S)

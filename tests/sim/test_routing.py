"""The router's core in the simulated fleet: small runs of the quality benchmark, with bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from bench.routing.baselines import other_router
from bench.routing.bounds import mean_alone_s
from bench.routing.disaggregated import attained
from bench.routing.drive import CoreChooser, figures, run
from bench.routing.engine import BLOCK_TOKENS, EngineModel, Job, SimulatedEngine
from bench.routing.overload import SHARES, WORKERS, trace as overload_trace, within
from bench.routing.traces import RouterTrace, low_sharing, shared_prefix, shifting_mix, tool_agents
from kvstore.routing.policy import PolicyCosts, PolicyPlanner, PolicySplit, RoutingPolicy
from tests.kit.routing_check import check

MODEL = EngineModel()
COSTS = PolicyCosts(
    prefill_tokens_per_s=MODEL.tokens_per_s, attention_tokens=MODEL.attention_tokens
)

PLAIN = other_router("prefix-load")
LARGE = msgspec.structs.replace(MODEL, cache_blocks=100_000)


def measured(its: RouterTrace, name: Any, *, model: EngineModel = MODEL, workers: int = 4) -> Any:
    policy = PLAIN if name == "prefix-load" else RoutingPolicy(policy=name, costs=COSTS)
    chooser = CoreChooser(policy, model, workers, seed=1)
    jobs = run(its, chooser, model, workers=workers)
    check(chooser.core)
    assert not chooser.core.open
    return figures(jobs)


def job(number: int, tokens: int, output: int, blocks: tuple[int, ...] = ()) -> Job:
    return Job(number, 0.0, tokens, output, blocks)


def test_an_engine_takes_the_time_of_its_model() -> None:
    model = EngineModel(tokens_per_s=1000, attention_tokens=1e12, step_s=0.01, stream_s=0.001)
    engine = SimulatedEngine(model)
    engine.submit(job(0, 3000, 11), 0.0)
    assert engine.until_s == pytest.approx(0.01 + 2.048)
    engine.advance(engine.until_s)
    firsts, _ = engine.advance(engine.until_s)
    assert [each.first_s for each in firsts] == [pytest.approx(3.02)]
    _, ends = engine.advance(engine.until_s)
    assert [each.end_s for each in ends] == [pytest.approx(3.02 + 10 * 0.011)]
    assert not engine.is_busy
    engine.check()


def test_an_engine_hits_what_it_computed_and_evicts_the_oldest() -> None:
    engine = SimulatedEngine(msgspec.structs.replace(MODEL, cache_blocks=10))

    def serve(number: int, blocks: tuple[int, ...]) -> int:
        its = job(number, len(blocks) * BLOCK_TOKENS + 10, 1, blocks)
        engine.submit(its, 0.0)
        while engine.is_busy:
            engine.advance(engine.until_s)
            engine.check()
        return its.cached_tokens // BLOCK_TOKENS

    assert serve(0, (1, 2, 3, 4)) == 0
    assert serve(1, (1, 2, 3, 4)) == 4
    assert serve(2, (1, 2, 7, 8)) == 2
    assert serve(3, (20, 21, 22, 23)) == 0
    assert engine.hit_blocks((1, 2, 3, 4)) == 3  # the end of the older chain left first


def test_prefixes_are_found_and_load_is_spread() -> None:
    its = tool_agents(5, requests=500, rate=12.0)
    cost, blind, plain = (measured(its, name) for name in ("cost", "least-load", "prefix-load"))
    assert cost["ttft_mean_s"] < 0.8 * blind["ttft_mean_s"]
    assert cost["ttft_mean_s"] < plain["ttft_mean_s"]
    assert cost["hit_tokens"] > 1.2 * blind["hit_tokens"]
    assert cost["goodput"] >= blind["goodput"] + 0.05
    assert cost["goodput"] >= plain["goodput"] - 0.01


def test_with_little_sharing_it_is_no_worse_than_round_robin() -> None:
    for seed in range(3):
        its = low_sharing(seed, requests=500, rate=10.0)
        cost, turns = measured(its, "cost"), measured(its, "round-robin")
        assert cost["ttft_mean_s"] <= turns["ttft_mean_s"]
        assert cost["ttft_p99_s"] <= turns["ttft_p99_s"]


def test_a_hot_prefix_does_not_take_one_worker_down() -> None:
    its = shared_prefix(2, groups=1, requests=500, rate=60.0, output_tokens=50)
    cost, turns = measured(its, "cost"), measured(its, "round-robin")
    assert cost["ttft_p99_s"] <= 1.1 * turns["ttft_p99_s"]


def test_tiers_beside_the_engine_are_worth_their_seconds() -> None:
    its = shared_prefix(2, groups=120, requests=400, rate=20.0, output_tokens=50)
    small = msgspec.structs.replace(MODEL, cache_blocks=200)
    deep = msgspec.structs.replace(small, dram_blocks=4000)
    assert (
        measured(its, "cost", model=deep)["ttft_mean_s"]
        < (measured(its, "cost", model=small)["ttft_mean_s"])
    )


def test_at_one_and_a_half_times_capacity_inline_keeps_its_objective() -> None:
    its = overload_trace(MODEL, 2, requests=600)
    classes = RoutingPolicy().classes
    inline = msgspec.structs.replace(classes["inline"], tenants=("*",))
    policy = RoutingPolicy(costs=COSTS, classes={**classes, "inline": inline})
    chooser = CoreChooser(policy, MODEL, WORKERS, seed=1)
    jobs = run(its, chooser, MODEL, workers=WORKERS)
    check(chooser.core)
    shares = {service: within(jobs, service) for service in SHARES}
    assert shares["inline"] >= 0.95
    assert shares["inline"] > shares["batch"]


def test_a_30k_prompt_ahead_raises_the_ttft_of_short_ones_little() -> None:
    def short_p99(long_every: int) -> float:
        jobs = []
        for number in range(600):
            is_long = bool(long_every) and number % long_every == 0
            tokens = 30_000 if is_long else 400
            jobs.append(Job(number, number * 0.05, tokens, 20, ()))
        its = RouterTrace("short and long", tuple(jobs))
        policy = RoutingPolicy(costs=COSTS)
        chooser = CoreChooser(policy, MODEL, 4, seed=1, prefillers=2)
        done = run(its, chooser, MODEL, workers=4)
        return float(np.percentile([j.ttft_s for j in done if j.prompt_tokens == 400], 99))

    assert short_p99(60) <= 1.2 * short_p99(0)


def test_prefill_apart_from_decode_keeps_tight_objectives_longer() -> None:
    together = attained(MODEL, COSTS, rate=12.0, prefillers=0, requests=250)
    apart = attained(MODEL, COSTS, rate=12.0, prefillers=2, requests=250)
    assert apart > together + 0.2


def test_no_policy_beats_the_bound_and_one_alone_reaches_it() -> None:
    its = tool_agents(1, requests=200)
    bound_s = mean_alone_s(its, MODEL, None)
    assert bound_s < mean_alone_s(its, MODEL, 100)
    for name in ("cost", "prefix-load"):
        assert measured(its, name)["ttft_mean_s"] > bound_s
    slowly = its.at_speed(0.001)
    assert measured(slowly, "cost", workers=1, model=LARGE)["ttft_mean_s"] == pytest.approx(
        bound_s, rel=0.001
    )


def test_roles_that_follow_the_mix_beat_either_fixed_split() -> None:
    """Long prompts with short answers, then short prompts with long answers."""
    its = shifting_mix(3, phases=[(30.0, 8.0, 6000, 60), (30.0, 18.0, 600, 800)])
    ttft_s, itl_s = 2.0, 0.012
    planner = PolicyPlanner(is_on=True, streams_max=90, cooldown_s=5, ttft_s=ttft_s, itl_s=itl_s)
    policy = RoutingPolicy(costs=COSTS, split=PolicySplit(is_learned=False), planner=planner)
    goodput, changes = {}, 0
    for prefillers in (1, 3, None):
        chooser = CoreChooser(policy, MODEL, 4, seed=1, prefillers=prefillers)
        jobs = run(its, chooser, MODEL, workers=4)
        check(chooser.core)
        assert all(each.status == 200 for each in jobs), "no request fails"
        goodput[prefillers] = figures(jobs, ttft_s=ttft_s, itl_s=itl_s)["goodput"]
        changes = sum(chooser.core.planner.changes.values())
    assert goodput[None] >= max(goodput[1], goodput[3]), goodput
    assert 3 <= changes <= 6

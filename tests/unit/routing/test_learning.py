"""Weights from predicted and achieved seconds, and lengths of answers: bounded, apart, frozen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvstore.routing.core import RouterCore
from kvstore.routing.events import Ending, FirstToken, Joined, RequestEnded, WorkerLeft
from kvstore.routing.learning import LEAST, MOST, OutputLengths, learn_weights, smoothed_ratio
from kvstore.routing.policy import parse
from kvstore.routing.rows import LEARNED, WEIGHTS
from tests.kit.routing_check import check
from tests.unit.routing.fleets import S, arrive, core_of, request, routed, spec


def weights_of(core: RouterCore, worker: str) -> list[float]:
    found: list[float] = core.fleet.columns[WEIGHTS, core.fleet.row_of[worker]].tolist()
    return found


def test_a_slow_worker_is_learned_and_the_others_are_not_touched() -> None:
    weights = np.ones((LEARNED, 2))
    random = np.random.default_rng(1)
    for _ in range(800):
        raw = np.abs(random.normal(0.3, 0.2, LEARNED))
        learn_weights(weights[:, 0], raw, float(raw.sum()) * 2)
    raw = np.full(LEARNED, 0.3)
    assert float(raw @ weights[:, 0]) == pytest.approx(2 * raw.sum(), rel=0.1)
    assert (weights[:, 1] == 1).all()


def test_a_new_worker_starts_with_the_mean_and_the_others_keep_theirs() -> None:
    core = core_of(spec(0), spec(1))
    for n in range(20):
        sent = routed(arrive(core, request(f"r{n}"), now_ns=100 * n * S))
        core.step(FirstToken(f"r{n}"), (100 * n + 60 * (sent.worker == "w1")) * S)
    before = {name: weights_of(core, name) for name in ("w0", "w1")}
    assert max(before["w0"]) < max(before["w1"])
    core.step(Joined(spec(2)), 2000 * S)
    assert weights_of(core, "w2") == pytest.approx(np.mean([*before.values()], axis=0))
    core.step(WorkerLeft("w0"), 2001 * S)
    assert weights_of(core, "w1") == before["w1"]
    core.step(Joined(spec(0)), 2002 * S)
    assert weights_of(core, "w0") != before["w0"], "what it was is forgotten"
    check(core)


def test_a_decision_goes_by_the_weights_of_its_workers() -> None:
    core = core_of(spec(0), spec(1))
    core.fleet.columns[WEIGHTS, core.fleet.row_of["w0"]] = 2.0
    for n in range(8):
        receipt = routed(arrive(core, request(f"r{n}"))).draft.receipt()
        core.step(RequestEnded(f"r{n}", Ending.ABORTED), S)
        assert receipt.chosen == "w1"
        columns = dict(zip(receipt.workers, zip(*receipt.weights, strict=True), strict=True))
        assert columns == {"w0": (2.0,) * LEARNED, "w1": (1.0,) * LEARNED}


def test_frozen_weights_stay() -> None:
    for is_frozen in (True, False):
        core = core_of(spec(0), policy=parse({"learning": {"is_frozen": is_frozen}}))
        routed(arrive(core, request("r")))
        core.step(FirstToken("r"), 60 * S)
        assert (weights_of(core, "w0") == [1.0] * LEARNED) is is_frozen


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 100), min_size=LEARNED, max_size=LEARNED), st.floats(0, 1e6)
        ),
        max_size=100,
    )
)
def test_weights_stay_in_bounds(steps: list[tuple[list[float], float]]) -> None:
    weights = np.ones(LEARNED)
    for raw, achieved_s in steps:
        learn_weights(weights, np.array(raw), achieved_s)
        assert LEAST <= weights.min() <= weights.max() <= MOST


def test_one_wild_time_moves_little() -> None:
    weights = np.ones(LEARNED)
    learn_weights(weights, np.full(LEARNED, 0.1), 3600.0)
    assert 1 < weights.max() < 1.1


def test_the_ratio_of_hits_is_smoothed() -> None:
    ratio = 1.0
    for _ in range(100):
        ratio = smoothed_ratio(ratio, 1000, 0)
    assert ratio < 0.01
    assert smoothed_ratio(0.5, 0, 0) == 0.5
    assert smoothed_ratio(1.0, 100, 1e6) == 1.0
    assert smoothed_ratio(1.0, 100, 0) > smoothed_ratio(1.0, 1000, 0) == 0.95


def test_a_worker_that_left_before_its_first_token_is_forgotten() -> None:
    core = core_of(spec(0), spec(1))
    gone = routed(arrive(core, request("r"))).worker
    core.step(WorkerLeft(gone), S)
    core.step(FirstToken("r"), 2 * S)
    [left] = core.fleet.row_of
    assert weights_of(core, left) == [1.0] * LEARNED
    check(core)


# ── lengths of answers ───────────────────────────────────────────────────────────────────────────


def test_what_an_answer_will_need_is_learned_by_model_and_bounded_by_its_client() -> None:
    lengths = OutputLengths()
    assert lengths.expected("m", None) == 256
    for _ in range(200):
        lengths.learn("m", 1000)
    assert lengths.expected("m", None) == pytest.approx(1000, rel=0.01)
    assert lengths.expected("m", 50) == 50
    assert lengths.expected("m", 10**400) == lengths.expected("m", None)
    assert lengths.expected("other", None) == 256
    lengths.learn("m", 10**400)
    assert lengths.expected("m", None) < 100_000, "one wild length moves little"


def test_lengths_of_many_models_are_bounded() -> None:
    lengths = OutputLengths()
    for n in range(3000):
        lengths.learn("busy", 1000)
        lengths.learn(f"m{n}", 1000)
    assert len(lengths._means) == 1000
    assert lengths.expected("busy", None) == pytest.approx(1000, rel=0.01)
    assert lengths.expected("m2999", None) > lengths.expected("m0", None) == 256


def needs(core: RouterCore, name: str, **more: Any) -> int:
    """Tokens of KV cache that a request is counted with."""
    sent = routed(arrive(core, request(name, 1600, **more)))
    [*_, flight] = core.fleet.flights
    need = flight.tokens
    assert sent.draft.plain.output_tokens == need - 1600
    return need - 1600


def test_the_need_of_a_request_follows_the_answers_before_it() -> None:
    core = core_of(spec(0))
    assert needs(core, "a") == 256
    for n in range(100):
        arrive(core, request(f"r{n}", 16))
        core.step(RequestEnded(f"r{n}", Ending.DONE, None, 20), S)
    assert needs(core, "b") == pytest.approx(20, abs=2)
    assert needs(core, "c", output_tokens_max=5) == 5
    assert needs(core, "d", output_tokens_max=100_000) == pytest.approx(20, abs=2)
    assert needs(core, "e", output_tokens_max=0) == 0


@pytest.mark.parametrize("end", [Ending.ABORTED, Ending.REFUSED, Ending.FAILED])
def test_an_answer_that_was_cut_off_says_nothing_about_lengths(end: Ending) -> None:
    core = core_of(spec(0))
    arrive(core, request("r"))
    core.step(RequestEnded("r", end, None, 4), S)
    arrive(core, request("unknown"))
    core.step(RequestEnded("unknown", Ending.DONE), S)
    assert needs(core, "x") == 256

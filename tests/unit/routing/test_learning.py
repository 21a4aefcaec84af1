"""Weights from predicted and achieved seconds: bounded, by worker, frozen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvstore.routing.costs import LEARNED
from kvstore.routing.events import FirstToken, WorkerLeft
from kvstore.routing.learning import TermWeights, smoothed_ratio
from kvstore.routing.policy import PolicyLearning
from tests.unit.routing.fleets import S, arrive, core_of, request, routed, spec


def test_a_slow_worker_is_learned_and_the_others_are_not_touched() -> None:
    weights = TermWeights(PolicyLearning())
    weights.of(["w1"])
    random = np.random.default_rng(1)
    for _ in range(800):
        raw = np.abs(random.normal(0.3, 0.2, LEARNED))
        weights.learn("w0", raw, float(raw.sum()) * 2)
    raw = np.full(LEARNED, 0.3)
    assert float(raw @ weights.of(["w0"])[:, 0]) == pytest.approx(2 * raw.sum(), rel=0.1)
    assert (weights.of(["w1"])[:, 0] == 1).all()
    weights.check()


def test_a_new_worker_starts_with_the_mean() -> None:
    weights = TermWeights(PolicyLearning())
    weights.restore({"a": [2.0] * LEARNED, "b": [3.0] * LEARNED, "bad": [1.0]})
    assert weights.of(["c"])[:, 0].tolist() == [2.5] * LEARNED
    assert weights.snapshot()["a"] == [2.0] * LEARNED


def test_frozen_weights_stay() -> None:
    weights = TermWeights(PolicyLearning(is_frozen=True))
    error = weights.learn("w0", np.ones(LEARNED), 60.0)
    assert error == pytest.approx(9.0)
    assert (weights.of(["w0"]) == 1).all()


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 100), min_size=LEARNED, max_size=LEARNED), st.floats(0, 1e6)
        ),
        max_size=30,
    )
)
def test_weights_stay_in_bounds(steps: list[tuple[list[float], float]]) -> None:
    weights = TermWeights(PolicyLearning(rate=1.0))
    for raw, achieved_s in steps:
        weights.learn("w0", np.array(raw), achieved_s)
        weights.check()


def test_one_wild_time_moves_little() -> None:
    weights = TermWeights(PolicyLearning())
    weights.learn("w0", np.full(LEARNED, 0.1), 3600.0)
    assert weights.of(["w0"]).max() < 1.1


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
    assert gone not in core.placer.weights.snapshot()

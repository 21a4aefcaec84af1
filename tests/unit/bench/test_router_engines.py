"""Figures of `make bench-router-engines`, of runs that are made up."""

from __future__ import annotations

from bench.scenarios.router_engines import as_result
from kvstore.demo.engine import Completion
from kvstore.demo.stage import Replay


def run(name: str, ttft_s: float, later_s: float, *, token: int = 1) -> Replay:
    def answer(at: int) -> Completion:
        return Completion(
            tokens=(token,),
            prompt_tokens=100,
            cached_tokens=10 * at,
            ttft_s=later_s if at else ttft_s,
            duration_s=9.0,
            token_s=(later_s,),
        )

    answers = {(user, at): answer(at) for user in range(2) for at in range(3)}
    return Replay(name=name, answers=answers)


def test_ratios_are_of_means_over_all_rounds_and_from_the_second_on() -> None:
    found = as_result([run("round robin", 3.0, 3.0), run("kvstore router", 3.0, 0.75)])
    assert found["mean_ttft_over_round_robin"] == 0.5
    assert found["mean_ttft_over_round_robin_rounds_2_on"] == 0.25
    assert (found["answers"], found["answers_different"]) == (6, 0)
    assert found["cached_tokens"]["kvstore router"] == 60

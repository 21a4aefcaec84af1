"""What a run of vLLM on a GPU is worth: right, wrong, or nothing measured."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import smi
from bench.gpu.stop import Stop
from bench.gpu.vllm import pack, run
from bench.gpu.vllm.run import LATE, NOTHING, OK, UNFINISHED, WRONG, judge


def row(tokens: list[int], cached: int, ttft_s: float) -> dict[str, Any]:
    return {"tokens": tokens, "cached": cached, "ttft_s": ttft_s}


def engine(*, cached: int, ttft_s: float) -> dict[str, Any]:
    """Two prompts; a hit computes other tokens than a full computation, as in bfloat16."""
    first = [[1, 2, 4], [5, 6, 8]] if cached else [[1, 2, 3], [5, 6, 7]]
    return {
        "first": [row(tokens, cached, ttft_s) for tokens in first],
        "again": [row([1, 2, 4], 64, 0.1), row([5, 6, 8], 64, 0.1)],
    }


@pytest.fixture
def found() -> dict[str, Any]:
    return {
        "plain": engine(cached=0, ttft_s=0.8),
        "store": engine(cached=0, ttft_s=0.88),
        "load": engine(cached=64, ttft_s=0.2),
    }


def test_a_run_with_all_tokens_and_hits_is_right(found: dict[str, Any]) -> None:
    verdict = judge(found)
    assert (verdict.code, verdict.reasons) == (OK, ())
    assert verdict.ratios["store_over_computed"] == pytest.approx(1.1)
    assert verdict.ratios["load_over_computed"] == pytest.approx(0.25)
    assert verdict.ratios["load_over_own_hit"] == pytest.approx(2)
    assert verdict.ratios["same_as_full_computation"] == 0


def _other_token(found: dict[str, Any], name: str, turn: str) -> None:
    found[name][turn][1]["tokens"] = [5, 6, 9]


def _cached(found: dict[str, Any], name: str, turn: str, tokens: int) -> None:
    found[name][turn][0]["cached"] = tokens


def _failed(found: dict[str, Any], name: str) -> None:
    found[name] = {"failed": "exit code 1: no kernel image"}


def _one_answer(found: dict[str, Any]) -> None:
    for name in found:
        found[name] = {
            turn: [{**each, "tokens": [7, 7, 7]} for each in found[name][turn]]
            for turn in ("first", "again")
        }


OTHER = "prompt 1 has other tokens than vLLM by itself"


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (lambda f: _other_token(f, "store", "first"), WRONG, OTHER),
        (lambda f: _other_token(f, "load", "again"), WRONG, OTHER),
        (lambda f: _cached(f, "load", "first", 48), WRONG, "load: prompt 0 found 48 of 64 tokens"),
        (lambda f: _cached(f, "store", "first", 64), WRONG, ""),
        (lambda f: f["load"]["again"].pop(), WRONG, "load, again: 1 of 2 prompts"),
        (lambda f: _failed(f, "load"), WRONG, "load: the engine did not end: exit code 1: no ker"),
        (lambda f: _failed(f, "plain"), NOTHING, "vLLM by itself did not run: exit code 1: no k"),
        (lambda f: f.update(plain={"first": [], "again": []}), NOTHING, ""),
        (_one_answer, NOTHING, ""),
        (lambda f: _cached(f, "plain", "again", 0), NOTHING, ""),
    ],
)
def test_a_run_is_wrong_or_measured_nothing(
    change: Callable[[dict[str, Any]], object], code: int, reason: str, found: dict[str, Any]
) -> None:
    change(found)
    verdict = judge(found)
    assert verdict.code == code
    assert any(reason in each for each in verdict.reasons), verdict.reasons


def test_an_engine_that_was_not_finished_in_time_is_not_wrong(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """What the others measured is kept."""
    late = {"failed": f"{LATE}: more than --seconds: loading"}
    verdict = judge({**found, "load": late, "device": "cuda"})
    assert verdict.code == UNFINISHED
    assert verdict.reasons == (f"load: {LATE}: more than --seconds: loading",)
    assert verdict.ratios["store_over_computed"] == pytest.approx(1.1)
    assert "load_over_computed" not in verdict.ratios
    run.say(verdict, {**found, "load": late, "device": "cuda"})
    assert "WRONG" not in capsys.readouterr().out
    found["store"]["first"][1]["tokens"] = [5, 6, 9]
    assert judge({**found, "load": late}).code == WRONG


def test_an_edit_that_finds_another_vllm_is_refused(tmp_path: Path) -> None:
    for name, (old, _) in pack.EDITS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# before\n{old}# behind\n")
    pack.edit(tmp_path)
    for name, (old, new) in pack.EDITS.items():
        assert (tmp_path / name).read_text() == f"# before\n{new}# behind\n"
        assert old not in new
    with pytest.raises(pack.PackError, match="look at EDITS"):
        pack.edit(tmp_path)


def test_a_run_that_is_stopped_ends_its_engine_and_begins_no_other(tmp_path: Path) -> None:
    stop = Stop()
    options = SimpleNamespace(device="cpu", seconds=30.0)
    runs: Any = run.Run(options, tmp_path, stop)  # type: ignore[arg-type]
    program = tmp_path / "engine.py"
    program.write_text("import threading; print('begun', flush=True); threading.Event().wait(60)")
    threading.Timer(0.3, setattr, (stop, "reason", "stopped by SIGTERM")).start()
    begin = time.monotonic()
    assert runs._python(program).startswith(f"{LATE}: stopped by SIGTERM")
    assert runs._python(program) == f"{LATE}: stopped by SIGTERM"
    assert time.monotonic() - begin < 15


def test_without_a_gpu_nothing_is_measured_and_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "describe_gpu", dict)
    monkeypatch.setattr(smi, "DRIVER", Path(os.devnull))
    out = tmp_path / "x.json"
    assert run.main(["--out", str(out)]) == NOTHING
    assert "nvidia-smi is not on the path or fails" in capsys.readouterr().out
    assert "nvidia-smi" in json.loads(out.read_text())["plain"]["failed"]
    assert run.main(["--out", str(out / "below")]) == NOTHING
    assert "cannot be written" in capsys.readouterr().err

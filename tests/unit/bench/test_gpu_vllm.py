"""What a run of vLLM on a GPU is worth: right, wrong, or nothing measured."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import smi
from bench.gpu.stop import Stop
from bench.gpu.vllm import compile as kernels, pack, run
from bench.gpu.vllm.engine import SEED, arguments, parsed, prompts
from bench.gpu.vllm.run import LATE, NOTHING, OK, UNFINISHED, WRONG, Verdict, judge


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


def without(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {**copy.deepcopy(found), name: {"failed": "exit code 1: no kernel image"}}


def test_a_run_with_all_tokens_and_hits_is_right(found: dict[str, Any]) -> None:
    verdict = judge(found)
    assert (verdict.code, verdict.reasons) == (OK, ())
    assert verdict.ratios["store_over_computed"] == pytest.approx(1.1)
    assert verdict.ratios["load_over_computed"] == pytest.approx(0.25)
    assert verdict.ratios["load_over_own_hit"] == pytest.approx(2)
    assert verdict.ratios["same_as_full_computation"] == 0


@pytest.mark.parametrize("name", ["store", "load"])
@pytest.mark.parametrize("turn", ["first", "again"])
def test_other_tokens_are_wrong(found: dict[str, Any], name: str, turn: str) -> None:
    found[name][turn][1]["tokens"] = [5, 6, 9]
    verdict = judge(found)
    assert verdict.code == WRONG
    assert "prompt 1 has other tokens than vLLM by itself" in verdict.reasons[0]


@pytest.mark.parametrize("cached", [0, 48])
def test_a_hit_that_is_missing_or_short_is_wrong(found: dict[str, Any], cached: int) -> None:
    found["load"]["first"][0]["cached"] = cached
    verdict = judge(found)
    assert verdict.code == WRONG
    assert verdict.reasons == (f"load: prompt 0 found {cached} of 64 tokens cached",)


def test_a_hit_where_nothing_was_stored_is_wrong(found: dict[str, Any]) -> None:
    found["store"]["first"][0]["cached"] = 64
    assert judge(found).code == WRONG


def test_a_prompt_that_is_missing_is_wrong(found: dict[str, Any]) -> None:
    del found["load"]["again"][1]
    assert judge(found).reasons == ("load, again: 1 of 2 prompts",)


@pytest.mark.parametrize("name", ["store", "load"])
def test_an_engine_that_fails_with_kvstore_only_is_wrong(found: dict[str, Any], name: str) -> None:
    verdict = judge(without(found, name))
    assert verdict.code == WRONG
    assert verdict.reasons == (
        f"{name}: the engine did not end: exit code 1: no kernel image",
    )  # fmt: skip


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


@pytest.mark.parametrize("nothing", [{}, {"plain": {"first": [], "again": []}}])
def test_without_vllm_by_itself_nothing_was_measured(nothing: dict[str, Any]) -> None:
    assert judge(nothing).code == NOTHING


def test_an_engine_that_fails_without_kvstore_measured_nothing(found: dict[str, Any]) -> None:
    assert judge(without(found, "plain")) == Verdict(
        NOTHING, ("vLLM by itself did not run: exit code 1: no kernel image",)
    )


def test_a_model_that_ignores_its_prompt_measured_nothing(found: dict[str, Any]) -> None:
    for name in found:
        found[name] = {
            turn: [{**each, "tokens": [7, 7, 7]} for each in found[name][turn]]
            for turn in ("first", "again")
        }
    assert judge(found).code == NOTHING


def test_without_a_prefix_cache_of_vllm_nothing_was_measured(found: dict[str, Any]) -> None:
    found["plain"]["again"][0]["cached"] = 0
    assert judge(found).code == NOTHING


@pytest.mark.parametrize(
    ("states", "code"), [([], 3), ([True, True], 0), ([True, False], 1)], ids=str
)
def test_one_kernel_that_does_not_compile_is_an_error(states: list[bool], code: int) -> None:
    assert kernels.verdict([{"ok": state} for state in states]) == code


def test_prompts_are_the_same_in_every_process_and_differ_from_each_other() -> None:
    some = prompts(3, 40)
    assert some == prompts(3, 40)
    assert len(set(map(tuple, some))) == 3
    assert prompts(2, 40) == some[:2]


def test_vllm_on_cuda_is_asked_for_nothing_compiled() -> None:
    on_cuda = arguments(parsed(["model", "out", "--device", "cuda"]))
    assert on_cuda["attention_config"] == {"backend": "TRITON_ATTN"}
    assert on_cuda["compilation_config"] == {"custom_ops": ["none"]}
    assert set(map(tuple, on_cuda["ir_op_priority"].values())) == {("native",)}
    assert on_cuda["max_model_len"] > 8000 + 24


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


def test_compiled_parts_stay_behind(tmp_path: Path) -> None:
    for name in ("a.py", "b.so", "static/c.js", "d/__pycache__/e.pyc", "d/static.py", "d/f.json"):
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).touch()
    pack.copy_engine(tmp_path / "from", tmp_path / "to")
    there = {str(each.relative_to(tmp_path / "to")) for each in (tmp_path / "to").rglob("*.*")}
    assert there == {"a.py", "d/static.py", "d/f.json"}


def test_a_machine_without_the_pack_is_named_what_to_bring(tmp_path: Path) -> None:
    with pytest.raises(pack.PackError, match="make gpu-vllm-pack"):
        pack.unpack(tmp_path, tmp_path / "into")


def test_a_run_and_a_rehearsal_and_no_result_share_no_file() -> None:
    kinds = [
        (device, code, is_complete)
        for device in ("cuda", "cpu", "virtual")
        for code in (OK, NOTHING)
        for is_complete in (True, False)
    ]
    names = {run.place(None, d, c, is_complete=i).name for d, c, i in kinds}
    assert len(names) == len(kinds)
    assert run.place(None, "cuda", WRONG, is_complete=True).name == "gpu_vllm.json"
    assert run.place(Path("x"), "cuda", NOTHING, is_complete=False) == Path("x")


def test_engines_without_a_gpu_have_longer() -> None:
    assert min(run.SECONDS["cpu"], run.SECONDS["virtual"]) > run.SECONDS["cuda"] == 420


def test_a_record_says_when_with_what_and_of_which_commit(
    found: dict[str, Any], tmp_path: Path
) -> None:
    out = run.write(tmp_path / "x.json", {**found, "device": "cuda"}, is_complete=False)
    written = json.loads(out.read_text())
    assert {"date", "packages", "commit"} <= written["environment"].keys()
    assert (written["is_complete"], written["code"]) == (False, OK)
    assert written["seed"] == SEED


def test_the_table_names_the_card_and_has_a_row_for_each_round(found: dict[str, Any]) -> None:
    lines = run.table({**found, "device": "cuda", "gpu": {"name": "NVIDIA H200"}}).splitlines()
    assert lines[0] == "NVIDIA H200"
    assert [line.split() for line in lines[2:]] == [
        ["plain", "0.800", "1.000", "0", "0"],
        ["plain,", "again", "0.100", "0.125", "64", "64"],
        ["store", "0.880", "1.100", "0", "0"],
        ["store,", "again", "0.100", "0.125", "64", "64"],
        ["load", "0.200", "0.250", "64", "64"],
        ["load,", "again", "0.100", "0.125", "64", "64"],
    ]
    assert run.table({**found, "device": "cpu"}).startswith("REHEARSAL: no GPU (cpu)")


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

"""The run on a GPU, without one: what it judges, what it says, and that no part stops another."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import record
from bench.gpu import contract, findings, goals, memcheck, pack, report, run, smi
from bench.gpu.report import Outcome
from bench.gpu.run import Part

GPU = {"name": "NVIDIA H100 80GB HBM3", "driver_version": "580.1"}
SHAPE = {"staged": {"store_ratio": 0.95, "load_ratio": 0.95, "both_ratio": 0.8, "wrong_cycles": 0}}
COPIES: dict[str, Any] = {
    "peak": {"load": 54.321},
    "shapes": dict.fromkeys((goals.RUNS, goals.PAGES, *"1234567"), SHAPE),
    "crossing": {"staged": {"wrong_cycles": 0}},
}
HBM: dict[str, Any] = {
    "failed": [],
    "loads": {"hbm_of_dram": 3.0, "wrong_blocks": 0},
    "checks": {"a": True},
}


def changed(found: Mapping[str, Any], *path: str, value: Any) -> dict[str, Any]:
    """A copy with another value there."""
    copy: dict[str, Any] = json.loads(json.dumps(found))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return copy


# ── goals ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        (("shapes", goals.PAGES, "staged", "store_ratio"), 0.79, "store_ratio: 0.79"),
        (("shapes", goals.RUNS, "staged", "load_ratio"), math.nan, "load_ratio: nan"),
        (("crossing", "staged", "wrong_cycles"), 1, "wrong_cycles: 1"),
        (("crossing",), {}, "crossing * wrong_cycles: not found"),
        (("shapes",), {goals.PAGES: SHAPE, goals.RUNS: SHAPE}, "shapes: 2, goal >= 9"),
        (("shapes", goals.RUNS, "staged", "load_ratio"), 0.85, "load_ratio: 0.85, goal >= 0.9"),
    ],
)
def test_a_goal_that_is_missed_is_named(path: tuple[str, ...], value: Any, name: str) -> None:
    lacking = goals.missed("copies", changed(COPIES, *path, value=value))
    assert any(name in each for each in lacking), lacking


def test_tests_that_were_skipped_on_a_gpu_are_missed() -> None:
    found = {"passed": 40, "skipped": 40, "failed": []}
    assert goals.missed("contract", found) == ["skipped: 40, goal none"]
    assert goals.missed("contract", found, is_rehearsal=True) == []


# ── the record ───────────────────────────────────────────────────────────────────────────────────


def outcome(name: str, found: Mapping[str, Any], **more: Any) -> Outcome:
    values: dict[str, Any] = {"code": 0, "seconds": 1.25} | more
    return Outcome(name, found=found, **values)


def test_a_run_that_meets_its_goals_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    outcomes = [outcome("copies", COPIES), outcome("hbm", HBM)]
    assert run.finished(outcomes, report.Record(GPU, 7, out)) == 0
    said = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3, seed 7" in said
    assert "copies    ok     rc   0    1.2 s" in said
    assert "peak GB/s load=54.32" in said
    assert re.search(r"runs of 2 MiB, of pinned peak +0\.95 +goal >= 0\.9 +met", said)
    assert f"{goals.RUNS:28} staged  store_ratio=0.95" in said
    assert "1 of 1 checks" in said
    result = json.loads(out.read_text())
    assert (result["gpu"], result["seed"]) == (GPU, 7)
    assert {"date", "packages", "commit"} <= result["environment"].keys()
    assert result["is_complete"] is True
    assert result["goals"][0]["state"] == "met"
    row = result["parts"]["copies"]
    assert all(each["is_met"] for each in row["goals"])
    assert {"of": "shapes", "goal": ">= 9"}.items() <= row["goals"][0].items()
    assert (row["rc"], row["seconds"], row["missed"], row["found"]) == (0, 1.2, [], COPIES)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (outcome("hbm", HBM | {"failed": ["x"]}), "missed: failed: x"),
        (outcome("hbm", HBM, code=-11, tail=("Segmentation fault",)), "| Segmentation fault"),
        (outcome("hbm", {}, code=-9, why="killed after 40 s"), "killed after 40 s"),
        (outcome("hbm", {"error": "DeviceError: x"}, code=1), "DeviceError: x"),
    ],
)
def test_a_part_that_failed_is_shown_and_fails_the_run(
    bad: Outcome, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    assert run.finished([outcome("copies", COPIES), bad], report.Record(GPU, 7, out)) == 1
    said = capsys.readouterr().out
    assert "hbm       FAILED" in said
    assert says in said
    assert json.loads(out.read_text())["parts"]["copies"]["found"] == COPIES


def test_nothing_measured_is_loud_and_leaves_the_last_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken driver: every part fails, or finds nothing."""
    out = tmp_path / "gpu.json"
    outcomes = [outcome("copies", {"seed": 1, "peak": {}}, code=1), outcome("hbm", {"seed": 1})]
    code = run.finished(outcomes, report.Record(GPU, 7, out))
    assert code == run.NOTHING_MEASURED not in (0, 1)
    assert "NOTHING WAS MEASURED" in capsys.readouterr().err
    assert not out.exists()


def test_what_was_found_is_written_though_no_part_came_to_its_end(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    outcomes = [outcome("copies", {"seed": 1, "peak": {"load": 1.0}}, code=1)]
    assert run.finished(outcomes, report.Record(GPU, 7, out)) == run.NOTHING_MEASURED
    result = json.loads(out.read_text())
    assert result["is_complete"] is False
    assert result["parts"]["copies"]["found"]["peak"] == {"load": 1.0}


def test_without_a_gpu_nothing_runs_and_that_is_loud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "describe_gpu", dict)
    monkeypatch.setattr(run, "run_all", None)
    monkeypatch.setattr(smi, "DRIVER", tmp_path / "nvidiactl")
    assert run.main([]) == run.NOTHING_MEASURED
    assert "NOTHING WAS MEASURED: nvidia-smi names no NVIDIA GPU" in capsys.readouterr().err
    smi.DRIVER.touch()
    assert run.main([]) == run.NOTHING_MEASURED
    assert "nvidia-smi is not on the path or fails" in capsys.readouterr().err


# ── processes ────────────────────────────────────────────────────────────────────────────────────

FINDS = """\
    import json, pathlib, sys
    pathlib.Path(sys.argv[2]).write_text(json.dumps({"found": sys.argv[1:] and 5}))
"""
HANGS = (
    FINDS
    + """\
    import fcntl, os, threading
    file = open(os.environ["LOCK"], "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    os.fork()
    threading.Event().wait(60)
"""
)
CRASHES = FINDS + "    import os\n    os.abort()\n"


def program(name: str, source: str, limit_s: float = 20.0) -> Part:
    return Part(name, [sys.executable, "-c", textwrap.dedent(source)], limit_s)


def test_a_part_that_hangs_or_crashes_stops_no_other_and_keeps_what_it_found(
    tmp_path: Path,
) -> None:
    todo = [
        program("edges", HANGS, 0.5),
        program("contract", "raise SystemExit('no such thing')"),
        program("kernels", CRASHES),
        program("copies", FINDS),
    ]
    begin = time.monotonic()
    environment = os.environ | {"LOCK": str(tmp_path / "lock")}
    found = run.run_all(todo, tmp_path, tmp_path / "log", environment)
    assert time.monotonic() - begin < 15
    assert [each.code for each in found] == [-9, 1, -6, 0]
    assert [each.found for each in found] == [{"found": 5}, {}, {"found": 5}, {"found": 5}]
    assert found[0].why.startswith("killed after")
    with (tmp_path / "lock").open() as file:  # with all of its processes
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert found[1].tail == ("no such thing",)
    assert "no such thing" in (tmp_path / "log").read_text()
    assert [each.has_measured for each in found] == [False, False, False, True]


def test_all_parts_fit_into_the_budget() -> None:
    todo = run.parts(findings.NAMES, 3, is_rehearsal=False)
    assert sum(each.limit_s for each in todo) == run.BUDGET_S == 470
    assert [each.name for each in todo] == [*findings.NAMES]


# ── one part ─────────────────────────────────────────────────────────────────────────────────────


def test_tests_are_counted_by_their_outcome() -> None:
    text = "FAILED tests/x.py::test_a[GpuParty] - assert\n== 1 failed, 44 passed in 3.1s ==\n"
    found = contract.counted(text)
    assert found == {"passed": 44, "skipped": 0, "failed": ["test_a[GpuParty]"]}
    assert contract.counted("3 passed, 9 deselected in 1.0s")["failed"] == []
    assert contract.counted("45 skipped in 1.0s")["failed"]
    assert contract.counted("ERROR: unknown option")["failed"]


def test_memcheck_tells_accesses_from_calls_that_failed() -> None:
    stray = "========= Invalid __global__ write of size 8 bytes\n"
    call = "========= Program hit cudaErrorInvalidValue (error 1) on cudaMemcpyAsync\n"
    end = "========= ERROR SUMMARY: 1 error\n"
    assert memcheck.reported(stray + end, 9)["findings"] == [
        "Invalid __global__ write of size 8 bytes"
    ]
    assert memcheck.reported(call + end, 9)["findings"] == []
    assert memcheck.reported(call + end, 9)["failed_calls"]
    assert memcheck.reported(end, 0) == {"findings": [], "failed_calls": []}
    assert memcheck.reported(end, 1)["findings"] == ["exit code 1"]
    assert memcheck.reported("", 0)["findings"] == ["the tool said nothing"]


# ── a run that ends early, and findings that cannot be kept ───────────────────────────────────────


RUN = """
    import json, os, sys
    from bench.gpu import run
    run.describe_gpu = lambda: {"name": "a GPU"}
    run.parts = lambda *_, **__: [
        run.Part(name, [sys.executable, "-c", source], 30)
        for name, source in json.loads(os.environ["PARTS"]).items()
    ]
    sys.exit(run.main(sys.argv[1:]))
"""


def until_locked(path: Path) -> None:
    """Wait until another process holds it."""
    end, pause = time.monotonic() + 20, threading.Event()
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        pause.wait(0.02)
    raise AssertionError("the part did not begin")


def test_a_run_that_is_stopped_kills_its_part_and_keeps_what_there_is(tmp_path: Path) -> None:
    """On a disk that has no room for its log."""
    sources = {"edges": FINDS, "contract": HANGS, "kernels": FINDS}
    parts = {name: textwrap.dedent(source) for name, source in sources.items()}
    there = {"PYTHONPATH": str(record.ROOT), "LOCK": str(tmp_path / "lock")}
    there |= {"PARTS": json.dumps(parts)}
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-c", textwrap.dedent(RUN), "--out", str(out), "--log", "/dev/full"]
    with subprocess.Popen(
        command, env=os.environ | there, stderr=subprocess.PIPE, text=True
    ) as process:
        until_locked(tmp_path / "lock")
        early = json.loads(out.read_text())
        process.terminate()
        said = process.communicate(timeout=20)[1]
    assert process.returncode == 1, said
    assert "THE RUN IS NOT WHOLE: stopped by SIGTERM" in said
    assert (early["is_complete"], [*early["parts"]]) == (False, ["edges"])
    late = json.loads(out.read_text())
    assert late["is_complete"] is False
    assert late["parts"]["edges"]["found"] == late["parts"]["contract"]["found"] == {"found": 5}
    assert late["parts"]["contract"]["why"] == "stopped by SIGTERM"
    assert late["parts"]["kernels"]["why"] == "not run: stopped by SIGTERM"
    with (tmp_path / "lock").open() as file:  # with all of its processes
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("is_whole", "is_complete", "expected"),
    [
        (True, True, report.RESULT),
        (True, False, report.OTHER),
        (False, True, report.OTHER),
    ],
)
def test_only_a_run_of_all_parts_to_its_end_replaces_the_last_one(
    expected: Path, *, is_whole: bool, is_complete: bool
) -> None:
    kept = report.Record(GPU, 7, is_whole=is_whole)
    assert kept.place(is_complete=is_complete) == expected
    assert kept._replace(is_rehearsal=True).place(is_complete=is_complete) is None


@pytest.mark.parametrize("option", ["--out", "--log"])
def test_a_place_that_cannot_be_written_is_named_before_anything_runs(
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "run_all", None)
    (tmp_path / "file").touch()
    given = {"--log": str(tmp_path / "log"), option: str(tmp_path / "file" / "gpu")}
    arguments = [each for pair in given.items() for each in pair]
    assert run.main(["--rehearse", *arguments]) == run.NOTHING_MEASURED
    said = capsys.readouterr().err
    assert "cannot be written" in said
    assert option in said


# ── what travels to a machine that reaches no package registry ────────────────────────────────────


def wheel(folder: Path, name: str, inside: str = "brought/__init__.py") -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(inside, "x = 1\n")
    return folder / name


def test_wheels_are_unpacked_for_the_python_they_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PACK", tmp_path)
    assert pack.unpack(tmp_path / "site") is None
    wheel(tmp_path, "brought-1-py3-none-any.whl")
    monkeypatch.setattr(pack, "PYTHON", (2, 7))
    assert pack.unpack(tmp_path / "site") is None
    monkeypatch.setattr(pack, "PYTHON", sys.version_info[:2])
    assert pack.unpack(tmp_path / "site") == tmp_path / "site"
    assert (tmp_path / "site" / "brought" / "__init__.py").read_text() == "x = 1\n"


def test_a_pack_that_was_forgotten_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PACK", tmp_path / "build" / "gpu-pack")
    monkeypatch.setattr(pack, "MODULES", ("json", "os.path"))
    assert pack.forgotten(None) == ""
    monkeypatch.setattr(pack, "MODULES", ("json", "no_such", "nor_this.one"))
    said = pack.forgotten(None)
    assert said.startswith("build/gpu-pack is not here: make gpu-pack, and bring it along")
    assert "no_such, nor_this.one" in said
    assert pack.forgotten(tmp_path) == ""


def test_a_pack_that_is_too_large_or_empty_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PACK", tmp_path)
    monkeypatch.setattr(pack, "tracked_bytes", lambda: 1000)
    assert pack.main() == 1
    wheel(tmp_path, "brought-1-py3-none-any.whl")
    assert pack.main() == 0
    monkeypatch.setattr(pack, "BYTES_MAX", 1000)
    assert pack.main() == 1

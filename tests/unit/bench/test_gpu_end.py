"""The run on a GPU, where it ends early or its findings cannot be kept."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from bench import record
from bench.gpu import report, run

GPU = {"name": "NVIDIA H100 80GB HBM3"}
FINDS = """
    import json, pathlib, sys
    pathlib.Path(sys.argv[2]).write_text(json.dumps({"found": 5}))
"""
HANGS = (
    FINDS
    + """
    import fcntl, os, threading
    file = open(os.environ["LOCK"], "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    os.fork()
    threading.Event().wait(60)
"""
)
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

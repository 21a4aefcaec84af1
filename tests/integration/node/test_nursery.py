"""A node that is forked from the nursery is one that was started by exec, but for its begin."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.testing import process
from kvstore.testing.process import NodeProcess
from tests.kit.nursery import ROOT, Forked, Inherited, Nursery

KEPT = ("SigBlk", "SigIgn", "SigCgt", "CapEff", "NoNewPrivs", "Umask")
"""Of /proc/PID/status, what a process has from the one that made it."""
OWNER = """\
import os, sys, time
from pathlib import Path
from kvstore.testing.process import NodeProcess
from tests import leaks
from tests.kit.nursery import Nursery
leaks.prepare()
with Nursery():
    node = NodeProcess.start(Path(sys.argv[1]))
    print(node.supervisor_pid, node.pid, flush=True)
    time.sleep(600)
"""


def _made_of(pid: int) -> dict[str, object]:
    status = Path(f"/proc/{pid}/status").read_text()
    folder = Path(f"/proc/{pid}/fd")
    kinds = Counter(re.sub(r"\d{2,}", "N", os.readlink(fd)) for fd in folder.iterdir())
    return {
        "status": {name: re.findall(rf"^{name}:\s*(.*)$", status, re.MULTILINE) for name in KEPT},
        "descriptors": kinds,
        "limits": Path(f"/proc/{pid}/limits").read_text(),
        "leads its session": os.getsid(pid) == pid,
        "directory": os.readlink(f"/proc/{pid}/cwd"),
        # Not how many: gRPC starts them as it needs them.
        "threads": {path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm")},
    }


@pytest.fixture
def nursery(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    """One that is made here: tests before, or what they import, may have changed this process, so
    that the run's own nursery starts its commands by exec."""
    monkeypatch.setattr(process, "launch", process.launch)
    with Nursery() as nursery:
        yield nursery


@pytest.mark.usefixtures("nursery")
def test_forked_processes_are_made_of_what_those_by_exec_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")  # as importing vLLM leaves it
    with NodeProcess.start(tmp_path) as node:
        assert isinstance(node.process, Forked)
        forked = [_made_of(pid) for pid in (node.supervisor_pid, node.pid)]
        assert node.stop() == 0
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # read too early for a fork
    with NodeProcess.start(tmp_path) as node:
        assert not isinstance(node.process, Forked)
        assert [_made_of(pid) for pid in (node.supervisor_pid, node.pid)] == forked


def test_a_nursery_that_is_gone_is_said_and_no_process_is_taken_for_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "launch", process.launch)  # the run's own, again after this
    with Nursery() as nursery:
        nursery._process.kill()
        nursery._process.wait()
        with pytest.raises((RuntimeError, OSError)):
            NodeProcess.start(tmp_path)


def test_nothing_forked_survives_the_tests_that_are_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with owner:
        assert owner.stdout is not None
        made = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(made) == 2
    _, alive = psutil.wait_procs(made, 30)
    assert alive == []


def test_variables_and_limits_are_as_they_were() -> None:
    before = Inherited.now()
    os.environ["LD_PRELOAD"] = "/nowhere"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    assert Inherited.now() != before
    before.restore()
    assert Inherited.now() == before
    assert "LD_PRELOAD" not in os.environ or before.early["LD_PRELOAD"] == os.environ["LD_PRELOAD"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)

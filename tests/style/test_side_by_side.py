"""Tests in several processes: groups stay together, `alone` means alone, and all is counted."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import psutil
import pytest
from hypothesis import strategies as st

from tests.conftest import PROFILE
from tests.style.tree import ROOT

CONFTEST = """
import pytest
from tests import leaks, side_by_side

def pytest_addoption(parser):
    side_by_side.add_options(parser)

def pytest_configure(config):
    leaks.prepare()
    config.addinivalue_line("markers", "alone: no other test runs meanwhile")
    side_by_side.configure(config)

@pytest.fixture(scope="module")
def dear():
    pass
"""
TESTS = """
import os, pathlib, time
import pytest
from tests.amounts import covered
from tests.steps import STEPS

RUNNING = pathlib.Path(os.environ["RUNNING"])
DONE = RUNNING.with_name("done")

def run(name):
    mine = RUNNING / f"{name}"
    mine.touch()
    try:
        deadline = time.monotonic() + 0.1
        seen = set()
        while time.monotonic() < deadline:
            seen |= {path.name for path in RUNNING.iterdir()} - {name}
        covered(STEPS, 1)
        return seen
    finally:
        mine.unlink()
        with DONE.open("a") as done:
            done.write(f"{os.getpid()} {name}\\n")

@pytest.mark.parametrize("number", range(6))
def test_beside_others(number):
    run(f"beside{number}")

@pytest.mark.alone
@pytest.mark.parametrize("number", range(2))
def test_by_itself(number):
    assert run(f"alone{number}") == set()
"""
TOGETHER = """
from test_some import run

def test_one(dear):
    run("together1")

def test_two(dear):
    run("together2")
"""
DYING = """
import os, pathlib, signal, time

LEFT = pathlib.Path(os.environ["RUNNING"]).with_name("left")

def test_dies():
    if LEFT.exists():
        return
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    LEFT.write_text(str(pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "running").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_together.py").write_text(TOGETHER)
    return tmp_path


def run(suite: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment |= {"RUNNING": str(suite / "running"), "PYTHONPATH": f"{ROOT}:{suite}"}
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(suite)),
            *("-p", "no:cacheprovider", *arguments, str(suite)),
        ],
        cwd=suite,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_groups_stay_together_alone_is_alone_and_all_is_counted(suite: Path) -> None:
    done = run(suite, "-n", "2", "--steps-min", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line.split() for line in (suite / "done").read_text().splitlines()]
    assert len(ran) == 10
    assert len({pid for pid, _ in ran}) == 2, "one process did it all"
    assert len({pid for pid, name in ran if name.startswith("together")}) == 1
    assert "covered: 10 property steps" in done.stdout


@pytest.mark.parametrize(
    ("processes", "name"), [("1", "test_dying_first"), ("2", "test_which_dies_later")]
)
def test_a_process_that_dies_leaves_nothing_in_the_way_of_others(
    suite: Path, processes: str, name: str
) -> None:
    (suite / f"{name}.py").write_text(DYING)
    done = run(suite, "-n", processes, "-p", "no:randomly", "--timeout", "30")
    assert "crashed while running" in done.stdout, done.stdout + done.stderr
    ran = [line.split()[1] for line in (suite / "done").read_text().splitlines()]
    assert {"alone0", "alone1"} <= set(ran)
    assert not psutil.pid_exists(int((suite / "left").read_text()))


def test_a_test_during_which_a_process_dies_may_run_again(suite: Path) -> None:
    (suite / "test_dying.py").write_text(DYING)
    done = run(suite, "-n", "2", "--reruns", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed, 1 rerun" in done.stdout
    assert "covered: 10 property steps" in done.stdout


@pytest.mark.parametrize("processes", ["0", "2"])
def test_fewer_steps_than_were_asked_for_fail_the_run(suite: Path, processes: str) -> None:
    done = run(suite, "-n", processes, "--steps-min", "11")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "10 passed" in done.stdout
    assert "fewer property steps than 11" in done.stdout


@pytest.mark.skipif(PROFILE != "fixed", reason="other profiles draw at random")
def test_examples_do_not_depend_on_the_modules_that_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[int]] = []

    def draw() -> None:
        of_test: list[int] = []

        @hypothesis.settings(max_examples=200)
        @hypothesis.given(st.integers())
        def examples(number: int) -> None:
            of_test.append(number)

        examples()
        drawn.append(of_test)

    draw()
    (tmp_path / "beside.py").write_text(f"NUMBERS = {[*range(1_000_003, 1_000_303)]}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("beside")
    draw()
    assert drawn[0] == drawn[1]

"""The spot check by mutants: which faults there are, and that they are judged by the copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.mutation import mutants_of
from bench.scenarios.mutation import load
from tests.style.tree import ROOT

SOURCE = '''"""§ 3 is more than a byte."""
LIMIT: "3" = 4

def small(x: int) -> bool:
    assert x > 0, f"{x + 1}"
    return x < LIMIT and not x % 2
'''
TESTS = """
from planted.m import other, small

def test_small():
    assert small(2) and not small(3)

def test_other():
    assert other(1) == 2

def test_fails():
    assert small(4)
"""

JUDGE = """
import json, math, os, sys
from functools import partial
from pathlib import Path
from bench.mutation import mutants_of
from bench.scenarios.mutation import forked, load, outcomes, see
root = Path(sys.argv[1])
os.waitpid(forked(partial(see, root, ["planted"], ["test_m.py"], root / "reached.json")), 0)
source = (root / "planted" / "m.py").read_bytes()
two = [m for m in mutants_of("planted/m.py", source) if m.was in ("x < LIMIT", "not x % 2")]
found = outcomes(root, two, load(root / "reached.json"), jobs=2, end_s=math.inf)
print(json.dumps({mutant.was: outcome for mutant, outcome in found}))
"""
"""In a process of its own: a fork of this one would wait for pytest's watchdog."""


def test_one_fault_at_a_time_and_asserts_and_annotations_are_left_alone() -> None:
    found = [(m.line, m.was, m.now) for m in mutants_of("m.py", SOURCE.encode())]
    assert found == [
        (2, "4", "(5)"),
        (6, "x < LIMIT", "(x <= LIMIT)"),
        (6, "x < LIMIT and not x % 2", "(x < LIMIT or not x % 2)"),
        (6, "not x % 2", "(x % 2)"),
        (6, "x % 2", "(x // 2)"),
        (6, "2", "(3)"),
    ]


def test_a_fault_is_judged_by_the_tests_that_reach_its_statement(tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir()
    source = (
        SOURCE
        + "\ndef other(x: int) -> int:\n    return x + 1\n\ndef unseen() -> int:\n    return 7\n"
    )
    (tmp_path / "planted" / "m.py").write_text(source)
    (tmp_path / "test_m.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\nmarkers =\n slow\n engine\n gpu\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", JUDGE, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    reached = load(tmp_path / "reached.json")
    assert reached.failed == ["test_m.py::test_fails"]
    mutants = mutants_of("planted/m.py", source.encode())
    by_text = {mutant.was: mutant for mutant in mutants}
    assert {text: sorted(reached.judges(mutant)) for text, mutant in by_text.items()} == {
        "4": ["test_m.py::test_other", "test_m.py::test_small"],
        "x < LIMIT": ["test_m.py::test_small"],
        "x < LIMIT and not x % 2": ["test_m.py::test_small"],
        "not x % 2": ["test_m.py::test_small"],
        "x % 2": ["test_m.py::test_small"],
        "2": ["test_m.py::test_small"],
        "x + 1": ["test_m.py::test_other"],
        "1": ["test_m.py::test_other"],
        "7": [],
    }
    found = {"x < LIMIT": "survived", "not x % 2": "killed"}
    assert json.loads(told.stdout.splitlines()[-1]) == found
    assert (tmp_path / "planted" / "m.py").read_text() == source

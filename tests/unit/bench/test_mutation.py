"""The spot check by mutants: which faults there are, and that they are judged by the copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.mutation import mutants_of
from bench.scenarios.mutation import ALSO, MACHINES, fitting, judge, table
from tests.style.tree import ROOT

SOURCE = '''"""§ 3 is more than a byte."""
LIMIT: "3" = 4

def small(x: int) -> bool:
    assert x > 0, f"{x + 1}"
    return x < LIMIT and not x % 2
'''
PASSES = "from kvstore.m import small\n\ndef test_it():\n    assert small(2) and not small(3)\n"


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


def test_a_fault_replaces_what_it_says_and_nothing_else() -> None:
    source = SOURCE.encode()
    for mutant in mutants_of("m.py", source):
        changed = mutant.applied(source)
        assert changed != source
        assert len(changed) == len(source) + len(mutant.now.encode()) - len(mutant.was.encode())
        compile(changed, mutant.path, "exec")


@pytest.mark.parametrize(
    ("was", "verdict"), [("x < LIMIT", "survived"), ("not x % 2", "killed")], ids=str
)
def test_the_copy_is_judged_and_mended(tmp_path: Path, was: str, verdict: str) -> None:
    (tmp_path / "kvstore").mkdir()
    for name, text in (
        ("kvstore/__init__.py", ""),
        ("kvstore/m.py", SOURCE),
        ("test_m.py", PASSES),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\nmarkers =\n slow\n engine\n gpu\n"
    )
    (mutant,) = [m for m in mutants_of("kvstore/m.py", SOURCE.encode()) if m.was == was]
    assert judge(tmp_path, mutant, ["test_m.py"]) == verdict
    assert (tmp_path / "kvstore" / "m.py").read_text() == SOURCE


def test_every_module_has_tests_that_fit() -> None:
    for package, machine in MACHINES.items():
        folder = (ROOT / machine).parent
        for also in ALSO.values():
            assert any(
                list((ROOT / other).parent.glob(f"test_{name}*.py"))
                for name in also
                for other in MACHINES.values()
            )
        (mutant, *_) = mutants_of(f"{package}/slots.py", b"x = 1")
        assert fitting(mutant, package)[-1] == machine
        assert folder.is_dir()


def test_the_table_names_survivors() -> None:
    row = {"package": "p", "file": "p/m.py", "line": 6, "was": "a <\n b", "now": "(a <= b)"}
    text = table({"p": 9}, [{**row, "outcome": "survived"}, {**row, "outcome": "killed"}])
    assert "| p | 9 | 2 | 1 | 0 | 1 |" in text
    assert "- p/m.py:6 `a < b` → `(a <= b)`" in text

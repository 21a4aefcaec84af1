"""`make mutation MUTANTS=300`: would the tests of the pure core notice a fault?

Covers `PACKAGES`: a seeded sample of the faults that `bench/mutation.py` knows, spread over the
packages by how many each has. One run of `TESTS` under coverage says which tests reach each line
and how long they take. Each fault is judged by the tests that reach its statement, shortest first,
up to the first that fails:

- a fault that runs at import (a constant, a default, a field) by those that reach any function of
  its module, or whose file imports it by name;
- no more tests than take `JUDGES_S`: the longest are left out, and the fault lives if only they
  would have noticed;
- a line that no test reaches: the fault lives. Without an end, or out of memory: noticed.

The judge is a fork of a process that has imported all but kvstore, and the fault is in its memory
only: files stay as they are. The index runs its plain loops, which numba would compile as they are.
Does not cover: what only the seeded world, a real node or a check of types would notice.

Writes bench/results/mutation.json and mutation.md. `--again` judges the survivors of that record
once more, by the tests of today, and adds what they say; the first verdict stays.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import chain
from pathlib import Path
from typing import Any, Final

import coverage
import hypothesis.stateful  # for the forks: they need not import it
import msgspec  # noqa: F401
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.mutation import Mutant, mutants_of

SEED: Final = 20261121
PACKAGES: Final = ("kvstore/wire", "kvstore/engine", "kvstore/index", "kvstore/client/core")
TESTS: Final = (
    *(f"tests/unit/{name}" for name in ("wire", "engine", "index", "client")),
    *("tests/contract/test_index.py", "tests/contract/test_policy.py"),
)
"""Those of the pure core. Others reach it too, but through threads, sockets and processes."""
REACHED: Final = record.ROOT / "build" / "mutation.json"
JUDGES_S: Final = 30.0
"""Of their time under coverage, which is more than without."""
MEMORY_BYTES: Final = 6 << 30
"""Of a judge: a fault may well fill a list without an end."""
PYTEST: Final = (
    *("-q", "--randomly-dont-reorganize", "-m", "not slow and not engine and not gpu"),
    # Those with a broken engine break the code themselves, to see whether other tests notice.
    *("-k", "not broken or test_broken"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
SURVIVED: Final = "survived"
OUTCOMES: Final = ("killed", "timed out", SURVIVED)
_VERDICTS: Final = {0: SURVIVED, -signal.SIGKILL: "timed out"}
"""By how a judge ends: anything else is a test that failed or a module that cannot be imported."""


@dataclass
class Reached:
    """Which tests reach which lines, and what they take."""

    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    """Without any fault: they judge nothing."""
    imported: dict[str, list[str]] = field(default_factory=dict)
    """By each file of tests."""

    def judges(self, mutant: Mutant) -> list[str]:
        """The tests that judge a mutant, shortest first."""
        lines = self.lines.get(mutant.path, {})
        tests = set(lines.get(mutant.line, ()) or lines.get(mutant.statement, ()))
        if not mutant.statement:
            module = mutant.path.removesuffix(".py").replace("/", ".")
            tests.update(*lines.values())
            tests |= {test for test in self.seconds if module in self.imported[test.split("::")[0]]}
        chosen: list[str] = []
        spent_s = 0.0
        for test in sorted(tests - set(self.failed), key=lambda test: self.seconds[test]):
            spent_s += self.seconds[test]
            if chosen and spent_s > JUDGES_S:
                break
            chosen.append(test)
        return chosen


class Watch:
    """A plugin of pytest: coverage is told which test runs."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured
        self.reached = Reached()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # Not `[parameters]`: a fault may change what they are called.
        test, begun_s = item.nodeid.split("[")[0], time.monotonic()
        self._measured.switch_context(test)
        yield
        self._measured.switch_context("")
        seconds = self.reached.seconds
        seconds[test] = seconds.get(test, 0) + time.monotonic() - begun_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.reached.failed.append(report.nodeid.split("[")[0])


def see(root: Path, packages: Sequence[str], tests: Sequence[str], to: Path) -> int:
    """Run the tests under coverage and write what they reach."""
    plain()
    os.chdir(root)
    measured = coverage.Coverage(data_file=None, config_file=False, source=[*packages])
    watch = Watch(measured)
    measured.start()
    pytest.main([*PYTEST, *tests], plugins=[watch])
    measured.stop()
    data, seconds = measured.get_data(), watch.reached.seconds
    for file in data.measured_files():
        at = data.contexts_by_lineno(file)
        path = str(Path(file).relative_to(root))
        watch.reached.lines[path] = {
            line: [test for test in tests if test] for line, tests in at.items()
        }
    watch.reached.imported = {
        file: imports_of(root / file) for file in {test.split("::")[0] for test in seconds}
    }
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(vars(watch.reached)))
    return 0


def imports_of(file: Path) -> list[str]:
    """Modules, and what may be one."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
    return sorted(names)


def load(path: Path) -> Reached:
    """What `see` wrote."""
    told = json.loads(path.read_text())
    told["lines"] = {
        file: {int(line): tests for line, tests in lines.items()}
        for file, lines in told["lines"].items()
    }
    return Reached(**told)


def judge(root: Path, mutant: Mutant, tests: Sequence[str]) -> int:
    """Whether these tests fail with the fault: what pytest ends with."""
    plain()
    os.chdir(root)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    file = str(root / mutant.path)
    code = compile(mutant.applied(Path(file).read_bytes()), file, "exec", dont_inherit=True)
    get_code = SourceFileLoader.get_code

    def get(loader: SourceFileLoader, name: str) -> Any:
        return code if loader.path == file else get_code(loader, name)

    SourceFileLoader.get_code = get  # type: ignore[method-assign,assignment]
    return pytest.main(["-x", *PYTEST, *tests])


def plain() -> None:
    """In a fork: what tests import from now on. A failure is not looked at, so nothing shrinks."""
    sys.modules["numba"] = None  # type: ignore[assignment]
    os.environ["KVSTORE_HYPOTHESIS_PROFILE"] = "mutation"
    hypothesis.settings.register_profile(
        "mutation",
        derandomize=True,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )


def forked(work: Callable[[], int]) -> int:
    """The process that does the work, in a group of its own, and ends with what it returns."""
    pid = os.fork()
    if not pid:
        code = 70
        try:
            os.setsid()
            code = work()
        finally:
            os._exit(code)
    return pid


def outcomes(
    root: Path, mutants: Sequence[Mutant], reached: Reached, *, jobs: int, end_s: float
) -> Iterator[tuple[Mutant, str]]:
    """What becomes of each, so many at a time, in the order in which it is known."""
    waiting = list(reversed(mutants))
    running: dict[int, tuple[int, Mutant, float]] = {}
    while running or (waiting and time.monotonic() < end_s):
        while waiting and len(running) < jobs and time.monotonic() < end_s:
            mutant = waiting.pop()
            if tests := reached.judges(mutant):
                pid = forked(partial(judge, root, mutant, tests))
                limit_s = 30 + 5 * sum(reached.seconds[test] for test in tests)
                running[os.pidfd_open(pid)] = pid, mutant, time.monotonic() + limit_s
            else:
                yield mutant, SURVIVED
        ended, _, _ = select.select([*running], [], [], 1)
        for pidfd, (pid, mutant, until_s) in list(running.items()):
            if pidfd not in ended and time.monotonic() < until_s:
                continue
            if pidfd not in ended:
                os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(pidfd)
            del running[pidfd]
            assert code != pytest.ExitCode.NO_TESTS_COLLECTED, f"{mutant} was not judged"
            yield mutant, _VERDICTS.get(code, "killed")


def main() -> int:
    """Judge a sample of all packages, in as many processes at a time as told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=100, help="of all packages")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--minutes", type=float, default=60, help="none is begun after that")
    parser.add_argument("--again", action="store_true", help="only survivors of the last record")
    parser.add_argument("--seen", action="store_true", help="lines are reached as in the last run")
    parser.add_argument("--name", default="mutation", help="of the record")
    options = parser.parse_args()
    possible = {package: every_mutant(package) for package in PACKAGES}
    counts = {package: len(mutants) for package, mutants in possible.items()}
    rows: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"possible": counts}
    if options.again:
        told = json.loads((record.RESULTS / f"{options.name}.json").read_text())
        rows = {name_of(**row): row for row in told["mutants"]}
        result["first_run"] = told.get("first_run", told["environment"])
        chosen = [
            mutant
            for mutant in chain(*possible.values())
            if (row := rows.get(name_of(**row_of(mutant))))
            and row.get("again", row["outcome"]) == SURVIVED
        ]
    else:
        pick, share = random.Random(options.seed), options.mutants / sum(counts.values())
        chosen = []
        for mutants in possible.values():
            chosen += pick.sample(mutants, round(len(mutants) * share))
        pick.shuffle(chosen)  # whenever the time is over, what was judged is a fair sample
    if not options.seen:
        pid = forked(partial(see, record.ROOT, PACKAGES, TESTS, REACHED))
        assert os.waitpid(pid, 0)[1] == 0, "the tests could not run under coverage"
    reached = load(REACHED)
    end_s = time.monotonic() + 60 * options.minutes
    for mutant, outcome in outcomes(record.ROOT, chosen, reached, jobs=options.jobs, end_s=end_s):
        print(
            f"{outcome:9} {mutant.path}:{mutant.line}  {mutant.was!r} → {mutant.now!r}", flush=True
        )
        row = row_of(mutant)
        row["judges"] = len(reached.judges(mutant))
        rows.setdefault(name_of(**row), row)["again" if options.again else "outcome"] = outcome
    result |= {"failed_without_a_fault": reached.failed, "mutants": [*rows.values()]}
    path = record.write(options.name, result, seed=options.seed)
    path.with_suffix(".md").write_text(table(counts, [*rows.values()]))
    return 0


def every_mutant(package: str) -> list[Mutant]:
    """All faults of a package, in the order of its files."""
    found = []
    for file in sorted((record.ROOT / package).rglob("*.py")):
        found += mutants_of(str(file.relative_to(record.ROOT)), file.read_bytes())
    return found


def row_of(mutant: Mutant) -> dict[str, Any]:
    """How the record says which one it is."""
    (package,) = [package for package in PACKAGES if mutant.path.startswith(f"{package}/")]
    where = {"package": package, "file": mutant.path, "line": mutant.line, "at": mutant.begin}
    return {**where, "was": mutant.was, "now": mutant.now}


def name_of(*, file: str, at: int, was: str, now: str, **_: object) -> str:
    """What tells the rows of a record apart."""
    return f"{file} {at} {was} {now}"


def table(possible: dict[str, int], rows: Sequence[dict[str, Any]]) -> str:
    """For a reader: how many of each, and which ones survived."""
    lines = ["# Would the tests notice a fault?", ""]
    lines += ["| package | possible faults | tried | killed | timed out | survived | found |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for package in (*possible, "all"):
        told = Counter(r["outcome"] for r in rows if package in (r["package"], "all"))
        found = 1 - told[SURVIVED] / max(told.total(), 1)
        counts = " | ".join(str(told[outcome]) for outcome in OUTCOMES)
        count = possible.get(package, sum(possible.values()))
        lines += [f"| {package} | {count} | {told.total()} | {counts} | {found:.0%} |"]
    survivors = [row for row in rows if row["outcome"] == SURVIVED]
    later = sum(row.get("again", SURVIVED) != SURVIVED for row in survivors)
    if later:
        share = 1 - (len(survivors) - later) / len(rows)
        lines += ["", f"By tests written since, and dead code deleted, {later} fewer: {share:.0%}."]
    lines += ["", "Survivors:", ""]
    for row in survivors:
        was, now = (" ".join(row[side].split()) for side in ("was", "now"))
        end = "" if row["judges"] else ", reached by no test"
        end += f", {again} since" if (again := row.get("again", SURVIVED)) != SURVIVED else ""
        lines += [f"- {row['file']}:{row['line']} `{was}` → `{now}`{end}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

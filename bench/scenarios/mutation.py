"""`make mutation MUTANTS=100`: would the tests of the pure core notice a fault? A spot check.

Covers `kvstore.engine` and `kvstore.client.core`: a seeded sample of the faults that
`bench/mutation.py` knows, one at a time in a copy of the tree, each judged by the few tests that
fit: the unit tests named after the module, those of `ALSO`, then the main state machine of the
package; the first failure ends it. Does not cover: what only other unit tests, the seeded world or
a real node would notice.

Writes bench/results/mutation.json and mutation.md. A survivor is a hint: a test is missing, or
other tests hold that line, or the fault changes nothing that anybody was promised.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.mutation import Mutant, mutants_of

SEED: Final = 20261121
MACHINES: Final = {
    "kvstore/engine": "tests/unit/engine/test_machine.py",
    "kvstore/client/core": "tests/unit/client/test_rank_machine.py",
}
"""The main state machine of each package; the other tests lie beside it."""
SHARES: Final = {"kvstore/engine": 0.6, "kvstore/client/core": 0.4}
"""Of the sample."""
ALSO: Final = {
    "adoption": ("journal",),
    "checksums": ("lookups",),
    "choose": ("policies",),
    "copies": ("rank",),
    "disk": ("disk_admission",),
    "engine": ("sessions", "lookups"),
    "expected": ("chain_order",),
    "files": ("writes",),
    "findings": ("explain",),
    "journal": ("journal_machine",),
    "oldest": ("policies", "lru"),
    "owners": ("sessions",),
    "pace": ("files_moving", "promotions"),
    "plan": ("rank", "stories"),
    "reasons": ("explain",),
    "report": ("changes",),
    "residency": ("changes", "files"),
    "reuse": ("policies",),
    "runs": ("lookups",),
    "scheduler": ("stories", "lookups"),
    "state": ("sessions", "stores"),
    "stores": ("stories",),
    "trail": ("explain", "searches"),
    "writes": ("files",),
}
"""Which tests hold a module besides those of its name."""
TREES: Final = record.ROOT / "build" / "mutation"
COPIED: Final = ("kvstore", "tests")
LIMIT_S: Final = 300.0
"""Many times what the tests of a module take."""
PYTEST: Final = (
    *(sys.executable, "-m", "pytest", "-x", "-q", "--randomly-dont-reorganize"),
    *("-m", "not slow and not engine and not gpu"),
    # These break the code themselves, to see whether the other tests notice.
    *("-k", "not broken"),
)
VERDICTS: Final = {0: "survived", 1: "killed", 2: "killed"}
"""By what pytest ends with; 2 is a module that cannot be imported any more."""
OUTCOMES: Final = ("killed", "timed out", "survived")


def every_mutant(package: str) -> list[Mutant]:
    """All faults of a package, in the order of its files."""
    found = []
    for file in sorted((record.ROOT / package).rglob("*.py")):
        found += mutants_of(str(file.relative_to(record.ROOT)), file.read_bytes())
    return found


def fitting(mutant: Mutant, package: str) -> list[str]:
    """The test files that judge a mutant, in their order."""
    machine = Path(MACHINES[package])
    module = Path(mutant.path).stem
    names = []
    for name in (module, *ALSO.get(module, ())):
        files = sorted((record.ROOT / machine.parent).glob(f"test_{name}*.py"))
        names += [str(file.relative_to(record.ROOT)) for file in files]
    return list(dict.fromkeys([*names, str(machine)]))


def plant(tree: Path) -> Path:
    """A copy of the tree to break. It shadows the installed one."""
    shutil.rmtree(tree, ignore_errors=True)
    for name in COPIED:
        shutil.copytree(record.ROOT / name, tree / name)
    shutil.copy2(record.ROOT / "pyproject.toml", tree)
    return tree


def judge(tree: Path, mutant: Mutant, tests: Sequence[str], *, limit_s: float = LIMIT_S) -> str:
    """What the tests in a tree say of a mutant; the tree is as before afterwards."""
    file = tree / mutant.path
    source, times = file.read_bytes(), file.stat()
    file.write_bytes(mutant.applied(source))
    try:
        done = subprocess.run(
            [*PYTEST, *tests],
            cwd=tree,
            capture_output=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        file.write_bytes(source)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # compiled files stay valid
    assert done.returncode in VERDICTS, f"pytest could not judge {mutant}: {done.stdout[-2000:]!r}"
    return VERDICTS[done.returncode]


def is_sound(tree: Path, tests: Collection[str]) -> bool:
    """Whether all that judge are content with what is not broken."""
    return subprocess.run([*PYTEST, *sorted(tests)], cwd=tree, check=False).returncode == 0


def main() -> int:
    """Judge a sample of both packages, in as many copies at a time as told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=100, help="of both packages")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--minutes", type=float, default=60, help="none is begun after that")
    options = parser.parse_args()
    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(options.jobs + 1):
        trees.put(plant(TREES / str(number)))
    end_s = time.monotonic() + 60 * options.minutes
    pick = random.Random(options.seed)
    possible = {package: every_mutant(package) for package in MACHINES}
    chosen = [
        (package, mutant)
        for package, share in SHARES.items()
        for mutant in pick.sample(possible[package], round(options.mutants * share))
    ]
    pick.shuffle(chosen)  # whenever the time is over, what was judged is a fair sample

    def judged(package: str, mutant: Mutant) -> dict[str, Any] | None:
        tree = trees.get()
        try:
            if time.monotonic() > end_s:
                return None
            outcome = judge(tree, mutant, fitting(mutant, package))
        finally:
            trees.put(tree)
        change = f"{mutant.was!r} → {mutant.now!r}"
        print(f"{outcome:9} {mutant.path}:{mutant.line}  {change}", flush=True)
        row = {"file": mutant.path, "line": mutant.line, "was": mutant.was, "now": mutant.now}
        return {"package": package, "outcome": outcome, **row}

    judges = {test for package, mutant in chosen for test in fitting(mutant, package)}
    with ThreadPoolExecutor(options.jobs + 1) as pool:
        sound = pool.submit(is_sound, trees.get(), judges)
        rows = [row for row in pool.map(judged, *zip(*chosen, strict=True)) if row is not None]
    if not sound.result():
        sys.exit("these tests fail without any fault: mend that first")
    counts = {package: len(mutants) for package, mutants in possible.items()}
    path = record.write("mutation", {"possible": counts, "mutants": rows}, seed=options.seed)
    path.with_suffix(".md").write_text(table(counts, rows))
    return 0


def table(possible: dict[str, int], rows: Sequence[dict[str, Any]]) -> str:
    """For a reader: how many of each, and which ones survived."""
    lines = ["# Would the unit tests notice a fault?", ""]
    lines += ["| package | possible faults | tried | killed | timed out | survived |"]
    lines += ["|---|---|---|---|---|---|"]
    for package, count in possible.items():
        told = Counter(row["outcome"] for row in rows if row["package"] == package)
        counts = " | ".join(str(told[outcome]) for outcome in OUTCOMES)
        lines += [f"| {package} | {count} | {told.total()} | {counts} |"]
    lines += ["", "Survivors:", ""]
    for row in rows:
        if row["outcome"] == "survived":
            was, now = (" ".join(row[side].split()) for side in ("was", "now"))
            lines += [f"- {row['file']}:{row['line']} `{was}` → `{now}`"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

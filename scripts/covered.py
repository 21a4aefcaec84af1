"""Fails when a package of the core is covered less than it has to be: `make coverage`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Final

PACKAGES: Final = ("kvstore/engine", "kvstore/wire", "kvstore/tiers/file", "kvstore/client/core")
LINES_MIN: Final = 98.0
BRANCHES_MIN: Final = 95.0


def main(report: Path) -> int:
    """Print both shares of each package in a report of `coverage json`; 1 if one is too low."""
    files = json.loads(report.read_text())["files"]
    failed = False
    for package in PACKAGES:
        sums: Counter[str] = Counter()
        for name, file in files.items():
            if name.startswith(f"{package}/"):
                sums.update({k: v for k, v in file["summary"].items() if isinstance(v, int)})
        lines = 100 * sums["covered_lines"] / sums["num_statements"]
        branches = 100 * sums["covered_branches"] / sums["num_branches"]
        print(f"{package}: lines {lines:.1f} % (at least {LINES_MIN:.0f}), ", end="")
        print(f"branches {branches:.1f} % (at least {BRANCHES_MIN:.0f})")
        failed |= lines < LINES_MIN or branches < BRANCHES_MIN
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

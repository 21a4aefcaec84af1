"""Fails when the core is covered less than it has to be: `make coverage`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

LINES_MIN: Final = 98.0
BRANCHES_MIN: Final = 95.0


def main(report: Path) -> int:
    """Print both shares of a report of `coverage json`; 1 if one is too low."""
    totals = json.loads(report.read_text())["totals"]
    lines = 100 * totals["covered_lines"] / totals["num_statements"]
    branches = 100 * totals["covered_branches"] / totals["num_branches"]
    print(f"lines {lines:.1f} % (at least {LINES_MIN:.0f}), ", end="")
    print(f"branches {branches:.1f} % (at least {BRANCHES_MIN:.0f})")
    return int(lines < LINES_MIN or branches < BRANCHES_MIN)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

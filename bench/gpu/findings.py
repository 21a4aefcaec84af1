"""What a part is given, and what it says: findings, kept on disk as they come.

Imports the standard library only: `run.py` needs it before anything is unpacked.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

NOT_HERE = 77
NAMES = (*("edges", "contract", "kernels", "copies", "node", "hbm", "beside", "arena", "memcheck"),)


class Options(NamedTuple):
    """What every part is given."""

    seed: int
    is_rehearsal: bool = False
    is_short: bool = False
    """Few rounds: under compute-sanitizer everything takes a hundred times as long."""


class NotHere(Exception):
    """What a part needs is not on this machine; carries what."""


class Findings:
    """What a part found so far."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: of a file that holds it, too."""
        self._path, self.values = path, dict[str, Any]()

    def say(self, **found: Any) -> None:
        self.values |= found
        if self._path is not None:
            whole = self._path.with_suffix(".new")
            whole.write_text(json.dumps(self.values))
            whole.replace(self._path)


def read_findings(path: Path) -> dict[str, Any]:
    """What a part left there; empty: nothing that can be read."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def echoed(command: Sequence[str]) -> tuple[int, str]:
    """Run it; its exit code and what it said, which is in the log at once: it may hang in a
    driver."""
    text = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            text += line
    return process.returncode, text

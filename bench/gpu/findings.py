"""What a part is given, and what it says: findings, kept on disk as they come.

Imports the standard library only: `run.py` needs it before anything is unpacked.
"""

from __future__ import annotations

import json
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

"""The files that the style tests look at: those of the repository, ignored ones left out.

Walks the folder instead of asking git, so that it works in an unpacked archive too.
"""

from __future__ import annotations

import os
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("kvstore", "connector", "kernels")
_IGNORED = [".git", *(pattern.rstrip("/") for pattern in (ROOT / ".gitignore").read_text().split())]


def _is_ignored(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _IGNORED)


@cache
def files() -> tuple[Path, ...]:
    """Every file of the repository, relative to the root."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not _is_ignored(name)]
        found += [Path(folder, name).relative_to(ROOT) for name in names if not _is_ignored(name)]
    return tuple(sorted(found))


def python_files() -> tuple[Path, ...]:
    """Python sources written by hand."""
    return tuple(f for f in files() if f.suffix == ".py" and "_pb2" not in f.name)

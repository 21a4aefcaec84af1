"""Code of this process, and code on disk: replacing a package changes no running process, nor the
standby.

Covers: comparing both. Does not cover: changing over (`supervisor`, `kvstore upgrade`).
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from kvstore import __version__
from kvstore.installation import DISTRIBUTION


class Code(NamedTuple):
    """An installed package."""

    version: str
    build: str
    """Digest of its files: two builds may have one version."""


def installed_code() -> Code | None:
    """The package on disk; None while it is being replaced."""
    try:
        found = distribution(DISTRIBUTION)
        record = found.read_text("RECORD") or ""
        return Code(found.version, hashlib.blake2b(record.encode(), digest_size=8).hexdigest())
    except (PackageNotFoundError, OSError, KeyError):
        return None


class LoadedCode:
    """The code of this process. Created when the code has been loaded."""

    def __init__(self) -> None:
        try:
            self._site = Path(str(distribution(DISTRIBUTION).locate_file("")))
        except PackageNotFoundError:
            self._site = Path()
        self._stamp = self._look()
        self._code = installed_code() or Code(__version__, "")

    @property
    def version(self) -> str:
        return self._code.version

    def trouble(self) -> str:
        """A sentence for the operator when other code is installed by now; empty when not."""
        if self._look() == self._stamp:  # reading all of it takes milliseconds
            return ""
        installed = installed_code()
        if installed is None or installed == self._code:
            return ""
        other = f"kvstore {installed.version}"
        if installed.version == self.version:
            other = f"another build of {other}"
        return (
            f"{other} is installed, and this process runs kvstore {self.version}, which it loaded"
            " before: 'kvstore upgrade' has the node run the installed one"
        )

    def _look(self) -> int:
        """A number that changes with every installation beside this package."""
        try:
            return self._site.stat().st_mtime_ns
        except OSError:
            return 0

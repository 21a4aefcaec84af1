"""`kvstore` as users type it; forked, where the nursery of commands is there: a start by exec takes
a second of processor."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Final

from kvstore.testing import process

LIMIT_S: Final = 60.0


def kvstore(*arguments: str, columns: str = "100") -> subprocess.CompletedProcess[str]:
    """Run a command to its end, on a terminal of so many columns. Raises TimeoutExpired."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stderr:
        running = process.launch(
            [sys.executable, "-m", "kvstore.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "COLUMNS": columns, "PYTHONSAFEPATH": "1"},
        )
        with running:
            assert running.stdout is not None
            stdout = running.stdout.read()
            code = running.wait(LIMIT_S)
        stderr.seek(0)
        return subprocess.CompletedProcess(running.args, code, stdout, stderr.read())

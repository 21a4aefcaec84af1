"""A real router process, for tests and benchmarks.

    with RouterProcess.start(tmp_path, ["--worker", "a=http://127.0.0.1:8000"]) as router:
        urllib.request.urlopen(router.url + "/v1/completions", …)

Ready means its ready line. The process is reaped in any case.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvstore.testing.process import READY_TIMEOUT_S, ChildServer, start_ready


class RouterProcess(ChildServer):
    """One `kvstore router`, whose log is in a directory."""

    def __init__(self, process: subprocess.Popen[str], log: Path, ready_line: str) -> None:
        super().__init__(process, ready_line)
        self._log = log

    @classmethod
    def start(cls, directory: Path, flags: Sequence[str], *, name: str = "router") -> RouterProcess:
        """Start one and wait for its ready line. `flags` come last, so they win.

        Raises:
            NodeFailed: it exited, or was not ready in time.
        """
        log = directory / f"{name}.log"
        process, line = start_ready(
            [
                *("-m", "kvstore.cli.main", "router", "--listen", "127.0.0.1:0"),
                *("--metrics", "127.0.0.1:0", *flags),
            ],
            log=log,
            says="kvstore router ready:",
            timeout_s=READY_TIMEOUT_S,
        )
        return cls(process, log, line)

    @property
    def address(self) -> str:
        """HOST:PORT of the API."""
        return self._said(r"listen=(\S+)")

    @property
    def route_address(self) -> str:
        """HOST:PORT of kvstore.v1.Router, on loopback."""
        return f"127.0.0.1:{self._said('route=([0-9]+)')}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def log(self) -> str:
        """Its stderr so far."""
        return self._log.read_text(encoding="utf-8")

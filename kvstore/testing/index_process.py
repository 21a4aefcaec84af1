"""A real index process, and certificates for it and for those who speak to it.

For tests and benchmarks.

    with IndexProcess.start(tmp_path, lab.flags("index", "i1")) as index:
        client = IndexClient([index.address], tls=lab.files("client", "c1"))

Ready means that it said so. Whatever happens, the process is reaped.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.cli.certs import make_certificates
from kvstore.client.tls import Identity, Role, TlsFiles
from kvstore.testing.process import READY_TIMEOUT_S, STOP_TIMEOUT_S, reap, start_ready


class Lab:
    """A CA and certificates in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def files(self, role: Role, name: str, *, days: int = 2, with_index: bool = False) -> TlsFiles:
        """The certificate of a component, made when there is none."""
        cert = self.directory / f"{role}-{name}.crt"
        if not cert.exists():
            make_certificates(
                self.directory, [Identity(role, name)], days=days, nodes_are_indexes=with_index
            )
        return TlsFiles(ca=self.directory / "ca.crt", cert=cert, key=cert.with_suffix(".key"))

    def options(self, name: str) -> dict[str, str]:
        """Of the tcp transport, for a mover that is called just that."""
        cert = self.directory / f"node-{name}.crt"
        if not cert.exists():
            make_certificates(self.directory, [Identity("node", name)], hosts=[name], days=2)
        files = {"ca": self.directory / "ca.crt", "certificate": cert}
        return {
            name: str(file) for name, file in (files | {"key": cert.with_suffix(".key")}).items()
        }

    def flags(self, role: Role, name: str, *, with_index: bool = False) -> tuple[str, ...]:
        """The same as a command takes it."""
        files = self.files(role, name, with_index=with_index)
        return ("--ca", str(files.ca), "--cert", str(files.cert), "--key", str(files.key))


class IndexProcess:
    """One `kvstore index`, whose log is in a directory."""

    def __init__(self, process: subprocess.Popen[str], log: Path, ready_line: str) -> None:
        self.process = process
        self.ready_line = ready_line
        self._log = log

    @classmethod
    def start(
        cls,
        directory: Path,
        flags: Sequence[str] = ("--insecure",),
        *,
        listen: str = "127.0.0.1:0",
        name: str = "index",
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> IndexProcess:
        """Start one and wait for its ready line. `flags` come last, so they win.

        Raises:
            NodeFailed: it exited, or was not ready in time.
        """
        log = directory / f"{name}.log"
        process, line = start_ready(
            [
                *("-m", "kvstore.cli.main", "index", "--listen", listen),
                *("--metrics", "127.0.0.1:0", "--plain", *flags),
            ],
            log=log,
            says="kvstore index ready:",
            timeout_s=ready_timeout_s,
        )
        return cls(process, log, line)

    @property
    def address(self) -> str:
        found = re.search(r"listen=(\S+)", self.ready_line)
        assert found is not None
        return found[1]

    @property
    def metrics_url(self) -> str:
        found = re.search(r"metrics=(http\S+)", self.ready_line)
        assert found is not None
        return found[1]

    @property
    def log(self) -> str:
        """What it wrote to stderr so far."""
        return self._log.read_text(encoding="utf-8")

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def kill(self) -> int:
        """SIGKILL; returns the exit code."""
        self.process.kill()
        return self._wait()

    def pause(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def _wait(self) -> int:
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            reap(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reap(self.process)

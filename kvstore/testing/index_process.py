"""A real index process, and certificates for it and for its clients.

For tests and benchmarks.

    with IndexProcess.start(tmp_path, lab.flags("index", "i1")) as index:
        client = IndexClient([index.address], tls=lab.files("client", "c1"))

Ready means its ready line. The process is reaped in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.cli.certs import make_certificates
from kvstore.client.tls import TlsFiles
from kvstore.testing.process import READY_TIMEOUT_S, ChildServer, start_ready
from kvstore.wire.identity import Identity, Role


class Lab:
    """A CA and certificates in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def files(self, role: Role, name: str, *, days: int = 2, with_index: bool = False) -> TlsFiles:
        """The certificate of a component, made when missing."""
        cert = self.directory / f"{role}-{name}.crt"
        if not cert.exists():
            make_certificates(
                self.directory, [Identity(role, name)], days=days, nodes_are_indexes=with_index
            )
        return TlsFiles(ca=self.directory / "ca.crt", cert=cert, key=cert.with_suffix(".key"))

    def options(self, name: str) -> dict[str, str]:
        """Options of the tcp transport, for a transfer worker of just that name."""
        cert = self.directory / f"node-{name}.crt"
        if not cert.exists():
            make_certificates(self.directory, [Identity("node", name)], hosts=[name], days=2)
        key = cert.with_suffix(".key")
        return {"ca": str(self.directory / "ca.crt"), "certificate": str(cert), "key": str(key)}

    def flags(self, role: Role, name: str, *, with_index: bool = False) -> tuple[str, ...]:
        """The certificate as flags of a command."""
        files = self.files(role, name, with_index=with_index)
        return ("--ca", str(files.ca), "--cert", str(files.cert), "--key", str(files.key))


class IndexProcess(ChildServer):
    """One `kvstore index`, whose log is in a directory."""

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
        return cls(process, line, log)

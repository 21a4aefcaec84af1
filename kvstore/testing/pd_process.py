"""A real `kvstore pd-proxy`, ready at its ready line, reaped in any case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.testing.process import READY_TIMEOUT_S, ChildServer, start_ready


class PdProxyProcess(ChildServer):
    """One proxy; its log is `proxy.log` in a directory."""

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        prefill: Sequence[int],
        decode: Sequence[int],
        flags: Sequence[str] = (),
    ) -> PdProxyProcess:
        """`prefill`, `decode`: ports of engines on this machine. Raises NodeFailed."""
        kinds = [("--prefill", port) for port in prefill] + [("--decode", port) for port in decode]
        engines = [word for flag, port in kinds for word in (flag, f"http://127.0.0.1:{port}")]
        command = ("-m", "kvstore.cli.main", "pd-proxy", "--listen", "127.0.0.1:0")
        process, line = start_ready(
            [*command, *engines, *flags],
            log=directory / "proxy.log",
            says="kvstore pd-proxy ready:",
            timeout_s=READY_TIMEOUT_S,
        )
        return cls(process, line)

    @property
    def port(self) -> int:
        return int(self._said(r"listen=\S+:(\d+)"))

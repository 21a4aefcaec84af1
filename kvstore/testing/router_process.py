"""A real router process, for tests and benchmarks.

    with RouterProcess.start(tmp_path, ["--worker", "a=http://127.0.0.1:8000"]) as router:
        router.await_worker()
        urllib.request.urlopen(router.url + "/v1/completions", …)

Started means its ready line; its workers are probed after that. The process is reaped in any case.
"""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.testing.process import READY_TIMEOUT_S, ChildServer, start_ready


class RouterProcess(ChildServer):
    """One `kvstore router`, whose log is in a directory."""

    @classmethod
    def start(
        cls,
        directory: Path,
        flags: Sequence[str],
        *,
        name: str = "router",
        policy: str = "",
    ) -> RouterProcess:
        """Start one and wait for its ready line. `flags` come last, so they win. `policy`: text of
        its policy file; empty: it has none.

        Raises:
            NodeFailed: it exited, or was not ready in time.
        """
        log, file = directory / f"{name}.log", directory / f"{name}.yaml"
        rules: tuple[str, ...] = ()
        if policy:
            file.write_text(policy, encoding="utf-8")
            rules = ("--policy", str(file))
        process, line = start_ready(
            [
                *("-m", "kvstore.cli.main", "router", "--listen", "127.0.0.1:0"),
                *("--metrics", "127.0.0.1:0", "--drain-delay", "0", *rules, *flags),
            ],
            log=log,
            says="kvstore router ready:",
            timeout_s=READY_TIMEOUT_S,
        )
        return cls(process, line, log)

    @property
    def port(self) -> int:
        """Port of the API."""
        return int(self.address.rpartition(":")[2])

    @property
    def route_address(self) -> str:
        """HOST:PORT of kvstore.v1.Router, on loopback."""
        return f"127.0.0.1:{self._said('route=([0-9]+)')}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def await_worker(self) -> None:
        """Wait until a worker that serves requests has answered a probe. Raises TimeoutError."""
        self._await(f"{self.url}/health", "has no worker that answers", lambda _: True)

    def await_parity(self) -> None:
        """Wait until it routes by prefixes to all workers. Raises TimeoutError: one stays load-only
        or down."""
        url = self.metrics_url.replace("metrics", "healthz")
        self._await(url, "does not route by prefixes", lambda page: "worker" not in page)

    def _await(self, url: str, lacks: str, is_good: Callable[[str], bool]) -> None:
        deadline_s, page = time.monotonic() + READY_TIMEOUT_S, ""
        while time.monotonic() < deadline_s:
            try:
                with urllib.request.urlopen(url, timeout=READY_TIMEOUT_S) as answer:
                    if is_good(page := answer.read().decode()):
                        return
            except urllib.error.HTTPError as error:
                page = error.read().decode()
            threading.Event().wait(0.02)
        raise TimeoutError(f"The router {lacks}: {page.strip() or self.log}")

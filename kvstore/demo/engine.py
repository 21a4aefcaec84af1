"""A real vLLM server as a child process, with or without the connector, and a client for it.

Covers: start, readiness, completions with their time to first token, the engine's own counters,
its processes, stop and kill. Does not cover: the node (`kvstore.testing.process`), prompts
(`kvstore.demo.workload`).

The model is served on a port that the kernel chose on 127.0.0.1. No process survives the caller:
the server runs under `kvstore.demo.guard`, so an engine belongs to the thread that started it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvstore.demo import guard
from kvstore.demo.completions import (
    REQUEST_TIMEOUT_S,
    Completion as Completion,
    CompletionClient,
    EngineError as EngineError,
)
from kvstore.demo.engine_config import ServerConfig
from kvstore.testing.process import on_lasting_thread

STOP_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.05
WARM_UP_PROMPT: Final = tuple(range(32))
"""Prompt of `VllmServer.warm_up`: shorter than a block, so never stored."""

_PARTS: Final = ("tier", "reason")
_ERROR_LINE: Final = re.compile(r"(?:^|[\])] )[\w.]*(?:Error|Exception): ")
"""The last line of a traceback, alone or behind vLLM's prefix."""


class HitCounts(NamedTuple):
    """Counters of the engine since its start."""

    local_hits: float
    """Tokens found in its prefix cache."""
    external_hits: float
    """Tokens that the connector loaded."""
    saved_s: float
    """Seconds of prefill that loads saved, less the time that requests waited for them."""


def launch(config: ServerConfig, log: Path) -> psutil.Process:
    """Start a server that ends with this process; returns its guard (`kvstore.demo.guard`), which
    at SIGTERM ends the server and itself."""
    with log.open("wb") as output:
        return on_lasting_thread(
            lambda: psutil.Popen(
                [sys.executable, guard.__file__, str(os.getpid()), *config.command()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=config.full_environment(),
                start_new_session=True,
            )
        )


class VllmServer(CompletionClient):
    """A running server. Make it with `VllmServer.start`, use it in a `with`."""

    def __init__(self, config: ServerConfig, guard: psutil.Process, log: Path) -> None:
        super().__init__(served_name=config.served_name)
        self.config = config
        self.log = log
        self._guard = guard

    @classmethod
    def start(cls, config: ServerConfig, *, log: Path, warm: bool = True) -> Self:
        """Start a server and wait until it answers, as `await_ready`; `log` receives its output."""
        engine = cls(config, launch(config, log), log)
        try:
            engine.await_ready(warm=warm)
        except BaseException:
            engine.kill()
            raise
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    def await_ready(
        self, *, warm: bool = True, waiting: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until it answers, without a limit: a model may have to be downloaded and compiled.

        Args:
            warm: `warm_up` then.
            waiting: called now and again meanwhile.

        Raises:
            EngineError: it ended; has the last error of the log.
        """
        while not self._is_healthy():
            waiting()
            if self.wait(POLL_S):
                raise EngineError(f"vLLM ended while starting: {self.last_error()}")
        if warm:
            self.warm_up(timeout_s=None)

    def last_line(self) -> str:
        """The end of its log, also of a progress bar."""
        lines = self.log.read_bytes()[-400:].decode(errors="replace").splitlines()
        return lines[-1].strip() if lines else ""

    def _is_healthy(self) -> bool:
        server = self.server()
        with contextlib.suppress(OSError, http.client.HTTPException, psutil.Error):
            for each in server.net_connections("tcp4") if server else ():
                if each.status == "LISTEN":
                    self.port = each.laddr.port
                    return self._request("GET", "/health", timeout_s=5.0)[0] == http.client.OK
        return False

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the end of all its processes. Returns whether they
        have ended.
        """
        with contextlib.suppress(psutil.TimeoutExpired):
            self._guard.wait(timeout_s)
            return True
        return False

    def stop(self) -> None:
        """Send SIGTERM, as a service manager does; SIGKILL when that does not end it."""
        if server := self.server():
            with contextlib.suppress(psutil.NoSuchProcess):
                server.terminate()
                self.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill all its processes, which are reaped on return."""
        for end in (self._guard.terminate, self._guard.kill):
            with contextlib.suppress(psutil.NoSuchProcess):
                end()
            if self.wait(STOP_TIMEOUT_S):
                return

    def last_error(self) -> str:
        """The last line of the log that names an error, and the path of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        # vLLM's server ends with one that only points at the error of its child.
        wrong = [x for x in lines if _ERROR_LINE.search(x) and "root cause" not in x]
        last = (wrong or lines or ["no output"])[-1]
        return f"{last.strip()[-400:]} (log: {self.log})"

    def server(self) -> psutil.Process | None:
        """The process that speaks HTTP; None: it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return next(iter(self._guard.children()), None)
        return None

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def warm_up(self, *, timeout_s: float | None = REQUEST_TIMEOUT_S) -> None:
        """Run a short prompt once; None: without a limit, as a first forward may compile.

        On CPUs with AMX a fresh bfloat16 engine whose very first forward computes a single token
        dies with SIGILL in its attention, connector or not; a cache hit that leaves one token to
        compute is that case. A prefill before it prevents that, and pays for first-time set-up
        that no measurement should contain.
        """
        self.complete(WARM_UP_PROMPT, max_tokens=2, timeout_s=timeout_s)

    # ── cache ────────────────────────────────────────────────────────────────────────────────────

    def forget(self, *, external: bool = False, timeout_s: float = 10.0) -> None:
        """Empty the engine's own prefix cache; `external` resets the connector's too.

        The engine refuses while blocks are in use, as during a store: repeated until it agrees.
        """
        deadline = time.monotonic() + timeout_s
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        while True:
            status, body = self._request("POST", path)
            if status == http.client.OK and msgspec.json.decode(body) == {"success": True}:
                return
            if time.monotonic() > deadline or self.wait(POLL_S):
                raise EngineError(f"the engine did not empty its cache: {status} {body[:200]!r}")

    def metrics(self) -> dict[str, float]:
        """Sample name → sum over its labels; also with each tier or reason behind it, as
        `name{tier="dram"}`.
        """
        status, body = self._request("GET", "/metrics")
        if status != http.client.OK:
            raise EngineError(f"/metrics answered {status}")
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                parts = [f'{{{k}="{v}"}}' for k, v in sample.labels.items() if k in _PARTS]
                for name in ("", *parts):
                    sums[sample.name + name] = sums.get(sample.name + name, 0.0) + sample.value
        return sums

    def hits(self) -> HitCounts:
        """Prompt tokens found in the prefix cache and loaded by the connector, since the engine's
        start.
        """
        sums = self.metrics()
        return HitCounts(
            local_hits=sums["vllm:prefix_cache_hits_total"],
            external_hits=sums.get("vllm:external_prefix_cache_hits_total", 0.0),
            saved_s=sums.get("vllm:kvstore_saved_prefill_seconds_total", 0.0)
            - sums.get("vllm:kvstore_waited_seconds_total", 0.0),
        )

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
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvstore.demo import guard
from kvstore.demo.completions import (
    Completion as Completion,
    CompletionClient,
    EngineError as EngineError,
)
from kvstore.demo.engine_config import ServerConfig
from kvstore.testing import tied

READY_TIMEOUT_S: Final = 300.0
"""A start takes 12 s on a quiet machine, and all of ten times that on a busy one."""
STOP_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.05
WARM_UP_PROMPT: Final = tuple(range(32))
"""Shorter than a block, so never stored. See `VllmServer.warm_up`."""

_SHARED_NAME: Final = re.compile(r"vllm_dist_[0-9a-f]{32}")
"""Name of an engine of several ranks in its log."""
_ERROR_LINE: Final = re.compile(r"(?:^|[\])] )[\w.]*(?:Error|Exception): ")
"""The last line of a traceback, alone or behind vLLM's prefix."""


class HitCounts(msgspec.Struct, frozen=True):
    """The engine's own counters since its start, in tokens."""

    local_queries: float
    local_hits: float
    external_queries: float
    external_hits: float
    preemptions: float


@dataclass(frozen=True)
class Launched:
    """A server's guard (`kvstore.demo.guard`): at SIGTERM it ends the server and itself."""

    pid: int
    pidfd: int
    reap: Callable[[], object]
    """Called once it has ended."""


def launch(config: ServerConfig, log: Path) -> Launched:
    """Start a server that ends with this process."""
    with log.open("wb") as output:
        process = tied.on_lasting_thread(
            lambda: subprocess.Popen(
                [sys.executable, guard.__file__, str(os.getpid()), *config.command()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=config.full_environment(),
                start_new_session=True,
            )
        )
    return Launched(process.pid, os.pidfd_open(process.pid), process.wait)


class VllmServer(CompletionClient):
    """A running server. Make it with `VllmServer.start`, use it in a `with`."""

    def __init__(self, config: ServerConfig, launched: Launched, log: Path) -> None:
        super().__init__()
        self.config = config
        self.log = log
        self.start_seconds = 0.0
        self._guard = launched
        self._ended = False

    @classmethod
    def start(
        cls,
        config: ServerConfig,
        *,
        log: Path,
        ready_timeout_s: float = READY_TIMEOUT_S,
        warm: bool = True,
        launch: Callable[[ServerConfig, Path], Launched] = launch,
    ) -> VllmServer:
        """Start a server and wait until it answers; `log` receives its output.

        Raises:
            EngineError: it ended or was not ready in time; has the last error of the log.
        """
        begin = time.monotonic()
        engine = cls(config, launch(config, log), log)
        try:
            engine._wait_ready(begin + ready_timeout_s)
            engine.start_seconds = time.monotonic() - begin
            if warm:
                engine.warm_up()
        except BaseException:
            engine.kill()
            raise
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    def _wait_ready(self, deadline: float) -> None:
        while not self._is_healthy():
            if self.wait(POLL_S):
                raise EngineError(f"vLLM ended while starting: {self.last_error()}")
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM was not ready in time: {self.last_error()}")

    def _is_healthy(self) -> bool:
        server = self._server()
        if server is None:
            return False
        try:
            listening = [
                c.laddr.port for c in server.net_connections("tcp4") if c.status == "LISTEN"
            ]
            if not listening:
                return False
            self.port = listening[0]
            return self._request("GET", "/health", timeout_s=5.0)[0] == http.client.OK
        except (OSError, http.client.HTTPException, psutil.Error):
            return False

    def wait(self, timeout_s: float) -> bool:
        """True when all its processes have ended, waiting for that up to `timeout_s`."""
        if not self._ended:
            if not select.select([self._guard.pidfd], [], [], timeout_s)[0]:
                return False
            self._guard.reap()
            os.close(self._guard.pidfd)
            self._ended = True
            self._remove_shared_memory()
        return True

    def _remove_shared_memory(self) -> None:
        """vLLM's ranks on CPUs share files in /dev/shm, and leave them there."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        for name in set(_SHARED_NAME.findall(text)):
            for path in Path("/dev/shm").glob(f"{name}-*"):
                path.unlink(missing_ok=True)

    def stop(self) -> None:
        """SIGTERM, as from a service manager; SIGKILL when that does not end it."""
        if server := self._server():
            try:
                server.send_signal(signal.SIGTERM)
            except psutil.NoSuchProcess:
                pass
            else:
                self.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all its processes, reaped on return."""
        wanted = signal.SIGTERM  # the guard kills its descendants and ends
        while not self.wait(0):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._guard.pidfd, wanted)
            self.wait(STOP_TIMEOUT_S)
            wanted = signal.SIGKILL

    def last_error(self) -> str:
        """The last line of the log that names an error, and the path of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        # vLLM's server ends with one that only points at the error of its child.
        wrong = [x for x in lines if _ERROR_LINE.search(x) and "root cause" not in x]
        last = (wrong or lines or ["no output"])[-1]
        return f"{last.strip()[-400:]} (log: {self.log})"

    # ── processes ────────────────────────────────────────────────────────────────────────────────

    def _server(self) -> psutil.Process | None:
        try:
            children = psutil.Process(self._guard.pid).children()
        except psutil.NoSuchProcess:
            return None
        return children[0] if children and not self._ended else None

    def _titled(self, title: str) -> list[int]:
        found = []
        try:
            for process in psutil.Process(self._guard.pid).children(recursive=True):
                try:
                    line = process.cmdline()
                except psutil.Error:
                    continue
                if line and line[0].startswith(title):
                    found.append(process.pid)
        except psutil.NoSuchProcess:
            pass
        return sorted(found)

    @property
    def server_pid(self) -> int:
        """The process that speaks HTTP."""
        server = self._server()
        if server is None:
            raise EngineError("the engine has ended")
        return server.pid

    @property
    def scheduler_pid(self) -> int:
        """The process with the scheduler side of the connector."""
        return self._titled("VLLM::EngineCore")[0]

    @property
    def worker_pids(self) -> list[int]:
        """The processes with the worker side, one per rank."""
        return self._titled("VLLM::Worker")

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def warm_up(self) -> None:
        """Run a short prompt once.

        On CPUs with AMX a fresh bfloat16 engine whose very first forward computes a single token
        dies with SIGILL in its attention, connector or not; a cache hit that leaves one token to
        compute is that case. A prefill before it prevents that, and pays for first-time set-up
        that no measurement should contain.
        """
        self.complete(WARM_UP_PROMPT, max_tokens=2)

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
        """All samples of /metrics, summed over their labels."""
        status, body = self._request("GET", "/metrics")
        if status != http.client.OK:
            raise EngineError(f"/metrics answered {status}")
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def hits(self) -> HitCounts:
        """Prompt tokens looked up and found, by prefix cache and connector."""
        sums = self.metrics()
        return HitCounts(
            local_queries=sums["vllm:prefix_cache_queries_total"],
            local_hits=sums["vllm:prefix_cache_hits_total"],
            external_queries=sums.get("vllm:external_prefix_cache_queries_total", 0.0),
            external_hits=sums.get("vllm:external_prefix_cache_hits_total", 0.0),
            preemptions=sums.get("vllm:num_preemptions_total", 0.0),
        )

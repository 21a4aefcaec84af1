"""LMCache's server and a vLLM with its connector, as processes, with the settings that suit them
best on a machine without a GPU.

Covers: start, readiness, emptying its memory, stop, and what its command lines are. Does not cover:
what is measured (the modules beside this one). Both run with the Python of another environment,
because LMCache's pins clash with ours: `make bench-peers` makes it.

What was tried here, with one-token requests of 3,283 tokens: chunks of 128 tokens, the engine's
block, do better than the default of 256, of which only 3,072 tokens match; without CUDA only the
engine-driven transfer mode works; a lookup on arrival changes nothing that can be told from noise.
Its observability is off. Blocks filled while decoding are stored, as kvstore does.
"""

from __future__ import annotations

import http.client
import os
import select
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import psutil

from kvstore.demo.models import BLOCK_TOKENS
from kvstore.errors import KVStoreError
from kvstore.testing.process import popen_tied
from tests.kit.engines import EngineConfig

READY_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.05
EXTRA: Final[dict[str, object]] = {
    "lmcache.mp.eager_prefetch": True,  # look up when the request arrives
    "lmcache.mp.save_decode_cache": True,  # as kvstore does
}
SERVER_FLAGS: Final = (
    *("--chunk-size", str(BLOCK_TOKENS)),
    *("--eviction-policy", "LRU"),
    *("--supported-transfer-mode", "engine_driven"),
    "--disable-observability",
)


class LMCacheError(KVStoreError):
    """LMCache's server did not start or did not do what it was asked."""


@dataclass(frozen=True, kw_only=True)
class LMCacheEngineConfig(EngineConfig):
    """vLLM with LMCache's connector, in LMCache's environment."""

    python: Path
    port: int

    def command(self) -> list[str]:
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": self.port,
                **EXTRA,
            },
        }
        _, *rest = super().command()
        return [
            str(self.python),
            *rest,
            "--kv-transfer-config",
            msgspec.json.encode(transfer).decode(),
        ]


class LMCacheServer:
    """One `lmcache server`. Its ports were free a moment before: it cannot be given port 0."""

    def __init__(self, process: subprocess.Popen[bytes], ports: tuple[int, int], log: Path) -> None:
        self.port, self._http_port = ports
        self.log = log
        self._process = process

    @classmethod
    def start(
        cls, python: Path, *, log: Path, memory_gib: int, files: Path | None = None
    ) -> LMCacheServer:
        """Start a server and wait until it is healthy; with `files`, its fs adapter stores there.

        Raises:
            LMCacheError: it ended, or was not healthy in time.
        """
        ports = _free_ports()
        with log.open("ab") as output:
            process = popen_tied(
                server_command(python, ports, memory_gib=memory_gib, files=files),
                guarded=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )
        server = cls(process, ports, log)
        try:
            server._wait_healthy()
        except BaseException:
            server.stop()
            raise
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The server itself, not its guard."""
        (server,) = psutil.Process(self._process.pid).children()
        return server.pid

    @property
    def pool(self) -> Path:
        """The shared memory that holds its blocks."""
        return _pool(self.port)

    def clear(self) -> None:
        """Empty its memory; files stay. It refuses nothing, but leaves what is in use."""
        status, body = self._request("POST", "/cache/clear")
        if status != http.client.OK:
            raise LMCacheError(f"LMCache did not empty its memory: {status} {body[:200]!r}")

    def stop(self) -> None:
        """End it and all its processes, and remove its shared memory if it did not."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # the guard kills its descendants and ends
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.pool.unlink(missing_ok=True)

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        with ExitStack() as stack:
            pidfd = os.pidfd_open(self._process.pid)
            stack.callback(os.close, pidfd)
            while not self._is_healthy():
                ended = bool(select.select([pidfd], [], [], POLL_S)[0])
                if ended or time.monotonic() > deadline:
                    last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
                    what = "ended while starting" if ended else "was not ready in time"
                    raise LMCacheError(f"LMCache's server {what}: {' '.join(last)} ({self.log})")

    def _is_healthy(self) -> bool:
        try:
            return self._request("GET", "/healthcheck")[0] == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def _request(self, method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=10.0)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def server_command(
    python: Path, ports: tuple[int, int], *, memory_gib: int, files: Path | None
) -> list[str]:
    """The server's command line."""
    command = [str(python.with_name("lmcache")), "server", *SERVER_FLAGS]
    command += ["--port", str(ports[0]), "--http-port", str(ports[1])]
    command += ["--l1-size-gb", str(memory_gib), "--shm-name", _pool(ports[0]).name]
    if files is not None:
        adapter: dict[str, Any] = {"type": "fs", "base_path": str(files)}
        command += ["--l2-adapter", msgspec.json.encode(adapter).decode()]
    return command


def _pool(port: int) -> Path:
    # It puts this prefix before names that do not have it.
    return Path("/dev/shm") / f"lmcache_l1_pool_kvstore-bench-{os.getpid()}-{port}"


def _free_ports() -> tuple[int, int]:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        return one.getsockname()[1], two.getsockname()[1]

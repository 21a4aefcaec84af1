"""A real vLLM server as a child process, with or without the connector, and a client for it.

Covers: start, readiness, streamed completions with their tokens and times, the engine's own
counters, its processes, stop and kill. Does not cover: the node (`kvstore.testing.process`),
prompts (`kvstore.demo.workload`).

The model is served on a port that the kernel chose on 127.0.0.1. No process survives the caller:
the server is tied to it (`kvstore.testing.tied`).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvstore.errors import KVStoreError
from kvstore.supervisor.child import told
from kvstore.testing.process import on_lasting_thread, open_local, tie

SERVED_NAME: Final = "model"
REQUEST_TIMEOUT_S: Final = 120.0
JSON: Final = {"Content-Type": "application/json"}
STOP_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.05
SIGNALLED: Final = 128
"""Exit status of a guard whose server a signal ended, less the signal's number."""
WARM_UP_PROMPT: Final = tuple(range(32))
"""Prompt of `VllmServer.warm_up`: shorter than a block, so never stored."""

_PARTS: Final = ("tier", "reason")
_ERROR_LINE: Final = re.compile(r"(?:^|[\])] )[\w.]*(?:Error|Exception): ")
"""The last line of a traceback, alone or behind vLLM's prefix."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one vLLM server; by default it computes in float32."""

    model: Path | str
    """Directory, or name of the model in a hub."""
    served_name: str = SERVED_NAME
    socket: Path | None = None
    """The node's attach socket; None: vLLM without the connector."""
    max_model_len: int | None = 4096
    """Longest request in tokens; None: the model's own limit."""
    kv_blocks: int | None = None
    """Blocks (128 tokens) of the engine's own cache; None: as many as fit 1 GiB."""
    flags: tuple[str, ...] = ("--enforce-eager", "--dtype", "float32", "--max-num-seqs", "64")
    """Further flags of the server."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the server."""

    def command(self) -> list[str]:
        """The server's command line."""
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
            *("--port", "0", "--model", str(self.model), "--served-model-name", self.served_name),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--prefix-caching-hash-algo", "sha256_cbor", *self.flags),
        ]
        if self.max_model_len is not None:
            command += ["--max-model-len", str(self.max_model_len)]
        if self.kv_blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.kv_blocks)]
        if self.socket is not None:
            transfer = msgspec.json.encode(self.transfer(self.socket)).decode()
            command += ["--kv-transfer-config", transfer]
        return command

    def transfer(self, socket: Path) -> dict[str, object]:
        """Its connector's configuration, with the node's attach socket."""
        return {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(socket)},
        }

    def full_environment(self) -> dict[str, str]:
        """The server's environment."""
        return {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Binding would pin every engine of the machine to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": "1",  # offers /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            # The working directory must not shadow the installed package.
            "PYTHONSAFEPATH": "1",
            # Threads that spin while they wait, the default, are right on cores of their own. On
            # cores that others use too, a step then waits again and again for a thread that is
            # not running: seconds instead of milliseconds.
            "OMP_WAIT_POLICY": "PASSIVE",
            **({"HF_HUB_OFFLINE": "1"} if isinstance(self.model, Path) else {}),
            **self.environment,
        }


# ── the client ────────────────────────────────────────────────────────────────────────────────────


class EngineError(KVStoreError):
    """The engine did not start, ended, or answered something other than a completion."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request."""

    id: str = ""
    """Id of the request, as the client gets it."""
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed: prefix cache and connector together."""
    ttft_s: float
    """Seconds from before the request was sent until its first token arrived."""
    duration_s: float
    token_s: tuple[float, ...] = ()
    """Seconds from before the request was sent until each token arrived."""


class _Chunk(msgspec.Struct):
    """The used part of a streamed completion."""

    class Choice(msgspec.Struct):
        token_ids: list[int] | None = None

    class Usage(msgspec.Struct):
        prompt_tokens: int
        prompt_tokens_details: dict[str, Any] | None = None

    id: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


class CompletionClient:
    """Client of a server, or of a proxy in front of some, at a port of 127.0.0.1."""

    def __init__(self, port: int = 0, served_name: str = SERVED_NAME) -> None:
        self.port, self._served_name = port, served_name

    def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        timeout_s: float | None = REQUEST_TIMEOUT_S,
        extra: dict[str, object] | None = None,
    ) -> Completion:
        """Greedy completion of token ids, streamed. `extra` goes into the request's body.

        Raises:
            EngineError: refused, broken off, or later than `timeout_s` between two tokens.
        """
        body = {
            "model": self._served_name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **(extra or {}),
        }
        tokens: list[int] = []
        token_s: list[float] = []
        chunk, usage = _Chunk(), None
        data = msgspec.json.encode(body)
        begin = time.perf_counter()
        try:
            with self._open("/v1/completions", data, timeout_s=timeout_s) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        chunk = _chunk_decoder.decode(line[6:])
                        if chunk.error is not None:
                            raise EngineError(f"the engine reported {str(chunk.error)[:400]}")
                        tokens += [new for its in chunk.choices for new in its.token_ids or ()]
                        token_s += [time.perf_counter() - begin] * (len(tokens) - len(token_s))
                        usage = chunk.usage or usage
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise EngineError(f"the completion broke off: {error!r}") from error
        if usage is None or not tokens:
            raise EngineError("the completion ended without a token or its usage")
        return Completion(
            id=chunk.id,
            tokens=tuple(tokens),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=(usage.prompt_tokens_details or {}).get("cached_tokens") or 0,
            ttft_s=token_s[0],
            duration_s=time.perf_counter() - begin,
            token_s=tuple(token_s),
        )

    def _open(
        self, path: str, body: bytes | None = None, *, timeout_s: float | None = 30.0
    ) -> http.client.HTTPResponse:
        """Answer to a GET, or with a body to a POST. Raises EngineError: an error; OSError."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, JSON)
        try:
            return open_local(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(2000).decode(errors="replace")
            raise EngineError(f"the engine answered {error.code}: {text}") from None


# ── the server ────────────────────────────────────────────────────────────────────────────────────


def samples(url: str) -> dict[str, float]:
    """Numbers of a page of metrics: sample name → sum over its labels; also with each tier or
    reason behind it, as `name{tier="dram"}`.
    """
    with open_local(url, timeout=30.0) as answer:
        page = answer.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            parts = [f'{{{k}="{v}"}}' for k, v in sample.labels.items() if k in _PARTS]
            for name in ("", *parts):
                sums[sample.name + name] = sums.get(sample.name + name, 0.0) + sample.value
    return sums


class HitCounts(NamedTuple):
    """Counters of the engine since its start."""

    local_hits: float
    """Tokens found in its prefix cache."""
    external_hits: float
    """Tokens that the connector loaded."""
    saved_s: float
    """Seconds of prefill that loads saved, less the time that requests waited for them."""


def launch(config: ServerConfig, log: Path) -> psutil.Process:
    """Start a server that ends with this process; returns its guard (`kvstore.testing.tied`), which
    at SIGTERM ends the server and itself."""
    with log.open("wb") as output:
        return on_lasting_thread(
            lambda: psutil.Popen(
                tie(config.command(), guarded=True),
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
        with contextlib.suppress(OSError, http.client.HTTPException, psutil.Error, EngineError):
            for each in server.net_connections("tcp4") if server else ():
                if each.status == "LISTEN":
                    self.port = each.laddr.port
                    with self._open("/health", timeout_s=5.0):
                        return True
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
        """The signal that ended the server, else the last line of its log that names an error;
        and the path of the log."""
        with contextlib.suppress(psutil.TimeoutExpired):
            code = self._guard.wait(0) or 0
            if SIGNALLED < code < SIGNALLED + signal.NSIG:
                return f"ended by {told(SIGNALLED - code)} (log: {self.log})"
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

    def as_worker(self, name: str, node: str) -> str:
        """Flag of a router for this engine. `node`: its node, and any further settings."""
        return f"--worker={name}=http://127.0.0.1:{self.port},node={node}"

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
            with self._open(path, b"") as answer:
                said = answer.read()
            if msgspec.json.decode(said) == {"success": True}:
                return
            if time.monotonic() > deadline or self.wait(POLL_S):
                raise EngineError(f"the engine did not empty its cache: {said[:200]!r}")

    def metrics(self) -> dict[str, float]:
        """Its samples, as `samples`."""
        return samples(f"http://127.0.0.1:{self.port}/metrics")

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

"""Engines of tests and benchmarks: settings that the demo does not need, many requests at a time,
requests that are given up, and the processes of an engine."""

from __future__ import annotations

import functools
import http.client
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec
import psutil

from kvstore.demo.engine import (
    JSON,
    SERVED_NAME,
    Completion,
    CompletionClient,
    EngineError,
    ServerConfig,
    VllmServer,
)

GIVE_UP_S = 120.0
Dtype = Literal["float32", "bfloat16"]
_POLL_S: Final = 0.001
_SHARED_NAME: Final = re.compile(r"vllm_dist_[0-9a-f]{32}")
"""Name of an engine of several ranks in its log."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ServerConfig):
    """Settings of one vLLM server."""

    dtype: Dtype = "float32"
    """float32 where tokens are compared: in bfloat16 a prefix-cache hit of vLLM already changes one
    greedy output in about a hundred against a full recompute."""
    max_num_seqs: int = 64
    connector: tuple[str, str] = ("kvstore.connector", "KVStoreConnector")
    """Module and class."""
    engine_id: str = ""
    """Empty: vLLM makes one."""
    connector_extra: dict[str, object] = field(default_factory=dict)
    """Further keys of `kv_connector_extra_config`."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the server."""

    def command(self) -> list[str]:
        """That of the demo; of an argument that is there twice, vLLM takes the last."""
        mine = ("--dtype", self.dtype, "--max-num-seqs", str(self.max_num_seqs))
        return [*super().command(), *mine, *self.arguments]

    def transfer(self, socket: Path) -> dict[str, object]:
        """With another connector, and more of its settings."""
        return {
            **super().transfer(socket),
            **({"engine_id": self.engine_id} if self.engine_id else {}),
            "kv_connector_module_path": self.connector[0],
            "kv_connector": self.connector[1],
            "kv_connector_extra_config": {"socket": str(socket), **self.connector_extra},
        }


class EngineServer(VllmServer):
    """An engine that may have several ranks: on CPUs they share files in /dev/shm, and leave them
    there."""

    config: EngineConfig

    def wait(self, timeout_s: float) -> bool:
        """As `VllmServer.wait`; removes the files in the end."""
        if has_ended := super().wait(timeout_s):
            text = self.log.read_text(errors="replace") if self.log.exists() else ""
            for name in set(_SHARED_NAME.findall(text)):
                for path in Path("/dev/shm").glob(f"{name}-*"):
                    path.unlink(missing_ok=True)
        return has_ended


def complete_many(
    client: CompletionClient,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    concurrency: int,
) -> list[Completion]:
    """Completions of all prompts, in their order, `concurrency` at a time."""
    ask = functools.partial(client.complete, max_tokens=max_tokens)
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, prompts))


def abandon(
    client: CompletionClient, prompt: Sequence[int], *, max_tokens: int, until: Callable[[], bool]
) -> None:
    """Send a request and hang up at `until`; vLLM aborts requests of a closed connection.

    Raises:
        EngineError: no such moment within GIVE_UP_S, or before the engine ended.
    """
    deadline = time.monotonic() + GIVE_UP_S
    body = {"model": SERVED_NAME, "prompt": list(prompt), "max_tokens": max_tokens}
    body |= {"temperature": 0.0, "ignore_eos": True, "stream": True}
    made = http.client.HTTPConnection("127.0.0.1", client.port, timeout=GIVE_UP_S)
    with closing(made) as connection:
        connection.request("POST", "/v1/completions", msgspec.json.encode(body), JSON)
        while not until():
            has_ended = isinstance(client, VllmServer) and client.wait(0)
            if time.monotonic() > deadline or has_ended:
                raise EngineError("the moment to hang up did not come")
            threading.Event().wait(_POLL_S)


def server_pid(engine: VllmServer) -> int:
    """The process that speaks HTTP."""
    return _server(engine).pid


def scheduler_pid(engine: VllmServer) -> int:
    """The process with the scheduler side of the connector."""
    return _titled(engine, "VLLM::EngineCore")[0]


def worker_pids(engine: VllmServer) -> list[int]:
    """The processes with the worker side, one per rank."""
    return _titled(engine, "VLLM::Worker")


def _server(engine: VllmServer) -> psutil.Process:
    server = engine.server()
    if server is None:
        raise EngineError("the engine has ended")
    return server


def _titled(engine: VllmServer, title: str) -> list[int]:
    found = []
    for process in _server(engine).children(recursive=True):
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if line and line[0].startswith(title):
            found.append(process.pid)
    return sorted(found)

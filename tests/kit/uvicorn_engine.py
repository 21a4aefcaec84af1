"""An engine whose HTTP is that of vLLM's API server: uvicorn over httptools, with vLLM's bounds, on
the virtual loop that is set.

    UvicornEngine().flag("a")            # for --worker

Routes are those of `METHODS`, and the management of `MANAGED`; each answers with what it saw, as
JSON. All other paths are 404, and other methods 405, as by FastAPI.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.kit.virtual_router import virtual_loop

uvicorn: Any = pytest.importorskip("uvicorn", reason="it comes with vLLM")

METRICS = (
    'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.1\n'
)
METHODS = {
    "POST": (
        *("/v1/completions", "/v1/chat/completions", "/invocations", "/v1/completions/render"),
        *("/inference/v1/generate", "/v1/new", "/ping", "/v1/models/m/warm"),
    ),
    "GET": (
        *("/version", "/load", "/tokenizer_info", "/openapi.json", "/ping", "/v1/files/b%20c"),
        "/v1/models",
    ),
    **dict.fromkeys(("PUT", "PATCH", "DELETE"), ("/v1/files/b%20c",)),
}
"""Method → raw paths that take it."""
MANAGED = (
    *("/reset_prefix_cache", "/sleep", "/wake_up", "/collective_rpc", "/v1/load_lora_adapter"),
    *("/update_weights", "/scale_elastic_ep", "/start_profile", "/pause", "/server_info"),
)


class UvicornEngine:
    """One such engine."""

    def __init__(self, *names: str) -> None:
        """`names`: of the models that it lists; none: `m`."""
        self.names = list(names or "m")
        self.adapters: list[str] = []
        """Names of the adapters of its first model."""
        self.lists_read = 0
        """Number of times that its models were asked for."""
        self.status = 200
        """Of its answers to what it takes."""
        self.seen: list[tuple[str, str, list[tuple[bytes, bytes]], bytes]] = []
        """(method, target, headers, body) of each request besides probes."""
        config = uvicorn.Config(
            self._answer,
            loop="asyncio",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        config.h11_max_incomplete_event_size = 4 << 20
        config.load()
        more = {"server_state": uvicorn.server.ServerState(), "app_state": {}}
        loop = virtual_loop()
        made = functools.partial(config.http_protocol_class, config=config, _loop=loop, **more)
        self.port = loop.serve(made).port[1]

    def flag(self, name: str, more: str = "") -> str:
        """For `--worker`."""
        return f"{name}=http://127.0.0.1:{self.port}{more}"

    async def _answer(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body, is_over = b"", False
        while not is_over:
            message = await receive()
            body, is_over = body + message.get("body", b""), not message.get("more_body")
        method, path = scope["method"], scope["path"]
        status, kind, content = 200, b"application/json", b""
        if path == "/metrics":
            content = METRICS.encode()
        elif (method, path) == ("GET", "/v1/models"):
            self.lists_read += 1
            rows = [{"id": name, "object": "model"} for name in self.names]
            rows += [{"id": name, "parent": self.names[0]} for name in self.adapters]
            content = json.dumps({"object": "list", "data": rows}).encode()
        elif path != "/health":
            target = scope["raw_path"].decode() + "?" * bool(scope["query_string"])
            target += scope["query_string"].decode()
            self.seen.append((method, target, scope["headers"], body))
            raw = scope["raw_path"].decode()
            is_there = any(raw in (*paths, *MANAGED) for paths in METHODS.values())
            is_taken = path in MANAGED or raw in METHODS.get(method, ())
            status = self.status if is_taken else 405 if is_there else 404
            sizes = {"headers": len(scope["headers"]), "body": len(body)}
            content = json.dumps({"method": method, "path": path, **sizes}).encode()
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

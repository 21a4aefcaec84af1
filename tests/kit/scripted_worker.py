"""An OpenAI engine that does what a script says: a process of its own with real HTTP, or in virtual
time (`VirtualWorker`).

    with ScriptedWorker.start(tmp_path, "a") as worker:
        worker.script("fail")            # or slow, die, hang, stuck, refuse, raw, flood, ok

It counts requests, aborts and what it saw last, which `seen` shows. Answers stream `pieces` tokens,
named `mark`, `pause_s` apart, after `delay_s` (`delays_s`: of the next requests). Health and
metrics follow the script too: `hang` answers nothing at all. `stuck` only accepts; `held` waits
for another script and follows it, but for bodies below `from_bytes`. `render` makes one token of
each byte. As a prefiller it answers with parameters (without with `params` False); as a decoder it
waits `push_s` for blocks.

It refuses what vLLM refuses: paths that there are not, bodies that are no JSON, names of models
that it does not list, prompts longer than `context` (one token for `bytes_per_token` of the body),
responses that it has not stored. `lingers`: a stream has said its last word, and does not end.
`cuts`: so many requests lose their connection before the first byte. One with a field `poison`
gets 500 from any.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import subprocess
import sys
import urllib.request
import uuid
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from kvstore.testing.process import ChildServer, start_ready
from kvstore.wire.requests import (
    DecodePart,
    PrefillPart,
    adapter_answer,
    answer_of,
    asks_for_adapter,
    read_transfer,
)

if TYPE_CHECKING:
    from tests.kit.virtual_loop import VirtualLoop

BODIES_MAX = 1000
BODY_BYTES_MAX = 1 << 16
"""Larger ones are not kept."""
HEAD_BYTES_MAX = 4 << 20
RESPONSES = "/v1/responses"
JSON_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", RESPONSES),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v2/embed", "/pooling"),
    *("/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/generative_scoring", "/tokenize", "/detokenize"),
)
FORM_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")


class ScriptedWorker(ChildServer):
    """One such engine."""

    def __init__(
        self, name: str, process: subprocess.Popen[str], ready_line: str, log_file: Path
    ) -> None:
        super().__init__(process, ready_line, log_file)
        self.name = name
        self.url = ready_line.split()[-1]

    @classmethod
    def start(cls, directory: Path, name: str, *, port: int = 0) -> ScriptedWorker:
        log = directory / f"worker-{name}.log"
        process, line = start_ready(
            [__file__, str(port)], log=log, says="worker ready", timeout_s=60
        )
        return cls(name, process, line, log)

    @property
    def flag(self) -> str:
        """For `--worker`."""
        return f"{self.name}={self.url}"

    def script(self, mode: str, **more: Any) -> None:
        """Do this from now on."""
        self._ask("/script", {"mode": mode, **more})

    def seen(self) -> dict[str, Any]:
        """Counts, and the last request."""
        return self._ask("/seen", {})

    def bodies(self) -> list[str]:
        """Of all requests since this was asked last, in order."""
        found: list[str] = self._ask("/bodies", {})["bodies"]
        return found

    def _ask(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, json.dumps(content).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found


class _Script:
    """The server inside."""

    def __init__(self) -> None:
        self.mode: dict[str, Any] = {"mode": "ok"}
        names = ("requests", "aborted", "ended", "running", "prefills", "decodes", "scrapes")
        self.seen: dict[str, Any] = dict.fromkeys(names, 0)
        self.bodies = deque[str](maxlen=BODIES_MAX)
        self.stored: dict[str, Any] = {}
        """Responses by their ids."""
        self._is_scripted = asyncio.Event()

    def follow(self, mode: dict[str, Any]) -> None:
        self.mode = mode
        self._is_scripted.set()
        self._is_scripted = asyncio.Event()

    def taken(self) -> list[str]:
        """Bodies since this was asked last."""
        found = [*self.bodies]
        self.bodies.clear()
        return found

    async def set(self, request: web.Request) -> web.Response:
        self.follow(await request.json())
        return web.json_response({})

    async def tell(self, _: web.Request) -> web.Response:
        return web.json_response(self.seen)

    async def tell_bodies(self, _: web.Request) -> web.Response:
        return web.json_response({"bodies": self.taken()})

    async def health(self, _: web.Request) -> web.Response:
        if self.mode["mode"] == "hang":
            await asyncio.sleep(3600)
        return web.Response(status=503 if self.mode["mode"] == "sick" else 200)

    async def models(self, _: web.Request) -> web.Response:
        self.seen["models_read"] = self.seen.get("models_read", 0) + 1
        names = self.mode.get("models", ["m"])
        adapters = [
            {"id": name, "parent": names[0], "root": path}
            for name, path in self.mode.get("adapters", {}).items()
        ]
        is_said = "context" in self.mode and self.mode.get("lists", True)
        tokens = {"max_model_len": self.mode["context"]} if is_said else {}
        rows = [{"id": name, "object": "model", "created": 1, **tokens} for name in names]
        self.seen["models_read"] = self.seen.get("models_read", 0) + 1
        return web.json_response({"object": "list", "data": [*rows, *adapters]})

    async def about_response(self, request: web.Request) -> web.StreamResponse:
        """GET or cancel of a stored one; vLLM deletes none."""
        if request.method not in ("GET", "POST"):
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "POST"])
        self.seen["about"] = [*self.seen.get("about", []), f"{request.method} {request.path}"]
        self.seen["about_body"] = (await request.read()).decode()
        found = self.stored.get(request.match_info["id"])
        if found is None:
            return no_response(request.match_info["id"])
        if request.path.endswith("/cancel"):
            return refused("Cannot cancel a synchronous response.", param="response_id")
        if self.mode["mode"] == "half":
            out = web.StreamResponse()
            await out.prepare(request)
            await out.write(b"half of ")
            await asyncio.sleep(1)
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        return web.json_response(found)

    async def metrics(self, _: web.Request) -> web.Response:
        self.seen["scrapes"] += 1
        if self.mode["mode"] == "hang":
            await asyncio.sleep(3600)
        if self.mode["mode"] == "sick":
            return web.Response(status=503)
        if (scripted := self.mode.get("metrics")) is not None:
            return web.Response(text=scripted, status=self.mode.get("metrics_status", 200))
        return web.Response(
            text=f"vllm:num_requests_running {self.seen['running']}\n"
            "vllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n"
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
        )

    async def render(self, request: web.Request) -> web.Response:
        if self.mode.get("renders", True) is not True:
            return web.Response(status=403)
        body = await request.json()
        text = body.get("prompt") or json.dumps(body.get("messages"))
        ids = text if isinstance(text, list) else list(text.encode())
        found = {"token_ids": ids}
        return web.json_response([found] if request.path.startswith("/v1/completions") else found)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.seen["requests"] += 1
        self.seen["running"] += 1
        try:
            answer = await self._complete(request)
        except (asyncio.CancelledError, ConnectionError):
            self.seen["aborted"] += 1
            raise
        else:
            self.seen["ended"] += 1
            return answer
        finally:
            self.seen["running"] -= 1

    def _of_adapter(self, asked: dict[str, Any]) -> dict[str, Any]:
        if not asks_for_adapter(asked.get("kv_transfer_params")) or "digest" not in self.mode:
            return {}
        self.seen["asked_for_adapters"] = self.seen.get("asked_for_adapters", 0) + 1
        digest = bytes.fromhex(self.mode["digest"]) or "its files changed"
        return {"kv_transfer_params": adapter_answer(digest)}

    def _keep(self, request: web.Request, body: str) -> None:
        headers = [[k, v] for k, v in request.headers.items()]
        self.seen |= {"path": request.path, "headers": headers, "body": body}
        self.seen["target"] = request.raw_path
        if len(body) <= BODY_BYTES_MAX:
            self.bodies.append(body)

    def _prompt_tokens(self, body: bytes) -> int:
        per_token = self.mode.get("bytes_per_token")
        return len(body) // per_token if per_token else int(self.mode.get("prompt_tokens", 100))

    def _refusal(self, asked: Any, body: bytes) -> web.Response | None:
        """vLLM's word about a request that it does not serve."""
        if not isinstance(asked, dict):
            return refused("1 validation error: the body is no object")
        model = asked.get("model")
        if model and model not in (*self.mode.get("models", ["m"]), *self.mode.get("adapters", {})):
            text = f"The model `{model}` does not exist."
            return refused(text, status=404, kind="NotFoundError", param="model")
        tokens, context = self._prompt_tokens(body), self.mode.get("context")
        if context is not None and tokens > context:
            return refused(
                f"This model's maximum context length is {context} tokens. However, your prompt"
                f" contains {tokens} input tokens, which exceeds this limit even without any output"
                " tokens. Please reduce the length of the input prompt.",
                param="input_tokens",
            )
        before = asked.get("previous_response_id")
        if not isinstance(before, str | None):
            return refused("1 validation error: Input should be a valid string")
        return no_response(before) if before is not None and before not in self.stored else None

    async def form(self, request: web.Request) -> web.StreamResponse:
        """A form is counted, and answered with what came."""
        body = await request.read()
        self._keep(request, "")
        self.seen["requests"] += 1
        self.seen["digest"] = hashlib.sha256(body).hexdigest()
        if b'name="file"' not in body:
            return refused("1 validation error: file")
        return web.json_response({"text": "abc"})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self._keep(request, body.decode(errors="replace"))
        if self.mode["mode"] == "held" and len(body) >= self.mode.get("from_bytes", 0):
            await self._is_scripted.wait()
        mode = self.mode["mode"]
        if mode == "fail" or b'"poison"' in body:
            status, more = self.mode.get("status", 500), self.mode.get("headers")
            return web.json_response({"error": "scripted"}, status=status, headers=more)
        if mode == "raw":
            return web.Response(text=self.mode["text"], content_type="application/json")
        if mode == "refuse":
            return web.json_response({"error": "no"}, status=self.mode.get("status", 400))
        if mode in ("hang", "stuck"):
            await asyncio.sleep(3600)
        delays = self.mode.get("delays_s")
        await asyncio.sleep(delays.pop(0) if delays else self.mode.get("delay_s", 0))
        if mode == "cut" or self.mode.get("cuts", 0) > 0:
            self.mode["cuts"] = self.mode.get("cuts", 0) - 1
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        if not request.headers.get("Content-Type", "").lower().startswith("application/json"):
            return refused("Unsupported Media Type: Only 'application/json' is allowed")
        try:
            asked = json.loads(body)
        except ValueError:
            return refused("JSON decode error")
        if (refusal := self._refusal(asked, body)) is not None:
            return refusal
        part = read_transfer(asked.get("kv_transfer_params"), "cmpl-none-00000000")
        if isinstance(part, PrefillPart):
            self.seen["prefills"] += 1
            assert (asked["max_tokens"], asked["stream"]) == (1, False)
        if isinstance(part, DecodePart):
            self.seen["decodes"] += 1
            await asyncio.sleep(self.mode.get("push_s", 0))
        if mode == "flood":
            return await self._flood(request)
        details = {"cached_tokens": 64}
        tokens = self._prompt_tokens(body)
        usage = {"prompt_tokens": tokens, "completion_tokens": 3, "prompt_tokens_details": details}
        if not self.mode.get("reports", True):
            usage = {}
        if isinstance(part, PrefillPart) and self.mode.get("params", True):
            more = answer_of(part, node="p", engine="e", request_id="r", tokens=100)
            return web.json_response({"choices": [{"text": "a"}], "kv_transfer_params": more})
        if request.path == RESPONSES:
            return await self._respond(request, asked, tokens)
        if not asked.get("stream"):
            done = {"object": "text_completion", "choices": [{"text": "abc"}], "usage": usage}
            done |= self._of_adapter(asked)
            more = {"X-Kvstore-Spoof": "1", "X-Engine": "scripted"}
            return web.json_response(done, headers=more)
        return await self._stream(request, usage)

    async def _stream(self, request: web.Request, usage: dict[str, Any]) -> web.StreamResponse:
        out, mode = (
            web.StreamResponse(headers={"Content-Type": "text/event-stream"}),
            self.mode["mode"],
        )
        await out.prepare(request)
        for number in range(self.mode.get("pieces", 3)):
            mark = self.mode.get("mark", "n")
            await out.write(f'data: {{"{mark}": {number}}}\n\n'.encode())
            if mode == "die" and number == self.mode.get("at", 1):
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError
            await asyncio.sleep(self.mode.get("pause_s", 0))
        await out.write(b"data: " + json.dumps({"usage": usage}).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        await self._lingered()
        return out

    async def _flood(self, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse()
        await out.prepare(request)
        for _ in range(self.mode["pieces"]):
            await out.write(bytes(1 << 16))
            self.seen["flooded"] = self.seen.get("flooded", 0) + (1 << 16)
        return out

    async def _lingered(self) -> None:
        if self.mode.get("lingers"):
            await asyncio.sleep(3600)

    async def _respond(
        self, request: web.Request, asked: dict[str, Any], tokens: int
    ) -> web.StreamResponse:
        given = "" if self.mode.get("own_ids") else asked.get("request_id")
        name = given or f"resp_{uuid.uuid4().hex}"
        content = [{"type": "output_text", "text": self.mode.get("text", "abc")}]
        made = {
            "id": name,
            "object": "response",
            "status": "completed",
            "output": [{"type": "message", "content": content}],
            "usage": {"input_tokens": tokens, "output_tokens": 3},
        }
        if asked.get("store", True):
            self.stored[name] = made
        if not asked.get("stream"):
            return web.json_response(made)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for kind in ("created", "output_text.delta", "completed"):
            more = {"response": made} if kind != "output_text.delta" else {"delta": "abc"}
            event = json.dumps({"type": f"response.{kind}", **more})
            await out.write(f"event: response.{kind}\ndata: {event}\n\n".encode())
        await self._lingered()
        return out


class VirtualWorker:
    """The same engine on a loop in virtual time."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name, self._script = name, _Script()
        self._runner = _server(self._script)
        loop.run_until_complete(self._runner.setup())
        self.port = loop.serve(cast("Any", self._runner.server))
        self.url = "http://{}:{}".format(*self.port.port)
        self.flag = f"{name}={self.url}"

    def script(self, mode: str, **more: Any) -> None:
        self._script.follow(copy.deepcopy({"mode": mode, **more}))

    def seen(self) -> dict[str, Any]:
        return copy.deepcopy(self._script.seen)

    def bodies(self) -> list[str]:
        return self._script.taken()

    def keep(self, response: str) -> None:
        """It has stored one of this id."""
        self._script.stored[response] = {"of": self.name}

    async def close(self) -> None:
        self.port.kill()
        await self._runner.cleanup()


def refused(
    text: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
) -> web.Response:
    """An error as vLLM says it."""
    error = {"message": text, "type": kind, "param": param, "code": status}
    return web.json_response({"error": error}, status=status)


def no_response(name: object) -> web.Response:
    """There is no stored one of this id."""
    text = f"Response with id '{name}' not found."
    return refused(text, status=404, kind="invalid_request_error", param="response_id")


def _server(script: _Script) -> web.AppRunner:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/script", script.set)
    app.router.add_post("/seen", script.tell)
    app.router.add_post("/bodies", script.tell_bodies)
    app.router.add_get("/health", script.health)
    app.router.add_get("/metrics", script.metrics)
    app.router.add_get("/v1/models", script.models)
    app.router.add_post("/v1/{kind:.*}/render", script.render)
    app.router.add_route("*", RESPONSES + "/{id}", script.about_response)
    app.router.add_post(RESPONSES + "/{id}/cancel", script.about_response)
    for path in JSON_PATHS:
        app.router.add_post(path, script.complete)
    for path in FORM_PATHS:
        app.router.add_post(path, script.form)
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        max_line_size=HEAD_BYTES_MAX,
        max_field_size=HEAD_BYTES_MAX,
    )


async def _serve(port: int) -> None:
    runner = _server(_Script())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, port = runner.addresses[0][:2]
    print(f"worker ready http://{host}:{port}", flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))

"""Tokens of a request's prompt: the engine's own rendering is the truth, a tokenizer here a cache.

    token ids in the body ───────────────────────────▶ keys
    text, local tokenizer accepted ──▶ child process ─▶ keys      every CHECK_EVERY-th is compared
    text ──▶ POST …/render of a worker ──────────────▶ keys       403, 404: not served there
    neither in time ─────────────────────────────────▶ None: routed by bytes

A local tokenizer is accepted for a model while its tokens equal those that an engine renders, for
all PROBES and for samples of real requests; one difference ends it until the next comparison that
finds none. Tokens and keys are made in `child`, never on this loop.

Covers: who renders. Does not cover: keys against the index (`parity`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvstore.router.engines.connections import EngineHttp, NoAnswer, NoConnection
from kvstore.router.engines.workers import Worker, Workers
from kvstore.router.front.bodies import Peek
from kvstore.router.keys.child import KeyAnswer, KeyOrder
from kvstore.router.keys.process import KeyProcess

RENDER_TIMEOUT_S: Final = 0.1
"""For a request, which waits meanwhile …"""
COMPARE_TIMEOUT_S: Final = 5.0
"""… and for a comparison, for which nothing waits."""
PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 60.0
"""A worker that was late renders nothing for so long, at first and at most."""
UNSERVED_S: Final = 300.0
"""The same of one that does not render at all."""
RENDERED_BYTES_MAX: Final = 16 << 20
CHECK_EVERY: Final = 64
PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
UNCOMPARED: Final = "not compared with an engine yet"
_UNSERVED: Final = frozenset({403, 404, 405, 501})
_SAID: Final = "Über 7 Hügel: what is\n\n  the 3rd word?\t👋 </s> <|im_end|>"
PROBES: Final[tuple[tuple[str, dict[str, object]], ...]] = (
    ("/v1/completions", {"prompt": _SAID}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": _SAID}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": " Hi! "},
                {"role": "user", "content": _SAID},
            ]
        },
    ),
)

_log = logging.getLogger(__name__)


class KeyPlan(NamedTuple):
    """How the keys of a model are made."""

    block_tokens: int
    seed: str
    adapter: tuple[str, str] | None = None
    """(name, path) of a LoRA adapter …"""
    digest: bytes = b""
    """… and the digest of its weights."""

    def order(self, body: bytes, salt: str = "") -> KeyOrder:
        """For the keys of a request."""
        return KeyOrder(body=body, salt=salt, **self._asdict())


class Rendering:
    """See the module."""

    def __init__(
        self,
        engines: EngineHttp,
        workers: Workers,
        keys: KeyProcess,
        *,
        tokenizers: Mapping[str, Path],
        worker_key: str = "",
    ) -> None:
        self._engines, self._workers, self._keys = engines, workers, keys
        self._headers = json_headers(worker_key)
        self.local: dict[str, str] = dict.fromkeys(tokenizers, UNCOMPARED)
        """Model → why its tokenizer is not used; empty: it is."""
        self.counts = {"ids": 0, "local": 0, "engine": 0, "none": 0}
        self._checks: set[asyncio.Task[None]] = set()

    def unused(self) -> Iterator[str]:
        """Local tokenizers that are not used, and why, for an operator."""
        served = {name for worker in self._workers for name in worker.models}
        for model, why in self.local.items():
            if served and model not in served:
                why = f"no worker serves that model, but {', '.join(sorted(served))}"
            if why:
                yield f"the tokenizer of {model} is not used ({why})"

    async def keys_of(
        self, path: str, body: bytes, read: Peek, model: str, plan: KeyPlan, salt: str
    ) -> KeyAnswer | None:
        """Count of tokens, and keys, of a prompt for a served model. None: not known in time."""
        order = plan.order(body, salt)
        if bytes(read.prompt)[:1] == b"[":
            return self._counted("ids", await self._keys.make(order))
        if self.local.get(model) == "":
            local = await self._keys.make(msgspec.structs.replace(order, model=model))
            if local is not None and not local.why:
                self.counts["local"] += 1
                if self.counts["local"] % CHECK_EVERY == 0:
                    self._later_compared(path, body, model)
                return local
        rendered = await self.rendered(path, body, self._renderers(model))
        if rendered is None:
            return self._counted("none", None)
        return self._counted(
            "engine", await self._keys.make(msgspec.structs.replace(order, rendered=rendered))
        )

    async def keys_of_ids(self, ids: list[int], plan: KeyPlan) -> KeyAnswer | None:
        """Keys of tokens that a caller has."""
        body = msgspec.json.encode({"prompt": ids})
        return self._counted("ids", await self._keys.make(plan.order(body)))

    def _counted(self, source: str, answer: KeyAnswer | None) -> KeyAnswer | None:
        found = answer if answer is not None and not answer.why else None
        self.counts[source if found is not None else "none"] += 1
        return found

    def _renderers(self, model: str) -> list[Worker]:
        """Workers that may render for a model, least busy first."""
        now_s = asyncio.get_running_loop().time()
        able = (
            worker
            for worker in self._workers
            if now_s >= worker.renders_after_s and worker.is_answering and worker.serves(model)
        )
        return sorted(able, key=lambda worker: len(worker.attempts))[:2]

    async def rendered(
        self,
        path: str,
        body: bytes,
        workers: Iterable[Worker],
        *,
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> bytes | None:
        """The answer of the first of these that renders the request in time; None: none did. One
        that is late is not asked for a while: the prefixes that were sent are known by bytes."""
        if path not in PATHS:
            return None
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        for worker in workers:
            url = worker.url.with_path(path + "/render")
            try:
                async with asyncio.timeout_at(until_s):
                    found = await self._engines.fetch(
                        url,
                        method="POST",
                        headers=self._headers,
                        body=body,
                        bytes_max=RENDERED_BYTES_MAX,
                    )
            except TimeoutError:
                worker.render_pause_s = min(max(2 * worker.render_pause_s, PAUSE_S), PAUSE_S_MAX)
                worker.renders_after_s = loop.time() + worker.render_pause_s
                return None
            except (NoConnection, NoAnswer):
                continue
            else:
                if found.status in _UNSERVED:
                    worker.renders_after_s = loop.time() + UNSERVED_S
                elif found.status == 200:
                    worker.render_pause_s = 0.0
                    return found.body
                else:
                    return None  # it is the request's fault: others would say the same
        return None

    # ── the local tokenizer against the engine ──────────────────────────────────────────────────

    async def compare(self, model: str, worker: Worker) -> None:
        """Accept or refuse the local tokenizer of a model, by all probes at one worker."""
        if model not in self.local:
            return
        for path, fields in PROBES:
            body = msgspec.json.encode({"model": model, **fields})
            if (why := await self._difference(path, body, model, [worker])) is not None:
                self._judge(model, why)
                return
        self._judge(model, "")

    async def _difference(
        self, path: str, body: bytes, model: str, workers: Iterable[Worker]
    ) -> str | None:
        rendered = await self.rendered(path, body, workers, timeout_s=COMPARE_TIMEOUT_S)
        if rendered is None:
            return "no engine renders"
        ours = await self._keys.make(KeyOrder(model=model, body=body, wants_ids=True))
        theirs = await self._keys.make(KeyOrder(rendered=rendered, wants_ids=True))
        if ours is None or ours.why or theirs is None or theirs.why:
            return f"no tokens ({ours.why if ours else 'late'})"
        if ours.ids != theirs.ids:
            return f"its tokens differ ({len(ours.ids)} and {len(theirs.ids)}) at {path}"
        return None

    def _judge(self, model: str, why: str) -> None:
        if self.local[model] != why:
            _log.warning("tokenizer of %s: %s", model, why or "accepted")
        self.local[model] = why

    def _later_compared(self, path: str, body: bytes, model: str) -> None:
        async def compared() -> None:
            why = await self._difference(path, body, model, self._renderers(model))
            if why is not None and "differ" in why:
                self._judge(model, why)

        task = asyncio.create_task(compared())
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)


def json_headers(worker_key: str) -> list[tuple[str, str]]:
    """Headers of the router's own requests at engines."""
    key = [("Authorization", f"Bearer {worker_key}")] if worker_key else []
    return [("Content-Type", "application/json"), *key]


def probe_body(model: str, *, characters: int) -> bytes:
    """A completion of one token whose prompt was never sent before."""
    text = secrets.token_urlsafe(characters)[:characters]
    return msgspec.json.encode(
        {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0, "stream": False}
    )

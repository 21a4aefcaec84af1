"""Tokens of a request's prompt: the engine's own rendering is the truth, a tokenizer here a cache.

    token ids in the body ───────────────────────────▶ keys
    text, local tokenizer accepted ──▶ child process ─▶ keys      every CHECK_EVERY-th is compared
    else ──▶ POST …/render of a worker ──────────────▶ keys       403, 404: not served there
    neither in time ─────────────────────────────────▶ None: routed by bytes

A local tokenizer is for the plainest bodies (below), and is accepted for a model while its
tokens equal those that its engines render, for all PROBES and for samples of real requests. One
difference ends it until that worker is gone or was down, or the router starts again: probes may
have nothing of what differed. Tokens and keys are made in `child`, never on this loop.

Covers: who renders. Does not cover: keys against the index (`parity`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import msgspec

from kvstore.net.aio import Tasks
from kvstore.router.engines.calls import EngineHttp
from kvstore.router.engines.failures import NoAnswer
from kvstore.router.engines.workers import Worker, Workers
from kvstore.router.front.intake import Peek, fields_of
from kvstore.router.keys.child import KeyAnswer, KeyOrder, KeyPlan
from kvstore.router.keys.index_calls import PrefixScope
from kvstore.router.keys.process import KeyProcess

# ── shapes ────────────────────────────────────────────────────────────────────────────────────────
# Bodies whose tokens are made here. All others are left to an engine's renderer.
#
#     a completion of one list of tokens                                    ids
#     a completion of one text; a chat whose messages are a role and a text local
#     with any field that is not in PLAIN_FIELDS, or anything else          empty: an engine renders
#
# Renderers normalise: vLLM fills in the defaults of tools, in its own order of fields, parses the
# arguments of calls, calls a developer a system, and drops parts of contents. Here is a list of the
# rest, so that a field nobody has looked at costs a call of an engine, and never wrong keys.

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
PLAIN_FIELDS: Final = frozenset(
    {
        *("model", "stream", "stream_options", "max_tokens", "temperature", "service_tier"),
        *("max_completion_tokens", "top_p", "top_k", "min_p", "n", "seed", "stop", "user"),
        *("presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "cache_salt"),
        *("ignore_eos", "min_tokens", "session_id", "priority", "repetition_penalty", "store"),
        *("stop_token_ids", "metadata", "logit_bias", "request_id", "skip_special_tokens"),
        *("return_token_ids", "include_stop_str_in_output"),
    }
)
"""Fields beside the prompt that change none of its tokens."""
_OF_FIRST: Final[dict[bytes, Literal["ids", "local"]]] = {b"[": "ids", b'"': "local"}


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: msgspec.Raw


_messages: Final = msgspec.json.Decoder(list[_Message])


def source_of(path: str, body: bytes) -> Literal["ids", "local", ""]:
    """Source of the tokens of a body that is known to be an object: its own ids, the local
    tokenizer, or, if empty, an engine.
    """
    try:
        fields = fields_of(body)
        named = {n for n in fields.keys() - PLAIN_FIELDS if bytes(fields[n]) != b"null"}
        if named == {"prompt"} and path == COMPLETIONS:
            return _OF_FIRST.get(bytes(fields["prompt"])[:1], "")
        if named == {"messages"} and path == CHAT:
            firsts = {bytes(each.content)[:1] for each in _messages.decode(fields["messages"])}
            return "local" if firsts == {b'"'} else ""
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return ""


# ── rendering ─────────────────────────────────────────────────────────────────────────────────────

RENDER_TIMEOUT_S: Final = 0.1
"""Limit of a render call for a request, which waits meanwhile."""
COMPARE_TIMEOUT_S: Final = 5.0
"""Limit of a render call for a comparison, for which no request waits."""
PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 60.0
"""Shortest and longest pause in the rendering of a worker that was late."""
UNSERVED_S: Final = 300.0
"""Pause of a worker that does not render at all."""
UNRENDERED: Final = "start its vLLM with --enable-scale-out"
RENDERED_BYTES_MAX: Final = 16 << 20
CHECK_EVERY: Final = 64
PATHS: Final = frozenset({COMPLETIONS, CHAT, "/v1/responses"})
UNCOMPARED: Final = "not compared with an engine yet"
_UNSERVED: Final = frozenset({403, 404, 405, 501})
_SAID: Final = "Über 7 Hügel: what is\n\n  the 3rd word?\t👋 </s> <|im_end|>"
_Probe = tuple[str, dict[str, object]]
_TOOL: Final = {"type": "function", "function": {"parameters": {"type": "object"}, "name": "f"}}
_CALL: Final = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}


def _chat(*turns: str, then: Iterable[object] = (), **more: object) -> _Probe:
    said = [dict(zip(("role", "content"), turn.split(":", 1), strict=True)) for turn in turns]
    return CHAT, {"messages": [*said, *then], **more}


PROBES: Final[tuple[_Probe, ...]] = (
    (COMPLETIONS, {"prompt": _SAID}),
    (COMPLETIONS, {"prompt": f"\n {_SAID} \n"}),
    _chat(f"user:{_SAID}"),
    _chat("user:Hello", "assistant: Hi! ", f"user:{_SAID}"),
    _chat("system: Be brief.\n", f"user:{_SAID}", "assistant:", "user:\n"),
    _chat("system:", "user:Hello", "assistant:<think>\nno\n</think>\n\nHi", "user:Bye"),
    # Left to engines. Whoever adds such shapes to those made here has them compared.
    _chat("user:Hello", tools=[_TOOL]),
    _chat("user:Hello", then=[{"role": "assistant", "content": "", "tool_calls": [_CALL]}]),
    _chat("developer:Be brief.", "user:Hello"),
)

_log = logging.getLogger(__name__)


class _UncomparedError(Exception):
    """The comparison gave no result; the message has the reason."""


class Rendering:
    """See the module."""

    def __init__(self, engines: EngineHttp, workers: Workers, keys: KeyProcess) -> None:
        self.engines, self._workers, self.keys = engines, workers, keys
        self.local: dict[str, str] = dict.fromkeys(keys.models, UNCOMPARED)
        """Model → reason why its local tokenizer is not used; empty: it is used."""
        self.counts = {"ids": 0, "local": 0, "engine": 0, "none": 0}
        self._checks = Tasks("a bug in what compares tokens")

    def unused(self) -> Iterator[str]:
        """A sentence for operators about each local tokenizer that is not used."""
        served = {name for worker in self._workers for name in worker.models}
        for model, why in self.local.items():
            if served and model not in served:
                why = f"no worker serves that model, but {', '.join(sorted(served))}"
            if why:
                yield f"the tokenizer of {model} is not used ({why})"

    async def keys_of(
        self, path: str, body: bytes, read: Peek, scope: PrefixScope, salt: str, tenant: str = ""
    ) -> KeyAnswer | None:
        """Number of tokens, and keys, of the prompt of a request for a served model; None: not
        known in time.
        """
        order, source, model = KeyOrder(body=body, plan=scope.plan, salt=salt), "", scope.model
        if self.local.get(model) == "" or bytes(read.prompt)[:1] == b"[":
            source = source_of(path, body)
        if source:
            order.model = model if source == "local" else ""
            made = await self.keys.make(order, tenant)
            if made is None or not made.why:
                if made and source == "local" and self.counts["local"] % CHECK_EVERY == 0:
                    self._later_compared(path, body, model)
                return self._counted(source, made)
        rendered = await self.rendered(path, body, self._renderers(model))
        if rendered is None:
            return self._counted("none", None)
        order.rendered = rendered
        return self._counted("engine", await self.keys.make(order, tenant))

    async def keys_of_ids(self, ids: list[int], plan: KeyPlan, tenant: str) -> KeyAnswer | None:
        """Number of tokens, and keys, of a prompt whose token ids a caller has; None: not
        in time.
        """
        body = msgspec.json.encode({"prompt": ids})
        return self._counted("ids", await self.keys.make(KeyOrder(body=body, plan=plan), tenant))

    def _counted(self, source: str, answer: KeyAnswer | None) -> KeyAnswer | None:
        found = answer if answer is not None and not answer.why else None
        self.counts[source if found is not None else "none"] += 1
        return found

    def _renderers(self, model: str) -> list[Worker]:
        """At most two workers that may render for a model, least busy first."""
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
        """The render answer of the first of these workers that gives one in time; None: none did. A
        worker that is late is not asked for a while, since prefixes are then known by bytes.
        """
        if path not in PATHS:
            return None
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        for worker in workers:
            url = worker.url.with_path(path + "/render")
            try:
                async with asyncio.timeout_at(until_s):
                    found = await self.engines.fetch(url, body=body, bytes_max=RENDERED_BYTES_MAX)
            except TimeoutError:
                worker.render_pause_s = min(max(2 * worker.render_pause_s, PAUSE_S), PAUSE_S_MAX)
                worker.renders_after_s = loop.time() + worker.render_pause_s
                return None
            except NoAnswer:
                continue
            else:
                if found.status in _UNSERVED:
                    worker.renders_after_s = loop.time() + UNSERVED_S
                    why = f"/render answers {found.status}: {UNRENDERED}"
                    if worker.unrendered != why:
                        _log.warning("worker %s tokenizes no prompts: %s", worker.name, why)
                    worker.unrendered = why
                elif found.status == 200:
                    worker.render_pause_s, worker.unrendered = 0.0, ""
                    return found.body
                else:
                    return None  # it is the request's fault: others would say the same
        return None

    # ── the local tokenizer against the engine ──────────────────────────────────────────────────

    async def compare(self, model: str, worker: Worker) -> None:
        """Accept or refuse the local tokenizer of a model, by all probes at one worker. A
        difference that was found there before stays.
        """
        if model not in self.local:
            return
        why = worker.token_troubles.get(model, "")
        try:
            for path, fields in () if why else PROBES:
                body = msgspec.json.encode({"model": model, **fields})
                if why := await self._difference(path, body, model, worker):
                    break
        except _UncomparedError as error:
            self._judge(model, str(error))
        else:
            worker.token_troubles[model] = why
            self._judge(model)

    async def _difference(self, path: str, body: bytes, model: str, worker: Worker) -> str:
        """One sentence about a difference between tokens made here and by the worker, seen twice in
        a row since a template may show the time; empty: none. Raises _UncomparedError.
        """
        why = ""
        for _ in range(2 if source_of(path, body) == "local" else 0):
            order = KeyOrder(model=model, body=body, wants_ids=True)
            ours = await self.keys.make(order, delays_request=False)
            if ours is None or (ours.why and path == COMPLETIONS):
                raise _UncomparedError(f"no tokens ({ours.why if ours else 'late'})")
            if ours.why:
                return ""  # its template refuses that, and an engine is asked
            rendered = await self.rendered(path, body, [worker], timeout_s=COMPARE_TIMEOUT_S)
            if rendered is None:
                raise _UncomparedError("no engine renders")
            order = KeyOrder(rendered=rendered, wants_ids=True)
            theirs = await self.keys.make(order, delays_request=False)
            if theirs is None or theirs.why:
                raise _UncomparedError(f"no tokens ({theirs.why if theirs else 'late'})")
            if ours.ids == theirs.ids:
                return ""
            counts = f"{len(ours.ids)} and {len(theirs.ids)}"
            why = f"its tokens differ from those of worker {worker.name} ({counts}) at {path}"
        return why

    def _judge(self, model: str, otherwise: str = "") -> None:
        """Accept or refuse a model's local tokenizer by the comparisons at all present workers;
        `otherwise`: reason to refuse it if there was none.
        """
        known = [w.token_troubles[model] for w in self._workers if model in w.token_troubles]
        why = max(known, default=otherwise)  # a difference, if there is one
        if self.local[model] != why:
            _log.warning("tokenizer of %s: %s", model, why or "accepted")
        self.local[model] = why

    def _later_compared(self, path: str, body: bytes, model: str) -> None:
        async def compared() -> None:
            for worker in self._renderers(model)[:1]:
                with contextlib.suppress(_UncomparedError):
                    if why := await self._difference(path, body, model, worker):
                        worker.token_troubles[model] = why
                        self._judge(model)

        self._checks.run(compared())

    async def close(self) -> None:
        """End comparisons that are under way."""
        await asyncio.gather(*self._checks.cancel(), return_exceptions=True)

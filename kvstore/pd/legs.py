"""Bodies and headers of a request on its way to either engine.

    client ── body ─▶ prefill_body ─▶ prefill engine, one token ── parameters ─┐
                └───▶ decode_body ─────────────▶ decode engine ◀───────────────┘

The parameters (`kv_transfer_params`) are vLLM's, with ours below `kvstore`; those of clients are
dropped, since engines act on them. Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvstore.errors import ProtocolError
from kvstore.wire.transfers import DecodePart, read_transfer

PARAMETERS: Final = "kv_transfer_params"
FORWARDED: Final = ("Authorization", "Traceparent", "Tracestate")
"""Headers of a client that engines get."""
RETURNED: Final = ("Content-Type", "Retry-After")
"""Headers of an engine that clients get."""
_NULL: Final = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
_ONE_TOKEN: Final = ("max_tokens", "max_completion_tokens", "n", "best_of")
_OF_ANSWERS: Final = ("stream_options", "min_tokens", "logprobs", "top_logprobs", PARAMETERS)
"""Keys that the prefill engine has no use for."""
DEPTH_MAX: Final = 8
"""Deeper parameters decode in one engine and fail in the next."""

Body = dict[str, Any]
"""The body of a completion or chat completion."""


class BadRequest(Exception):
    """The body is no JSON object; carries the sentence for the client."""


def body_of(data: bytes) -> Body:
    """Raises BadRequest."""
    try:
        body = msgspec.json.decode(data, type=Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body must be one JSON object: {error}.") from None
    if isinstance(more := body.get("vllm_xargs"), dict):
        more.pop(PARAMETERS, None)  # engines read them there, too
    return body


def wants_prefill(body: Body) -> bool:
    """Whether the decode engine can use blocks: for log probabilities of the prompt it computes
    the prompt itself."""
    return body.get("prompt_logprobs") is None and not body.get("echo")


def prefill_body(body: Body, transfer: str) -> Body:
    """One token, not streamed: the answer has the parameters for the decode engine."""
    kept = {key: value for key, value in body.items() if key not in _OF_ANSWERS}
    kept |= {key: 1 for key in _ONE_TOKEN if key in body} | {"max_tokens": 1, "stream": False}
    ours = {"transfer": transfer}
    kept[PARAMETERS] = {"do_remote_decode": True, "do_remote_prefill": False, **_NULL}
    kept[PARAMETERS]["kvstore"] = ours
    return kept


def decode_body(body: Body, parameters: Mapping[str, Any] | None) -> Body:
    """The client's request; `parameters`: None where nothing was prefilled for it."""
    kept = {key: value for key, value in body.items() if key != PARAMETERS}
    return kept if parameters is None else {**kept, PARAMETERS: dict(parameters)}


def parameters_of(answer: bytes) -> dict[str, Any] | None:
    """Parameters in the answer of a prefill engine; None: it has none, or such that the decode
    engine would fail on them instead of computing the prompt."""
    try:
        found = msgspec.json.decode(answer, type=Body).get(PARAMETERS)
        is_fit = isinstance(read_transfer(found, "none"), DecodePart) and _is_plain(found)
    except (msgspec.MsgspecError, ProtocolError, UnicodeDecodeError, RecursionError):
        return None
    return found if is_fit else None


def _is_plain(value: object, depth: int = DEPTH_MAX) -> bool:
    """Whether engines can decode a value and hand it on between their processes."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def source_of(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The part of a prefill engine's parameters that holds for all its requests; None: not
    kvstore's."""
    ours = (parameters or {}).get("kvstore")
    if not isinstance(ours, dict) or not isinstance(ours.get("node"), str):
        return None
    engine = (parameters or {}).get("remote_engine_id")
    return {"remote_engine_id": engine, "kvstore": {"node": ours["node"]}}


def early_parameters(source: Mapping[str, Any], transfer: str) -> dict[str, Any]:
    """Parameters for a decode engine that begins together with the prefill engine."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": source["remote_engine_id"],
        "kvstore": {**source["kvstore"], "transfer": transfer},
    }


def error_body(message: str, *, kind: str, code: int) -> bytes:
    """An error as OpenAI's clients read it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": code}})

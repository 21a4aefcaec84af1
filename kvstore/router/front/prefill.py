"""The leg of a request at a prefiller: one token, and parameters for the engine that decodes.

    body ─▶ prefill_order ─▶ prefiller ─▶ parameters ─▶ decode_order ─▶ decoder      in turn
    node of the prefiller is known: ahead ────────────▶ decode_order ─▶ decoder      both at once

The node of a prefiller is an option, in the index, or learned from its first answer.

`kv_transfer_params` are made here or by a prefiller, never by a client. A transfer has a name of
its own for each attempt, so that the end of an earlier one closes no later one.

Covers: bytes of the leg. Does not cover: what follows from its failure (`proxy`, the core).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvstore.errors import ProtocolError
from kvstore.router.engines.connections import EngineHttp, NoAnswer, NoConnection
from kvstore.router.engines.workers import Worker
from kvstore.router.front.attempt import LegFailure, fault_of
from kvstore.router.front.bodies import Peek, edited, fields_of
from kvstore.routing.events import Failure, Leg
from kvstore.wire.requests import DecodePart, read_transfer

SPLIT_PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
ANSWER_BYTES_MAX: Final = 4 << 20
"""Largest answer of a prefiller, with one token and parameters."""
PARAMETERS: Final = "kv_transfer_params"
DEPTH_MAX: Final = 8
"""Deeper nested parameters decode in one engine and fail in the next."""
_NULL: Final = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
_ONE_TOKEN: Final = ("max_tokens", "max_completion_tokens", "n", "best_of")
_OF_ANSWERS: Final = ("stream_options", "min_tokens", "logprobs", "top_logprobs", PARAMETERS)
"""Keys of a body that are dropped for the prefill engine, which has no use for them."""
_NO: Final = frozenset({b"", b"null", b"false"})


class PrefillRefused(Exception):
    """The prefiller answered 4xx or 501; the answer of the engine that decodes counts instead."""


def can_split(path: str, read: Peek) -> bool:
    """Whether a remote prefill is of use for a request: for log probabilities of a prompt an engine
    computes it itself.
    """
    return path in SPLIT_PATHS and {bytes(read.prompt_logprobs), bytes(read.echo)} <= _NO


def ahead(prefiller: Worker, decoder: Worker, transfer: str) -> dict[str, Any] | None:
    """Parameters for a decoder that begins together with the prefiller; None: the prefiller's node
    is not known, so its answer is waited for."""
    node = prefiller.address.node
    if node and decoder.address.node:
        engine = prefiller.address.engine or None
        return early_parameters({"remote_engine_id": engine, "kvstore": {"node": node}}, transfer)
    return early_parameters(prefiller.source, transfer) if prefiller.source else None


def prefill_order(body: bytes, transfer: str) -> bytes:
    """The body for a prefiller: one token, not streamed; the answer has the parameters."""
    kept: dict[str, Any] = {k: v for k, v in fields_of(body).items() if k not in _OF_ANSWERS}
    kept |= {key: 1 for key in _ONE_TOKEN if key in kept} | {"max_tokens": 1, "stream": False}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, **_NULL}
    kept[PARAMETERS] = {**asked, "kvstore": {"transfer": transfer}}
    return msgspec.json.encode(kept)


def decode_order(body: bytes, parameters: Mapping[str, Any] | None) -> bytes:
    """The body for a decoder, with parameters of the remote prefill; None: it computes
    everything.
    """
    return body if parameters is None else edited(body, put={PARAMETERS: parameters})


async def prefilled(
    engines: EngineHttp,
    worker: Worker,
    path: str,
    headers: list[tuple[str, str]],
    body: bytes,
) -> dict[str, Any] | None:
    """Send the request to a prefiller. Returns the parameters in its answer; None: it gave none.

    Raises:
        LegFailure: the prefiller failed.
        PrefillRefused: it refused the request.
    """
    limit = asyncio.timeout(None)

    def give_up() -> None:
        limit.reschedule(asyncio.get_running_loop().time())

    worker.attempts.add(give_up)
    try:
        async with limit:
            found = await engines.fetch(
                worker.url.with_path(path),
                headers=headers,
                body=body,
                bytes_max=ANSWER_BYTES_MAX,
            )
    except TimeoutError:
        raise LegFailure(Failure.SILENT, "the prefiller is silent", leg=Leg.PREFILL) from None
    except NoConnection as error:
        why = f"no connection: {error}"
        raise LegFailure(Failure.CONNECT, why, leg=Leg.PREFILL, is_gone=error.is_gone) from None
    except NoAnswer as error:
        why = f"the prefill broke off: {error}"
        raise LegFailure(Failure.BROKEN, why, leg=Leg.PREFILL) from None
    finally:
        worker.attempts.discard(give_up)
    is_put_off = any(name.lower() == b"retry-after" for name, _ in found.headers)
    fault = fault_of(found.status, is_put_off=is_put_off, has_client_key=True)
    if fault is not None and fault.failure is not Failure.REFUSED:
        raise LegFailure(fault.failure, f"status {found.status}", leg=Leg.PREFILL)
    if found.status >= 300:
        raise PrefillRefused
    parameters = parameters_of(found.body)
    worker.source = source_of(parameters)
    return parameters


def parameters_of(answer: bytes) -> dict[str, Any] | None:
    """Parameters in the answer of a prefill engine; None: it has none, or such that the decode
    engine would fail on them instead of computing the prompt."""
    try:
        found = msgspec.json.decode(answer, type=dict[str, Any]).get(PARAMETERS)
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

"""The leg of a request at a prefiller: one token, and parameters for the engine that decodes.

    body ─▶ prefill_order ─▶ prefiller ─▶ parameters ─▶ decode_order ─▶ decoder      in turn
    nodes of both are known: ahead ───────────────────▶ decode_order ─▶ decoder      both at once

`kv_transfer_params` are made here or by a prefiller, never by a client. A transfer has a name of
its own for each attempt, so that the end of an earlier one closes no later one.

Covers: bytes of the leg. Does not cover: what follows from its failure (`proxy`, the core).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

from kvstore.pd.legs import PARAMETERS, early_parameters, parameters_of, prefill_body
from kvstore.router.engines.probes import why_no_answer
from kvstore.router.engines.workers import Worker
from kvstore.router.front.attempt import LegFailure, fault_of
from kvstore.router.front.bodies import Peek, edited, fields_of
from kvstore.routing.events import Failure, Leg

SPLIT_PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
ANSWER_BYTES_MAX: Final = 4 << 20
"""Longest answer of a prefiller: one token and parameters."""
_NO: Final = frozenset({b"", b"null", b"false"})


class PrefillRefused(Exception):
    """The prefiller answered 4xx or 501: the word of the engine that decodes is what counts."""


def can_split(path: str, read: Peek) -> bool:
    """Whether blocks of a prefiller are of use: for log probabilities of a prompt an engine
    computes it itself."""
    return path in SPLIT_PATHS and {bytes(read.prompt_logprobs), bytes(read.echo)} <= _NO


def ahead(prefiller: Worker, decoder: Worker, transfer: str) -> dict[str, Any] | None:
    """Parameters for a decoder that begins together with the prefiller; None: their nodes are not
    known, so the prefiller's answer is waited for."""
    node = prefiller.address.node
    if not (node and decoder.address.node):
        return None
    engine = prefiller.address.engine or None
    return early_parameters({"remote_engine_id": engine, "kvstore": {"node": node}}, transfer)


def prefill_order(body: bytes, transfer: str) -> bytes:
    """The body for a prefiller."""
    return msgspec.json.encode(prefill_body(fields_of(body), transfer))


def decode_order(body: bytes, parameters: Mapping[str, Any] | None) -> bytes:
    """The body for a decoder; None: it computes everything."""
    return body if parameters is None else edited(body, put={PARAMETERS: parameters})


async def prefilled(
    session: aiohttp.ClientSession,
    worker: Worker,
    path: URL,
    headers: list[tuple[str, str]],
    body: bytes,
    *,
    deadline_s: float,
) -> dict[str, Any] | None:
    """Parameters in a prefiller's answer; None: it gave none.

    Raises:
        LegFailure: the prefiller failed.
        PrefillRefused: it refused the request.
    """
    limit = asyncio.timeout(deadline_s)
    url = worker.url.join(path)
    try:
        async with limit:
            worker.waits.add(limit)
            async with session.post(
                url, headers=headers, data=body, allow_redirects=False
            ) as answer:
                is_put_off = "Retry-After" in answer.headers
                fault = fault_of(answer.status, is_put_off=is_put_off, has_client_key=True)
                if fault is not None and fault is not Failure.REFUSED:
                    raise _failure(fault, f"status {answer.status}", answer.status)
                if answer.status >= 300:
                    raise PrefillRefused
                data = b""
                while piece := await answer.content.readany():
                    data += piece
                    if len(data) > ANSWER_BYTES_MAX:
                        raise _failure(Failure.BROKEN, "an answer too long for one token")
                return parameters_of(data)
    except TimeoutError:
        raise _failure(Failure.TIMEOUT, "no prefill in time") from None
    except aiohttp.ClientConnectorError as error:
        raise _failure(Failure.CONNECT, f"no connection: {why_no_answer(error)}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise _failure(Failure.BROKEN, f"the prefill broke off: {why_no_answer(error)}") from None
    finally:
        worker.waits.discard(limit)


def _failure(failure: Failure, text: str, status: int = 0) -> LegFailure:
    return LegFailure(failure, text, leg=Leg.PREFILL, status=status)

"""The second leg of a request, beside an attempt: a remote prefill before it, or a race with it.

    prefill_order ─▶ prefiller ─▶ parameters of its answer, or known `ahead` ─▶ the attempt's body
    Race: an attempt whose first piece is late, and another one; the first piece decides

Covers: bytes of a prefiller's leg, claims. Does not cover: what follows from failures (`proxy`, the
core), whether and where there is a second leg (`kvstore.routing.legs`, `kvstore.routing.split`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from kvstore.errors import ProtocolError
from kvstore.net.aio import end_now
from kvstore.router.engines.calls import EngineHttp
from kvstore.router.engines.connections import Attempt
from kvstore.router.engines.failures import (
    Beaten,
    LegFailure,
    NoAnswer,
    NoConnection,
    fault_of,
    unreached,
)
from kvstore.router.engines.workers import Worker
from kvstore.router.front.intake import fields_of
from kvstore.routing.events import Failure, Fault, Leg
from kvstore.wire.requests import DecodePart, read_transfer

_T = TypeVar("_T")

# ── remote prefill ────────────────────────────────────────────────────────────────────────────────
# One token at a prefiller, and parameters for the engine that decodes.
#
#     body ─▶ prefill_order ─▶ prefiller ─▶ parameters ─▶ decoder      in turn
#     node of the prefiller is known: ahead ────────────▶ decoder      both at once
#
# The node of a prefiller is an option, in the index, or learned from its first answer.
# `kv_transfer_params` are made here or by a prefiller, never by a client. A transfer has a name of
# its own for each attempt, so that the end of an earlier one closes no later one.

ANSWER_BYTES_MAX: Final = 4 << 20
"""Largest answer of a prefiller, with one token and parameters."""
PARAMETERS: Final = "kv_transfer_params"
DEPTH_MAX: Final = 8
"""Deeper nested parameters decode in one engine and fail in the next."""
USELESS: Final = (
    "prefills without kv_transfer_params in their answers: its connector is missing, off or without"
    " its node"
)
_NULL: Final = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
_ONE_TOKEN: Final = ("max_tokens", "max_completion_tokens", "n", "best_of")
_OF_ANSWERS: Final = ("stream_options", "min_tokens", "logprobs", "top_logprobs", PARAMETERS)
"""Keys of a body that are dropped for the prefill engine, which has no use for them."""


def ahead(prefiller: Worker, decoder: Worker, transfer: str) -> dict[str, Any] | None:
    """Parameters for a decoder that begins together with the prefiller; None: the prefiller's node
    is not known, so its answer is waited for."""
    node, engine = prefiller.address.node, prefiller.address.engine or None
    if not (node and decoder.address.node):
        if prefiller.source is None:
            return None
        node, engine = prefiller.source
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "kvstore": {"node": node, "transfer": transfer},
    }


def prefill_order(body: bytes, transfer: str) -> bytes:
    """The body for a prefiller: one token, not streamed; the answer has the parameters."""
    kept: dict[str, Any] = {k: v for k, v in fields_of(body).items() if k not in _OF_ANSWERS}
    kept |= {key: 1 for key in _ONE_TOKEN if key in kept} | {"max_tokens": 1, "stream": False}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, **_NULL}
    kept[PARAMETERS] = {**asked, "kvstore": {"transfer": transfer}}
    return msgspec.json.encode(kept)


async def prefilled(
    engines: EngineHttp, worker: Worker, path: str, headers: list[tuple[str, str]], body: bytes
) -> dict[str, Any] | Fault:
    """Send the request to a prefiller. Returns the parameters in its answer, or why the engine that
    decodes computes the prompt and answers: it refused the request with 4xx or 501 (REFUSED), or
    gave no parameters. Raises LegFailure: the prefiller failed.
    """
    limit = asyncio.timeout(None)
    give_up = partial(end_now, limit)
    worker.attempts.add(give_up)
    try:
        async with limit:
            found = await engines.fetch(
                worker.url.with_path(path), headers=headers, body=body, bytes_max=ANSWER_BYTES_MAX
            )
    except TimeoutError:
        raise LegFailure(Failure.SILENT, "the prefiller is silent", leg=Leg.PREFILL) from None
    except NoConnection as error:
        raise unreached(error, Leg.PREFILL) from None
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
        return Fault(Failure.REFUSED)
    parameters = parameters_of(found.body)
    worker.source = source_of(parameters)
    # Without parameters the decoder computes the prompt again: a prefiller that always does so is
    # worse than none.
    return Fault(Failure.STATUS, why=USELESS) if parameters is None else parameters


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


def source_of(parameters: Mapping[str, Any] | None) -> tuple[str, Any] | None:
    """(node, engine) of a prefill engine, by its parameters; None: they are not kvstore's."""
    ours = (parameters or {}).get("kvstore")
    if parameters is None or not isinstance(ours, dict) or not isinstance(ours.get("node"), str):
        return None
    return ours["node"], parameters.get("remote_engine_id")


# ── races ─────────────────────────────────────────────────────────────────────────────────────────
# Two attempts of one request: the first piece of an answer decides which one goes on.
#
#     first ─── after_s without a piece ─▶ second ─▶ claim: the other one is ended
#       └─ fails ─▶ the other one goes on alone          └─ both fail: LegFailure of the last one
#
# The first runs in the task of the request, which costs nothing as long as there is no second. An
# attempt that is ended closes its connection, by which its engine aborts the request. Claims are
# made on the loop, with the piece in hand and before anything reaches the client: exactly one is
# granted.


class Race:
    """Two attempts of one request; see the module. `attempt`: the one that answers, or was left
    last.
    """

    def __init__(
        self, first: Attempt, on_over: Callable[[Attempt, LegFailure | None], None]
    ) -> None:
        """`on_over`: takes the attempt that ended while the other one goes on, and its failure;
        None: it was slower.
        """
        self.attempt = self._first = first
        self._on_over = on_over
        self._second: Attempt | None = None
        self._beside: asyncio.Task[web.StreamResponse] | None = None
        """Task of the second attempt; None: there is none that can answer."""
        self._has_both = False
        """Both attempts are under way."""
        self._timer: asyncio.TimerHandle

    async def run(
        self,
        decode: Callable[[Attempt], Coroutine[Any, Any, web.StreamResponse]],
        after_s: float,
        second: Callable[[], Attempt | None],
    ) -> web.StreamResponse:
        """The answer, wholly sent. `decode`: runs an attempt. `second`: asked for another attempt
        after `after_s`, and again later while it returns None. Raises as `decode` of the attempt
        that was left.
        """
        loop = asyncio.get_running_loop()

        def late(after_s: float) -> None:
            if self._first.has_answered:
                return
            self._second = second()
            if self._second is None:  # the others may be free then
                self._timer = loop.call_later(2 * after_s, late, 2 * after_s)
                return
            self._has_both = True
            self._beside = asyncio.create_task(decode(self._second))
            self._beside.add_done_callback(self._second_ended)

        self._timer = loop.call_later(after_s, late, after_s)
        try:
            try:
                return await decode(self._first)
            except (LegFailure, Beaten) as error:
                if self._beside is not None:
                    self._second_ended(self._beside)
                if self._has_both:
                    self._over(self._first, error)
                if self._beside is None or self.attempt is self._first:
                    raise
            return await self._beside
        finally:
            self._timer.cancel()
            if self._beside is not None:
                self._beside.cancel()
                await asyncio.gather(self._beside, return_exceptions=True)

    def _over(self, attempt: Attempt, error: BaseException | None) -> None:
        """An attempt ended with this error, or was slower (None): the other one goes on alone."""
        assert self._second is not None
        self._has_both = False
        self.attempt = self._second if attempt is self._first else self._first
        self._on_over(attempt, error if isinstance(error, LegFailure) else None)

    def _second_ended(self, task: asyncio.Task[web.StreamResponse]) -> None:
        if not (self._has_both and task.done()) or task.cancelled():
            return
        assert self._second is not None
        self._beside = None
        error = task.exception()
        self._over(self._second, error)
        if not isinstance(error, LegFailure | Beaten):  # an error of ours
            self._first.end(RuntimeError(f"the second attempt has ended: {error!r}"))

    def claim(self, attempt: Attempt) -> None:
        """The attempt has the first piece of an answer, which it may send. Raises Beaten if it may
        not.
        """
        if self._beside is not None:
            self._second_ended(self._beside)  # said before the claim, which begins an answer
        if not self._has_both:
            if attempt is not self.attempt:
                raise Beaten
        elif attempt is self._first:
            assert self._second is not None
            assert self._beside is not None
            self._beside.cancel()
            self._over(self._second, None)
        elif attempt.status >= 400:
            self._over(attempt, None)
            raise Beaten  # a word about the request is that of the worker that was chosen first
        else:
            self._first.end(Beaten())
            self._over(self._first, None)


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """Run work as a task of its own, which is cancelled at the end of the context."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""The OpenAI-compatible front end: one request from its head to the last byte of its answer.

    head ─▶ tenant ─▶ body (bounded) ─▶ peek ─▶ render ─▶ index ─▶ core: Routed
                                                       ┌──────────────┘ ▲
                                                       ├▶ attempt ───────┤ LegFailed, another worker
                                                       └▶ prefill ───────┘

A remote prefill is a second leg, at once with the attempt where the nodes of both engines are
known, else before it. When it fails before the client has got a byte, the attempt is void and the
core chooses again: another prefiller, or none. When its engine refuses the request, the attempt
begins anew, alone. A client that leaves takes both legs along.

Rules: each request that the core routed gets exactly one `RequestEnded`, also when its client
leaves; an answer that has begun is never retried, and when it breaks the client's connection is
cut, so that no client takes half an answer for a whole one; the body's bytes go on as they came,
but for fields that no client may set.

Covers: HTTP paths, errors in OpenAI's form. Does not cover: decisions (`kvstore.routing`), bytes of
an attempt (`attempt`), limits of connections and bodies (`door`).
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvstore.router.dispatch import Dispatcher
from kvstore.router.engines.workers import Worker, Workers
from kvstore.router.front import heads
from kvstore.router.front.attempt import (
    SILENCE_S,
    Attempt,
    ClientStalled,
    LegFailure,
    cached_tokens_of,
    output_tokens_of,
)
from kvstore.router.front.bodies import BadBody
from kvstore.router.front.door import Bodies, BodyRefused
from kvstore.router.front.intake import RequestIntake, RequestJob, Unauthorized
from kvstore.router.front.prefill import (
    PrefillRefused,
    ahead,
    decode_order,
    prefill_order,
    prefilled,
)
from kvstore.router.keys.prefixes import predicted_tokens
from kvstore.routing.events import (
    Ending,
    Failure,
    FirstToken,
    Leg,
    LegFailed,
    PrefillDone,
    Rejected,
    RequestEnded,
    Routed,
)
from kvstore.routing.values import PrefixAnswer, RouteRequest

GENERATES: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
ALIVE: Final = "/livez"
PROBED: Final = frozenset({ALIVE, "/health"})
USELESS: Final = (
    "prefills without kv_transfer_params in their answers: its connector is missing, off or without"
    " its node"
)
_T = TypeVar("_T")
PASSED: Final = GENERATES | {"/v1/embeddings", "/v1/score", "/v1/rerank"}


class Proxy:
    """See the module."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: Workers,
        session: aiohttp.ClientSession,
        *,
        bodies: Bodies,
        intake: RequestIntake,
        worker_key: str = "",
        explain: Callable[[RouteRequest, PrefixAnswer | None], bytes],
        observed: Callable[[Worker, int, int], None],
    ) -> None:
        """
        Args:
            explain: makes the receipt of a dry run, as JSON.
            observed: takes predicted and observed cached tokens of an answer.
        """
        self._dispatcher, self._workers, self._session = dispatcher, workers, session
        self._bodies, self._intake = bodies, intake
        self._worker_key, self._explain = worker_key, explain
        self._observed = observed
        self.name = session.headers.get(heads.ROUTERS, "")
        self.counts = Counter[str]()
        """Requests by outcome."""
        self.splits = Counter[str]()
        """Decisions about local or remote prefill, by reason."""
        self.prefills = Counter[str]()
        """Legs at prefillers by result."""
        self.retried_count = 0
        self.in_flight = 0
        self.is_draining = False
        self._is_idle = asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever it is."""
        path = request.path
        if heads.way(request.headers, self.name) is None:  # probes, too: such an engine is down
            text = "the request came back to a router: an engine's address is that of a router"
            return error_response(508, text, "loop")
        if path in PROBED:  # without API keys: Kubernetes and load balancers have none
            is_fine = path == ALIVE or self.is_ready
            return web.Response(
                text="ok" if is_fine else "no worker takes requests", status=200 if is_fine else 503
            )
        try:
            tenant = self._intake.tenant(request.headers)
        except Unauthorized as error:
            self.counts["unauthorized"] += 1
            return error_response(401, str(error), "invalid_api_key")
        if path == "/v1/models" and request.method == "GET":
            return self._models()
        is_dry = path.startswith("/kvstore/explain/")
        if is_dry:
            path = path.removeprefix("/kvstore/explain")
        if path not in PASSED or (is_dry and not _is_here(request)):
            return error_response(404, f"there is no {path} here", "not_found")
        if request.method != "POST":
            return error_response(405, f"{path} takes POST", "method_not_allowed")
        self.in_flight += 1
        try:
            return await self._with_body(request, path, tenant, is_dry=is_dry)
        finally:
            self.in_flight -= 1
            if self.is_draining and not self.in_flight:
                self._is_idle.set()

    @property
    def is_ready(self) -> bool:
        """Whether a worker takes requests, or the policy holds them until one does."""
        holds = self._dispatcher.core.policy.limits.holds_without_workers
        return not self.is_draining and (holds or self._workers.take_requests)

    async def idle(self) -> None:
        """From now on `/health` says 503; ends when no request is under way."""
        self.is_draining = True
        if self.in_flight:
            await self._is_idle.wait()

    async def _with_body(
        self, request: web.BaseRequest, path: str, tenant: str, *, is_dry: bool
    ) -> web.StreamResponse:
        try:
            body = await self._bodies.read(request)
        except BodyRefused as error:
            self.counts["refused"] += 1
            return _closing(error_response(error.status, str(error), "invalid_request_error"))
        except web.RequestPayloadError:
            self.counts["refused"] += 1
            return _closing(
                error_response(400, "the body is badly framed", "invalid_request_error")
            )
        size = len(body)
        try:
            job = await self._intake.job(request.headers, path, body, tenant, may_split=True)
            if is_dry:
                try:
                    text = self._explain(job.asked.request, job.asked.prefix)
                except LookupError as error:
                    why = f"no worker would get this request: {error}"
                    return error_response(503, why, "no_worker")
                return web.Response(body=text, content_type="application/json")
            return await self._serve(request, job)
        except BadBody as error:
            self.counts["refused"] += 1
            return error_response(400, str(error), "invalid_request_error")
        finally:
            self._bodies.release(size)

    # ── attempts ─────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, client: web.BaseRequest, job: RequestJob) -> web.StreamResponse:
        routed = await self._dispatcher.arrive(job.asked)
        refusal: web.Response | None = None
        suspects: list[tuple[str, str]] = []
        while isinstance(routed, Routed):
            self.splits[routed.receipt.split_reason] += 1
            try:
                answer = await self._attempt(client, job, routed)
            except LegFailure as error:
                refusal = error.answer
                name = routed.worker if error.leg is Leg.DECODE else routed.prefill_worker
                if error.is_suspect and name is not None:
                    suspects.append((name, str(error)))
                self.retried_count += not error.has_streamed
                failed = LegFailed(job.request_id, error.leg, error.failure, error.has_streamed)
                routed = await self._dispatcher.leg_failed(failed)
                if error.has_streamed:
                    self.counts["broken"] += 1
                    raise ConnectionResetError("the engine's answer broke off") from None
            else:
                self._blame(suspects)
                return answer
        if len(suspects) == 1:
            self._blame(suspects)
        self.counts[routed.reason] += 1
        return refusal if refusal is not None else rejection(routed)

    def _blame(self, suspects: Sequence[tuple[str, str]]) -> None:
        """Engines that failed at a request, by name, with the reason. Where no engine served it and
        several failed alike, the request may be the cause: none is blamed, or the requests of one
        client would take them from all."""
        for name, why in suspects:
            worker = self._workers.get(name)
            if worker is not None:
                self._workers.failed(worker, why)

    async def _attempt(
        self, client: web.BaseRequest, job: RequestJob, routed: Routed
    ) -> web.StreamResponse:
        """Raises LegFailure; in all other cases the request has ended for the core."""
        worker = self._workers.get(routed.worker)
        if worker is None:  # it left in the same turn of the loop
            raise LegFailure(Failure.CONNECT, "the worker has left")
        attempt = Attempt(self._session, worker, client)
        ending = Ending.ABORTED
        try:
            if routed.prefill_worker is None:
                answer = await self._decode(attempt, job, routed)
            else:
                answer = await self._both_legs(attempt, job, routed, routed.prefill_worker)
        except LegFailure:
            ending = Ending.FAILED
            raise
        except ClientStalled:
            _cut(client)
            raise ConnectionResetError("the client did not read") from None
        else:
            return answer
        finally:
            if attempt.is_whole:  # a client may leave while the prefill leg is ended
                ending = Ending.REFUSED if attempt.status >= 400 else Ending.DONE
            if ending is not Ending.FAILED:
                self._ended(worker, job, attempt, ending)

    async def _decode(
        self,
        attempt: Attempt,
        job: RequestJob,
        routed: Routed,
        parameters: dict[str, Any] | None = None,
    ) -> web.StreamResponse:
        """The answer to the client. `parameters`: of a remote prefill."""
        worker = attempt.worker
        more = {"X-Request-Id": job.request_id, "X-Kvstore-Worker": worker.name}
        if routed.prefill_worker is not None:
            more["X-Kvstore-Prefill-Worker"] = routed.prefill_worker
        self._workers.begun(worker)
        try:
            return await attempt.run(
                self._onward(attempt.request, job),
                decode_order(job.body_for(routed.model), parameters),
                deadline_s=routed.deadline_s if job.read.is_streamed else SILENCE_S,
                on_first=lambda: self._first(job),
                more=more,
            )
        except LegFailure as error:
            self._failed(worker, error)
            raise
        finally:
            self._workers.ended(worker)

    def _failed(self, worker: Worker, error: LegFailure) -> None:
        """A suspect is judged when its request has ended (`_blame`)."""
        if error.is_suspect:
            self._workers.neutral(worker)
        else:
            self._workers.failed(worker, str(error))

    async def _both_legs(
        self, attempt: Attempt, job: RequestJob, routed: Routed, name: str
    ) -> web.StreamResponse:
        """As `_decode`, with a prefill at the worker of this name."""
        prefiller = self._workers.get(name)
        if prefiller is None:
            raise LegFailure(Failure.CONNECT, "the prefiller has left", leg=Leg.PREFILL)
        transfer = f"{job.request_id}.{routed.attempt}"
        early = ahead(prefiller, attempt.worker, transfer)
        prefill = self._prefill(attempt.request, job, routed, prefiller, transfer)
        async with _beside(prefill) as prefilling:
            if early is not None:
                async with _beside(self._decode(attempt, job, routed, early)) as decoding:
                    await asyncio.wait((prefilling, decoding), return_when=FIRST_COMPLETED)
                    if decoding.done() or attempt.has_answered or _is_prefilled(prefilling):
                        return await decoding
                self._workers.neutral(attempt.worker)
            return await self._decode(attempt, job, routed, await prefilling)

    async def _prefill(
        self,
        client: web.BaseRequest,
        job: RequestJob,
        routed: Routed,
        worker: Worker,
        transfer: str,
    ) -> dict[str, Any] | None:
        """Parameters for the engine that decodes; None: it computes all. Raises LegFailure."""
        result = "aborted"
        self._workers.begun(worker)
        try:
            found = await prefilled(
                self._session,
                worker,
                client.rel_url,
                self._onward(client, job),
                prefill_order(job.body_for(routed.model), transfer),
                deadline_s=routed.deadline_s,
            )
        except LegFailure as error:
            result = "failed"
            self._failed(worker, error)
            raise
        except PrefillRefused:
            result, found = "refused", None
        else:
            if found is not None:
                result = "done"
                self._workers.succeeded(worker)
            else:  # computed twice: again and again, it is worse than no prefiller
                result = "useless"
                self._workers.failed(worker, USELESS)
        finally:
            self.prefills[result] += 1
            self._workers.ended(worker)
            if result in ("aborted", "refused"):
                self._workers.neutral(worker)
        self._dispatcher.note(PrefillDone(job.request_id))
        return found

    def _onward(self, client: web.BaseRequest, job: RequestJob) -> CIMultiDict[str]:
        authorization = self._authorization
        onward = heads.onward(
            client.headers, request_id=job.request_id, authorization=authorization
        )
        onward[heads.ROUTERS] = heads.way(client.headers, self.name) or self.name
        return onward

    def _first(self, job: RequestJob) -> None:
        """A streamed answer begins; that of others comes whole, and says nothing about a TTFT."""
        if job.read.is_streamed:
            self._dispatcher.note(FirstToken(job.request_id))

    def _ended(self, worker: Worker, job: RequestJob, attempt: Attempt, ending: Ending) -> None:
        self.counts[ending.value] += 1
        if ending is Ending.DONE:
            self._workers.succeeded(worker)
        else:
            self._workers.neutral(worker)
        cached, made = cached_tokens_of(attempt.tail), output_tokens_of(attempt.tail)
        if cached is not None:
            self._observed(worker, predicted_tokens(job.prefix, worker.address), cached)
        self._dispatcher.note(RequestEnded(job.request_id, ending, cached, made))

    @property
    def _authorization(self) -> str | None:
        if self._worker_key:
            return f"Bearer {self._worker_key}"
        return "" if self._intake.has_tenants else None

    def _models(self) -> web.Response:
        names = sorted({name for worker in self._workers for name in worker.models})
        rows = [{"id": name, "object": "model", "owned_by": "kvstore"} for name in names]
        return _json(200, {"object": "list", "data": rows})


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """Work of its own task, which ends with the context."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _is_prefilled(leg: asyncio.Task[dict[str, Any] | None]) -> bool:
    return leg.done() and leg.exception() is None and leg.result() is not None


def rejection(rejected: Rejected) -> web.Response:
    """The answer to a request that no worker gets."""
    text = {
        404: f"no such model; there are {', '.join(rejected.known_models) or 'none'}",
        429: "too much load: try again later",
        502: "every worker that was tried failed",
        504: "no worker answered in time",
    }.get(rejected.status, "no worker is ready")
    answer = error_response(rejected.status, text, rejected.reason)
    answer.headers["X-Kvstore-Dropped-Reason"] = rejected.reason
    if rejected.retry_after_s is not None:
        answer.headers["Retry-After"] = str(max(1, round(rejected.retry_after_s)))
    return answer


def error_response(status: int, text: str, code: str) -> web.Response:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _json(status, {"error": {"message": text, "type": kind, "param": None, "code": code}})


def _json(status: int, content: object) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(content),
        content_type="application/json",
        headers={heads.SERVER: "kvstore"},
    )


def _closing(answer: web.Response) -> web.Response:
    """The rest of the body stays unread, and would be taken for the next request."""
    answer.force_close()
    return answer


def _cut(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


def _is_here(request: web.BaseRequest) -> bool:
    """Whether the client is on this machine, and no proxy speaks for another one."""
    if {"Forwarded", "X-Forwarded-For", "Via"} & request.headers.keys():
        return False
    peer = request.transport.get_extra_info("peername") if request.transport else None
    return peer is not None and peer[0] in ("127.0.0.1", "::1")

"""The OpenAI-compatible front end: one request from its head to the last byte of its answer.

    head ─▶ tenant ─▶ body (bounded) ─▶ peek ─▶ render ─▶ index ─▶ core: Routed
                                                       ┌──────────────┘ ▲
                                                       ├▶ attempt ───────┤ LegFailed, another worker
                                                       ├▶ prefill ───────┘
                                                       └▶ late: Raced, a second attempt (`race`)

A remote prefill is a second leg, at once with the attempt where the nodes of both engines are
known, else before it. When it fails before the client has got a byte, the attempt is void and the
core chooses again: another prefiller, or none. When its engine refuses the request, the attempt
begins anew, alone. A client that leaves takes both legs along.

Rules: each request that the core routed gets exactly one `RequestEnded`, also when its client
leaves; an answer that has begun is never retried, and when it breaks the client's connection is
cut, so that no client takes half an answer for a whole one; the body's bytes go on as they came,
but for fields that no client may set.

Covers: HTTP paths, attempts. Does not cover: decisions (`kvstore.routing`), bytes of an attempt
(`attempt`), limits of connections and bodies (`door`).
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp import web

from kvstore.router.dispatch import Dispatcher
from kvstore.router.engines.connections import EngineHttp
from kvstore.router.engines.workers import Worker, Workers
from kvstore.router.front import heads
from kvstore.router.front.answers import error_response, json_response, rejection
from kvstore.router.front.attempt import (
    SILENCE_S,
    Attempt,
    ClientStalled,
    LegFailure,
    cached_tokens_of,
    output_tokens_of,
    prompt_tokens_of,
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
from kvstore.router.front.race import Race, beside, refuse_if
from kvstore.router.keys.prefixes import predicted_tokens
from kvstore.routing.events import (
    Ending,
    Failure,
    FirstToken,
    Leg,
    LegFailed,
    PrefillDone,
    RaceOver,
    RequestEnded,
    Routed,
)
from kvstore.routing.models import ModelMap
from kvstore.routing.values import PrefixAnswer, RouteRequest

GENERATES: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
ALIVE: Final = "/livez"
PROBED: Final = frozenset({ALIVE, "/health"})
USELESS: Final = (
    "prefills without kv_transfer_params in their answers: its connector is missing, off or without"
    " its node"
)
PASSED: Final = GENERATES | {"/v1/embeddings", "/v1/score", "/v1/rerank"}


class Proxy:
    """See the module."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: Workers,
        session: aiohttp.ClientSession,
        engines: EngineHttp,
        *,
        bodies: Bodies,
        intake: RequestIntake,
        worker_key: str = "",
        explain: Callable[[RouteRequest, PrefixAnswer | None], bytes],
        observed: Callable[[Worker, str, int, int, int], None],
    ) -> None:
        """
        Args:
            session: for remote prefills; `engines`: for answers to clients.
            explain: makes the receipt of a dry run, as JSON.
            observed: takes an answered prompt's model and tokens: all, predicted cached, cached.
        """
        self._dispatcher, self._workers = dispatcher, workers
        self._session, self._engines = session, engines
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
        self.races = Counter[str]()
        """Second attempts that began, and ends of one of two by reason."""
        self.retried_count = 0
        self.in_flight = 0
        self.is_draining = False
        self._is_idle = asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever it is."""
        request_id = heads.new_id(request.headers)
        answer = await self._answer(request, request_id)
        if isinstance(answer, web.Response):  # the others are sent, with it
            answer.headers[heads.REQUEST_ID] = request_id
        return answer

    async def _answer(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
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
            return await self._with_body(request, path, tenant, request_id, is_dry=is_dry)
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
        self, request: web.BaseRequest, path: str, tenant: str, request_id: str, *, is_dry: bool
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
            job = await self._intake.job(
                request.headers, path, body, tenant, drives_legs=True, request_id=request_id
            )
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
        name, suspects = "", list[LegFailure]()
        while isinstance(routed, Routed):
            self.splits[routed.draft.plain.split_reason] += 1
            try:
                return await self._attempt(client, job, routed, suspects)
            except LegFailure as error:
                refusal = error.answer
                name = routed.worker if error.leg is Leg.PREFILL else error.worker or routed.worker
                self.retried_count += not error.has_streamed
                failed = LegFailed(job.request_id, error.leg, error.failure, error.has_streamed)
                routed = await self._dispatcher.leg_failed(failed)
                if error.has_streamed:
                    self.counts["broken"] += 1
                    raise ConnectionResetError("the engine's answer broke off") from None
        if len(suspects) == 1 and suspects[0].failure is not Failure.REFUSED:
            self._blame(suspects)
        self.counts[routed.reason] += 1
        answer = refusal if refusal is not None else rejection(routed)
        if name:
            answer.headers[heads.WORKER] = name
        return answer

    def _blame(self, suspects: Sequence[LegFailure]) -> None:
        """Engines that failed at a request. Where no engine served it and several failed alike,
        none is blamed: the request may be the cause."""
        for error in suspects:
            worker = self._workers.get(error.worker)
            if worker is not None:
                self._workers.failed(worker, str(error))

    async def _attempt(
        self,
        client: web.BaseRequest,
        job: RequestJob,
        routed: Routed,
        suspects: list[LegFailure],
    ) -> web.StreamResponse:
        """Raises LegFailure; in all other cases the request has ended for the core."""
        worker = self._workers.get(routed.worker)
        if worker is None:  # it left in the same turn of the loop
            raise LegFailure(Failure.CONNECT, "the worker has left")
        can_wait = routed.is_last or not job.read.is_streamed
        deadline_s = SILENCE_S if can_wait else routed.deadline_s
        attempt = Attempt(self._engines, worker, client, deadline_s)
        race = Race(attempt, partial(self._race_over, job, suspects))
        ending = Ending.ABORTED
        try:
            answer = await self._legs(race, job, routed)
        except LegFailure as error:
            ending = Ending.FAILED
            _suspect(error, suspects)
            raise
        except ClientStalled:
            _cut(client)
            raise ConnectionResetError("the client did not read") from None
        else:
            return answer
        finally:
            for other in race.others:
                self._workers.neutral(other.worker)
            attempt = race.attempt
            if attempt.is_whole:  # a client may leave while the prefill leg is ended
                ending = Ending.REFUSED if attempt.status >= 400 else Ending.DONE
                self._blame(suspects)
            if ending is not Ending.FAILED:
                self._ended(attempt.worker, job, attempt, ending)

    async def _legs(self, race: Race, job: RequestJob, routed: Routed) -> web.StreamResponse:
        first = race.attempt
        if routed.prefill_worker is not None:
            return await self._both_legs(first, job, routed, routed.prefill_worker)
        if routed.race_after_s is None:
            return await self._decode(first, job, routed)

        def second() -> Attempt | None:
            raced = self._dispatcher.late(job.request_id)
            worker = None if raced is None else self._workers.get(raced.worker)
            if raced is None or worker is None:
                return None
            self.races["begun"] += 1
            return Attempt(self._engines, worker, first.request, raced.deadline_s)

        def decode(attempt: Attempt) -> Coroutine[Any, Any, web.StreamResponse]:
            return self._decode(attempt, job, routed, claim=race.claim)

        return await race.run(decode, routed.race_after_s, second)

    def _race_over(
        self,
        job: RequestJob,
        suspects: list[LegFailure],
        attempt: Attempt,
        error: LegFailure | None,
    ) -> None:
        """One of two attempts has ended. Its failure, if it was one, is counted already."""
        if error is None:
            self._workers.neutral(attempt.worker)
        else:
            _suspect(error, suspects)
        self.races["failed" if error is not None else "slower"] += 1
        failure = None if error is None else error.failure
        self._dispatcher.note(RaceOver(job.request_id, attempt.worker.name, failure))

    async def _decode(
        self,
        attempt: Attempt,
        job: RequestJob,
        routed: Routed,
        parameters: dict[str, Any] | None = None,
        claim: Callable[[Attempt], None] = lambda _: None,
    ) -> web.StreamResponse:
        """The answer to the client. Args: `parameters`: of a remote prefill; `claim`: raises where
        another attempt answers."""
        worker = attempt.worker
        more: dict[str, str] = {heads.REQUEST_ID: job.request_id, heads.WORKER: worker.name}
        if routed.prefill_worker is not None:
            more["X-Kvstore-Prefill-Worker"] = routed.prefill_worker
        more |= heads.hints(routed.hints)

        def first() -> None:
            claim(attempt)
            self._first(job)

        self._workers.begun(worker)
        try:
            return await attempt.run(
                self._onward(attempt.request, job),
                decode_order(job.body_for(routed.model), parameters),
                on_first=first,
                more=more,
                has_client_key=self._authorization is None,
            )
        except LegFailure as error:
            self._failed(worker, error)
            raise
        finally:
            self._workers.ended(worker)

    def _failed(self, worker: Worker, error: LegFailure) -> None:
        """A suspect is judged when its request has ended (`_blame`)."""
        error.worker = worker.name
        if error.is_suspect or error.failure is Failure.BUSY:
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
        is_too_late = asyncio.Event()
        claim = partial(refuse_if, is_too_late)
        async with beside(prefill) as prefilling:
            if early is not None:
                async with beside(self._decode(attempt, job, routed, early, claim)) as decoding:
                    await asyncio.wait((prefilling, decoding), return_when=FIRST_COMPLETED)
                    if decoding.done() or attempt.has_answered or _is_prefilled(prefilling):
                        return await decoding
                    is_too_late.set()  # its first piece may come before it has ended
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

    def _onward(self, client: web.BaseRequest, job: RequestJob) -> list[tuple[str, str]]:
        return heads.onward(
            client.headers,
            request_id=job.request_id,
            authorization=self._authorization,
            way=heads.way(client.headers, self.name) or self.name,
        )

    def _first(self, job: RequestJob) -> None:
        """A streamed answer begins; that of others comes whole, and says nothing about a TTFT."""
        if job.read.is_streamed:
            self._dispatcher.note(FirstToken(job.request_id))

    def _ended(self, worker: Worker, job: RequestJob, attempt: Attempt, ending: Ending) -> None:
        self.counts[ending.value] += 1
        cached, made = cached_tokens_of(attempt.tail), output_tokens_of(attempt.tail)
        try:
            if ending is Ending.DONE:
                self._workers.succeeded(worker)
            else:
                self._workers.neutral(worker)
            if cached is not None:
                predicted = predicted_tokens(job.prefix, worker.address)
                prompt = prompt_tokens_of(attempt.tail)
                self._observed(worker, job.read.model, prompt, predicted, cached)
        finally:
            self._dispatcher.note(RequestEnded(job.request_id, ending, cached, made))

    @property
    def _authorization(self) -> str | None:
        if self._worker_key:
            return f"Bearer {self._worker_key}"
        return "" if self._intake.has_tenants else None

    def _models(self) -> web.Response:
        served = {n for worker in self._workers for n in (*worker.models, *worker.adapters)}
        names = ModelMap(self._dispatcher.core.policy).known or sorted(served)
        rows = [{"id": name, "object": "model", "owned_by": "kvstore"} for name in names]
        return json_response(200, {"object": "list", "data": rows})


def _suspect(error: LegFailure, suspects: list[LegFailure]) -> None:
    if error.is_suspect and error.worker:
        suspects.append(error)


def _is_prefilled(leg: asyncio.Task[dict[str, Any] | None]) -> bool:
    return leg.done() and leg.exception() is None and leg.result() is not None


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

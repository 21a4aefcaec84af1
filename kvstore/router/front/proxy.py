"""The OpenAI-compatible front end: one request from its head to the last byte of its answer.

    head ─▶ tenant ─▶ intake: body, fields, prefix ─▶ core: Routed
                                         ┌──────────────┘ ▲
                                         ├▶ attempt ───────┤ LegFailed, another worker
                                         ├▶ prefill ───────┘
                                         └▶ late: Raced, a second attempt (`legs`)

A remote prefill is a second leg, at once with the attempt where the prefiller's node is known, else
before it; one that is late in turn lets the attempt begin without it, and the first of the two
wins. When it fails before the client has got a byte, the attempt is void and the core chooses
again: another prefiller, or none. When its engine refuses the request, the attempt begins anew,
alone. A client that leaves takes both legs along.

Rules: each request that the core routed gets exactly one end (`RoutedLife`), also when its client
leaves; an answer that has begun is never retried, and when it breaks the client's connection is
cut, so that no client takes half an answer for a whole one; the body's bytes go on as they came,
but for fields that no client may set.

Covers: HTTP paths, attempts, headers of both directions. Does not cover: decisions
(`kvstore.routing`), bytes of an attempt (`engines.connections`), limits of connections (`door`) and
of bodies (`intake`).
"""

from __future__ import annotations

import asyncio
import functools
import re
import secrets
import time
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy, istr

from kvstore.router.dispatch import Dispatcher, RoutedLife
from kvstore.router.engines.calls import EngineHttp
from kvstore.router.engines.connections import (
    CONNECTION,
    HOP_BY_HOP,
    REQUEST_ID,
    ROUTERS,
    SERVER,
    WORKER,
    Attempt,
    cut,
)
from kvstore.router.engines.failures import Beaten, LegFailure
from kvstore.router.engines.probes import Probes
from kvstore.router.engines.workers import Worker
from kvstore.router.front import answers, paths
from kvstore.router.front.answers import MODELS, RESPONSES, error_response, models_answer, rejection
from kvstore.router.front.door import FREE_BYTES, Relayed
from kvstore.router.front.intake import (
    AUTHORIZATION,
    CONTENT_TYPE,
    NAME_BYTES_MAX,
    BadBody,
    BodyRefused,
    RequestIntake,
    RequestJob,
    Unauthorized,
    peek_unknown,
)
from kvstore.router.front.legs import PARAMETERS, Race, ahead, beside, prefill_order, prefilled
from kvstore.router.keys.parity import Parity
from kvstore.router.keys.prefixes import predicted_tokens
from kvstore.routing.events import (
    Ending,
    Failure,
    Fault,
    HintAnswer,
    Lack,
    Leg,
    Probed,
    RaceOver,
    Rejected,
    Routed,
)
from kvstore.routing.values import ProbeResult

if TYPE_CHECKING:
    from kvstore.router.traces import RouteTraces

PASSED_MAX: Final = 3
"""Most workers that get a request of a path without a rule, until one serves it."""
NOT_BEGUN: Final = (Failure.CONNECT, Failure.BUSY, Failure.REFUSED)
"""Failures of engines that did nothing for the request."""


def takes_prompts(path: str) -> bool:
    """Whether requests of a path are routed to workers by prefix or load."""
    return path in paths.PROMPTS or paths.AUDIO.fullmatch(path) is not None


# ── headers for engines ───────────────────────────────────────────────────────────────────────────
# Without hop-by-hop headers, and without names that steer engines or gateways. A header of a client
# never chooses a worker, a prefiller, a rank or an identity: such names are dropped, also where the
# Connection header would hide them. Framing is never copied: each side has its own.

_STEERING: Final = (
    *("x-kvstore-", "x-forwarded-", "x-real-ip", "forwarded", "x-gateway-", "x-llm-d-"),
    *("x-prefiller-", "x-encoder-", "x-data-parallel", "x-kv-cache-", "x-envoy-", "x-slo-"),
    *("epp-", "x-session-token", "x-dynamo-"),
)
"""Prefixes of header names by which engines, side-cars and gateways are steered."""
_REQUEST_ID: Final = re.compile(r"(?!.*___)[A-Za-z0-9._:-]{1,128}", re.ASCII)
"""Ids that are passed on: runs of underscores are refused, since some engines read addresses
between them.
"""
GIVEN_ID_CHARACTERS_MAX: Final = 96
NO_ID: Final = "req"
ORIGIN: Final = istr("Origin")
ROUTERS_MAX: Final = 4


def onward(
    headers: CIMultiDictProxy[str], *, request_id: str, authorization: str | None, way: str
) -> list[tuple[str, str]]:
    """Headers for an engine. `authorization`: replaces the client's, empty for none; None: the
    client's own stays. `way`: value of `ROUTERS`.
    """
    kept = [pair for pair in headers.items() if _goes_on(pair[0])]
    if CONNECTION in headers:
        values = ",".join(headers.getall(CONNECTION))
        named = {name.strip().lower() for name in values.split(",")}
        kept = [pair for pair in kept if pair[0].lower() not in named]
    if authorization is not None:
        kept = [pair for pair in kept if pair[0].lower() not in ("authorization", "x-api-key")]
    if authorization:
        kept.append((AUTHORIZATION, authorization))
    kept += [(REQUEST_ID, request_id), (ROUTERS, way)]
    return kept


@functools.lru_cache(maxsize=512)
def _goes_on(name: str) -> bool:
    low = name.lower()
    is_ours = low in HOP_BY_HOP or low == "x-request-id"
    return not (is_ours or low.startswith(_STEERING) or "_" in low)


def new_id(headers: CIMultiDictProxy[str]) -> str:
    """A unique id for a request: the client's own, where it is harmless, with random digits behind
    it, since another request under way may have the same.
    """
    given = headers.get(REQUEST_ID, "")
    beginning = given if _REQUEST_ID.fullmatch(given) else ""
    return f"{beginning[:GIVEN_ID_CHARACTERS_MAX] or NO_ID}-{secrets.token_hex(8)}"


def way(headers: CIMultiDictProxy[str], name: str) -> str | None:
    """Value of `ROUTERS` for an engine; None: the request has passed the router of this name, or
    too many routers.
    """
    passed = headers[ROUTERS].split(",") if ROUTERS in headers else []
    return None if name in passed or len(passed) >= ROUTERS_MAX else ",".join([*passed, name])


# ── headers for clients ───────────────────────────────────────────────────────────────────────────


def hints(answer: HintAnswer | None) -> dict[str, str]:
    """Headers that acknowledge a client's hints; empty if it gave none."""
    found = dict[str, str]()
    if answer is None:
        return found
    if answer.pinned_s:
        found["X-Kvstore-Pin"] = f"{answer.pinned_s:.0f}; tokens={answer.pinned_tokens}"
    elif answer.refused:
        found["X-Kvstore-Pin"] = f"0; reason={answer.refused}"
    if answer.ends_session:
        found["X-Kvstore-Session"] = "ends"
    return found


class Origins:
    """Origins of web pages whose scripts may read answers (CORS), as vLLM's `--allowed-origins`.

    Keys are sent in headers, never in cookies, so pages of any origin have only the keys that a
    user gave them.
    """

    def __init__(self, origins: Collection[str]) -> None:
        """`origins`: `*` for all; empty: none is allowed."""
        self._origins = frozenset(origins)

    def allowed(self, headers: CIMultiDictProxy[str]) -> dict[str, str]:
        """Headers of an answer that let the page read it; empty: no page asks, or its origin is not
        allowed.
        """
        origin = headers.get(ORIGIN)
        if origin is None or not {origin, "*"} & self._origins:
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in self._origins else origin,
            "Access-Control-Expose-Headers": "*",
            "Vary": "Origin",
        }

    def preflight(self, headers: CIMultiDictProxy[str]) -> dict[str, str] | None:
        """Headers that answer a browser's CORS preflight; empty: the origin is not allowed. None:
        the request is no preflight.
        """
        if "Access-Control-Request-Method" not in headers or ORIGIN not in headers:
            return None
        more = self.allowed(headers)
        asked = headers.get("Access-Control-Request-Headers", "*")[:FREE_BYTES]
        return more and more | {
            "Access-Control-Allow-Methods": ", ".join(paths.PASSED_METHODS),
            "Access-Control-Allow-Headers": asked,
            "Access-Control-Max-Age": "600",
        }


# ── tokens that engines report ────────────────────────────────────────────────────────────────────

_TOKENS: Final = re.compile(rb'"(cached|prompt|input|completion|output)_tokens"\s*:\s*(\d{1,9})\b')
_NAMES: Final = {b"input": b"prompt", b"output": b"completion"}


def tokens_of(tail: bytes) -> tuple[int | None, int, int]:
    """(cached, prompt, output) tokens, as the engine reports them at the end of its answer; cached
    None, others 0: it reports none, or an impossible number.
    """
    found = {_NAMES.get(name, name): int(number) for name, number in _TOKENS.findall(tail)}
    return found.get(b"cached"), found.get(b"prompt", 0), found.get(b"completion", 0)


# ── proxy ─────────────────────────────────────────────────────────────────────────────────────────


class Delivery(NamedTuple):
    """A request of a client that is sent to engines."""

    client: web.BaseRequest
    job: RequestJob
    life: RoutedLife
    routed: Routed
    """The decision that is carried out."""


class Proxy:
    """See the module."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        engines: EngineHttp,
        *,
        intake: RequestIntake,
        origins: Origins,
        parity: Parity,
        probes: Probes,
        traces: RouteTraces | None = None,
    ) -> None:
        """`traces`: None: headers of traces are passed on as the client sent them."""
        self._traces = traces
        self._dispatcher, self._workers, self._engines = dispatcher, dispatcher.workers, engines
        self._intake, self._origins = intake, origins
        self._authorization = engines.authorization or ("" if intake.tenants else None)
        self._parity, self._probes = parity, probes
        self._begun_s = int(time.time())
        self.name = engines.name
        self.counts = Counter[str]()
        """Requests by outcome."""
        self.splits = Counter[str]()
        """Decisions about local or remote prefill, by reason."""
        self.prefills = Counter[str]()
        """Remote prefills by result."""
        self.races = Counter[str]()
        """Second attempts that began (`begun`), and attempts of a race that ended (`failed`,
        `slower`).
        """
        self.retried_count = 0
        self.in_flight = 0
        self.is_draining = False
        self._is_idle = asyncio.Event()

    async def answer(self, request: web.BaseRequest, whole: bytes | None) -> web.StreamResponse:
        """Response for any request of a client. `whole`: its body, if that came with its head."""
        request_id = new_id(request.headers)
        asks = self._origins.preflight(request.headers) if request.method == "OPTIONS" else None
        if asks is None:
            answer = await self._answer(request, whole, request_id)
        elif asks:
            answer = web.Response(status=204, headers=asks)
        else:
            answer = error_response(403, "pages of this origin are not allowed", "origin")
        if isinstance(answer, web.Response):  # the others are sent, with it
            answer.headers.update(self._origins.allowed(request.headers))
            answer.headers[SERVER] = "kvstore"
            answer.headers[REQUEST_ID] = request_id
        return answer

    async def _answer(
        self, request: web.BaseRequest, whole: bytes | None, request_id: str
    ) -> web.StreamResponse:
        path = request.path
        if way(request.headers, self.name) is None:  # probes, too: such an engine is down
            text = "the request came back to a router: an engine's address is that of a router"
            return error_response(508, text, "loop")
        if path in paths.PROBED:
            is_fine = path == paths.ALIVE or self.is_ready
            why = "it drains, to end" if self.is_draining else "no worker takes requests"
            return web.Response(text="ok" if is_fine else why, status=200 if is_fine else 503)
        try:
            tenant = self._intake.tenant(request.headers) if self._intake.tenants else ""
        except Unauthorized as error:
            self.counts["unauthorized"] += 1
            return error_response(401, str(error), "invalid_api_key")
        if (moved := _without_slash(request)) is not None:
            return moved
        stored = paths.STORED.fullmatch(path)
        kept = stored[1] if stored else None
        if (path == MODELS or path.startswith(MODELS + "/")) and request.method == "GET":
            policy = self._dispatcher.core.policy
            if policy.models or any(worker.models for worker in self._workers):
                return models_answer(path, policy, self._workers, self._begun_s)
            kept = ""  # engines that list them for the client's key only
        is_dry = path.startswith("/kvstore/explain/")
        if is_dry:
            path = path.removeprefix("/kvstore/explain")
        methods = self._methods(request, path, is_dry=is_dry, is_kept=kept is not None)
        if not methods:
            return error_response(404, f"there is no {path[:NAME_BYTES_MAX]} here", "not_found")
        if request.method not in methods:
            why = f"{path[:NAME_BYTES_MAX]} takes {', '.join(methods)}"
            return error_response(405, why, "method_not_allowed")
        self.in_flight += 1
        taken = 0
        try:
            if methods != paths.PROMPT_METHODS:
                body = await self._intake.bodies.read(request, whole)
                taken = len(body)
                return await self._passed(request, kept or "", request_id, body, tenant)
            job = await self._intake.take(request, whole, path, tenant, request_id)
            taken = job.size
            return self._dry(job) if is_dry else await self._serve(request, job)
        except BadBody as error:
            self.counts["refused"] += 1
            return error_response(400, str(error), "invalid_request_error")
        except (BodyRefused, web.RequestPayloadError) as error:
            self.counts["refused"] += 1
            status, why = 400, "the body is badly framed"
            if isinstance(error, BodyRefused):
                status, why = error.status, str(error)
            answer = error_response(status, why, "invalid_request_error")
            answer.force_close()  # or the rest of the body would be taken for the next request
            return answer
        finally:
            self._intake.bodies.left += taken
            self.in_flight -= 1
            if self.is_draining and not self.in_flight:
                self._is_idle.set()

    def _methods(
        self, request: web.BaseRequest, path: str, *, is_dry: bool, is_kept: bool
    ) -> tuple[str, ...]:
        """Methods that a path takes; empty: this client gets nothing there."""
        if is_kept:
            return paths.KEPT_METHODS
        if takes_prompts(path):
            return paths.PROMPT_METHODS if not is_dry or _is_here(request) else ()
        has_tenants = self._intake.tenants is not None
        is_there = paths.is_passed_on(path, request.method, has_tenants=has_tenants)
        return paths.PASSED_METHODS if is_there and not is_dry else ()

    @property
    def is_ready(self) -> bool:
        """Whether a worker takes requests, or the policy holds requests until one does; false while
        draining.
        """
        holds = self._dispatcher.core.policy.limits.holds_without_workers and not self._workers
        return not self.is_draining and (holds or self._workers.take_requests)

    async def idle(self) -> None:
        """Begin to drain, so that `/health` is 503, and wait until no request is under way."""
        self.is_draining = True
        if self.in_flight:
            await self._is_idle.wait()

    def _dry(self, job: RequestJob) -> web.Response:
        """The receipt that a request would get, which is not sent."""
        core, now_ns = self._dispatcher.core, self._dispatcher.clock()
        try:
            receipt = core.explain(job.request, now_ns)
        except LookupError as error:
            if isinstance(rejected := error.args[0], Rejected):
                return rejection(rejected)
            why = f"no worker would get this request: {error}"
            return error_response(503, why, "no_worker")
        return web.Response(body=msgspec.json.encode(receipt), content_type="application/json")

    async def _passed(
        self, request: web.BaseRequest, response_id: str, request_id: str, body: bytes, tenant: str
    ) -> web.StreamResponse:
        """Pass a request on as it came: about a stored response to the worker in its id, else to
        all, one by one; any other (`response_id` empty) to the least busy ones of those that serve
        its model. Raises BadBody.
        """
        keeper = answers.worker_of(response_id, self._workers)
        able = self._workers.by_load(self._dispatcher.core.fleet.in_flight)
        answer = error_response(503, "no worker answers", "no_worker")
        if response_id:
            answer = error_response(404, f"there is no response {response_id}", "not_found")
        if not answers.is_of(response_id, tenant, self._workers):
            return answer
        if not response_id:
            if body:
                kind = request.headers.get(CONTENT_TYPE, "")
                model = (await asyncio.to_thread(peek_unknown, body, kind)).model
                able = [each for each in able if not model or each.serves(model)] or able
            able = able[:PASSED_MAX]
        answering = [worker for worker in able if worker.is_answering]
        for worker in [keeper] if keeper is not None else answering or able:
            attempt = Attempt(self._engines, worker, request)
            try:
                return await self._sent(attempt, body, request_id)
            except LegFailure as error:
                if error.has_streamed:
                    cut(request, "the engine's answer broke off")
                gone = error_response(502, f"its worker failed: {error}", "server_error")
                answer = error.answer or gone
                is_done = error.fault.failure not in NOT_BEGUN
                if is_done and not (response_id or request.method == "GET"):
                    return answer  # it may have had an effect, and another one elsewhere
        return answer

    async def _sent(
        self,
        attempt: Attempt,
        body: bytes,
        request_id: str,
        *,
        on_first: Callable[[], None] = lambda: None,
        more: dict[str, str] | None = None,
    ) -> Relayed:
        """Run an attempt: the answer, wholly sent. `more`: further headers for the client. Raises
        as `Attempt.run`.
        """
        client = attempt.request
        headers: dict[str, str] = {REQUEST_ID: request_id, WORKER: attempt.worker.name}
        headers |= (more or {}) | self._origins.allowed(client.headers)
        is_kept = await attempt.run(
            self._onward(client, request_id),
            body,
            on_first=on_first,
            more=headers,
            has_client_key=self._authorization is None,
        )
        sent = Relayed(status=attempt.status)
        sent.is_kept = is_kept
        return sent

    # ── attempts ─────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, client: web.BaseRequest, job: RequestJob) -> web.StreamResponse:
        if self._traces is not None:
            self._traces.begin(job.request.request_id, client.headers, job.came_ns)
        life = RoutedLife(self._dispatcher)
        routed = await life.enter(job.request)
        refusal: web.Response | None = None
        name = ""
        while isinstance(routed, Routed):
            self.splits[routed.draft.plain.split_reason] += 1
            try:
                return await self._attempt(Delivery(client, job, life, routed))
            except LegFailure as error:
                refusal = error.answer
                name = routed.worker if error.leg is Leg.PREFILL else error.worker or routed.worker
                self.retried_count += not error.has_streamed
                has_streamed = error.has_streamed
                routed = await life.failed(error.leg, error.fault, has_streamed=has_streamed)
                if error.has_streamed:
                    self.counts["broken"] += 1
                    raise ConnectionResetError("the engine's answer broke off") from None
        self.counts[routed.reason if refusal is None else Ending.FAILED.value] += 1
        answer = refusal if refusal is not None else rejection(routed)
        if name:
            answer.headers[WORKER] = name
        return answer

    async def _attempt(self, its: Delivery) -> web.StreamResponse:
        """Send a request where the core decided, and answer the client. Raises LegFailure; in all
        other cases the request has ended for the core.
        """
        routed, worker = its.routed, self._workers.get(its.routed.worker)
        if worker is None:  # it left in the same turn of the loop
            raise LegFailure(Failure.CONNECT, "the worker has left")
        first = Attempt(self._engines, worker, its.client)
        race = Race(first, partial(self._race_over, its)) if routed.may_race else None
        ending = Ending.ABORTED
        try:
            if routed.prefill_worker is not None:
                return await self._both_legs(its, first, routed.prefill_worker)
            if race is not None:
                return await self._raced(its, race, routed.late_after_s)
            return await self._decode(its, first)
        except LegFailure:
            if not (first if race is None else race.attempt).has_ended:
                ending = Ending.FAILED
                raise
            cut(its.client, "the engine closed after its last word")
        finally:
            attempt = first if race is None else race.attempt
            if attempt.is_whole or attempt.has_ended:
                # A client may leave at the stream's last word, or while the prefill leg is ended.
                ending = Ending.REFUSED if attempt.status >= 400 else Ending.DONE
            if ending is not Ending.FAILED:
                self._ended(its, attempt, ending)

    async def _raced(self, its: Delivery, race: Race, after_s: float) -> web.StreamResponse:
        """As `_decode`, with a second attempt if the first piece is late."""

        def second() -> Attempt | None:
            raced = self._dispatcher.late(its.job.request.request_id)
            worker = None if raced is None else self._workers.get(raced.worker)
            if worker is None:
                return None
            self.races["begun"] += 1
            return Attempt(self._engines, worker, its.client)

        return await race.run(partial(self._decode, its, claim=race.claim), after_s, second)

    def _race_over(self, its: Delivery, attempt: Attempt, error: LegFailure | None) -> None:
        """One of two attempts has ended: count it, and report it to the core."""
        self.races["failed" if error is not None else "slower"] += 1
        fault = None if error is None else error.fault
        self._dispatcher.note(RaceOver(its.job.request.request_id, attempt.worker.name, fault))

    async def _decode(
        self,
        its: Delivery,
        attempt: Attempt,
        parameters: dict[str, Any] | None = None,
        claim: Callable[[Attempt], None] | None = None,
    ) -> web.StreamResponse:
        """Answer the client by the decode leg. `parameters`: of a remote prefill; `claim`: raises
        Beaten if another attempt answers.
        """
        (_, job, life, routed), worker = its, attempt.worker
        more = hints(routed.hints)
        if routed.prefill_worker is not None:
            more["X-Kvstore-Prefill-Worker"] = routed.prefill_worker
        is_streamed = job.request.is_streamed

        def first() -> None:
            if claim is not None:
                claim(attempt)
            if is_streamed:  # others come whole, and say nothing about a TTFT
                life.first()

        put = dict[str, Any]()
        if job.path == RESPONSES:
            put |= answers.id_for(worker, job.path, job.read, job.request.tenant)
        if parameters is not None:
            put[PARAMETERS] = parameters
        is_as_it_came = not put and routed.model == job.read.model
        try:
            return await self._sent(
                attempt,
                job.body if is_as_it_came else job.body_for(routed.model, put),
                job.request.request_id,
                on_first=life.first if is_streamed and claim is None else first,
                more=more,
            )
        except LegFailure as error:
            self._lost(worker, error)
            raise

    def _lost(self, worker: Worker, error: LegFailure) -> None:
        """A request failed at a worker: probe it at once, and read its models again if it lacked
        one.
        """
        error.worker = worker.name
        if error.is_gone:
            self._dispatcher.note(Probed(worker.name, ProbeResult.REFUSED, str(error)))
        if error.fault.lack is Lack.MODEL:
            self._probes.read_models(worker)
        self._probes.look_now(worker)

    async def _both_legs(self, its: Delivery, attempt: Attempt, name: str) -> web.StreamResponse:
        """As `_decode`, with a remote prefill at the worker of this name."""
        prefiller, routed = self._workers.get(name), its.routed
        if prefiller is None:
            raise LegFailure(Failure.CONNECT, "the prefiller has left", leg=Leg.PREFILL)
        transfer = f"{routed.request_id}.{routed.attempt}"
        early = ahead(prefiller, attempt.worker, transfer)
        is_too_late = False

        def claim(_: Attempt) -> None:
            if is_too_late:  # the leg is being ended, because its prefill failed
                raise Beaten

        async with beside(self._prefill(its, prefiller, transfer)) as prefilling:
            if early is None:
                await asyncio.wait((prefilling,), timeout=routed.late_after_s)
            if early is not None or not prefilling.done():
                async with beside(self._decode(its, attempt, early, claim)) as decoding:
                    await asyncio.wait((prefilling, decoding), return_when=FIRST_COMPLETED)
                    # One that computes goes on until a prefill has parameters, one that waits for
                    # blocks as long as the prefill has not failed.
                    error = prefilling.exception() if prefilling.done() else None
                    is_over = prefilling.done() and error is None
                    is_prefilled = is_over and prefilling.result() is not None
                    is_of_use = is_prefilled is (early is not None)
                    if early is None and isinstance(error, LegFailure):
                        its.life.prefilled(error.fault)
                    if decoding.done() or attempt.has_answered or is_of_use:
                        return await decoding
                    is_too_late = True  # its first piece may come before it has ended
            return await self._decode(its, attempt, await prefilling)

    async def _prefill(self, its: Delivery, worker: Worker, transfer: str) -> dict[str, Any] | None:
        """Parameters of a remote prefill for the engine that decodes; None: it computes all. Raises
        LegFailure.
        """
        request_id, result = its.job.request.request_id, "aborted"
        try:
            found = await prefilled(
                self._engines,
                worker,
                its.client.path,
                self._onward(its.client, request_id),
                prefill_order(its.job.body_for(its.routed.model), transfer),
            )
            result = "done"
            if isinstance(found, Fault):
                result = "refused" if found.failure is Failure.REFUSED else "useless"
        except LegFailure as error:
            result = "failed"
            self._lost(worker, error)
            raise
        finally:
            self.prefills[result] += 1
        its.life.prefilled(found if isinstance(found, Fault) else None)
        return None if isinstance(found, Fault) else found

    def _onward(self, client: web.BaseRequest, request_id: str) -> list[tuple[str, str]]:
        pairs = onward(
            client.headers,
            request_id=request_id,
            authorization=self._authorization,
            way=way(client.headers, self.name) or self.name,
        )
        return pairs if self._traces is None else self._traces.onward(request_id, pairs)

    def _ended(self, its: Delivery, attempt: Attempt, ending: Ending) -> None:
        self.counts[ending.value] += 1
        cached, prompt, made = tokens_of(attempt.tail)
        try:
            if ending is Ending.DONE:
                self._learn(attempt.worker, its.job, prompt, cached)
        finally:
            its.life.end(ending, cached, made)

    def _learn(
        self, worker: Worker, job: RequestJob, prompt_tokens: int, cached: int | None
    ) -> None:
        """Learn from an engine's own token counts of a request that it answered."""
        prefix = job.request
        if prefix.text_bytes:
            estimates = self._intake.prefixes.estimates
            estimates.learn(job.read.model, prefix.text_bytes, prefix.media, prompt_tokens)
        if cached is None:
            return
        predicted = predicted_tokens(prefix, worker.address)
        worker.prompt_tokens += prompt_tokens
        worker.predicted_tokens += predicted
        worker.cached_tokens += cached
        self._parity.observed(worker, job.read.model, predicted, cached)


def _without_slash(request: web.BaseRequest) -> web.Response | None:
    """Redirect to a path without the slashes behind it, as engines answer; None: no such path takes
    the method, or none is behind it.
    """
    bare = request.path.rstrip("/")
    is_there = takes_prompts(bare) if request.method == "POST" else bare == MODELS
    if bare == request.path or not is_there:
        return None
    to = str(request.rel_url.with_path(bare, keep_query=True))
    return web.Response(status=307, headers={"Location": to})


def _is_here(request: web.BaseRequest) -> bool:
    """Whether the client is on this machine, and no proxy speaks for another one."""
    if {"Forwarded", "X-Forwarded-For", "Via"} & request.headers.keys():
        return False
    peer = request.transport.get_extra_info("peername") if request.transport else None
    return peer is not None and peer[0] in ("127.0.0.1", "::1")

"""The endpoint picker behind Envoy: external processing (ext_proc v3) in full-duplex streams.

    request headers ─ held ─▶ body pieces, until the end ─▶ core: Routed
       ◀─ headers: x-gateway-destination-endpoint = worker,fall-backs; the same as metadata envoy.lb
       ◀─ body pieces of at most PIECE_BYTES, the last with end_of_stream; trailers
    response headers: x-gateway-destination-endpoint-served says which one it was; body: passed back
    no worker ─▶ ImmediateResponse 503, shed ─▶ 429, each with its reason and Retry-After

The contract is that of the Gateway API inference extension (proposal 004). A subset hint in the
metadata bounds the choice. Requests without a body get the endpoint that keeps the stored response
they name, or else any. Envoy retries on fall-backs by itself: the router then learns the served
endpoint. A stream is one request: what comes twice, or after its end, is refused with
INVALID_ARGUMENT. Bodies count in the same memory as the proxy's.

Covers: one stream. Does not cover: the server (`rpc`), edits of bodies (`front.intake`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Final

import grpc
from google.protobuf.struct_pb2 import Struct
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.proto import picker_pb2 as pb
from kvstore.router.dispatch import Dispatcher, RoutedLife
from kvstore.router.engines.connections import TAIL_BYTES
from kvstore.router.front.answers import id_for, is_of, rejection, worker_of
from kvstore.router.front.intake import NO_MEMORY, BadBody, RequestIntake, Unauthorized
from kvstore.router.front.paths import PROBED, STORED
from kvstore.router.front.proxy import new_id, tokens_of
from kvstore.routing.events import Ending, Rejected

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION: Final = "x-gateway-destination-endpoint"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
DROPPED: Final = "x-llm-d-request-dropped-reason"
PIECE_BYTES: Final = 62_000
_OVERWRITE: Final = pb.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD

_TRAILERS_SEEN: Final = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
ANSWER_SEEN: Final = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
_ANSWER_TRAILERS_SEEN: Final = pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

Context = grpc.aio.ServicerContext[pb.ProcessingRequest, pb.ProcessingResponse]


class Picker:
    """Processes streams of Envoy; on the router's loop. `counts`: requests by outcome."""

    def __init__(self, dispatcher: Dispatcher, intake: RequestIntake) -> None:
        self.dispatcher, self.workers, self.intake = dispatcher, dispatcher.workers, intake
        self.counts = Counter[str]()

    async def process(self, _: object, context: Context) -> None:
        """Serve one stream, which is one HTTP request of Envoy."""
        stream = _Stream(self)
        try:
            await stream.run(context)
        finally:
            stream.close()


class _Stream:
    """State of one request and its stream."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._life = RoutedLife(picker.dispatcher)
        self._headers: CIMultiDict[str] | None = None
        self._subset: tuple[str, ...] | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_over = False
        """The request's last part has come: no other part may follow."""
        self._is_refused = False
        """There was no room for its body: the stream ends."""
        self._status = 0
        self._is_streamed = self._has_begun = False
        self._served = ""
        self._tail = b""

    async def run(self, context: Context) -> None:
        while isinstance(message := await context.read(), pb.ProcessingRequest):
            kind = message.WhichOneof("request") or ""
            if not kind.startswith("request_"):
                await context.write(self._answered(kind, message))
                continue
            if self._is_over or (kind == "request_headers") is (self._headers is not None):
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{kind} came twice, or after the end of its request: a stream is one",
                )
            for response in await self._request(kind, message):
                await context.write(response)
            if self._is_refused:
                return

    async def _request(
        self, kind: str, message: pb.ProcessingRequest
    ) -> Iterable[pb.ProcessingResponse]:
        """Take a part of the request. Returns the responses."""
        if kind == "request_headers":
            self._headers = _headers(message.request_headers.headers)
            self._subset = _subset(message.metadata_context)
            self._is_over = message.request_headers.end_of_stream
            return [self._without_body()] if self._is_over else []
        if kind == "request_body":
            return await self._body(message.request_body)
        self._is_over = True  # the end of the body is the trailers
        return [*await self._decision(), _TRAILERS_SEEN]

    async def _body(self, body: pb.HttpBody) -> Iterable[pb.ProcessingResponse]:
        """Take a piece of the body, for which there may be no room."""
        bodies = self._picker.intake.bodies
        self._pieces.append(body.body)
        self._size += len(body.body)
        has_room = bodies.take(len(body.body))
        self._is_refused = self._size > bodies.bytes_max or not has_room
        if self._size > bodies.bytes_max:
            return [refusal(413, "the body is too large", "rejected-body-too-large")]
        if not has_room:
            return [refusal(503, NO_MEMORY, "rejected-memory")]
        self._is_over = body.end_of_stream
        return await self._decision() if self._is_over else []

    async def _decision(self) -> Iterable[pb.ProcessingResponse]:
        picker, (given, path), body = self._picker, self._head, b"".join(self._pieces)
        try:
            tenant = picker.intake.tenant(given)
            job = await picker.intake.job(
                given, path, body, tenant, request_id=new_id(given), subset=self._subset
            )
        except BadBody as error:
            return [refusal(400, str(error), "rejected-bad-body")]
        except Unauthorized as error:
            return [refusal(401, str(error), "rejected-unauthorized")]
        routed = await self._life.enter(job.request)
        if isinstance(routed, Rejected):
            picker.counts[routed.reason] += 1
            return [_rejected(routed)]
        self._is_streamed = job.read.is_streamed
        found = map(picker.workers.get, (routed.worker, *routed.fallbacks))
        workers = [worker for worker in found if worker is not None]
        addresses = [worker.url.authority for worker in workers]
        put = id_for(workers[0], path, job.read, tenant) if workers else {}
        sent = job.body_for(routed.model, put)
        first = chosen(",".join(addresses), None if sent is body else len(sent))
        return [first, *pieces(sent)]

    @property
    def _head(self) -> tuple[CIMultiDictProxy[str], str]:
        """(headers, path) of the request."""
        assert self._headers is not None
        given = CIMultiDictProxy(self._headers)
        return given, given.get(":path", "").partition("?")[0]

    def _without_body(self) -> pb.ProcessingResponse:
        """Response with the worker that keeps the stored response of the path, or the least busy
        one of the subset, among those that answer if any does.
        """
        picker, (given, path), subset = self._picker, self._head, self._subset
        response_id = stored[1] if (stored := STORED.fullmatch(path)) else ""
        if path not in PROBED and given.get(":method") != "OPTIONS":  # browsers ask without key
            try:
                tenant = picker.intake.tenant(given)
            except Unauthorized as error:
                return refusal(401, str(error), "rejected-unauthorized")
            if response_id and not is_of(response_id, tenant, picker.workers):
                return refusal(404, f"there is no response {response_id}", "rejected-not-found")
        able = [
            worker
            for worker in picker.workers.by_load(picker.dispatcher.core.fleet.in_flight)
            if subset is None or {worker.name, worker.url.authority} & set(subset)
        ]
        worker = worker_of(response_id, able) or next(iter(able), None)
        if worker is None:
            return refusal(503, "no worker is ready", "rejected-no-endpoints")
        return chosen(worker.url.authority, None)

    @property
    def _served_by(self) -> str:
        """Name of the worker that Envoy chose in the place of the router's; empty: it did not."""
        worker = self._life.worker
        if not self._served or (worker is not None and worker.url.authority == self._served):
            return ""
        at = (each.name for each in self._picker.workers if each.url.authority == self._served)
        return next(at, self._served)

    # ── the answer ───────────────────────────────────────────────────────────────────────────────

    def _answered(self, kind: str | None, message: pb.ProcessingRequest) -> pb.ProcessingResponse:
        if kind == "response_headers":
            self._status = _status(message.response_headers.headers)
            self._served = _field(message.metadata_context, "envoy.lb", SERVED)
            return ANSWER_SEEN
        if kind == "response_body":
            body = message.response_body
            if body.body and not self._has_begun:
                self._has_begun = True
                # Another answer comes whole, and a failure says nothing about a TTFT.
                if self._is_streamed and self._status < 400:
                    self._life.first(self._served_by)
            self._tail = (self._tail + body.body)[-TAIL_BYTES:]
            return passed_back(body)
        return _ANSWER_TRAILERS_SEEN

    def close(self) -> None:
        """The stream is over, and so is the request: report its end to the core."""
        picker = self._picker
        picker.intake.bodies.left += self._size
        self._size = 0
        if self._life.routed is None:
            return
        is_elsewhere = bool(self._served_by)
        picker.counts["elsewhere"] += is_elsewhere
        ending = {0: Ending.ABORTED, 4: Ending.REFUSED, 5: Ending.FAILED}.get(
            self._status // 100, Ending.DONE
        )
        picker.counts[ending.value] += 1
        why = f"status {self._status} behind Envoy"
        if is_elsewhere:
            why = f"Envoy was served by {self._served}"
        cached, _, made = tokens_of(self._tail)
        self._life.end(ending, cached, made, by=self._served_by, why=why)


def _headers(found: pb.HeaderMap) -> CIMultiDict[str]:
    return CIMultiDict(
        (each.key, each.raw_value.decode("latin-1") or each.value) for each in found.headers
    )


def _status(found: pb.HeaderMap) -> int:
    text = _headers(found).get(":status", "")
    return int(text) if text.isdecimal() else 0


def _subset(metadata: pb.Metadata) -> tuple[str, ...] | None:
    fields = metadata.filter_metadata.get("envoy.lb.subset_hint")
    if fields is None or SUBSET not in fields.fields:
        return None
    value = fields.fields[SUBSET]
    texts = [each.string_value for each in value.list_value.values] or [value.string_value]
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


def _field(metadata: pb.Metadata, name: str, key: str) -> str:
    fields = metadata.filter_metadata.get(name)
    return str(fields.fields[key].string_value) if fields and key in fields.fields else ""


def _set(pairs: Iterable[tuple[str, str]]) -> pb.HeaderMutation:
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=key, raw_value=value.encode()), append_action=_OVERWRITE
            )
            for key, value in pairs
        ]
    )


@functools.lru_cache(maxsize=1024)
def chosen(destination: str, length: int | None) -> pb.ProcessingResponse:
    """Response that names endpoints (`destination`), separated by commas, best first. `length`: of
    an edited body; None: not edited. Cached, so it must not be changed.
    """
    pairs = [(DESTINATION, destination)]
    if length is not None:
        pairs.append(("content-length", str(length)))
    metadata = Struct()
    metadata.update({"envoy.lb": {DESTINATION: destination}})
    common = pb.CommonResponse(header_mutation=_set(pairs), clear_route_cache=True)
    return pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=common), dynamic_metadata=metadata
    )


def pieces(body: bytes) -> Iterable[pb.ProcessingResponse]:
    """Responses that carry the body of a request in pieces, as Envoy takes it."""
    for begin in range(0, max(1, len(body)), PIECE_BYTES):
        end = begin + PIECE_BYTES
        streamed = pb.StreamedBodyResponse(body=body[begin:end], end_of_stream=end >= len(body))
        common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
        yield pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))


def passed_back(body: pb.HttpBody) -> pb.ProcessingResponse:
    """Response that passes a piece of an engine's answer on, as it came."""
    streamed = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
    return pb.ProcessingResponse(response_body=pb.BodyResponse(response=common))


def _rejected(rejected: Rejected) -> pb.ProcessingResponse:
    answer = rejection(rejected)
    more = [(n, answer.headers[n]) for n in ("content-type", "retry-after") if n in answer.headers]
    body = answer.body
    assert isinstance(body, bytes)
    return refusal(rejected.status, body, rejected.reason, more)


def refusal(
    status: int, text: str | bytes, reason: str, more: Iterable[tuple[str, str]] = ()
) -> pb.ProcessingResponse:
    """Response that answers the client at once. `more`: further headers."""
    headers = _set([(DROPPED, reason), *more])
    body = text.encode() if isinstance(text, str) else text
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=status), headers=headers, body=body, details=reason
        )
    )

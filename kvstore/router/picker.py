"""The endpoint picker behind Envoy: external processing (ext_proc v3) in full-duplex streams.

    request headers ─ held ─▶ body pieces, until the end ─▶ core: Routed
       ◀─ headers: x-gateway-destination-endpoint = worker,fall-backs; the same as metadata envoy.lb
       ◀─ body pieces of at most PIECE_BYTES, the last with end_of_stream; trailers
    response headers: x-gateway-destination-endpoint-served says which one it was; body: passed back
    no worker ─▶ ImmediateResponse 503, shed ─▶ 429, each with its reason and Retry-After

The contract is that of the Gateway API inference extension (proposal 004). A subset hint in the
metadata bounds the choice. Requests without a body get any endpoint. Envoy retries on fall-backs by
itself: the router then learns the served endpoint, and counts a failure of the chosen one.

Covers: one stream. Does not cover: the server (`rpc`), edits of bodies (`front.bodies`).
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
from kvstore.router.dispatch import Dispatcher
from kvstore.router.engines.workers import Worker, Workers
from kvstore.router.front.answers import rejection
from kvstore.router.front.attempt import TAIL_BYTES, cached_tokens_of, output_tokens_of
from kvstore.router.front.bodies import BadBody
from kvstore.router.front.intake import RequestIntake, Unauthorized
from kvstore.routing.events import Ending, FirstToken, Rejected, RequestEnded, Routed

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
    """Processes streams; on the router's loop. Counts requests by what became of them."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: Workers,
        intake: RequestIntake,
        *,
        body_bytes_max: int,
    ) -> None:
        self.dispatcher, self.workers, self.intake = dispatcher, workers, intake
        self.body_bytes_max = body_bytes_max
        self.counts = Counter[str]()

    async def process(self, _: object, context: Context) -> None:
        """One HTTP request of Envoy."""
        stream = _Stream(self)
        try:
            await stream.run(context)
        finally:
            stream.close()

    def any_worker(self, subset: tuple[str, ...] | None) -> Worker | None:
        """For a request without a body: the least busy one that is up."""
        able = (
            worker
            for worker in self.workers
            if worker.serves_requests
            and worker.state in ("new", "up", "load-only")
            and (subset is None or {worker.name, worker.url.authority} & set(subset))
        )
        return min(able, key=lambda worker: worker.in_flight, default=None)


class _Stream:
    """State of one request."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._subset: tuple[str, ...] | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_over = False
        self._routed: Routed | None = None
        self._worker: Worker | None = None
        self._status = 0
        self._is_streamed = self._has_begun = False
        self._served = ""
        self._tail = b""

    async def run(self, context: Context) -> None:
        while isinstance(message := await context.read(), pb.ProcessingRequest):
            kind = message.WhichOneof("request")
            if kind == "request_headers":
                self._headers = _headers(message.request_headers.headers)
                self._subset = _subset(message.metadata_context)
                if message.request_headers.end_of_stream:
                    await context.write(self._without_body())
            elif kind == "request_body":
                if not await self._body(message.request_body, context):
                    return
            elif kind == "request_trailers":
                if not self._is_over:  # the end of the body is the trailers
                    await self._decided(context)
                await context.write(_TRAILERS_SEEN)
            else:
                await context.write(self._answered(kind, message))

    async def _body(self, body: pb.HttpBody, context: Context) -> bool:
        """A piece of it. False: it is too large, and the stream is over."""
        self._pieces.append(body.body)
        self._size += len(body.body)
        if self._size > self._picker.body_bytes_max:
            await context.write(refusal(413, "the body is too large", "rejected-body-too-large"))
            return False
        if body.end_of_stream:
            self._is_over = True
            await self._decided(context)
        return True

    async def _decided(self, context: Context) -> None:
        for response in await self._decision(b"".join(self._pieces)):
            await context.write(response)

    async def _decision(self, body: bytes) -> Iterable[pb.ProcessingResponse]:
        picker = self._picker
        given = CIMultiDictProxy(self._headers)
        path = given.get(":path", "").partition("?")[0]
        try:
            tenant = picker.intake.tenant(given)
            job = await picker.intake.job(given, path, body, tenant, subset=self._subset)
        except BadBody as error:
            return [refusal(400, str(error), "rejected-bad-body")]
        except Unauthorized as error:
            return [refusal(401, str(error), "rejected-unauthorized")]
        routed = await picker.dispatcher.arrive(job.asked)
        if isinstance(routed, Rejected):
            picker.counts[routed.reason] += 1
            return [_rejected(routed)]
        self._routed, self._worker = routed, picker.workers.get(routed.worker)
        self._is_streamed = job.read.is_streamed
        if self._worker is not None:
            picker.workers.begun(self._worker)
        found = map(picker.workers.get, (routed.worker, *routed.fallbacks))
        addresses = [worker.url.authority for worker in found if worker is not None]
        sent = job.body_for(routed.model)
        first = chosen(",".join(addresses), None if sent is body else len(sent))
        return [first, *pieces(sent)]

    def _without_body(self) -> pb.ProcessingResponse:
        worker = self._picker.any_worker(self._subset)
        if worker is None:
            return refusal(503, "no worker is ready", "rejected-no-endpoints")
        return chosen(worker.url.authority, None)

    # ── the answer ───────────────────────────────────────────────────────────────────────────────

    def _answered(self, kind: str | None, message: pb.ProcessingRequest) -> pb.ProcessingResponse:
        if kind == "response_headers":
            self._status = _status(message.response_headers.headers)
            self._served = _field(message.metadata_context, "envoy.lb", SERVED)
            return ANSWER_SEEN
        if kind == "response_body":
            body = message.response_body
            if body.body and not self._has_begun and self._routed is not None:
                self._has_begun = True
                if self._is_streamed:  # another answer comes whole, and says nothing about a TTFT
                    self._picker.dispatcher.note(FirstToken(self._routed.request_id))
            self._tail = (self._tail + body.body)[-TAIL_BYTES:]
            return passed_back(body)
        return _ANSWER_TRAILERS_SEEN

    def close(self) -> None:
        """The stream is over, and so is the request."""
        routed, worker, picker = self._routed, self._worker, self._picker
        if routed is None:
            return
        workers = picker.workers
        if worker is not None:
            workers.ended(worker)
            is_elsewhere = bool(self._served) and self._served != worker.url.authority
            picker.counts["elsewhere"] += is_elsewhere
            if is_elsewhere or self._status >= 500:
                workers.failed(worker, f"Envoy was served by {self._served or 'nobody'}")
            elif 200 <= self._status < 400:
                workers.succeeded(worker)
            else:
                workers.neutral(worker)
        ending = {0: Ending.ABORTED, 4: Ending.REFUSED, 5: Ending.FAILED}.get(
            self._status // 100, Ending.DONE
        )
        self._routed = None
        cached, made = cached_tokens_of(self._tail), output_tokens_of(self._tail)
        picker.counts[ending.value] += 1
        picker.dispatcher.note(RequestEnded(routed.request_id, ending, cached, made))


def _headers(found: pb.HeaderMap) -> CIMultiDict[str]:
    return CIMultiDict(
        (each.key, each.raw_value.decode("latin-1") or each.value) for each in found.headers
    )


def _status(found: pb.HeaderMap) -> int:
    for each in found.headers:
        if each.key == ":status":
            text = each.raw_value.decode("latin-1") or each.value
            return int(text) if text.isdecimal() else 0
    return 0


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
    """Endpoints with commas between them, best first. `length`: of a body that was edited; None: it
    was not. To be read only: the next request may get the same."""
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
    """The body of a request, as Envoy takes it."""
    for begin in range(0, max(1, len(body)), PIECE_BYTES):
        end = begin + PIECE_BYTES
        streamed = pb.StreamedBodyResponse(body=body[begin:end], end_of_stream=end >= len(body))
        common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
        yield pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))


def passed_back(body: pb.HttpBody) -> pb.ProcessingResponse:
    """A piece of an engine's answer, as it came."""
    streamed = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
    return pb.ProcessingResponse(response_body=pb.BodyResponse(response=common))


def _rejected(rejected: Rejected) -> pb.ProcessingResponse:
    answer = rejection(rejected)
    pairs = [("content-type", "application/json"), (DROPPED, rejected.reason)]
    if "Retry-After" in answer.headers:
        pairs.append(("retry-after", answer.headers["Retry-After"]))
    body = answer.body
    assert isinstance(body, bytes)
    return _immediate(rejected.status, pairs, body, rejected.reason)


def refusal(status: int, text: str, reason: str) -> pb.ProcessingResponse:
    """An immediate answer to the client."""
    return _immediate(status, [(DROPPED, reason)], text.encode(), reason)


def _immediate(
    status: int, pairs: list[tuple[str, str]], body: bytes, reason: str
) -> pb.ProcessingResponse:
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=status), headers=_set(pairs), body=body, details=reason
        )
    )

"""Streams of Envoy, message by message: a state machine that ends every request once. Bodies in
pieces; and the messages' numbers on the wire."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

import grpc
import pytest
from hypothesis import given, settings, strategies as st

from kvstore.config.router import WorkerAddress
from kvstore.proto import picker_pb2 as pb
from kvstore.router.dispatch import Dispatcher
from kvstore.router.front.answers import new_id
from kvstore.router.front.intake import BODIES_SHARE, Bodies, RequestIntake, Tenants
from kvstore.router.picker import (
    DESTINATION,
    DROPPED,
    PIECE_BYTES,
    SERVED,
    SUBSET,
    Picker,
    chosen,
    pieces,
    refusal,
)
from kvstore.routing.core import RouterCore
from kvstore.routing.events import FirstToken, Probed, RequestEnded, RouteEvent
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import ProbeResult, WorkerWord
from tests.kit.byte_prefixes import BytePrefixes
from tests.kit.coroutines import driven
from tests.kit.routing_check import check

BODY_BYTES_MAX = 10_000
ROOM = BODY_BYTES_MAX * BODIES_SHARE
BODY = json.dumps({"model": "m", "prompt": "x" * 2000, "stream": True}).encode()


class Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Envoy:
    """As grpc's context: reads what the test says, and ends then."""

    def __init__(self, messages: list[pb.ProcessingRequest]) -> None:
        self._messages = deque(messages)
        self.written: list[pb.ProcessingResponse] = []

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return self._messages.popleft() if self._messages else grpc.aio.EOF

    async def write(self, message: pb.ProcessingResponse) -> None:
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Aborted(code, text)

    @property
    def destinations(self) -> list[str]:
        return [
            each.header.raw_value.decode()
            for message in self.written
            for each in message.request_headers.response.header_mutation.set_headers
            if each.header.key == DESTINATION
        ]

    @property
    def refused(self) -> list[tuple[int, str]]:
        return [
            (message.immediate_response.status.code, message.immediate_response.details)
            for message in self.written
            if message.WhichOneof("response") == "immediate_response"
        ]


class Site:
    def __init__(self, *, tenants: Tenants | None = None) -> None:
        self.core = RouterCore(RoutingPolicy(), seed=1)
        self.events: list[RouteEvent] = []
        self._step, numbers = self.core.step, itertools.count()
        self.core.step = self._noted  # type: ignore[method-assign]
        self.dispatcher = Dispatcher(self.core, clock=lambda: next(numbers))
        self.workers = self.dispatcher.workers
        self.workers.replace(
            WorkerAddress(name=name, url=f"http://{name}:1", models=("m",)) for name in "ab"
        )
        for worker in self.workers:
            self.dispatcher.note(Probed(worker.name, ProbeResult.ANSWERED))
        prefixes = BytePrefixes()
        self.bodies = Bodies(bytes_max=BODY_BYTES_MAX)
        intake = RequestIntake(prefixes, tenants, self.dispatcher, self.bodies)
        self.picker = Picker(self.dispatcher, intake)

    def _noted(self, event: RouteEvent, now_ns: int) -> Any:
        self.events.append(event)
        return self._step(event, now_ns)

    async def play(self, *messages: pb.ProcessingRequest) -> Envoy:
        envoy = Envoy(list(messages))
        context: Any = envoy
        try:
            await self.picker.process(None, context)
        except Aborted as error:
            if error.code is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
        finally:
            self.check()
        return envoy

    async def refused(self, *messages: pb.ProcessingRequest) -> None:
        envoy: Any = Envoy(list(messages))
        with pytest.raises(Aborted, match="came twice, or after the end") as aborted:
            await self.picker.process(None, envoy)
        assert aborted.value.code is grpc.StatusCode.INVALID_ARGUMENT
        self.check()

    def check(self) -> None:
        """No stream is open: nothing is left of any."""
        assert not self.core.open
        assert not self.dispatcher.held
        assert self.left == ROOM
        assert [self.core.fleet.in_flight(worker.name) for worker in self.workers] == [0, 0]
        check(self.core)

    @property
    def left(self) -> int:
        return int(vars(self.bodies)["left"])

    @property
    def ends(self) -> list[RequestEnded]:
        return [each for each in self.events if isinstance(each, RequestEnded)]


def run(test: Callable[[Site], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def running() -> None:
        async with asyncio.timeout(60):
            await test(Site(**more))

    asyncio.run(running())


def head(*, is_over: bool = False, subset: str = "", **headers: str) -> pb.ProcessingRequest:
    pairs = {":path": "/v1/completions", ":method": "POST", **headers}
    message = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(
            headers=pb.HeaderMap(
                headers=[pb.HeaderValue(key=key, raw_value=pairs[key].encode()) for key in pairs]
            ),
            end_of_stream=is_over,
        )
    )
    if subset:
        fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
        fields[SUBSET].string_value = subset
    return message


def body(piece: bytes = BODY, *, is_over: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=piece, end_of_stream=is_over))


def trailers() -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_trailers=pb.HttpTrailers())


def answer(status: str = "200", served: str = "") -> pb.ProcessingRequest:
    found = [pb.HeaderValue(key=":status", raw_value=status.encode())]
    message = pb.ProcessingRequest(
        response_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=found))
    )
    if served:
        message.metadata_context.filter_metadata["envoy.lb"].fields[SERVED].string_value = served
    return message


def piece(content: bytes = b"data: x\n\n", *, is_over: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=content, end_of_stream=is_over))


USAGE = b'data: {"usage":{"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":3}}}\n\n'


@driven(run)
async def test_a_request_is_routed_once_and_its_end_is_that_of_the_stream(site: Site) -> None:
    pieces = [body(BODY[at : at + 500], is_over=False) for at in range(0, len(BODY), 500)]
    parts = (body(b"", is_over=True), answer(), piece(), piece(USAGE, is_over=True))
    envoy = await site.play(head(), *pieces, *parts)
    assert len(envoy.destinations) == 1
    assert set(envoy.destinations[0].split(",")) == {"a:1", "b:1"}
    sent = b"".join(
        message.request_body.response.body_mutation.streamed_response.body
        for message in envoy.written
    )
    assert sent == BODY
    back = [
        message.response_body.response.body_mutation.streamed_response
        for message in envoy.written
        if message.WhichOneof("response") == "response_body"
    ]
    assert [each.body for each in back] == [b"data: x\n\n", USAGE]
    [end] = site.ends
    assert (end.end.value, end.cached_tokens, end.output_tokens) == ("done", 3, 7)
    assert sum(isinstance(each, FirstToken) for each in site.events) == 1
    assert (site.picker.counts["done"], site.picker.counts.total()) == (1, 1)


@pytest.mark.parametrize(
    ("content", "status"), [(BODY.replace(b"true", b"false"), "200"), (BODY, "500")]
)
@driven(run)
async def test_a_whole_answer_and_a_failure_say_nothing_of_a_first_token(
    site: Site, content: bytes, status: str
) -> None:
    await site.play(head(), body(content), answer(status), piece())
    assert not any(isinstance(each, FirstToken) for each in site.events)


TWICE = {
    "a further end": [head(), body(), body(b"")],
    "further ends": [head(), body(), *[body()] * 50],
    "a further piece": [head(), body(), body(b"x", is_over=False)],
    "two heads": [head(), head()],
    "a head after the end": [head(), body(), head()],
    "a head after the answer": [head(), body(), answer(), piece(is_over=True), head()],
    "a body before its head": [body()],
    "trailers before a head": [trailers()],
    "a body after no body": [head(is_over=True), body()],
    "trailers after the end": [head(), body(), trailers()],
    "a body after trailers": [head(), body(is_over=False), trailers(), body()],
    "trailers twice": [head(), body(is_over=False), trailers(), trailers()],
}


@pytest.mark.parametrize("name", TWICE)
@driven(run)
async def test_what_comes_twice_or_too_late_ends_the_stream_and_leaves_nothing(
    site: Site, name: str
) -> None:
    for _ in range(3):
        await site.refused(*TWICE[name])
    assert len(site.ends) in (0, 3)


@driven(run)
async def test_trailers_are_the_end_of_a_body(site: Site) -> None:
    envoy = await site.play(head(), body(is_over=False), trailers(), answer())
    assert len(envoy.destinations) == 1
    assert [message.WhichOneof("response") for message in envoy.written][-2:] == [
        *("request_trailers", "response_headers"),
    ]


@pytest.mark.parametrize(
    ("status", "served", "end"),
    [
        ("200", "", "done"),
        ("404", "", "refused"),
        ("503", "", "failed"),
        ("", "", "aborted"),
        ("²", "", "aborted"),
        ("-1", "", "aborted"),
        ("99999", "", "done"),
    ],
)
@driven(run)
async def test_the_status_says_how_it_ended(site: Site, status: str, served: str, end: str) -> None:
    await site.play(head(), body(), answer(status, served))
    [ended] = site.ends
    assert ended.end.value == end


@driven(run)
async def test_another_endpoint_that_served_is_known_by_its_name_or_address(site: Site) -> None:
    for served in ("a:1", "b:1", "elsewhere:9"):
        await site.play(head(), body(), answer(served=served), piece(is_over=True))
    served_by = [each.served_by for each in site.ends]
    assert served_by[2] == "elsewhere:9"
    assert {*served_by[:2]} <= {"", "a", "b"}
    assert site.picker.counts["elsewhere"] == sum(map(bool, served_by))


@driven(run)
async def test_bodies_count_in_the_memory_of_all_and_give_it_back(site: Site) -> None:
    half = body(bytes(BODY_BYTES_MAX // 2), is_over=False)
    envoy = await site.play(head(), half, half, body(b"x"))
    assert envoy.refused == [(413, "rejected-body-too-large")]
    assert site.bodies.take(ROOM - 3000)
    envoy = Envoy([head(), half, body()])
    context: Any = envoy
    await site.picker.process(None, context)
    assert envoy.refused == [(503, "rejected-memory")]
    assert site.left == 3000
    await site.picker.process(None, cast("Any", Envoy([head(), body(BODY[:100])])))
    assert site.left == 3000
    site.bodies.left += ROOM - 3000
    assert len((await site.play(head(), body())).destinations) == 1


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        (b"{", (400, "rejected-bad-body")),
        (b'{"model":"unknown"}', (404, "rejected-model-unknown")),
        (b'{"model":1}', (400, "rejected-bad-body")),
    ],
)
@driven(run)
async def test_a_refusal_is_an_immediate_response(
    site: Site, content: bytes, refused: tuple[int, str]
) -> None:
    envoy = await site.play(head(), body(content))
    assert envoy.refused == [refused]
    assert not envoy.destinations
    [message] = envoy.written
    headers = message.immediate_response.headers.set_headers
    reasons = [each.header.raw_value for each in headers if each.header.key == DROPPED]
    assert reasons == [refused[1].encode()]


@driven(run, tenants={hashlib.sha256(b"key-of-a").digest(): "a"})
async def test_a_tenant_needs_its_key(site: Site) -> None:
    assert (await site.play(head(), body())).refused == [(401, "rejected-unauthorized")]
    key: dict[str, Any] = {"x-api-key": "key-of-a"}
    envoy = await site.play(head(**key), body())
    assert len(envoy.destinations) == 1
    sent = b"".join(
        message.request_body.response.body_mutation.streamed_response.body
        for message in envoy.written
    )
    assert json.loads(sent)["cache_salt"] == "a"
    assert (await site.play(head(is_over=True))).refused == [(401, "rejected-unauthorized")]
    for pairs in (key, {":path": "/health"}, {":method": "OPTIONS"}):
        assert len((await site.play(head(is_over=True, **pairs))).destinations) == 1
    for tenant, found in (("a", []), ("b", [(404, "rejected-not-found")])):
        path = f"/v1/responses/{new_id(site.workers['a'], tenant)}"
        assert (await site.play(head(is_over=True, **key, **{":path": path}))).refused == found


@driven(run)
async def test_a_request_without_a_body_goes_where_least_is_and_prefers_those_that_answer(
    site: Site,
) -> None:
    get = head(is_over=True)
    site.workers["a"].word = WorkerWord.DOWN
    assert (await site.play(get)).destinations == ["b:1"]
    assert (await site.play(head(is_over=True, subset="a:1, x"))).destinations == ["a:1"]
    assert (await site.play(head(is_over=True, subset="x"))).refused == [
        (503, "rejected-no-endpoints")
    ]
    assert not site.ends


@driven(run)
async def test_a_request_about_a_stored_response_goes_to_its_keeper(site: Site) -> None:
    for name in "ab":
        path: dict[str, Any] = {":path": f"/v1/responses/{new_id(site.workers[name], '')}/cancel"}
        for _ in range(8):  # by load alone it would be either of them
            assert (await site.play(head(is_over=True, **path))).destinations == [f"{name}:1"]
    elsewhere = {":path": path[":path"], "subset": "a"}
    assert (await site.play(head(is_over=True, **elsewhere))).destinations == ["a:1"]


@driven(run)
async def test_a_subset_bounds_the_choice(site: Site) -> None:
    for subset, found in (("b:1", ["b:1"]), ("b", ["b:1"]), ("x", []), (" , ", [])):
        envoy = await site.play(head(subset=subset), body())
        assert envoy.destinations == found
        assert len(envoy.refused) == 1 - len(found)


MESSAGES = st.sampled_from(
    [
        *(head(), head(is_over=True), head(subset="a"), head(subset="x")),
        *(body(), body(is_over=False), body(b""), body(b"{"), body(bytes(6000), is_over=False)),
        *(trailers(), answer(), answer("503"), answer("200", "b:1"), piece(), piece(is_over=True)),
        *(pb.ProcessingRequest(), pb.ProcessingRequest(response_trailers=pb.HttpTrailers())),
    ]
)


@settings(max_examples=200)
@given(st.lists(st.lists(MESSAGES, max_size=8), max_size=6))
@driven(run)
async def test_no_order_of_messages_leaks_a_request_or_memory(
    site: Site, streams: list[list[pb.ProcessingRequest]]
) -> None:
    for messages in streams:
        await site.play(*messages)
    ended = [each.request_id for each in site.ends]
    assert len({*ended}) == len(ended)


@driven(run)
async def test_a_call_that_is_cancelled_amid_its_body_leaves_nothing(site: Site) -> None:
    for messages in (
        [head(), body(is_over=False)],
        [head(), body()],
        [head(), body(), answer()],
    ):
        envoy = Envoy(messages)
        forever = asyncio.Event()

        async def read(envoy: Envoy = envoy, forever: asyncio.Event = forever) -> Any:
            if not envoy._messages:
                await forever.wait()
            return envoy._messages.popleft()

        envoy.read = read  # type: ignore[method-assign]
        call = asyncio.create_task(site.picker.process(None, cast("Any", envoy)))
        while envoy._messages:  # noqa: ASYNC110 - the stream's own pace
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert site.left < ROOM
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        site.check()


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
def test_pieces_are_small_and_only_the_last_ends_the_stream(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    made = [
        each.request_body.response.body_mutation.streamed_response for each in pieces(body[:size])
    ]
    assert b"".join(each.body for each in made) == body[:size]
    assert max(len(each.body) for each in made) <= 62_000
    assert [each.end_of_stream for each in made] == [False] * (len(made) - 1) + [True]


def test_an_edited_body_has_its_new_length() -> None:
    for length, expected in ((None, {}), (7, {"content-length": b"7"})):
        made = chosen("10.0.0.1:80,10.0.0.2:80", length)
        common = made.request_headers.response
        headers = {e.header.key: e.header.raw_value for e in common.header_mutation.set_headers}
        assert headers == {DESTINATION: b"10.0.0.1:80,10.0.0.2:80"} | expected
        assert common.clear_route_cache
        lb = made.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION]
        assert lb.string_value == "10.0.0.1:80,10.0.0.2:80"


def test_bytes_are_those_of_envoys_own_messages() -> None:
    """By hand, from field numbers of ext_proc v3: 7 immediate response, 1 status, 1 code."""
    made = refusal(503, "b", "d").SerializeToString()
    assert made.startswith(b"\x3a")
    assert b"\x0a\x03\x08\xf7\x03" in made
    # 2 request headers { 1 map { 1 header { 1 key, 3 raw value } }, 3 end of stream }
    header = b"\x0a\x01a\x1a\x01b"
    inner = b"\x0a" + bytes([len(header)]) + header
    message = b"\x0a" + bytes([len(inner)]) + inner + b"\x18\x01"
    read = pb.ProcessingRequest.FromString(b"\x12" + bytes([len(message)]) + message)
    assert read.request_headers.end_of_stream
    assert read.request_headers.headers.headers[0].raw_value == b"b"

"""Which space an operator means, that rows survive the way, and what limits a client (T6)."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, cast, get_args, get_origin

import grpc
import msgspec
import pytest

from kvstore.engine.engine import Engine
from kvstore.engine.why.report import (
    QuotaReport,
)
from kvstore.errors import NodeBusy, ProtocolError
from kvstore.net import server as net_server
from kvstore.net.aio import LoopThread
from kvstore.net.http import text_page
from kvstore.net.server import RefusedCall
from kvstore.node import inspect
from kvstore.node.driver import Driver
from kvstore.node.inspect import (
    CALL_COUNT_MAX,
    QUERY_TIMEOUT_S,
    REQUEST_BYTES_MAX,
    THREAD_COUNT,
    InspectServer,
    find_space,
)
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.inspect_pb2_grpc import InspectStub
from kvstore.proto.rows import (
    TOPICS,
    decode_rows,
    encode_rows,
)

SPACES = [b"\xab\xcd" + bytes(30), b"\xab\xce" + bytes(30)]


def engine_with_spaces() -> Engine:
    return cast("Engine", SimpleNamespace(space_ids=lambda: SPACES))


@pytest.mark.parametrize(("prefix", "index"), [("abcd", 0), ("abce00", 1), ("abcd" + "0" * 60, 0)])
def test_a_unique_prefix_names_a_space(prefix: str, index: int) -> None:
    assert find_space(engine_with_spaces(), prefix) == SPACES[index]


@pytest.mark.parametrize(
    ("prefix", "code"),
    [("ab", grpc.StatusCode.FAILED_PRECONDITION), ("ff", grpc.StatusCode.NOT_FOUND)],
)
def test_any_other_prefix_names_none(prefix: str, code: grpc.StatusCode) -> None:
    with pytest.raises(RefusedCall) as caught:
        find_space(engine_with_spaces(), prefix)
    assert caught.value.code is code
    assert repr(prefix) in str(caught.value)


def example(of: Any, number: int = 0) -> Any:
    """A value of that type, another one for each number; a row has another one in each field."""
    if isinstance(of, UnionType):
        of = get_args(of)[0]
    if get_origin(of) is tuple:
        return tuple(example(each, number) for each in get_args(of) if each is not Ellipsis)
    if issubclass(of, msgspec.Struct):
        fields = enumerate(msgspec.structs.fields(of))
        return of(**{field.name: example(field.type, at) for at, field in fields})
    if issubclass(of, Enum):
        return list(of)[number % len(of)]
    return of(2**62 + number if of is int else number + 1)


@pytest.mark.parametrize("topic", TOPICS)
def test_rows_survive_the_way(topic: str) -> None:
    row = example(TOPICS[topic])
    assert decode_rows(type(row), encode_rows([row, row])) == [row, row]


def test_every_topic_has_an_answer() -> None:
    answered = set(inspect._OF_ENGINE) | set(inspect._OF_CLUSTER)
    assert answered < set(TOPICS)
    assert all(callable(getattr(Engine, topic)) for topic in set(TOPICS) - answered)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"space": "s"}]', '[{"quota": 1}]', "[" * 10_000, "\ud800"]
)
def test_rows_of_another_version_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="rows of another version of kvstore"):
        decode_rows(QuotaReport, text)


def test_what_a_newer_node_adds_is_left_out() -> None:
    text = '[{"quota": "a", "promised_bytes": 1, "used_bytes": 2, "more": [3]}]'
    assert decode_rows(QuotaReport, text) == [QuotaReport("a", 1, 2)]


def test_a_topic_that_is_not_there_is_refused_with_those_that_are(stub: InspectStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Rows(pb.RowsRequest(topic="teirs"), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'teirs': there are nodes, unserved" in str(caught.value.details())


# ── limits ───────────────────────────────────────────────────────────────────────────────────────

PATIENCE_S = 90
TIERS = pb.RowsRequest(topic="tiers")


class SlowLoop:
    """A driver whose loop answers when it is let go."""

    def __init__(self) -> None:
        self.waiting = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.timeouts: list[float] = []

    def query(self, ask: Callable[[Engine], object], *, timeout_s: float) -> object:
        self.timeouts.append(timeout_s)
        self.waiting.release()
        assert self.let_go.wait(PATIENCE_S)
        return []


PAGES = {0: text_page(200, '{"role": "node"}')}
"""The page of the node."""


@pytest.fixture
def loop() -> SlowLoop:
    return SlowLoop()


@pytest.fixture
def stub(tmp_path: Path, loop: SlowLoop) -> Iterator[InspectStub]:
    thread = LoopThread("test")
    server = InspectServer(tmp_path / "node.sock", thread, cast("Driver", loop), lambda: PAGES[0])
    with grpc.insecure_channel(f"unix:{server.path}") as channel:
        yield InspectStub(channel)
    loop.let_go.set()
    server.close()
    thread.close()


def test_calls_beyond_the_limit_are_refused_and_the_others_answered(
    stub: InspectStub, loop: SlowLoop, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        stubs = []
        for _ in range(4):
            options = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
            address = f"unix:{tmp_path / 'node.sock.rpc'}"
            channel = stack.enter_context(grpc.insecure_channel(address, options))
            stubs.append(InspectStub(channel))
        calls = [
            its.Rows.future(TIERS, timeout=PATIENCE_S)
            for its in stubs
            for _ in range(3 * CALL_COUNT_MAX)
        ]
        assert loop.waiting.acquire(timeout=PATIENCE_S)
        ended: queue.Queue[Any] = queue.Queue()
        for call in calls:
            call.add_done_callback(ended.put)
        refused = ended.get(timeout=PATIENCE_S)
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "while others wait"
        assert len(loop.timeouts) <= THREAD_COUNT
        loop.let_go.set()
        codes = [call.code() for call in calls]
    assert set(codes) <= {
        grpc.StatusCode.OK,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
    }
    assert codes.count(grpc.StatusCode.OK) >= CALL_COUNT_MAX
    assert stub.Rows(TIERS, timeout=PATIENCE_S).rows == "[]"


def test_a_call_waits_for_the_loop_no_longer_than_its_deadline(
    stub: InspectStub, loop: SlowLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(ask: Callable[[Engine], object], *, timeout_s: float) -> object:
        loop.timeouts.append(timeout_s)
        raise NodeBusy("the node is busy: ask again later")

    monkeypatch.setattr(loop, "query", busy)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Rows(TIERS, timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert loop.timeouts == [QUERY_TIMEOUT_S]
    assert QUERY_TIMEOUT_S < PATIENCE_S


def test_the_page_is_given_or_why_there_is_none(
    stub: InspectStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stub.State(pb.StateRequest(), timeout=PATIENCE_S).state == PAGES[0].body.decode()
    monkeypatch.setitem(PAGES, 0, text_page(503, "the node is busy"))
    with pytest.raises(grpc.RpcError) as caught:
        stub.State(pb.StateRequest(), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "the node is busy"


def test_too_long_a_request_and_too_much_metadata_are_refused(
    stub: InspectStub, loop: SlowLoop
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Rows(pb.RowsRequest(topic="a" * REQUEST_BYTES_MAX), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError) as caught:
        stub.Rows(TIERS, timeout=PATIENCE_S, metadata=[("x", "a" * 40_000)])
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not loop.timeouts, "the loop was asked"


class Silent:
    """Calls that say nothing: their messages never come."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._end = threading.Event()
        self.ended: queue.Queue[Any] = queue.Queue()

    def call(self) -> None:
        method: Any = self._channel.stream_unary(f"/{NAME}/Rows")
        call = method.future(iter(self._nothing, None), timeout=PATIENCE_S)
        call.add_done_callback(self.ended.put)

    def is_heard(self) -> None:
        """Return when what was called before is known over there: a connection keeps its order."""
        InspectStub(self._channel).Rows(TIERS, timeout=PATIENCE_S)

    def _nothing(self) -> None:
        self._end.wait(PATIENCE_S)

    def close(self) -> None:
        self._end.set()
        self._channel.close()


NAME = pb.DESCRIPTOR.services_by_name["Inspect"].full_name


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Callable[[], Silent]]:
    with contextlib.ExitStack() as stack:

        def make() -> Silent:
            made = Silent(f"unix:{tmp_path / 'node.sock.rpc'}")
            stack.callback(made.close)
            return made

        yield make


def test_calls_that_say_nothing_keep_nobody_waiting(
    stub: InspectStub, loop: SlowLoop, silent: Callable[[], Silent]
) -> None:
    loop.let_go.set()
    for _ in range(3):
        its = silent()
        for _ in range(CALL_COUNT_MAX):
            its.call()
    for _ in range(20):
        assert stub.Rows(TIERS, timeout=PATIENCE_S).rows == "[]"


def test_the_oldest_that_says_nothing_gives_way(
    stub: InspectStub,
    loop: SlowLoop,
    silent: Callable[[], Silent],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(net_server, "SILENT_MAX", 4)
    monkeypatch.setattr(net_server, "READ_TIMEOUT_S", PATIENCE_S)
    loop.let_go.set()
    first = silent()
    first.call()
    first.is_heard()
    second = silent()
    for _ in range(4):
        second.call()
    gone = first.ended.get(timeout=PATIENCE_S)
    assert gone.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert second.ended.empty()
    assert stub.Rows(TIERS, timeout=PATIENCE_S).rows == "[]"


def test_a_call_that_says_nothing_ends_by_itself(
    stub: InspectStub, silent: Callable[[], Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net_server, "READ_TIMEOUT_S", 0.05)
    its = silent()
    its.call()
    assert its.ended.get(timeout=PATIENCE_S).details() == "no message came in time"

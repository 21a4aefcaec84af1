"""Blocks that a router has a node bring to dram ahead of time: what comes, and who may ask."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import pytest

from kvstore.client.certificates import load
from kvstore.client.index import channel_options
from kvstore.client.tls import Tls
from kvstore.config.router import WorkerAddress
from kvstore.peers.preparer import KEYS_PER_S
from kvstore.router.ahead import DEADLINE_S, FAILURES_MAX, Preparations
from kvstore.router.engines.workers import Worker, Workers
from kvstore.routing.events import Prepare, PrepareAnswered, PrepareReason
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import make_keys
from kvstore.types import Incarnation
from kvstore.wire.identity import Identity, Role
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX
from kvstore.wire.peers import AHEAD, PeerHello, PrepareReply, PrepareRequest, decode_reply, encode
from tests.integration.cluster.kit import (
    ASK_S,
    CONVERGES_S,
    SPACE,
    TENANT,
    Site,
    becomes,
    matches,
    member,
)
from tests.integration.node.conftest import eventually
from tests.kit.gauges import page
from tests.kit.peers import attached, metric, session

pytestmark = pytest.mark.slow

COUNT = 16
FLOOD = 2 * KEYS_PER_S // KEYS_PER_DATAGRAM_MAX


@dataclass
class Two:
    """Node n1 with an index and a disk, and n2; both serve and are prepared."""

    site: Site
    n1: NodeProcess
    n2: NodeProcess
    address: str

    @contextlib.contextmanager
    def channel(self, role: Role = "client", name: str = "router") -> Iterator[grpc.Channel]:
        """To n1, as this component."""
        files = self.site.lab.files(role, name)
        credentials = grpc.ssl_channel_credentials(
            files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
        )
        options: list[tuple[str, Any]] = channel_options(str(Identity("node", "n1")))
        with grpc.secure_channel(self.address, credentials, options=options) as made:
            yield made

    def prepare(
        self, channel: grpc.Channel, keys: list[bytes], *, engine: str = ""
    ) -> PrepareReply:
        request = PrepareRequest(TENANT, SPACE, engine, b"".join(keys))
        call = preparing(channel)
        reply: PrepareReply = call(encode(request), timeout=ASK_S, wait_for_ready=True)
        return reply


def preparing(channel: grpc.Channel) -> Any:
    """The call, of somebody who may say any bytes."""
    return channel.unary_unary(f"/{AHEAD}/Prepare", bytes, decode_reply)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    directory = tmp_path_factory.mktemp("ahead")
    site = Site(directory)
    peers = ("--peer-listen", "127.0.0.1:0", "--transport", "tcp")
    disk = ("--file", f"{directory}/disk:256MiB", "--index-listen", "127.0.0.1:0")
    with contextlib.ExitStack() as stack:
        n1 = site.node("n1", *peers, *disk, with_index=True, dram="16MiB")
        stack.callback(n1.stop)
        n2 = site.node("n2", *peers, "--index", n1.index)
        stack.callback(n2.stop)
        for node in (n1, n2):  # what is to be fetched is asked for once
            assert eventually(lambda node=node: page(node, "/healthz") == (200, "ok\n"))  # type: ignore[misc]
        with site.client(n1.index) as client:
            assert eventually(lambda: member(client, "n1") is not None, timeout_s=CONVERGES_S)
            found = member(client, "n1")
        assert found is not None
        yield Two(site, n1, n2, found.address)


def test_blocks_on_disk_are_in_dram_before_the_engine_asks(two: Two) -> None:
    keys = make_keys(COUNT, seed="disk")
    with (
        attached(two.n1.socket) as engine,
        two.site.client(two.n1.index) as client,
        two.channel() as router,
    ):
        engine.store(keys)
        engine.release(engine.lease_stored(keys))
        number = 0

        def is_on_disk_only() -> bool:
            nonlocal number
            number += 1
            engine.store(make_keys(64, seed=f"filler {number}"))
            found = matches(client, keys).get("n1")
            return found is not None and (found.dram_blocks, found.file_blocks) == (0, COUNT)

        assert eventually(is_on_disk_only, timeout_s=CONVERGES_S)
        reply = two.prepare(router, keys)
        assert (reply.dram, reply.reading, reply.sought, reply.refused) == (0, COUNT, 0, "")
        assert becomes(client, keys, {"n1": COUNT})
        answer = engine.ask(keys)
        assert (len(answer.slots) // 4, answer.promoting) == (COUNT, 0)
        assert engine.is_right(answer, keys)
        engine.release(answer)
        assert two.prepare(router, keys).dram == COUNT


def test_blocks_of_another_node_are_here_before_the_engine_asks(two: Two) -> None:
    keys = make_keys(COUNT, seed="far")
    with (
        attached(two.n1.socket) as here,
        attached(two.n2.socket) as there,
        two.site.client(two.n1.index) as client,
        two.channel() as router,
    ):
        there.store(keys)
        assert becomes(client, keys, {"n2": COUNT})
        reply = two.prepare(router, keys, engine="engine")
        assert (reply.dram, reply.reading, reply.sought, reply.refused) == (0, 0, COUNT, "")
        assert becomes(client, keys, {"n1": COUNT, "n2": COUNT})
        answer = here.ask(keys)
        assert (len(answer.slots) // 4, answer.promoting) == (COUNT, 0)
        assert here.is_right(answer, keys)
        here.release(answer)


def test_without_an_engine_of_the_space_it_is_said(two: Two) -> None:
    with two.channel() as router:
        assert "no engine of this space" in two.prepare(router, make_keys(1)).refused


def status(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value.code(), refused.value.details() or ""


def test_an_index_prepares_nothing(two: Two) -> None:
    before = metric(two.n1, "kvstore_prepares_refused_total")
    with two.channel("index", "i1") as channel:
        code, text = status(lambda: two.prepare(channel, make_keys(1)))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert text == "only clients of the cluster, such as routers, and nodes prepare blocks"
    assert metric(two.n1, "kvstore_prepares_refused_total") == before + 1


def test_a_router_is_served_nothing(two: Two) -> None:
    with two.channel() as channel:
        words = iter([PeerHello("router", Incarnation(7))])
        code, _ = status(lambda: next(session(channel, words, timeout_s=ASK_S)))
        assert code is grpc.StatusCode.PERMISSION_DENIED


WRONG: dict[str, dict[str, Any]] = {
    "too many keys": {"keys": bytes(32 * (KEYS_PER_DATAGRAM_MAX + 1))},
    "no keys": {"keys": b""},
    "half a key": {"keys": bytes(31)},
    "a short space": {"space": b"short"},
    "no tenant": {"tenant": ""},
    "an engine's name that is long": {"engine": "e" * 5000},
    "one that is long in UTF-8": {"engine": "é" * 128},
    "an unknown field": {"urgent": True},
    "another message": {"type": "PeerHello"},
}


def test_what_is_wrong_is_refused_with_one_sentence(two: Two, subtests: pytest.Subtests) -> None:
    request = PrepareRequest(TENANT, SPACE, "", bytes(32))
    fields = msgspec.to_builtins(request, builtin_types=(bytes,))
    with two.channel() as channel:
        call = preparing(channel)
        for name, wrong in WRONG.items():
            data = msgspec.msgpack.encode({**fields, **wrong})
            with subtests.test(name), pytest.raises(grpc.RpcError) as refused:
                call(data, timeout=ASK_S, wait_for_ready=True)
            text = refused.value.details()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert text, name
            assert "\n" not in text, name


def test_a_flood_is_refused_and_engines_are_served(two: Two) -> None:
    keys = make_keys(KEYS_PER_DATAGRAM_MAX, seed="flood")
    with attached(two.n1.socket) as engine, two.channel(name="flood") as channel:
        call = preparing(channel)
        request = encode(PrepareRequest(TENANT, SPACE, "", b"".join(keys)))
        begin_s = time.monotonic()
        calls = [call.future(request, timeout=60, wait_for_ready=True) for _ in range(FLOOD)]
        own = make_keys(4, seed="own")
        engine.store(own)
        engine.release(engine.lease_stored(own))
        codes = [call.code() for call in calls]
        took_s = time.monotonic() - begin_s
        # Streams that come before the server's limit is known, gRPC itself refuses.
        refused = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE
        assert {*codes} <= {grpc.StatusCode.OK, *refused}
        # A second's worth at once, and what a slow machine's flood may have meanwhile.
        assert codes.count(grpc.StatusCode.OK) * len(keys) <= KEYS_PER_S * (1 + took_s), codes
        with two.channel() as router:
            assert not two.prepare(router, own).refused, "another caller has its own part"
    assert metric(two.n1, "kvstore_loop_failures_total") == 0


def test_a_caller_that_says_nothing_is_hung_up_on(two: Two) -> None:
    with two.channel() as channel:
        silent: Any = channel.stream_unary("/kvstore.peer.v3.Ahead/Prepare")
        is_over = threading.Event()
        silence = iter(is_over.wait, True)
        code, _ = status(lambda: silent(silence, timeout=60, wait_for_ready=True))
        is_over.set()
        assert code is grpc.StatusCode.INVALID_ARGUMENT


# ── the router's end ─────────────────────────────────────────────────────────────────────────────


class Listing:
    """What an index lists: n1's space, and places of nodes."""

    def __init__(self, **addresses: str) -> None:
        self.index, self.addresses = self, addresses
        self.workers = Workers(lambda _: None)
        self.workers.replace([WorkerAddress(name="w", url="http://127.0.0.1:1", node="n1")])

    def of(self, _worker: Worker) -> list[tuple[str, bytes]]:
        return [(TENANT, SPACE)]


async def say(
    tls: Tls | None, listing: Any, commands: list[Prepare]
) -> tuple[list[PrepareAnswered], str]:
    """The answers that a router's core gets, and the trouble that its page shows."""
    found = asyncio.Queue[PrepareAnswered]()
    calls = Preparations(tls, listing, answered=found.put_nowait)
    answers = []
    for command in commands:
        calls.begin(command)
        answers.append(await asyncio.wait_for(found.get(), 30))
    trouble = calls.trouble
    await calls.close()
    return answers, trouble


def commands(count: int, keys: list[bytes]) -> list[Prepare]:
    return [Prepare(n, "r", "w", b"".join(keys), PrepareReason.WAITS) for n in range(count)]


def test_a_router_shows_its_certificate_and_is_answered(two: Two) -> None:
    keys = make_keys(COUNT, seed="tls")
    tls = load(two.site.lab.files("client", "router"))
    with attached(two.n1.socket) as engine:
        engine.store(keys)
        engine.release(engine.lease_stored(keys))
        saying = say(tls, Listing(n1=two.address), commands(1, keys))
        [answer], trouble = asyncio.run(saying)
    assert (answer.its.dram, answer.its.refused, trouble) == (COUNT, "", "")


def test_a_node_under_the_name_of_another_is_not_told(two: Two) -> None:
    """The index may lie about addresses: that of n1 is n2's."""
    tls = load(two.site.lab.files("client", "router"))
    with two.site.client(two.n1.index) as client:
        found = member(client, "n2")
    assert found is not None
    saying = say(tls, Listing(n1=found.address), commands(4, make_keys(1)))
    answers, trouble = asyncio.run(saying)
    assert all(answer.its.refused for answer in answers)
    assert "nothing is brought ahead at node n1" in trouble
    assert metric(two.n2, "kvstore_prepares_total") == 0


@pytest.mark.parametrize(
    ("said", "trouble"),
    [
        (b"", "malformed message"),
        (bytes(range(200, 230)), "malformed message"),
        (encode(PeerHello("n1", Incarnation(1))), "malformed message"),
        (None, "no answer in time"),
    ],
)
def test_a_node_that_talks_nonsense_or_is_silent_is_left_alone(
    said: bytes | None, trouble: str
) -> None:
    heard: list[object] = []

    async def answer(request: object, _context: object) -> bytes:
        heard.append(request)
        if said is None:
            await asyncio.Event().wait()
        assert said is not None
        return said

    async def saying() -> None:
        server = grpc.aio.server()
        method: Any = grpc.unary_unary_rpc_method_handler(answer)
        handler = grpc.method_handlers_generic_handler(AHEAD, {"Prepare": method})
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        begin_s = time.monotonic()
        listing = Listing(n1=f"127.0.0.1:{port}")
        answers, shown = await say(None, listing, commands(20, make_keys(1)))
        took_s = time.monotonic() - begin_s
        assert len(answers) == 20
        assert all(answer.its.refused for answer in answers)
        assert shown.startswith(f"nothing is brought ahead at node n1: {trouble}")
        if said is None:
            assert DEADLINE_S * FAILURES_MAX <= took_s < DEADLINE_S * 6
        await server.stop(0)

    asyncio.run(saying())
    assert len(heard) == FAILURES_MAX

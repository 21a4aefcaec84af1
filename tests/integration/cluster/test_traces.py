"""One request through a router, two nodes and a push, as one trace at a real OTLP receiver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kvstore.testing.raw_engine import BLOCK_BYTES, BLOCK_TOKENS, RawEngine, make_keys
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import LeaseReply, PushClose, PushOpen, Story
from tests.integration.node.conftest import eventually
from tests.kit.collector import Collector, Received, check_tree, collecting
from tests.kit.command import kvstore
from tests.kit.gauges import samples
from tests.kit.peers import PeerPair
from tests.kit.router_thread import ASK, RouterThread
from tests.kit.scripted_worker import ScriptedWorker
from tests.leaks import Baseline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCKS = 6
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT = "00f067aa0ba902b7"


class System(NamedTuple):
    """A router before an engine that is scripted; the engine's part at the nodes is the test's."""

    collector: Collector
    pair: PeerPair
    worker: ScriptedWorker
    router: RouterThread


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Connections to the collector stay open from test to test; `system` looks in the end."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder, baseline = tmp_path_factory.mktemp("traces"), Baseline()
    with collecting() as collector:
        flags = (
            "--trace",
            collector.url,
            "--landing",
            "1MiB",
            "--slab",
            "1MiB",
            "--fetch",
            "always",
        )
        with (
            PeerPair.start(folder, transport="tcp", flags=flags) as pair,
            ScriptedWorker.start(folder, "w") as worker,
            RouterThread([worker.flag], trace=collector.url) as router,
        ):
            yield System(collector, pair, worker, router)
    assert not baseline.wait()


def routed(system: System, headers: dict[str, str]) -> dict[str, str]:
    """Headers that the engine got for a request with these."""
    assert system.router.ask(ASK | {"model": "m"}, headers=headers)[0] == 200
    return {name.lower(): value for name, value in system.worker.seen()["headers"]}


def told(engine: RawEngine, reply: LeaseReply, request: str, **its: Any) -> None:
    """The engine's part of a request has ended, 80 ms after it began."""
    fields: dict[str, Any] = {
        "prompt_tokens": BLOCKS * BLOCK_TOKENS,
        "session": engine.session,
        "leases": [reply.lease],
        "queued_ns": 40 * NS_PER_MS,
        "lookup_ns": NS_PER_MS,
        "promotion_ns": 9 * NS_PER_MS,
        "admitted_ns": 60 * NS_PER_MS,
        "load_ns": 5 * NS_PER_MS,
        "total_ns": 80 * NS_PER_MS,
        "loaded_tokens": BLOCKS * BLOCK_TOKENS,
        "peer_tokens": BLOCKS * BLOCK_TOKENS,
    }
    assert engine.scheduler.send(Story(request=request, **(fields | its)))
    engine.release(reply)


def one(system: System, name: str, trace_id: str) -> Received:
    """The only span of a name in a trace, which comes in time."""

    def found() -> list[Received]:
        return [span for span in system.collector.named(name) if span.trace_id == trace_id]

    system.collector.await_that(lambda: bool(found()))
    (span,) = found()
    return span


def explained(system: System, request: str) -> list[tuple[int, str, str, str]]:
    """Rows of `kvstore explain` of node a."""
    where = ("--socket", str(system.pair.a.socket))
    (row,) = json.loads(kvstore("explain", request, "--json", *where).stdout)["requests"]
    return [(r["blocks"], r["tier"], r["node"], r["reason"]) for r in row["ranges"]]


def ranges(span: Received) -> list[tuple[int, str, str, str]]:
    """The same of a span."""
    names = ("tier", "peer", "miss.reason")
    return [
        (its["kvstore.blocks"], *(its.get(f"kvstore.{name}", "") for name in names))
        for _, its in span.events
    ]


def test_a_fetch_is_in_the_trace_of_its_client(system: System) -> None:
    keys = make_keys(BLOCKS + 2, seed="traced fetch")
    with (
        RawEngine(system.pair.b.socket, engine_id="b", timeout_s=60) as there,
        RawEngine(system.pair.a.socket, engine_id="a", timeout_s=60) as here,
    ):
        there.open()
        here.open()
        there.store(keys[:BLOCKS])
        there.release(there.lease_stored(keys[:BLOCKS]))
        got = routed(system, {"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": "v=1"})
        assert got["tracestate"] == "v=1"
        told(
            here,
            system.pair.fetch(here, keys[:BLOCKS]),
            "cmpl-fetched",
            traceparent=got["traceparent"],
            prompt_tokens=len(keys) * BLOCK_TOKENS,
            outcome="not stored",
        )
        request = one(system, "kvstore.request", TRACE)
        route, fetch = one(system, "kvstore.route", TRACE), one(system, "kvstore.fetch", TRACE)
        assert ranges(request) == explained(system, "cmpl-fetched")
    assert ranges(request) == [(BLOCKS, "peer", "b", ""), (2, "", "", "not asked")]
    assert (route.service, route.parent_id) == ("kvstore-router", CLIENT)
    assert got["traceparent"] == f"00-{TRACE}-{route.span_id}-01"
    assert route.attributes["kvstore.worker"] == "w"
    assert route.attributes["kvstore.outcome"] == "done"
    assert "gen_ai.usage.input_tokens" not in route.attributes, "nobody has tokenized the prompt"
    assert (request.service, request.parent_id) == ("kvstore-node", route.span_id)
    assert request.attributes == {
        "gen_ai.request.id": "cmpl-fetched",
        "gen_ai.request.model": "model",
        "gen_ai.usage.input_tokens": len(keys) * BLOCK_TOKENS,
        "gen_ai.usage.cache_read.input_tokens": BLOCKS * BLOCK_TOKENS,
        "kvstore.engine": "a",
        "kvstore.tenant": "default",
        "kvstore.miss.reason": "not asked",
    }
    assert request.end_ns - request.begin_ns == 80 * NS_PER_MS
    result = 'kvstore_traced_requests_total{result="exported"}'
    assert eventually(lambda: samples(system.pair.a)[result] == 1)
    assert fetch.parent_id == request.span_id
    assert fetch.attributes == {
        "kvstore.tier": "peer",
        "kvstore.peer": "b",
        "kvstore.blocks": BLOCKS,
    }
    load, promotion = (one(system, f"kvstore.{name}", TRACE) for name in ("load", "promotion"))
    for span in (load, promotion):
        assert span.parent_id == request.span_id
        assert span.attributes == {
            "kvstore.tier": "peer",
            "kvstore.blocks": BLOCKS,
            "kvstore.bytes": BLOCKS * BLOCK_BYTES,
        }
    check_tree([span for span in system.collector.spans if span.trace_id == TRACE])


def test_a_push_joins_both_nodes_in_one_trace(system: System) -> None:
    keys, name = make_keys(BLOCKS, seed="traced push"), "traced-push"
    got = routed(system, {"traceparent": "00-garbage", "tracestate": "v=1"})
    assert "tracestate" not in got, "it belongs to a trace that is not this one"
    route = one(system, "kvstore.route", got["traceparent"].split("-")[1])
    assert route.parent_id == ""
    with (
        RawEngine(system.pair.b.socket, engine_id="p", timeout_s=60) as prefill,
        RawEngine(system.pair.a.socket, engine_id="d", timeout_s=60) as decode,
    ):
        prefill.open()
        decode.open()
        its = {"traceparent": got["traceparent"], "transfer": name}
        assert prefill.scheduler.send(PushOpen(name))
        decode.expect(name, "b", keys)
        waiting = decode.ask(keys)
        prefill.store(keys)
        assert prefill.scheduler.send(PushClose(name))
        decode.finish(waiting)
        assert decode.push_end().reason == ""
        told(prefill, prefill.lease(make_keys(1)), "cmpl-p", loaded_tokens=0, peer_tokens=0, **its)
        told(decode, waiting, "cmpl-d", **its)
        push = one(system, "kvstore.push", route.trace_id)
    system.collector.await_that(lambda: len(requests(system, route)) == 2)
    by_engine = {span.attributes["kvstore.engine"]: span for span in requests(system, route)}
    assert by_engine.keys() == {"p", "d"}
    assert {span.parent_id for span in by_engine.values()} == {route.span_id}
    assert push.parent_id == by_engine["d"].span_id
    assert push.attributes == {
        "kvstore.tier": "peer",
        "kvstore.peer": "b",
        "kvstore.blocks": BLOCKS,
    }
    assert push.begin_ns == by_engine["d"].begin_ns < push.end_ns


def requests(system: System, route: Received) -> list[Received]:
    """Requests at nodes below a route."""
    found = system.collector.named("kvstore.request")
    return [span for span in found if span.trace_id == route.trace_id]


def test_an_unsampled_client_leaves_no_span(system: System) -> None:
    before = len(system.collector.named("kvstore.route"))
    trace_id = TRACE[::-1]
    got = routed(system, {"traceparent": f"00-{trace_id}-{CLIENT}-00"})
    assert got["traceparent"].startswith(f"00-{trace_id}-")
    assert got["traceparent"].endswith("-00")
    routed(system, {})
    system.collector.await_that(lambda: len(system.collector.named("kvstore.route")) > before)
    assert trace_id not in {span.trace_id for span in system.collector.spans}
    traces = system.router.router.traces
    assert traces is not None
    assert eventually(lambda: traces.counts["exported"] == before + 1)
    assert traces.counts["dropped"] == 0

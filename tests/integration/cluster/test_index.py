"""The index service over the wire: the same for a replica by itself and one inside a node."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.client.certificates import load
from kvstore.client.index import IndexClient, IndexUnavailable, Tokens, channel
from kvstore.index.chain import block_keys
from kvstore.index.feed import Trust
from kvstore.obs.metrics import INDEX_METRICS
from kvstore.proto import index_pb2 as pb
from kvstore.proto.index_pb2_grpc import IndexStub
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_TOKENS, RawEngine, make_keys
from kvstore.wire.feed import KEYS_MAX, MESSAGE_BYTES_MAX
from tests.integration.cluster.kit import (
    ASK_S,
    CONVERGES_S,
    SPACE,
    TENANT,
    Site,
    becomes,
    matches,
    trust,
)
from tests.integration.node.conftest import eventually
from tests.kit.command import kvstore
from tests.kit.gauges import page
from tests.kit.processes import IndexProcess
from tests.leaks import Baseline

pytestmark = pytest.mark.slow


class System(NamedTuple):
    """A node that feeds one replica."""

    site: Site
    node: NodeProcess
    address: str
    client: IndexClient
    pages: IndexProcess | NodeProcess


KINDS = ("by itself", "inside a node")


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """What is started for all tests lives on; `started` looks in the end."""


@contextlib.contextmanager
def started(kind: str, directory: Path) -> Iterator[System]:
    """One whose replica is of this kind."""
    site, baseline = Site(directory), Baseline()
    inside = ("--index-listen", "127.0.0.1:0")
    with contextlib.ExitStack() as stack:
        index = stack.enter_context(site.index()) if kind == KINDS[0] else None
        flags = ("--index", index.address) if index else inside
        node = stack.enter_context(site.node("n1", *flags, with_index=not index))
        address = index.address if index else node.index
        client = stack.enter_context(site.client(address))
        yield System(site, node, address, client, index or node)
    assert not baseline.wait()


@pytest.fixture(scope="module", params=KINDS)
def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    with started(request.param, tmp_path_factory.mktemp("index")) as system:
        yield system


def test_what_a_node_holds_is_found_until_it_does_not(system: System) -> None:
    tokens = list(range(3 * BLOCK_TOKENS))
    keys = block_keys(tokens, block_tokens=BLOCK_TOKENS, seed="0")
    with RawEngine(system.node.socket) as engine:
        engine.open()
        engine.store(keys[:2])
        assert becomes(system.client, list(keys), {"n1": 2})
        prompt = Tokens(tokens, BLOCK_TOKENS, "0")
        (match,) = system.client.match(TENANT, SPACE, prompt).matches
        assert (match.holder.node, match.holder.engine, match.holder.rank) == ("n1", "", 0)
        assert (match.hbm_blocks, match.dram_blocks, match.file_blocks) == (0, 2, 2)
        assert system.client.match("other", SPACE, prompt).matches == []
        assert kvstore("clear", "--socket", str(system.node.socket)).returncode == 0
        assert becomes(system.client, list(keys), {})


def test_the_engines_of_a_node_are_known_while_they_are_attached(system: System) -> None:
    def engines() -> list[tuple[str, str, str]]:
        nodes = system.client.nodes(engines=True).nodes
        return [(each.tenant, each.engine, each.address) for node in nodes for each in node.engines]

    with RawEngine(system.node.socket, address="http://10.0.0.7:8000") as engine:
        engine.open()
        mine = (TENANT, "engine", "http://10.0.0.7:8000")
        assert eventually(lambda: engines() == [mine], timeout_s=CONVERGES_S)
    assert eventually(lambda: engines() == [], timeout_s=CONVERGES_S)


def test_news_come_to_who_watches(system: System) -> None:
    keys = make_keys(2, seed="news")
    news = system.client.watch(prefix=(TENANT, SPACE, b"".join(keys)))
    first = next(news)
    assert first.answer is not None
    assert first.answer.matches == []
    with RawEngine(system.node.socket) as engine:
        engine.open()
        engine.store(keys)
        held, nodes = 0, {each.node for each in first.nodes}
        while held < 2 or nodes != {"n1"}:
            more = next(news)
            nodes |= {each.node for each in more.nodes}
            if more.answer is not None and more.answer.matches:
                held = more.answer.matches[0].dram_blocks
    assert (held, nodes) == (2, {"n1"})
    news.close()  # type: ignore[attr-defined]


def test_inspect_shows_the_cluster(system: System) -> None:
    assert eventually(lambda: trust(system.client, "n1") is Trust.EXACT, timeout_s=CONVERGES_S)
    shown = kvstore("inspect", "nodes", "--json", "--socket", str(system.node.socket))
    assert shown.returncode == 0
    (row,) = json.loads(shown.stdout)["members"]
    assert (row["node"], row["trust"]) == ("n1", "exact")
    assert row["incarnation"] in system.node.ready_line
    assert f" index={system.address} serves-index=" in system.node.ready_line, "its own one, too"


def test_the_ready_line_says_that_its_loops_are_not_compiled(tmp_path: Path) -> None:
    with IndexProcess.start(tmp_path, ("--insecure", "--plain")) as index:
        assert index.ready_line.endswith(" store=memory compiled=no\n")


def test_health_reflection_and_pages(system: System) -> None:
    credentials = load(system.site.files).channel_credentials()
    with channel(system.address, credentials) as open_channel:
        health = health_pb2_grpc.HealthStub(open_channel)
        request = health_pb2.HealthCheckRequest(service="kvstore.index.v1.Index")
        assert health.Check(request, timeout=ASK_S).status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(open_channel)
        (reply,) = stub.ServerReflectionInfo(iter([ask]), timeout=ASK_S)
        assert "kvstore.index.v1.Index" in {
            each.name for each in reply.list_services_response.service
        }
    text = page(system.pages, "/metrics")[1]
    exported = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    listed = {metric.name for metric in INDEX_METRICS} - {"kvstore_index_info"}
    assert listed <= exported
    assert page(system.pages, "/healthz")[1].startswith("ok")


def test_questions_that_make_no_sense_are_refused_and_cost_nobody_else(system: System) -> None:
    credentials = load(system.site.files).channel_credentials()
    many = bytes(32 * (KEYS_MAX + 1))
    with channel(system.address, credentials) as open_channel:
        stub = IndexStub(open_channel)
        for request in (
            pb.MatchRequest(tenant="t", space=b"short", keys=bytes(32)),
            pb.MatchRequest(tenant="t", space=bytes(32)),
            pb.MatchRequest(tenant="t", space=bytes(32), keys=bytes(31)),
            pb.MatchRequest(tenant="t", space=bytes(32), keys=many),
            pb.MatchRequest(tenant="t" * 300, space=bytes(32), keys=bytes(32)),
            pb.MatchRequest(tenant="t", space=bytes(32), tokens=pb.Tokens(ids=[1])),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Match(request, timeout=ASK_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for watch in (
            pb.WatchRequest(),
            pb.WatchRequest(
                prefix=pb.MatchRequest(tenant="t", space=bytes(32), keys=bytes(32 * 1025))
            ),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                next(stub.Watch(watch, timeout=ASK_S))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        huge = pb.MatchRequest(tenant="t", space=bytes(32), keys=bytes(MESSAGE_BYTES_MAX))
        with pytest.raises(grpc.RpcError) as caught:
            stub.Match(huge, timeout=ASK_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(ValueError, match="a space has 32 bytes"):
        system.client.match(TENANT, b"", b"")
    assert eventually(lambda: trust(system.client, "n1") is Trust.EXACT, timeout_s=CONVERGES_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_that_is_stopped_leaves_nobody_waiting(kind: str, tmp_path: Path) -> None:
    with started(kind, tmp_path) as system:
        assert eventually(lambda: trust(system.client, "n1") is Trust.EXACT, timeout_s=CONVERGES_S)
        news = system.client.watch()
        next(news)
        system.node.process.terminate()
        # With the node goes its replica, or its feed.
        if kind == "inside a node":
            with pytest.raises(IndexUnavailable):
                list(news)
        else:
            while next(news).nodes[0].trust is Trust.EXACT:
                pass
            assert matches(system.client, make_keys(1)) == {}
            news.close()  # type: ignore[attr-defined]
        assert system.node.process.wait(20) == 0

"""Nodes and replicas that die, stop, and come back under the same address (I8)."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from kvstore.client.certificates import load
from kvstore.client.index import channel
from kvstore.index.feed import Trust
from kvstore.testing.process import NodeProcess, read_line, reap
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.types import Incarnation
from kvstore.wire.feed import Hello
from tests.integration.cluster.kit import (
    CONVERGES_S,
    Site,
    becomes,
    feed,
    matches,
    member,
    trust,
)
from tests.integration.node.conftest import eventually
from tests.kit.gauges import page
from tests.kit.peers import metric
from tests.kit.processes import IndexProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def index(site: Site) -> Iterator[IndexProcess]:
    """For tests that leave it alone."""
    with site.index() as made:
        yield made


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of which this process makes sure that nobody listens there."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_dead_node_is_out_and_another_is_not(
    site: Site, index: IndexProcess, *, is_refused: bool
) -> None:
    name, said = "refusing" if is_refused else "silent", len(index.log)
    keys = make_keys(4, seed=name)
    flags = ["--index", index.address]
    if is_refused:
        flags += ["--peer-listen", "127.0.0.1:0", "--transport", "tcp"]
    with (
        site.client(index.address) as client,
        site.node("n1", *flags) as other,
        RawEngine(other.socket) as its,
    ):
        its.open()
        its.store(keys[:1])
        with site.node(name, *flags) as node, RawEngine(node.socket) as engine:
            engine.open()
            engine.store(keys)
            assert becomes(client, keys, {"n1": 1, name: 4})
            node.kill()
        assert eventually(lambda: trust(client, name) is None, timeout_s=CONVERGES_S)
        assert becomes(client, keys, {"n1": 1})
        assert trust(client, "n1") is Trust.EXACT
    its_log = index.log[said:]
    assert (f"{name} is gone: its address refuses connections" in its_log) is is_refused


@pytest.mark.parametrize(("host", "is_dialled"), [("127.0.0.1", True), ("169.254.169.254", False)])
def test_no_address_but_the_nodes_own_is_dialled(
    site: Site, index: IndexProcess, closed_port: int, host: str, *, is_dialled: bool
) -> None:
    address = f"{host}:{closed_port}"
    name, said = "here" if is_dialled else "elsewhere", len(index.log)
    hello = Hello(name, Incarnation(1), 1, 0, address)
    credentials = load(site.lab.files("node", name)).channel_credentials()
    with site.client(index.address) as client:
        with channel(index.address, credentials) as feeding:
            is_over = threading.Event()

            def words() -> Iterator[Hello]:
                yield hello
                is_over.wait(CONVERGES_S)

            call = feed(feeding, words(), timeout_s=CONVERGES_S)
            assert eventually(lambda: member(client, name) is not None, timeout_s=CONVERGES_S)
            is_over.set()
            list(call)
        assert eventually(lambda: trust(client, name) is None, timeout_s=CONVERGES_S)
        assert ("refuses connections" in index.log[said:]) is is_dialled


def test_a_stopped_node_is_out_and_comes_back(site: Site, index: IndexProcess) -> None:
    keys = make_keys(2, seed="stopped")
    with (
        site.client(index.address) as client,
        site.node("n1", "--index", index.address) as node,
        RawEngine(node.socket) as engine,
    ):
        engine.open()
        engine.store(keys)
        assert becomes(client, keys, {"n1": 2})
        node.pause()
        assert eventually(lambda: matches(client, keys) == {}, timeout_s=CONVERGES_S)
        node.resume()
        assert becomes(client, keys, {"n1": 2})


def test_a_node_process_that_is_killed_comes_back_as_another_incarnation(
    site: Site, index: IndexProcess
) -> None:
    keys = make_keys(3, seed="killed")
    with (
        site.client(index.address) as client,
        site.node("n1", "--index", index.address) as node,
    ):
        with RawEngine(node.socket) as engine:
            engine.open()
            engine.store(keys[:2])
            assert becomes(client, keys, {"n1": 2})
            first = member(client, "n1")
            assert first is not None

            def is_another() -> bool:
                second = member(client, "n1")
                return second is not None and second.incarnation != first.incarnation

            node.crash()
        # What it kept in memory is offered at once: no engine needs to say what is whole.
        assert eventually(is_another, timeout_s=CONVERGES_S)
        assert becomes(client, keys, {"n1": 2})
        with RawEngine(node.socket) as engine:
            engine.open()
            engine.store(keys[2:])
            assert becomes(client, keys, {"n1": 3})


def test_a_replica_that_stops_or_dies_holds_up_neither_nodes_nor_clients(site: Site) -> None:
    keys = make_keys(64)
    with (
        site.index("i1") as one,
        site.index("i2") as two,
        site.node("n1", "--index", one.address, "--index", two.address) as node,
        RawEngine(node.socket) as engine,
        site.client(one.address, two.address) as client,
        site.client(one.address) as first,
        site.client(two.address) as second,
    ):
        engine.open()
        engine.store(keys[:1])
        assert becomes(client, keys, {"n1": 1})
        assert becomes(second, keys, {"n1": 1})
        watching = client.watch()
        assert [each.node for each in next(watching).nodes] == ["n1"]
        one.pause()
        engine.store(keys[1:32])
        news = next(watching)
        assert [each.node for each in news.nodes] == ["n1"], "all there is, of the other one"
        assert news.gone == []
        assert becomes(client, keys, {"n1": 32}), "the other replica answers"
        one.resume()
        assert becomes(first, keys, {"n1": 32}), "and the first one catches up"
        one.kill()
        engine.store(keys[32:])
        assert becomes(client, keys, {"n1": 64})
        with site.index("i1", listen=one.address):
            assert becomes(first, keys, {"n1": 64}), "and is filled again"


# ── silence ───────────────────────────────────────────────────────────────────────────────────────


PROGRAM = """if True:
    import sys, threading
    import grpc
    from kvstore.client.index import IndexClient
    from kvstore.wire.peers import PEERS, PeerHello, decode_answer, encode

    def words():
        yield PeerHello("x", 7)
        threading.Event().wait()

    with (
        grpc.insecure_channel(sys.argv[1]) as channel,
        IndexClient([sys.argv[2]], insecure=True) as index,
    ):
        answers = channel.stream_stream(f"/{PEERS}/Session", encode, decode_answer)(words())
        next(answers)
        news = index.watch()
        next(news)
        print("both answered", flush=True)
        threading.Event().wait()
"""
GONE_S = 90.0
"""Pings take 15 s to tell; a server that sends none takes two hours."""


def test_a_peer_and_a_watcher_that_are_silent_are_hung_up_on(tmp_path: Path) -> None:
    listens = ("--index-listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0", "--insecure")
    with NodeProcess.start(tmp_path, flags=(*listens, "--transport", "tcp")) as node:
        found = re.search(r"peers=(\S+:(\d+))/tcp", node.ready_line)
        assert found is not None
        silent = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, found[1], node.index],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert read_line(silent, GONE_S)
            server, port = psutil.Process(node.pid), int(found[2])

            def heard() -> tuple[bool, float]:
                """Whether there is a connection of a peer, and the number of watchers."""
                connections = server.net_connections(kind="inet")
                places = [each.laddr.port for each in connections if each.status == "ESTABLISHED"]
                return port in places, metric(node, "kvstore_index_watchers")

            assert heard() == (True, 1)
            silent.send_signal(signal.SIGSTOP)
            assert eventually(lambda: heard() == (False, 0), timeout_s=GONE_S)
        finally:
            reap(silent)


# ── one certificate on two machines ───────────────────────────────────────────────────────────────


def knows_of_another(process: NodeProcess) -> bool:
    return "another process, at 127.0.0.1, " in page(process, "/healthz")[1]


def test_two_processes_with_one_name_are_told_apart(tmp_path: Path) -> None:
    """Both nodes and the index say it, in the log and in /healthz."""
    site = Site(tmp_path)
    elsewhere = site.directory / "elsewhere"
    elsewhere.mkdir()
    with (
        site.index("i1", "--metrics", "127.0.0.1:0") as index,
        site.node("n1", "--index", index.address) as one,
    ):
        assert eventually(lambda: page(one, "/healthz") == (200, "ok\n"), timeout_s=CONVERGES_S)
        with NodeProcess.start(
            elsewhere, dram="8MiB", flags=(*site.lab.flags("node", "n1"), "--index", index.address)
        ) as other:
            for process in (one, other):
                assert eventually(partial(knows_of_another, process), timeout_s=CONVERGES_S)
            assert "two processes claim to be node n1" in page(index, "/healthz")[1]
            assert [node.log.count("another process, at") for node in (one, other)] == [1, 1]
            assert index.log.count("is node n1 already") == 1
        # It has the name for itself again.
        assert eventually(lambda: page(one, "/healthz") == (200, "ok\n"), timeout_s=CONVERGES_S)
        assert eventually(lambda: page(index, "/healthz") == (200, "ok\n"), timeout_s=CONVERGES_S)

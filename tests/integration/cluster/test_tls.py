"""Who may speak to an index, and for whom (T8, T9); what else arrives at its port."""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import psutil
import pytest
from msgspec.structs import fields

from kvstore.cli.certs import make_certificates
from kvstore.client.certificates import load
from kvstore.client.index import IndexClient, IndexUnavailable, channel, channel_options
from kvstore.client.tls import TlsFiles
from kvstore.errors import ConfigError
from kvstore.index.feed import Trust
from kvstore.proto import index_pb2 as pb
from kvstore.proto.index_pb2_grpc import IndexStub
from kvstore.supervisor.sockets import ask_for_upgrade
from kvstore.testing.process import Lab, NodeFailed, NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.types import Incarnation, SpaceId, Tier
from kvstore.wire.bounds import U64
from kvstore.wire.feed import (
    Change,
    Delta,
    FeedBeat,
    Hello,
    Left,
    OfStream,
    Registry,
    Removed,
    SnapshotPart,
    Stored,
)
from kvstore.wire.identity import Identity
from kvstore.wire.load import EngineEntry, Load
from tests.integration.cluster.kit import ASK_S, CONVERGES_S, Site, becomes, feed, member, trust
from tests.integration.node.conftest import eventually
from tests.kit.gauges import page, samples
from tests.kit.processes import IndexProcess

pytestmark = pytest.mark.slow

GARBAGE = 200


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def index(site: Site) -> Iterator[IndexProcess]:
    """For tests that do not end it; nodes of earlier ones may be its members."""
    with site.index() as made:
        yield made


def published(index: IndexProcess, files: TlsFiles, node: str) -> grpc.StatusCode:
    """What becomes of a stream that says it is of `node`: OK when it is taken."""
    with channel(index.address, load(files).channel_credentials()) as open_channel:
        stream = (node, Incarnation(1), 1)
        call = feed(open_channel, [Hello(*stream, 0), FeedBeat(*stream, 0)], timeout_s=ASK_S)
        try:
            list(call)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def test_a_node_speaks_for_itself_only(site: Site, index: IndexProcess) -> None:
    files = site.lab.files("node", "speaks")
    assert published(index, files, "n2") is grpc.StatusCode.PERMISSION_DENIED
    assert published(index, site.files, "router") is grpc.StatusCode.PERMISSION_DENIED
    of_index = site.lab.files("index", "i9")
    assert published(index, of_index, "i9") is grpc.StatusCode.PERMISSION_DENIED
    with site.client(index.address) as client:
        assert not any(member(client, name) for name in ("n2", "router", "i9", "speaks"))
        assert published(index, files, "speaks") is grpc.StatusCode.OK
        assert member(client, "speaks") is not None
    assert "a feed is refused: this certificate is of node" in index.log


def test_a_foreign_or_expired_certificate_is_refused(
    site: Site, index: IndexProcess, tmp_path: Path
) -> None:
    foreign = Lab(tmp_path / "elsewhere").files("client", "router")
    mixed = TlsFiles(ca=site.files.ca, cert=foreign.cert, key=foreign.key)
    with pytest.raises(ConfigError, match="was not issued by --ca"):
        load(mixed)
    make_certificates(site.lab.directory, [Identity("client", "old")], days=0)
    old = site.lab.files("client", "old")
    with pytest.raises(ConfigError, match="expired at"):
        load(old)
    for wrong in (mixed, old):
        # As if it had not looked itself.
        credentials = grpc.ssl_channel_credentials(
            site.files.ca.read_bytes(), wrong.key.read_bytes(), wrong.cert.read_bytes()
        )
        assert code_of(index, credentials) is grpc.StatusCode.UNAVAILABLE
    # The other way round: an index of another CA is not believed.
    with (
        IndexClient([index.address], tls=foreign, timeout_s=ASK_S) as client,
        pytest.raises(IndexUnavailable),
    ):
        client.nodes()


def test_without_a_certificate_nobody_is_heard(site: Site, index: IndexProcess) -> None:
    ca_only = grpc.ssl_channel_credentials(site.files.ca.read_bytes())
    assert code_of(index, ca_only) is grpc.StatusCode.UNAVAILABLE
    with (
        IndexClient([index.address], insecure=True, timeout_s=ASK_S) as client,
        pytest.raises(IndexUnavailable),
    ):
        client.nodes()


def code_of(index: IndexProcess, credentials: grpc.ChannelCredentials) -> grpc.StatusCode:
    options = channel_options()
    with grpc.secure_channel(index.address, credentials, options=options) as open_channel:
        try:
            IndexStub(open_channel).Nodes(pb.NodesRequest(), timeout=ASK_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("is_inside", [True, False])
def test_nothing_listens_without_tls_but_by_insecure(tmp_path: Path, *, is_inside: bool) -> None:
    if is_inside:
        with pytest.raises(NodeFailed, match="give --ca, --cert and --key"):
            NodeProcess.start(tmp_path, flags=["--index-listen", "127.0.0.1:0"])
        with NodeProcess.start(
            tmp_path, flags=["--index-listen", "127.0.0.1:0", "--insecure"]
        ) as node:
            process, log, health = psutil.Process(node.pid), node.log, page(node, "/healthz")[1]
            seen = listeners(process), "no authentication; for labs only" in log, health
    else:
        with pytest.raises(NodeFailed) as refused:
            IndexProcess.start(tmp_path, ())
        assert refused.value.code == 2
        (sentence,) = refused.value.stderr.splitlines()
        assert sentence.startswith("kvstore: an index needs TLS: give --ca, --cert and --key")
        with IndexProcess.start(tmp_path) as index:
            process, log = psutil.Process(index.process.pid), index.log
            health = page(index, "/healthz")[1]
            seen = listeners(process), "no authentication; for labs only" in log, health
    assert seen[0] == ["127.0.0.1", "127.0.0.1"]  # metrics, and the index
    assert seen[1]
    assert "it serves without TLS (--insecure)" in seen[2]


@pytest.mark.parametrize("chosen", ["", "nixl"])
def test_blocks_do_not_move_in_plain_unless_told_and_then_it_is_said(
    site: Site, tmp_path: Path, chosen: str
) -> None:
    flags = [*site.lab.flags("node", "serves", with_index=True), "--index-listen", "127.0.0.1:0"]
    flags += ["--peer-listen", "127.0.0.1:0", *(["--transport", chosen] if chosen else [])]
    with NodeProcess.start(tmp_path, flags=flags) as node:
        warning = "blocks are transferred without encryption"
        told = warning in node.log, "unencrypted" in page(node, "/healthz")[1]
        assert told == (bool(chosen),) * 2
        assert f"/{chosen or 'tcp'}" in node.ready_line


def listeners(process: psutil.Process) -> list[str]:
    found = (c for c in process.net_connections(kind="inet") if c.status == "LISTEN")
    return [connection.laddr.ip.removeprefix("::ffff:") for connection in found]


def test_a_node_of_a_cluster_listens_where_it_was_told_and_nowhere_else(site: Site) -> None:
    places = ("--index-listen", "127.0.0.2:0", "--peer-listen", "127.0.0.3:0", "--transport", "tcp")
    with site.node("serves", *places, with_index=True) as node:

        def found() -> list[str]:
            its = psutil.Process(node.pid)
            return sorted(host for each in (its, *its.children()) for host in listeners(each))

        # Pages, index, peers, and of the transfer worker's process, which comes last, where peers
        # are read.
        expected = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.3"]
        assert eventually(lambda: found() == expected, timeout_s=CONVERGES_S), found()


def test_garbage_at_the_port_costs_nobody_else(site: Site, index: IndexProcess) -> None:
    source = random.Random(7)
    host, _, port = index.address.rpartition(":")
    context = ssl.create_default_context(cafile=str(site.files.ca))
    context.check_hostname = False
    context.load_cert_chain(site.files.cert, site.files.key)
    context.set_alpn_protocols(["h2"])
    before = psutil.Process(index.process.pid).memory_info().rss
    for number in range(GARBAGE):
        with socket.create_connection((host, int(port)), timeout=ASK_S) as plain:
            sock: socket.socket = plain
            if number % 4 == 0:  # inside of TLS, too
                sock = context.wrap_socket(plain)
            try:
                if number % 8 == 0:
                    sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                sock.sendall(source.randbytes(source.randrange(1, 4096)))
            except OSError:
                continue
            finally:
                sock.close()
    with site.client(index.address) as client:
        client.nodes()
    assert psutil.Process(index.process.pid).memory_info().rss - before < 64 << 20
    assert "Traceback" not in index.log


def test_words_that_make_no_sense_end_that_stream_only(site: Site, index: IndexProcess) -> None:
    files = site.lab.files("node", "n1")
    space = SpaceId(bytes(32))
    changes: list[Change] = [
        Stored("t", SpaceId(b"x"), Tier.DRAM, bytes(32)),
        Stored("t", space, Tier.DRAM, bytes(33)),
        Removed("t" * 300, space, Tier.DRAM, bytes(32)),
    ]
    hello = Hello("n1", Incarnation(1), 1, 0)
    bad: list[list[OfStream | bytes]] = [
        [b""],
        [FeedBeat("n1", Incarnation(1), 1, 0)],
        [Hello("n1", Incarnation(0), 1, 0)],
        [hello, b""],
        [hello, hello],
        [hello, FeedBeat("n2", Incarnation(1), 1, 0)],
    ]
    bad += [[hello, Delta("n1", Incarnation(1), 1, 1, (change,))] for change in changes]
    credentials = load(files).channel_credentials()
    with channel(index.address, credentials) as open_channel, site.client(index.address) as client:
        for number, words in enumerate(bad, start=1):
            said = [
                word if isinstance(word, bytes) else msgspec.structs.replace(word, stream=number)
                for word in words
            ]
            with pytest.raises(grpc.RpcError) as caught:
                list(feed(open_channel, said, timeout_s=ASK_S))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, words
        with site.node("n1", "--index", index.address) as node, RawEngine(node.socket) as engine:
            engine.open()
            keys = make_keys(2)
            engine.store(keys)
            assert becomes(client, keys, {"n1": 2})


def test_a_node_that_is_refused_says_why_and_goes_on(
    site: Site, index: IndexProcess, tmp_path: Path
) -> None:
    """Of the wrong name, which only --insecure lets it claim; its engine does not notice."""
    flags = ("--index", index.address, *Lab(tmp_path / "pki").flags("node", "foreign"))
    with (
        site.client(index.address) as client,
        NodeProcess.start(tmp_path, flags=flags) as node,
        RawEngine(node.socket) as engine,
    ):
        engine.open()
        engine.store(make_keys(2))
        assert eventually(lambda: "is not reached" in node.log, timeout_s=CONVERGES_S)
        assert "its certificate was not issued by the CA of --ca" in node.log
        assert f"but the index at {index.address} is not reached (" in page(node, "/healthz")[1]
        assert member(client, "foreign") is None


def test_who_asks_with_the_wrong_certificates_is_told_which(
    site: Site, index: IndexProcess, tmp_path: Path
) -> None:
    other = Lab(tmp_path / "pki").files("client", "router")
    with IndexProcess.start(tmp_path) as insecure:
        for address, tls, cause in (
            (index.address, other, "its certificate was not issued by the CA of --ca"),
            (index.address, None, "it closed the connection: it may require"),
            (insecure.address, site.files, "it serves without TLS (--insecure), but certificates"),
            ("127.0.0.1:1", site.files, "nothing listens there (connection refused)"),
        ):
            with (
                IndexClient([address], tls=tls, insecure=tls is None, timeout_s=ASK_S) as client,
                pytest.raises(IndexUnavailable) as caught,
            ):
                client.nodes()
            assert str(caught.value).startswith(f"the index did not answer: {cause}")
            assert "SSL" not in str(caught.value)


def test_a_peer_port_that_is_taken_is_said_to_be(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--insecure", "--index", "127.0.0.1:1", "--peer-listen", address)
        with pytest.raises(NodeFailed) as caught:
            NodeProcess.start(tmp_path, dram="1MiB", flags=flags)
    assert caught.value.code == 2
    assert f"on {address}: the address is in use or not of this machine" in caught.value.stderr


def test_the_wire_and_the_logs_hold_no_token_and_no_whole_key(site: Site) -> None:
    words = (Hello, Delta, Stored, Removed, Left, SnapshotPart, FeedBeat, Registry, EngineEntry)
    assert {name for word in words for name in word.__struct_fields__} == {
        *("node", "incarnation", "stream", "sequence", "address"),
        *("changes", "stored", "tenant", "space", "tier", "keys"),
        *("engine", "rank", "number", "is_last", "load"),
        *("engines", "model", "role", "queue"),
    }
    assert {str(field.type) for field in fields(Load)} == {str(U64)}, "a node's load is numbers"
    keys = make_keys(3, seed="secret")
    with (
        site.index("logs", "--log-level", "debug") as index,
        site.client(index.address) as client,
        site.node("n1", "--index", index.address, "--log-level", "debug") as node,
        RawEngine(node.socket) as engine,
    ):
        engine.open()
        engine.store(keys)
        assert becomes(client, keys, {"n1": 3})
        assert eventually(lambda: trust(client, "n1") is Trust.EXACT, timeout_s=CONVERGES_S)
        index.kill()
        with pytest.raises(IndexUnavailable, match="the index did not answer"):
            client.nodes()
        assert eventually(lambda: "is not reached" in node.log, timeout_s=CONVERGES_S)
        said = (node.log + index.log).lower()
    assert not [key for key in keys if key[:5].hex() in said or repr(key[:6])[2:-1] in said]


# ── certificates that end ─────────────────────────────────────────────────────────────────────────


KEYS = make_keys(3, seed="renewal")
ENDS = "kvstore_certificate_expires_timestamp_seconds"
"""When the certificate ends that a component was started with."""


def test_an_upgrade_takes_up_a_new_certificate_and_keeps_what_is_in_memory(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with (
        site.index() as index,
        site.client(index.address) as client,
        site.node("n1", "--index", index.address, "--peer-listen", "127.0.0.1:0") as node,
    ):
        assert "the certificate of i1.index.kvstore ends at" in index.log
        assert samples(index)[ENDS] == load(site.lab.files("index", "i1")).ends_s
        assert "the certificate of n1.node.kvstore ends at" in node.log
        old = site.lab.files("node", "n1")
        assert samples(node)[ENDS] == load(old).ends_s
        with RawEngine(node.socket) as engine:
            engine.open()
            engine.store(KEYS)
            assert becomes(client, KEYS, {"n1": 3})
        for file in (old.cert, old.key):
            file.unlink()
        new = load(site.lab.files("node", "n1", days=90))
        said = len(node.log)
        assert "3 blocks" in ask_for_upgrade(node.socket)
        assert samples(node)[ENDS] == new.ends_s
        assert "the certificate of" not in node.log[said:]
        with RawEngine(node.socket) as engine:  # of which the node learns what a whole block is
            engine.open()
            assert becomes(client, KEYS, {"n1": 3})

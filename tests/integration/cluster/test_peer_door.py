"""Who is served blocks: a node of this cluster, by its own certificate, and nobody else (T8,
T9)."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec
import pytest

from kvstore.cli.certs import make_certificates
from kvstore.client.certificates import load
from kvstore.client.index import channel_options
from kvstore.client.tls import TlsFiles
from kvstore.index.index import Member
from kvstore.testing.process import Lab, NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.transport.tcp import ANSWER, HEADER, REQUEST, Address
from kvstore.types import PAGE_BYTES, Incarnation
from kvstore.wire.identity import Identity
from kvstore.wire.peers import Ask, PeerHello, PeerWelcome, ServeAnswer, ServeAsk
from kvstore.wire.transfer_worker import decode_descriptor
from tests.integration.cluster.kit import ASK_S, CONVERGES_S, SPACE, TENANT, Site, member
from tests.integration.node.conftest import eventually
from tests.kit.peers import metric, session

pytestmark = pytest.mark.slow

KEYS = make_keys(8, seed="door")
GARBAGE = 100
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""With the empty settings that follow it."""


@dataclass
class Door:
    """A node that holds KEYS, and where peers knock."""

    site: Site
    node: NodeProcess
    address: str

    def options(self) -> list[tuple[str, object]]:
        name = ("grpc.ssl_target_name_override", str(Identity("node", "n1")))
        return [*channel_options(), name]

    def credentials(self, files: TlsFiles) -> grpc.ChannelCredentials:
        """As of a program that looks at nothing itself; of this CA, whoever issued the rest."""
        return grpc.ssl_channel_credentials(
            self.site.files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
        )

    def knock(self, credentials: grpc.ChannelCredentials | None, name: str) -> grpc.StatusCode:
        """Ask for KEYS as node `name`: OK when they are served."""
        made = (
            grpc.secure_channel(self.address, credentials, options=self.options())
            if credentials
            else grpc.insecure_channel(self.address, options=self.options())
        )
        serve = ServeAsk(1, TENANT, SPACE, b"".join(KEYS))
        heard = threading.Event()

        def words() -> Iterator[Ask]:
            yield PeerHello(name, Incarnation(7))
            yield serve
            heard.wait(ASK_S)  # whoever ends his words hangs up

        with made as open_channel:
            try:
                answers = session(open_channel, words(), timeout_s=ASK_S)
                welcome, served = next(answers), next(answers)
                assert isinstance(welcome, PeerWelcome)
                assert welcome.node == "n1"
                assert isinstance(served, ServeAnswer)
                assert served.slots
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            finally:
                heard.set()
        return grpc.StatusCode.OK

    def descriptor(self) -> bytes:
        """Of its transfer worker, as it tells peers; empty while there is none, or nobody has
        time."""
        files = load(self.site.lab.files("node", "n2")).channel_credentials()
        descriptor = b""
        with (
            grpc.secure_channel(self.address, files, options=self.options()) as open_channel,
            contextlib.suppress(grpc.RpcError),
        ):
            hello = iter([PeerHello("n2", Incarnation(7))])
            welcome = next(session(open_channel, hello, timeout_s=ASK_S))
            assert isinstance(welcome, PeerWelcome)
            descriptor = welcome.descriptor
        return descriptor


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    site = Site(tmp_path_factory.mktemp("door"))
    listens = ("--index-listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0")
    node = site.node("n1", *listens, "--transport", "tcp", with_index=True, dram="64MiB")
    try:
        with (
            RawEngine(node.socket, timeout_s=60) as engine,
            site.client(node.index) as client,
        ):
            engine.open()
            engine.store(KEYS)
            engine.release(engine.lease_stored(KEYS))
            seen: list[Member] = []

            def is_member() -> bool:
                found = member(client, "n1")
                seen.extend([found] if found else [])
                return bool(seen)

            assert eventually(is_member, timeout_s=CONVERGES_S)
            door = Door(site, node, seen[0].address)
            assert eventually(lambda: door.descriptor() != b"", timeout_s=CONVERGES_S)
            yield door
    finally:
        node.stop()


def served(door: Door) -> float:
    return metric(door.node, "kvstore_served_blocks_total")


def test_a_node_of_the_cluster_is_served_blocks(door: Door) -> None:
    before = served(door)
    files = door.site.lab.files("node", "n2")
    assert door.knock(door.credentials(files), "n2") is grpc.StatusCode.OK
    assert served(door) == before + len(KEYS)


@pytest.fixture
def foreign(tmp_path: Path) -> TlsFiles:
    """The certificate of a node of another cluster."""
    return Lab(tmp_path).files("node", "n2")


@pytest.fixture(scope="module")
def old(door: Door) -> TlsFiles:
    """One that has expired."""
    make_certificates(door.site.lab.directory, [Identity("node", "old")], days=0)
    return door.site.lab.files("node", "old")


def test_without_a_certificate_or_with_a_wrong_one_nobody_is(
    door: Door, foreign: TlsFiles, old: TlsFiles
) -> None:
    before = served(door)
    ca_only = grpc.ssl_channel_credentials(door.site.files.ca.read_bytes())
    for credentials in (None, ca_only, door.credentials(foreign), door.credentials(old)):
        assert door.knock(credentials, "n2") is grpc.StatusCode.UNAVAILABLE
    assert served(door) == before
    assert "Handshake failed" not in door.node.log, "anybody could fill the log"


@pytest.mark.parametrize("name", ["n1", "n3", "router"])
def test_nobody_is_served_blocks_in_the_name_of_another(door: Door, name: str) -> None:
    before = served(door)
    for files in (door.site.files, door.site.lab.files("node", "n2")):
        codes: list[grpc.StatusCode] = []

        def is_answered(files: TlsFiles = files, codes: list[grpc.StatusCode] = codes) -> bool:
            codes.append(door.knock(door.credentials(files), name))
            return codes[-1] is not grpc.StatusCode.UNAVAILABLE

        assert eventually(is_answered, timeout_s=ASK_S), "a busy machine is not in time for TLS"
        assert codes[-1] is grpc.StatusCode.PERMISSION_DENIED
    assert served(door) == before


def transfer_worker_place(door: Door) -> tuple[str, int]:
    """Where its transfer worker listens."""
    details = decode_descriptor(door.descriptor()).details
    transfer_worker = msgspec.msgpack.decode(details, type=Address)
    return transfer_worker.host, transfer_worker.port


def peer_place(door: Door) -> tuple[str, int]:
    """Where the node itself does, for peers."""
    host, _, port = door.address.rpartition(":")
    return host, int(port)


def answered(
    door: Door, place: tuple[str, int], files: TlsFiles, words: bytes, *, size: int
) -> bytes:
    """What is said to whoever shows this certificate and says these words, up to `size` bytes or
    until it is hung up on."""
    context = ssl.create_default_context(cafile=door.site.files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    given = b""
    with (
        contextlib.suppress(OSError),  # hung up on
        socket.create_connection(place, timeout=ASK_S) as plain,
        context.wrap_socket(plain, server_hostname=str(Identity("node", "n1"))) as secure,
    ):
        secure.sendall(words)
        while len(given) < size and (more := secure.recv(PAGE_BYTES)):
            given += more
    return given


def read_arena(door: Door, files: TlsFiles) -> bytes:
    """What the transfer worker gives to whoever shows this certificate, until it hangs up or all is
    there."""
    words = HEADER.pack(REQUEST, 1, 7, PAGE_BYTES) + struct.pack("<QQ", 0, PAGE_BYTES)
    return answered(door, transfer_worker_place(door), files, words, size=HEADER.size + PAGE_BYTES)


def test_the_transfer_worker_gives_nothing_to_who_is_no_node(
    door: Door, foreign: TlsFiles, old: TlsFiles
) -> None:
    index = door.site.lab.files("index", "i1")
    for files in (door.site.files, index, foreign, old):
        assert read_arena(door, files) == b""
    given = read_arena(door, door.site.lab.files("node", "n2"))
    assert HEADER.unpack(given[: HEADER.size]) == (ANSWER, 0, 7, PAGE_BYTES)
    assert len(given) == HEADER.size + PAGE_BYTES


def test_garbage_at_either_port_costs_nobody_else(door: Door) -> None:
    places = peer_place(door), transfer_worker_place(door)
    files = door.site.lab.files("node", "n2")
    chance = random.Random(20261122)
    for number in range(GARBAGE):
        nonsense = os.urandom(chance.choice([1, 9, 300, 70_000]))
        with (
            contextlib.suppress(OSError),  # hung up on before all was sent
            socket.create_connection(places[number % 2], timeout=ASK_S) as knocker,
        ):
            knocker.sendall(nonsense)
        # The same from a node of the cluster, within TLS: before and in the middle of what it says.
        for words in (b"", HTTP2_PREFACE):
            answered(door, places[number % 2], files, words + nonsense, size=0)
    assert door.knock(door.credentials(files), "n2") is grpc.StatusCode.OK
    assert metric(door.node, "kvstore_transfer_worker_restarts_total") == 0
    assert metric(door.node, "kvstore_loop_failures_total") == 0


def test_who_connects_and_says_nothing_is_hung_up_on(door: Door) -> None:
    with contextlib.ExitStack() as stack:
        for address in (door.address, door.node.index) * 8:
            host, _, port = address.rpartition(":")
            silent = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            stack.callback(lambda silent=silent: read_to_its_end(silent))  # type: ignore[misc]
    files = door.site.lab.files("node", "n2")
    assert door.knock(door.credentials(files), "n2") is grpc.StatusCode.OK


def read_to_its_end(silent: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while silent.recv(4096):
            pass

"""Two ends of the tcp transport in one process: who is let in, and what is taken for an address."""

from __future__ import annotations

import gc
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.cli.certs import make_certificates
from kvstore.client.tls import TlsFiles
from kvstore.errors import ConfigError, TransportError
from kvstore.ports import Landing, Outcome, TransportMemory
from kvstore.testing.process import Lab
from kvstore.transport import guests, tcp
from kvstore.transport.guests import NODE_MAX
from kvstore.transport.pieces import make_pieces
from kvstore.transport.tcp import Address, Tcp
from kvstore.wire.identity import Identity
from kvstore.wire.transfer_worker import (
    Descriptor,
    Direction,
    Done,
    Failed,
    decode_descriptor,
    encode,
)

SIZE = 4096
ALL = make_pieces([0], [0], [SIZE])
LIMIT_S = 60.0
INSECURE = {"insecure": "yes"}
Open = Callable[[str, dict[str, str]], Tcp]


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:

        def make(name: str, options: dict[str, str]) -> Tcp:
            memory = np.full(SIZE, ord(name[0]), np.uint8)
            made = Tcp(name, TransportMemory(memory, memory), options)
            stack.callback(made.close)
            return made

        yield make


def options_of(files: TlsFiles) -> dict[str, str]:
    return {"ca": str(files.ca), "certificate": str(files.cert), "key": str(files.key)}


def read(reader: Tcp, owner: Tcp, name: str) -> Outcome:
    """The end of one read, which `owner` answers if it does."""
    reader.post(1, name, ALL, Direction.READ)
    return outcome(reader, owner)


def reason_of(ended: Outcome) -> str:
    assert isinstance(ended, Failed)
    return ended.reason


def outcome(reader: Tcp, owner: Tcp) -> Outcome:
    """Of what was posted."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        owner.poll()
        if found := reader.poll():
            return found[0]
    raise AssertionError("it has no end")


def named(descriptor: bytes, name: str) -> bytes:
    return encode(msgspec.structs.replace(decode_descriptor(descriptor), name=name))


@pytest.mark.parametrize(("role", "end"), [("node", Done), ("client", Failed)])
def test_only_nodes_read(opened: Open, tmp_path: Path, role: str, end: type[Outcome]) -> None:
    lab = Lab(tmp_path)
    owner = opened("b.node.kvstore", options_of(lab.files("node", "b")))
    reader = opened("a", options_of(lab.files(role, "a")))  # type: ignore[arg-type]
    reader.connect("b.node.kvstore", owner.describe())
    assert type(read(reader, owner, "b.node.kvstore")) is end


def test_a_node_has_few_places_and_its_next_connection_takes_one_of_its_own(
    opened: Open, tmp_path: Path
) -> None:
    lab = Lab(tmp_path)
    owner = opened("b.node.kvstore", options_of(lab.files("node", "b")))
    readers = [opened("a", options_of(lab.files("node", "a"))) for _ in range(NODE_MAX + 2)]
    for reader in readers:
        reader.connect("b.node.kvstore", owner.describe())
        assert type(read(reader, owner, "b.node.kvstore")) is Done
    assert len(owner._guests.everybody) == NODE_MAX
    assert type(read(readers[-1], owner, "b.node.kvstore")) is Done
    assert owner.refused_count == 0


def test_a_reader_without_room_is_counted(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "ADMITTED_MAX", 1)
    owner = opened("b", INSECURE)
    ends = []
    for _ in range(2):
        reader = opened("a", INSECURE)
        reader.connect("b", owner.describe())
        ends.append(type(read(reader, owner, "b")))
    assert (ends, owner.refused_count) == ([Done, Failed], 1)


def test_an_idle_connection_holds_nothing_of_the_pieces_that_it_moved(opened: Open) -> None:
    owner, reader = opened("b", INSECURE), opened("a", INSECURE)
    reader.connect("b", owner.describe())
    assert type(read(reader, owner, "b")) is Done
    before, places = views(), np.arange(0, SIZE, 2)
    reader.post(2, "b", make_pieces(places, places, np.ones_like(places)), Direction.READ)
    assert type(outcome(reader, owner)) is Done
    assert views() - before < 100


def test_what_is_more_than_may_be_unanswered_waits_for_its_turn(opened: Open) -> None:
    owner, reader, count = opened("b", INSECURE), opened("a", INSECURE), 3 * tcp.REQUESTS_MAX
    reader.connect("b", owner.describe())
    for number in range(count):
        reader.post(number, "b", ALL, Direction.READ)
    ended, end_s = list[Outcome](), time.monotonic() + LIMIT_S
    while len(ended) < count and time.monotonic() < end_s:
        owner.poll()
        ended += reader.poll()
    assert ended == [Done(number) for number in range(count)]


class Talkative:
    """A stream of a peer that asks for bytes one by one, without end, and takes every answer."""

    def __init__(self, pieces: int) -> None:
        self._request = tcp.HEADER.pack(tcp.REQUEST, pieces, 1, pieces)
        self._request += np.array([[0, 1]] * pieces, "<u8").tobytes()
        self._at = self.call_count = 0

    def receive(self, place: memoryview) -> int:
        self.call_count += 1
        begin, self._at = self._at, (self._at + len(place)) % len(self._request)
        place[:] = self._request[begin : begin + len(place)]
        return len(place)

    def send(self, data: memoryview) -> int:
        self.call_count += 1
        return len(data)


@pytest.mark.parametrize("pieces", [1, 100, tcp.PIECES_MAX])
def test_others_have_their_turn_however_little_a_peer_asks_for(pieces: int) -> None:
    stream: Any = Talkative(pieces)
    reader = tcp.TcpReader(stream, np.zeros(1, np.uint8), None)
    with suppress(tcp.ConnectionClosed):  # with many pieces, of which few answers are sent
        assert reader.turn()
    assert stream.call_count <= tcp.TURN_BYTES // tcp.CALL_BYTES + 2


def views() -> int:
    return sum(type(each) is memoryview for each in gc.get_objects())  # torch warns when asked more


def test_only_the_node_that_is_meant_is_read_from(opened: Open, tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    owner = opened("c.node.kvstore", options_of(lab.files("node", "c")))
    reader = opened("a.node.kvstore", options_of(lab.files("node", "a")))
    reader.connect("b.node.kvstore", named(owner.describe(), "b.node.kvstore"))
    assert "b.node.kvstore" in reason_of(read(reader, owner, "b.node.kvstore"))
    reader.connect("c.node.kvstore", owner.describe())
    assert type(read(reader, owner, "c.node.kvstore")) is Done


def test_a_client_that_is_called_as_the_node_is_not_read_from(opened: Open, tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    reader = opened("a.node.kvstore", options_of(lab.files("node", "a")))
    make_certificates(tmp_path, [Identity("client", "b")], hosts=["host-b"])
    owner = opened("host-b", options_of(lab.files("client", "b")))
    reader.connect("host-b", owner.describe())
    assert "names no node" in reason_of(read(reader, owner, "host-b"))


@pytest.mark.parametrize("name", ["x" * 64 + ".node.kvstore", "b\0.node.kvstore", ".b", "b..c"])
def test_what_no_certificate_can_name_is_refused(opened: Open, tmp_path: Path, name: str) -> None:
    tcp = opened("b.node.kvstore", options_of(Lab(tmp_path).files("node", "b")))
    with pytest.raises(TransportError, match="no certificate can name"):
        tcp.connect(name, named(tcp.describe(), name))


def described(host: object, port: object) -> bytes:
    details = msgspec.msgpack.encode({"host": host, "port": port, "secure": False})
    return encode(Descriptor("tcp", "b", SIZE, 0, details.replace(b"INVALID", b"\xff" * 7)))


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("127.0.0.1", 70_000),
        ("127.0.0.1", 0),
        ("127.0.0.1", -1),
        ("127.0.0.1", 2**63),
        ("a.host", 80),
        ("", 80),
        ("INVALID", 80),
        (None, 80),
    ],
)
def test_an_address_that_is_none_is_refused(opened: Open, host: object, port: object) -> None:
    with pytest.raises(TransportError, match="the descriptor of b has no address"):
        opened("a", INSECURE).connect("b", described(host, port))


@pytest.mark.parametrize("lies", [{"landing_begin": 0}, {"landing_bytes": SIZE}])
def test_a_write_that_its_owner_did_not_allow_closes_the_connection(
    opened: Open, lies: dict[str, int]
) -> None:
    # What a peer is told bounds an honest one; the owner looks itself, before a byte is written.
    memory = np.zeros(SIZE, np.uint8)
    with ExitStack() as stack:
        landing = Landing(1024, memory[1024:2048])
        owner = Tcp("b", TransportMemory(memory, memory, landing), INSECURE)
        stack.callback(owner.close)
        writer = opened("a", INSECURE)
        told = decode_descriptor(owner.describe())
        writer.connect("b", encode(msgspec.structs.replace(told, **lies)))
        at = lies.get("landing_begin", 1025)
        writer.post(1, "b", make_pieces([0], [at], [1024]), Direction.WRITE)
        ended = outcome(writer, owner)
        assert type(ended) is Failed
        assert not memory.any()
        writer.forget("b")
        writer.connect("b", owner.describe())
        writer.post(1, "b", make_pieces([0], [1024], [1024]), Direction.WRITE)
        assert type(outcome(writer, owner)) is Done
        assert (memory[1024:2048] == ord("a")).all()
        assert not memory[:1024].any()
        assert not memory[2048:].any()


def test_a_scope_that_is_none_fails_its_read_only(opened: Open) -> None:
    reader, owner = opened("a", INSECURE), opened("c", INSECURE)
    reader.connect("b", described("fe80::1%\0", 80))
    with pytest.raises(TransportError, match="b cannot be reached"):
        reader.post(1, "b", ALL, Direction.READ)
    reader.connect("c", owner.describe())
    assert type(read(reader, owner, "c")) is Done


def test_what_peers_are_to_dial_must_be_an_address(opened: Open) -> None:
    with pytest.raises(ConfigError, match=r"'a\.host' is no IP address"):
        opened("a", {**INSECURE, "host": "a.host"})


def test_a_port_that_the_transfer_worker_before_still_has_is_waited_for(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened("before", INSECURE)
    address = msgspec.msgpack.decode(decode_descriptor(before.describe()).details, type=Address)
    options = INSECURE | {"listen": f"127.0.0.1:{address.port}"}
    with monkeypatch.context() as patch:
        patch.setattr(tcp, "PORT_PATIENCE_S", 0.0)
        with pytest.raises(ConfigError, match=r"cannot listen on .*: the address is in use"):
            opened("after", options)

    class Pause:
        def wait(self, _: float) -> None:
            before.close()

    monkeypatch.setattr(tcp, "PORT_PATIENCE_S", LIMIT_S)
    monkeypatch.setattr("kvstore.transport.tcp.threading.Event", Pause)
    opened("after", options)


def test_who_is_open_is_not_asked_whether_he_is_late(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tcp.TcpOwner] = []

    class Seen(tcp.TcpOwner):
        def __getattribute__(self, name: str) -> object:
            looked.append(self)
            return super().__getattribute__(name)

    monkeypatch.setattr(tcp, "TcpOwner", Seen)
    owner, reader = opened("b", INSECURE), opened("a", INSECURE)
    for name in "bcd":
        reader.connect(name, named(owner.describe(), name))
        assert type(read(reader, owner, name)) is Done
    reader.poll()
    looked.clear()
    assert reader.poll() == []
    assert not looked


def test_who_does_not_answer_is_given_up(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "HELLO_NS", -1)
    lab = Lab(tmp_path)
    silent = opened("b.node.kvstore", options_of(lab.files("node", "b")))
    reader = opened("a", options_of(lab.files("node", "a")))
    reader.connect("b.node.kvstore", silent.describe())
    for number in (1, 2):
        reader.post(number, "b.node.kvstore", ALL, Direction.READ)
        (outcome,) = reader.poll()
        assert type(outcome) is Failed
        assert "it does not respond" in reason_of(outcome)


def test_without_descriptors_who_dials_is_hung_up_on_and_the_transfer_worker_rests(
    opened: Open,
) -> None:
    owner = opened("a", {"listen": "127.0.0.1:0", **INSECURE})
    address = msgspec.msgpack.decode(decode_descriptor(owner.describe()).details, type=Address)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with socket.socket() as caller, socket.socket() as later:
        caller.settimeout(LIMIT_S)
        caller.connect((address.host, address.port))
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard)
        )
        try:
            with pytest.raises(OSError):  # noqa: PT012 -- the last of them
                while True:
                    taken.append(os.dup(caller.fileno()))
            owner.poll()
            assert select.select([owner.fileno()], [], [], 0)[0] == [], "it waits for nothing"
            assert caller.recv(1) == b""
            assert owner.refused_count == 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken:
                os.close(fd)
        later.settimeout(0.2)
        later.connect((address.host, address.port))
        owner.poll()
        with pytest.raises(TimeoutError):  # it is let in, and is silent
            later.recv(1)

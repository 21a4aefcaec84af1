"""Engines that come, misbehave and die: none of it reaches the others or stays behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.errors import AttachError
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_BYTES, EngineGone, RawEngine, make_keys, make_space
from kvstore.types import Shard
from kvstore.wire.messages import (
    DATAGRAM_BYTES_MAX,
    Hint,
    Message,
    Refused,
    Welcome,
    decode_from_node,
    encode,
)
from kvstore.wire.space import Group
from tests.integration.node.conftest import eventually, peer_descriptors, resident_bytes
from tests.kit.hello import rank_hello, scheduler_hello

pytestmark = pytest.mark.slow

HELLO = scheduler_hello("raw")
HELLO_RANK = rank_hello(Group(make_space(), Shard(0, 4, 0, 4), BLOCK_BYTES), name="raw")


@pytest.fixture
def bystander(node: NodeProcess) -> Iterator[RawEngine]:
    """An engine that does nothing wrong; it must not notice anything."""
    with RawEngine(node.socket, engine_id="bystander") as engine:
        engine.open()
        keys = make_keys(4, seed="bystander")
        engine.store(keys)
        yield engine
        assert engine.read(engine.lease_stored(keys)) == [engine.contents(key) for key in keys]


def raw_socket(node: NodeProcess) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(node.socket))  # blocking: a full backlog is waited for
    sock.settimeout(10)
    return sock


def send(sock: socket.socket, datagram: bytes, descriptors: Sequence[int] = ()) -> bool:
    """False: the node has hung up."""
    try:
        socket.send_fds(sock, [datagram], descriptors)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def introduce(sock: socket.socket, hello: Message | bytes = HELLO) -> None:
    pidfd = os.pidfd_open(os.getpid())
    datagram = hello if isinstance(hello, bytes) else encode(hello)
    send(sock, datagram, [pidfd])  # may be refused already; the reason is there to be read
    os.close(pidfd)


# ── death ────────────────────────────────────────────────────────────────────────────────────────


def attach_and_hold(socket_path: Path, pipe: Connection) -> None:
    """In a child: take every credit, write nothing, then wait to be killed."""
    with RawEngine(socket_path, engine_id="victim") as engine:
        engine.open()
        engine.wait(lambda: bool(engine.credits))
        pipe.send(len(engine.credits))
        signal.pause()


@contextmanager
def victim(node: NodeProcess, method: str = "fork") -> Iterator[BaseProcess]:
    """A process that has every credit of the node; killed when the context ends."""
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=attach_and_hold, args=(node.socket, theirs))
    child.start()
    try:
        assert ours.poll(30)
        assert ours.recv() > 0
        yield child
    finally:
        child.kill()
        child.join(10)
        child.close()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_killed_engine_leaves_nothing(
    node: NodeProcess, method: str, bystander: RawEngine
) -> None:
    before = peer_descriptors(node)
    with victim(node, method):
        assert peer_descriptors(node) == (before[0] + 2, before[1] + 2)
    assert eventually(lambda: peer_descriptors(node) == before)


def test_slots_of_a_dead_writer_are_used_again(tmp_path: Path) -> None:
    """A node of four slots: they must come back for the second engine to store four blocks."""
    with NodeProcess.start(tmp_path, dram="256KiB") as node:
        for _ in range(3):
            with victim(node):
                pass
        with RawEngine(node.socket) as engine:
            engine.open()
            for key in make_keys(8):
                engine.store([key])
                engine.release(engine.lease_stored([key]))
        assert "bug in the node" not in node.log


# ── misbehaviour ─────────────────────────────────────────────────────────────────────────────────


def test_a_name_of_too_many_bytes_costs_only_its_own_connection(
    node: NodeProcess, bystander: RawEngine
) -> None:
    for field in ("engine_id", "nonce", "tenant", "process"):
        with raw_socket(node) as sock:
            introduce(sock, msgspec.structs.replace(HELLO, **{field: "é" * 128}))
            assert not isinstance(decode_from_node(sock.recv(4096)), Welcome), field


_LONG = Group(make_space(model="m" * (100 << 10)), Shard(0, 4, 0, 4), BLOCK_BYTES)
LONG_MODEL = encode(msgspec.structs.replace(HELLO_RANK, groups=(_LONG,)))
_FIELDS, _AGAIN = encode(HELLO_RANK)[0] - 0x80, 20_000  # of a map with at most 15
LONG_IN_ITSELF = (
    b"\xde"
    + (_FIELDS + _AGAIN).to_bytes(2, "big")
    + encode(HELLO_RANK)[1:]
    + b"\xa4rank\0" * _AGAIN
)
"""One field again and again, each time within its limits."""


@pytest.mark.parametrize(
    ("hello", "sentence"),
    [
        (LONG_MODEL, "length <= 255 - at `$.groups[0].space.model`"),
        (LONG_IN_ITSELF, "at most 49152"),
    ],
    ids=["a long model", "long in itself"],
)
def test_a_hello_that_the_supervisor_could_not_be_told_is_refused(
    node: NodeProcess, bystander: RawEngine, hello: bytes, sentence: str
) -> None:
    """It would have to receive more than it takes, and end the process that said so."""
    pid = node.pid
    for _ in range(3):
        with raw_socket(node) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            introduce(sock, hello)
            refused = decode_from_node(sock.recv(4096))
            assert isinstance(refused, Refused)
            assert sentence in refused.reason
    page = bystander.scheduler.generations
    with raw_socket(node) as sock:
        introduce(sock)
        welcome = decode_from_node(sock.recv(4096))
    assert isinstance(welcome, Welcome)
    assert page is not None
    assert (node.pid, welcome.incarnation) == (pid, page.incarnation)


def test_odd_sizes_cost_only_their_own_connection(node: NodeProcess, bystander: RawEngine) -> None:
    for size in (0, 1, DATAGRAM_BYTES_MAX + 1, 180_000):
        with raw_socket(node) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            introduce(sock)
            assert isinstance(decode_from_node(sock.recv(4096)), Welcome)
            sock.send(bytes(size))
            assert sock.recv(4096) == b"", size


def test_a_flood_from_one_that_never_reads_is_cut_off(
    node: NodeProcess, bystander: RawEngine
) -> None:
    resident = resident_bytes(node)
    hint = encode(Hint(request=1, keys=bytes(32 * 64)))
    with raw_socket(node) as sock:
        introduce(sock)
        sent = 0
        while send(sock, hint):
            sent += 1
            assert sent < 200_000
            if sent % 500 == 0:
                bystander.lease(make_keys(4, seed="bystander"))
    assert sent > 0
    assert resident_bytes(node) < resident + (32 << 20)
    assert "does not read" in node.log


def test_three_hundred_connections(node: NodeProcess, bystander: RawEngine) -> None:
    with ExitStack() as stack:
        answers = []
        for number in range(300):
            sock = stack.enter_context(raw_socket(node))
            introduce(sock, scheduler_hello(f"e{number}", process=f"p{number}"))
            try:
                data, descriptors, _, _ = socket.recv_fds(sock, 4096, 4)
            except ConnectionResetError:
                data, descriptors, _, _ = socket.recv_fds(sock, 4096, 4)
            for descriptor in descriptors:
                os.close(descriptor)
            answers.append(decode_from_node(data))
        welcomed = [answer for answer in answers if isinstance(answer, Welcome)]
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        assert len(welcomed) == 256 - 2, "the bystander has two"
        assert len(refused) == 46
        assert {(r.reason, r.permanent) for r in refused} == {
            ("256 connections are attached already", False)
        }
        bystander.lease(make_keys(4, seed="bystander"))
    with RawEngine(node.socket, engine_id="later") as engine:
        engine.open()
        assert engine.session, "there is room again"


# ── users ────────────────────────────────────────────────────────────────────────────────────────


def as_user(uid: int, socket_path: Path) -> str:
    """What a process of `uid` gets from the node: the outcome in words."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "died"
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            with RawEngine(socket_path, engine_id="other") as engine:
                engine.open()
                said = "session"
        except (AttachError, EngineGone) as error:
            said = str(error)
        finally:
            os.write(theirs, said.encode())
            os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with os.fdopen(ours, "rb") as pipe:
        return pipe.read().decode()


def test_a_second_user_cannot_attach(open_directory: Path) -> None:
    assert os.geteuid() == 0, "this test changes user: run it as root"
    with NodeProcess.start(open_directory) as node:
        assert "Permission denied" in as_user(65534, node.socket), "the mode keeps it out"
        node.socket.chmod(0o666)
        assert as_user(65534, node.socket) == (
            "uid 65534 is not allowed: start with --allow-uid"
        ), "and if it were wrong, the check of the uid"
        assert as_user(0, node.socket) == "session"


def test_an_allowed_user_can_attach(open_directory: Path) -> None:
    assert os.geteuid() == 0, "this test changes user: run it as root"
    with NodeProcess.start(open_directory, flags=["--allow-uid", "65534"]) as node:
        assert as_user(65534, node.socket) == "session"
        assert as_user(65533, node.socket) == "uid 65533 is not allowed: start with --allow-uid"


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def test_what_the_node_hands_out_cannot_be_turned_against_it(node: NodeProcess) -> None:
    with raw_socket(node) as sock:
        introduce(sock)
        _, (page,), _, _ = socket.recv_fds(sock, 4096, 4)
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(page, size)
        with pytest.raises(PermissionError):
            os.pwrite(page, b"\xff" * 8, 4096)
        os.close(page)

"""The engine's end of the socket against a scripted node: outcomes, descriptors, forks."""

from __future__ import annotations

import gc
import os
import select
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.client import link as link_module
from kvstore.client.link import Link, Lost
from kvstore.errors import AttachError
from kvstore.types import SLOT_BYTES_MIN
from kvstore.wire.messages import (
    DATAGRAM_BYTES_MAX,
    LeaseAsk,
    NodeMessage,
    Quiesce,
    Refused,
    decode_from_engine,
    encode,
)
from kvstore.wire.space import Slab
from tests.kit.hello import scheduler_hello
from tests.kit.scripted_node import ScriptedNode, node_at

HELLO = scheduler_hello()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ScriptedNode]:
    with node_at(tmp_path / "node.sock") as node:
        yield node


@pytest.fixture
def link(node: ScriptedNode) -> Iterator[Link]:
    made = Link.connect(node.path, HELLO)
    node.accept()
    yield made
    made.close()


def receive(link: Link) -> Sequence[NodeMessage | Lost]:
    """What arrives next; waits for it."""
    assert select.select([link], [], [], 5)[0], "nothing arrived"
    return link.receive()


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# ── connecting ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["absent", "dead", "stream"])
def test_nobody_there_is_one_typed_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "node.sock"
    if kind != "absent":
        kinds = {"dead": socket.SOCK_SEQPACKET, "stream": socket.SOCK_STREAM}
        with socket.socket(socket.AF_UNIX, kinds[kind]) as listener:
            listener.bind(str(path))
    before = open_descriptors()
    with pytest.raises(AttachError, match=r"no kvstore node at .*node\.sock: "):
        Link.connect(path, HELLO)
    assert open_descriptors() == before


def test_a_node_too_busy_to_accept_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    links = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)
        links += [Link.connect(path, HELLO), Link.connect(path, HELLO)]
        with pytest.raises(AttachError, match="temporarily unavailable"):
            Link.connect(path, HELLO)
    for link in links:
        link.close()


def test_a_refusal_that_comes_before_the_hello_is_heard(
    node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Refused(reason="uid 5 is not allowed", permanent=True)

    def refuse_first(*arguments: object) -> int:
        peer, _ = node.listener.accept()
        peer.send(encode(refused))
        peer.close()
        raise BrokenPipeError

    monkeypatch.setattr(link_module, "send_datagram", refuse_first)
    link = Link.connect(node.path, HELLO)
    assert receive(link) == [refused, Lost("the node closed the connection")]


@pytest.mark.parametrize(
    ("pages", "has_slab"), [("agp", False), ("ag", True), ("g", True), ("agpp", True)]
)
def test_a_slab_and_its_page_of_places_come_together(
    link: Link, node: ScriptedNode, pages: str, *, has_slab: bool
) -> None:
    its = {"a": node.arena.arena_fd, "g": node.arena.generation_fd, "p": node.arena.generation_fd}
    slab = Slab("gpu", 1 << 20, b"handle") if has_slab else None
    node.welcome(descriptors=[its[page] for page in pages], hbm=slab)
    (lost,) = receive(link)
    assert lost == Lost(f"the node sent {len(pages)} descriptors with its Welcome")


def test_a_rank_on_the_gpu_of_a_slab_gets_its_page_of_places(
    link: Link, node: ScriptedNode
) -> None:
    slab = Slab("gpu", 1 << 20, b"handle")
    pages = [node.arena.arena_fd, node.arena.generation_fd, node.arena.generation_fd]
    node.welcome(descriptors=pages, hbm=slab)
    receive(link)
    assert (link.slab, link.places is not None) == (slab, True)
    link.close()
    assert (link.slab, link.places) == (None, None)


# ── datagrams ────────────────────────────────────────────────────────────────────────────────────


def test_sending_reports_a_node_that_does_not_read(link: Link, node: ScriptedNode) -> None:
    ask = LeaseAsk(lease=1, keys=bytes(2048 * 32))
    outcomes = [link.send(ask) for _ in range(100)]
    accepted = outcomes.index(False)
    assert accepted > 0
    assert not any(outcomes[accepted:])
    assert not link.closed, "would block is no failure"
    for _ in range(accepted):
        assert decode_from_engine(node.peer.recv(DATAGRAM_BYTES_MAX)) == ask
    assert link.send(ask)


def test_the_end_is_told_once_and_after_what_was_sent(link: Link, node: ScriptedNode) -> None:
    node.peer.send(encode(Quiesce(session=3)))
    node.peer.close()
    assert receive(link) == [Quiesce(session=3), Lost("the node closed the connection")]
    assert link.closed
    assert link.fileno() == -1
    assert link.receive() == ()
    assert not link.send(Quiesce(session=1))


@pytest.mark.parametrize("speaks_on", [False, True])
def test_a_refusal_is_read_even_if_the_node_hung_up_on_unread_words(
    link: Link, node: ScriptedNode, *, speaks_on: bool
) -> None:
    refused = Refused(reason="no", permanent=True)
    assert link.send(LeaseAsk(lease=1, keys=bytes(32)))
    node.peer.send(encode(refused))
    node.peer.close()  # with our datagram unread: the kernel reports a reset first
    if speaks_on:
        assert not link.send(LeaseAsk(lease=2, keys=bytes(32)))
    assert receive(link) == [refused, Lost("the node closed the connection")]


@pytest.mark.parametrize(
    "garbage",
    [b"\xc1", b"x" * (DATAGRAM_BYTES_MAX + 1), encode(LeaseAsk(lease=1, keys=b""))],
    ids=["not msgpack", "too long", "an engine's message"],
)
@pytest.mark.parametrize("welcomed", [False, True])
def test_garbage_ends_the_link(
    link: Link, node: ScriptedNode, garbage: bytes, *, welcomed: bool
) -> None:
    if welcomed:
        node.welcome(descriptors=[node.arena.generation_fd])
    node.peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    node.peer.send(garbage)
    got = receive(link)
    assert len(got) == 1 + welcomed
    assert isinstance(got[-1], Lost)
    assert link.closed


# ── descriptors ──────────────────────────────────────────────────────────────────────────────────


def test_a_scheduler_gets_no_arena(link: Link, node: ScriptedNode) -> None:
    node.welcome(descriptors=[node.arena.generation_fd])
    receive(link)
    assert link.arena is None
    assert link.generations is not None


@pytest.mark.parametrize("case", ["none", "three", "swapped", "no seals", "other size", "late"])
def test_memory_that_is_not_as_announced_ends_the_link(
    link: Link, node: ScriptedNode, case: str
) -> None:
    arena_fd, page_fd = node.arena.arena_fd, node.arena.generation_fd
    open_fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(open_fd, node.arena.generation_bytes)
    gc.collect()  # what earlier tests left is closed now, not in between
    before = open_descriptors()
    if case == "late":  # a second Welcome must not bring new memory in
        node.welcome(descriptors=[page_fd])
        receive(link)
        socket.send_fds(node.peer, [b"\xc1"], [page_fd])
    elif case == "other size":
        node.welcome(descriptors=[arena_fd, page_fd], arena_bytes=8 * SLOT_BYTES_MIN)
    else:
        node.welcome(
            descriptors={
                "none": [],
                "three": [arena_fd, page_fd, page_fd],
                "swapped": [page_fd, arena_fd],
                "no seals": [arena_fd, open_fd],
            }[case]
        )
    (lost,) = receive(link)
    assert isinstance(lost, Lost)
    assert link.arena is None
    assert link.generations is None
    assert len(open_descriptors()) == len(before) - 1, "all but the socket itself"
    os.close(open_fd)


def test_a_flood_of_descriptors_leaves_none_open(link: Link, node: ScriptedNode) -> None:
    before = open_descriptors()
    socket.send_fds(node.peer, [encode(Quiesce(session=1))], [node.arena.arena_fd] * 50)
    assert receive(link) == [Quiesce(session=1)]
    assert open_descriptors() == before


# ── forks ────────────────────────────────────────────────────────────────────────────────────────


def test_a_forked_child_holds_neither_socket_nor_memory(link: Link, node: ScriptedNode) -> None:
    node.welcome(descriptors=[node.arena.arena_fd, node.arena.generation_fd])
    receive(link)
    arena, generations = link.arena, link.generations
    assert arena is not None
    assert generations is not None
    assert generations.ready_bytes()
    hold_read, hold_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(hold_write)
        is_mapped = arena.array.size or generations.ready_bytes()
        clean = link.closed and link.arena is None and not is_mapped
        os.read(hold_read, 1)  # stay alive until the parent has seen the end of the socket
        os._exit(0 if clean else 1)
    os.close(hold_read)
    assert not link.closed
    assert arena.array.size
    link.close()
    node.peer.settimeout(5)
    assert node.peer.recv(10) == b"", "the child kept the socket open"
    os.close(hold_write)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

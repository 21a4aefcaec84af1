"""The door: who comes in, in which order words are read, and how connections end."""

from __future__ import annotations

import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvstore.engine.events import Ended, Exited, Received
from kvstore.errors import ConfigError
from kvstore.net.process import vouches_for
from kvstore.node import attach as attach_module
from kvstore.node.attach import HELLO_DEADLINE_NS, Attach, Sent
from kvstore.supervisor.sockets import Listener
from kvstore.types import ConnectionId
from kvstore.wire.messages import LeaseAsk, Quiesce, Quiet, Refused, decode_from_node, encode
from tests.kit.hello import scheduler_hello
from tests.kit.set_clock import SetClock
from tests.unit.node.conftest import (
    MakeAttach,
    Peer,
    all_events,
    hello_rank,
    read,
    rounds,
)

Connect = Callable[[], Peer]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def refusal(peer: Peer) -> Refused:
    message = decode_from_node(peer.hear())
    assert isinstance(message, Refused)
    assert peer.hear() == b"", "the connection ends with it"
    return message


# ── coming in ────────────────────────────────────────────────────────────────────────────────────


def test_a_node_without_descriptors_says_so(
    make_attach: MakeAttach, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_module, "_DESCRIPTORS_MAX", 0)  # as if none could be received
    attach = make_attach()
    peer = connect()
    peer.introduce(scheduler_hello())
    assert all_events(attach) == []
    refused = refusal(peer)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert refused.reason.startswith(f"the node has used up its {limit} descriptors: raise")
    assert not refused.permanent


def a_plain_file() -> int:
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


@pytest.mark.parametrize(
    ("datagram", "kinds", "reason"),
    [
        (encode(scheduler_hello()), "", "without the pidfd"),
        (encode(scheduler_hello()), "f", "without the pidfd"),
        (encode(scheduler_hello()), "pp", "without the pidfd"),
        (encode(Quiet(session=1)), "p", "the first datagram is no hello"),
        (b"\xc1garbage", "p", "malformed"),
        (b"\xc1garbage", "", "malformed"),
        (encode(scheduler_hello()).replace(b"\xa1n", b"\xa1\xff"), "p", "malformed"),
        (encode(Quiesce(session=1)), "p", "malformed"),
    ],
    ids=[
        "no fd",
        "a file",
        "two pidfds",
        "no hello",
        "garbage, fd",
        "garbage",
        "text",
        "node's message",
    ],
)
def test_any_other_first_word_is_refused_and_costs_nothing(
    make_attach: MakeAttach, connect: Connect, datagram: bytes, kinds: str, reason: str
) -> None:
    attach = make_attach()
    before = open_descriptors()
    peer = connect()
    descriptors = [os.pidfd_open(os.getpid()) if kind == "p" else a_plain_file() for kind in kinds]
    peer.say(datagram, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    assert all_events(attach) == []
    refused = refusal(peer)
    assert reason in refused.reason
    assert refused.permanent
    assert attach.socket_count == 0
    assert attach.counters.refused["hello"] == 1
    assert open_descriptors() == before + 1, "the peer's own end"


def test_another_uid_is_told_so_before_it_speaks(make_attach: MakeAttach, connect: Connect) -> None:
    attach = make_attach(allow_uids=frozenset({os.geteuid() + 1}))
    peer = connect()
    peer.introduce(hello_rank())
    assert all_events(attach) == []
    assert refusal(peer).reason == f"uid {os.geteuid()} is not allowed: start with --allow-uid"
    assert attach.counters.refused["uid"] == 1


def test_a_full_node_turns_newcomers_away_and_serves_the_others(
    make_attach: MakeAttach, connect: Connect, clock: SetClock
) -> None:
    attach = make_attach(connection_count_max=2)
    inside = [connect(), connect()]
    for peer in inside:
        peer.introduce(hello_rank())
    assert len(all_events(attach)) == 2
    late = connect()
    late.introduce(hello_rank())
    assert all_events(attach) == []
    refused = refusal(late)
    assert (refused.reason, refused.permanent) == ("the node serves at most 2 connections", False)
    inside[0].say(Quiet(session=1))
    assert all_events(attach) == [Received(ConnectionId(1), Quiet(session=1))]
    assert attach.counters.refused.trouble(clock.ns).endswith(refused.reason)
    inside[1].socket.close()
    all_events(attach)
    assert attach.counters.refused.trouble(clock.ns) == "", "there is room again"
    connect().introduce(hello_rank())
    assert len(all_events(attach)) == 1, "there is room again"


def test_silence_is_cut_off_after_two_seconds(
    make_attach: MakeAttach, connect: Connect, clock: SetClock
) -> None:
    attach = make_attach()
    silent, known = connect(), connect()
    known.introduce(hello_rank())
    all_events(attach)
    clock.ns += HELLO_DEADLINE_NS - 1
    attach.expire(clock.ns)
    assert attach.socket_count == 2
    clock.ns += 1
    attach.expire(clock.ns)
    assert refusal(silent).reason == "no hello within 2 s"
    assert attach.socket_count == 1, "who has introduced itself may be silent"


# ── order ────────────────────────────────────────────────────────────────────────────────────────


def test_a_seal_sent_before_a_lookup_is_read_before_it(
    make_attach: MakeAttach, connect: Connect
) -> None:
    attach = make_attach()
    scheduler, ranks = connect(), [connect(), connect()]
    scheduler.introduce(scheduler_hello(rank_count=2))
    for number, rank in enumerate(ranks):
        rank.introduce(hello_rank(rank=number))
    all_events(attach)
    scheduler.say(LeaseAsk(lease=1, keys=b""))
    for session in range(100):
        ranks[session % 2].say(Quiet(session=session))
    scheduler.say(LeaseAsk(lease=2, keys=b""))
    first, second = rounds(attach, 2)
    kinds = [type(event.message) for event in first if isinstance(event, Received)]
    assert kinds == [Quiet] * 100 + [LeaseAsk], "ranks till empty, then one of the scheduler's"
    assert second == [Received(ConnectionId(1), LeaseAsk(lease=2, keys=b""))]


def test_a_seal_between_two_lookups_is_read_between_them(
    make_attach: MakeAttach, connect: Connect
) -> None:
    attach = make_attach()
    scheduler, rank = connect(), connect()
    scheduler.introduce(scheduler_hello())
    rank.introduce(hello_rank())
    all_events(attach)
    scheduler.say(LeaseAsk(lease=1, keys=b""))
    ready = attach.ready(0)  # the loop has looked, and does not see the rank
    rank.say(Quiet(session=1))
    scheduler.say(LeaseAsk(lease=2, keys=b""))
    order = [event for fd, mask in ready for event in read(attach, fd, mask)]
    order += rounds(attach)[0]
    words = [event.message for event in order if isinstance(event, Received)]
    assert words == [
        LeaseAsk(lease=1, keys=b""), Quiet(session=1), LeaseAsk(lease=2, keys=b"")
    ]  # fmt: skip


# ── sending ──────────────────────────────────────────────────────────────────────────────────────


def attached(attach: Attach, connect: Connect) -> tuple[Peer, ConnectionId]:
    peer = connect()
    peer.introduce(hello_rank())
    (event,) = all_events(attach)
    assert isinstance(event, Received)
    return peer, event.connection


def test_what_does_not_fit_waits_and_keeps_its_order(
    make_attach: MakeAttach, connect: Connect
) -> None:
    attach = make_attach()
    peer, number = attached(attach, connect)
    sent: list[bytes] = []
    while sum(map(len, attach._connections[number].outbox)) < 200_000:
        sent.append(bytes([len(sent)]) * 50_000)
        assert attach.send(number, sent[-1]) is Sent.DONE
    heard: list[bytes] = []
    while len(heard) < len(sent):
        heard.append(peer.hear())
        all_events(attach)
    assert heard == sent
    assert not attach._connections[number].outbox
    assert all_events(attach) == [], "the loop does not spin on a socket that can be written"


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_peer_that_does_not_read_overflows_at_a_bound(
    make_attach: MakeAttach, connect: Connect, size: int
) -> None:
    attach = make_attach()
    _, number = attached(attach, connect)
    sent = 0
    while attach.send(number, bytes(size)) is Sent.DONE:
        sent += 1
        assert sent < 10_000
    connection = attach._connections[number]
    assert len(connection.outbox) <= attach_module.OUTBOX_COUNT_MAX
    assert sum(map(len, connection.outbox)) <= attach_module.OUTBOX_BYTES_MAX


def test_descriptors_arrive_with_their_datagram(make_attach: MakeAttach, connect: Connect) -> None:
    attach = make_attach()
    peer, number = attached(attach, connect)
    assert attach.send(number, b"x", [0, 1]) is Sent.DONE
    data, descriptors, _, _ = socket.recv_fds(peer.socket, 10, 4)
    assert (data, len(descriptors)) == (b"x", 2)
    for descriptor in descriptors:
        os.close(descriptor)


def test_sending_to_nobody_is_an_outcome(make_attach: MakeAttach, connect: Connect) -> None:
    attach = make_attach()
    assert attach.send(ConnectionId(77), b"x") is Sent.GONE
    peer, number = attached(attach, connect)
    peer.socket.close()
    assert attach.send(number, b"x") is Sent.DONE
    assert all_events(attach) == [Ended(number)]
    assert attach.send(number, b"x") is Sent.GONE


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────


def test_garbage_ends_one_connection_and_keeps_what_came_before(
    make_attach: MakeAttach, connect: Connect
) -> None:
    attach = make_attach()
    bad, bad_number = attached(attach, connect)
    good, good_number = attached(attach, connect)
    bad.say(Quiet(session=1))
    bad.say(b"\xc1")
    bad.say(Quiet(session=2))
    good.say(Quiet(session=3))
    events = all_events(attach)
    assert [event for event in events if event.connection == bad_number] == [  # type: ignore[union-attr]
        Received(bad_number, Quiet(session=1)),
        Ended(bad_number),
    ]
    assert Received(good_number, Quiet(session=3)) in events
    assert attach.counters.ended["protocol"] == 1


def test_a_socket_that_somebody_else_holds_open_does_not_hide_the_death(
    make_attach: MakeAttach, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The child stands for the peer, whose socket is really ours.
    monkeypatch.setattr("kvstore.node.attach.vouches_for", lambda pidfd, pid: True)
    attach = make_attach()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = connect()  # stays open here, as in a forked grandchild
    peer.introduce(hello_rank(), pid=child.pid)
    (event,) = all_events(attach)
    number = event.connection  # type: ignore[union-attr]
    peer.say(Quiet(session=1))
    child.communicate(b"\n", timeout=10)
    assert all_events(attach) == [
        Received(number, Quiet(session=1)),
        Ended(number),
        Exited(number),
    ]
    assert peer.hear() == b""
    assert attach.socket_count == 0
    assert attach._connections == {}


def test_release_forgets_the_process(make_attach: MakeAttach, connect: Connect) -> None:
    attach = make_attach()
    before = open_descriptors()
    peer, number = attached(attach, connect)
    attach.hang_up(number)
    assert peer.hear() == b""
    attach.release(number)
    attach.release(number)
    peer.socket.close()
    assert open_descriptors() == before
    assert attach._sources.keys() == {attach.door.socket.fileno()}


def test_a_descriptor_closed_earlier_in_the_round_is_nobody(
    make_attach: MakeAttach, connect: Connect
) -> None:
    attach = make_attach()
    peer, number = attached(attach, connect)
    peer.say(Quiet(session=1))
    ((fd, _),) = attach.ready(0)
    attach.release(number)
    assert attach.source(fd) is None


# ── files ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("others", "modes"), [(False, (0o700, 0o600)), (True, (0o711, 0o666))])
def test_modes(tmp_path: Path, modes: tuple[int, int], *, others: bool) -> None:
    path = tmp_path / "made" / "node.sock"
    listener = Listener(path, others_may_connect=others)
    assert tuple(p.stat().st_mode & 0o777 for p in (path.parent, path)) == modes
    listener.close()
    listener.close()
    assert list(path.parent.iterdir()) == []


def test_what_a_dead_node_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    (tmp_path / "node.sock.lock").touch()
    listener = Listener(path, others_may_connect=False)
    Peer(path).socket.close()
    accepted, _ = listener.socket.accept()
    accepted.close()
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_it_knows_when_its_socket_file_is_not_its_own_any_more(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    listener = Listener(path, others_may_connect=False)
    assert listener.is_in_place
    path.unlink()
    assert not listener.is_in_place
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(path))
        assert not listener.is_in_place
    listener.close()


@pytest.mark.parametrize(("mode", "warned"), [(0o777, True), (0o1777, False), (0o755, False)])
def test_a_directory_that_others_can_write_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, *, warned: bool
) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    with caplog.at_level(logging.WARNING, "kvstore"):
        Listener(directory / "node.sock", others_may_connect=False).close()
    assert ("other users may replace files" in caplog.text) == warned


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may replace the socket, whatever the mode is."""
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 23456)
    with pytest.raises(ConfigError, match=r"belongs to uid \d+, .*: choose another --socket"):
        Listener(tmp_path / "node.sock", others_may_connect=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory to another user")
def test_a_directory_below_one_of_another_user_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "theirs" / "ours").mkdir(parents=True)
    (tmp_path / "link").symlink_to("theirs/ours")
    os.chown(tmp_path / "theirs", 12345, -1)
    with caplog.at_level(logging.WARNING, "kvstore"):
        Listener(tmp_path / "link" / "node.sock", others_may_connect=False).close()
    assert f"uid 12345 owns {tmp_path}/theirs, and may replace the socket" in caplog.text


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("file/sub", "cannot be made: Not a directory"),
        ("dangling", "is a link to nothing: choose another --socket"),
        ("x" * 90, "cannot be made: AF_UNIX path too long; choose"),
    ],
)
def test_a_directory_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, folder: str, said: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=said):
        Listener(tmp_path / folder / "node.sock", others_may_connect=False)


def test_another_processs_pidfd_does_not_vouch_for_the_peer() -> None:
    own, first = os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid())
    try:
        assert vouches_for(own, os.getpid())
        assert vouches_for(own, 0)  # a peer of another pid namespace shows no pid
        assert not vouches_for(first, os.getpid())
        assert not vouches_for(99_999, os.getpid())
    finally:
        os.close(own)
        os.close(first)


def test_one_missing_folder_of_a_socket_is_made_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Listener(tmp_path / "run" / "node.sock", others_may_connect=False).close()
    assert f"made the directory {tmp_path / 'run'} for --socket" in caplog.messages
    with pytest.raises(ConfigError, match=f"there is no {tmp_path / 'rnu'}; make it"):
        Listener(tmp_path / "rnu" / "kvstore" / "node.sock", others_may_connect=False)


# ── what the log says ────────────────────────────────────────────────────────────────────────────


def test_engines_are_told_of_once_when_they_come_and_when_they_go(
    make_attach: MakeAttach, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvstore")
    attach = make_attach()
    name = "e" * 100
    scheduler, rank = connect(), connect()
    scheduler.introduce(msgspec.structs.replace(scheduler_hello(), engine_id=name))
    rank.introduce(msgspec.structs.replace(hello_rank(), engine_id=name))
    all_events(attach)
    assert caplog.messages == [f"engine {'e' * 64} attached (connection 1)"]
    rank.socket.close()
    scheduler.socket.close()
    all_events(attach)
    attach.release(ConnectionId(1))
    assert caplog.messages[1:] == [f"engine {'e' * 64} detached (connection 1)"]

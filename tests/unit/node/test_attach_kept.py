"""Ranks that are remembered beyond the node process: who registers, who is let go of, who died."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.engine.events import Ended, Exited
from kvstore.net.process import pair
from kvstore.node.attach import Attach
from kvstore.supervisor import control
from kvstore.supervisor.sockets import Listener
from kvstore.types import ConnectionId
from kvstore.wire.messages import (
    HELLO_BYTES_MAX,
    HelloRank,
    Refused,
    decode_from_engine,
    decode_from_node,
)
from tests.kit.hello import scheduler_hello
from tests.kit.set_clock import SetClock
from tests.unit.node.conftest import Peer, all_events, hello_rank

Connect = Callable[[], Peer]
FIRST = 7 << 32


class Registry:
    """What the supervisor would remember."""

    def __init__(self) -> None:
        self.has_room = True
        self.ranks: dict[ConnectionId, HelloRank] = {}

    def add(self, number: ConnectionId, hello: bytes, pidfd: int) -> bool:
        os.fstat(pidfd)
        decoded = decode_from_engine(hello)
        assert isinstance(decoded, HelloRank)
        if self.has_room:
            self.ranks[number] = decoded
        return self.has_room

    def remove(self, number: ConnectionId) -> None:
        del self.ranks[number]


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def attach(tmp_path: Path, clock: SetClock, registry: Registry) -> Iterator[Attach]:
    made = Attach(
        Listener(tmp_path / "node.sock", others_may_connect=False),
        allow_uids=frozenset({os.geteuid()}),
        connection_count_max=8,
        clock=clock,
        register=registry.add,
        unregister=registry.remove,
        first_number=FIRST,
    )
    yield made
    made.close()


def test_a_rank_is_remembered_before_the_engine_hears_of_it(
    attach: Attach, connect: Connect, registry: Registry
) -> None:
    connect().introduce(scheduler_hello())
    assert [event.connection for event in all_events(attach)] == [FIRST]  # type: ignore[union-attr]
    assert registry.ranks == {}, "a scheduler writes to no slot"
    connect().introduce(hello_rank())
    all_events(attach)
    assert registry.ranks == {ConnectionId(FIRST + 1): hello_rank()}


def test_the_longest_hello_reaches_the_supervisor() -> None:
    ours, its = pair()
    with ours, its, open(os.devnull) as file:
        longest = control.Attached(2**63 - 1, bytes(HELLO_BYTES_MAX))
        control.send(its, longest, file.fileno())
        heard = control.receive(ours, control.from_node)
        assert heard is not None
        os.close(heard[1])
        assert heard[0] == longest


def test_a_rank_that_cannot_be_remembered_is_refused(
    attach: Attach, connect: Connect, registry: Registry
) -> None:
    registry.has_room = False
    peer = connect()
    peer.introduce(hello_rank())
    assert all_events(attach) == []
    refused = decode_from_node(peer.hear())
    assert isinstance(refused, Refused)
    assert "supervisor" in refused.reason


def test_it_is_remembered_until_the_engine_needs_it_no_more(
    attach: Attach, connect: Connect, registry: Registry
) -> None:
    peer = connect()
    peer.introduce(hello_rank())
    all_events(attach)
    peer.socket.close()
    assert all_events(attach) == [Ended(ConnectionId(FIRST))]
    assert list(registry.ranks) == [FIRST], "it may still write"
    attach.release(ConnectionId(FIRST))
    assert registry.ranks == {}
    attach.release(ConnectionId(FIRST))


def test_its_death_alone_lets_nobody_forget_it(
    attach: Attach, connect: Connect, registry: Registry
) -> None:
    """The engine frees its slots in the step that follows; dying before, the node must know it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    attach.adopt(ConnectionId(5), pidfd)
    registry.ranks[ConnectionId(5)] = hello_rank()
    assert all_events(attach) == []
    child.communicate(b"\n")
    assert all_events(attach) == [Exited(ConnectionId(5))]
    assert list(registry.ranks) == [5]
    attach.release(ConnectionId(5))
    assert registry.ranks == {}


def test_an_orderly_end_forgets_nobody(
    attach: Attach, connect: Connect, registry: Registry
) -> None:
    connect().introduce(hello_rank())
    attach.adopt(ConnectionId(5), os.pidfd_open(os.getpid()))
    all_events(attach)
    attach.close()
    assert list(registry.ranks) == [FIRST], "the journal names it"

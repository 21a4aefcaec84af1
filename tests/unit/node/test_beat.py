"""The heart beats in time whatever an engine of 254 ranks, or a peer, says at its largest.

On a clock of work: a call takes 1 µs, which is what calls of these paths take on the average, and
an element of a column 2 ns. A look at a whole column counts as one of 1 TiB.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvstore.engine.events import Command, Event, PeerAsked, Received, Send
from kvstore.node.attach import Attach
from kvstore.node.driver import Driver, Executor
from kvstore.node.turns import NODE, Party, TurnKind, TurnSource
from kvstore.ports import Memory
from kvstore.types import ConnectionId, Shard
from kvstore.units import NS_PER_S
from kvstore.wire.messages import (
    KEYS_PER_DATAGRAM_MAX,
    LEASES_PER_DATAGRAM_MAX,
    Compared,
    Distrust,
    Drop,
    EngineMessage,
    Grant,
    Hint,
    LeaseAsk,
    LeaseRelease,
    LeaseRenew,
    Measured,
    Quiet,
    Seal,
    Story,
    Verified,
)
from kvstore.wire.peers import ServeAsk
from tests.unit.engine import watched
from tests.unit.engine.harness import SMALL, Node, Peer
from tests.unit.engine.watched import Watched, watch
from tests.unit.node.test_turns import LATE_NS, Beats, Sockets

SHARDS = 254
SLOTS = 1 << 17
TIMES = (1 << 24) // SLOTS
"""A node of 1 TiB has so many times the slots; no message names as many as these."""
CALL_NS, ELEMENT_NS = 1000, 2
FULL = KEYS_PER_DATAGRAM_MAX


class Bare(Node):
    """Without the checks, which look at everything."""

    def step(self, *events: Event) -> list[Command]:
        commands = self.engine.step(events, self.now_ns)
        for command in commands:
            if isinstance(command, Send):
                self.sent[command.connection].append(command.message)
        return commands


class WorkClock:
    """Goes as work is done."""

    def __init__(self) -> None:
        self.calls, self.idle_ns = 0, 10**9

    @property
    def ns(self) -> int:
        return self.idle_ns + self.calls * CALL_NS + Watched.elements * ELEMENT_NS

    @ns.setter
    def ns(self, ns: int) -> None:
        self.idle_ns += ns - self.ns

    def now_ns(self) -> int:
        return self.ns

    def count(self, frame: Any, kind: str, _about: Any) -> None:
        is_work = frame.f_code.co_filename != watched.__file__
        self.calls += is_work and kind in ("call", "c_call")


class Deaf:
    """An executor that does nothing: what is sent is not this test's."""

    files = exchange = hbm = None

    def __init__(self, tier: Memory, attach: Attach) -> None:
        self.tier, self.attach = tier, attach

    def carry_out(self, commands: list[Command]) -> tuple[list[Event], int]:
        return [], 0


def some_keys(seed: int, count: int = FULL) -> bytes:
    return np.random.default_rng(seed).integers(0, 2**63, (count, 4), dtype=np.uint64).tobytes()


def attached() -> tuple[Bare, Peer]:
    node = Bare(
        slots=SLOTS, slab_slots=1024, block_count_max=2 * SLOTS, fetches=True, tell_offers=False
    )
    space = msgspec.structs.replace(
        SMALL, layer_count=SHARDS, kv_head_count=1, head_bytes=(16 << 10,)
    )
    peer = Peer(node, space=space, shards=[Shard(n, n + 1, 0, 1) for n in range(SHARDS)])
    return node, peer


def stored(node: Bare, peer: Peer) -> tuple[bytes, bytes, bytes]:
    """Every rank seals what it was granted. Returns keys, and slots and generations of rank 0."""
    grant = node.last(peer.scheduler, Grant)
    slots = np.frombuffer(grant.slots, "<u4").reshape(-1, SHARDS)
    generations = np.frombuffer(grant.generations, "<u8").reshape(-1, SHARDS)
    keys = some_keys(1, len(slots))
    for n, rank in enumerate(peer.ranks):
        seal = Seal(
            session=peer.session,
            keys=keys,
            slots=slots[:, n].tobytes(),
            generations=generations[:, n].tobytes(),
            checksums=bytes(16 * len(slots)),
        )
        node.hear(rank, seal)
    return keys, slots[:, 0].tobytes(), generations[:, 0].tobytes()


def largest(node: Bare, peer: Peer) -> dict[int, list[EngineMessage | PeerAsked[ServeAsk]]]:
    """One after the other, by whom: the scheduler, a rank, a peer (0)."""
    keys, slots, generations = stored(node, peer)
    many = np.arange(FULL, dtype="<u4").tobytes()
    places: dict[str, Any] = {"slots": many, "generations": np.ones(FULL, dtype="<u8").tobytes()}
    leases = list(range(LEASES_PER_DATAGRAM_MAX))
    (space,) = node.engine.space_ids()
    return {
        peer.scheduler: [
            *(Hint(request=n, keys=some_keys(n)) for n in range(8)),
            Hint(request=9, keys=keys),
            *(LeaseAsk(lease=n, keys=some_keys(n)) for n in range(64)),
            *(LeaseAsk(lease=100 + n, keys=keys, with_checksums=True) for n in range(64)),
            LeaseRenew(leases),
            LeaseRelease(leases),
            Measured(1, 1),
            *(Story(request="r" * 255, leases=list(range(8))) for _ in range(64)),
            Compared(session=peer.session, lease=100, blocks=1),
        ],
        peer.ranks[0]: [
            Seal(session=peer.session, keys=some_keys(3), checksums=bytes(16 * FULL), **places),
            Drop(session=peer.session, **places),
            *(Distrust(**places) for _ in range(8)),
            *(Verified(**places) for _ in range(8)),
            Distrust(slots=slots, generations=generations),
            *(Quiet(0) for _ in range(1024)),
        ],
        0: [
            PeerAsked(1, "p", ServeAsk(n, "t", space, some_keys(1) if n % 2 else keys))
            for n in range(64)
        ],
    }


@pytest.mark.parametrize("who", ["scheduler", "rank", "peer"])
def test_no_message_at_its_largest_keeps_the_heart_waiting(who: str) -> None:
    node, peer = attached()
    number, turn = {
        "scheduler": (peer.scheduler, TurnKind.SCHEDULER),
        "rank": (peer.ranks[0], TurnKind.RANK),
        "peer": (0, TurnKind.FILES),
    }[who]
    clock, tier = WorkClock(), Beats()
    sockets = Sockets(cast("Any", clock))
    fd = sockets.add(Party(0, number) if number else NODE, turn)
    queue = sockets.queues[fd]
    queue.extend(largest(node, peer)[number])  # type: ignore[arg-type]
    limit = 1 if turn == TurnKind.SCHEDULER else 1024
    sockets.sources[fd] = TurnSource(turn, ConnectionId(number), _reader(number, queue, limit))
    watch(node.engine)
    executor = Deaf(cast("Any", tier), cast("Attach", sockets))
    driver = Driver(node.engine, cast("Executor", executor), cast("Any", clock))
    end_ns = clock.ns + NS_PER_S

    def end() -> None:
        if not queue and clock.ns >= end_ns:
            driver.stop()

    sockets.refill = end
    Watched.elements, Watched.whole = 0, (SLOTS, TIMES)
    sys.setprofile(clock.count)
    try:
        driver.run()
    finally:
        sys.setprofile(None)
        Watched.whole = None
        driver._queries.close()
    assert max(tier.gaps_ns()) <= LATE_NS
    assert not driver.counters.failures
    assert clock.calls > 10_000, "nothing was done"


def _reader(number: int, queue: Any, limit: int) -> Any:
    def read(_mask: int) -> Any:
        for _ in range(limit):
            if queue:
                said = queue.popleft()
                yield said if isinstance(said, PeerAsked) else Received(ConnectionId(number), said)

    return read

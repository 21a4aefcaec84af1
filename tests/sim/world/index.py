"""Replicas of the index in the world, and what nodes ask them.

Real: `indexer.service.IndexService` with its `Index`, fed by streams; forms of answers. Simulated:
the way of a question, which a client takes from one replica to the next as `client.index` does.

Checked all the time (I8): no answer names a node of which the replica has heard nothing for so long
that it must be out.

Does not cover: whether replicas know all there is (`cluster`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvstore.client.index import IndexUnavailable, Members
from kvstore.index.feed import OUT_MS
from kvstore.index.holdings import Holdings
from kvstore.index.index import Answer, Index
from kvstore.indexer.service import IndexService
from kvstore.proto import forms
from kvstore.types import KEY_BYTES, SpaceId
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.feed import encode
from tests.kit.index_check import done
from tests.sim.world.copies import Violation
from tests.sim.world.ground import Ground, Peers
from tests.sim.world.loop import SimLoop
from tests.sim.world.net import SimNet

_ENTRIES: Final = 1 << 14
_SLOTS: Final = 1 << 10
_ASK_MS: Final = (0, 0, 1, 5)
_SLOW_MS: Final = (5, 100, 400)
SLOW: Final = "index slow"
_SLACK_NS: Final = 20 * NS_PER_MS

_T = TypeVar("_T")
Knock = Callable[[str, str], bool | None]
"""(from, address) → whether somebody listens there."""


class SimReplica:
    """One replica: a process that is there, stopped, or begins again with nothing."""

    def __init__(self, world: Ground, net: SimNet, knock: Knock, number: int) -> None:
        self.name = f"i{number}"
        self.address = f"10.0.1.{number}:9470"
        self.stopped_until_ns = 0
        self._world, self._net, self._knock = world, net, knock
        self.start()

    def start(self) -> None:
        """It knows nothing."""
        self.begun_ns = self._world.now_ns
        self.loop = SimLoop(lambda: self._world.now_ns)
        self.loop.knock = lambda host, port: self._knock(self.name, f"{host}:{port}")
        flat = Holdings(_ENTRIES, slot_count_max=_SLOTS, is_native=False)
        self.index = Index(flat, now_ms=self.now_ms)
        service = IndexService(self.index, demands_names=False)
        self.loop.create_task(service.tick())
        handlers = {"Feed": (service.feed, bytes, encode)}
        self._net.listen(self.address, self.name, self.loop, handlers)

    def end(self) -> None:
        """kill -9."""
        self._net.died(self.loop)
        self.loop.end()

    @property
    def now_ms(self) -> int:
        return self._world.now_ns // NS_PER_MS

    @property
    def runs(self) -> bool:
        return self._world.now_ns >= self.stopped_until_ns

    def match(self, tenant: str, space: bytes, keys: bytes) -> Answer:
        """As the service answers."""
        answer = done(self.index.match(tenant, SpaceId(space), keys, self.now_ms))
        for match in answer.matches:
            self._check_lives(match.holder.node)
        return forms.answer_of(forms.reply_of(answer, blocks=len(keys) // KEY_BYTES))

    def members(self) -> Members:
        """As the service answers."""
        trust = done(self.index.match("", SpaceId(bytes(KEY_BYTES)), b"", self.now_ms)).trust
        return Members(trust, self.index.members(self.now_ms))

    def _check_lives(self, node: str) -> None:
        heard_ns = self._net.heard_ns.get((node, self.name), 0)
        if self._world.now_ns - heard_ns > OUT_MS * NS_PER_MS + _SLACK_NS:
            raise Violation(f"{self.name} names {node}, silent for more than {OUT_MS} ms")


class SimIndexClient:
    """As `client.index.IndexClient`, of one node."""

    def __init__(self, peers: Peers, net: SimNet, replicas: Sequence[SimReplica]) -> None:
        self._peers, self._net, self._replicas = peers, net, replicas
        self._first: int = peers.random.randrange(len(replicas))

    def match(
        self, tenant: str, space: bytes, prompt: bytes, *, timeout_s: float | None = None
    ) -> Answer:
        """Raises IndexUnavailable."""
        return self._ask(lambda replica: replica.match(tenant, space, prompt), timeout_s)

    def nodes(self, *, timeout_s: float | None = None) -> Members:
        """Raises IndexUnavailable."""
        return self._ask(SimReplica.members, timeout_s)

    def _ask(self, ask: Callable[[SimReplica], _T], timeout_s: float | None) -> _T:
        """The time that is left is shared among the replicas that were not asked yet."""
        peers = self._peers
        replicas, count = self._replicas, len(self._replicas)
        left_ns = int((timeout_s or 1.0) * NS_PER_S)
        for turn in range(count):
            number = (self._first + turn) % count
            took_ns = self._takes_ns(replicas[number])
            share_ns = left_ns // (count - turn)
            peers.loop.spend(min(took_ns, share_ns) / NS_PER_S)
            if took_ns <= share_ns:
                self._first = number
                return ask(replicas[number])
            left_ns -= share_ns
        raise IndexUnavailable("no replica answers")

    def _takes_ns(self, replica: SimReplica) -> int:
        net, world = self._net, self._peers.world
        if not replica.runs or not net.is_reached(self._peers.name, replica.address):
            return 3600 * NS_PER_S
        if SLOW in world.enabled and world.random.random() < 0.3:
            world.strike(SLOW, self._peers.machine)
            return world.random.choice(_SLOW_MS) * NS_PER_MS
        return world.random.choice(_ASK_MS) * NS_PER_MS

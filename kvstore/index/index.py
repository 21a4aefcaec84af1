"""The global prefix index: how much of a prompt each holder has, as published by the nodes.

    Event ─▶ Feed (trust?) ─▶ Holdings (void, show, store, remove)        match ─▶ Answer
    trust in each node, and the time since ─▶ `Nodes` ─▶ trust in the whole

This module has the nodes, and maps them to `Holdings` slots: `feed` decides on trust and on the
slot, `holdings` keeps the blocks.

An `Index` is the `IndexStore` of a replica by itself, and the reference for `kvstore.stores`, which
keep their nodes in the same way.

Pure: time is an argument. Bounded: by its `Holdings`, and `node_count_max` nodes.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from kvstore.index.feed import OUT_MS, Event, Feed, Holder, KnownNode, Places, Trust, Verdict
from kvstore.index.holdings import Holdings, Statistics
from kvstore.types import Incarnation, SpaceId
from kvstore.wire.feed import Hello
from kvstore.wire.load import EngineEntry, Load

SWEEP_ROWS: Final = 25_000
"""Rows that one `tick` sweeps while a slot is void: about a millisecond."""

_NodeT = TypeVar("_NodeT", bound=KnownNode)


class Match(msgspec.Struct, frozen=True):
    """Leading blocks of the question that a holder has in this tier or a faster one."""

    holder: Holder
    hbm_blocks: int = 0
    dram_blocks: int = 0
    file_blocks: int = 0
    trust: Trust = Trust.EXACT

    @property
    def longest(self) -> int:
        """Leading blocks in any of them."""
        return max(self.hbm_blocks, self.dram_blocks, self.file_blocks)


class Answer(msgspec.Struct, frozen=True):
    """Holders of the first block, each with its matching prefix length."""

    trust: Trust
    """EXACT: by all updates of the nodes there are no other holders. CATCHING_UP: there may be
    some."""
    matches: list[Match]


class Member(msgspec.Struct, frozen=True):
    """A node and the trust in it."""

    node: str
    incarnation: Incarnation
    address: str
    """Address for peers; empty: the node serves none."""
    trust: Trust | None
    """Trust in the node; None: it is left out of answers."""
    sequence: int
    load: Load | None = None
    """Last published load; None: none yet."""
    engines: tuple[EngineEntry, ...] = ()
    """Engines that the node serves."""


class Nodes(Generic[_NodeT]):
    """Nodes of a replica, and how current the view of them, and of the whole, is."""

    def __init__(self, now_ms: int) -> None:
        """`now_ms`: time of its start."""
        self.nodes: dict[str, _NodeT] = {}
        self.trusts: dict[str, Trust | None] = {}
        """Trust in each node as of the last look."""
        self.doubted: set[str] = set()
        """Nodes in answers that are not in sync: they may hold more than answers have."""
        self._young_until_ms = now_ms + OUT_MS
        self._review_ms = now_ms
        """Time until which silence does not change the trust in any node."""

    def trust(self, now_ms: int) -> Trust:
        """Trust in the whole: EXACT if by all updates there are no other holders than those in an
        answer."""
        self._review(now_ms)
        is_whole = now_ms >= self._young_until_ms and not self.doubted
        return Trust.EXACT if is_whole else Trust.CATCHING_UP

    def members(self, now_ms: int) -> list[Member]:
        """All nodes that are not forgotten, by name."""
        self._review(now_ms)
        return [
            Member(
                *(name, its.body.incarnation, its.body.address, self.trusts[name]),
                *(its.body.sequence, its.load, its.engines),
            )
            for name, its in sorted(self.nodes.items())
        ]

    def lost(self, now_ms: int) -> list[str]:
        """Nodes silent for so long that their blocks are to be forgotten."""
        return [name for name, its in self.nodes.items() if its.is_lost(now_ms)]

    def _review(self, now_ms: int) -> None:
        """Update the trust in nodes that became silent, when silence can have changed it."""
        if now_ms >= self._review_ms:
            self._review_ms = now_ms + OUT_MS
            self.trusts.clear()
            self.doubted.clear()
            for name in self.nodes:
                self._judge(name, now_ms)

    def _judge(self, name: str, now_ms: int) -> None:
        """Set the trust in a node, by its last message and the time since."""
        node = self.nodes[name]
        trust = self.trusts[name] = node.trust(now_ms)
        if trust is None or trust is Trust.EXACT:
            self.doubted.discard(name)
        else:
            self.doubted.add(name)
        self._review_ms = min(self._review_ms, node.until_ms(now_ms))


class Index(Nodes[Feed]):
    """The index of one replica, with state in the memory of this process: an `IndexStore` that is
    always reachable, answers without waiting, and mixes no two states in an answer.

    Args:
        holdings: empty.
        now_ms: time of its start.
        node_count_max: most nodes.
    """

    trouble = ""
    failure_count = 0

    def __init__(self, holdings: Holdings, *, now_ms: int, node_count_max: int = 4096) -> None:
        super().__init__(now_ms)
        self.holdings = holdings
        self._node_count_max = node_count_max

    async def hear(self, event: Event, now_ms: int) -> Verdict:
        """Apply a message of a node, or an event of its stream. Returns what to do with the
        stream."""
        feed = self.nodes.get(event.node)
        if feed is None:
            if not isinstance(event, Hello) or len(self.nodes) >= self._node_count_max:
                return Verdict.CLOSE
            feed = self.nodes[event.node] = Feed(Places(event.node, self.holdings))
        verdict = feed.hear(event, now_ms)
        self._judge(event.node, now_ms)
        return verdict

    async def match(self, tenant: str, space: SpaceId, keys: bytes, now_ms: int) -> Answer:
        """The longest prefix of `keys` (32 bytes each) that each holder has."""
        whole = self.trust(now_ms)
        matches = []
        for slot, hbm, dram, file, lost in self.holdings.match(tenant, space, keys):
            holder = self.holdings.holders[slot]
            trust = self.trusts[holder.node]
            if trust is not None:
                if lost and trust is Trust.EXACT:
                    trust = Trust.CATCHING_UP
                matches.append(Match(holder, hbm, dram, file, trust))
        if self.holdings.has_lost(tenant, space):
            whole = Trust.CATCHING_UP
        return Answer(whole, matches)

    async def tick(self, now_ms: int) -> None:
        """Regular work, a bounded piece per call: forget nodes silent for FORGET_MS, sweep void
        slots."""
        self._review(now_ms)
        self.holdings.sweep(SWEEP_ROWS)

    async def close(self) -> None:
        """Nothing to close."""

    def statistics(self) -> Statistics:
        """Sizes and counts."""
        return self.holdings.statistics()

    def _review(self, now_ms: int) -> None:
        if now_ms >= self._review_ms:
            for name in self.lost(now_ms):
                self.nodes.pop(name).places.forget()
            super()._review(now_ms)

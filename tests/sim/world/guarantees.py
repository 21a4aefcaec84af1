"""What a quota guarantees in the world: no group loses its share to another one; and that every
block of a prompt is counted once.

A step of the node in which only others spoke, and nothing was granted to a group, leaves the group
its share, or all that it had if that was less.

Does not cover: the accounts themselves (`kit.engine_check`), what a group may pin.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.engine.engine import Engine
from kvstore.engine.events import Command, Event, Received, Send, Tick
from kvstore.types import Tier
from kvstore.wire.messages import Distrust, Grant, HelloRank, HelloScheduler, Story
from tests.sim.world.copies import Violation

Bytes = dict[str, int]
_OTHERS = ""


class Guarantees:
    """Of one node process."""

    def __init__(self, quotas: Sequence[tuple[str, int]], *, arena_bytes: int) -> None:
        """`quotas`: (tenant, bytes)."""
        rest_bytes = arena_bytes - sum(size for _, size in quotas)
        self._shares = {**dict(quotas), _OTHERS: rest_bytes} if quotas else {}
        self._groups: dict[int, str] = {}
        """By connection."""

    def look(self, engine: Engine) -> Bytes:
        """Bytes that each group has."""
        return {row.quota: row.used_bytes for row in engine.quotas()}

    def check(
        self, engine: Engine, before: Bytes, events: Sequence[Event], commands: Sequence[Command]
    ) -> None:
        """Raises Violation."""
        concerned = self._concerned(events, commands)
        if concerned is None:
            return
        after = self.look(engine)
        for name in self._shares.keys() - concerned:
            lacks = min(before[name], self._shares[name]) - after[name]
            if lacks > 0:
                raise Violation(
                    f"{name or 'all others'} lost {lacks} of the {self._shares[name]} bytes that "
                    "a quota guarantees"
                )

    def _concerned(self, events: Sequence[Event], commands: Sequence[Command]) -> set[str] | None:
        """Groups that lose blocks of their own accord; None: any may."""
        concerned: set[str] = set()
        for event in events:
            if isinstance(event, Tick):
                continue
            if not isinstance(event, Received):
                return None
            match event.message:
                case HelloScheduler(tenant=tenant) | HelloRank(tenant=tenant):
                    self._groups[event.connection] = tenant if tenant in self._shares else _OTHERS
            if event.connection not in self._groups:  # of the process before
                return None
            concerned.add(self._groups[event.connection])
            if isinstance(event.message, Distrust):  # perhaps of what another node's need brought
                concerned.add(_OTHERS)
        granted = (c for c in commands if isinstance(c, Send) and isinstance(c.message, Grant))
        return concerned | {self._groups.get(c.connection, _OTHERS) for c in granted}


class Accounts:
    """Hits, and misses by reason, of one node process: by the tokens that stories name, blocks that
    were neither loaded nor in the engine's own cache are the misses."""

    def __init__(self) -> None:
        self._last, self._hits, self.misses = 0, 0, 0
        self.saved_ns = self.spent_ns = self.lost_ns = 0

    def check(self, engine: Engine) -> None:
        """Raises Violation."""
        stories = list(engine.explain._told.values())
        for told in reversed(stories):
            row = told.row
            if row.number <= self._last:
                break
            size = row.block_tokens or 1
            total = row.prompt_tokens // size
            own = min(row.local_tokens // size, total)
            # One that was preempted loads what it had decoded, too.
            loaded = min(row.loaded_tokens // size, total - own)
            self._hits += loaded
            self._count_times(told.story)
            self.misses += total - own - loaded
        self._last = stories[-1].row.number if stories else 0
        ledger = engine.ledger
        found = sum(ledger.hits.values()), sum(ledger.misses.values())
        if found != (self._hits, self.misses):
            raise Violation(
                f"hits and misses are {(self._hits, self.misses)}, counted as {found}:"
                f" {ledger.misses}"
            )
        ages = engine.ages[Tier.DRAM]
        if sum(ages.counts) != engine.counters.evictions:
            raise Violation(f"{engine.counters.evictions} evictions, ages of {sum(ages.counts)}")
        its = ledger.total()
        summed = its.saved_ns, its.spent_ns, its.lost_ns
        if summed != (self.saved_ns, self.spent_ns, self.lost_ns):
            mine = self.saved_ns, self.spent_ns, self.lost_ns
            raise Violation(f"saved, spent and lost are {mine}, counted as {summed}")

    def _count_times(self, story: Story) -> None:
        spent_ns = story.lookup_ns + story.promotion_ns + story.load_ns
        self.saved_ns += story.saved_ns
        self.spent_ns += spent_ns
        self.lost_ns += max(0, spent_ns - story.saved_ns)

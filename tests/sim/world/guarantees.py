"""What a quota guarantees in the world: no group loses its share to another one.

A step of the node in which only others spoke, and nothing was granted to a group, leaves the group
its share, or all that it had if that was less.

Does not cover: the accounts themselves (`Engine.check`), what a group may pin.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.engine.engine import Engine
from kvstore.engine.events import Command, Event, Received, Send, Tick
from kvstore.wire.messages import Grant, HelloRank, HelloScheduler
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
        granted = (c for c in commands if isinstance(c, Send) and isinstance(c.message, Grant))
        return concerned | {self._groups.get(c.connection, _OTHERS) for c in granted}

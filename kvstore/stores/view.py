"""Trust of this replica in the nodes of a shared store (pure).

    polls, own writes ─▶ when each record last changed, by the clock of this replica ─▶ trust

No clock is shared: a node is as silent as its record, which every update gives another version. A
record of the first look may be that of a node long gone: it is stale until it changes.

Covers: trust. Does not cover: content of the records (`kvstore.index.feed` decides it).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.index.feed import FORGET_MS, OUT_MS, STALE_MS, Trust, trust_after, until_ms
from kvstore.index.index import Member
from kvstore.stores.forms import Body


@dataclass
class Row:
    """Record of one node, and when it last changed by this replica's clock."""

    version: bytes
    body: Body
    changed_ms: int
    was_seen_to_change: bool
    is_gone: bool = False
    """Its address refused connections, and no update came since."""

    def trust(self, now_ms: int) -> Trust | None:
        """Trust in the node at this time; None: it is left out of answers."""
        if self.is_gone:
            return None
        body, silent_ms = self.body, now_ms - self.changed_ms
        is_exact = body.is_exact and not body.is_short
        trust = trust_after(silent_ms, is_open=body.is_open, is_exact=is_exact)
        if trust is not None and not self.was_seen_to_change:
            return Trust.STALE
        return trust

    def is_heard(self, now_ms: int) -> bool:
        """Whether some replica has a live stream of it."""
        return self.body.is_open and now_ms - self.changed_ms < STALE_MS


class View:
    """Records of all nodes, as polled or written by this replica."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._doubted: set[str] = set()
        """Nodes that are in answers, and not in sync."""
        self._review_ms = 0
        """Until then neither silence nor a poll changes the trust of a node."""
        self._is_first = True
        self._young_until_ms = 0

    def restart(self, now_ms: int) -> None:
        """Forget all records, because the store has another epoch."""
        self.rows.clear()
        self._review_ms = now_ms
        self._is_first = True
        self._young_until_ms = now_ms + OUT_MS

    def polled(self, records: dict[str, tuple[bytes, Body, bytes]], now_ms: int) -> None:
        """Take in all records of a poll, by node: version, body, and the version at which the
        node's address refused a connection."""
        for name in self.rows.keys() - records.keys():
            del self.rows[name]
        for name, (version, body, gone) in records.items():
            self._put(name, version, body, now_ms, was_seen_to_change=not self._is_first)
            self.rows[name].is_gone = gone == version
        self._review_ms = now_ms
        self._is_first = False

    def changed(self, name: str, version: bytes, body: Body, now_ms: int) -> None:
        """Take in a record that this replica has just written."""
        self._put(name, version, body, now_ms, was_seen_to_change=True)
        self._judge(name, now_ms)

    def gone(self, name: str, version: bytes) -> None:
        """Mark a node whose address refuses connections, if `version` is still that of its
        record."""
        row = self.rows.get(name)
        if row is not None and row.version == version:
            row.is_gone = True
            self._doubted.discard(name)

    def trust(self, now_ms: int) -> Trust:
        """Trust in the whole: EXACT if by all updates there are no other locations than those in an
        answer."""
        if now_ms >= self._review_ms:
            self._doubted.clear()
            self._review_ms = now_ms + OUT_MS
            for name in self.rows:
                self._judge(name, now_ms)
        is_whole = not self._doubted and now_ms >= self._young_until_ms
        return Trust.EXACT if is_whole else Trust.CATCHING_UP

    def _put(
        self, name: str, version: bytes, body: Body, now_ms: int, *, was_seen_to_change: bool
    ) -> None:
        row = self.rows.get(name)
        if row is None:
            self.rows[name] = Row(version, body, now_ms, was_seen_to_change)
        elif row.version != version:
            self.rows[name] = Row(version, body, now_ms, was_seen_to_change=True)

    def _judge(self, name: str, now_ms: int) -> None:
        row = self.rows[name]
        if row.trust(now_ms) in (None, Trust.EXACT):
            self._doubted.discard(name)
        else:
            self._doubted.add(name)
        self._review_ms = min(self._review_ms, until_ms(row.changed_ms, now_ms))

    def members(self, now_ms: int) -> list[Member]:
        """All nodes that are not forgotten, by name."""
        return [
            Member(name, its.incarnation, its.address, row.trust(now_ms), its.sequence, its.load)
            for name, row in sorted(self.rows.items())
            for its in (row.body,)
        ]

    def lost(self, now_ms: int) -> list[str]:
        """Nodes silent for so long that their blocks are to be forgotten."""
        return [n for n, row in self.rows.items() if now_ms - row.changed_ms >= FORGET_MS]

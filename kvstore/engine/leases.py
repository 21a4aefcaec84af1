"""Leases: sealed slots promised to a reader until it lets go, its session ends or time is up.

Rule: only this class changes a slot's lease count, and each lease is counted exactly once.
"""

from __future__ import annotations

from kvstore.engine.policy.port import Words
from kvstore.engine.slots import Slots


class Lease:
    """One LeaseAsk that was answered with at least one block."""

    __slots__ = ("expires_ns", "granted_ns", "pieces")

    def __init__(self, words: Words, *, granted_ns: int, expires_ns: int) -> None:
        self.pieces = [words]
        """Slots, as they were pinned: distinct within a piece. A slot whose block was cleared may
        come a second time, with another block, when the lease grows."""
        self.granted_ns = granted_ns
        self.expires_ns = expires_ns

    @property
    def slot_count(self) -> int:
        """Slots pinned."""
        return sum(len(words) for words in self.pieces)


class Leases:
    """All leases of a node, by (session, lease id)."""

    def __init__(self, slots: Slots, *, ttl_ns: int, count_max: int) -> None:
        self._slots = slots
        self._ttl_ns = ttl_ns
        self._count_max = count_max
        self._by_session: dict[int, dict[int, Lease]] = {}

    def __len__(self) -> int:
        return sum(len(leases) for leases in self._by_session.values())

    def may_add(self, session: int, lease: int) -> bool:
        """False when the session holds its share, or this id, already."""
        held = self._by_session.get(session, {})
        return lease not in held and len(held) < self._count_max

    def add(self, session: int, lease: int, words: Words, now_ns: int) -> Lease:
        """Pin these slots, which are distinct."""
        self._slots.leases[words] += 1
        made = Lease(words, granted_ns=now_ns, expires_ns=now_ns + self._ttl_ns)
        self._by_session.setdefault(session, {})[lease] = made
        return made

    def get(self, session: int, lease: int) -> Lease | None:
        """This lease, if it is held."""
        return self._by_session.get(session, {}).get(lease)

    def extend(self, session: int, lease: int, words: Words) -> None:
        """Pin more slots under a held lease; these are distinct."""
        found = self._by_session[session][lease]
        self._slots.leases[words] += 1
        found.pieces.append(words)

    def renew(self, session: int, leases: list[int], now_ns: int) -> None:
        """Let these last a whole life from now; unknown ones are ignored."""
        held = self._by_session.get(session, {})
        for lease in leases:
            found = held.get(lease)
            if found is not None:
                found.expires_ns = now_ns + self._ttl_ns

    def release(self, session: int, leases: list[int]) -> None:
        """Let go; unknown ones are ignored."""
        held = self._by_session.get(session, {})
        for lease in leases:
            found = held.pop(lease, None)
            if found is not None:
                self._unpin(found)
        if not held:
            self._by_session.pop(session, None)

    def end_session(self, session: int) -> None:
        """Let go of all of a session's."""
        for lease in self._by_session.pop(session, {}).values():
            self._unpin(lease)

    def expire(self, now_ns: int) -> int:
        """Let go of those whose time is up; returns how many."""
        late = [
            (session, number)
            for session, held in self._by_session.items()
            for number, lease in held.items()
            if lease.expires_ns <= now_ns
        ]
        for session, number in late:
            self.release(session, [number])
        return len(late)

    def items(self) -> list[tuple[int, int, Lease]]:
        """(session, lease id, lease) of all."""
        return [
            (session, number, lease)
            for session, held in self._by_session.items()
            for number, lease in held.items()
        ]

    def _unpin(self, lease: Lease) -> None:
        for words in lease.pieces:
            self._slots.leases[words] -= 1
        self._slots.retry_starved()

"""Leases: sealed slots promised to a reader until it lets go, its session ends or time is up.

Rules. 1: each lease is counted exactly once in the counts of `pins`, and no more when its block has
left. 2: a lease is renewed for LEASE_LIVES_MAX of its lives at most: a request that loads nothing
asks again, and gets what its engine's share of pins allows then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.pins import Account
from kvstore.engine.policy.port import Words
from kvstore.engine.slots import Slots
from kvstore.wire.messages import LEASE_LIVES_MAX


class Lease:
    """One LeaseAsk that was answered with at least one block."""

    __slots__ = ("account", "expires_ns", "granted_ns", "pieces")

    def __init__(self, account: Account | None, *, granted_ns: int, expires_ns: int) -> None:
        self.account = account
        """That pins its slots."""
        self.pieces: list[tuple[Words, NDArray[np.uint64]]] = []
        """Slots and generations, as they were pinned: distinct within a piece. A slot whose block
        was cleared may come a second time, with another block, when the lease grows."""
        self.granted_ns = granted_ns
        self.expires_ns = expires_ns

    @property
    def slot_count(self) -> int:
        """Slots pinned."""
        return sum(len(words) for words, _ in self.pieces)


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

    def add(
        self, session: int, lease: int, words: Words, now_ns: int, account: Account | None = None
    ) -> Lease:
        """Pin these slots, which are distinct, for an account that may (`Pins.fitting`)."""
        made = Lease(account, granted_ns=now_ns, expires_ns=now_ns + self._ttl_ns)
        self._by_session.setdefault(session, {})[lease] = made
        self._pin(made, words)
        return made

    def get(self, session: int, lease: int) -> Lease | None:
        """This lease, if it is held."""
        return self._by_session.get(session, {}).get(lease)

    def extend(self, session: int, lease: int, words: Words) -> None:
        """Pin more slots under a held lease; these are distinct."""
        self._pin(self._by_session[session][lease], words)

    def renew(self, session: int, leases: list[int], now_ns: int) -> None:
        """Let these last a whole life from now, if they may; unknown ones are ignored."""
        held = self._by_session.get(session, {})
        for lease in leases:
            found = held.get(lease)
            if found is not None:
                last_ns = found.granted_ns + LEASE_LIVES_MAX * self._ttl_ns
                found.expires_ns = min(now_ns + self._ttl_ns, last_ns)

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

    def _pin(self, lease: Lease, words: Words) -> None:
        self._slots.pins.pin(words, lease.account)
        lease.pieces.append((words, self._slots.generation[words]))

    def _unpin(self, lease: Lease) -> None:
        for words, generations in lease.pieces:
            held = self._slots.generation[words] == generations
            self._slots.pins.unpin(words[held], lease.account)
        self._slots.retry_starved()

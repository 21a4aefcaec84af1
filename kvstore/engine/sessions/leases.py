"""Leases: sealed slots pinned for a reader until it releases them, its session or the time ends.

Rules. 1: each lease is counted exactly once in the counts of `Pins`, and no more when its block has
left. 2: a lease is renewed for LEASE_LIVES_MAX of its lives at most: a request that loads nothing
asks again, and gets what its engine's share of pins allows then. 3: the cost of a session's leases,
in memory and in time to end them all, is bounded, and there is always some left for the next one.
4: a lease is looked at when it may have expired, and once a life otherwise (`agenda`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.agenda import Agenda
from kvstore.engine.config import EngineConfig
from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.shares import Account
from kvstore.engine.memory.slots import Slots
from kvstore.types import Counts
from kvstore.units import MIB, NS_PER_MS
from kvstore.wire.messages import LEASE_LIVES_MAX

SLOT_BYTES: Final = 16
"""Memory of one slot in a lease: a word and a generation."""
LEASE_BYTES: Final = 4096
"""Bytes counted for each piece of a lease: more than its memory, because ending it takes time."""
SESSION_BYTES_MAX: Final = 8 * MIB
"""Most bytes counted for the leases of a session, half a million slots: 30 ms to end them all. A
session gets at most half of what other sessions leave."""
BYTES_MAX: Final = 256 * MIB


class Lease(msgspec.Struct, eq=False):
    """Pinned slots for one LeaseAsk, answered with at least one block now or by LeaseMore."""

    account: Account
    """Account that pins its slots."""
    shards: int
    granted_ns: int
    expires_ns: int
    pieces: list[tuple[Words, NDArray[np.uint64]]] = []
    """Slots and generations, as they were pinned: distinct within a piece. A piece is longer than
    the next, but where a slot comes a second time: its block was cleared, and it holds another
    one."""

    @property
    def slot_count(self) -> int:
        """Slots pinned."""
        return sum(len(words) for words, _ in self.pieces)

    @property
    def block_count(self) -> int:
        """Blocks pinned."""
        return self.slot_count // self.shards

    @property
    def size_bytes(self) -> int:
        """Bytes that are counted for this lease."""
        return len(self.pieces) * LEASE_BYTES + self.slot_count * SLOT_BYTES

    def grow(self, words: Words, generations: NDArray[np.uint64]) -> None:
        """Add slots that were pinned. A lease that grows a thousand times has about ten pieces."""
        while self.pieces and len(self.pieces[-1][0]) <= len(words):
            if np.isin(words, self.pieces[-1][0]).any():
                break
            earlier = self.pieces.pop()
            words = np.concatenate([earlier[0], words])
            generations = np.concatenate([earlier[1], generations])
        self.pieces.append((words, generations))

    def intact(self, slots: Slots) -> NDArray[np.bool_]:
        """Flags of its blocks, true where no slot has changed since it was pinned."""
        same = [slots.generation[words] == generations for words, generations in self.pieces]
        flags: NDArray[np.bool_] = np.concatenate(same).reshape(-1, self.shards).all(axis=1)
        return flags


class Leases:
    """All leases of a node, by (session, lease id)."""

    def __init__(self, slots: Slots, config: EngineConfig) -> None:
        self._slots = slots
        self._ttl_ns = config.lease_ttl_ms * NS_PER_MS
        self._count_max = config.lease_count_max
        self._by_session: dict[int, dict[int, Lease]] = {}
        self._bytes_of = Counts[int]()
        """Bytes counted by session; only sessions that have leases."""
        self._agenda = Agenda[tuple[int, int]]()
        self.ended: Callable[[tuple[int, int]], None] = lambda _: None
        """Called with (session, lease id) of each lease of an engine that has ended."""

    def __len__(self) -> int:
        return sum(len(leases) for leases in self._by_session.values())

    def may_add(self, session: int, lease: int) -> bool:
        """Whether a session may get a lease with this id: False when its share is used up, or it
        holds this id."""
        held = self._by_session.get(session, {})
        if lease in held or len(held) >= self._count_max:
            return False
        return self._room(session) >= LEASE_BYTES

    def fitting(self, session: int, account: Account, words: Words, shards: int) -> int:
        """Number of leading blocks that may be leased. `words` are sealed slots, [n][shards]."""
        room = max(self._room(session) - LEASE_BYTES, 0) // (SLOT_BYTES * shards)
        return min(self._slots.pins.fitting(account, words, shards), room)

    def _room(self, session: int) -> int:
        its = self._bytes_of[session]
        return min(SESSION_BYTES_MAX, (BYTES_MAX - self._bytes_of.total() + its) // 2) - its

    def add(
        self, session: int, lease: int, words: Words, now_ns: int, account: Account, shards: int
    ) -> Lease:
        """Make a lease that pins these slots, [n][shards] and distinct. The account has room
        (`Pins.fitting`)."""
        expires_ns = now_ns + self._ttl_ns
        made = Lease(account, shards, now_ns, expires_ns)
        self._by_session.setdefault(session, {})[lease] = made
        self._agenda.put((session, lease), expires_ns)
        self._pin(session, made, words)
        return made

    def get(self, session: int, lease: int) -> Lease | None:
        """The lease with this id, if the session holds it."""
        return self._by_session.get(session, {}).get(lease)

    def extend(self, session: int, lease: int, words: Words) -> None:
        """Pin more slots under a held lease; these are distinct."""
        if len(words):
            self._pin(session, self._by_session[session][lease], words)

    def renew(self, session: int, leases: list[int], now_ns: int) -> None:
        """Let leases last one ttl from now, and LEASE_LIVES_MAX of them after their grant at most;
        unknown ones are ignored."""
        held = self._by_session.get(session, {})
        for lease in leases:
            found = held.get(lease)
            if found is not None:
                last_ns = found.granted_ns + LEASE_LIVES_MAX * self._ttl_ns
                found.expires_ns = min(now_ns + self._ttl_ns, last_ns)

    def release(self, session: int, leases: list[int]) -> None:
        """Release leases; unknown ones are ignored."""
        held = self._by_session.get(session, {})
        for lease in leases:
            found = held.pop(lease, None)
            if found is not None:
                self._end(session, lease, found)
        if not held:
            self._by_session.pop(session, None)

    def end_session(self, session: int) -> None:
        """Release all leases of a session."""
        for number, lease in self._by_session.pop(session, {}).items():
            self._end(session, number, lease)

    def expire(self, now_ns: int) -> list[tuple[int, int]]:
        """Release the leases whose time is up; returns (session, lease id) of each."""
        expired = []
        while (name := self._agenda.take(now_ns)) is not None:
            session, number = name
            lease = self._by_session[session][number]
            if lease.expires_ns <= now_ns:
                self.release(session, [number])
                expired.append(name)
            else:
                self._agenda.put(name, lease.expires_ns)
        return expired

    def items(self) -> list[tuple[int, int, Lease]]:
        """(session, lease id, lease) of every lease."""
        return [
            (session, number, lease)
            for session, held in self._by_session.items()
            for number, lease in held.items()
        ]

    def _pin(self, session: int, lease: Lease, words: Words) -> None:
        self._slots.pins.pin(words, lease.account)
        counted_bytes = lease.size_bytes
        lease.grow(words, self._slots.generation[words])
        self._bytes_of[session] += lease.size_bytes - counted_bytes

    def _end(self, session: int, number: int, lease: Lease) -> None:
        self._bytes_of.drop(session, lease.size_bytes)
        self._agenda.drop((session, number))
        for words, generations in lease.pieces:
            held = self._slots.generation[words] == generations
            self._slots.pins.unpin(words[held], lease.account)
        self._slots.retry_starved()
        if session > 0:
            self.ended((session, number))

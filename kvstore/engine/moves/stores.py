"""Stores: credits out, seals in, copies that turned out bad.

A store never waits: credits are free slots that were granted before they are needed.
A granted slot comes back by its writer's Seal or Drop, which count only if connection, session and
generation are those of the grant. Duplicate stores are joined: the first seal of a (space, shard,
key) wins, the other slot is free again.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.shares import QuotaGroup
from kvstore.engine.memory.slots import Pool, SlotState
from kvstore.engine.moves.intake import Copies, Intake
from kvstore.engine.sessions.owners import Connection, Owner, OwnerGroup
from kvstore.engine.state import State
from kvstore.engine.why.reasons import Reason
from kvstore.errors import ProtocolError
from kvstore.wire import messages as wire
from kvstore.wire.space import GROUPS_MAX

CREDIT_PART = 4
"""With quotas, a group may have one part in this many of its share granted."""


class Stores:
    """Grants credits to engines, and handles their Seal, Drop, Distrust and Verified."""

    def __init__(self, state: State, intake: Intake) -> None:
        self._state = state
        self._intake = intake
        self._counted: list[int] = []
        self._sharing_slots: dict[frozenset[int], int] = {}
        """Number of counted sessions that use one of these slot sizes, by set of sizes."""
        self._sharing_quota: Counter[QuotaGroup] = Counter()

    def drop(self, connection: Connection, message: wire.Drop) -> None:
        """Free granted slots that were not written."""
        words, valid = self._valid(connection, message)
        words = np.unique(words[valid])
        self._state.counters.stores_dropped += len(words)
        self._ungrant(connection.owner, words, message)

    def _valid(
        self, connection: Connection, message: wire.Seal | wire.Drop
    ) -> tuple[Words, NDArray[np.bool_]]:
        slots = wire.slots_array(message.slots)
        words, known = self._state.slots.words_of(slots)
        valid = (
            known
            & (message.session % GROUPS_MAX == 0)  # else another group's sum
            & (self._state.slots.writer[words] == connection.id)
            & (self._state.slots.state[words] == SlotState.GRANTED)
            & (self._state.slots.generation[words] == wire.generations_array(message.generations))
            & (self._state.slots.session[words] == message.session + message.group)
        )
        self._state.counters.stale_slots += int((~valid).sum())
        return words, valid

    def seal(self, connection: Connection, message: wire.Seal) -> None:
        """Publish the blocks of a Seal whose grants are valid. Raises ProtocolError."""
        owner, hello = connection.owner, connection.hello
        assert isinstance(hello, wire.HelloRank)
        words, valid = self._valid(connection, message)
        keys = wire.keys_array(message.keys)
        if len(np.unique(np.frombuffer(message.keys, dtype="V32"))) != len(keys) or len(
            np.unique(words[valid])
        ) != int(valid.sum()):
            raise ProtocolError("a Seal that names a key or slot twice")
        if not owner.open_session or message.session != owner.open_session:
            self._ungrant(owner, words[valid], message)
            return
        group = owner.group_of(message)
        if hello.rank not in group.writers:
            raise ProtocolError("a Seal from a rank that does not write its shard")
        if self._state.is_off(*group.asker.address):
            self._ungrant(owner, words[valid], message)
            self._state.counters.stores_dropped += int(valid.sum())
            return
        owner.sealed_ns = self._state.now_ns
        words, keys = words[valid], keys[valid]
        checksums = wire.checksums_array(message.checksums)[valid]
        column = group.writers.index(hello.rank)
        copies = Copies(group.asker.scopes[column], keys, words, checksums)
        block_bytes = group.asker.block_bytes[column]
        taken = int(self._intake.store(copies, block_bytes=block_bytes).sum())
        if not column:
            self._state.curve.see_stored(group.asker, keys)
        group.granted_slots -= len(words)
        self._state.counters.stores_joined += len(words) - taken
        self._state.counters.stores_sealed += taken
        self._state.counters.stored_bytes += taken * block_bytes
        tenant, known = owner.key[0], self._state.known.get(group.asker.address)
        if known is not None and taken:
            self._state.ledger.stored((known.label, tenant), taken * block_bytes)

    def _ungrant(self, owner: Owner, words: Words, message: wire.Seal | wire.Drop) -> None:
        self._state.free(words)
        if len(words) and message.session == owner.open_session:
            owner.groups[message.group].granted_slots -= len(words)

    def distrust(self, connection: Connection, message: wire.Distrust) -> None:
        """Forget copies whose bytes failed their checksum. Only copies that this engine can read
        count: no engine may empty another model's or tenant's cache."""
        words = self._readable(connection, message)
        self._state.counters.blocks_distrusted += len(words)
        self._state.empty(words, self._state.stamp(Reason.FAILED_CHECK))

    def verified(self, connection: Connection, message: wire.Verified) -> None:
        """Mark copies whose bytes passed their checksum as verified. Only copies that this engine
        can read count."""
        words = self._readable(connection, message)
        self._state.counters.blocks_verified += int(self._state.residency.unverified[words].sum())
        self._state.residency.unverified[words] = False

    def _readable(self, connection: Connection, message: wire.Distrust | wire.Verified) -> Words:
        """Slots of the message whose named generation is still sealed there and whose block the
        engine can read."""
        generations = wire.generations_array(message.generations)
        words = self._state.slots.sealed_still(wire.slots_array(message.slots), generations)
        rows = self._state.residency.row_of_word[words]
        scopes = [s for group in connection.owner.groups for s in group.asker.scopes]
        own = np.isin(self._state.residency.table.scopes[rows], scopes)
        return words[own]

    def grant_all(self) -> None:
        """Top up credits of sessions that used half of theirs."""
        if not self._state.credits_due:
            return
        self._state.credits_due = self._state.slots.pins.is_short = False
        groups = self._state.open_groups()
        active = {size for group in groups for size in group.asker.slot_sizes}
        self._state.slots.forget_pools(keep=active)
        self._count_sharing(groups)
        for group in groups:
            is_on = not self._state.is_off(*group.asker.address)
            if is_on and (wanted := self._credits_wanted(group)):
                self._grant(group, wanted, active)

    def _credits_wanted(self, group: OwnerGroup) -> int:
        """Number of blocks to grant to a group; 0 while more than half of its credits are left."""
        slots, config, sizes = self._state.slots, self._state.config, group.asker.slot_sizes
        counts, quota = Counter(sizes), group.asker.quota
        capacity = min(self._reachable(slots.pools[its]) // n for its, n in counts.items())
        share = int(capacity * config.credit_share) // self._sharing_slots[frozenset(counts)]
        target = max(1, min(share, config.credit_blocks_max))
        if slots.quotas.any:
            # Grants cannot be taken back, so they stay well below a small share.
            limit = int(slots.quotas.share[quota]) // CREDIT_PART // sum(sizes)
            target = min(target, max(1, limit // self._sharing_quota[quota]))
        return target - group.granted_blocks if group.granted_blocks <= target // 2 else 0

    def _reachable(self, pool: Pool) -> int:
        """Number of slots that this pool has or can get: its own, or those of an equal part of the
        arena."""
        part = self._state.slots.slabs_ready // max(len(self._state.slots.pools), 1)
        return max(pool.capacity, part * pool.slots_per_slab, pool.slots_per_slab)

    def _count_sharing(self, groups: list[OwnerGroup]) -> None:
        """Count the groups that share slots and quotas, again only when the groups changed: credits
        are looked at on nearly every step. Hundreds of sessions have few kinds of slots."""
        numbers = [group.session for group in groups]
        if numbers == self._counted:
            return
        self._counted = numbers
        kinds = Counter(frozenset(group.asker.slot_sizes) for group in groups)
        self._sharing_slots = {
            mine: sum(count for kind, count in kinds.items() if kind & mine) for mine in kinds
        }
        self._sharing_quota = Counter(group.asker.quota for group in groups)

    def _grant(self, group: OwnerGroup, wanted: int, active: set[int]) -> None:
        owner, index = group.owner, group.session - group.owner.open_session
        sizes, quota = group.asker.slot_sizes, group.asker.quota
        wanted = min(wanted, wire.KEYS_PER_DATAGRAM_MAX // len(sizes))
        assert owner.scheduler is not None
        pins, block_bytes = self._state.slots.pins, sum(sizes)
        room = pins.room(pins.account(owner.scheduler.id), quota, block_bytes)
        # Credits and what is left are halves: blocks are to stay in it, and to be leased.
        may = max(0, (room // block_bytes - group.granted_blocks + 1) // 2)
        ranks = [owner.ranks[rank].id for rank in group.writers]
        may = min(may, pins.writable(list(zip(ranks, sizes, strict=True)), quota))
        pins.is_short |= may < wanted
        wanted = min(wanted, may)
        self._state.make_room_for(Reason.EVICTED_FOR_STORES, group.asker.title)
        count = self._intake.room(sizes, wanted, quota, active)
        if count == 0:
            self._state.counters.grants_refused += 1
            return
        columns = self._intake.hold(group.asker, count, ranks, session=group.session)
        words = np.stack(columns, axis=1).reshape(-1)
        group.granted_slots += len(words)
        self._state.counters.blocks_granted += count
        slots = self._state.slots.slots_of(words).astype("<u4").tobytes()
        generations = self._state.slots.generation[words].astype("<u8").tobytes()
        self._state.send(
            owner.scheduler, wire.Grant(owner.open_session, slots, generations, group=index)
        )

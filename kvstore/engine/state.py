"""State that the engine's parts share: the tables, the clock of this step, the commands so far; and
how it begins with what an earlier process left.

Holds no decision. `sessions`, `stores` and `lookups` decide; `engine` dispatches to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine import events
from kvstore.engine.config import EngineConfig
from kvstore.engine.memory.journal import Journal
from kvstore.engine.memory.policies import Words, prints
from kvstore.engine.memory.residency import Change, Offers, Residency, Run
from kvstore.engine.memory.shares import Account
from kvstore.engine.memory.slots import Slots
from kvstore.engine.memory.table import Rows
from kvstore.engine.moves.jobs import Paces
from kvstore.engine.sessions.leases import Leases
from kvstore.engine.sessions.owners import (
    REFUSED_COUNT_MAX,
    Connection,
    Owner,
    OwnerGroup,
    OwnerKey,
    Refusal,
)
from kvstore.engine.why.curve import Ages, Curve
from kvstore.engine.why.findings import Trail
from kvstore.engine.why.ledger import Ledger
from kvstore.engine.why.reasons import Names, Reason, stamp
from kvstore.tier_events import RaiseGenerations
from kvstore.types import ConnectionId, Latest, Shard, SpaceId, Tier
from kvstore.wire.messages import Message
from kvstore.wire.space import Space, is_prefix

# ── counters ──────────────────────────────────────────────────────────────────────────────────────
# Counts since the start of the node. Read by /metrics; only the engine adds.


class Counters(msgspec.Struct):
    """Counts since the start of the node; the unit of each is in its name."""

    blocks_distrusted: int = 0
    blocks_granted: int = 0
    blocks_kept: int = 0
    blocks_verified: int = 0
    evictions: int = 0
    fetch_blocks_lost: int = 0
    fetched_blocks: int = 0
    file_blocks_crowded: int = 0
    file_blocks_damaged: int = 0
    file_blocks_not_admitted: int = 0
    file_blocks_over_budget: int = 0
    file_blocks_read: int = 0
    file_blocks_unread: int = 0
    file_blocks_written: int = 0
    file_reads_late: int = 0
    file_writes_dropped: int = 0
    grants_refused: int = 0
    hbm_blocks_demoted: int = 0
    hbm_blocks_dropped: int = 0
    hbm_blocks_leased: int = 0
    hbm_blocks_promoted: int = 0
    lease_asks: int = 0
    leased_bytes: int = 0
    leases_expired: int = 0
    served_bytes: int = 0
    served_blocks_changed: int = 0
    served_blocks: int = 0
    servings_expired: int = 0
    locates: int = 0
    pins_refused: int = 0
    prepared_blocks: int = 0
    prepares: int = 0
    protocol_refusals: int = 0
    push_blocks_damaged: int = 0
    push_blocks_landed: int = 0
    push_words_dropped: int = 0
    pushed_blocks: int = 0
    pushed_bytes: int = 0
    pushes_cut_short: int = 0
    sessions_opened: int = 0
    shadow_blocks: int = 0
    shadow_blocks_diverged: int = 0
    slots_quarantined: int = 0
    stale_slots: int = 0
    stored_bytes: int = 0
    stores_dropped: int = 0
    stores_joined: int = 0
    stores_sealed: int = 0


# ── state ─────────────────────────────────────────────────────────────────────────────────────────


KNOWN_SPACES_MAX = 1024


class KnownSpace(msgspec.Struct, frozen=True):
    """A space, as reported by an engine."""

    space: Space
    scopes: tuple[int, ...]
    """Scopes of the engine's session, by column."""
    label: str


class Off(msgspec.Struct):
    """A space that is switched off (`trust`)."""

    tier: Tier | None
    """Tier that is off for the space; None: all."""
    is_empty: bool = False
    """Whether all blocks of the space have been cleared."""


class State:
    """All state of one node's engine."""

    def __init__(self, config: EngineConfig, journal: Journal | None) -> None:
        """`journal`: None makes one that does not outlive this process."""
        self.config, self.counters = config, Counters()
        self.numbers = itertools.count(1)
        """Numbers of jobs, queries to the index, expectations and grants, of all kinds together."""
        self.slots = Slots(config, journal)
        self.journal = self.slots.journal
        self.memories = {Tier.DRAM: self.slots}
        """Slots of each memory."""
        self.hbm: Slots | None = None
        """Slots of hbm, whose policy is the least recently used; None: there is none."""
        if config.hbm is not None:
            self.hbm = Slots(config.of_hbm(config.hbm))
            self.hbm.ready(config.hbm.size_bytes)
            self.memories[Tier.HBM] = self.hbm
        self.curve = Curve(config.policy, config.arena_bytes - config.landing_bytes)
        self.trail = Trail(block_count_max=config.block_count_max)
        self.ledger, self.ages = Ledger(), {tier: Ages() for tier in (Tier.DRAM, Tier.FILE)}
        self.residency = Residency(config, self.journal, self.trail.tombstones)
        self.leases = Leases(self.slots, config)
        self.paces = Paces(config.learned)
        self.owners: dict[OwnerKey, Owner] = {}
        self.connections: dict[ConnectionId, Connection] = {}
        self.refusals = Latest[OwnerKey, Refusal](REFUSED_COUNT_MAX)
        self.known = Latest[tuple[str, SpaceId], KnownSpace](KNOWN_SPACES_MAX)
        """Spaces by (tenant, space), as in the latest session; at most KNOWN_SPACES_MAX."""
        self.offers = Offers(self.residency, self.geometry)
        self.off: dict[tuple[str, SpaceId], Off] = {}
        """Spaces that are switched off, by (tenant, space)."""
        self.names = Names()
        """Names of engines and spaces, for tombstones."""
        self.room_for = (Reason.EVICTED_FOR_STORES, 0)
        """(reason, number of an engine's name) that blocks evicted from now on are marked with."""
        self.now_ns = 0
        self.tick = events.Tick()
        """The last one, for what it said of the disk tier."""
        self.commands: list[events.Command] = []
        self.hung_up: set[ConnectionId] = set()
        """Connections hung up in this step: messages queued from them are ignored."""
        self._published_unknown: set[tuple[str, SpaceId]] = set()
        """Spaces with changes published before an engine had described the space."""
        self.credits_due = True
        """Whether to grant credits at the end of this step, because a change may allow it."""

    def next_event(self) -> None:
        """Another event is handled from now on."""
        for slots in self.memories.values():
            slots.cause += 1

    def attached(self) -> list[Connection]:
        """Attached processes. Ended ones that only keep slots in quarantine do not count."""
        return [each for each in self.connections.values() if not each.ended]

    def say(self, command: events.Command) -> None:
        """Append a command."""
        if isinstance(command, events.Hangup):
            self.hung_up.add(command.connection)
        self.commands.append(command)

    def send(self, connection: Connection, message: Message) -> None:
        """Send a message to a process, unless its socket has ended; generations that were raised go
        first."""
        if not connection.ended:
            self.publish_generations()
            self.commands.append(events.Send(connection.id, message))

    def publish_generations(self) -> None:
        """Send raised generations before any command that shows the slots."""
        for tier, slots in self.memories.items():
            if slots.raised:
                words = np.concatenate(slots.raised)
                slots.raised.clear()
                raised = slots.slots_of(words), slots.generation[words]
                self.commands.append(RaiseGenerations(*raised, tier))

    def tell_changes(self) -> None:
        """Append commands for what the tiers gained and lost in this step, as far as wanted."""
        changes = self.residency.take_changes()
        if self.config.tell_changes:
            self.commands += self.in_words(changes)
        if self.config.tell_offers:
            self.commands += self.offers.offers_of(changes)

    def in_words(self, changes: Iterable[Change]) -> Iterator[events.Changed]:
        """`changes` as Changed commands, with the label and block size of their spaces. Readers
        take any block for a part of a prefix, so blocks of windows and recurrent layers are left
        out."""
        for change in changes:
            tenant, space, _ = change.scope
            known = self.known.get((tenant, space))
            if known is None:
                self._published_unknown.add((tenant, space))
            elif not is_prefix(known.space) and (
                change.stored or (tenant, space) not in self._published_unknown
            ):
                continue
            label, block_tokens = (known.label, known.space.block_tokens) if known else ("", 0)
            its = change.tier, change.stored, change.scope, change.keys
            yield events.Changed(*its, label, block_tokens)

    def know(self, address: tuple[str, SpaceId], known: KnownSpace) -> None:
        """Record the space of a session that opened, in `known` and in the journal. When `known` is
        full, a space without an open session goes first, the one that has had none for longest."""
        is_new = address not in self.known
        if self.config.tell_offers and is_new and self.offers.any_held(address):
            self.say(events.OffersUntold())
        if is_new:
            in_use = {group.asker.address for group in self.open_groups()}
            for each in [its for its in self.known if its in in_use]:
                self.known.move_to_end(each)
        self.known[address] = known
        shards = [self.residency.address(scope)[2] for scope in known.scopes]
        self.journal.spaces.remember(address, known.label, shards, known.space)

    def geometry(self, address: tuple[str, SpaceId]) -> tuple[int, int] | None:
        """Layers and heads of a space's model; None if no engine reported them to any process."""
        known = self.known.get(address)
        return (known.space.layer_count, known.space.kv_head_count) if known else None

    def is_off(self, tenant: str, space: SpaceId, tier: Tier = Tier.DRAM) -> bool:
        """Whether a tier may neither serve nor store blocks of this space."""
        off = self.off.get((tenant, space)) if self.off else None
        return off is not None and (off.tier in (None, tier) or not off.is_empty)

    def is_scope_off(self, scope: int, tier: Tier = Tier.DRAM) -> bool:
        """Whether a tier may neither serve nor store blocks of this scope (`is_off`)."""
        return bool(self.off) and self.is_off(*self.residency.address(scope)[:2], tier)

    def forget_unused_scopes(self) -> None:
        """Drop scopes that neither blocks nor sessions use, when there are many. Called before a
        scope is made."""
        groups = (group for owner in self.owners.values() for group in owner.groups)
        self.residency.forget_unused_scopes(
            keep={scope for group in groups for scope in group.asker.scopes}
        )

    def open_groups(self) -> list[OwnerGroup]:
        """KV cache groups of all open sessions."""
        open_ones = (owner for owner in self.owners.values() if owner.open_session)
        return [group for owner in open_ones for group in owner.groups]

    def active_sizes(self) -> set[int]:
        """Slot sizes that open sessions use."""
        return {size for group in self.open_groups() for size in group.asker.slot_sizes}

    def leasable(self, session: int, account: Account, run: Run) -> tuple[Run, int]:
        """The part of a run that a session may lease, and the number of blocks it may not."""
        shards = max(len(run.words_by_shard), 1)
        fits = self.leases.fitting(session, account, run.words(), shards)
        self.counters.pins_refused += run.count - fits
        return run.cut(fits), run.count - fits

    def touch(self, run: Run) -> None:
        """Make the blocks of a run the newest: the request that used them before asks again."""
        for words in run.words_by_shard:
            self.slots.touch(words[: run.count])

    def free(self, words: Words) -> None:
        """Free slots that hold no block."""
        if len(words):
            self.slots.free(words)
            self.credits_due = True

    def stamp(self, why: Reason, name: int = 0) -> int:
        """Tombstone stamp for blocks that leave now: reason, number of an engine's name, time."""
        return stamp(why, name, self.now_ns)

    def empty(self, words: Words, stamp: int) -> None:
        """Drop the blocks of sealed slots and free the slots; `stamp` has the reason. Readers with
        a lease see the generation change."""
        if len(words):
            if self.hbm is not None:
                copies = self.residency.hbm_of_word[words].astype(np.int64)
                self.drop_copies(copies[copies >= 0])
            self.counters.file_blocks_crowded += self.residency.drop_dram(words, stamp)
            self.free(words)

    def drop_copies(self, words: Words) -> None:
        """Drop the copies in these slots of hbm and free the slots."""
        if len(words):
            assert self.hbm is not None
            self.residency.drop_hbm(words)
            self.hbm.free(words)

    def named(self, rows: Rows, words: Words) -> tuple[bytes, NDArray[np.uint32], bytes]:
        """Keys, slots and checksums of these rows' blocks, in or on their way to these slots: as
        commands name the blocks."""
        residency = self.residency
        keys, checksums = residency.table.keys[rows], residency.checksum[rows]
        return keys.tobytes(), self.slots.slots_of(words), checksums.tobytes()

    def make_room_for(self, why: Reason, title: str) -> None:
        """Set the reason of evictions from now on, and the engine's title."""
        self.room_for = (why, self.names.number(title))

    def evict(self, words: Words) -> None:
        """Evict the blocks of these slots, for the reason set by `make_room_for`."""
        self.counters.evictions += len(words)
        self.ages[Tier.DRAM].evicted(np.abs(self.slots.stamps[words]), self.now_ns)
        self.empty(words, self.stamp(*self.room_for))


# ── adoption ──────────────────────────────────────────────────────────────────────────────────────
# An earlier process's journal becomes this engine's state.
#
# Valid rows are blocks in dram again, in their order of use. A slot that a process may still write
# to is quarantined as if its socket had ended just now, until that process attaches again or is
# gone (ADR 3); a slot with an unreadable writer stays so. Every other slot is free, with a
# generation that it never had. Descriptions of spaces are kept: their blocks are offered, served to
# other nodes and scrubbed before an engine attaches again.
#
# Lost: leases and sessions, whose processes are gone; history of evicted blocks, of requests, and
# of blocks used twice (`policies.Reuse`). Blocks on disk are reported by the disk tier, as after
# any start.

CHUNK_BLOCKS = 1 << 13
"""Number of rows taken over at a time, so that they stay in the CPU's cache."""


def adopt(state: State, event: events.Adopt) -> None:
    """Set up the state of an engine from the journal in `event`, its first event."""
    found, residency = event.found, state.residency
    assert not state.connections, "something happened before the journal was taken over"
    assert len(residency.table) == 0, "something happened before the journal was taken over"
    numbers: dict[int, int] = {}
    named = np.zeros(len(found.words), dtype=np.uint64)
    for begin in range(0, len(found.words), CHUNK_BLOCKS):
        chunk = slice(begin, begin + CHUNK_BLOCKS)
        words, scopes = found.words[chunk], found.scopes[chunk]
        keys, checksums = state.journal.blocks(words)
        for id in np.unique(scopes).tolist():
            if id not in numbers:
                numbers[id] = residency.scope(*found.addresses[id])
            its = np.flatnonzero(scopes == id)
            named[begin + its] = prints(numbers[id], keys[its])
            rows = residency.table.insert(numbers[id], keys[its])
            residency.adopt_dram(rows, words[its], checksums[its])
    for each in found.spaces:
        columns = tuple(residency.scope(*each.address, Shard(*shard)) for shard in each.shards)
        state.known[each.address] = KnownSpace(each.space, columns, each.label)
    state.journal.settle(found, numbers)
    state.slots.adopt(found, named)
    state.counters.blocks_kept = len(found.words)
    state.counters.slots_quarantined += len(found.held) + len(found.doubtful)
    for writer in event.writers:
        hello = writer.hello
        owner = Owner((hello.tenant, hello.engine_id, hello.nonce))
        connection = Connection(writer.connection, hello, owner)
        connection.ended = True
        if len(state.slots.of_writer(connection.id)):
            state.connections[connection.id] = connection
            state.slots.pins.join_engine(connection.id, owner.key, writer.process or connection.id)
        else:
            state.say(events.Release(connection.id))
    state.credits_due = True

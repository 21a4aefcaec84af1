"""Slots: writer and readers of each piece of the arena, and the sizes it is cut into.

    arena ─ slabs of equal size ─ each slab given to one pool ─ slots of the pool's size

Every change of state, owner, generation or lease count of a slot is here.

        grant             seal
    FREE ────▶ GRANTED ────────▶ SEALED        free: raises the generation, from every state
      ▲           │ lose (socket ended, process lives)
      │           ▼
      └────── QUARANTINED

A slot is named by its word: the number of its generation word, slot // PAGES_PER_GENERATION.
Does not cover: block of a slot (`residency`), time of evictions (`moves.intake`, `policies`).
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.config import EngineConfig
from kvstore.engine.memory.journal import UNREADABLE, Journal, JournalContents
from kvstore.engine.memory.policies import (
    NONE,
    Expected,
    Mask,
    Policy,
    Prints,
    Stamps,
    Words,
    maker,
)
from kvstore.engine.memory.shares import OTHERS, Pins, QuotaGroup, Quotas
from kvstore.engine.memory.table import tallied
from kvstore.types import PAGE_BYTES, PAGES_PER_GENERATION, SLOT_BYTES_MIN, Counts

# ── writers ───────────────────────────────────────────────────────────────────────────────────────
# Writer of each slot, and slots of each writer: both answers cost their own length.
#
# A look at the whole column takes 13 ms with 1 TiB of slots, and any rank could ask for one with a
# datagram. So each writer has a list of its granted slots; returned ones are dropped from the list
# when they are half of it. Does not cover: the journal, states (`slots`).

_SPARE = 1024
"""A writer's list is cleaned only if it has more returned slots than this, besides half of it."""


class Writers:
    """Writer of each word (0: none), and slots of each writer."""

    def __init__(self, word_count: int) -> None:
        self.column = np.zeros(word_count, dtype=np.int64)
        self.counts = Counts[int]()
        """Number of slots of each writer that has any."""
        self._given: dict[int, list[Words]] = {}
        """Batches granted to each of these. Some slots may be returned since, or occur twice."""
        self._given_count: Counter[int] = Counter()
        """Number of slots in these batches."""

    def name(self, words: Words, writer: int) -> None:
        """Set the writer of these distinct slots; 0: none."""
        if not len(words):
            return
        before = self.column[words]
        self.column[words] = writer
        for old, count in tallied(before[before != 0]):
            if self.counts.drop(old, count):
                del self._given_count[old]
                self._given.pop(old, None)
        if writer:
            self._give(words, writer)

    def of(self, writer: int) -> Words:
        """Slots of this writer, ascending."""
        if not self.counts.get(writer):
            return NONE
        return self._tidied(writer)

    def _give(self, words: Words, writer: int) -> None:
        self.counts[writer] += len(words)
        self._given.setdefault(writer, []).append(words)
        self._given_count[writer] += len(words)
        if self._given_count[writer] > 2 * self.counts[writer] + _SPARE:
            self._tidied(writer)

    def _tidied(self, writer: int) -> Words:
        words: Words = np.unique(np.concatenate(self._given[writer]))
        words = words[self.column[words] == writer]
        self._given[writer], self._given_count[writer] = [words], len(words)
        return words


# ── slots ─────────────────────────────────────────────────────────────────────────────────────────

FILE_WRITER = -1
"""Writer of slots that the disk tier reads into; connections count from 1. This writer ends with
the node process: the next one finds these slots free."""
PEER_WRITER = -2
"""Writer of slots that the transfer worker fetches into. This writer ends before the next process
of the node begins (`node.warm`), which finds these slots free."""
UNKNOWN_WRITER = -15
"""Writer of slots whose writer in the journal is unreadable: these slots are never free again."""
_HISTORY_BATCHES = 256


class SlotState(enum.IntEnum):
    """State of a slot. Words inside a slot, or in no slab yet, stay FREE."""

    FREE = 0
    GRANTED = 1
    SEALED = 2
    QUARANTINED = 3


class SlotEvent(enum.Enum):
    """Transitions of a slot."""

    GRANT = "grant"
    SEAL = "seal"
    LOSE = "lose"
    FREE = "free"


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.GRANT): SlotState.GRANTED,
    (SlotState.GRANTED, SlotEvent.SEAL): SlotState.SEALED,
    (SlotState.GRANTED, SlotEvent.LOSE): SlotState.QUARANTINED,
    (SlotState.GRANTED, SlotEvent.FREE): SlotState.FREE,
    (SlotState.SEALED, SlotEvent.FREE): SlotState.FREE,
    (SlotState.QUARANTINED, SlotEvent.FREE): SlotState.FREE,
}
"""State after each event; a pair that is missing is a bug and raises."""

_ILLEGAL = 255
_NEXT = {
    event: np.array(
        [TRANSITIONS.get((state, event), _ILLEGAL) for state in SlotState], dtype=np.uint8
    )
    for event in SlotEvent
}


class Pool(msgspec.Struct, eq=False):
    """All slots of one size."""

    slot_bytes: int
    slots_per_slab: int
    policy: Policy
    slabs: set[int] = set()
    free: list[int] = []
    """Words of free slots; the last one is granted next."""
    is_starved: bool = False
    """Whether the last try to free a slot found no victim; none is made again until a change."""
    starved_asker: QuotaGroup = OTHERS
    """The group of that try: another one may find victims."""

    @property
    def capacity(self) -> int:
        return len(self.slabs) * self.slots_per_slab


class Slots:
    """The arena's slots, in columns by word."""

    def __init__(self, config: EngineConfig, journal: Journal | None = None) -> None:
        """`journal`: None makes one that does not outlive this process."""
        arena_bytes, slab_bytes, quotas = config.arena_bytes, config.slab_bytes, config.quotas
        assert slab_bytes % SLOT_BYTES_MIN == 0, "slabs are whole generation words"
        if journal is None:
            journal = Journal.fresh(arena_bytes=arena_bytes, slab_bytes=slab_bytes, quotas=quotas)
        word_count = arena_bytes // SLOT_BYTES_MIN
        self.slab_bytes = slab_bytes
        self._words_per_slab = slab_bytes // SLOT_BYTES_MIN
        self.slab_count = (arena_bytes - config.landing_bytes) // slab_bytes
        self.slabs_ready = 0
        self._slabs_free: deque[int] = deque()
        self._slabs_lost: set[int] = set()
        """Slabs with an unreadable slot size: never to be used."""
        self._slot_bytes_of_slab = np.zeros(self.slab_count, dtype=np.int64)
        self.state = np.zeros(word_count, dtype=np.uint8)
        self.counts = np.zeros(len(SlotState), dtype=np.int64)
        """Number of slots in each state; the count of FREE is only relative."""
        self.sealed_bytes = 0
        self.generation = np.full(word_count, config.first_generation, dtype=np.uint64)
        self.journal = journal
        self.writers = Writers(word_count)
        self.writer = self.writers.column
        """Writer of each slot while it is GRANTED or QUARANTINED: a connection, or a constant
        above."""
        self.session = np.zeros(word_count, dtype=np.int64)
        self.group = journal.groups
        """Group of the quota that a slot counts for, unless FREE."""
        self.quotas = Quotas(quotas, arena_bytes=arena_bytes - config.landing_bytes)
        self.leases = np.zeros(word_count, dtype=np.int32)
        self.pins = Pins(self)
        self.stamps = journal.stamps
        self._slot = np.arange(word_count, dtype=np.uint32) * np.uint32(PAGES_PER_GENERATION)
        """Id of the slot that begins in each word. Slots are packed at 4 KiB, so it is not always
        the word's first page."""
        self.next_stamp = 1
        """Stamp of the next use."""
        self._expected = Expected(key_count=word_count)
        self._make_policy = maker(config.policy, self.stamps)
        self.pools: dict[int, Pool] = {}
        self.cause = 0
        """Number of the event that is being handled, for the history."""
        self._history: deque[tuple[int, SlotEvent, Words]] = deque(maxlen=_HISTORY_BATCHES)
        self.raised: list[Words] = []
        """Words whose generation was raised and not yet published."""

    # ── names ────────────────────────────────────────────────────────────────────────────────────

    def slots_of(self, words: Words) -> NDArray[np.uint32]:
        """Slot ids (first pages) of words."""
        return self._slot[words]

    def words_of(self, slots: NDArray[np.uint32]) -> tuple[Words, NDArray[np.bool_]]:
        """Words of these slot ids, and a mask of ids that are slots of this arena."""
        words = slots.astype(np.int64) // PAGES_PER_GENERATION
        known = words < len(self.state)
        words = np.where(known, words, 0)
        return words, known & (self.slots_of(words) == slots)

    def sealed_still(self, slots: NDArray[np.uint32], generations: NDArray[np.uint64]) -> Words:
        """Distinct words of those of these slot ids that hold the block of the named generation."""
        words, known = self.words_of(slots)
        known &= (self.state[words] == SlotState.SEALED) & (self.generation[words] == generations)
        return np.unique(words[known])

    def pool_of(self, word: int) -> Pool:
        """The pool that a word's slab was given to; there must be one."""
        return self.pools[int(self._slot_bytes_of_slab[word // self._words_per_slab])]

    def sizes(self, words: Words) -> NDArray[np.int64]:
        """Bytes of these slots."""
        return self._slot_bytes_of_slab[words // self._words_per_slab]

    def weigh(self, words: Words) -> list[tuple[int, int]]:
        """Total bytes of these slots by group: [(group, bytes)]."""
        if not self.quotas.any:
            return [(OTHERS, self._bytes(words))]
        totals = np.bincount(self.group[words], weights=self.sizes(words))
        return [(group, int(total)) for group, total in enumerate(totals.tolist()) if total]

    def _bytes(self, words: Words) -> int:
        if len(self.pools) == 1:  # as on most nodes: nothing to look up
            return len(words) * next(iter(self.pools))
        return int(self.sizes(words).sum())

    # ── transitions ──────────────────────────────────────────────────────────────────────────────

    def _change(self, words: Words, event: SlotEvent) -> None:
        before = self.state[words]
        target = _NEXT[event][before]
        if bool((illegal := target == _ILLEGAL).any()):
            raise AssertionError(self._story(int(words[illegal][0]), event))
        self.state[words] = target
        self._history.append((self.cause, event, words))
        # An event has one state that it leads to.
        self.counts[target[:1]] += len(words)
        left = np.bincount(before, minlength=len(SlotState))
        self.counts -= left
        if event is SlotEvent.SEAL:
            self.sealed_bytes += self._bytes(words)
        elif sealed := int(left[SlotState.SEALED]):
            its = words if sealed == len(words) else words[before == SlotState.SEALED]
            self.sealed_bytes -= self._bytes(its)

    def _story(self, word: int, event: SlotEvent) -> str:
        past = [f"{c}:{e.value}" for c, e, words in self._history if word in words]
        return (
            f"slot word {word} is {SlotState(int(self.state[word])).name}, which knows no "
            f"{event.value}; its past (event:change): {', '.join(past) or 'not remembered'}"
        )

    def grant(
        self, pool: Pool, count: int, *, writer: int, session: int, quota: QuotaGroup = OTHERS
    ) -> Words:
        """Take `count` free slots of a pool for a writer; returns their words. The caller has
        checked that there are enough."""
        words = np.array(pool.free[-count:][::-1], dtype=np.int64)
        assert len(words) == count, "more granted than free"
        del pool.free[-count:]
        self._change(words, SlotEvent.GRANT)
        self.group[words] = quota
        self._name_writer(words, writer)
        self.session[words] = session
        self.quotas.held[quota] += count * pool.slot_bytes
        return words

    def seal(self, words: Words, prints: Prints, *, is_use: bool = False) -> None:
        """Mark slots of one pool as complete and readable. A block that a hint named takes the
        place in the order of use that the hint reserved. `is_use`: the blocks were brought for a
        request, which is their second use, not their first."""
        if not len(words):
            return
        self._change(words, SlotEvent.SEAL)
        self._name_writer(words, 0)
        pool = self.pool_of(int(words[0]))
        pool.is_starved = False
        words = words[::-1]
        if is_use:
            pool.policy.insert(words, self._new_stamps(len(words)), prints[::-1])
            pool.policy.use(words, self._places(prints)[::-1])
        else:
            pool.policy.insert(words, self._places(prints)[::-1], prints[::-1])

    def _name_writer(self, words: Words, writer: int) -> None:
        self.journal.name_writer(words, writer)
        self.pins.written(words, -1)
        self.writers.name(words, writer)
        self.pins.written(words, 1)

    def lose(self, words: Words) -> None:
        """Quarantine slots: their writer's socket ended, and its process may still write."""
        self._change(words, SlotEvent.LOSE)

    def free(self, words: Words) -> None:
        """Free slots from any state, and raise their generation."""
        if len(words) == 0:
            return
        self._change(words, SlotEvent.FREE)
        for group, size_bytes in self.weigh(words):
            self.quotas.held[group] -= size_bytes
        self._name_writer(words, 0)
        self.pins.freed(words)
        self.generation[words] += np.uint64(1)
        self.raised.append(words)
        slabs = words // self._words_per_slab
        sizes = self._slot_bytes_of_slab[slabs]
        for size in np.unique(sizes).tolist():
            pool = self.pools[size]
            its = words[sizes == size]
            pool.policy.forget(its)
            pool.free += its.tolist()
            pool.is_starved = False

    # ── order of use ─────────────────────────────────────────────────────────────────────────────

    def _new_stamps(self, count: int) -> Stamps:
        """`count` stamps greater than all before, ascending."""
        first = self.next_stamp
        self.next_stamp += count
        return np.arange(first, self.next_stamp)

    def _places(self, prints: Prints) -> Stamps:
        """Stamps of blocks that come in now, in chain order: reserved by a hint, or else new
        ones."""
        kept = self._expected.take(prints)
        return np.where(kept, kept, self._new_stamps(len(prints))[::-1])

    def use(self, pool: Pool, words: Words, prints: Prints) -> None:
        """Record that a request uses these blocks: `words` are their slots, of one pool, or -1 for
        absent ones, which get a place reserved. The first block counts as used last, so that a
        chain loses its end before its start, also when parts of it come later."""
        stamps, there = self._new_stamps(len(words))[::-1], words >= 0
        if there.any():
            pool.policy.use(words[there][::-1], stamps[there][::-1])
        self._expected.keep(prints[~there][::-1], stamps[~there][::-1])

    def touch(self, words: Words) -> None:
        """Make these blocks, in slots of one pool, the newest: the request that used them before
        asks again."""
        if len(words):
            pool = self.pool_of(int(words[0]))
            pool.policy.touch(words[::-1], self._new_stamps(len(words)))

    def oldest_stamp(self, pool: Pool) -> int | None:
        """Least stamp of a pool's blocks, leased or not; None without any."""
        stamps = self.stamps[self._members(pool.slot_bytes) & (self.stamps > 0)]
        return int(stamps.min()) if len(stamps) else None

    def victims(self, asker: QuotaGroup, pool: Pool, count: int) -> Words:
        """Sealed, unleased slots to free, in the order of the policy; at most `count`, from the
        groups that give way to `asker`."""
        if not self.quotas.any:
            return pool.policy.pop(count, self._evictable)
        found: list[Words] = []
        missing = count
        for giver in self.quotas.givers(asker, count * pool.slot_bytes):
            most = min(missing, self.quotas.spare_bytes(giver, asker) // pool.slot_bytes)
            if most:
                found.append(pool.policy.pop(most, self._evictable_of(giver)))
                missing -= len(found[-1])
        return np.concatenate(found) if found else NONE

    # ── slabs ────────────────────────────────────────────────────────────────────────────────────

    def pool(self, slot_bytes: int) -> Pool:
        """The pool for this slot size, made when new."""
        pool = self.pools.get(slot_bytes)
        if pool is None:
            slots_per_slab = self.slab_bytes // slot_bytes
            policy = self._make_policy(
                members=lambda: self._members(slot_bytes),
                slot_count_max=self.slab_count * slots_per_slab,
            )
            pool = self.pools[slot_bytes] = Pool(slot_bytes, slots_per_slab, policy)
        return pool

    def forget_pools(self, *, keep: set[int]) -> None:
        """Drop pools that have no slab, except those of the sizes in `keep`: every pool counts when
        slabs are shared out."""
        for size in [s for s, pool in self.pools.items() if not pool.slabs and s not in keep]:
            del self.pools[size]

    def _members(self, slot_bytes: int) -> Mask:
        """Mask of words in slabs of a pool."""
        return self.journal.words_of(self._slot_bytes_of_slab == slot_bytes)

    def _evictable(self, words: Words | slice) -> Mask:
        mask: Mask = (self.state[words] == SlotState.SEALED) & (self.leases[words] == 0)
        return mask

    def _evictable_of(self, group: QuotaGroup) -> Callable[[Words | slice], Mask]:
        return lambda words: self._evictable(words) & (self.group[words] == group)

    def ready(self, ready_bytes: int) -> None:
        """Make whole slabs usable up to `ready_bytes`, as far as the arena is backed by pages."""
        now = min(ready_bytes // self.slab_bytes, self.slab_count)
        arrived = range(self.slabs_ready, now)
        self._slabs_free.extend(slab for slab in arrived if slab not in self._slabs_lost)
        self.slabs_ready = max(self.slabs_ready, now)
        self.retry_starved()

    def retry_starved(self) -> None:
        """Let pools that found no victim look again, after a change."""
        for pool in self.pools.values():
            pool.is_starved = False

    @property
    def any_starved(self) -> bool:
        """Whether a pool waits for a victim, or a session for room to pin its credits."""
        return self.pins.is_short or any(pool.is_starved for pool in self.pools.values())

    def extend(self, pool: Pool) -> bool:
        """Cut a free slab into slots of the pool. Returns False if no slab is free."""
        if not self._slabs_free:
            return False
        pool.free[:0] = self._form(self._slabs_free.popleft(), pool)[::-1].tolist()
        pool.is_starved = False
        return True

    def _form(self, slab: int, pool: Pool) -> Words:
        """Cut a slab into a pool's slots; returns their words."""
        self._cut(slab, pool.slot_bytes)
        pool.slabs.add(slab)
        (pages,) = self._pages(pool, np.array([slab]))
        words: Words = pages // PAGES_PER_GENERATION
        self._slot[words] = pages
        return words

    def _cut(self, slab: int, slot_bytes: int) -> None:
        self.journal.cut(slab, slot_bytes)
        self._slot_bytes_of_slab[slab] = slot_bytes

    def words_in(self, slab: int) -> Words:
        """Words of all slots of a slab that has a pool."""
        pool = self.pool_of(slab * self._words_per_slab)
        return self.words_of_slabs(pool, np.array([slab])).reshape(-1)

    def words_of_slabs(self, pool: Pool, slabs: NDArray[np.int64]) -> Words:
        """Words of the slots in these slabs of a pool, [slabs][slots per slab]."""
        return self._pages(pool, slabs) // PAGES_PER_GENERATION

    def _pages(self, pool: Pool, slabs: NDArray[np.int64]) -> NDArray[np.int64]:
        """First pages of these slots."""
        within = np.arange(pool.slots_per_slab) * (pool.slot_bytes // PAGE_BYTES)
        return slabs[:, None] * (self.slab_bytes // PAGE_BYTES) + within

    def coldest_slab(
        self, pool: Pool, may_lose: NDArray[np.bool_] | None = None
    ) -> tuple[int, int] | None:
        """(slab, newest stamp in it) of the pool's slab that was used longest ago. Only slabs count
        whose slots are all free, or sealed, unleased and of groups flagged in `may_lose` (None: all
        groups)."""
        slabs = np.array(sorted(pool.slabs), dtype=np.int64)
        words = self.words_of_slabs(pool, slabs)
        in_use = (self.state[words] == SlotState.GRANTED) | (self.leases[words] != 0)
        in_use |= self.state[words] == SlotState.QUARANTINED
        if may_lose is not None:
            in_use |= (self.state[words] == SlotState.SEALED) & ~may_lose[self.group[words]]
        usable = np.flatnonzero(~in_use.any(axis=1))
        if len(usable) == 0:
            return None
        newest = self.stamps[words[usable]].max(axis=1)
        coldest = int(newest.argmin())
        return int(slabs[usable[coldest]]), int(newest[coldest])

    def take_slab(self, slab: int) -> None:
        """Take a slab, whose slots are all free, from its pool; it is free for any pool then."""
        words, pool = self.words_in(slab), self.pool_of(slab * self._words_per_slab)
        assert bool((self.state[words] == SlotState.FREE).all()), "a slab in use is taken"
        gone = set(words.tolist())
        pool.free = [word for word in pool.free if word not in gone]
        pool.slabs.remove(slab)
        self._cut(slab, 0)
        self._slabs_free.append(slab)

    def of_writer(self, writer: int) -> Words:
        """Slots that this connection may still write."""
        return self.writers.of(writer)

    # ── taken over ───────────────────────────────────────────────────────────────────────────────

    def adopt(self, found: JournalContents, prints: Prints) -> None:
        """Take over slots of an earlier process: blocks as sealed, and slots whose writers' sockets
        are gone as quarantined. Must be the first call. Valid parts of the journal stay untouched,
        because this process may die at any moment, too."""
        in_use = np.concatenate([found.words, found.held, found.doubtful])
        used = np.unique(in_use // self._words_per_slab)
        self._slabs_lost = set(np.flatnonzero(found.slot_bytes == UNREADABLE).tolist())
        if len(used):
            self.ready((int(used[-1]) + 1) * self.slab_bytes)
        taken = {*used.tolist(), *self._slabs_lost}
        for slab in range(self.slab_count):
            if slab not in taken and found.slot_bytes[slab]:
                self._cut(slab, 0)
        for slab in used.tolist():
            self._form(slab, self.pool(int(found.slot_bytes[slab])))
        self._slabs_free = deque(slab for slab in self._slabs_free if slab not in taken)
        self.state[found.words] = SlotState.SEALED
        self.state[found.held] = self.state[found.doubtful] = SlotState.QUARANTINED
        self.counts += np.bincount(self.state[in_use], minlength=len(SlotState))
        self.sealed_bytes = self._bytes(found.words)
        # Not in the journal: what it says of a writer whom it cannot name, it is to say again.
        for writer, _ in tallied(found.writers):
            self.writers.name(found.held[found.writers == writer], writer)
        self.writers.name(found.doubtful, UNKNOWN_WRITER)
        self.pins.written(np.flatnonzero(self.writer), 1)
        self.quotas.floor = self.pins.node.held.copy()
        self.stamps[self.state != SlotState.SEALED] = 0
        # A slot may have been sealed just before it had its stamp, or popped and not yet emptied.
        self.stamps[(self.state == SlotState.SEALED) & (self.stamps <= 0)] = 1
        self.next_stamp = int(self.stamps.max(initial=0)) + 1
        for group, size_bytes in self.weigh(in_use):
            self.quotas.held[group] += size_bytes
        sizes = self._slot_bytes_of_slab
        for size, pool in self.pools.items():
            words = self.words_of_slabs(pool, np.array(sorted(pool.slabs))).reshape(-1)
            pool.free = words[self.state[words] == SlotState.FREE][::-1].tolist()
            mine = np.flatnonzero(sizes[found.words // self._words_per_slab] == size)
            pool.policy.resume(found.words[mine], prints[mine])

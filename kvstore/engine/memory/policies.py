"""Order of evictions: the port of policies, the policies by name, and places kept for a prompt.

    insert, resume ──▶ held ──use, touch──▶ held ──pop──▶ gone (the policy chose)
                                      └──forget──▶ gone (another reason)

A policy orders the slots of one pool. The contract of every policy, which
`tests/contract/test_policy.py` checks:

- Order within a batch: the last of `words` counts as used last. Callers pass a chain from its end
  to its start, so that it loses its end before its start; a prefix without its start is worthless.
- The same between batches: where every use and touch of a block comes with all blocks before it in
  its chain, and stamps after its own, the block goes before them.
- A slot that may not go now (leased) is passed over and keeps its state.
- A block that comes in with a stamp older than others' goes before them.
- All wanted or all possible: `pop` returns fewer than `count` only when no more may go.

Cost: arrays in and out, no object per block, and no look at all slots in `insert`, `use`, `touch`
and `forget`. A new policy implements `Policy`, gets its name in POLICIES, and so runs the contract
suite and the engine's state machine.

Does not cover: how many slots leave (`moves.intake`), whose, by quota (`slots`), leases, choice of
blocks for the disk (`moves.writes`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError

Words = NDArray[np.int64]
"""Slot words: numbers of generation words, one per slot."""
NONE: Words = np.empty(0, dtype=np.int64)
Mask = NDArray[np.bool_]
Stamps = NDArray[np.int64]
"""One per word: grows with every use; 0 = the slot holds nothing; below 0: the block
with that stamp was popped, and its slot is not empty yet."""
Prints = NDArray[np.uint64]
"""One per block: a hash of its scope and key, which still identifies the block after its
eviction."""

MayGo = Callable[[Words | slice], Mask]
"""Mask of some words, or of all (a whole slice), that may be evicted now."""
Members = Callable[[], Mask]
"""Mask of words in the pool, one bool per word."""

_MIX, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


def prints(scopes: int | NDArray[np.uint32], keys: NDArray[np.uint64]) -> Prints:
    """Prints of keys, shape [n, 4], in one scope or each in its own."""
    if isinstance(scopes, int):
        return keys[:, 0] ^ np.uint64(scopes * _MIX & _WORD)
    return keys[:, 0] ^ scopes.astype(np.uint64) * np.uint64(_MIX)


@runtime_checkable
class Policy(Protocol):
    """Order of one pool's slots. Stamps come from the caller, one per word, each only once; those
    of `touch` are newer than all before. Words are distinct within a batch, but for `use` and
    `touch`, where a hint may name one twice."""

    def insert(self, words: Words, stamps: Stamps, prints: Prints) -> None:
        """Add blocks to the order: they were just put into these slots, which were empty."""

    def resume(self, words: Words, prints: Prints) -> None:
        """Add blocks that an earlier process put into these slots; their stamps are in place."""

    def use(self, words: Words, stamps: Stamps) -> None:
        """A request uses these blocks: once per request and block."""

    def touch(self, words: Words, stamps: Stamps) -> None:
        """Make blocks newer, because the same request asks again: this is no new use."""

    def forget(self, words: Words) -> None:
        """Remove these slots from the order, because they are emptied. Some may hold no block."""

    def pop(self, count: int, may_go: MayGo) -> Words:
        """Up to `count` victims, in order. They are held no more; their stamps are negative until
        `forget`."""


# ── oldest ────────────────────────────────────────────────────────────────────────────────────────
# Slots in the order of their stamps, without moving anything when a stamp changes.
#
# A touch writes stamps and does nothing else: 4 µs for 512. Victims come from a queue, the oldest
# slots in order, made by one look over all stamps when the last queue is used up: 8 ms for a
# million slots, which buys some 30 thousand victims. Every candidate outside the queue is younger
# than all in it: stamps only grow, and one that does not is inserted at its place (`note`). An
# entry whose stamp changed since is skipped: the order has no error. A slot that may not be evicted
# (leased) is passed over and keeps its place; one leased when the queue was made waits for the next
# queue.
#
# Measured against a ring of (slot, stamp) that every touch appends to: 4 µs for 512 touches instead
# of 18, no 48 bytes a slot, and no stop while a ring of 4 million entries is compacted.

_ALL = slice(None)
_CHUNK_MIN = 256
_QUEUE_MIN = 1024
_QUEUE_SHARE = 32
_SAMPLE = 4096
_NO_QUEUE: NDArray[np.int64] = np.empty((2, 0), dtype=np.int64)


class OldestFirst:
    """The oldest of some slots.

    Args:
        stamps: one per word; 0 = the slot holds nothing.
        among: mask of candidates, one bool per word.
    """

    def __init__(self, stamps: Stamps, *, among: Members) -> None:
        self._stamps = stamps
        self._among = among
        self._queue = _NO_QUEUE
        """Slots in order, and the stamp of each when it was queued, [2][n]."""
        self._is_empty = False
        """Whether there was no candidate at the last look over all slots, and none came since."""

    def take(self, count: int, may_go: MayGo) -> Words:
        """Up to `count` slots that may go now, oldest first; none only if no slot may go. The
        caller keeps each from being taken again: by another stamp, or by removing it from
        `among`."""
        go = self._look(count, may_go)
        if not len(go):
            return NONE
        words: Words = self._queue[0, go]
        end = int(go[-1]) + 1
        looked_at, self._queue = self._queue[:, :end], self._queue[:, end:]
        stays = self._stamps[looked_at[0]] == looked_at[1]
        stays[go] = False
        if stays.any():
            passed_over = looked_at.compress(stays, axis=1)
            self._queue = np.concatenate([passed_over, self._queue], axis=1)
        return words

    def peek(self, count: int, may_go: MayGo) -> Stamps:
        """Stamps of the slots that `take` would return next, without taking them."""
        go = self._look(count, may_go)
        stamps: Stamps = self._queue[1, go]
        return stamps

    def note(self, words: Words, stamps: Stamps) -> None:
        """Take note of new stamps of slots: those older than the end of the queue are inserted into
        it."""
        size = self._queue.shape[1]
        self._is_empty &= not len(words)
        older = stamps < self._queue[1, -1] if size else np.zeros(0, dtype=bool)
        if not older.any():
            return
        new = np.stack([words[older], stamps[older]])
        if size + new.shape[1] > 2 * len(self._stamps):
            # Entries of slots that were emptied otherwise pile up: all is looked at anew.
            self._queue = _NO_QUEUE
            return
        new = new.take(np.argsort(new[1]), axis=1)
        self._queue = np.insert(self._queue, np.searchsorted(self._queue[1], new[1]), new, axis=1)

    def _look(self, count: int, may_go: MayGo) -> Words:
        """Indexes into the queue of up to `count` slots that may go, in order; none only if no slot
        may go."""
        assert count > 0, "nothing is asked for"
        chunk = max(_CHUNK_MIN, 2 * count)
        while self._queue.shape[1] or self._refill(count, may_go):
            begin = 0
            while begin < self._queue.shape[1]:
                # Chosen when the queue was made, and to be looked at again: things change.
                words, stamps = self._queue[:, begin : begin + chunk]
                current = self._stamps[words] == stamps
                go = np.flatnonzero(current & may_go(words))[:count]
                if len(go):
                    return begin + go
                if begin or current.any():
                    begin += chunk
                else:
                    self._queue = self._queue[:, chunk:]
            self._queue = _NO_QUEUE
        return NONE

    def _refill(self, count: int, may_go: MayGo) -> bool:
        """Fill the queue with the oldest slots that may go now. Returns False if there are none."""
        if self._is_empty:
            return False
        candidates = self._among() & (self._stamps > 0)
        self._is_empty = not candidates.any()
        may = may_go(_ALL) & candidates
        words = np.flatnonzero(may)
        size = max(count, _QUEUE_MIN, len(words) // _QUEUE_SHARE)
        if size < len(words):
            # Where the oldest end is estimated from a sample: exact where it cuts, about right in
            # how many that are, and a third of the cost of a partition.
            sample = np.sort(self._stamps[words[:: len(words) // _SAMPLE + 1]])
            limit = sample[size * len(sample) // len(words)]
            words = np.flatnonzero(may & (self._stamps <= limit))
        queue = np.stack([words, self._stamps[words]])
        self._queue = queue.take(np.argsort(queue[1]), axis=1)
        return len(words) > 0


# ── lru ───────────────────────────────────────────────────────────────────────────────────────────
# Wrong for scans larger than the tier: a workload that reads everything once evicts the reused
# blocks; `reuse` is for that.


class Lru:
    """Order of use of one pool's slots. Arguments as of `Reuse`."""

    def __init__(self, stamps: Stamps, *, members: Members, slot_count_max: int) -> None:
        del slot_count_max
        self._stamps = stamps
        self._oldest = OldestFirst(stamps, among=members)

    def insert(self, words: Words, stamps: Stamps, prints: Prints) -> None:
        self.use(words, stamps)

    def resume(self, words: Words, prints: Prints) -> None:
        pass

    def use(self, words: Words, stamps: Stamps) -> None:
        self.touch(words, stamps)
        self._oldest.note(words, stamps)

    def touch(self, words: Words, stamps: Stamps) -> None:
        self._stamps[words] = stamps

    def forget(self, words: Words) -> None:
        self._stamps[words] = 0

    def pop(self, count: int, may_go: MayGo) -> Words:
        victims: list[Words] = []
        missing = count
        while missing > 0 and len(words := self._oldest.take(missing, may_go)):
            self._stamps[words] *= -1
            victims.append(words)
            missing -= len(words)
        return np.concatenate(victims) if victims else NONE


# ── recent ────────────────────────────────────────────────────────────────────────────────────────
# Keys seen lately, in two bytes each: a bounded set that forgets the oldest first.
#
# A table of buckets of eight 16-bit fingerprints. A key goes to the front of its bucket and pushes
# the last one out, without time stamps and sweeps: the set ages by use.
#
# Sized for n keys, after m other keys that were added since:
# - `may_contain` of a key that was added is True with probability P(Poisson(8 m / n) <= 7): 0.999
#   at m = n / 4, 0.95 at n / 2, 0.45 at n, 0.01 at 2 n. A key pushed out early is one more "not
#   seen".
# - `may_contain` of a key that never was is True with probability at most 8 / 65,535 = 0.00012.
#
# The seed keeps a chooser of keys from choosing collisions. Bytes: 2 n, rounded up to a power of
# two of buckets.

WAYS: Final = 8
_BUCKETS_MIN = 8
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF, _TOP = np.uint64(32), np.uint64(48)

Buckets = NDArray[np.int64]
Marks = NDArray[np.uint16]
"""Fingerprints, never 0: 0 is an empty place."""


class RecentKeys:
    """A bounded set of keys.

    Args:
        key_count: approximate number of keys remembered.
        seed: any number; another one makes other collisions.
    """

    def __init__(self, *, key_count: int, seed: int) -> None:
        buckets = max(_BUCKETS_MIN, -(-key_count // WAYS))
        self._mask = np.uint64((1 << (buckets - 1).bit_length()) - 1)
        self._table = np.zeros((int(self._mask) + 1, WAYS), dtype=np.uint16)
        self._seed = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)

    def _places(self, prints: Prints) -> tuple[Buckets, Marks]:
        mixed = (prints ^ self._seed) * _FIRST
        mixed = (mixed ^ (mixed >> _HALF)) * _SECOND
        marks = np.maximum((mixed >> _TOP).astype(np.uint16), np.uint16(1))
        return (mixed & self._mask).astype(np.int64), marks

    def may_contain(self, prints: Prints) -> Mask:
        """Mask of keys that were added lately. Errors of both kinds occur; the comment above has
        their probabilities."""
        buckets, marks = self._places(prints)
        found: Mask = (self._table[buckets] == marks[:, None]).any(axis=1)
        return found

    def add(self, prints: Prints) -> None:
        """Remember these, the last of them as the latest."""
        buckets, marks = self._places(prints)
        while len(buckets):
            # Two of a batch may meet in one bucket: first the first, in the next round the second.
            _, first = np.unique(buckets, return_index=True)
            at = buckets[first]
            old = self._table[at]
            self._table[at] = _to_front(old, marks[first])
            if len(first) == len(buckets):
                return
            rest = np.ones(len(buckets), dtype=bool)
            rest[first] = False
            buckets, marks = buckets[rest], marks[rest]


def _to_front(rows: Marks, marks: Marks) -> Marks:
    """`rows` of buckets, each with its mark in front: moved there if the row has it, else in place
    of the row's last mark."""
    same = rows == marks[:, None]
    # Where the gap is that closes when the mark is put in front.
    gap = np.where(same.any(axis=1), same.argmax(axis=1), WAYS - 1)
    shifted = np.empty_like(rows)
    shifted[:, 0] = marks
    shifted[:, 1:] = np.where(np.arange(1, WAYS) <= gap[:, None], rows[:, :-1], rows[:, 1:])
    return shifted


# ── reuse ─────────────────────────────────────────────────────────────────────────────────────────
# Blocks that served a second request outlive those that did not, eight times over.
#
# Two classes, each in order of use: *fresh* blocks, which no request after their own has used, and
# *reused* ones. The next victim is the one with the greater age, where the age of a reused block
# counts an eighth: a scan evicts fresh blocks before reused ones, and blocks out of use leave, too.
# A key that was evicted and comes back while it is remembered (`RecentKeys`) starts as reused.
#
# The idea is S3-FIFO's (Yang et al., SOSP 2023): demote blocks seen once quickly, and remember
# their keys. S3-FIFO lacks the order of chains. S3-FIFO and SIEVE evict in order of insertion, and
# the start of a chain was inserted first: it goes before the turns of the chat that hang on it.
# Here the start goes last: a block is used only together with those before it, so if it is reused
# they are, and they are younger. The one exception is a key that was forgotten before its time.
#
# Measured by `bench/scenarios/policies.py`: weights of 1/4 to 1/16 are within some points of each
# other, each best somewhere; one that two memories of gone keys steer, as in ARC, was no better.
# Wrong where most blocks are used exactly twice, or the cache holds nearly all that comes back:
# then `lru` wins by up to two points. Cost over `lru`: 9 bytes a slot and 4 for the keys that went,
# and in a pool of a million slots, by the median, some 70 µs for each insert or use of 512 and
# 0.25 ms for each pop; the pop that looks over all slots takes some ms more.

REUSED_AGE: Final = 0.125
"""Factor by which the age of a reused block counts, against a fresh one."""
REMEMBERED: Final = 2
"""Number of keys remembered after eviction, as a multiple of the pool's slots."""
_SEED: Final = 0x6B76


class Reuse:
    """Order of one pool's slots.

    Args:
        stamps: one per word of the arena, shared with its other pools.
        members: mask of words in this pool, one bool per word.
        slot_count_max: slots that the pool can ever have.
    """

    def __init__(self, stamps: Stamps, *, members: Members, slot_count_max: int) -> None:
        self._stamps = stamps
        # By word, too. Pages of other pools' words are never written, so they take no memory.
        self._prints: Prints = np.zeros(len(stamps), dtype=np.uint64)
        self._is_reused = np.zeros(len(stamps), dtype=bool)
        self._fresh = OldestFirst(self._stamps, among=lambda: members() & ~self._is_reused)
        self._reused = OldestFirst(self._stamps, among=lambda: members() & self._is_reused)
        self._gone = RecentKeys(key_count=REMEMBERED * slot_count_max, seed=_SEED)
        self._fresh_count = 0
        """Where all come in to be used at once, a look for fresh ones would find none each time."""
        self._now = 0

    def insert(self, words: Words, stamps: Stamps, prints: Prints) -> None:
        self._prints[words] = prints
        came_back = self._gone.may_contain(prints)
        self._is_reused[words] = came_back
        self._fresh_count += int(np.count_nonzero(~came_back))
        self.touch(words, stamps)
        self._fresh.note(words[~came_back], stamps[~came_back])
        self._reused.note(words[came_back], stamps[came_back])

    def resume(self, words: Words, prints: Prints) -> None:
        self._prints[words] = prints
        self._fresh_count += len(words)
        self._fresh.note(words, self._stamps[words])

    def use(self, words: Words, stamps: Stamps) -> None:
        # A hint may name a key twice; the count must not believe it.
        self._fresh_count -= len(np.unique(words[~self._is_reused[words]]))
        self._is_reused[words] = True
        self.touch(words, stamps)
        self._reused.note(words, stamps)

    def touch(self, words: Words, stamps: Stamps) -> None:
        self._now = max(self._now, int(stamps.max(initial=0)) + 1)
        self._stamps[words] = stamps

    def forget(self, words: Words) -> None:
        there = words[self._stamps[words] > 0]
        self._fresh_count -= int(np.count_nonzero(~self._is_reused[there]))
        self._stamps[words] = 0

    def pop(self, count: int, may_go: MayGo) -> Words:
        victims: list[Words] = []
        missing = count
        while missing > 0:
            fresh, reused = self._split(missing, may_go)
            if fresh + reused == 0:
                break
            for queue, share in ((self._fresh, fresh), (self._reused, reused)):
                if share:
                    words = queue.take(share, may_go)
                    self._fresh_count -= len(words) if queue is self._fresh else 0
                    self._stamps[words] *= -1
                    victims.append(words)
                    missing -= len(words)  # it may see less of its queue than the split did
        gone = np.concatenate(victims) if victims else NONE
        self._gone.add(self._prints[gone])
        return gone

    def _split(self, count: int, may_go: MayGo) -> tuple[int, int]:
        """Numbers of fresh and of reused blocks among the next victims, at most `count` together.
        Fewer if not all are visible yet; both 0 only when no block may go."""
        fresh = self._fresh.peek(count, may_go) if self._fresh_count else NONE
        reused = self._reused.peek(count, may_go)
        ages = np.concatenate([self._now - fresh, (self._now - reused) * REUSED_AGE])
        order = np.argsort(-ages, kind="stable")[:count]
        is_fresh = order < len(fresh)
        for mine, seen in ((is_fresh, len(fresh)), (~is_fresh, len(reused))):
            # Behind the last one in sight there may be more: look again before anything younger.
            if 0 < seen < count and np.count_nonzero(mine[: len(is_fresh)]) == seen:
                is_fresh = is_fresh[: int(np.flatnonzero(mine)[-1]) + 1]
        chosen = int(np.count_nonzero(is_fresh))
        return chosen, len(is_fresh) - chosen


# ── policies by name ──────────────────────────────────────────────────────────────────────────────

MakePolicy = Callable[..., Policy]

POLICIES: Final[dict[str, MakePolicy]] = {"lru": Lru, "reuse": Reuse}


def maker(name: str, stamps: Stamps) -> MakePolicy:
    """Factory of policies for the pools of one arena, by the policy's name; they share `stamps`,
    and each has `members` and `slot_count_max` of its own. Raises ConfigError for an unknown
    name."""
    if name not in POLICIES:
        raise ConfigError(f"no eviction policy is called {name!r}: use {' or '.join(POLICIES)}")
    return partial(POLICIES[name], stamps)


# ── expected ──────────────────────────────────────────────────────────────────────────────────────
# Places in the order of use, reserved for blocks of a request that are not stored yet.
#
# A prompt is stored piece by piece, as it is computed. If each piece took its place on arrival, the
# start of the prompt would be its oldest part: it would leave first, and a prompt longer than the
# memory would evict its own start and never be hit. So the blocks of a request get their stamps
# together at its hint, the start the newest, and each takes its stamp on arrival.
#
# One table of fixed size and no probing: a block whose place was overwritten comes in as new, as do
# blocks outside of hints. The cost is order, never a block.

KEYS_MIN: Final = 1 << 16
"""Smallest table, 1 MiB: enough for some prompts, each of more blocks than there are slots."""
KEYS_MAX: Final = 1 << 20
"""Largest table, 16 MiB."""


class Expected:
    """Table of reserved stamps.

    Args:
        key_count: number of slots; about as many stamps are kept, within KEYS_MIN and KEYS_MAX.
    """

    def __init__(self, *, key_count: int) -> None:
        size = 1 << (min(max(key_count, KEYS_MIN), KEYS_MAX) - 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._prints: Prints = np.zeros(size, dtype=np.uint64)
        self._stamps: Stamps = np.zeros(size, dtype=np.int64)
        """Reserved stamp of each cell; 0: none."""

    def keep(self, prints: Prints, stamps: Stamps) -> None:
        """Reserve stamps for blocks. Where blocks meet in one cell, the last one is kept."""
        at = self._at(prints)
        self._prints[at] = prints
        self._stamps[at] = stamps

    def take(self, prints: Prints) -> Stamps:
        """Reserved stamps of blocks that come in now, 0 for none. A reservation ends with it."""
        at = self._at(prints)
        kept: Stamps = np.where(self._prints[at] == prints, self._stamps[at], 0)
        self._stamps[at[kept != 0]] = 0
        return kept

    def _at(self, prints: Prints) -> NDArray[np.int64]:
        return (prints & self._mask).astype(np.int64)

"""Operations of `holdings` on its flat memory: plain functions, run as they stand or compiled.

    numbers  where each lies: rows, chunks of sets, slots, scratch, meta
    rows     blocks by key, and their order of use
    sets     holders of blocks
    store, remove, sweep, match   what `holdings` calls

Numbers fit 64 bits and never wrap, so that Python and machine code agree. All memory is int32 but
`meta`; row 0 is the sentinel of the order of use, set 0 the empty set, scope 0 no row. Nothing in
here checks its arguments: `holdings` does. Functions are compiled in the order in which they stand:
each is behind those that it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

# ── where each number lies ────────────────────────────────────────────────────────────────────────

WORDS: Final = 8
"""32-bit numbers of a key."""

# A row.
ROW: Final = 12
SCOPE: Final = 8
SET: Final = 9
NEWER: Final = 10
OLDER: Final = 11
"""Next older row in the order of use; in free rows: the next free one."""

# A chunk of a set; the last three count in its first chunk only.
CHUNK: Final = 16
MEMBERS: Final = 12
NEXT: Final = 12
"""Next chunk of the set; in memory right behind the members."""
REFS: Final = 13
"""Rows that have this set."""
SIZE: Final = 14
HASH: Final = 15

# A slot.
SLOT: Final = 7
STATE: Final = 0
LOST: Final = 1
"""1: a row that this slot held was evicted."""
LENGTH: Final = 2
"""This number and the next two: leading blocks in hbm, in dram, in file, of the match under way."""
WORST: Final = 5
"""Slowest tier that the match under way needed so far."""
LOST_IN: Final = 6
"""Number of slots of the scope with this number (not of this slot) that have lost a row."""
SLOWEST: Final = 2
"""Number of the slowest tier."""

FREE: Final = 0
SHOWN: Final = 1
HIDDEN: Final = 2
VOID: Final = 3
"""The slot is in no answer, and its rows are to be swept."""

# Of scratch, in parts as long as there are slots: a set being made (1), the answer (ANSWER), the
# slots still in the run (1), the tiers that keep each of them as fast as it is (1).
ANSWER: Final = 5
"""Numbers of one answer: slot, three lengths, lost."""

# Of meta. First a secret for each word of a key.
SECRET_OF_SCOPE: Final = WORDS
SECRET_A: Final = 9
SECRET_B: Final = 10
CELL_COUNT: Final = 11
SET_CELL_COUNT: Final = 12
CHUNK_COUNT: Final = 13
SLOT_COUNT: Final = 14
ENTRY_MAX: Final = 15
ENTRIES: Final = 16
BLOCKS: Final = 17
EVICTED: Final = 18
ROW_FREE: Final = 19
ROW_FRESH: Final = 20
CHUNK_FREE: Final = 21
CHUNK_FRESH: Final = 22
MEMO_FROM: Final = 23
"""The change made in this call turned the set with this number …"""
MEMO_TO: Final = 24
"""… into this one. Both are void once either set is freed."""
SWEPT: Final = 25
"""The next row that the sweep looks at."""
GAP: Final = 26
"""The empty cell at which the last probe ended."""
META: Final = 27

M31: Final = (1 << 31) - 1
"""Mask of 31 bits: a number of so many bits can be multiplied by a secret without wrapping."""


class Ints(Protocol):
    """Flat memory: a memoryview, or an array of numpy in compiled code."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, value: int, /) -> None: ...


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────
# The blocks: the table that finds them by key, and the order of use.
#
#     cells ─▶ row: key, scope, set, neighbours in the order of use
#
# Open addressing with linear probing at a load of at most a half; to delete leaves no tombstone.
# The order of use is a ring through row 0: `OLDER` of row 0 is the newest row, `NEWER` the oldest.


def home_of(meta: Ints, keys: Ints | Sequence[int], i: int, scope: int) -> int:
    """First cell of the probe for the key whose words begin at `keys[i]`, in a scope. Every bit of
    every word counts: nobody can choose keys that begin at one cell, or at neighbours."""
    # Each word has the secret of its number. Written out: a loop costs half as much again.
    mixed = (
        keys[i] * meta[0] + keys[i + 1] * meta[1] + keys[i + 2] * meta[2] + keys[i + 3] * meta[3]
        + keys[i + 4] * meta[4] + keys[i + 5] * meta[5] + keys[i + 6] * meta[6]
        + keys[i + 7] * meta[7] + scope * meta[SECRET_OF_SCOPE]
    )  # fmt: skip
    folded = (mixed & M31) * meta[SECRET_A] + (mixed >> 31) * meta[SECRET_B]
    return (((folded >> 20) & M31) * meta[CELL_COUNT]) >> 31


def is_at(rows: Ints, row: int, keys: Sequence[int], at: int, scope: int) -> bool:
    """Whether the row has key number `at` and this scope. All 32 bytes are compared: no other block
    is ever taken for this one."""
    base, begin = row * ROW, at * WORDS
    if rows[base + SCOPE] != scope:
        return False
    for i in range(WORDS):  # noqa: SIM110 - compiled code has no generators
        if rows[base + i] != keys[begin + i]:
            return False
    return True


def find(
    rows: Ints, cells: Ints, meta: Ints, keys: Sequence[int], at: int, scope: int, last: int
) -> int:
    """Row of key number `at` in a scope, 0 if there is none; `last`: row of the key before it, or
    0."""
    if last and is_at(rows, last + 1, keys, at, scope):
        return last + 1
    cell = home_of(meta, keys, at * WORDS, scope)
    while True:
        row = cells[cell]
        if row == 0:
            meta[GAP] = cell
            return 0
        if is_at(rows, row, keys, at, scope):
            return row
        cell = cell + 1 if cell + 1 < meta[CELL_COUNT] else 0


def insert(rows: Ints, cells: Ints, meta: Ints, keys: Sequence[int], at: int, scope: int) -> int:
    """A row for a key that `find` just did not find, with the empty set, linked to itself."""
    row = meta[ROW_FREE]
    if row:
        meta[ROW_FREE] = rows[row * ROW + OLDER]
    else:
        row = meta[ROW_FRESH]
        meta[ROW_FRESH] = row + 1
    base, begin = row * ROW, at * WORDS
    for i in range(WORDS):
        rows[base + i] = keys[begin + i]
    rows[base + SCOPE] = scope
    rows[base + SET] = 0
    rows[base + NEWER] = row
    rows[base + OLDER] = row
    cells[meta[GAP]] = row
    meta[BLOCKS] += 1
    return row


def unlink(rows: Ints, row: int) -> None:
    """Remove a row from the order of use."""
    newer, older = rows[row * ROW + NEWER], rows[row * ROW + OLDER]
    rows[newer * ROW + OLDER] = older
    rows[older * ROW + NEWER] = newer


def home(items: Ints, meta: Ints, item: int, size: int) -> int:
    """First cell to look at for an item: a row if `size` is ROW; if CHUNK, a set, with its hash."""
    if size == CHUNK:
        return (items[item * CHUNK + HASH] * meta[SET_CELL_COUNT]) >> 31
    return home_of(meta, items, item * ROW, items[item * ROW + SCOPE])


def take_out(items: Ints, cells: Ints, meta: Ints, item: int, size: int, cell_count: int) -> None:
    """Take a row or a set out of its table. Later cells of its probe move up: no tombstones."""
    hole = home(items, meta, item, size)
    while cells[hole] != item:
        hole = hole + 1 if hole + 1 < cell_count else 0
    probe = hole
    while True:
        probe = probe + 1 if probe + 1 < cell_count else 0
        other = cells[probe]
        if other == 0:
            break
        # Up to the hole, if its probe passes there: it begins at least as far back as the hole.
        if (probe - home(items, meta, other, size)) % cell_count >= (probe - hole) % cell_count:
            cells[hole] = other
            hole = probe
    cells[hole] = 0


def delete(rows: Ints, cells: Ints, meta: Ints, row: int) -> None:
    """Forget a row whose set is empty."""
    base = row * ROW
    unlink(rows, row)
    take_out(rows, cells, meta, row, ROW, meta[CELL_COUNT])
    rows[base + SCOPE] = 0
    rows[base + OLDER] = meta[ROW_FREE]
    meta[ROW_FREE] = row
    meta[BLOCKS] -= 1


def put_behind(rows: Ints, row: int, other: int) -> None:
    """Make this row the next older one than the other; other 0: the newest of all."""
    older = rows[other * ROW + OLDER]
    if older == row or other == row:
        return
    unlink(rows, row)
    rows[row * ROW + NEWER] = other
    rows[row * ROW + OLDER] = older
    rows[other * ROW + OLDER] = row
    rows[older * ROW + NEWER] = row


# ── sets ──────────────────────────────────────────────────────────────────────────────────────────
# Each set is the holders of one or more blocks. A set is kept once, and counts the rows that have
# it. Members are slot << 3 | tiers (bit 1 << tier), in ascending order, in chunks of twelve. A set
# is named by its first chunk; a table finds it by its members.


def member_of(sets: Ints, chunk: int, i: int) -> int:
    """Member number i of a set, in the chunk that has it."""
    return sets[chunk * CHUNK + i % MEMBERS]


def chunk_of(sets: Ints, chunk: int, i: int) -> int:
    """The chunk that has member number i, where `chunk` has member i - 1."""
    return sets[chunk * CHUNK + NEXT] if i and i % MEMBERS == 0 else chunk


def altered(sets: Ints, scratch: Ints, old: int, slot: int, drop: int, add: int) -> int:
    """Write to scratch the members of set `old` with these tiers of one slot dropped and added;
    returns their number."""
    count, chunk, is_done = 0, old, False
    for i in range(sets[old * CHUNK + SIZE]):
        chunk = chunk_of(sets, chunk, i)
        member = member_of(sets, chunk, i)
        if not is_done and member >> 3 >= slot:
            is_done = True
            is_his = member >> 3 == slot
            tiers = (member & 7 & ~drop | add) if is_his else add
            if tiers:
                scratch[count] = slot << 3 | tiers
                count += 1
            if is_his:
                continue
        scratch[count] = member
        count += 1
    if not is_done and add:
        scratch[count] = slot << 3 | add
        count += 1
    return count


def stripped(sets: Ints, slots: Ints, scratch: Ints, old: int) -> int:
    """Write to scratch the members of set `old` without void slots; returns their number."""
    count, chunk = 0, old
    for i in range(sets[old * CHUNK + SIZE]):
        chunk = chunk_of(sets, chunk, i)
        member = member_of(sets, chunk, i)
        if slots[(member >> 3) * SLOT + STATE] != VOID:
            scratch[count] = member
            count += 1
    return count


def is_set(sets: Ints, first: int, scratch: Ints, count: int, mixed: int) -> bool:
    """Whether this set has just the members in scratch."""
    if sets[first * CHUNK + HASH] != mixed or sets[first * CHUNK + SIZE] != count:
        return False
    chunk = first
    for i in range(count):
        chunk = chunk_of(sets, chunk, i)
        if member_of(sets, chunk, i) != scratch[i]:
            return False
    return True


def take_chunk(sets: Ints, meta: Ints) -> int:
    """A free chunk, with no next one; `holdings.py` explains why there is always one."""
    chunk = meta[CHUNK_FREE]
    if chunk:
        meta[CHUNK_FREE] = sets[chunk * CHUNK + NEXT]
    else:
        chunk = meta[CHUNK_FRESH]
        assert chunk < meta[CHUNK_COUNT]
        meta[CHUNK_FRESH] = chunk + 1
    sets[chunk * CHUNK + NEXT] = 0
    return chunk


def intern(sets: Ints, set_cells: Ints, meta: Ints, scratch: Ints, count: int) -> int:
    """The set with the `count` members in scratch; made if there is none yet. 0: the empty set."""
    if count == 0:
        return 0
    mixed = 0
    for i in range(count):
        mixed = (((mixed ^ scratch[i]) * meta[SECRET_A]) >> 15) & M31
    cell = (mixed * meta[SET_CELL_COUNT]) >> 31
    while set_cells[cell]:
        if is_set(sets, set_cells[cell], scratch, count, mixed):
            return set_cells[cell]
        cell = cell + 1 if cell + 1 < meta[SET_CELL_COUNT] else 0
    first = take_chunk(sets, meta)
    set_cells[cell] = first
    chunk = first
    for i in range(count):
        if i and i % MEMBERS == 0:
            another = take_chunk(sets, meta)
            sets[chunk * CHUNK + NEXT] = another
            chunk = another
        sets[chunk * CHUNK + i % MEMBERS] = scratch[i]
    sets[first * CHUNK + REFS] = 0
    sets[first * CHUNK + SIZE] = count
    sets[first * CHUNK + HASH] = mixed
    return first


def release(sets: Ints, set_cells: Ints, meta: Ints, old: int) -> None:
    """Count one row less for this set, and free the set if no row has it."""
    sets[old * CHUNK + REFS] -= 1
    if sets[old * CHUNK + REFS]:
        return
    if old == meta[MEMO_FROM] or old == meta[MEMO_TO]:
        meta[MEMO_FROM] = -1
    take_out(sets, set_cells, meta, old, CHUNK, meta[SET_CELL_COUNT])
    chunk = old
    while chunk:
        following = sets[chunk * CHUNK + NEXT]
        sets[chunk * CHUNK + NEXT] = meta[CHUNK_FREE]
        meta[CHUNK_FREE] = chunk
        chunk = following


# ── operations ────────────────────────────────────────────────────────────────────────────────────
# Blocks of a prompt mostly have one and the same set of holders, so that to add a holder, or to go
# on with a match, is to see that nothing changed since the block before (`MEMO_FROM`). And they
# mostly lie side by side: the row after the last one is tried before the table.


def give(rows: Ints, sets: Ints, set_cells: Ints, meta: Ints, row: int, new: int) -> None:
    """Make `new` the set of a row."""
    old = rows[row * ROW + SET]
    if new == old:
        return
    rows[row * ROW + SET] = new
    meta[ENTRIES] += sets[new * CHUNK + SIZE] - sets[old * CHUNK + SIZE]
    if new:
        sets[new * CHUNK + REFS] += 1
    if old:
        release(sets, set_cells, meta, old)


def alter(
    rows: Ints, sets: Ints, set_cells: Ints, scratch: Ints, meta: Ints,
    row: int, slot: int, drop: int, add: int,
) -> None:  # fmt: skip
    """Change the set of one row: drop and add tiers (bit masks) of one slot."""
    old = rows[row * ROW + SET]
    if old != meta[MEMO_FROM]:
        count = altered(sets, scratch, old, slot, drop, add)
        meta[MEMO_TO] = intern(sets, set_cells, meta, scratch, count)
        meta[MEMO_FROM] = old
    give(rows, sets, set_cells, meta, row, meta[MEMO_TO])


def evict(rows: Ints, cells: Ints, sets: Ints, set_cells: Ints, slots: Ints, meta: Ints) -> None:
    """Evict the block with the oldest request or publication; its slots are marked as having lost
    one."""
    row = rows[NEWER]  # of the sentinel: the oldest
    first = chunk = rows[row * ROW + SET]
    for i in range(sets[first * CHUNK + SIZE]):
        chunk = chunk_of(sets, chunk, i)
        base = (member_of(sets, chunk, i) >> 3) * SLOT
        if slots[base + LOST] == 0 and slots[base + STATE] != VOID:
            slots[base + LOST] = 1
            slots[rows[row * ROW + SCOPE] * SLOT + LOST_IN] += 1
    give(rows, sets, set_cells, meta, row, 0)
    delete(rows, cells, meta, row)
    meta[EVICTED] += 1


def store(
    rows: Ints, cells: Ints, sets: Ints, set_cells: Ints, slots: Ints, scratch: Ints, meta: Ints,
    keys: Sequence[int], scope: int, slot: int, tier: int,
) -> None:  # fmt: skip
    """Record that the slot holds these keys in this tier. They become the newest, the first of them
    the newest of all."""
    meta[MEMO_FROM] = -1
    row = 0
    for at in range(len(keys) // WORDS):
        before = row
        row = find(rows, cells, meta, keys, at, scope, before)
        if row == 0:
            row = insert(rows, cells, meta, keys, at, scope)
        put_behind(rows, row, before)
        alter(rows, sets, set_cells, scratch, meta, row, slot, 0, 1 << tier)
        while meta[ENTRIES] > meta[ENTRY_MAX]:
            evict(rows, cells, sets, set_cells, slots, meta)
        if rows[row * ROW + SCOPE] == 0:
            row = before  # it was the oldest itself: there is no room for the rest


def remove(
    rows: Ints, cells: Ints, sets: Ints, set_cells: Ints, slots: Ints, scratch: Ints, meta: Ints,
    keys: Sequence[int], scope: int, slot: int, tier: int,
) -> None:  # fmt: skip
    """Record that the slot does not hold these keys in this tier any more."""
    meta[MEMO_FROM] = -1
    last = 0
    for at in range(len(keys) // WORDS):
        row = find(rows, cells, meta, keys, at, scope, last)
        if row:
            last = row
            alter(rows, sets, set_cells, scratch, meta, row, slot, 1 << tier, 0)
            if rows[row * ROW + SET] == 0:
                delete(rows, cells, meta, row)


def sweep(
    rows: Ints, cells: Ints, sets: Ints, set_cells: Ints, slots: Ints, scratch: Ints, meta: Ints,
    row_count: int,
) -> bool:  # fmt: skip
    """Remove void slots from the next `row_count` rows; returns True when these were the last
    rows."""
    meta[MEMO_FROM] = -1
    begin = meta[SWEPT]
    end = min(begin + row_count, meta[ROW_FRESH])
    for row in range(begin, end):
        if rows[row * ROW + SCOPE] == 0:
            continue
        old = rows[row * ROW + SET]
        if old != meta[MEMO_FROM]:  # not by `alter`: a call costs thrice what is done here
            count = stripped(sets, slots, scratch, old)
            meta[MEMO_TO] = intern(sets, set_cells, meta, scratch, count)
            meta[MEMO_FROM] = old
        give(rows, sets, set_cells, meta, row, meta[MEMO_TO])
        if rows[row * ROW + SET] == 0:
            delete(rows, cells, meta, row)
    meta[SWEPT] = end
    return end == meta[ROW_FRESH]


def fastest(member: int) -> int:
    """The fastest tier of a member."""
    return 0 if member & 1 else 1 if member & 2 else SLOWEST


def end(slots: Ints, slot: int, tier: int, at: int) -> None:
    """The slot's run in tiers faster than this one ends before block `at`."""
    for faster in range(slots[slot * SLOT + WORST], tier):
        slots[slot * SLOT + LENGTH + faster] = at
    if slots[slot * SLOT + WORST] < tier:
        slots[slot * SLOT + WORST] = tier


def tiers_upto(slots: Ints, slot: int) -> int:
    """A mask of the tiers that a block may be in without making the slot's run slower."""
    return (2 << slots[slot * SLOT + WORST]) - 1


def enter(sets: Ints, slots: Ints, scratch: Ints, meta: Ints, first: int) -> int:
    """Begin the answer with the shown slots of the first block's set; returns their number."""
    count, chunk, slot_count = 0, first, meta[SLOT_COUNT]
    for i in range(sets[first * CHUNK + SIZE]):
        chunk = chunk_of(sets, chunk, i)
        member = member_of(sets, chunk, i)
        slot = member >> 3
        if slots[slot * SLOT + STATE] == SHOWN:
            scratch[slot_count + count * ANSWER] = slot
            scratch[slot_count * (1 + ANSWER) + count] = slot
            slots[slot * SLOT + WORST] = 0
            end(slots, slot, fastest(member), 0)
            scratch[slot_count * (2 + ANSWER) + count] = tiers_upto(slots, slot)
            count += 1
    return count


def is_held_by(sets: Ints, scratch: Ints, meta: Ints, here: int, count: int) -> bool:
    """Has this set just the slots still in the run, in tiers that make none of them slower?"""
    # The innermost loop of a prompt whose blocks all have other sets: vectors, and no branches.
    if sets[here * CHUNK + SIZE] != count:
        return False
    place, differs = here * CHUNK, 0
    active = meta[SLOT_COUNT] * (1 + ANSWER)
    upto = active + meta[SLOT_COUNT]
    whole = count - count % MEMBERS
    for a in range(0, whole, MEMBERS):
        for i in range(MEMBERS):
            member = sets[place + i]
            differs |= (member >> 3) ^ scratch[active + a + i]
            differs |= (member & scratch[upto + a + i]) == 0
        place = sets[place + NEXT] * CHUNK
    for i in range(count - whole):
        member = sets[place + i]
        differs |= (member >> 3) ^ scratch[active + whole + i]
        differs |= (member & scratch[upto + whole + i]) == 0
    return differs == 0


def narrow(
    sets: Ints, slots: Ints, scratch: Ints, meta: Ints, here: int, count: int, at: int
) -> int:
    """Keep only the slots in the run that hold block `at` too, and end the run of the others;
    returns how many are kept. Both lists ascend."""
    left, place, stop = sets[here * CHUNK + SIZE], here * CHUNK, here * CHUNK + MEMBERS
    active = meta[SLOT_COUNT] * (1 + ANSWER)
    kept = active
    for a in range(active, active + count):
        slot = scratch[a]
        while left and sets[place] >> 3 < slot:
            left -= 1
            place += 1
            if place == stop:
                place = sets[stop] * CHUNK  # its number follows the members of a chunk
                stop = place + MEMBERS
        if left and sets[place] >> 3 == slot:
            end(slots, slot, fastest(sets[place]), at)
            scratch[kept] = slot
            scratch[kept + meta[SLOT_COUNT]] = tiers_upto(slots, slot)
            kept += 1
        else:
            end(slots, slot, SLOWEST + 1, at)
    return kept - active


def match(
    rows: Ints, cells: Ints, sets: Ints, set_cells: Ints, slots: Ints, scratch: Ints, meta: Ints,
    keys: Sequence[int], scope: int,
) -> int:  # fmt: skip
    """Write to scratch, for each shown slot with the first key, how many leading keys it holds by
    tier. Returns the number of these slots."""
    row = last_set = answers = count = at = 0
    for at in range(len(keys) // WORDS):
        before = row
        row = find(rows, cells, meta, keys, at, scope, before)
        if row == 0:
            break
        here = rows[row * ROW + SET]
        if at == 0:
            answers = count = enter(sets, slots, scratch, meta, here)
        elif here != last_set and not is_held_by(sets, scratch, meta, here, count):
            count = narrow(sets, slots, scratch, meta, here, count, at)
        if count == 0:
            break
        last_set = here
        put_behind(rows, row, before)
    else:
        at = len(keys) // WORDS
    slot_count = meta[SLOT_COUNT]
    for i in range(count):
        end(slots, scratch[slot_count * (1 + ANSWER) + i], SLOWEST + 1, at)
    for i in range(answers):
        place = slot_count + i * ANSWER
        base = scratch[place] * SLOT
        for tier in range(SLOWEST + 1):
            scratch[place + 1 + tier] = slots[base + LENGTH + tier]
        scratch[place + 4] = slots[base + LOST]
    return answers

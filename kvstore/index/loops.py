"""Operations of `holdings.py` on its flat memory: plain functions, run as they stand or compiled.

Blocks of a prompt mostly have one and the same set of holders, so that to add a holder, or to go on
with a match, is to see that nothing changed since the block before (`MEMO_FROM`). And they mostly
lie side by side: the row after the last one is tried before the table.

Numbers fit 64 bits and never wrap, so that Python and machine code agree. All memory is int32 but
`meta`; row 0 is the sentinel of the order of use, set 0 the empty set, scope 0 no row. Nothing in
here checks its arguments: `holdings.py` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.index.fields import (
    ANSWER,
    CHUNK,
    ENTRIES,
    ENTRY_MAX,
    EVICTED,
    LENGTH,
    LOST,
    LOST_IN,
    MEMBERS,
    MEMO_FROM,
    MEMO_TO,
    NEWER,
    NEXT,
    REFS,
    ROW,
    ROW_FRESH,
    SCOPE,
    SET,
    SHOWN,
    SIZE,
    SLOT,
    SLOT_COUNT,
    SLOWEST,
    STATE,
    SWEPT,
    VOID,
    WORDS,
    WORST,
    Ints,
)
from kvstore.index.rows import (
    delete,
    find,
    insert,
    put_behind,
)
from kvstore.index.sets import (
    altered,
    chunk_of,
    intern,
    member_of,
    release,
    stripped,
)


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
    if old == meta[MEMO_FROM]:
        new = meta[MEMO_TO]
    else:
        count = altered(sets, scratch, old, slot, drop, add)
        new = intern(sets, set_cells, meta, scratch, count)
        meta[MEMO_FROM] = old
        meta[MEMO_TO] = new
    give(rows, sets, set_cells, meta, row, new)


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
        old = rows[row * ROW + SET]
        if rows[row * ROW + SCOPE] == 0:
            continue
        if old == meta[MEMO_FROM]:
            new = meta[MEMO_TO]
        else:
            count = stripped(sets, slots, scratch, old)
            new = intern(sets, set_cells, meta, scratch, count)
            meta[MEMO_FROM] = old
            meta[MEMO_TO] = new
        give(rows, sets, set_cells, meta, row, new)
        if new == 0:
            delete(rows, cells, meta, row)
    meta[SWEPT] = end
    return end == meta[ROW_FRESH]


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


def fastest(member: int) -> int:
    """The fastest tier of a member."""
    return 0 if member & 1 else 1 if member & 2 else SLOWEST


def end(slots: Ints, slot: int, tier: int, at: int) -> None:
    """The slot's run in tiers faster than this one ends before block `at`."""
    for faster in range(slots[slot * SLOT + WORST], tier):
        slots[slot * SLOT + LENGTH + faster] = at
    if slots[slot * SLOT + WORST] < tier:
        slots[slot * SLOT + WORST] = tier


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


def tiers_upto(slots: Ints, slot: int) -> int:
    """A mask of the tiers that a block may be in without making the slot's run slower."""
    return (2 << slots[slot * SLOT + WORST]) - 1


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

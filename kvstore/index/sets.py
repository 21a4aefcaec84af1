"""Loops over sets of slots: each set is the holders of one or more blocks. A set is kept once, and
counts the rows that have it.

Members are slot << 3 | tiers (bit 1 << tier), in ascending order, in chunks of twelve. A set is
named by its first chunk; a table finds it by its members.
"""

from __future__ import annotations

from kvstore.index.fields import (
    CHUNK,
    CHUNK_COUNT,
    CHUNK_FREE,
    CHUNK_FRESH,
    HASH,
    M31,
    MEMBERS,
    MEMO_FROM,
    MEMO_TO,
    NEXT,
    REFS,
    SECRET_A,
    SET_CELL_COUNT,
    SIZE,
    SLOT,
    STATE,
    VOID,
    Ints,
)


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
        cell += 1
        if cell == meta[SET_CELL_COUNT]:
            cell = 0
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


def release(sets: Ints, set_cells: Ints, meta: Ints, old: int) -> None:
    """Count one row less for this set, and free the set if no row has it."""
    sets[old * CHUNK + REFS] -= 1
    if sets[old * CHUNK + REFS]:
        return
    if old == meta[MEMO_FROM] or old == meta[MEMO_TO]:
        meta[MEMO_FROM] = -1
    count = meta[SET_CELL_COUNT]
    hole = (sets[old * CHUNK + HASH] * count) >> 31
    while set_cells[hole] != old:
        hole = hole + 1 if hole + 1 < count else 0
    probe = hole
    while True:
        probe = probe + 1 if probe + 1 < count else 0
        other = set_cells[probe]
        if other == 0:
            break
        wanted = (sets[other * CHUNK + HASH] * count) >> 31
        if (probe - wanted) % count >= (probe - hole) % count:
            set_cells[hole] = other
            hole = probe
    set_cells[hole] = 0
    chunk = old
    while chunk:
        following = sets[chunk * CHUNK + NEXT]
        sets[chunk * CHUNK + NEXT] = meta[CHUNK_FREE]
        meta[CHUNK_FREE] = chunk
        chunk = following

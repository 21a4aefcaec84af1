"""Loops over rows, the blocks: the table that finds them by key, and the order of use.

    cells ─▶ row: key, scope, set, neighbours in the order of use

Open addressing with linear probing at a load of at most a half; to delete leaves no tombstone. The
order of use is a ring through row 0: `OLDER` of row 0 is the newest row, `NEWER` the oldest.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.index.fields import (
    BLOCKS,
    CELL_COUNT,
    GAP,
    M31,
    NEWER,
    OLDER,
    ROW,
    ROW_FREE,
    ROW_FRESH,
    SCOPE,
    SECRET_A,
    SECRET_B,
    SECRET_OF_SCOPE,
    SET,
    WORDS,
    Ints,
)


def home(meta: Ints, mixed: int) -> int:
    """First cell of a probe, from the sum of a block's words, each times its secret. Every bit of
    every word counts: nobody can choose keys that begin at one cell, or at neighbours."""
    folded = (mixed & M31) * meta[SECRET_A] + (mixed >> 31) * meta[SECRET_B]
    return (((folded >> 20) & M31) * meta[CELL_COUNT]) >> 31


# Each word has the secret of its number. Written out: as they stand, loops cost half as much again.


def home_of_key(meta: Ints, keys: Sequence[int], at: int, scope: int) -> int:
    """First cell of the probe for key number `at` in a scope."""
    i = at * WORDS
    return home(
        meta,
        keys[i] * meta[0] + keys[i + 1] * meta[1] + keys[i + 2] * meta[2] + keys[i + 3] * meta[3]
        + keys[i + 4] * meta[4] + keys[i + 5] * meta[5] + keys[i + 6] * meta[6]
        + keys[i + 7] * meta[7] + scope * meta[SECRET_OF_SCOPE],
    )  # fmt: skip


def home_of_row(meta: Ints, rows: Ints, row: int) -> int:
    """First cell of the probe for the block of a row."""
    i = row * ROW
    return home(
        meta,
        rows[i] * meta[0] + rows[i + 1] * meta[1] + rows[i + 2] * meta[2] + rows[i + 3] * meta[3]
        + rows[i + 4] * meta[4] + rows[i + 5] * meta[5] + rows[i + 6] * meta[6]
        + rows[i + 7] * meta[7] + rows[i + SCOPE] * meta[SECRET_OF_SCOPE],
    )  # fmt: skip


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
    cell = home_of_key(meta, keys, at, scope)
    while True:
        row = cells[cell]
        if row == 0:
            meta[GAP] = cell
            return 0
        if is_at(rows, row, keys, at, scope):
            return row
        cell += 1
        if cell == meta[CELL_COUNT]:
            cell = 0


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


def delete(rows: Ints, cells: Ints, meta: Ints, row: int) -> None:
    """Forget a row whose set is empty. Later cells of its probe move up: no tombstones."""
    base, count = row * ROW, meta[CELL_COUNT]
    unlink(rows, row)
    hole = home_of_row(meta, rows, row)
    while cells[hole] != row:
        hole = hole + 1 if hole + 1 < count else 0
    probe = hole
    while True:
        probe = probe + 1 if probe + 1 < count else 0
        other = cells[probe]
        if other == 0:
            break
        wanted = home_of_row(meta, rows, other)
        # Up to the hole, if its probe passes there: it begins at least as far back as the hole.
        if (probe - wanted) % count >= (probe - hole) % count:
            cells[hole] = other
            hole = probe
    cells[hole] = 0
    rows[base + SCOPE] = 0
    rows[base + OLDER] = meta[ROW_FREE]
    meta[ROW_FREE] = row
    meta[BLOCKS] -= 1


def unlink(rows: Ints, row: int) -> None:
    """Remove a row from the order of use."""
    newer, older = rows[row * ROW + NEWER], rows[row * ROW + OLDER]
    rows[newer * ROW + OLDER] = older
    rows[older * ROW + NEWER] = newer


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

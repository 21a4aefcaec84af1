"""Everything that must be true of an index between two calls. For tests; cost grows with size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvstore.index.feed import Holder, Trust
from kvstore.index.loops import (
    BLOCKS,
    CHUNK,
    CHUNK_FREE,
    CHUNK_FRESH,
    ENTRIES,
    ENTRY_MAX,
    FREE,
    HASH,
    HIDDEN,
    LOST,
    LOST_IN,
    MEMBERS,
    NEWER,
    NEXT,
    OLDER,
    REFS,
    ROW,
    ROW_FREE,
    ROW_FRESH,
    SCOPE,
    SET,
    SHOWN,
    SIZE,
    SLOT,
    STATE,
    VOID,
    home_of,
)

if TYPE_CHECKING:
    from kvstore.index.holdings import Holdings
    from kvstore.index.index import Index


_T = TypeVar("_T")


def done(call: Coroutine[Any, Any, _T]) -> _T:
    """Result of a call of an index, which waits for nothing."""
    try:
        call.send(None)
    except StopIteration as end:
        return cast("_T", end.value)
    raise AssertionError("it waits")


def check(index: Index) -> None:
    """Raises AssertionError with the first contradiction found."""
    holdings = index.holdings
    check_holdings(holdings)
    seen: list[int] = []
    for name, feed in index.nodes.items():
        places = feed.places
        for slots, state in ((places.slots, SHOWN), (places.coming or {}, HIDDEN)):
            for owner, scope, slot in ((o, *each) for o in slots for each in slots[o].items()):
                seen.append(slot)
                assert _state(holdings, slot) == state, "a slot answers too early or too late"
                assert holdings.scope_of[slot] == scope, "a slot is of another scope"
                assert holdings.holders[slot] == Holder(name, *owner)
    assert len(set(seen)) == len(seen), "two places have one slot"
    assert set(seen) == holdings.holders.keys(), "a slot answers for nobody"
    trusts = index.trusts
    assert trusts.keys() == index.nodes.keys(), "somebody else is trusted"
    doubted = {name for name, trust in trusts.items() if trust not in (None, Trust.EXACT)}
    assert index.doubted == doubted, "somebody else is doubted"


def check_holdings(holdings: Holdings) -> None:
    """The same of the flat memory alone."""
    _check_rows(holdings)
    _check_order(holdings)
    _check_sets(holdings)
    _check_slots(holdings)


def void_slots(holdings: Holdings) -> list[int]:
    """Void slots whose rows are still to be swept."""
    return holdings._sweeping + holdings._void


def _state(holdings: Holdings, slot: int) -> int:
    return int(holdings.arrays["slots"][slot * SLOT + STATE])


def _used(holdings: Holdings) -> list[int]:
    rows, fresh = holdings.arrays["rows"], int(holdings.arrays["meta"][ROW_FRESH])
    return [row for row in range(1, fresh) if rows[row * ROW + SCOPE]]


def _check_rows(holdings: Holdings) -> None:
    rows, cells, meta = (holdings.arrays[name].tolist() for name in ("rows", "cells", "meta"))
    used = _used(holdings)
    assert len(used) == meta[BLOCKS], "blocks are counted wrongly"
    assert sorted(filter(None, cells)) == used, "the cells are not those of the rows in use"
    addresses = {(rows[r * ROW + SCOPE], *rows[r * ROW : r * ROW + 8]) for r in used}
    assert len(addresses) == len(used), "two rows are one block"
    for row in used:
        cell = home_of(meta, rows, row * ROW, rows[row * ROW + SCOPE])
        while cells[cell] != row:
            assert cells[cell], "a row is not found"
            cell = (cell + 1) % len(cells)
    free, row = set(), meta[ROW_FREE]
    while row:
        assert row not in free, "a row is free twice"
        free.add(row)
        row = rows[row * ROW + OLDER]
    assert free == set(range(1, meta[ROW_FRESH])) - set(used), "free rows are not the unused ones"


def _check_order(holdings: Holdings) -> None:
    rows = holdings.arrays["rows"].tolist()
    seen, row = [0], rows[OLDER]
    while row:
        assert rows[row * ROW + NEWER] == seen[-1], "the order of use is not the same both ways"
        seen.append(row)
        assert len(seen) <= len(rows), "the order of use has no end"
        row = rows[row * ROW + OLDER]
    assert rows[NEWER] == seen[-1], "the oldest row is not the last"
    assert sorted(seen[1:]) == _used(holdings), "the order of use is not of the rows in use"


def _members(sets: list[int], first: int) -> tuple[list[int], list[int]]:
    """Slots of a set, and its chunks."""
    members: list[int] = []
    chunks, chunk = [first], first
    for i in range(sets[first * CHUNK + SIZE]):
        if i and i % MEMBERS == 0:
            chunk = sets[chunk * CHUNK + NEXT]
            chunks.append(chunk)
        members.append(sets[chunk * CHUNK + i % MEMBERS])
    return members, chunks


def _check_sets(holdings: Holdings) -> None:
    rows, sets, cells = (holdings.arrays[n].tolist() for n in ("rows", "sets", "set_cells"))
    meta = holdings.arrays["meta"].tolist()
    refs: dict[int, int] = {}
    for row in _used(holdings):
        one = rows[row * ROW + SET]
        refs[one] = refs.get(one, 0) + 1
        scope = rows[row * ROW + SCOPE]
        for member in _members(sets, one)[0]:
            name = holdings.scope_of[member >> 3]
            assert holdings.scopes[name] == scope, "a slot holds a block of another scope"
    assert 0 not in refs, "a row that nobody holds"
    assert sorted(filter(None, cells)) == sorted(refs), "sets in the table are not those of rows"
    chunks: list[int] = []
    different: set[tuple[int, ...]] = set()
    for one, count in refs.items():
        members, its = _members(sets, one)
        chunks += its
        different.add(tuple(members))
        assert sets[one * CHUNK + REFS] == count, "rows of a set are counted wrongly"
        slots = [member >> 3 for member in members]
        assert slots == sorted(set(slots)), "members are not in order"
        assert all(member & 7 for member in members), "a member without a tier"
        cell = sets[one * CHUNK + HASH] * len(cells) >> 31
        while cells[cell] != one:
            assert cells[cell], "a set is not found"
            cell = (cell + 1) % len(cells)
    assert len(different) == len(refs), "one set is kept twice"
    entries = sum(count * sets[one * CHUNK + SIZE] for one, count in refs.items())
    assert entries == meta[ENTRIES] <= meta[ENTRY_MAX], "entries are counted wrongly"
    chunk = meta[CHUNK_FREE]
    while chunk:
        chunks.append(chunk)
        chunk = sets[chunk * CHUNK + NEXT]
    assert sorted(chunks) == list(range(1, meta[CHUNK_FRESH])), "a chunk is lost or in use twice"


def _check_slots(holdings: Holdings) -> None:
    free = set(holdings.free_slots)
    states = {slot: _state(holdings, slot) for slot in [*free, *holdings.scope_of]}
    assert len(states) == holdings.slot_count_max, "a slot is lost or in use twice"
    assert all((states[slot] == FREE) == (slot in free) for slot in states), "free is not free"
    void = {slot for slot, state in states.items() if state == VOID}
    assert void == set(void_slots(holdings)), "void slots are not those to be swept"
    assert {*holdings.scope_of.values()} == holdings.scopes.keys(), "a scope without a slot"
    slots = holdings.arrays["slots"].tolist()
    lost = Counter(
        holdings.scopes[name]
        for slot, name in holdings.scope_of.items()
        if slots[slot * SLOT + LOST] and states[slot] != VOID
    )
    told = {n: count for n, count in enumerate(slots[LOST_IN::SLOT]) if count}
    assert told == lost, "slots that lost something are counted wrongly"

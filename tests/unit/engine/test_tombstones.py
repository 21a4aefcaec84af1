"""What is remembered of blocks that left, and for how long."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from kvstore.engine.memory.table import Keys
from kvstore.engine.why.reasons import (
    NAMES_MAX,
    Names,
    Reason,
    Tombstones,
    stamp,
)
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import keys_array
from tests.unit.engine.harness import keys


def array(*numbers: int) -> Keys:
    return keys_array(keys(*numbers))


def of(scope: int, count: int) -> np.ndarray:
    return np.full(count, scope, dtype=np.uint32)


def held(stones: Tombstones) -> int:
    """Entries in use; never more than there are."""
    count = int(np.count_nonzero(stones._entries[:, 1]))
    assert count <= len(stones._entries)
    return count


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40), st.integers(1, 9)), max_size=60))
def test_what_is_found_was_written(departures: list[tuple[int, int, int]]) -> None:
    """Against a dict: an entry is either the latest departure of that very block, or none."""
    stones, model = Tombstones(block_count_max=16), {}
    for scope, number, ms in departures:
        stones.write(
            of(scope, 1), array(number), stamp(Reason.EVICTED_FOR_STORES, 1, ms * NS_PER_MS)
        )
        model[scope, number] = ms
    missing = 0
    for (scope, number), ms in model.items():
        [packed] = stones.find(scope, array(number)).tolist()
        missing += packed == 0
        assert packed in (0, stamp(Reason.EVICTED_FOR_STORES, 1, ms * NS_PER_MS))
    assert held(stones) == len(model) - missing
    assert stones.has_overwritten or not missing


def test_names_are_bounded() -> None:
    names = Names()
    assert names.number("") == 0
    assert [names.number(name) for name in ("a", "b", "a")] == [1, 2, 1]
    for i in range(2 * NAMES_MAX):
        names.number(f"n{i}")
    last = f"n{NAMES_MAX - 4}"  # behind "", a and b
    assert names.text(NAMES_MAX - 1) == last
    assert (names.number(last), names.number("one more")) == (NAMES_MAX - 1, 0)
    assert (names.text(0), names.text(2)) == ("", "b")

"""RecentKeys: what is remembered, for how long, and how often it is wrong."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from kvstore.engine.memory.policies import WAYS, Prints, RecentKeys, prints

N = 1 << 15


def keys(seed: int, count: int) -> Prints:
    return np.random.default_rng(seed).integers(2**64, size=count, dtype=np.uint64)


def add_in_batches(recent: RecentKeys, added: Prints) -> None:
    for begin in range(0, len(added), 512):
        recent.add(added[begin : begin + 512])


def test_keys_that_never_came_are_seldom_taken_for_seen() -> None:
    recent = RecentKeys(key_count=N, seed=1)
    add_in_batches(recent, keys(1, 4 * N))
    strangers = keys(101, 1 << 19)
    assert recent.may_contain(strangers).mean() <= 1.5 * WAYS / 65535


@given(st.lists(st.lists(st.integers(0, 40), max_size=20), max_size=30))
def test_the_latest_keys_of_each_bucket_are_there(batches: list[list[int]]) -> None:
    """Against a list of each bucket's keys, latest first."""
    recent = RecentKeys(key_count=1, seed=3)
    table = np.random.default_rng(1).integers(2**64, size=41, dtype=np.uint64)
    buckets, _ = recent._places(table)
    model: dict[int, list[int]] = {}
    for batch in batches:
        recent.add(table[np.array(batch, dtype=np.int64)])
        for number in batch:
            held = model.setdefault(int(buckets[number]), [])
            if number in held:
                held.remove(number)
            held.insert(0, number)
            del held[WAYS:]
    expected = {number for held in model.values() for number in held}
    assert set(np.flatnonzero(recent.may_contain(table)).tolist()) == expected


def test_the_same_key_in_another_scope_is_another_print() -> None:
    some = keys(1, 8).reshape(2, 4)
    assert not (prints(1, some) == prints(2, some)).any()
    assert (prints(1, some) == prints(1, some.copy())).all()

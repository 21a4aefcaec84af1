"""Slots: transitions, names, slabs and pools of several sizes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstore.engine.memory.slots import Pool, Slots
from kvstore.types import PAGE_BYTES, PAGES_PER_GENERATION, SLOT_BYTES_MIN
from tests.unit.engine.harness import config_of

SLAB_WORDS = 4


def slots_of(slabs: int = 3) -> Slots:
    slots = Slots(config_of(slots=slabs * SLAB_WORDS, slab_slots=SLAB_WORDS))
    slots.ready(slabs * slots.slab_bytes)
    return slots


def one_pool() -> tuple[Slots, Pool]:
    slots = slots_of()
    pool = slots.pool(SLOT_BYTES_MIN)
    assert slots.extend(pool)
    return slots, pool


def seal(slots: Slots, words: np.ndarray) -> None:
    slots.seal(words, words.astype(np.uint64))


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pages", [16, 17, 31, 32, 33, 63, 64])
def test_slots_of_any_size_lie_in_their_slab_and_apart(pages: int) -> None:
    slots = slots_of()
    pool = slots.pool(pages * PAGE_BYTES)
    while slots.extend(pool):
        pass
    begins = sorted(int(s) for slab in pool.slabs for s in slots.slots_of(slots.words_in(slab)))
    assert len(begins) == 3 * (SLAB_WORDS * PAGES_PER_GENERATION // pages)
    assert all(b - a >= pages for a, b in itertools.pairwise(begins))
    per_slab = SLAB_WORDS * PAGES_PER_GENERATION
    assert all(b // per_slab == (b + pages - 1) // per_slab for b in begins)
    words, known = slots.words_of(np.array(begins, dtype=np.uint32))
    assert known.all()
    assert slots.slots_of(words).tolist() == begins


# ── slabs ────────────────────────────────────────────────────────────────────────────────────────


def test_the_oldest_block_is_that_of_the_pool_leased_or_not() -> None:
    slots, pool = one_pool()
    other = slots.pool(2 * SLOT_BYTES_MIN)
    assert slots.extend(other)
    assert slots.oldest_stamp(pool) is None
    seal(slots, slots.grant(other, 1, writer=1, session=1))
    words = slots.grant(pool, 2, writer=1, session=1)
    seal(slots, words)
    slots.pins.pin(words, slots.pins.node)
    assert slots.oldest_stamp(pool) == slots.stamps[words].min() > slots.oldest_stamp(other)


def test_the_coldest_slab_is_the_one_used_longest_ago_and_never_one_in_use() -> None:
    slots = slots_of()
    pool = slots.pool(SLOT_BYTES_MIN)
    for _ in range(3):
        slots.extend(pool)
    words = np.sort(slots.grant(pool, 12, writer=1, session=1))
    assert slots.coldest_slab(pool) is None, "all are granted"
    for slab in (2, 0, 1):
        seal(slots, words[slab * 4 : slab * 4 + 4])
    assert slots.coldest_slab(pool) == (2, 4)
    slots.touch(words[8:9])
    assert slots.coldest_slab(pool) == (0, 8), "one fresh slot makes a slab fresh"
    slots.leases[words[0]] = 1
    assert slots.coldest_slab(pool) == (1, 12), "leased ones stay"

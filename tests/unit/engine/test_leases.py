"""Slots and leases by themselves: slabs and pools of several sizes; each pin is counted once, and
undone once; what leases take is bounded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.slots import Pool, Slots
from kvstore.engine.sessions import leases as module
from kvstore.engine.sessions.leases import (
    BYTES_MAX,
    LEASE_BYTES,
    SESSION_BYTES_MAX,
    SLOT_BYTES,
    Leases,
)
from kvstore.types import PAGE_BYTES, PAGES_PER_GENERATION, SLOT_BYTES_MIN
from kvstore.units import NS_PER_MS, NS_PER_S
from tests.kit.parts_check import check_leases
from tests.unit.engine.harness import config_of

TTL_NS = 10 * NS_PER_S


def sealed() -> tuple[Slots, Words]:
    slots, pool = one_pool()
    words = slots.grant(pool, 2, writer=5, session=9)
    slots.seal(words, words.astype(np.uint64))
    return slots, words


def table(slots: Slots, *, count_max: int = 1 << 20) -> Leases:
    return Leases(slots, config_of(lease_ttl_ms=TTL_NS // NS_PER_MS, lease_count_max=count_max))


@pytest.mark.parametrize("first", [1, 2])
def test_a_slot_that_comes_twice_under_one_lease_is_let_go_twice(first: int) -> None:
    """Its first block was cleared while it was leased; it came back with another of the chain."""
    slots, words = sealed()
    leases = table(slots, count_max=1)
    leases.add(9, 1, words[:first], 0, slots.pins.node, 1)
    leases.extend(9, 1, words[:1])
    (lease,) = [lease for _, _, lease in leases.items()]
    assert slots.leases[words].tolist() == [2, first - 1]
    assert lease.slot_count == first + 1
    leases.release(9, [1])
    assert not np.any(slots.leases)


def test_a_session_has_its_share_of_bytes_and_others_something_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, words = sealed()
    leases = table(slots)
    number = 0
    while leases.may_add(1, number):
        leases.add(
            1, number, words[: leases.fitting(1, slots.pins.node, words, 1)], 0, slots.pins.node, 1
        )
        number += 1
    each = LEASE_BYTES + 2 * SLOT_BYTES
    assert number == pytest.approx(SESSION_BYTES_MAX / each, rel=0.01)
    assert leases.fitting(1, slots.pins.node, words, 1) == 0
    assert leases.may_add(2, 0)
    # And where many sessions take all that they can.
    monkeypatch.setattr(module, "BYTES_MAX", leases._bytes_of.total() + 64 * LEASE_BYTES)
    for session in range(2, 8):
        assert leases.may_add(session, 0), "nothing is left"
        while leases.may_add(session, number):
            leases.add(session, number, words[:0], 0, slots.pins.node, 1)
            number += 1
    assert leases._bytes_of.total() <= module.BYTES_MAX <= BYTES_MAX
    check_leases(leases)
    for session in range(1, 8):
        leases.end_session(session)
    check_leases(leases)
    assert not leases._bytes_of
    assert not np.any(slots.leases)


def test_leases_that_grow_block_by_block_take_what_their_slots_take() -> None:
    """As those of long prompts that come from a disk, several at once."""
    slots = slots_of(slabs=128)
    pool = slots.pool(SLOT_BYTES_MIN)
    while len(pool.free) < 512:
        assert slots.extend(pool)
    words = slots.grant(pool, 512, writer=5, session=9)
    slots.seal(words, words.astype(np.uint64))
    leases = table(slots)
    for lease in range(16):
        leases.add(9, lease, words[:0], 0, slots.pins.node, 1)
        for block in range(512):
            assert leases.fitting(9, slots.pins.node, words[block : block + 1], 1) == 1
            leases.extend(9, lease, words[block : block + 1])
    held = leases.get(9, 3)
    assert held is not None
    assert held.block_count == 512
    assert held.intact(slots).all()
    assert np.concatenate([piece for piece, _ in held.pieces]).tolist() == words.tolist()
    check_leases(leases)
    assert leases._bytes_of.total() < 16 * (10 * LEASE_BYTES + 512 * SLOT_BYTES)
    leases.end_session(9)
    assert not np.any(slots.leases)


# ── slots ────────────────────────────────────────────────────────────────────────────────────────


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

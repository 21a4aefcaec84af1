"""Which blocks go to disk, when, and what the day's budget says to it; how long keys are
remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from kvstore.engine.events import Clear
from kvstore.engine.memory.policies import WAYS, Prints, RecentKeys, prints
from kvstore.engine.moves.writes import DiskAdmission
from kvstore.engine.why.report import TierReport
from kvstore.tier_events import FileWritten
from kvstore.types import AdmissionMode
from kvstore.units import NS_PER_DAY
from tests.unit.engine.disk import RECORD_BYTES, DiskNode, known, places
from tests.unit.engine.harness import Peer, attached, config_of, keys

SECOND_SIGHT: dict[str, Any] = {"file_admission": AdmissionMode.SECOND_SIGHT}


def thrifty(records: int, **config: Any) -> tuple[DiskNode, Peer]:
    """A node that may write so many records a day."""
    node = DiskNode(file_day_bytes=records * RECORD_BYTES, **config)
    return node, Peer(node)


def writing(node: DiskNode) -> list[bytes]:
    """Keys of each write that was asked for."""
    return [write.keys for write in node.writes]


def file(node: DiskNode) -> TierReport:
    return node.engine.tiers()[1]


# ── second sight ─────────────────────────────────────────────────────────────────────────────────


def test_what_is_stored_is_written_when_a_second_request_names_it() -> None:
    node, peer = attached(DiskNode(**SECOND_SIGHT))
    peer.seal(1, 2, 3)
    assert node.writes == []
    assert node.engine.counters.file_blocks_not_admitted == 3
    peer.hint(1, 2, 9)
    assert writing(node) == [keys(1, 2)]
    peer.hint(1, 2)
    assert len(node.writes) == 1, "it is on its way already"
    node.write_all()
    peer.hint(1, 2)
    assert node.writes == [], "and then there"
    assert set(node.blocks().values()) == {"dram", "dram+file"}
    assert node.engine.counters.file_writes_dropped == 0


def test_what_comes_back_after_it_went_is_written_at_once() -> None:
    node, peer = attached(DiskNode(slots=8, **SECOND_SIGHT))
    peer.seal(1)
    peer.hint(1, 2)
    node.write_nothing()
    for number in range(100, 120):
        peer.seal(number)
    assert node.writes == []
    assert peer.hint(1, 2) == [False, False]
    peer.seal(2)
    assert node.writes == [], "who asks for what is not there has not seen it"
    peer.seal(1)
    assert writing(node) == [keys(1)]


def test_a_hint_that_names_a_key_twice_writes_nothing() -> None:
    node, peer = attached(DiskNode(**SECOND_SIGHT))
    peer.seal(1, 2)
    peer.hint(1, 2, 1)
    assert node.writes == []


def test_a_slot_that_holds_another_block_is_written_for_that_one_too() -> None:
    node, peer = attached(DiskNode(slots=16, credit_blocks_max=1))
    (place,) = peer.seal(1)
    node.step(Clear(None, None))
    peer.seal(2)
    (again,) = peer.seal(3)
    assert again[0] == place[0], "the slot of 1, which is still being written"
    assert writing(node) == [keys(1), keys(2), keys(3)]
    node.step(FileWritten(node.writes.pop(0).job, places(5, 1)))
    peer.hint(3)
    assert writing(node) == [keys(2), keys(3)], "on its way"
    node.write_all()
    peer.hint(3)
    assert node.writes == []


# ── the budget ───────────────────────────────────────────────────────────────────────────────────


def test_near_its_end_only_what_was_seen_is_written_and_then_nothing() -> None:
    node, peer = thrifty(4)
    peer.seal(1, 2, 3)
    peer.seal(4)
    assert writing(node) == [keys(1, 2, 3), keys(4)]
    node.write_nothing()
    assert file(node).budget_left_bytes == 4 * RECORD_BYTES, "what is not written costs nothing"
    peer.hint(1, 2, 3, 4)
    node.write_all()
    assert file(node).budget_left_bytes == 0
    peer.seal(5)
    assert node.writes == []
    assert node.engine.counters.file_blocks_not_admitted == 1
    peer.hint(5)
    assert node.writes == []
    assert node.engine.counters.file_blocks_over_budget == 1
    assert (file(node).not_admitted, file(node).over_budget) == (1, 1)
    node.now_ns += NS_PER_DAY // 4
    peer.hint(5)
    assert writing(node) == [keys(5)], "a quarter of a day, a quarter of the budget"


def test_what_a_reclaimed_segment_keeps_is_paid_for() -> None:
    node, peer = thrifty(1)
    node.step(known(*range(1, 9)))
    peer.hint(1, 2)
    assert node.reclaim(*range(1, 9)) == places(1, 1), "two are wanted, one can be paid"
    assert file(node).budget_left_bytes == 0
    assert node.engine.counters.file_blocks_over_budget == 1


def test_a_start_begins_with_what_an_earlier_one_has_left() -> None:
    day = {"file_day_bytes": 4 * RECORD_BYTES, "block_count_max": 256}
    node = DiskNode(file_spent_bytes=3 * RECORD_BYTES, **day)
    assert file(node).budget_left_bytes == RECORD_BYTES
    assert node.engine.spent_bytes() == 3 * RECORD_BYTES
    assert DiskNode().engine.spent_bytes() == 0


# ── the budget by itself ─────────────────────────────────────────────────────────────────────────


DAY_BYTES = 1 << 40


def budget_of(day_bytes: int, *, spent_bytes: int = 0) -> DiskAdmission:
    return DiskAdmission(config_of(file_day_bytes=day_bytes, file_spent_bytes=spent_bytes))


def test_a_clock_that_goes_back_gives_nothing() -> None:
    budget = budget_of(DAY_BYTES)
    budget.allow(DAY_BYTES, 1, NS_PER_DAY)
    assert budget.left_bytes(0) == 0
    assert budget.left_bytes(NS_PER_DAY) == 0, "and the time is not counted twice"


def test_asking_often_loses_nothing() -> None:
    budget = budget_of(1000)
    budget.allow(1000, 1, 0)
    times = range(0, NS_PER_DAY + 1, NS_PER_DAY // 3000)
    assert sum(budget.allow(1000, 1, now) for now in times) == 1000


@given(
    day=st.integers(1, 10**13),
    asks=st.lists(
        st.tuples(st.integers(0, 10**14), st.integers(0, 10**6), st.integers(1, 10**7)),
        max_size=30,
    ),
)
def test_never_more_than_a_day_and_what_came_in(day: int, asks: list[tuple[int, int, int]]) -> None:
    budget = budget_of(day)
    now, total = 0, 0
    for passed, wanted, record_bytes in asks:
        now += passed
        allowed = budget.allow(wanted, record_bytes, now)
        assert 0 <= allowed <= wanted
        total += allowed * record_bytes
        assert total * NS_PER_DAY <= day * (NS_PER_DAY + now)


def test_what_was_spent_before_the_start_is_missing_whatever_the_clock_says() -> None:
    budget = budget_of(400, spent_bytes=300)
    assert budget.left_bytes(9 * NS_PER_DAY) == 100
    assert budget.left_bytes(9 * NS_PER_DAY + NS_PER_DAY // 4) == 200


# ── keys seen lately ─────────────────────────────────────────────────────────────────────────────


N = 1 << 15


def random_keys(seed: int, count: int) -> Prints:
    return np.random.default_rng(seed).integers(2**64, size=count, dtype=np.uint64)


def add_in_batches(recent: RecentKeys, added: Prints) -> None:
    for begin in range(0, len(added), 512):
        recent.add(added[begin : begin + 512])


def test_keys_that_never_came_are_seldom_taken_for_seen() -> None:
    recent = RecentKeys(key_count=N, seed=1)
    add_in_batches(recent, random_keys(1, 4 * N))
    strangers = random_keys(101, 1 << 19)
    assert recent.may_contain(strangers).mean() <= 1.5 * WAYS / 65535


def test_an_engine_cannot_choose_keys_that_count_as_seen() -> None:
    """It is told the node's incarnation, and metrics show it."""
    config = config_of(seed=99, block_count_max=N, **SECOND_SIGHT)
    stored, strangers = random_keys(1, N), random_keys(101, 1 << 19)
    guess = RecentKeys(key_count=N, seed=config.incarnation)
    guess.add(stored)
    chosen = strangers[guess.may_contain(strangers)]
    admission = DiskAdmission(config)
    admission.admit(stored, 0)
    assert len(chosen) > 10
    assert admission.admit(chosen, 0).sum() <= 1


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
    some = random_keys(1, 8).reshape(2, 4)
    assert not (prints(1, some) == prints(2, some)).any()
    assert (prints(1, some) == prints(1, some.copy())).all()

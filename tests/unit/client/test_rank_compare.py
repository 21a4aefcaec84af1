"""RankCore: jobs that only compare. They read engine blocks like stores, and write nothing."""

from __future__ import annotations

import msgspec

from kvstore.client.core.copies import (
    CompareBlock,
    Copied,
    Copy,
    CopyCompared,
    CopyVoid,
    Mismatch,
    Outcome,
)
from kvstore.client.core.plan import CompareResult, StoreJob
from kvstore.client.core.rank import RankCore
from kvstore.wire.messages import Distrust
from tests.unit.client.rank_kit import SUM, begun, load, plan, run, serving, store


def compare(session: int, first: int, count: int, *, job: int = 9) -> StoreJob:
    sums = b"".join([SUM, b"y" * 16] * count)
    made = store(session, first, count, job=job)
    return msgspec.structs.replace(made, compare=True, checksums=sums)


def run_comparing(core: RankCore, *outcomes: Outcome) -> list[Copy]:
    """Comparisons come to these outcomes, in order."""
    left = list(outcomes)
    return run(core, lambda c: left.pop(0) if isinstance(c, CompareBlock) else Copied(SUM))


def test_blocks_are_compared_after_loads_and_with_this_ranks_column() -> None:
    core = serving()
    core.submit(plan(compare(5, 10, 2), load(5, 20, 1)))
    copies = run_comparing(core, CopyCompared(0.1, False), CopyCompared(1.3, True))
    assert [type(copy).__name__ for copy in copies] == ["LoadBlock", "CompareBlock", "CompareBlock"]
    first = copies[1]
    assert isinstance(first, CompareBlock)
    assert (first.block_id, first.slot, first.checksum) == (10, 16 * 21, b"y" * 16)
    report = core.take_report()
    assert report.compared == (CompareResult(9, 2, (1,), 1.3),)
    assert report.store_jobs_done == (9,)
    assert (report.blocks_sealed, report.blocks_dropped) == (0, 0)
    assert core.take_outbox() == [], "nothing is sealed or dropped"
    assert core.take_report().compared == ()


def test_what_says_nothing_does_not_count_and_damage_is_told() -> None:
    core = serving()
    core.submit(plan(compare(5, 0, 3)))
    run_comparing(core, CopyVoid(), Mismatch(), CopyCompared(0.0, False))
    assert core.take_report().compared == (CompareResult(9, 1, (), 0.0),)
    (told,) = core.take_outbox()
    assert told == Distrust((16 * 3).to_bytes(4, "little"), (16 * 3 + 1).to_bytes(8, "little"))


def test_a_block_that_is_overwritten_meanwhile_is_not_compared() -> None:
    core = serving()
    core.submit(plan(compare(5, 0, 3)))
    assert core.reading.keys() == {0, 1, 2}
    (copy,) = begun(core)
    assert core.fence([0, 1])
    core.give_up([0])
    core.finished(copy, CopyCompared(1.4, True))
    assert core.take_report().compared == (CompareResult(9, 0, (), 0.0),), "the block was spoiled"
    assert core.reading.keys() == frozenset()

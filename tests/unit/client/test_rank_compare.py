"""RankCore: jobs that only compare. They read engine blocks like stores, and write nothing."""

from __future__ import annotations

import msgspec

from kvstore.client.core.plan import CompareResult, StoreJob
from kvstore.client.core.rank import Copy, RankCore
from kvstore.ports import CopyEnd, CopyWay
from kvstore.wire.messages import Distrust
from tests.kit.cores import reading
from tests.unit.client.rank_kit import COPIED, SUM, VOID, begun, plan, run, serving, store

ALIKE, DIVERGED = CopyEnd(0), CopyEnd(0, b"y" * 16, error=1.4, diverged=True)
DAMAGED = CopyEnd(0, SUM, error=1.4, diverged=True)


def compare(session: int, first: int, count: int, *, job: int = 9) -> StoreJob:
    sums = b"".join([SUM, b"y" * 16] * count)
    made = store(session, first, count, job=job)
    return msgspec.structs.replace(made, compare=True, checksums=sums)


def run_comparing(core: RankCore, *ends: CopyEnd) -> list[Copy]:
    """Comparisons come to these ends, in order."""
    left = list(ends)
    return run(core, lambda copy: left.pop(0) if copy.way is CopyWay.COMPARE else COPIED)


def test_what_says_nothing_does_not_count_and_damage_is_told() -> None:
    core = serving()
    core.submit(plan(compare(5, 0, 3)))
    run_comparing(core, VOID, DAMAGED, ALIKE)
    assert core.take_report().compared == (CompareResult(9, 1, (), 0.0),)
    (told,) = core.take_outbox()
    assert told == Distrust((16 * 3).to_bytes(4, "little"), (16 * 3 + 1).to_bytes(8, "little"))


def test_a_block_that_is_overwritten_meanwhile_is_not_compared() -> None:
    core = serving()
    core.submit(plan(compare(5, 0, 3)))
    assert reading(core) == {0, 1, 2}
    (copy,) = begun(core)
    assert core.fence([0, 1])
    core.give_up([0])
    core.finished(copy, DIVERGED)
    assert core.take_report().compared == (CompareResult(9, 0, (), 0.0),), "the block was spoiled"
    assert reading(core) == set()

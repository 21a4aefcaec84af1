"""RankCore: named cases. `test_rank_machine.py` drives it through everything at once."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.client.core.plan import CompareResult, StoreJob
from kvstore.client.core.rank import Copy, RankCore
from kvstore.errors import ProtocolError
from kvstore.ports import CopyEnd, CopyWay
from kvstore.types import BlockKey, Shard
from kvstore.wire.messages import (
    Distrust,
    Quiesce,
    Quiet,
    Refused,
    SessionOpen,
    Verified,
    Welcome,
    generations_array,
    slots_array,
)
from kvstore.wire.record import Scope, header
from kvstore.wire.space import Group, ShardColumn, fingerprint
from tests.kit.cores import reading
from tests.unit.client.rank_kit import (
    COLUMN,
    CONFIG,
    COPIED,
    DAMAGED,
    SPACE,
    SUM,
    VOID,
    WELCOME,
    begun,
    load,
    plan,
    run,
    serving,
    store,
)


def test_loads_run_before_stores_and_take_this_ranks_column() -> None:
    core = serving()
    core.submit(plan(store(5, 10, 1), load(5, 20, 2, checksums=b"".join([SUM, b"x" * 16] * 2))))
    copies = run(core)
    assert [copy.way for copy in copies] == [CopyWay.LOAD, CopyWay.LOAD, CopyWay.STORE]
    first = copies[0]
    assert (first.block_id, first.slot, first.generation) == (20, 16 * 41, 16 * 41 + 1)
    assert first.checksum == b"x" * 16
    prefix = Scope(
        tenant="t",
        space=fingerprint(SPACE, weights_epoch=""),
        shard=CONFIG.groups[0].shard,
        block_bytes=4096,
    ).prefix()
    assert first.header == header(prefix, BlockKey((20).to_bytes(32, "big")))


def test_the_weights_epoch_of_the_session_is_in_the_header() -> None:
    headers = []
    for epoch in ("", "epoch-2"):
        core = serving()
        core.received(Quiesce(6, epoch, columns=(ShardColumn(COLUMN),)))
        core.submit(plan(load(6, 0, 1)))
        headers.append(run(core)[0].header)
    assert headers[0] != headers[1]


def two_groups() -> RankCore:
    """Of the second group this rank has column 0 and stores nothing."""
    second = Group(msgspec.structs.replace(SPACE, model="window"), Shard(0, 2, 0, 2), 8192)
    core = RankCore(msgspec.structs.replace(CONFIG, groups=(*CONFIG.groups, second)))
    core.connected(WELCOME)
    core.received(Quiesce(5, columns=(ShardColumn(COLUMN), ShardColumn(0, writes=False))))
    assert core.take_outbox() == [Quiet(5)]
    return core


def test_a_job_is_about_the_column_of_its_group() -> None:
    core = two_groups()
    core.submit(plan(load(5, 0, 2), msgspec.structs.replace(load(5, 0, 2, lease=2), group=1)))
    first, _, second, _ = run(core)
    assert (int(second.slot), int(first.slot)) == (0, 16)
    assert first.header != second.header
    assert [each.bytes_moved for each in core.take_report().loads] == [2 * 4096, 2 * 8192]


def test_a_request_is_loaded_with_the_last_of_its_groups() -> None:
    core = two_groups()
    core.submit(plan(load(5, 0, 1), msgspec.structs.replace(load(5, 0, 1), group=1)))
    seen: list[bool] = []

    def copied(_: Copy) -> CopyEnd:
        seen.append(core.has_loaded_request)
        return COPIED

    run(core, copied)
    assert (seen, core.has_loaded_request) == ([False, False], True)
    core.take_report()
    assert not core.has_loaded_request
    core.submit(plan(load(5, 1, 1, lease=2), load(5, 2, 1, lease=3)))
    (copy,) = begun(core)
    core.finished(copy, COPIED)
    assert core.has_loaded_request, "another request's loads are not waited for"


def test_a_group_that_the_rank_does_not_have_ends_the_job() -> None:
    core = two_groups()
    core.submit(
        plan(
            msgspec.structs.replace(load(5, 0, 2), group=2),
            msgspec.structs.replace(store(5, 0, 1), group=-1),
        )
    )
    report = core.take_report()
    assert [each.loaded_blocks for each in report.loads] == [0]
    assert report.store_jobs_done == (1,)
    with pytest.raises(ProtocolError, match="of 1 KV cache groups where this rank has 2"):
        core.received(Quiesce(6))


@pytest.mark.parametrize("bad_end", [VOID, DAMAGED])
def test_a_bad_block_fails_the_load_from_there_on(bad_end: CopyEnd) -> None:
    core = serving()
    core.submit(plan(load(5, 3, 4, checksums=SUM * 8)))
    copies = run(core, lambda copy: bad_end if copy.block_id == 5 else COPIED)
    assert [copy.block_id for copy in copies] == [3, 4, 5]
    (result,) = core.take_report().loads
    assert (result.loaded_blocks, result.failed_block_ids) == (2, (5, 6))
    assert result.reason
    bad = copies[-1]
    distrust = [
        Distrust(int(bad.slot).to_bytes(4, "little"), int(bad.generation).to_bytes(8, "little"))
    ]
    distrusted = [each for each in core.take_outbox() if isinstance(each, Distrust)]
    assert distrusted == (distrust if bad_end is DAMAGED else [])


def test_the_copies_of_a_store_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    core = serving()
    count, calls = core._count, 0

    def counting(**more: object) -> None:
        nonlocal calls
        calls += 1
        count(**more)

    monkeypatch.setattr(core, "_count", counting)
    core.submit(plan(store(5, 0, 16)))
    run(core)
    report = core.take_report()
    assert (report.blocks_sealed, report.store_bytes, report.store_ns) == (16, 16 * 4096, 160)
    assert calls < 16, "the engine's thread waits for the lock meanwhile"


def test_what_was_verified_is_told_block_by_block() -> None:
    core = serving()
    sums = [bytes(16), bytes(16), SUM, SUM, bytes(16), bytes(16), SUM, SUM]  # shard minor
    core.submit(plan(load(5, 0, 4, checksums=b"".join(sums))))
    copies = run(core)
    assert [copy.checksum for copy in copies] == [None, SUM, None, SUM]
    (said,) = core.take_outbox()
    assert isinstance(said, Verified)
    assert slots_array(said.slots).tolist() == [copies[1].slot, copies[3].slot]
    assert generations_array(said.generations).tolist() == [
        *(copies[1].generation, copies[3].generation)
    ]


def test_loads_need_no_socket_stores_do() -> None:
    core = serving()
    core.submit(plan(load(5, 0, 2), store(5, 20, 2)))
    core.disconnected()
    core.submit(plan(load(5, 5, 1, lease=2), store(5, 30, 1, job=2)))
    assert [copy.block_id for copy in run(core)] == [0, 1, 5]
    report = core.take_report()
    assert [r.failed_block_ids for r in report.loads] == [(), ()]
    assert sorted(report.store_jobs_done) == [1, 2]
    assert report.blocks_dropped == 3
    assert core.take_outbox() == []


@pytest.mark.parametrize("message", [SessionOpen(5, (1,)), WELCOME])
def test_what_no_rank_may_get_ends_the_connection(message: SessionOpen | Welcome) -> None:
    with pytest.raises(ProtocolError):
        serving().received(message)


def test_quiesce_before_welcome_and_other_versions_end_the_connection() -> None:
    with pytest.raises(ProtocolError):
        RankCore(CONFIG).received(Quiesce(1))
    old = Welcome(protocol=99, incarnation=7, now_ns=1, arena_bytes=1 << 20, generation_bytes=4096)
    with pytest.raises(ProtocolError):
        RankCore(CONFIG).connected(old)


def test_a_refused_rank_may_be_welcome_later() -> None:
    core = RankCore(CONFIG)
    core.received(Refused("another model", permanent=True))
    core.connected(WELCOME)
    core.received(Quiesce(1))  # before its Welcome it would be an error of the node
    assert core.take_outbox() == [Quiet(1)]


def test_malformed_arrays_fail_the_load_and_drop_the_store() -> None:
    core = serving()
    good = load(5, 0, 2)
    for change in (
        {"slots": good.slots[:-4]},
        {"slots": good.slots[:8], "generations": good.generations[:16]},  # one shard: no column 1
        {"generations": good.generations[:-8]},
        {"keys": good.keys[:-32]},
        {"checksums": SUM},
    ):
        core.submit(plan(msgspec.structs.replace(good, **change)))
        (result,) = core.take_report().loads
        assert result.failed_block_ids == (0, 1)
    bad = store(5, 0, 2)
    core.submit(plan(msgspec.structs.replace(bad, keys=b"")))
    assert core.take_report().store_jobs_done == (1,)
    assert core.next_copy() is None


def test_a_fenced_store_overtakes_and_its_fence_ends_with_the_copy() -> None:
    core = serving()
    core.submit(plan(store(5, 0, 1, job=1), store(5, 10, 2, job=2), load(5, 30, 1)))
    assert not core.fence((99,))
    assert core.fence((11, 99))
    order = []
    while core.fence((11, 99)):
        (copy,) = begun(core)
        order.append(copy.block_id)
        core.finished(copy, COPIED)
    assert order == [10, 11]
    assert [copy.block_id for copy in run(core)] == [30, 0]


def test_retired_it_ends_what_there_is_and_what_comes() -> None:
    core = serving()
    core.submit(plan(load(5, 0, 2), load(5, 5, 1, lease=2), store(5, 20, 2)))
    core.next_copy()
    core.retire("shut down")
    core.submit(plan(load(5, 9, 1, lease=3), store(5, 30, 1, job=2)))
    report = core.take_report()
    assert [(r.lease, r.loaded_blocks) for r in report.loads] == [(1, 0), (2, 0), (3, 0)]
    assert all(r.reason for r in report.loads)
    assert report.store_jobs_done == (1, 2)
    assert core.next_copy() is None
    assert core.take_outbox() == []
    core.hello()


def test_a_fence_that_is_over_puts_no_later_store_before_a_load() -> None:
    core = serving()
    core.submit(plan(store(5, 20, 1)))
    assert core.fence([20])
    run(core)
    assert not core.fence([20])
    core.submit(plan(store(5, 20, 1, job=2), load(5, 0, 1)))
    copy = core.next_copy()
    assert copy is not None
    assert copy.way is CopyWay.LOAD


def test_a_fence_is_of_the_blocks_that_were_read_when_it_was_asked_for() -> None:
    core = serving()
    core.submit(plan(store(5, 20, 1)))
    (copy,) = begun(core)
    assert core.fence([20, 21])
    core.give_up([20, 21])
    core.finished(copy, COPIED)
    core.submit(plan(store(5, 21, 1, job=2), load(5, 0, 1)))
    (copy,) = begun(core)
    assert copy.way is CopyWay.LOAD


def test_a_copy_that_never_ends_is_waited_for_no_more_once_it_is_retired() -> None:
    core = serving()
    core.submit(plan(store(5, 20, 2)))
    core.next_copy()
    core.retire("the copy thread failed")
    assert not core.fence([20, 21])


def test_a_rank_that_never_served_ends_every_job_with_its_reason() -> None:
    core = RankCore(CONFIG)
    core.retire("no cache")
    core.submit(plan(load(5, 0, 2), store(5, 5, 3)))
    report = core.take_report()
    assert (report.rank, report.blocks_dropped) == (1, 3)
    assert (report.loads[0].failed_block_ids, report.loads[0].reason) == ((0, 1), "no cache")
    assert report.store_jobs_done == (1,)


# ── several copies in flight, which end in any order ─────────────────────────────────────────────


def test_a_load_ends_with_the_last_of_its_copies_whichever_that_is() -> None:
    core = serving(copies_max=3)
    core.submit(plan(load(5, 0, 4, checksums=SUM * 8)))
    first, second, third = begun(core, 3)
    assert core.next_copy() is None, "enough is in flight"
    core.finished(third, COPIED)
    core.finished(first, VOID)
    assert core.next_copy() is None, "nothing begins behind a copy that failed"
    assert core.take_report().loads == (), "a copy of it still writes to the cache"
    core.finished(second, COPIED)
    (result,) = core.take_report().loads
    assert (result.loaded_blocks, result.failed_block_ids) == (0, (0, 1, 2, 3))
    assert result.reason == "gone"
    (said,) = core.take_outbox()
    assert isinstance(said, Verified)
    assert slots_array(said.slots).tolist() == [second.slot, third.slot]


def test_stores_leave_half_of_the_places_to_loads() -> None:
    """They wait for the engine's whole step, and a load may be the next step's."""
    core = serving(copies_max=8)
    core.submit(plan(store(5, 10, 9)))
    begun(core, 4)
    assert core.next_copy() is None
    core.submit(plan(load(5, 0, 9)))
    assert len(begun(core, 4)) == 4


# ── jobs that only compare: they read engine blocks like stores, and write nothing ───────────────


ALIKE, DIVERGED = CopyEnd(0), CopyEnd(0, b"y" * 16, error=1.4, diverged=True)
SPOILED_SLOT = CopyEnd(0, SUM, error=1.4, diverged=True)


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
    run_comparing(core, VOID, SPOILED_SLOT, ALIKE)
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

"""Waiting and waking between the worker's two threads."""

from __future__ import annotations

import os
import select
import threading
import time

from kvstore.client.core.copies import Copied
from kvstore.client.core.plan import LoadJob, StepPlan, StoreJob
from kvstore.client.core.rank import RankCore
from kvstore.connector.handoff import Handoff
from kvstore.wire.messages import PROTOCOL_VERSION, Quiesce, Welcome
from tests.unit.connector.test_copier import CONFIG

WELCOME = Welcome(
    protocol=PROTOCOL_VERSION, incarnation=7, now_ns=1, arena_bytes=1 << 20, generation_bytes=4096
)


def serving() -> Handoff:
    core = RankCore(CONFIG)
    core.connected(WELCOME)
    core.received(Quiesce(5))
    return Handoff(core)


def store(*blocks: int) -> StepPlan:
    n = len(blocks)
    job = StoreJob(
        job=1,
        session=5,
        block_ids=blocks,
        keys=bytes(32 * n),
        slots=bytes(4 * n),
        generations=bytes(8 * n),
    )
    return StepPlan(stores=(job,))


def load(*blocks: int) -> StepPlan:
    n = len(blocks)
    job = LoadJob(
        request="r",
        lease=1,
        session=5,
        block_ids=blocks,
        keys=bytes(32 * n),
        slots=bytes(4 * n),
        generations=bytes(8 * n),
    )
    return StepPlan(loads=(job,))


def copy_one(handoff: Handoff) -> None:
    with handoff.core() as core:
        copy = core.next_copy()
        assert copy is not None
        core.finished(copy, Copied(bytes(16)))


def is_awake(handoff: Handoff) -> bool:
    return bool(select.select([handoff.wake.fileno()], [], [], 0)[0])


def test_a_plan_wakes_the_copy_thread_until_cleared() -> None:
    handoff = serving()
    assert not is_awake(handoff)
    handoff.submit(store(1))
    handoff.submit(store(2))
    assert is_awake(handoff)
    handoff.wake.clear()
    assert not is_awake(handoff)
    handoff.wake.clear()
    handoff.stop()
    assert is_awake(handoff)
    assert handoff.stopping
    handoff.wake.close()


def test_closed_it_takes_plans_and_stops_without_a_descriptor() -> None:
    handoff = serving()
    fd = handoff.wake.fileno()
    handoff.wake.close()
    handoff.wake.close()
    handoff.submit(store(1))
    handoff.stop()
    assert (
        not os.path.exists(f"/proc/self/fd/{fd}")
        or os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventfd]"
    )


def test_a_fence_that_nobody_reads_does_not_wait() -> None:
    handoff = serving()
    handoff.submit(store(1))
    begin = time.monotonic()
    assert handoff.keep_off((2, 3), timeout_s=10)
    assert time.monotonic() - begin < 5
    handoff.wake.close()


def test_a_fence_waits_for_the_copy_and_not_longer() -> None:
    handoff = serving()
    handoff.submit(store(1, 2))
    handoff.wake.clear()

    def copy() -> None:
        select.select([handoff.wake.fileno()], [], [], 10)  # the fence wakes the copy thread
        copy_one(handoff)
        copy_one(handoff)

    thread = threading.Thread(target=copy)
    thread.start()
    begin = time.monotonic()
    assert handoff.keep_off((2,), timeout_s=10)
    assert time.monotonic() - begin < 5
    thread.join()
    assert handoff.take_report().blocks_sealed == 2
    handoff.wake.close()


def test_a_fence_gives_up_in_time_and_the_store_is_abandoned() -> None:
    handoff = serving()
    handoff.submit(store(1, 2))
    begin = time.monotonic()
    assert not handoff.keep_off((2,), timeout_s=0.02)
    assert time.monotonic() - begin < 5
    report = handoff.take_report()
    assert (report.store_jobs_done, report.blocks_dropped) == ((1,), 2)
    assert handoff.keep_off((2,), timeout_s=0)
    handoff.wake.close()


def test_waiting_for_a_load_ends_with_the_load() -> None:
    handoff = serving()
    handoff.submit(load(1))
    thread = threading.Thread(target=copy_one, args=(handoff,))
    begin = time.monotonic()
    thread.start()
    handoff.wait_for_load(10)
    assert time.monotonic() - begin < 5
    assert handoff.take_report().loads[0].loaded_blocks == 1
    thread.join()
    handoff.wake.close()


def test_waiting_for_a_load_is_bounded_and_needs_one() -> None:
    handoff = serving()
    begin = time.monotonic()
    handoff.wait_for_load(10)  # none runs
    handoff.submit(store(1))
    handoff.wait_for_load(10)  # a store is none
    assert time.monotonic() - begin < 5
    handoff.submit(load(1))
    begin = time.monotonic()
    handoff.wait_for_load(0.02)
    assert 0.02 <= time.monotonic() - begin < 5
    assert not handoff.take_report().loads
    handoff.wake.close()

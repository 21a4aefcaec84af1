"""Waiting and waking between the worker's two threads."""

from __future__ import annotations

import os
import time

from kvstore.connector.copier import Handoff
from tests.unit.client.rank_kit import load, plan, serving, store


def test_closed_it_takes_plans_and_stops_without_a_descriptor() -> None:
    handoff = Handoff(serving())
    fd = handoff.wake.fileno()
    handoff.wake.close()
    handoff.wake.close()
    handoff.submit(plan(store(5, 1, 1)))
    handoff.stop()
    assert (
        not os.path.exists(f"/proc/self/fd/{fd}")
        or os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventfd]"
    )


def test_a_fence_gives_up_in_time_and_the_store_is_abandoned() -> None:
    handoff = Handoff(serving())
    handoff.submit(plan(store(5, 1, 2)))
    begin = time.monotonic()
    assert not handoff.keep_off((2,), timeout_s=0.02)
    assert time.monotonic() - begin < 5
    with handoff.core() as core:
        report = core.take_report()
    assert (report.store_jobs_done, report.blocks_dropped) == ((1,), 2)
    assert handoff.keep_off((2,), timeout_s=0)
    handoff.wake.close()


def test_waiting_for_a_load_is_bounded_and_needs_one() -> None:
    handoff = Handoff(serving())
    begin = time.monotonic()
    handoff.wait_for_load(10)  # none runs
    handoff.submit(plan(store(5, 1, 1)))
    handoff.wait_for_load(10)  # a store is none
    assert time.monotonic() - begin < 5
    handoff.submit(plan(load(5, 1, 1)))
    begin = time.monotonic()
    handoff.wait_for_load(0.02)
    assert 0.02 <= time.monotonic() - begin < 5
    with handoff.core() as core:
        assert not core.take_report().loads
    handoff.wake.close()

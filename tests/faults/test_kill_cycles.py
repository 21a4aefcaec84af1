"""Real processes: blocks come back as they were stored, and after kill -9 at named moments nothing
is left; whether that is noticed which must be."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from tests.amounts import amount, covered
from tests.kit import kills, trips
from tests.kit.actor import Leased
from tests.kit.gauges import look
from tests.kit.host import Host
from tests.kit.kills import MEMBERS, POINTS, KillCycles
from tests.kit.trips import RoundTrips
from tests.kit.troupe import Troupe, Wrong

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 20261125
CYCLES = amount(30, nightly=60)
"""Each victim at each point once, or twice."""


def test_after_each_kill_bytes_are_right_and_nothing_is_left(tmp_path: Path) -> None:
    with KillCycles(tmp_path, seed=SEED) as cycles:
        for _ in range(CYCLES):
            cycles.cycle()
        done = cycles.tally
    logging.getLogger(__name__).info("seed %d: %s", SEED, done)
    assert done.kill_count >= CYCLES
    covered("kills of real processes", done.kill_count)
    for point in POINTS:
        assert sum(count for name, count in done.kills.items() if name.startswith(point)) >= 3, done
    for victim in (*MEMBERS, *Host.PARTS):
        assert sum(count for name, count in done.kills.items() if name.endswith(victim)) >= 3, done
    assert done.verified_blocks > done.asked_blocks // 4, "most was lost: little was tested"


def test_what_a_kill_must_not_leave_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor, a lease, and a wrong byte."""
    with KillCycles(tmp_path, seed=1) as cycles:
        cycles.wait_for_baseline()
        monkeypatch.setattr(kills, "P3_S", 0.2)
        with (
            RawEngine(cycles.host.node.socket),
            pytest.raises(AssertionError, match=r"connections is 8, not 6;.* descriptors are"),
        ):
            cycles.wait_for_baseline()
        engine = cycles.engines[0]
        (key,) = make_keys(1)
        assert engine.store([key]) == 1
        leased = engine.lease([key])
        assert isinstance(leased, Leased)
        with pytest.raises(AssertionError, match=r"leases is 1, not 0; slots_leased is 2, not 0"):
            cycles.wait_for_baseline()
        with RawEngine(cycles.host.node.socket) as vandal:
            vandal.open()
            arena = vandal.ranks[0].arena
            assert arena is not None
            arena.array[int.from_bytes(leased.slots[4:8], "little") * 4096 + 77] ^= 1
        with pytest.raises(Wrong, match="shard 1: not what was stored"):
            engine.verify([key])


# ── bytes that come back through real processes ───────────────────────────────────────────────────


TRIPS_SEED = 7
BLOCKS = amount(20_000, nightly=100_000)
FROM_DISK = amount(4_000, nightly=20_000)


def test_blocks_come_back_as_they_were_stored(tmp_path: Path) -> None:
    flags = ("--file", f"{tmp_path / 'store'}:{trips.FILE}")
    with NodeProcess.start(tmp_path, dram=trips.DRAM, flags=flags) as node, Troupe() as troupe:
        running = RoundTrips(node, troupe, seed=TRIPS_SEED)
        done = running.trips
        while done.verified_blocks < BLOCKS:
            running.step()
            assert done.asked_blocks < 2 * BLOCKS, f"most were lost: {done}"
        gauges = look(node)
    logging.getLogger(__name__).info("seed %d: %s, %s", TRIPS_SEED, done, gauges)
    assert done.verified_blocks >= BLOCKS
    covered("blocks stored and read back by real processes", done.verified_blocks)
    assert gauges.blocks_read >= FROM_DISK
    assert gauges.failures == 0

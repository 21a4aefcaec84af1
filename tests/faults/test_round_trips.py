"""Blocks go to a real node and come back through real processes, every byte compared."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvstore.testing.process import NodeProcess
from tests.amounts import amount, covered
from tests.kit import trips
from tests.kit.gauges import look
from tests.kit.trips import RoundTrips
from tests.kit.troupe import Troupe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = 7
BLOCKS = amount(20_000, nightly=100_000)
FROM_DISK = amount(4_000, nightly=20_000)


def test_blocks_come_back_as_they_were_stored(tmp_path: Path) -> None:
    flags = ("--file", f"{tmp_path / 'store'}:{trips.FILE}")
    with NodeProcess.start(tmp_path, dram=trips.DRAM, flags=flags) as node, Troupe() as troupe:
        running = RoundTrips(node, troupe, seed=SEED)
        done = running.trips
        while done.verified_blocks < BLOCKS:
            running.step()
            assert done.asked_blocks < 2 * BLOCKS, f"most were lost: {done}"
        gauges = look(node)
    logging.getLogger(__name__).info("seed %d: %s, %s", SEED, done, gauges)
    assert done.verified_blocks >= BLOCKS
    covered("blocks stored and read back by real processes", done.verified_blocks)
    assert gauges.blocks_read >= FROM_DISK
    assert gauges.failures == 0

"""Stores of an engine that overwrites blocks before it names them (vLLM's second model runner).

    step n: forward, stores ordered │ step n+1: zeros new blocks, then names them, then its forward

Whatever was read in between may be zeros, with a checksum that fits.
"""

from __future__ import annotations

import msgspec
import pytest

from kvstore.client.core.rank import RankCore
from kvstore.ports import CopyEnd
from kvstore.wire.messages import Drop, Quiesce, Quiet, Seal, slots_array
from kvstore.wire.space import ShardColumn
from tests.unit.client.rank_kit import COLUMN, COPIED, SUM, begun, plan, serving, store


@pytest.fixture
def core() -> RankCore:
    return serving(copies_max=8, is_fenced_late=True)


def end(core: RankCore, count: int) -> None:
    for copy in begun(core, count):
        core.finished(copy, COPIED)


def sealed(core: RankCore) -> tuple[int, int]:
    """How many blocks were sealed, and dropped."""
    outbox = core.take_outbox()
    seals = sum(len(slots_array(m.slots)) for m in outbox if isinstance(m, Seal))
    drops = sum(len(slots_array(m.slots)) for m in outbox if isinstance(m, Drop))
    assert seals + drops or not outbox
    return seals, drops


def test_what_was_read_from_an_overwritten_block_never_counts(core: RankCore) -> None:
    """It had zeros, perhaps, and the checksum is theirs."""
    core.submit(plan(store(5, 0, 3)))
    end(core, 3)
    core.settle((1, 9))
    assert sealed(core) == (2, 1)


def test_a_store_under_way_loses_its_overwritten_blocks_at_once(core: RankCore) -> None:
    """Nothing is waited for: the block is overwritten already."""
    core.submit(plan(store(5, 0, 4)))
    copies = begun(core, 4)
    core.finished(copies[0], COPIED)
    core.settle((0, 2))
    for copy in copies[1:]:
        core.finished(copy, COPIED)
    core.settle(())
    assert sealed(core) == (2, 2)


def test_stores_of_a_session_that_is_over_seal_nothing_and_end(core: RankCore) -> None:
    core.submit(plan(store(5, 0, 2)))
    end(core, 2)
    core.received(Quiesce(6, columns=(ShardColumn(COLUMN),)))
    assert core.take_outbox() == [Quiet(6)]
    assert core.take_report().store_jobs_done == (1,)
    core.settle(())
    assert core.take_outbox() == []


def test_stores_end_with_the_socket(core: RankCore) -> None:
    core.submit(plan(store(5, 0, 2)))
    end(core, 2)
    core.disconnected()
    assert core.take_report().store_jobs_done == (1,)


def test_values_of_an_overwritten_block_are_no_evidence(core: RankCore) -> None:
    """They are another request's, and diverge."""
    check = msgspec.structs.replace(store(5, 0, 2), compare=True, checksums=SUM * 4)
    core.submit(plan(check))
    for copy in begun(core, 2):
        core.finished(copy, CopyEnd(0, SUM, error=1.0, diverged=True))
    core.settle((1,))
    (result,) = core.take_report().compared
    assert (result.compared, result.diverged) == (0, ())

"""RankCore with several copies in flight, which end in any order."""

from __future__ import annotations

from kvstore.wire.messages import Verified, slots_array
from tests.unit.client.rank_kit import COPIED, SUM, VOID, begun, load, plan, serving, store


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

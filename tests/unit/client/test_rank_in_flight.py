"""RankCore with several copies in flight, which end in any order."""

from __future__ import annotations

from kvstore.client.core.copies import Copied, CopyVoid
from kvstore.wire.messages import Drop, Quiesce, Quiet, Seal, Verified, slots_array
from kvstore.wire.space import ShardColumn
from tests.unit.client.rank_kit import COLUMN, SUM, begun, load, plan, serving, store


def test_a_load_ends_with_the_last_of_its_copies_whichever_that_is() -> None:
    core = serving(copies_max=3)
    core.submit(plan(load(5, 0, 4, checksums=SUM * 8)))
    first, second, third = begun(core, 3)
    assert core.next_copy() is None, "enough is in flight"
    core.finished(third, Copied(SUM))
    core.finished(first, CopyVoid("gone"))
    assert core.next_copy() is None, "nothing begins behind a copy that failed"
    assert core.take_report().loads == (), "a copy of it still writes to the cache"
    core.finished(second, Copied(SUM))
    (result,) = core.take_report().loads
    assert (result.loaded_blocks, result.failed_block_ids) == (0, (0, 1, 2, 3))
    assert result.reason == "gone"
    (said,) = core.take_outbox()
    assert isinstance(said, Verified)
    assert slots_array(said.slots).tolist() == [second.slot, third.slot]


def test_stores_take_the_room_that_loads_leave() -> None:
    core = serving(copies_max=3)
    core.submit(plan(store(5, 10, 2), load(5, 0, 2)))
    assert [copy.block_id for copy in begun(core, 3)] == [0, 1, 10]


def test_a_load_finds_a_place_beside_any_number_of_stores() -> None:
    core = serving(copies_max=3)
    core.submit(plan(store(5, 10, 5)))
    first, _ = begun(core, 2)
    assert core.next_copy() is None, "one place is left to loads"
    core.submit(plan(load(5, 0, 2)))
    assert [copy.block_id for copy in begun(core, 1)] == [0]
    core.finished(first, Copied(SUM))
    assert [copy.block_id for copy in begun(core, 1)] == [1], "loads first"


def test_stores_leave_half_of_the_places_to_loads() -> None:
    """They wait for the engine's whole step, and a load may be the next step's."""
    core = serving(copies_max=8)
    core.submit(plan(store(5, 10, 9)))
    begun(core, 4)
    assert core.next_copy() is None
    core.submit(plan(load(5, 0, 9)))
    assert len(begun(core, 4)) == 4


def test_a_fence_given_up_spoils_every_copy_that_reads_one_of_its_blocks() -> None:
    core = serving(copies_max=6)
    core.submit(plan(store(5, 0, 4)))
    copies = begun(core, 3)
    assert core.fence((0, 1))
    core.give_up((0, 1))
    assert core.next_copy() is None, "the rest of the job would read them too"
    for copy in copies:
        assert core.fence([copy.block_id]), "it is being read"
        core.finished(copy, Copied(SUM))
    seal, drop = core.take_outbox()
    assert isinstance(seal, Seal)
    assert isinstance(drop, Drop)
    assert slots_array(seal.slots).tolist() == [copies[2].slot]
    assert len(slots_array(drop.slots)) == 3


def test_a_session_ends_with_the_last_copy_in_flight() -> None:
    core = serving(copies_max=2)
    core.submit(plan(load(5, 0, 1), load(5, 10, 1, lease=2), store(5, 20, 1)))
    first, second = begun(core, 2)
    core.received(Quiesce(6, columns=(ShardColumn(COLUMN),)))
    core.finished(second, Copied())
    assert core.take_outbox() == []
    core.finished(first, Copied())
    assert core.take_outbox() == [Quiet(6)]

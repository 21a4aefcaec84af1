"""Bugs that pushes have elsewhere, planted one at a time: each is noticed by a fast test, too.

`test_planted` has what the world notices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.kit.planted import Patch
from tests.sim import planted_pushes as pushes
from tests.unit.engine import test_push_words as words, test_pushes as engines
from tests.unit.engine.harness import WHOLE
from tests.unit.peers import test_pushing as nodes
from tests.unit.peers.two_nodes import Two

NOTICED_BY: dict[Patch, Callable[[], None]] = {
    pushes.late_write_into_an_extent_used_again: (
        engines.test_extents_of_a_failed_write_come_back_with_another_transfer_worker_only
    ),
    pushes.epoch_ignored: engines.test_words_of_another_epoch_are_dropped,
    pushes.sealed_before_it_is_verified: nodes.test_a_flipped_bit_on_the_way_is_a_miss,
    pushes.grant_of_another_peer_used: nodes.test_a_grant_is_used_by_the_peer_that_has_it,
    pushes.abort_not_told: nodes.test_an_abort_is_told_and_nothing_is_left,
    pushes.extent_freed_by_a_timer: engines.test_a_cancelled_request_takes_its_grants_back,
    pushes.block_of_the_wrong_group: engines.test_groups_keep_apart,
    pushes.half_a_chunk: partial(
        nodes.test_pushed_blocks_are_here_byte_by_byte, there=(WHOLE,), here=(WHOLE,)
    ),
    pushes.one_shard_of_several_looked_at: partial(
        words.test_a_block_of_which_one_shard_was_cleared_meanwhile_is_not_said_to_be_pushed, 2, 1
    ),
    pushes.last_word_of_another_session: (
        nodes.test_words_of_a_session_that_has_no_such_grant_are_dropped
    ),
    pushes.last_word_of_an_older_epoch: words.test_a_last_word_of_another_epoch_gives_nothing_back,
    pushes.room_is_made_before_what_is_written_is_pinned: (
        engines.test_what_is_pushed_is_not_evicted_for_what_is_read_from_disk
    ),
}


def test_all_twelve_are_there() -> None:
    assert set(NOTICED_BY) == set(pushes.PUSHED)
    assert len(NOTICED_BY) == 12


@pytest.mark.parametrize("plant", pushes.PUSHED, ids=lambda plant: plant.__name__)
def test_each_is_noticed_by_a_fast_test(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kit.engine_check.check_engine", lambda _: None)
    monkeypatch.setattr(Two, "tries", 100)
    fast = NOTICED_BY[plant]
    fast()
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        fast()

"""Long batches of an engine are worked on in pieces, and come to the same."""

from __future__ import annotations

import itertools

import pytest

from kvstore.index import engine_feed
from kvstore.index.chain import block_keys
from kvstore.index.engine_feed import REPLAY_MS
from kvstore.wire.feed import Stored
from tests.unit.index.test_engine_feed import (
    SEED,
    SIZE,
    TOKENS,
    Told,
    batch,
    feed,
    live,
    removed,
    rest,
    stored,
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_feed, "PIECE_WORK_MAX", 3)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("whole", [False, True], ids=["numbers", "whole"])
def test_a_long_batch_is_worked_on_in_pieces(whole: bool) -> None:
    made, told = live()
    gone = removed(0, 2, 4, 6, 8, 10, whole=whole)
    payload = batch(stored(0, 12, whole=whole), gone)
    pieces = [told(made.heard(0, payload, 0))]
    while made.has_more:
        pieces.append(told(made.more(0)))
    assert pieces[0] <= {0, 1, 2}
    assert all(len(after ^ before) <= 3 for before, after in itertools.pairwise(pieces))
    assert set(range(12)) in pieces, "before it goes on with what is removed"
    assert pieces[-1] == {1, 3, 5, 7, 9, 11}
    assert made.more(0) == []


@pytest.mark.usefixtures("small_pieces")
def test_what_a_long_batch_says_of_its_first_block_is_not_said_of_its_pieces() -> None:
    salted = block_keys(TOKENS, block_tokens=SIZE, seed=SEED, cache_salt="pepper")
    made = feed()
    made.begin(0)
    changes = made.heard(0, batch(stored(0, 12, extra_keys=[["pepper"], *[None] * 11])), 0)
    changes += rest(made)
    assert b"".join(c.keys for c in changes if isinstance(c, Stored)) == b"".join(salted)
    for odd in ({"token_ids": TOKENS[:-1]}, {"lora_id": 1}, {"block_size": 2**60}):
        made = feed()
        made.begin(0)
        assert made.heard(0, batch(stored(0, 12, **odd)), 0) + rest(made) == [], odd
        assert made.blocks.left_out == 12


@pytest.mark.usefixtures("small_pieces")
def test_what_is_not_worked_on_yet_is_void_with_the_rest() -> None:
    made, told = live()
    told(made.heard(0, batch(stored(0, 12)), 0))
    assert made.has_more
    told(made.end())
    assert not made.has_more
    assert told(made.more(0)) == set()


@pytest.mark.usefixtures("small_pieces")
def test_long_batches_of_a_replay_are_told_at_its_end_and_take_their_time() -> None:
    made, told = feed(can_replay=True), Told()
    told(made.begin(0))
    assert made.take_ask() == 0
    assert made.replayed(0, batch(stored(0, 12)), 0) == []
    for now_ms in range(0, 10 * REPLAY_MS, REPLAY_MS - 1):
        assert made.more(now_ms) == []
        assert made.tick(now_ms) == []
        if not made.has_more:
            break
    assert made.take_ask() is None, "it is not silent while it is worked on"
    assert told(made.replay_ended(now_ms)) == set(range(12))

"""What an engine publishes: in order and without gaps, or void."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvstore.index import engine_feed
from kvstore.index.chain import block_keys
from kvstore.index.engine_feed import (
    JOINED_MS,
    REPLAY_MS,
    WAITING_BATCHES_MAX,
    EngineFeed,
    Phase,
)
from kvstore.types import EngineSource, SpaceId, Tier
from kvstore.wire.feed import Change, Left, Removed, Stored

SIZE, SEED = 4, "vllm-none-hash"
TOKENS = [random.Random(1).randrange(1000) for _ in range(12 * SIZE)]
KEYS = block_keys(TOKENS, block_tokens=SIZE, seed=SEED)
SPACE = SpaceId(b"s" * 32)
PLACE = EngineSource(engine="e", rank=2, tenant="t", space=SPACE, hash_seed=SEED)
LEFT = Left("e", 2)


def name(block: int, *, whole: bool = False) -> Any:
    return KEYS[block] if whole else int.from_bytes(KEYS[block][-8:], "big")


def stored(begin: int, end: int, *, whole: bool = False, **more: Any) -> dict[str, Any]:
    """Blocks of the one chain, as vLLM publishes them."""
    return {
        "type": "BlockStored",
        "block_hashes": [name(block, whole=whole) for block in range(begin, end)],
        "parent_block_hash": name(begin - 1, whole=whole) if begin else None,
        "token_ids": TOKENS[begin * SIZE : end * SIZE],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * (end - begin),
        "group_idx": 0,
    } | more


def removed(*blocks: int, whole: bool = False, **more: Any) -> dict[str, Any]:
    hashes = [name(block, whole=whole) for block in blocks]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0} | more


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 2])


class Told:
    """What the index would hold by the changes it was told."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def __call__(self, changes: list[Change]) -> set[int]:
        for change in changes:
            match change:
                case Left():
                    assert change == LEFT
                    self.keys.clear()
                case Stored() | Removed():
                    assert (change.engine, change.rank, change.tier) == ("e", 2, Tier.HBM)
                    assert (change.tenant, change.space) == ("t", SPACE)
                    assert change.keys
                    which = {change.keys[i : i + 32] for i in range(0, len(change.keys), 32)}
                    self.keys = (
                        self.keys | which if isinstance(change, Stored) else self.keys - which
                    )
                case _:
                    pytest.fail(f"an engine does not say {change}")
        return {block for block, key in enumerate(KEYS) if key in self.keys}


class SayingFeed:
    """A feed whose verbs return what they say."""

    def __init__(self, source: EngineSource) -> None:
        self._said: list[Change] = []
        self._feed = EngineFeed(source, self._said.append)

    def __getattr__(self, name: str) -> Any:
        its = getattr(self._feed, name)
        if name not in {"begin", "end", "heard", "replayed", "replay_ended", "tick", "more"}:
            return its

        def verb(*arguments: Any) -> list[Change]:
            its(*arguments)
            said = self._said.copy()
            self._said.clear()
            return said

        return verb


def feed(*, can_replay: bool = False, **changes: Any) -> SayingFeed:
    changes["replay_endpoint"] = "tcp://replays:1" if can_replay else ""
    return SayingFeed(msgspec.structs.replace(PLACE, **changes))


def live() -> tuple[SayingFeed, Told]:
    """One that replays, and has nothing so far."""
    made = feed(can_replay=True)
    told = Told()
    told(made.begin(0))
    assert made.take_ask() == 0
    told(made.replay_ended(0))
    assert (made.phase, made.take_ask()) == (Phase.LIVE, None)
    return made, told


@pytest.mark.parametrize("whole", [False, True], ids=["numbers", "whole"])
def test_what_comes_in_order_is_told(whole: bool) -> None:
    made, told = feed(), Told()
    assert told(made.begin(0)) == set()
    assert told(made.heard(0, batch(stored(0, 2, whole=whole)), 0)) == {0, 1}
    both = batch(stored(2, 5, whole=whole), removed(3, 4, whole=whole))
    assert told(made.heard(1, both, 0)) == {0, 1, 2}
    assert told(list(made.held_of(made.held_keys()))) == {0, 1, 2}
    assert told(made.heard(2, batch(CLEARED), 0)) == set()
    assert made.heard(3, batch(CLEARED), 0) == [], "once"
    assert told(made.heard(4, batch(stored(0, 1, whole=whole)), 0)) == {0}
    assert made.end() == [LEFT]
    assert made.end() == []


def test_what_is_not_in_its_own_memory_does_not_count() -> None:
    made, told = feed(), Told()
    told(made.begin(0))
    there = batch(
        stored(0, 1, medium="CPU"), stored(0, 1, medium="STORAGE"), stored(0, 1, group_idx=1)
    )
    assert told(made.heard(0, there, 0)) == set()
    assert told(made.heard(1, batch(stored(0, 1, medium=None)), 0)) == {0}
    gone = batch(removed(0, medium="CPU"), removed(0, group_idx=1), {"type": "Later", "x": 1})
    assert told(made.heard(2, gone, 0)) == {0}


def test_a_salt_is_part_of_the_keys_and_an_adapter_or_an_image_is_left_out() -> None:
    salted = block_keys(TOKENS, block_tokens=SIZE, seed=SEED, cache_salt="pepper")
    made = feed()
    made.begin(0)
    (change,) = made.heard(0, batch(stored(0, 2, extra_keys=[["pepper"], None])), 0)
    assert isinstance(change, Stored)
    assert change.keys == b"".join(salted[:2])
    others: tuple[dict[str, Any], ...] = (
        {"lora_id": 1, "extra_keys": [["adapter"], ["adapter"]]},
        {"lora_name": "adapter"},
        {"extra_keys": [[["image", 0]], None]},
        {"extra_keys": [None, [["image", 3]]]},
        {"extra_keys": [[b"digest"], None]},
        {"extra_keys": [["image", "pepper"], None]},
        {"extra_keys": ["pepper", None]},
    )
    for number, other in enumerate(others):
        fresh = feed()
        fresh.begin(0)
        assert fresh.heard(number, batch(stored(0, 2, **other)), 0) == [], other
        assert fresh.blocks.left_out == 2


def test_whole_names_that_are_keys_need_nothing_else() -> None:
    made, told = feed(names_are_keys=True, block_tokens=SIZE), Told()
    told(made.begin(0))
    orphans = stored(5, 7, whole=True, lora_name="adapter")
    assert told(made.heard(0, batch(orphans), 0)) == {5, 6}
    half = stored(7, 8, whole=True, block_size=SIZE // 2)
    assert told(made.heard(1, batch(half), 0)) == {5, 6}, "a block of another size"
    assert told(made.heard(2, batch(stored(0, 1)), 0)) == {0, 5, 6}, "numbers are not keys"


@pytest.mark.parametrize("block_size", [0, -SIZE, SIZE + 1])
def test_blocks_of_impossible_sizes_are_left_out(block_size: int) -> None:
    made = feed()
    made.begin(0)
    odd = stored(0, 2, block_size=block_size), stored(0, 0, block_size=block_size, token_ids=[])
    assert made.heard(0, batch(*odd), 0) == []


def test_joining_tells_what_is_held_at_its_end() -> None:
    made, told = feed(can_replay=True), Told()
    told(made.begin(0))
    assert made.take_ask() == 0
    assert made.take_ask() is None, "once"
    assert made.heard(3, batch(removed(1)), 0) == [], "it waits"
    for number, payload in enumerate((batch(stored(0, 4)), batch(removed(3)), batch(stored(4, 5)))):
        assert made.replayed(number, payload, 0) == []
        assert made.held_of(made.held_keys()) == []
    assert told(made.replay_ended(0)) == {0, 2}, "block 4 has a parent that was gone"
    assert told(list(made.held_of(made.held_keys()))) == {0, 2}


def test_after_joining_the_rest_is_asked_for() -> None:
    made, told = live()
    told(made.heard(0, batch(stored(0, 1)), 0))
    assert made.tick(JOINED_MS - 1) == []
    assert made.take_ask() is None
    made.tick(JOINED_MS)
    assert made.take_ask() == 1
    # Published when the engine did not yet know that it is subscribed to, and nothing since.
    assert told(made.replayed(1, batch(stored(1, 2)), JOINED_MS)) == {0, 1}
    assert told(made.replay_ended(JOINED_MS)) == {0, 1}
    made.tick(10 * JOINED_MS)
    assert made.take_ask() is None


def test_the_rest_may_be_nothing_or_unanswered() -> None:
    for silent in (False, True):
        made, told = live()
        told(made.heard(0, batch(stored(0, 1)), 0))
        made.tick(JOINED_MS)
        assert made.take_ask() == 1
        told(made.heard(1, batch(stored(1, 2)), JOINED_MS))
        told(made.tick(JOINED_MS + REPLAY_MS) if silent else made.replay_ended(JOINED_MS))
        assert told([]) == {0, 1}
        assert made.phase is Phase.LIVE


def test_a_gap_that_is_kept_no_more_voids_all_that_was_held() -> None:
    made, told = live()
    told(made.heard(0, batch(stored(0, 2)), 0))
    told(made.heard(5, batch(stored(2, 3)), 0))
    assert made.take_ask() == 1
    assert told(made.replayed(4, batch(stored(0, 1)), 0)) == set()
    made.replayed(5, batch(stored(1, 2)), 0)
    assert told(made.replay_ended(0)) == {0, 1}
    assert made.counters.voids == 1
    assert told(made.heard(6, batch(removed(0)), 0)) == {1}


@pytest.mark.parametrize("answer", ["none", "its end", "no replay"])
def test_a_gap_that_nobody_fills_voids_all_that_was_held(answer: str) -> None:
    if answer == "no replay":
        made, told = feed(), Told()
        told(made.begin(0))
    else:
        made, told = live()
    told(made.heard(0, batch(stored(0, 2)), 0))
    told(made.heard(2, batch(stored(0, 1)), 0))
    if answer == "none":
        assert told(made.tick(REPLAY_MS - 1)) == {0, 1}
        told(made.tick(REPLAY_MS))
    elif answer == "its end":
        told(made.replay_ended(0))
    assert told([]) == {0}
    assert (made.phase, made.counters.voids) == (Phase.LIVE, 1)
    assert told(made.heard(3, batch(stored(1, 2)), 0)) == {0, 1}


def test_a_replay_with_pieces_missing_is_asked_for_again_from_there() -> None:
    made, told = feed(can_replay=True), Told()
    told(made.begin(0))
    assert made.take_ask() == 0
    made.replayed(0, batch(stored(0, 1)), 0)
    made.replayed(2, batch(stored(2, 3)), 0)
    made.replayed(3, batch(removed(0)), 0)
    assert made.replay_ended(0) == []
    assert made.take_ask() == 1
    for number, payload in ((1, stored(1, 2)), (2, stored(2, 3)), (3, removed(0))):
        made.replayed(number, batch(payload), 0)
    assert told(made.replay_ended(0)) == {1, 2}


def test_a_replay_without_its_end_is_asked_for_again() -> None:
    made, told = feed(can_replay=True), Told()
    told(made.begin(0))
    assert made.take_ask() == 0
    made.replayed(0, batch(stored(0, 1)), 10)
    assert made.tick(9 + REPLAY_MS) == []
    assert made.take_ask() is None
    made.tick(10 + REPLAY_MS)
    assert made.take_ask() == 1
    assert told(made.replay_ended(10 + REPLAY_MS)) == {0}


def test_an_engine_that_does_not_answer_when_joining_is_followed_from_then_on() -> None:
    made, told = feed(can_replay=True), Told()
    told(made.begin(0))
    made.heard(8, batch(stored(0, 2)), 0)
    assert told(made.tick(REPLAY_MS)) == {0, 1}
    assert told(made.heard(9, batch(removed(0)), REPLAY_MS)) == {1}


def test_numbers_that_begin_again_are_of_another_engine() -> None:
    made, told = live()
    told(made.heard(0, batch(stored(0, 3)), 0))
    told(made.heard(1, batch(stored(3, 4)), 0))
    assert told(made.heard(0, batch(stored(0, 1)), 0)) == set()
    assert made.take_ask() == 0
    made.replayed(0, batch(stored(0, 1)), 0)
    assert told(made.replay_ended(0)) == {0}
    told(made.begin(0))
    assert told([]) == set(), "a new connection may be one to another engine"
    assert made.take_ask() == 0


def test_what_cannot_be_read_may_have_been_a_removal() -> None:
    made, told = live()
    told(made.heard(0, batch(stored(0, 3)), 0))
    assert told(made.heard(1, b"nonsense", 0)) == set()
    assert (made.counters.refused, made.counters.voids) == (1, 1)
    assert told(made.heard(2, batch(stored(0, 1)), 0)) == {0}


def test_what_waits_is_bounded() -> None:
    made, told = feed(can_replay=True), Told()
    told(made.begin(0))
    for number in range(1, WAITING_BATCHES_MAX + 2):
        made.heard(number, batch(), 0)
    made.replayed(0, batch(stored(0, 1)), 0)
    assert told(made.replay_ended(0)) == {0}
    assert made.take_ask() == 1, "what was dropped shows as a gap"


def test_the_bytes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = batch(stored(1, 2))
    monkeypatch.setattr(engine_feed, "WAITING_BYTES_MAX", 2 * len(payload))
    for waiting, asked in ((2, None), (3, 1)):
        made, told = feed(can_replay=True), Told()
        told(made.begin(0))
        assert made.take_ask() == 0
        for number in range(1, waiting + 1):
            made.heard(number, payload, 0)
        made.replayed(0, batch(stored(0, 1)), 0)
        told(made.replay_ended(0) + rest(made))
        assert made.take_ask() == asked


def test_nothing_is_heard_of_who_is_away() -> None:
    made, told = live()
    told(made.heard(0, batch(stored(0, 1)), 0))
    assert told(made.end()) == set()
    assert made.heard(1, batch(stored(1, 2)), 0) == []
    assert made.replayed(1, batch(stored(1, 2)), 0) == []
    assert made.replay_ended(0) == made.tick(10**6) == []
    assert (made.phase, made.take_ask()) == (Phase.UNREACHABLE, None)


def rest(made: SayingFeed) -> list[Change]:
    """What comes of working on, to the end."""
    changes: list[Change] = []
    while made.has_more:
        changes += made.more(0)
    return changes


EVENTS = st.one_of(
    st.tuples(st.integers(0, 11), st.integers(1, 3)).map(lambda r: stored(r[0], min(12, sum(r)))),
    st.integers(0, 11).map(removed),
    st.just(CLEARED),
)


@given(
    st.lists(st.lists(EVENTS, max_size=3), max_size=20),
    st.integers(1, 30),
    st.sampled_from([1, 3, 1024]),
    st.data(),
)
def test_whatever_is_lost_nothing_is_told_that_the_engine_does_not_hold(
    said: list[list[dict[str, Any]]], kept: int, piece: int, data: st.DataObject
) -> None:
    """Against an engine that keeps its last `kept` batches, through a network that loses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_feed, "PIECE_WORK_MAX", piece)
        made, told, holds = _lose(said, kept, data)
    assert made.phase is Phase.LIVE
    assert told <= holds
    assert Told()(list(made.held_of(made.held_keys()))) == told


def _lose(
    said: list[list[dict[str, Any]]], kept: int, data: st.DataObject
) -> tuple[SayingFeed, set[int], set[int]]:
    """The feed, what it told, and what the engine holds in the end."""
    made, index = feed(can_replay=True), Told()

    def told(changes: list[Change]) -> set[int]:
        return index(changes + rest(made))

    told(made.begin(0))
    holds: set[int] = set()
    for number, events in enumerate(said):
        for event in events:
            match event["type"]:
                case "BlockStored":
                    begin = next(b for b in range(12) if event["block_hashes"][0] == name(b))
                    holds |= set(range(begin, begin + len(event["block_hashes"])))
                case "BlockRemoved":
                    holds -= {b for b in range(12) if name(b) in event["block_hashes"]}
                case _:
                    holds = set()
        if data.draw(st.booleans()):
            told(made.heard(number, batch(*events), 0))
        asked = made.take_ask()
        if asked is not None:
            first = max(asked, number + 1 - kept)
            for old in range(first, number + 1):
                if data.draw(st.integers(0, 9)):
                    told(made.replayed(old, batch(*said[old]), 0))
            told(made.replay_ended(0))
    # In the end nothing is lost any more.
    last = len(said)
    told(made.heard(last, batch(), 0))
    for _ in range(last + 2):
        asked = made.take_ask()
        if asked is None:
            break
        for old in range(max(asked, last + 1 - kept), last + 1):
            told(made.replayed(old, batch(*[*said, []][old]), 0))
        told(made.replay_ended(0))
    return made, told([]), holds

"""What an engine publishes: in order and without gaps, or void."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvstore.errors import ProtocolError
from kvstore.index import engine_feed
from kvstore.index.chain import block_keys
from kvstore.index.engine_feed import (
    JOINED_MS,
    REPLAY_MS,
    WAITING_BATCHES_MAX,
    EngineBlocks,
    EngineFeed,
    Phase,
)
from kvstore.types import BlockKey, EngineSource, SpaceId, Tier
from kvstore.wire.feed import Change, Left, Removed, Stored
from kvstore.wire.kv_events import (
    PAYLOAD_BYTES_MAX,
    EngineCleared,
    EngineRemoved,
    EngineStored,
    decode_batch,
)

SIZE, SEED = 4, "vllm-none-hash"
RNG = random.Random(1)
TOKENS = [RNG.randrange(1000) for _ in range(12 * SIZE)]
KEYS = block_keys(TOKENS, block_tokens=SIZE, seed=SEED)
SPACE = SpaceId(b"s" * 32)
PLACE = EngineSource(engine="e", rank=2, tenant="t", space=SPACE, hash_seed=SEED)
LEFT = Left("e", 2)


def low(block: int) -> int:
    return int.from_bytes(KEYS[block][-8:], "big")


Name = Callable[[int], Any]
NAMES = pytest.mark.parametrize(
    "name", [low, KEYS.__getitem__, (100).__add__], ids=["low", "whole", "any"]
)
"""What an engine may call its blocks."""


def stored(begin: int, end: int, *, name: Name = low, **more: Any) -> dict[str, Any]:
    """Blocks of the one chain, as vLLM publishes them."""
    return {
        "type": "BlockStored",
        "block_hashes": [name(block) for block in range(begin, end)],
        "parent_block_hash": name(begin - 1) if begin else None,
        "token_ids": TOKENS[begin * SIZE : end * SIZE],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * (end - begin),
        "group_idx": 0,
    } | more


def removed(*blocks: int, name: Name = low, **more: Any) -> dict[str, Any]:
    hashes = [name(block) for block in blocks]
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


@NAMES
def test_what_comes_in_order_is_told(name: Name) -> None:
    made, told = feed(), Told()
    assert told(made.begin(0)) == set()
    assert told(made.heard(0, batch(stored(0, 2, name=name)), 0)) == {0, 1}
    both = batch(stored(2, 5, name=name), removed(3, 4, name=name))
    assert told(made.heard(1, both, 0)) == {0, 1, 2}
    assert told(list(made.held_of(made.held_keys()))) == {0, 1, 2}
    assert told(made.heard(2, batch(CLEARED), 0)) == set()
    assert made.heard(3, batch(CLEARED), 0) == [], "once"
    assert told(made.heard(4, batch(stored(0, 1, name=name)), 0)) == {0}
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
    orphans = stored(5, 7, name=KEYS.__getitem__, lora_name="adapter")
    assert told(made.heard(0, batch(orphans), 0)) == {5, 6}
    half = stored(7, 8, name=KEYS.__getitem__, block_size=SIZE // 2)
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
                    begin = next(b for b in range(12) if event["block_hashes"][0] == low(b))
                    holds |= set(range(begin, begin + len(event["block_hashes"])))
                case "BlockRemoved":
                    holds -= {b for b in range(12) if low(b) in event["block_hashes"]}
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


# ── long batches ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_feed, "PIECE_WORK_MAX", 3)


@pytest.mark.usefixtures("small_pieces")
@NAMES
def test_a_long_batch_is_worked_on_in_pieces(name: Name) -> None:
    made, told = live()
    gone = removed(0, 2, 4, 6, 8, 10, name=name)
    payload = batch(stored(0, 12, name=name), gone)
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


# ── blocks and their names ───────────────────────────────────────────────────────────────────────


def put(held: EngineBlocks, told: dict[str, Any]) -> list[bytes]:
    """The keys that it has of these blocks."""
    (event,) = decode_batch(batch(told))
    assert isinstance(event, EngineStored)
    return list(held.stored(event))


def test_no_key_is_made_that_there_is_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def chained(*args: Any, **named: Any) -> list[BlockKey]:
        keys = block_keys(*args, **named)
        made.append(len(keys))
        return keys

    monkeypatch.setattr(engine_feed, "block_keys", chained)
    held = EngineBlocks(PLACE, block_count_max=3)
    assert put(held, stored(0, 5)) == KEYS[:3]
    assert put(held, stored(0, 5)) == []
    assert made == [3]
    assert held.left_out == 2 + 5


def test_a_key_is_held_as_long_as_a_name_stands_for_it() -> None:
    held = EngineBlocks(PLACE)
    put(held, stored(0, 2))
    assert [key in held for key in KEYS[:3]] == [True, True, False]
    # The second block's name stands for another block now.
    put(held, stored(0, 1, block_hashes=[low(1)], token_ids=TOKENS[SIZE : 2 * SIZE]))
    assert [key in held for key in KEYS[:2]] == [True, False]
    assert held.removed([low(0)]) == KEYS[:1]
    assert held.removed([low(0)]) == [], "once"
    assert KEYS[0] not in held
    put(held, stored(0, 1))
    held.cleared()
    assert (len(held), KEYS[0] in held) == (0, False)


LOOKAHEAD = Path(__file__).parents[2] / "data" / "lookahead_events.hex"
"""Batches of vLLM 0.33's block pool, whose hashes cover one token behind each block: 13 of TOKENS;
another prompt, with the first 8 of them; the first prompt's blocks were evicted."""


def test_an_engine_that_hashes_ahead_has_the_keys_of_all_others_and_is_told_of() -> None:
    first, second, evicted = map(bytes.fromhex, LOOKAHEAD.read_text().split())
    (event,) = decode_batch(first)
    assert isinstance(event, EngineStored)
    assert event.lookahead_token_ids == [[TOKENS[n]] for n in (4, 8, 12)]
    assert event.block_hashes != [*map(low, range(3))], "its own names"
    made = EngineFeed(PLACE, lambda _: None)
    made.begin(0)
    assert made.lookahead_tokens == 0
    made.heard(0, first, 0)
    assert made.blocks.keys() == KEYS[:3]
    made.heard(1, second, 0)
    made.heard(2, evicted, 0)
    assert [key in made.blocks for key in KEYS[:3]] == [False, True, False]
    assert made.lookahead_tokens == 1
    made.heard(3, batch(stored(0, 1)), 0)
    assert made.lookahead_tokens == 0, "it was restarted with that"


def test_what_vllm_publishes_is_understood() -> None:
    gone = removed(0, name=KEYS.__getitem__)
    first = stored(0, 1, something="that comes later", group_idx=None)
    events = decode_batch(batch(first, {"type": "Later", "x": 1}, gone, CLEARED))
    assert decode_batch(msgspec.msgpack.encode([1.5, [], None])) == []
    assert events == [
        EngineStored(
            block_hashes=[low(0)],
            parent_block_hash=None,
            token_ids=TOKENS[:SIZE],
            block_size=SIZE,
            medium="GPU",
            extra_keys=[None],
        ),
        EngineRemoved(block_hashes=[KEYS[0]], medium="GPU", group_idx=0),
        EngineCleared(),
    ]


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"nonsense",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode({"type": "BlockStored"}),
        batch(stored(0, 1, block_hashes="text")),
        batch(stored(0, 1, block_hashes=[b"short"])),
        batch(stored(0, 1, lookahead_token_ids=[7])),
        batch({"type": "BlockRemoved"}),
        batch(7),  # type: ignore[arg-type]
        batch({"type": 7}),
        bytes(PAYLOAD_BYTES_MAX + 1),
    ],
)
def test_nonsense_is_said_to_be_that(broken: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(broken)

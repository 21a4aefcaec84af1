"""KV cache groups of one engine: each with its own space, shards, credits and lookups."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from kvstore.engine.events import Changed, Clear
from kvstore.engine.state import Off
from kvstore.types import Shard
from kvstore.wire.messages import (
    Drop,
    EngineMessage,
    Hint,
    LeaseAsk,
    LeaseRelease,
    PushEnd,
    PushExpect,
    Seal,
    SessionOpen,
)
from kvstore.wire.space import (
    FULL_ATTENTION,
    Space,
    fingerprint,
    name_group,
    slot_bytes,
)
from tests.unit.engine.disk import DiskNode, known
from tests.unit.engine.harness import (
    HALVES,
    SMALL,
    WHOLE,
    Hellos,
    Node,
    Peer,
    arrays,
    attached,
    key,
    keys,
    pairs,
    space,
)

LARGE = space("window")
"""With blocks of another size than those of SMALL."""
BOTH = ((LARGE, (WHOLE,)),)


def sizes(node: Node, peer: Peer, group: int) -> set[int]:
    """Slot sizes of a group's credits."""
    slots = np.array([slot for slot, _ in peer.credits(group)], dtype=np.uint32)
    words, _ = node.state.slots.words_of(slots)
    return set(node.state.slots.sizes(words).tolist())


def test_each_group_has_credits_and_blocks_of_its_own() -> None:
    node, peer = attached(Node(slots=64), more=BOTH)
    assert node.last(peer.scheduler, SessionOpen).shard_counts == (1, 1)
    hello = peer.rank_hello(0)
    for group in (0, 1):
        assert sizes(node, peer, group) == {slot_bytes(hello.groups[group].block_bytes)}
    peer.seal(1, 2, group=1)
    assert (peer.hint(1, 2), peer.hint(1, 2, group=1)) == ([False, False], [True, True])
    assert pairs(peer.lease(1, 1, 2)) == []
    assert len(pairs(peer.lease(2, 1, 2, group=1))) == 2
    assert {row.blocks for row in node.engine.leases()} == {2}
    spaces = {row.blocks_dram for row in node.engine.spaces()}
    assert spaces == {0, 2}


def test_a_credit_serves_the_group_that_it_was_granted_for() -> None:
    node, peer = attached(Node(slots=64), more=BOTH)
    before = node.granted()
    ones, others = (peer.credits(group)[:1] for group in (0, 1))
    peer.seal(1, places=others, group=0)
    peer.seal(1, places=ones, group=1)
    # A session's number and a group's index make one number, which must not be had otherwise.
    peer.seal(1, places=others, session=peer.session + 1)
    node.hear(peer.ranks[0], Drop(peer.session + 1, *arrays(others)))
    assert node.granted() == before
    assert peer.hint(1) == peer.hint(1, group=1) == [False]
    peer.seal(1, places=others, group=1)
    assert peer.hint(1, group=1) == [True]


def test_a_push_for_a_group_whose_space_is_off_is_refused() -> None:
    node, peer = attached(Node(slots=64), more=BOTH)
    node.state.off[peer.tenant, fingerprint(LARGE, weights_epoch="")] = Off(None)
    node.hear(peer.scheduler, PushExpect("r", "p", keys(1), 5000, group=1))
    assert node.last(peer.scheduler, PushEnd).reason == "its space is switched off"


def test_windows_are_no_prefix_in_events_and_for_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(slots=64, tell_offers=False)
    monkeypatch.setattr(node, "_held", lambda: node.told)  # the tables hold more
    full, window = (
        msgspec.structs.replace(LARGE, group=name_group(kind, "ab"))
        for kind in (FULL_ATTENTION, "window of 256 tokens")
    )
    peer = Peer(node, space=full, more=((window, (WHOLE,)),))
    peer.seal(1, 2)
    peer.seal(2, 3, group=1)
    space_id = fingerprint(full, weights_epoch="")
    assert {(told[2], told[4]) for told in node.told} == {(space_id, keys(n)) for n in (1, 2)}
    assert {(row.group, row.blocks_dram) for row in node.engine.spaces()} == {
        (FULL_ATTENTION, 2),
        ("window of 256 tokens", 2),
    }
    (hashing,) = node.engine.explain.hashings()
    assert hashing.space == space_id.hex()
    assert pairs(peer.lease(1, 2, 3, group=1)), "they are found all the same"


@pytest.mark.parametrize(
    ("message", "of_rank"),
    [
        (LeaseAsk(1, keys(1), group=2), False),
        (Hint(1, keys(1), group=2), False),
        (Seal(0, b"", b"", b"", b"", 2), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_group_that_the_engine_does_not_have_ends_the_connection(
    message: EngineMessage, of_rank: bool
) -> None:
    node, peer = attached(Node(slots=64), more=BOTH)
    if isinstance(message, Seal):
        message = msgspec.structs.replace(message, session=peer.session)
    connection = peer.ranks[0] if of_rank else peer.scheduler
    node.hear(connection, message)
    assert "KV cache group that its engine does not have" in node.hangups[connection]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ((SMALL, (WHOLE,)), "two of its KV cache groups report the same space"),
        ((LARGE, (HALVES[0],)), "its ranks do not cover all layers and heads exactly once"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    second: tuple[Space, tuple[Shard]], sentence: str
) -> None:
    node, shape = Node(slots=64), Hellos(more=[second])
    node.connect(shape.scheduler_hello())
    refused = node.refusal(node.connect(shape.rank_hello(0)))
    assert refused.reason.startswith(sentence)
    assert refused.permanent


def test_ranks_with_other_lists_of_groups_are_refused_and_may_leave_before() -> None:
    node = Node(slots=64)
    one, two = Hellos(shards=HALVES), Hellos(shards=HALVES, more=[(LARGE, HALVES)])
    first, second = node.connect(one.rank_hello(0)), node.connect(two.rank_hello(1))
    scheduler = node.connect(one.scheduler_hello())
    assert node.refusal(scheduler).reason.startswith("its ranks report different models")
    assert node.refusal(first) == node.refusal(second) == node.refusal(scheduler)
    scheduler = node.connect(two.scheduler_hello(rank_count=3))
    node.connect(one.rank_hello(0))
    node.connect(two.rank_hello(1))
    node.end(scheduler)  # asks the ranks to be quiet, each about its own groups


def test_what_was_told_of_a_window_before_an_engine_came_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a disk, of which nobody knows yet what its blocks are."""
    window = msgspec.structs.replace(SMALL, group=name_group("recurrent state", "ab"))
    space_id = fingerprint(window, weights_epoch="")
    node = DiskNode(tell_offers=False)
    told: list[Changed] = []
    monkeypatch.setattr(node, "_hear_change", told.append)
    monkeypatch.setattr(node, "_held", lambda: node.told)
    node.step(known(5, space=space_id))
    Peer(node, space=window).store(6)
    assert [(each.stored, each.keys) for each in told] == [(True, keys(5))]
    told.clear()
    node.step(Clear(None, None))
    assert keys(5) in [each.keys for each in told]
    assert not any(each.stored for each in told)


# ── blocks of a prompt in several groups leave together ───────────────────────────────────────────


SLOTS = 96
BLOCKS, WINDOW = 8, 2
"""Of a prompt, and of its end that a hit takes of the second group."""
PROMPTS = [range(100 * n, 100 * n + BLOCKS) for n in range(4)]
FULL, WINDOWED = (
    msgspec.structs.replace(SMALL, group=name_group(kind, "ab"))
    for kind in (FULL_ATTENTION, "window of 32 tokens")
)


@pytest.fixture(params=["lru", "reuse"])
def peer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Peer:
    node = Node(
        slots=SLOTS, slab_slots=16, credit_blocks_max=4, policy=request.param, tell_offers=False
    )
    monkeypatch.setattr(node, "_held", lambda: node.told)  # windows are in the tables alone
    return Peer(node, space=FULL, more=((WINDOWED, (WHOLE,)),))


def store(peer: Peer, numbers: Sequence[int], group: int) -> None:
    for number in numbers:
        peer.seal(number, group=group)


def held(peer: Peer, space: Space) -> set[bytes]:
    """Keys of the blocks in dram."""
    known = peer.node.state.known
    return {
        key
        for _, tenant, address, _, key in Node._held(peer.node)
        if known[tenant, address].space == space
    }


def test_prompts_that_were_hit_leave_one_by_one_and_whole(peer: Peer) -> None:
    for prompt in PROMPTS:
        peer.hint(*prompt)
        for at in range(0, BLOCKS, 2):
            for group in (0, 1):
                store(peer, prompt[at : at + 2], group)
    for lease, prompt in enumerate(PROMPTS):
        peer.lease(2 * lease, *prompt)
        peer.lease(2 * lease + 1, *prompt[-WINDOW:], group=1)
        peer.node.hear(peer.scheduler, LeaseRelease([2 * lease, 2 * lease + 1]))
    needless = {key(number) for prompt in PROMPTS for number in prompt[:-WINDOW]}
    states = []
    for new in range(10_000, 10_000 + SLOTS):
        store(peer, [new], new % 2)
        full, windows = held(peer, FULL), held(peer, WINDOWED)
        hits = [
            [key(n) in full for n in prompt] + [key(n) in windows for n in prompt[-WINDOW:]]
            for prompt in PROMPTS
        ]
        states.append([sum(hit) for hit in hits])
        if needless & windows:
            assert all(all(hit) for hit in hits), "blocks of a hit went before the needless"
        broken = [hit for hit in hits if any(hit) and not all(hit)]
        assert len(broken) <= 1, "two prompts of which something is left that none can use"
    assert states[0] == [BLOCKS + WINDOW] * len(PROMPTS)
    assert states[-1] == [0] * len(PROMPTS)

"""The engine keeps its promises with every policy, the policy that is configured decides, and a
prompt that is stored piece by piece loses its end before its start, however long it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore.engine.memory.policies import KEYS_MIN, POLICIES, Expected, Mask, Words, maker
from kvstore.errors import ConfigError
from kvstore.types import SLOT_BYTES_MIN
from tests.steps import verify_machine
from tests.unit.engine.disk import DiskNode, known
from tests.unit.engine.harness import DEFAULTS, Node, Peer, attached, short
from tests.unit.engine.test_machine import Machine

SLOTS, PIECE = 64, 4
LONG = 3 * SLOTS
KEPT = SLOTS * 3 // 4
"""What a lookup must find of it: all but what is served for writing, and freed ahead of need."""
QUOTAS = [(), (("e", SLOTS * SLOT_BYTES_MIN * 7 // 8),)]


def test_any_order_of_events_keeps_the_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the policy that `test_machine` does not have."""
    monkeypatch.setattr(DEFAULTS, "policy", "reuse")
    verify_machine(Machine, examples=25, steps=50)


def of(**config: Any) -> Peer:
    """An engine of a node that grants it a piece at a time."""
    return Peer(Node(slots=SLOTS, slab_slots=16, credit_blocks_max=PIECE, **config))


def pieces(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[at : at + PIECE] for at in range(0, len(numbers), PIECE)]


def seal_all(peer: Peer, numbers: Sequence[int]) -> None:
    """As many at a time as there are credits."""
    for piece in pieces(numbers):
        peer.seal(*piece)


def survivors(policy: str) -> set[int]:
    """Of ten blocks that were used twice, those left after a scan of three arenas."""
    peer = of(policy=policy)
    seal_all(peer, range(10))
    for _ in range(2):
        peer.hint(*range(10))
    seal_all(peer, range(1000, 1192))
    return {number for number in range(10) if peer.hint(number) == [True]}


def test_a_scan_takes_what_is_used_from_lru_only() -> None:
    assert survivors("lru") == set()
    assert survivors("reuse") == set(range(10))


@pytest.mark.parametrize(("policy", "stays"), [("lru", False), ("reuse", True)])
def test_what_comes_back_soon_after_it_went_counts_as_used_again(
    policy: str, *, stays: bool
) -> None:
    peer = of(policy=policy)
    seal_all(peer, (*range(10), *range(1000, 1070), *range(10), *range(2000, 2192)))
    assert all(peer.hint(number) == [stays] for number in range(10))


def test_what_was_read_from_disk_counts_as_used_again() -> None:
    node, peer = attached(DiskNode(slots=64, slab_slots=16, credit_blocks_max=4, policy="reuse"))
    node.step(known(*range(8)))
    peer.hint(*range(8))
    node.read_all()
    for number in range(1000, 1192):
        peer.seal(number)
        node.write_nothing()
    assert all(node.blocks()[short(number)] == "dram+file" for number in range(8))


def test_what_is_used_no_more_goes_in_the_end() -> None:
    peer = of(policy="reuse")
    peer.seal(0)
    peer.hint(0)
    for number in range(1000, 1000 + 64 * 12):
        peer.seal(number)
    assert peer.hint(0) == [False]


def test_a_policy_that_is_not_there_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=" or ".join(POLICIES)):
        Node(policy="random")


def test_as_many_go_as_are_asked_for_however_far_apart_they_are() -> None:
    """A long look over the queue sees more than a short one: what it chose comes all the same."""
    count = 4096
    make = maker("reuse", np.zeros(count, dtype=np.int64))
    order = make(members=lambda: np.ones(count, dtype=bool), slot_count_max=count)
    words = np.arange(count)
    order.insert(words, words + 1, words.astype(np.uint64))
    order.use(words[: count // 2], words[: count // 2] + count + 1)
    order.pop(1, lambda its: words[its] >= 0)
    may: Mask = words % 3 == 0

    def may_go(its: Words | slice) -> Mask:
        chosen: Mask = may[its]
        return chosen

    assert len(order.pop(400, may_go)) == 400


# ── a chain loses its end first ──────────────────────────────────────────────────────────────────


def found(peer: Peer, lease: int, numbers: Sequence[int]) -> int:
    return len(peer.lease(lease, *numbers).slots) // 4


@pytest.mark.parametrize(("slots", "places"), [(1, KEYS_MIN), (1 << 30, 1 << 20)])
def test_a_place_is_reserved_once_and_as_many_as_there_are_slots_within_bounds(
    slots: int, places: int
) -> None:
    expected = Expected(key_count=slots)
    prints = np.arange(1, places + 1, dtype=np.uint64)
    expected.keep(prints, np.arange(places) + 7)
    expected.keep(prints[:1] + np.uint64(places), np.array([5]))
    assert expected.take(prints).tolist() == [0, *range(8, places + 7)]
    assert not expected.take(prints).any()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("quotas", QUOTAS, ids=["no quota", "quota"])
def test_a_prompt_longer_than_dram_keeps_its_start(
    policy: str, quotas: tuple[tuple[str, int], ...]
) -> None:
    peer = of(policy=policy, quotas=quotas, block_count_max=LONG)
    peer.hint(*range(LONG))
    seal_all(peer, range(LONG))
    assert found(peer, 1, range(LONG)) >= KEPT * (7 if quotas else 8) // 8


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_of_prompts_stored_in_turns_nothing_is_kept_that_cannot_be_hit(policy: str) -> None:
    peer = of(policy=policy, block_count_max=LONG)
    prompts = [range(1000 * n, 1000 * n + LONG) for n in range(3)]
    for prompt in prompts:
        peer.hint(*prompt)
    for turn in zip(*map(pieces, prompts), strict=True):
        for piece in turn:
            peer.seal(*piece)
    held = len(peer.node.blocks())
    hits = [found(peer, number, prompt) for number, prompt in enumerate(prompts, 1)]
    assert sum(hits) >= held - len(prompts) * PIECE, "the last pieces have no place before them"
    assert max(hits) >= KEPT - len(prompts) * PIECE

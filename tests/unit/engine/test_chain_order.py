"""A prompt that is stored piece by piece loses its end before its start, however long it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore.engine.memory.policies import KEYS_MIN, Expected
from kvstore.types import SLOT_BYTES_MIN
from tests.unit.engine.harness import Node, Peer

SLOTS, PIECE = 64, 4
LONG = 3 * SLOTS
KEPT = SLOTS * 3 // 4
"""What a lookup must find of it: all but what is served for writing, and freed ahead of need."""
POLICIES = ["lru", "reuse"]
QUOTAS = [(), (("e", SLOTS * SLOT_BYTES_MIN * 7 // 8),)]


def node(**config: Any) -> Node:
    return Node(slots=SLOTS, slab_slots=16, credit_blocks_max=PIECE, **config)


def pieces(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[at : at + PIECE] for at in range(0, len(numbers), PIECE)]


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quotas", QUOTAS, ids=["no quota", "quota"])
def test_a_prompt_longer_than_dram_keeps_its_start(
    policy: str, quotas: tuple[tuple[str, int], ...]
) -> None:
    peer = Peer(node(policy=policy, quotas=quotas, block_count_max=LONG))
    peer.hint(*range(LONG))
    for piece in pieces(range(LONG)):
        peer.seal(*piece)
    assert found(peer, 1, range(LONG)) >= KEPT * (7 if quotas else 8) // 8


@pytest.mark.parametrize("policy", POLICIES)
def test_of_prompts_stored_in_turns_nothing_is_kept_that_cannot_be_hit(policy: str) -> None:
    peer = Peer(node(policy=policy, block_count_max=LONG))
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

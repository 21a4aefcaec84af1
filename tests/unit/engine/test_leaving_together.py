"""Blocks of a prompt in several KV cache groups leave together, and first those that no hit takes.

No rule says so: what a hit takes of all groups is used at one time, and the rest of a window was
used last when it was stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvstore.wire.messages import LeaseRelease
from kvstore.wire.space import FULL_ATTENTION, Space, name_group
from tests.unit.engine.harness import SMALL, WHOLE, Node, Peer, key

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

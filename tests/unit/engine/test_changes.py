"""What the tiers gain and lose is told exactly. `Node.step` compares it with the tables each time,
so every test and machine of this folder that moves a block is one of the changes too."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from kvstore.engine import engine as engine_module
from kvstore.engine.events import Changed, Clear
from kvstore.types import Tier
from tests.unit.engine.disk import SPACE, DiskNode, known
from tests.unit.engine.harness import HALVES, SMALL, WHOLE, Node, Peer, keys


def all_held(node: Node) -> list[Changed]:
    """Everything that the node holds, asked slice by slice."""
    changes, row = node.engine.held(0)
    while row >= 0:
        more, row = node.engine.held(row)
        changes += more
    return changes


def as_set(changes: list[Changed]) -> set[tuple[object, ...]]:
    return {
        (c.tier, c.tenant, c.space, c.shard, c.keys[at : at + 32])
        for c in changes
        for at in range(0, len(c.keys), 32)
    }


def test_a_change_says_all_that_is_known_of_its_blocks() -> None:
    node = DiskNode()
    node.step(known(5))
    (early,) = all_held(node)
    assert early.stored
    assert (early.tier, early.label, early.block_tokens) == (Tier.FILE, "", 0)
    assert (early.tenant, early.space, early.shard) == ("t", SPACE, WHOLE)
    assert early.keys == keys(5)
    Peer(node, "llama")
    Peer(node, "its latest name")
    (change,) = all_held(node)
    assert (change.label, change.block_tokens) == ("its latest name", SMALL.block_tokens)


@settings(max_examples=20)
@given(slice_rows=st.integers(1, 9), stored=st.sets(st.integers(0, 11)), cleared=st.booleans())
def test_slices_add_up_to_what_was_told(
    slice_rows: int, stored: set[int], *, cleared: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "HELD_ROWS_MAX", slice_rows)
        node = DiskNode()
        one, two = Peer(node), Peer(node, "b", shards=HALVES, tenant="u")
        node.step(known(1, 2, 20))
        one.store(*stored)
        if cleared:
            node.step(Clear(None, "t"))
        two.store(*sorted(stored)[:2])
        node.write_all()
        assert as_set(all_held(node)) == node.told

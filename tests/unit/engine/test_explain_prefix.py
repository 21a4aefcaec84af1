"""Blocks and requests as `kvstore explain` and `inspect prefix` find them: by id, by prefix."""

from __future__ import annotations

import pytest

from kvstore.engine.why.explain import fits
from kvstore.engine.why.reasons import Reason
from kvstore.types import SpaceId
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import HALVES, SMALL, TOKENS, Node, Peer, attached, keys
from tests.unit.engine.test_explain import on_disk

# ── names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("cmpl-4f1a-0-1f2e3d4c", True),
        ("cmpl-4f", True),
        ("4f1a", True),
        ("", True),
        ("4f", False),
        ("1a-0", False),
        ("cmpl-4f1a-1", False),
    ],
)
def test_a_request_is_found_by_the_id_its_client_has(asked: str, found: bool) -> None:
    assert fits("cmpl-4f1a-0-1f2e3d4c", asked) == found


# ── by prefix ────────────────────────────────────────────────────────────────────────────────────


def test_a_prefix_now() -> None:
    node, peer = on_disk(1)
    peer.store(2)
    node.write_nothing()
    found = node.engine.explain.prefix("t", SPACE, keys(1, 2, 3))
    assert [(r.first_block, r.blocks, r.tier, r.reason) for r in found] == [
        (0, 1, "file", Reason.NONE),
        (1, 1, "dram", Reason.NONE),
        (2, 1, "", Reason.NEVER_STORED),
    ]
    assert [r.tier for r in node.engine.explain.prefix("t", SPACE, keys(2, 1))] == ["dram", "file"]
    assert node.engine.explain.prefix("u", SPACE, keys(1)) == []
    assert node.engine.explain.prefix("t", SpaceId(bytes(32)), keys(1)) == []


def test_a_prefix_that_is_not_there_in_all_shards() -> None:
    node, peer = attached(Node(), shards=HALVES)
    peer.store(1)
    peer.seal(2, rank=0)
    found = node.engine.explain.prefix("t", SPACE, keys(1, 2))
    assert [(r.blocks, r.tier, r.reason) for r in found] == [
        (1, "dram", Reason.NONE),
        (1, "", Reason.NOT_ALL_SHARDS),
    ]


def test_how_keys_are_made_is_known_of_attached_spaces() -> None:
    node = Node()
    Peer(node)
    (row,) = node.engine.explain.hashings()
    assert (row.space, row.tenant) == (SPACE.hex(), "t")
    assert (row.block_tokens, row.hash_algorithm) == (TOKENS, SMALL.hash_algorithm)

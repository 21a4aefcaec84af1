"""Ranks with a draft model, whose layers lie beside the model's in every block."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connector.checks import NotServed
from kvstore.connector.config import ConnectorConfig
from kvstore.connector.worker_side import WorkerSide
from kvstore.wire.space import shard_bytes
from tests.unit.connector.test_worker_side import (
    BLOCK,
    CONTENT,
    LAYERS,
    TOKENS,
    described,
    drafting,
    kv_cache_config,
    kv_caches,
    vllm_config,
)

pytestmark = pytest.mark.engine


def test_an_unknown_draft_method_is_refused_and_none_of_its_files_is_read(tmp_path: Path) -> None:
    speculative = SimpleNamespace(method="extract_hidden_states", draft_model_config=None)
    side = WorkerSide(
        ConnectorConfig(socket=str(tmp_path / "node.sock")),
        vllm_config("/a", speculative=speculative),
        kv_cache_config(),
    )
    side.register_kv_caches(kv_caches())
    assert "extract_hidden_states" in side.unserved


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("draft_model", "draft_model.model.layers.0.self_attn.attn"),
        ("eagle", f"model.layers.{LAYERS}.self_attn.attn"),
        ("mtp", "model.mtp.layers.0.self_attn.attn"),
    ],
)
def test_layers_of_a_draft_model_are_part_of_the_blocks(method: str, name: str) -> None:
    found, layers = drafting(method, name)
    space = found.space
    # Two heads in each layer of the model, one in the draft's: one head, of two sizes.
    assert (space.layer_count, space.kv_head_count) == (LAYERS + 1, 1)
    small = TOKENS * CONTENT * 4
    assert sorted(space.head_bytes) == [small, *[2 * small] * LAYERS]
    assert shard_bytes(space, found.shard) == found.block_bytes == BLOCK + small
    its = space.head_bytes.index(small)
    assert layers.uncompared == (frozenset() if method == "draft_model" else frozenset({its}))
    others = [described(), drafting(method, name, weights="e")[0], drafting("eagle3", name)[0]]
    spaces = {each.space for each in others}
    assert len(spaces | {space}) == len(others) + 1


@pytest.mark.parametrize(
    ("name", "more", "word"),
    [
        ("a.layer", {}, "names"),
        # The model's heads are on one rank each, the draft's only head is on both.
        (f"model.layers.{LAYERS}.self_attn.attn", {"tp": 2}, "several ranks"),
        (f"model.layers.{LAYERS}.self_attn.attn", {"tp": 2, "heads": 2}, "which"),
    ],
)
def test_a_draft_model_that_cannot_be_placed_is_not_served(
    name: str, more: dict[str, Any], word: str
) -> None:
    with pytest.raises(NotServed, match=word):
        drafting("eagle", name, **more)

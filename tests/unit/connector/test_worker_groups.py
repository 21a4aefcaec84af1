"""Ranks whose cache has several KV cache groups, which lie over each other in the same memory, or a
draft model, whose layers lie beside the model's in every block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.client.core.plan import LoadJob, StepPlan, StoreJob
from kvstore.connector.checks import NotServed
from kvstore.connector.config import ConnectorConfig
from kvstore.connector.copier import Handoff
from kvstore.connector.mapping import describe
from kvstore.connector.worker_side import WorkerSide
from kvstore.wire.messages import Seal
from kvstore.wire.space import shard_bytes
from tests.kit.scripted_node import ScriptedNode
from tests.unit.client import rank_kit
from tests.unit.connector.test_worker_side import (
    BLOCK,
    BLOCKS,
    CONTENT,
    HEADS,
    LAYERS,
    NAMES,
    TOKENS,
    Layer,
    described,
    drafting,
    finish,
    job,
    kv_cache_config,
    kv_caches,
    step,
    vllm_config,
)

pytestmark = pytest.mark.engine


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[tuple[WorkerSide, dict[str, Any]]]:
    """A rank with two KV cache groups, of one layer with a window and of two with full attention,
    in the same memory. In the protocol the one with full attention is the first."""
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    caches = {name: cache for name, cache in kv_caches().items() if name in NAMES[:2]}
    config = kv_cache_config(names=NAMES[:2])
    caches[NAMES[2]] = caches[NAMES[0]]
    window = SlidingWindowSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=CONTENT // 2,
        dtype=torch.float32,
        sliding_window=64,
    )
    group = SimpleNamespace(layer_names=NAMES[2:3], kv_cache_spec=window)
    config.kv_cache_groups.insert(0, group)
    side = WorkerSide(
        ConnectorConfig(socket=str(tmp_path / "node.sock")), vllm_config("/a"), config
    )
    side.register_kv_caches(caches)
    yield side, caches
    side.shutdown()


def test_each_group_has_a_space_and_blocks_of_its_own(
    node: ScriptedNode, groups: tuple[WorkerSide, dict[str, Any]]
) -> None:
    side, caches = groups
    hello = node.open_session(5)
    assert [group.block_bytes for group in hello.groups] == [BLOCK // 6, BLOCK // 12]
    spaces = [group.space for group in hello.groups]
    assert spaces[0].group != spaces[1].group
    assert "" not in {space.group for space in spaces}
    stores = (job(StoreJob, (2,), job=1), job(StoreJob, (3,), job=2, group=1))
    step(side, StepPlan(stores=stores), idle=False)
    seals = [node.receive(Seal) for _ in stores]
    assert [seal.group for seal in seals] == [0, 1]
    before = {name: cache.clone() for name, cache in caches.items()}
    for cache in caches.values():
        cache[2:4] = 0
    # Both were put into the same slot: the second of them is what it holds now.
    load = job(LoadJob, (3,), request="r", lease=1, group=1, checksums=seals[1].checksums)
    side.start_load_kv(StepPlan(loads=(load,)))
    assert finish(side)[:2] == ({"r"}, set())
    assert (caches[NAMES[2]][3] == before[NAMES[2]][3]).all()
    assert not caches[NAMES[1]][3].any(), "the other layer of the other group"


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_of_several_groups_ends_with_its_last_load_and_fails_whole(
    node: ScriptedNode, groups: tuple[WorkerSide, dict[str, Any]], fails: bool
) -> None:
    side, _ = groups
    node.open_session(5)
    wrong = b"\1" * 16 if fails else b""
    loads = (
        job(LoadJob, (2,), request="r", lease=1, checksums=wrong),
        job(LoadJob, (3,), request="r", lease=2, group=1),
        job(LoadJob, (4,), request="s", lease=3),
    )
    side.start_load_kv(StepPlan(loads=loads))
    ended: list[str] = []
    failed: set[str] = set()
    while len(ended) < 2:
        finished, its = side.get_finished(idle=True)
        ended += finished
        failed |= its
        assert its <= finished
        assert side.block_ids_with_load_errors() == set()
    assert sorted(ended) == ["r", "s"]
    assert failed == ({"r"} if fails else set())
    assert side.get_finished() == (set(), set())


def test_a_request_is_not_over_while_one_of_its_loads_runs(tmp_path: Path) -> None:
    config = ConnectorConfig(socket=str(tmp_path / "node.sock"))
    side = WorkerSide(config, vllm_config("/a"), kv_cache_config())
    side._handoff = Handoff(rank_kit.serving())
    loads = (rank_kit.load(5, 0, 1), rank_kit.load(5, 1, 1, lease=2))
    its = tuple(msgspec.structs.replace(load, request="r") for load in loads)
    side.start_load_kv(StepPlan(loads=its))
    for finished in (set(), {"r"}):
        with side._handoff.core() as core:
            (copy,) = rank_kit.begun(core)
            core.finished(copy, rank_kit.COPIED)
        assert side.get_finished() == (finished, set())
    side._handoff.wake.close()


@pytest.mark.parametrize(
    ("tp", "alike", "heads"),
    [(1, False, (0, 1, 1)), (2, False, (1, 2, 2)), (2, True, (0, 1, 1))],
)
def test_a_state_is_one_head_of_each_rank(
    tp: int, alike: bool, heads: tuple[int, int, int]
) -> None:
    """Its bytes have an order of their own: none of them is served to a rank of another size."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(
        block_size=TOKENS,
        shapes=((4, 2), (3,)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
        tp_replicated=alike,
    )
    config = kv_cache_config(names=NAMES[:1])
    config.kv_cache_groups.append(SimpleNamespace(layer_names=NAMES[1:], kv_cache_spec=spec))
    engine = vllm_config(
        "/a", tp=tp, layer=SimpleNamespace(get_attn_backend=Layer().get_attn_backend)
    )
    engine.parallel_config.rank = tp - 1
    states = {
        name: torch.zeros(BLOCKS, 1, 1, spec.page_size_bytes, dtype=torch.int8)
        for name in NAMES[1:]
    }
    found, _ = describe(engine, config, states, weights=["w"], group=1)
    shard, space = found.shard, found.space
    assert (shard.head_begin, shard.head_end, space.kv_head_count) == heads
    assert space.head_bytes == (16 + 12,)
    assert (shard.layer_end, space.layer_count) == (len(states), len(states))
    config.kv_cache_groups[1].kv_cache_spec = replace(spec, shapes=((2, 4), (3,)))
    other, _ = describe(engine, config, states, weights=["w"], group=1)
    assert other.space != space, "the same bytes in another order"


def test_groups_on_several_stages_are_not_served() -> None:
    config = kv_cache_config()
    config.kv_cache_groups.append(config.kv_cache_groups[0])
    engine = vllm_config("/a")
    engine.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(NotServed, match="stages"):
        describe(engine, config, kv_caches(), weights=["w"])


# ── draft models ─────────────────────────────────────────────────────────────────────────────────


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

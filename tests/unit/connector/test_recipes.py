"""Models that vLLM has recipes for: their KV cache groups are planned as the engine plans them."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from kvstore.connector.groups import EngineGroups
from tests.amounts import amount
from tests.kit.own_cache import OwnCache
from tests.unit.connector import recipes
from tests.unit.connector.test_groups import hit_as_in_the_engine

pytestmark = pytest.mark.engine

SERVED_MIN = 0.95
REFUSED = {"deepseek-v4.1", "unlimited-ocr", "voxtral", "whisper"}
BLOCKS = 20
"""Of the longest prompt, of the largest block."""
HITS = amount(8, nightly=40)
SEVERAL = [
    name
    for name, its in json.loads(recipes.GROUPS.read_text()).items()
    if len(its["groups"]) > 1 and not its["refused"]
]


def test_groups_are_those_that_vllm_makes() -> None:
    golden = json.loads(recipes.GROUPS.read_text())
    found = {name: recipes.answer(family) for name, family in recipes.families().items()}
    assert found == golden, "look at it, then: python -m tests.unit.connector.recipes"


def test_most_recipes_are_served_and_the_others_hear_why() -> None:
    golden = json.loads(recipes.GROUPS.read_text())
    models = recipes.models()
    assert len(models) == 180
    assert set(models.values()) == set(recipes.families())
    refused = {name for name, its in golden.items() if its["refused"]}
    assert refused == REFUSED
    assert all("run it without --kv-transfer-config" in golden[name]["refused"] for name in refused)
    served = sum(family not in refused for family in models.values())
    assert served / len(models) >= SERVED_MIN


@pytest.mark.parametrize("name", SEVERAL)
def test_hits_are_as_long_as_in_the_engines_own_cache(name: str) -> None:
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    config, cache = recipes.engine(recipes.families()[name])
    cache = generate_scheduler_kv_cache_config([cache])
    groups = EngineGroups(config, cache)
    longest = BLOCKS * max(groups.block_sizes)
    own, source = OwnCache(config, cache, tokens=longest), random.Random(20261124)
    lengths = set()
    for _ in range(HITS):
        present = _present(groups, cache, longest, source)
        tokens_max = source.choice((longest, longest - 1, longest // 2, longest // 3))
        lengths.add(hit_as_in_the_engine(groups, own, present, tokens_max).tokens)
    assert len(lengths) > 2, lengths


def _present(
    groups: EngineGroups, cache: Any, longest: int, source: random.Random
) -> dict[int, np.ndarray]:
    """Flags of blocks by group: all up to some place, and some of those behind; few are lost."""
    density, known = source.choice((0.97, 0.995, 1.0)), source.choice((0.3, 0.6, 1.0)) * longest
    present = {}
    for number, group in enumerate(cache.kv_cache_groups):
        size = group.kv_cache_spec.block_size
        flags = [source.random() < density for _ in range(longest // size)]
        if number == groups.served[0]:
            flags = [(at + 1) * size <= known for at in range(len(flags))]
        present[number] = np.array(flags)
    return present

"""The caches of a rank as pages of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connector.checks import NotServed
from kvstore.connector.devices import cache_arrays, cache_pages, device_of
from tests.unit.connector.test_worker_side import (
    BLOCK,
    BLOCKS,
    CONTENT,
    HEADS,
    LAYERS,
    TOKENS,
    kv_caches,
)

pytestmark = pytest.mark.engine


def test_arrays_are_the_tensors_memory() -> None:
    caches = kv_caches("bfloat16")
    arrays = cache_arrays(caches, block_count=BLOCKS)
    assert [a.shape for a in arrays] == [(BLOCKS, BLOCK // LAYERS // 2)] * LAYERS
    arrays[10][3] = 0
    assert not caches["model.layers.10.self_attn.attn"][3].any()
    assert caches["model.layers.10.self_attn.attn"][2].any()
    assert caches["model.layers.9.self_attn.attn"][3].any()


def test_padded_pages_in_blocks_are_seen_without_their_padding() -> None:
    import torch

    memory = torch.rand(BLOCKS, 2, HEADS * TOKENS * CONTENT + 16)
    caches = {
        f"layers.{n}": memory[:, n, : HEADS * TOKENS * CONTENT].unflatten(
            1, (HEADS, TOKENS, CONTENT)
        )
        for n in range(2)
    }
    arrays = cache_arrays(caches, block_count=BLOCKS)
    for n in range(2):
        expected = caches[f"layers.{n}"][4].contiguous().numpy().tobytes()
        assert arrays[n][4].tobytes() == expected


def test_caches_that_are_not_one_page_a_block_are_not_served() -> None:
    caches = kv_caches()
    split = {name: cache.unflatten(2, (2, -1)).flatten(0, 1) for name, cache in caches.items()}
    turned = {name: cache.transpose(1, 2) for name, cache in caches.items()}
    for bad in (split, turned):
        assert isinstance(cache_pages(bad, block_count=BLOCKS), NotServed)


@pytest.mark.parametrize(
    ("kinds", "is_tried", "said"),
    [
        (["cpu", "cpu"], False, "cpu"),
        (["cuda", "cuda"], True, "cuda"),
        (["cuda", "cuda"], False, 'add "unproven_cuda":true to kv_connector_extra_config'),
        (["cpu", "cuda"], True, "the KV cache is on cpu and cuda: cpu and cuda are served"),
        (["xpu"], True, "the KV cache is on xpu: cpu and cuda are served"),
    ],
)
def test_caches_on_other_devices_are_not_served(
    kinds: list[str], is_tried: bool, said: str
) -> None:
    caches: Any = {
        f"layers.{number}": SimpleNamespace(device=SimpleNamespace(type=name))
        for number, name in enumerate(kinds)
    }
    found = device_of(caches, unproven_cuda=is_tried)
    assert said in (found.reason if isinstance(found, NotServed) else found)

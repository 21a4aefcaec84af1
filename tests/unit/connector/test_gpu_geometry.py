"""Pages of vLLM's GPU attention backends, by its own shapes and strides, without a GPU."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

from kvstore.connector.checks import NotServed
from kvstore.connector.devices import cache_pages
from kvstore.kernels.device import DeviceCache

pytestmark = pytest.mark.engine

LAYERS, BLOCKS = 3, 5
SERVED = {"LBHNC", "BLHNC"}
"""Layouts in which a block of a layer is one run of bytes, heads outermost."""
TOKEN_MAJOR_ALONE = {"FLEX_ATTENTION", "HPC_ATTN", "TURBOQUANT"}
ON_GPUS = {
    *("FLASH_ATTN", "TRITON_ATTN", "TRITON_MLA", "FLASHMLA", "FLASHMLA_SPARSE", "B12X"),
    *("TOKENSPEED_MLA", "FLASHINFER_MLA_SPARSE", *TOKEN_MAJOR_ALONE),
}
"""Backends that can be imported without a GPU and without further packages."""


def specs() -> list[tuple[Any, bool]]:
    """Blocks of 16 to 256 tokens, and whether they have one head only."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    kinds = []
    for tokens, dtype in itertools.product((16, 64, 256), (torch.bfloat16, torch.uint8)):
        for heads in (1, 2, 8):
            more = {"block_size": tokens, "num_kv_heads": heads, "head_size": 64, "dtype": dtype}
            kinds.append((FullAttentionSpec(**more), heads == 1))
        more = {"block_size": tokens, "num_kv_heads": 1, "head_size": 576, "dtype": dtype}
        kinds.append((MLAAttentionSpec(**more), True))
    return kinds


def views(spec: Any, layout: Any, kernel_tokens: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Memory with random bytes, and vLLM's view of each layer in it."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheTensor, create_kv_cache_views

    page, names = spec.page_size_bytes, [f"layers.{number}" for number in range(LAYERS)]
    raw = torch.randint(-128, 128, (page * LAYERS * BLOCKS,), dtype=torch.int8)
    is_by_block = layout.is_block_outermost
    tensor = KVCacheTensor(
        size=raw.numel(),
        layers=names,
        layer_stride=page if is_by_block else page * BLOCKS,
        block_stride=page * LAYERS if is_by_block else page,
    )
    found = create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_tokens)
    return raw, dict(zip(names, found, strict=True))


def bytes_of(cache: DeviceCache, block: int) -> bytes:
    """A block as the device's copies gather it."""
    pieces = zip(cache.places(block).tolist(), cache.sizes.tolist(), strict=True)
    return b"".join(ctypes.string_at(address, size) for address, size in pieces)


@pytest.mark.parametrize("name", ["LBHNC", "BLHNC", "LBNHC", "BLNHC"])
def test_a_block_is_gathered_as_vllm_sees_it_or_not_served(name: str) -> None:
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout, served = KVCacheLayout[name], 0
    for spec, has_one_head in specs():
        raw, caches = views(spec, layout)
        pages = cache_pages(caches, block_count=BLOCKS)
        if name not in SERVED and not has_one_head:
            assert isinstance(pages, NotServed), (name, spec)
            continue
        assert not isinstance(pages, NotServed), (pages, spec)
        served += 1
        cache = DeviceCache(pages, BLOCKS)
        assert cache.block_bytes == LAYERS * spec.page_size_bytes
        assert len(cache.sizes) == (1 if layout.is_block_outermost else LAYERS), (
            "one run, one piece"
        )
        for block in range(BLOCKS):
            seen = [c[block].contiguous().view(torch.uint8).numpy() for c in caches.values()]
            assert bytes_of(cache, block) == b"".join(page.tobytes() for page in seen)
        del raw
    assert served


def test_blocks_that_the_backend_splits_are_not_served() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = next(spec for spec, _ in specs() if spec.block_size == 256)
    _, caches = views(spec, KVCacheLayout.LBHNC, kernel_tokens=64)
    found = cache_pages(caches, block_count=BLOCKS)
    assert isinstance(found, NotServed)
    assert "is not laid out as one page a block" in found.reason


def test_backends_take_a_layout_that_is_served_but_for_three() -> None:
    """The connector asks for one; vLLM follows where the backend has it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    refusing = set()
    for name in sorted(ON_GPUS):
        layouts = AttentionBackendEnum[name].get_class().supported_kv_cache_layouts()
        if layouts is not None and SERVED.isdisjoint(layout.name for layout in layouts):
            refusing.add(name)
    assert refusing == TOKEN_MAJOR_ALONE

"""Pages of vLLM's GPU attention backends, by its own shapes and strides, without a GPU."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

from kvstore.connector.checks import NotServed
from kvstore.connector.devices import cache_pages
from kvstore.connector.mapping import LAYOUTS, page_order
from kvstore.kernels.port import DeviceCache

pytestmark = pytest.mark.engine

LAYERS, BLOCKS = 3, 5
ON_GPUS = {
    *("FLASH_ATTN", "TRITON_ATTN", "TRITON_MLA", "FLASHMLA", "FLASHMLA_SPARSE", "B12X"),
    *("TOKENSPEED_MLA", "FLASHINFER_MLA_SPARSE", "FLEX_ATTENTION", "HPC_ATTN", "TURBOQUANT"),
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
    pieces = zip(cache.places([block])[0].tolist(), cache.sizes.tolist(), strict=True)
    return b"".join(ctypes.string_at(address, size) for address, size in pieces)


def memory_of(raw: Any, cache: Any, block: int) -> bytes:
    """The bytes of a block in one layer, in the order of memory."""
    parts = cache.shape[0] // BLOCKS
    begin = (
        cache.data_ptr() - raw.data_ptr() + block * parts * cache.stride(0) * cache.element_size()
    )
    return bytes(raw[begin : begin + cache[0].nbytes * parts].numpy().tobytes())


@pytest.mark.parametrize("kernel_tokens", [None, 16, 64])
@pytest.mark.parametrize("name", ["LBHNC", "BLHNC", "LBNHC", "BLNHC"])
def test_a_block_is_gathered_byte_by_byte_and_its_order_is_told(
    name: str, kernel_tokens: int | None
) -> None:
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout, seen = KVCacheLayout[name], 0
    for spec, has_one_head in specs():
        is_split = kernel_tokens not in (None, spec.block_size)
        if is_split and (layout.is_block_outermost or spec.block_size % (kernel_tokens or 1)):
            continue  # vLLM splits dense pages of one layer only
        raw, caches = views(spec, layout, kernel_tokens)
        pages = cache_pages(caches, block_count=BLOCKS)
        cache = DeviceCache(pages, BLOCKS)
        assert cache.block_bytes == LAYERS * spec.page_size_bytes
        assert len(cache.sizes) == (1 if layout.is_block_outermost else LAYERS), (
            "one run, one piece"
        )
        order = page_order(caches.values(), BLOCKS)
        is_plain = has_one_head or (name in ("LBHNC", "BLHNC") and not is_split)
        assert (order == "") is is_plain, (name, spec, order)
        for block in range(BLOCKS):
            held = bytes_of(cache, block)
            assert held == b"".join(memory_of(raw, each, block) for each in caches.values())
            if is_plain and not is_split:
                views_of = [c[block].contiguous().view(torch.uint8) for c in caches.values()]
                assert held == b"".join(view.numpy().tobytes() for view in views_of)
        seen += 1
    assert seen or (layout.is_block_outermost and kernel_tokens)


def test_heads_between_blocks_are_not_served() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = next(spec for spec, has_one_head in specs() if not has_one_head)
    _, caches = views(spec, KVCacheLayout.LBHNC)
    apart = {n: c.transpose(0, 1).contiguous().transpose(0, 1) for n, c in caches.items()}
    with pytest.raises(NotServed, match="is not laid out as one page a block"):
        cache_pages(apart, block_count=BLOCKS)


def test_every_backend_takes_a_layout_that_is_served() -> None:
    """The connector asks for one; vLLM follows where the backend has it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for name in sorted(ON_GPUS):
        layouts = AttentionBackendEnum[name].get_class().supported_kv_cache_layouts()
        assert layouts is None or not set(LAYOUTS).isdisjoint(layout.name for layout in layouts)

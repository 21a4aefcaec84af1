"""The device that a rank's KV cache is on: its pages there, and the copy engine for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvstore.connector.checks import NotServed
from kvstore.connector.mapping import layers_in_order
from kvstore.kernels.compare import BOUNDS
from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.device import DeviceCache, DeviceCopies, DeviceError, LayerPages
from kvstore.kernels.host import HostCopies
from kvstore.kernels.pack import PagedCache
from kvstore.ports import CopyEngine

if TYPE_CHECKING:
    import torch


class GroupLayers(NamedTuple):
    """The caches of a KV cache group, by layer."""

    caches: Mapping[str, torch.Tensor]
    uncompared: Collection[int]
    """Layers, by their place in the order, that shadow checks leave out."""


OpenCopies = Callable[[Sequence[GroupLayers], int], CopyEngine | NotServed]


def open_copies(groups: Sequence[GroupLayers], block_count: int) -> CopyEngine | NotServed:
    """The copy engine for these caches, which `device_of` knows and which have pages."""
    import torch

    cache = next(iter(groups[0].caches.values()))
    if cache.device.type == "cpu":
        return HostCopies(host_caches(groups, block_count))
    ordinal = int(cache.device.index or 0)
    try:
        device = CudaDevice(
            ordinal, engine_stream=lambda: int(torch.cuda.current_stream(ordinal).cuda_stream)
        )
        return DeviceCopies(device, [_device_cache(group, block_count) for group in groups])
    except DeviceError as error:
        return NotServed(f"the KV cache is on cuda: {error}")


def host_caches(groups: Sequence[GroupLayers], block_count: int) -> list[PagedCache]:
    """The caches of groups whose memory is the host's."""
    return [
        PagedCache(
            cache_arrays(group.caches, block_count=block_count),
            uncompared=group.uncompared,
            values=value_type(group.caches),
        )
        for group in groups
    ]


def _device_cache(group: GroupLayers, block_count: int) -> DeviceCache:
    pages = cache_pages(group.caches, block_count=block_count)
    assert not isinstance(pages, NotServed), pages
    return DeviceCache(
        pages, block_count, uncompared=group.uncompared, values=value_type(group.caches)
    )


def cache_arrays(
    kv_caches: Mapping[str, torch.Tensor], *, block_count: int
) -> list[NDArray[np.uint8]]:
    """Per layer, in order, the cache as [block_count, page_bytes] u8, sharing its memory, which is
    the host's. Arguments as of `cache_pages`."""
    import torch

    pages = cache_pages(kv_caches, block_count=block_count)
    assert not isinstance(pages, NotServed), pages
    arrays = []
    for name, (_, stride, page_bytes) in zip(layers_in_order(kv_caches), pages, strict=True):
        cache = kv_caches[name]
        begin = cache.storage_offset() * cache.element_size()
        memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).numpy()
        assert begin + (block_count - 1) * stride + page_bytes <= memory.size
        arrays.append(
            as_strided(memory[begin:], shape=(block_count, page_bytes), strides=(stride, 1))
        )
    return arrays


def cache_pages(
    kv_caches: Mapping[str, torch.Tensor], *, block_count: int
) -> list[LayerPages] | NotServed:
    """Per layer, in order, where its pages lie in the memory of its device.

    Args:
        kv_caches: per layer [block_count, heads, tokens, content], any strides outside of a page.
        block_count: of the engine; a cache of smaller kernel blocks is not served.
    """
    pages = []
    for name in layers_in_order(kv_caches):
        cache = kv_caches[name]
        if cache.ndim != 4 or cache.shape[0] != block_count or not cache[0].is_contiguous():
            return NotServed(
                f"the KV cache of {name} is not laid out as one page a block: shape "
                f"{tuple(cache.shape)}, strides {cache.stride()}"
            )
        size = cache.element_size()
        pages.append(LayerPages(cache.data_ptr(), cache.stride(0) * size, cache[0].numel() * size))
    return pages


def device_of(kv_caches: Mapping[str, torch.Tensor], *, unproven_cuda: bool) -> str | NotServed:
    """Type of the device that the caches are on, if it is served."""
    kinds = {str(cache.device.type) for cache in kv_caches.values()}
    if kinds == {"cpu"} or (kinds == {"cuda"} and unproven_cuda):
        return kinds.pop()
    if kinds == {"cuda"}:
        return NotServed(
            "the KV cache is on cuda, and copies there are simulated by tests but were not run on "
            'a device yet: to try them, add "unproven_cuda":true to kv_connector_extra_config'
        )
    return NotServed(f"the KV cache is on {' and '.join(sorted(kinds))}: cpu and cuda are served")


def value_type(kv_caches: Mapping[str, torch.Tensor]) -> str:
    """Type of the numbers in the cache, a key of `compare.BOUNDS`; empty: another one, such as
    8 bit, which means little without its scales."""
    types = {str(cache.dtype).removeprefix("torch.") for cache in kv_caches.values()}
    name = types.pop() if len(types) == 1 else ""
    return name if name in BOUNDS else ""

"""The device that a rank's KV cache is on: its pages there, and the copy engine for them.

The copy engine proves itself on the engine's own device before it serves: while the cache is still
empty, known bytes are stored, loaded and cleared, behind work of the engine's stream. So a driver,
layout or order of streams that is not as expected turns the cache off, with the reason.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.connector.checks import NotServed
from kvstore.connector.mapping import GroupLayers, layers_in_order
from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.device import NOT_PINNED_IN_TIME, DeviceCopies
from kvstore.kernels.host import BOUNDS, HostCopies, PagedCache
from kvstore.kernels.pinning import CHUNK_BYTES
from kvstore.kernels.port import DeviceCache, DeviceError, LayerPages
from kvstore.ports import BlockCopy, CopyEnd, CopyEngine, CopyWay
from kvstore.wire.record import checksum_of

if TYPE_CHECKING:
    import torch

PROOF_S_MAX: Final = 10.0
"""Longest copy of the proof: the first ones of a process load the driver's code."""
BUSY_CYCLES: Final = 50_000_000
"""Work put on the engine's stream before a write, some 30 ms of a GPU: a store that does not wait
for the stream reads old bytes."""
_HEADER: Final = b"proof"


OpenCopies = Callable[[Sequence[GroupLayers], int], CopyEngine]


def open_copies(groups: Sequence[GroupLayers], block_count: int) -> CopyEngine:
    """The copy engine for these caches, which `device_of` knows and which have pages. Raises
    NotServed."""
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
        raise NotServed(f"the KV cache is on cuda: {error}") from None


def host_caches(groups: Sequence[GroupLayers], block_count: int) -> list[PagedCache]:
    """The caches of groups whose memory is the host's."""
    return [
        PagedCache(
            [layer.numpy() for layer in cache_bytes(group.caches, block_count=block_count)],
            uncompared=group.uncompared,
            values=value_type(group.caches),
        )
        for group in groups
    ]


def _device_cache(group: GroupLayers, block_count: int) -> DeviceCache:
    pages = cache_pages(group.caches, block_count=block_count)
    return DeviceCache(
        pages, block_count, uncompared=group.uncompared, values=value_type(group.caches)
    )


def cache_bytes(kv_caches: Mapping[str, torch.Tensor], *, block_count: int) -> list[torch.Tensor]:
    """Per layer, in order, the cache as [block_count, page_bytes] u8, sharing its memory. Arguments
    and errors as of `cache_pages`."""
    import torch

    found = []
    pages = cache_pages(kv_caches, block_count=block_count)
    for name, (_, stride, page_bytes) in zip(layers_in_order(kv_caches), pages, strict=True):
        cache, size = kv_caches[name], kv_caches[name].element_size()
        shape = block_count, page_bytes // size
        found.append(cache.as_strided(shape, (stride // size, 1)).view(torch.uint8))
    return found


def cache_pages(kv_caches: Mapping[str, torch.Tensor], *, block_count: int) -> list[LayerPages]:
    """Per layer, in order, where its pages lie in the memory of its device.

    Args:
        kv_caches: per layer [kernel blocks, heads, tokens, content], where the kernel blocks of a
            block follow one another. A page is one run of bytes, in any order
            (`mapping.page_order`).
        block_count: of the engine.

    Raises:
        NotServed: a layer has no such pages.
    """
    pages = []
    for name in layers_in_order(kv_caches):
        cache = kv_caches[name]
        if cache.ndim != 4 or cache.shape[0] % block_count or not _is_one_run(cache, block_count):
            raise NotServed(
                f"the KV cache of {name} is not laid out as one page a block: shape "
                f"{tuple(cache.shape)}, strides {cache.stride()}"
            )
        size, parts = cache.element_size(), cache.shape[0] // block_count
        page = LayerPages(
            cache.data_ptr(), cache.stride(0) * parts * size, cache[0].numel() * parts * size
        )
        pages.append(page)
    return pages


def _is_one_run(cache: torch.Tensor, block_count: int) -> bool:
    """Whether the bytes of a block have no gap between them, and none of another block."""
    axes = sorted(
        (stride, size)
        for size, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True)
        if size > 1
    )
    run = 1
    for stride, size in axes:
        if stride != run:
            return False
        run *= size
    is_split = cache.shape[0] != block_count
    block = int(cache.stride(0))
    return block == run if is_split else block >= run


def prove(copies: CopyEngine, groups: Sequence[GroupLayers], block_count: int) -> str:
    """Why these copies cannot be trusted, by trying them; empty: they can. The engine has not used
    its cache yet. Leaves zeros in the blocks tried."""
    size = max(copies.block_bytes(number) for number in range(len(groups)))
    memory = np.frombuffer(mmap.mmap(-1, CHUNK_BYTES + size), np.uint8)
    try:
        copies.attach(memory, lambda: memory.size)
        caches = (cache_bytes(group.caches, block_count=block_count) for group in groups)
        reasons = (_Proof(copies, n, its, memory).reason() for n, its in enumerate(caches))
        reason = next(filter(None, reasons), "")
        if not reason:
            copies.attach(memory[:0], lambda: 0)  # unpins it
    except DeviceError as error:
        reason = str(error)
    return reason


class _Proof:
    """The proof of a KV cache group, which the engine's thread runs alone."""

    def __init__(
        self, copies: CopyEngine, number: int, layers: list[torch.Tensor], memory: NDArray[np.uint8]
    ) -> None:
        """`layers`: of `cache_bytes`; `memory`: room for a block that lies in two registrations."""
        self._copies, self._number, self._layers = copies, number, layers
        size = copies.block_bytes(number)
        self._begin = CHUNK_BYTES - size // 2 if size <= CHUNK_BYTES else 0
        self._slot = memory[self._begin : self._begin + size]

    def reason(self) -> str:
        """See `prove`."""
        first, last = 0, len(self._layers[0]) - 1
        near = [block for block in (first + 1, last - 1) if first < block < last]
        before = [self._read(block) for block in near]
        found = self._stores(last) or self._loads(first)
        if not found and [self._read(block) for block in near] != before:
            found = "a copy changed another block"
        for block in (first, last):
            end = self._do(CopyWay.CLEAR, block)
            if not found and (end.reason or any(self._read(block))):
                found = end.reason or "a cleared block is not zero"
        return found

    def _stores(self, block: int) -> str:
        data = self._noise(1)
        self._write(block, data)
        end, deadline = self._do(CopyWay.STORE, block), time.monotonic() + PROOF_S_MAX
        while end.reason == NOT_PINNED_IN_TIME and time.monotonic() < deadline:
            end = self._do(CopyWay.STORE, block)  # other ranks of the machine pin theirs, too
        if end.reason:
            # Without pinned memory, loads go on: an operator sees it, and the engine is served.
            return "" if self._copies.trouble else end.reason
        if self._slot.tobytes() != data or end.checksum != checksum_of(_HEADER, [data]):
            return "a stored block has other bytes than the engine wrote"
        return ""

    def _loads(self, block: int) -> str:
        data = self._noise(2)
        self._slot[:] = np.frombuffer(data, np.uint8)
        end = self._do(CopyWay.LOAD, block)
        if end.reason:
            return end.reason
        if self._read(block) != data or end.checksum != checksum_of(_HEADER, [data]):
            return "a loaded block has other bytes than were stored"
        return ""

    def _noise(self, seed: int) -> bytes:
        return np.random.default_rng(seed).bytes(self._slot.size)

    def _do(self, way: CopyWay, block: int) -> CopyEnd:
        mark = self._copies.mark()
        copy = BlockCopy(1, way, self._number, block, self._begin, _HEADER, after=mark)
        self._copies.begin(copy)
        deadline = time.monotonic() + PROOF_S_MAX
        while time.monotonic() < deadline:
            for end in self._copies.ended():
                return end
        return CopyEnd(1, reason=f"a copy did not end within {PROOF_S_MAX:.0f} s")

    # ── the engine's side ────────────────────────────────────────────────────────────────────────

    def _read(self, block: int) -> bytes:
        return b"".join(layer[block].cpu().numpy().tobytes() for layer in self._layers)

    def _write(self, block: int, data: bytes) -> None:
        """Write a block on the engine's stream, behind work that takes a while."""
        import torch

        pages = [layer[block] for layer in self._layers]
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(pages[0].device)
        if held.device.type == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001 - torch's own tests of streams use it
        for page, part in zip(pages, held.split([page.numel() for page in pages]), strict=True):
            page.copy_(part)


def device_of(kv_caches: Mapping[str, torch.Tensor]) -> str:
    """Type of the device that the caches are on. Raises NotServed."""
    import torch

    kinds = {str(cache.device.type) for cache in kv_caches.values()}
    if kinds == {"cuda"} and getattr(torch.version, "hip", None) is not None:  # AMD's, too
        raise NotServed("the KV cache is on an AMD GPU (ROCm): NVIDIA GPUs and CPUs are served")
    if kinds in ({"cpu"}, {"cuda"}):
        return kinds.pop()
    raise NotServed(f"the KV cache is on {' and '.join(sorted(kinds))}: cpu and cuda are served")


def value_type(kv_caches: Mapping[str, torch.Tensor]) -> str:
    """Type of the numbers in the cache, a key of `host.BOUNDS`; empty: another one, such as
    8 bit, which means little without its scales."""
    types = {str(cache.dtype).removeprefix("torch.") for cache in kv_caches.values()}
    name = types.pop() if len(types) == 1 else ""
    return name if name in BOUNDS else ""

"""A copy engine on a real GPU, for the suite of `tests/contract/test_copy_engine.py`."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from kvstore.kernels.cuda import CudaDevice, cuda_runtime
from kvstore.kernels.device import DeviceCopies
from kvstore.kernels.port import DeviceCache
from kvstore.types import PAGE_BYTES
from tests.kit.copy_parties import BLOCKS, Party


class GpuParty(Party):
    """The cache is memory of device 0, which the engine's stream writes and reads."""

    by_pieces = True

    def __init__(self, page_bytes: tuple[int, ...], *, block_major: bool, values: str) -> None:
        super().__init__(page_bytes, block_major=block_major)
        self._runtime = cuda_runtime()
        self._call("cudaSetDevice", 0)
        self._stream = self.new_stream()
        (self._address,) = self._call("cudaMalloc", self.cache_bytes)
        self._call("cudaMemset", self._address, 0, self.cache_bytes)
        self._call("cudaDeviceSynchronize")  # not every stream waits for that
        device = CudaDevice(0, engine_stream=lambda: self._stream)
        cache = DeviceCache(self.pages(int(self._address)), BLOCKS, values=values)
        self.copies: DeviceCopies = DeviceCopies(device, [cache], by_pieces=self.by_pieces)
        assert not self.copies.moves.trouble
        self.attach()

    def new_stream(self) -> int:
        """The engine's."""
        return int(self._call("cudaStreamCreate")[0])

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        status, *values = getattr(self._runtime, name)(*arguments)
        assert status == self._runtime.cudaError_t.cudaSuccess, (name, status)
        return tuple(values)

    def _move(self, block: int, data: np.ndarray[Any, Any], *, is_write: bool) -> None:
        """Between the pages of a block and the host's memory, in the order of the stream."""
        kind, at = self._runtime.cudaMemcpyKind.cudaMemcpyDefault, data.ctypes.data
        for page in self.pages(int(self._address)):
            place = page.address + block * page.stride_bytes
            target, source = (place, at) if is_write else (at, place)
            self._call("cudaMemcpyAsync", target, source, page.size_bytes, kind, self._stream)
            at += page.size_bytes

    def write(self, block: int, data: bytes) -> None:
        held = np.frombuffer(data, np.uint8)
        self._move(block, held, is_write=True)
        self._call("cudaStreamSynchronize", self._stream)  # the bytes of the host may go now

    def read(self, block: int) -> bytes:
        data = np.zeros(self.block_bytes, np.uint8)
        self._move(block, data, is_write=False)
        self._call("cudaStreamSynchronize", self._stream)
        return data.tobytes()

    def close(self) -> None:
        super().close()
        self._call("cudaFree", self._address)


class StagedGpuParty(GpuParty):
    by_pieces = False


class CupyParty(StagedGpuParty):
    """Its bytes are written, read and summed up by cupy, which has no part in kvstore: bindings of
    ours that lie would agree with themselves."""

    def __init__(self, page_bytes: tuple[int, ...], *, block_major: bool, values: str) -> None:
        self._cupy = pytest.importorskip("cupy")
        super().__init__(page_bytes, block_major=block_major, values=values)

    def new_stream(self) -> int:
        self._outside = self._cupy.cuda.Stream(non_blocking=True)
        return int(self._outside.ptr)

    def _move(self, block: int, data: np.ndarray[Any, Any], *, is_write: bool) -> None:
        cupy, at = self._cupy, 0
        for page in self.pages(int(self._address)):
            place = page.address + block * page.stride_bytes
            memory = cupy.cuda.UnownedMemory(place, page.size_bytes, owner=self, device_id=0)
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            array = cupy.ndarray((page.size_bytes,), cupy.uint8, pointer)
            part = data[at : at + page.size_bytes]
            if is_write:
                array.set(part, stream=self._outside)
            else:
                got = array.get(stream=self._outside)
                self._outside.synchronize()
                part[:] = got
            with self._outside:
                on_device = int(weighted_sum(cupy, array))
            assert on_device == int(weighted_sum(np, part)), "the bus changed bytes"
            at += page.size_bytes


def weighted_sum(library: Any, data: Any) -> Any:
    """Of bytes by their places, by numpy or cupy."""
    places = library.arange(1, data.size + 1, dtype=library.uint64)
    return (data.astype(library.uint64) * places).sum()


def prepare_gpu() -> None:
    """Have what the driver opens in a process and never closes, before a baseline of descriptors
    is taken: a context, a stream, memory, and cupy's first kernel."""
    with contextlib.suppress(Exception):  # a GPU that does not work is found by its tests
        runtime = cuda_runtime()
        runtime.cudaSetDevice(0)
        _, stream = runtime.cudaStreamCreate()
        _, address = runtime.cudaMalloc(PAGE_BYTES)
        runtime.cudaMemsetAsync(address, 0, PAGE_BYTES, stream)
        runtime.cudaStreamSynchronize(stream)
        runtime.cudaFree(address)
        runtime.cudaStreamDestroy(stream)
        import cupy

        int(weighted_sum(cupy, cupy.ones(8, cupy.uint8)))


GPU_PARTIES = (GpuParty, StagedGpuParty, CupyParty)

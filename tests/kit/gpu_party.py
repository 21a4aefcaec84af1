"""A copy engine on a real GPU, for the suite of `tests/contract/test_copy_engine.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.kernels.caches import DeviceCache
from kvstore.kernels.cuda import CudaDevice, cuda_runtime
from kvstore.kernels.device import DeviceCopies
from kvstore.kernels.strategy import Strategy, Thresholds
from tests.kit.copy_parties import BLOCKS, Party


class GpuParty(Party):
    """The cache is memory of device 0, which the engine's stream writes and reads."""

    strategy = Strategy.COPY

    def __init__(self, page_bytes: tuple[int, ...], *, block_major: bool, values: str) -> None:
        super().__init__(page_bytes, block_major=block_major)
        self._runtime = cuda_runtime()
        self._call("cudaSetDevice", 0)
        (self._stream,) = self._call("cudaStreamCreate")
        (self._address,) = self._call("cudaMalloc", self.cache_bytes)
        self._call("cudaMemset", self._address, 0, self.cache_bytes)
        device = CudaDevice(0, engine_stream=lambda: int(self._stream))
        cache = DeviceCache(self.pages(int(self._address)), BLOCKS, values=values)
        self.copies: DeviceCopies = DeviceCopies(
            device, [cache], thresholds=Thresholds.that_choose(self.strategy)
        )
        assert not self.copies.moves.trouble
        self.attach()

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


class MoveGpuParty(GpuParty):
    strategy = Strategy.MOVE


class StagedGpuParty(GpuParty):
    strategy = Strategy.STAGED


GPU_PARTIES = (GpuParty, MoveGpuParty, StagedGpuParty)

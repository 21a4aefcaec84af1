"""Memory of an NVIDIA GPU for the benchmarks of kernels: filled, read, and timed."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.device import Device, DeviceError
from kvstore.kernels.launches import Launch
from kvstore.kernels.reference import Bytes

SEED, RUNS, LOOK_S = 1, 5, 0.000_1
Addresses = NDArray[np.uint64]


class Memory(Protocol):
    """Memory of a device, whose kernels are launched on one stream."""

    @property
    def launch(self) -> Launch: ...
    def room(self, size: int) -> int: ...
    def put(self, data: bytes | NDArray[Any]) -> int: ...
    def get(self, address: int, size: int) -> bytes: ...
    def copy(self, target: int, source: int, size: int) -> None: ...
    def wait(self) -> None: ...
    def free(self) -> None: ...


def one(value: int) -> Addresses:
    return np.array([value], np.uint64)


class DeviceMemory:
    """`Memory` of a GPU, through the port; at most `size_bytes` are put or read in one go."""

    def __init__(self, device: CudaDevice, size_bytes: int) -> None:
        self._device = device
        self._stream, self._event = device.stream(is_urgent=False), device.event()
        self._host = np.zeros(size_bytes, np.uint8)
        device.pin(self._host.ctypes.data, size_bytes)
        self._held: list[int] = []
        self.launch: Launch = device.launcher(self._stream)

    def room(self, size: int) -> int:
        address = self._device.allocate(size)
        if not address:
            raise DeviceError(f"no {size} bytes of memory are left: try a smaller --mib")
        self._held.append(address)
        return address

    def put(self, data: bytes | NDArray[Any]) -> int:
        held = np.frombuffer(data if isinstance(data, bytes) else data.tobytes(), np.uint8)
        address = self.room(held.size)
        self._host[: held.size] = held
        self.copy(address, self._host.ctypes.data, held.size)
        self.wait()
        return address

    def get(self, address: int, size: int) -> bytes:
        self.copy(self._host.ctypes.data, address, size)
        self.wait()
        return self._host[:size].tobytes()

    def copy(self, target: int, source: int, size: int) -> None:
        self._device.copy(self._stream, one(target), one(source), one(size))

    def wait(self) -> None:
        finish(self._device, self._stream, self._event)

    def free(self) -> None:
        while self._held:
            self._device.free(self._held.pop())

    def close(self) -> None:
        self.free()
        self._device.unpin(self._host.ctypes.data)


def finish(device: Device, stream: int, event: int) -> None:
    """Wait for the stream."""
    device.record(event, stream)
    while not device.has_happened(event):
        pass


def rate(work: Callable[[], None], wait: Callable[[], None], size: int) -> float:
    """GB/s, of the median run. The first one warms up."""
    seconds = []
    for _ in range(RUNS + 1):
        begin = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - begin)
    return round(size / statistics.median(seconds[1:]) / 1e9, 3)


def noise(size: int, seed: int = SEED) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


# ── gather and scatter ───────────────────────────────────────────────────────────────────────────

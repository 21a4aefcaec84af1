"""The GPU of a run, under two hands: ours, and those of a library that has no part in kvstore.

    Gpu        device 0 as the product has it (`kernels.cuda.CudaDevice`), and the witness
    Cupy       the witness: memory of the GPU read, written and copied by cupy
    Rehearsed  the witness over the simulated device of the tests, for a rehearsal without a GPU

The witness makes what bytes are compared with and what rates are divided by: bindings of our own
that lie would agree with themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.gpu.findings import NotHere, Options
from kvstore.kernels.cuda import CudaDevice, cuda_runtime
from kvstore.kernels.port import DeviceError
from kvstore.types import PAGE_BYTES
from kvstore.units import MIB

PEAK_BYTES = 256 * MIB

Bytes = NDArray[np.uint8]


class Witness(Protocol):
    """Memory of the GPU in other hands. All calls wait for their end."""

    engine_stream: int
    """Address of the stream on which the engine computes."""

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def write(self, address: int, data: Bytes) -> None: ...
    def read(self, address: int, size: int) -> Bytes: ...
    def wait(self) -> None: ...

    def peak(self, seconds: float) -> dict[str, float]:
        """GB/s of large copies: `load` from pinned memory, `store` to it, `both` at once."""
        ...

    def peak_within(self, seconds: float) -> float:
        """GB/s of a large copy from memory of the GPU to memory of the GPU."""
        ...


class Cupy:
    """`Witness` of a GPU."""

    def __init__(self) -> None:
        """
        Raises:
            NotHere: no cupy, or no GPU that it can use.
        """
        try:
            import cupy

            cupy.cuda.Device(0).use()
            self._engine = cupy.cuda.Stream(non_blocking=True)
        except Exception as error:  # cupy's are of many classes, and ImportError
            raise NotHere(f"cupy cannot use a GPU here: {error!r}") from error
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self.engine_stream = int(self._engine.ptr)

    def allocate(self, size: int) -> int:
        return int(self._runtime.malloc(size))

    def free(self, address: int) -> None:
        self._runtime.free(address)

    def array(self, address: int, size: int) -> Any:
        """That memory as cupy's array of bytes."""
        memory = self._cupy.cuda.UnownedMemory(address, size, owner=self, device_id=0)
        place = self._cupy.cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray((size,), self._cupy.uint8, place)

    def write(self, address: int, data: Bytes) -> None:
        self.array(address, data.size).set(data, stream=self._engine)
        self._engine.synchronize()

    def read(self, address: int, size: int) -> Bytes:
        got: Bytes = self.array(address, size).get(stream=self._engine)
        self._engine.synchronize()
        return got

    def wait(self) -> None:
        self._runtime.deviceSynchronize()

    def peak(self, seconds: float) -> dict[str, float]:
        host = [self._cupy.cuda.alloc_pinned_memory(PEAK_BYTES) for _ in range(2)]
        there = [self.allocate(PEAK_BYTES) for _ in range(2)]
        for pinned, address in zip(host, there, strict=True):
            view = np.frombuffer(pinned, np.uint8, PEAK_BYTES)
            view[:] = np.resize(noise(MIB, address), PEAK_BYTES)
            self.write(address, view)
        ends = [(there[0], host[0].ptr), (host[1].ptr, there[1])]
        chosen = {"load": ends[:1], "store": ends[1:], "both": ends}
        found = {name: self._rate(pairs, seconds) for name, pairs in chosen.items()}
        for address in there:
            self.free(address)
        return found

    def peak_within(self, seconds: float) -> float:
        there = [self.allocate(PEAK_BYTES) for _ in range(2)]
        found = self._rate([(there[0], there[1])], seconds)
        for address in there:
            self.free(address)
        return found

    def _rate(self, ends: list[tuple[int, int]], seconds: float) -> float:
        """GB/s of cudaMemcpyAsync, each pair of target and source on a stream of its own."""
        streams = [self._cupy.cuda.Stream(non_blocking=True) for _ in ends]
        kind = self._runtime.memcpyDefault
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for (target, source), stream in zip(ends, streams, strict=True):
                for _ in range(4):
                    self._runtime.memcpyAsync(target, source, PEAK_BYTES, kind, stream.ptr)
                    count += 1
            self.wait()
        return count * PEAK_BYTES / (time.perf_counter() - begin) / 1e9


class Rehearsed:
    """`Witness` of a simulated device, whose memory is touched in the order of its streams."""

    def __init__(self, seed: int) -> None:
        from tests.kit.fake_cuda import FakeCuda
        from tests.kit.simulated_device import SimulatedDevice

        self.device = SimulatedDevice(seed, PAGE_BYTES)
        self.runtime = FakeCuda(self.device)
        self.engine_stream = self.runtime.engine_stream

    def allocate(self, size: int) -> int:
        return self.device.allocate(size)

    def free(self, address: int) -> None:
        self.wait()
        self.device.free(address)

    def write(self, address: int, data: Bytes) -> None:
        held = np.ascontiguousarray(data)
        self._move(address, held.ctypes.data, held.size)

    def read(self, address: int, size: int) -> Bytes:
        got = np.zeros(size, np.uint8)
        self._move(got.ctypes.data, address, size)
        return got

    def _move(self, target: int, source: int, size: int) -> None:
        def work(_: Bytes) -> None:
            ctypes.memmove(target, source, size)

        self.device.launch(work)
        self.wait()

    def wait(self) -> None:
        self.device.finish()

    def peak(self, seconds: float) -> dict[str, float]:
        return dict.fromkeys(("load", "store", "both"), self.peak_within(seconds))

    def peak_within(self, seconds: float) -> float:
        ends, count, begin = np.ones((2, MIB), np.uint8), 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            ends[0], count = ends[1], count + 1
        return count * MIB / (time.perf_counter() - begin) / 1e9


class Gpu:
    """Device 0: as the product has it, and the witness."""

    def __init__(self, open_device: Callable[[], CudaDevice], witness: Witness) -> None:
        self.open_device = open_device
        """One for each copy engine, which closes it."""
        self.witness = witness
        self.device = open_device()

    @contextlib.contextmanager
    def memory(self, size: int) -> Iterator[int]:
        address = self.witness.allocate(size)
        try:
            yield address
        finally:
            self.witness.free(address)

    def finish(self, stream: int, event: int) -> None:
        """Wait for what the stream was given so far."""
        self.device.record(event, stream)
        while not self.device.has_happened(event):
            pass


def open_gpu(options: Options, *, engine_stream: Callable[[], int] | None = None) -> Gpu:
    """The GPU, or in a rehearsal the simulated one. `engine_stream`: None: the witness's.

    Raises:
        NotHere: there is no GPU, or a library for it is missing.
        DeviceError: the product cannot use it.
    """
    if options.is_rehearsal:
        from tests.kit.fake_cuda import FakeKernels

        rehearsed = Rehearsed(options.seed)
        return Gpu(
            lambda: CudaDevice(
                0,
                engine_stream=lambda: rehearsed.engine_stream,
                runtime=rehearsed.runtime,
                driver=rehearsed.runtime,
                kernels=FakeKernels(rehearsed.device),
            ),
            rehearsed,
        )
    witness = Cupy()
    stream = engine_stream or (lambda: witness.engine_stream)
    return Gpu(lambda: CudaDevice(0, engine_stream=stream), witness)


def cuda(name: str, *arguments: Any) -> tuple[Any, ...]:
    """Values of a function of CUDA's runtime that the product does not call. Raises DeviceError."""
    runtime = cuda_runtime()
    status, *values = getattr(runtime, name)(*arguments)
    if status != runtime.cudaError_t.cudaSuccess:
        raise DeviceError(f"{name}: {status.name}")
    return tuple(values)


def pages(size: int) -> Bytes:
    """Memory of the host's, of whole pages."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def noise(size: int, seed: int) -> Bytes:
    """Never zeros: they hide what was not written."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def one(value: int) -> NDArray[np.uint64]:
    return np.array([value], np.uint64)

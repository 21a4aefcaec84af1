"""NVIDIA's runtime, as its bindings offer it, over a simulated device: for `kernels.cuda`.

Constants, enumerations and structures are the real ones.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import runtime as real

from kvstore.kernels.cuda import CudaKernels
from kvstore.kernels.device import DeviceError
from kvstore.kernels.launches import (
    DIGESTS,
    MANY_MAX,
    MOVE_MANY,
    MOVE_PIECES,
    PAYLOADS_MAX,
    PIECES_MAX,
    Kernel,
)
from kvstore.kernels.shared import HANDLE_BYTES
from tests.kit.simulated_device import ENGINE_STREAM, SimulatedDevice

OK, FAILED = real.cudaError_t.cudaSuccess, real.cudaError_t.cudaErrorIllegalAddress
INVALID = real.cudaError_t.cudaErrorInvalidValue
NO_MEMORY = real.cudaError_t.cudaErrorMemoryAllocation
FIRST_HANDLE = 0x7F00_0000
"""Handles are addresses, not small numbers."""


class FakeCuda:
    """Functions of the runtime that `kernels.cuda` calls. `engine_stream` is the engine's."""

    engine_stream = FIRST_HANDLE + ENGINE_STREAM

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._thread = threading.local()
        self._engine_thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        found = getattr(real, name)
        assert not name.startswith("cuda") or isinstance(found, (int, type)), f"{name}: not faked"
        return found

    def _answer(self, function: Any, *arguments: Any, error: Any = FAILED) -> tuple[Any, ...]:
        assert getattr(self._thread, "device", None) == 0, "no device was chosen in this thread"
        is_apart = getattr(self._thread, "is_apart", False)
        assert is_apart != (threading.get_ident() == self._engine_thread), "it would end a capture"
        try:
            value = function(*arguments)
        except DeviceError:
            self._thread.last_error = error
            return (error, None)
        return (OK,) if value is None else (OK, value)

    def cudaGetLastError(self) -> tuple[Any, ...]:
        """Of this thread; the engine asks for it, too."""
        last = getattr(self._thread, "last_error", OK)
        self._thread.last_error = OK
        return (last,)

    def cudaDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        assert device == 0
        known = {real.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem: 1}
        return self._answer(lambda: known[attribute])

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        status, *address = self._answer(self._device.allocate, size)
        if address == [0]:
            status = self._thread.last_error = NO_MEMORY
        return (status, *address)

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        return self._answer(self._device.free, address)

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        self._thread.device = device
        return (OK,)

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        assert mode == real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._thread.is_apart = True
        return (OK, real.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal)

    def cudaDeviceGetStreamPriorityRange(self) -> tuple[Any, ...]:
        return (OK, 0, -5)

    def cudaStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Any, ...]:
        assert flags == real.cudaStreamNonBlocking, "it would wait for the default stream"
        assert priority in (0, -5)
        return self._answer(lambda: FIRST_HANDLE + self._device.stream(is_urgent=priority == -5))

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == real.cudaEventDisableTiming
        return self._answer(lambda: FIRST_HANDLE + self._device.event())

    def cudaEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        return self._answer(self._device.record, event - FIRST_HANDLE, stream - FIRST_HANDLE)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        return self._answer(self._device.wait, stream - FIRST_HANDLE, event - FIRST_HANDLE)

    def cudaEventQuery(self, event: int) -> tuple[Any, ...]:
        status, *values = self._answer(self._device.has_happened, event - FIRST_HANDLE)
        if values == [False]:
            status = self._thread.last_error = real.cudaError_t.cudaErrorNotReady
        return (status,)

    def cudaMemcpyBatchAsync(
        self,
        targets: list[int],
        sources: list[int],
        sizes: list[int],
        count: int,
        attributes: list[Any],
        first_of: list[int],
        attribute_count: int,
        stream: int,
    ) -> tuple[Any, ...]:
        assert len(targets) == len(sources) == len(sizes) == count
        assert len(attributes) == len(first_of) == attribute_count
        order = real.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        assert all(each.srcAccessOrder == order for each in attributes)
        arrays = (np.array(each, np.uint64) for each in (targets, sources, sizes))
        return self._answer(self._device.copy, stream - FIRST_HANDLE, *arrays)

    def cudaMemsetAsync(self, target: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        assert value == 0
        pieces = np.array([target], np.uint64), np.array([size], np.uint64)
        return self._answer(self._device.clear, stream - FIRST_HANDLE, *pieces)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> tuple[Any, ...]:
        assert flags == real.cudaHostRegisterPortable | real.cudaHostRegisterMapped
        return self._answer(self._device.pin, address, size, error=NO_MEMORY)

    def cudaHostUnregister(self, address: int) -> tuple[Any, ...]:
        return self._answer(self._device.unpin, address)

    def cudaDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Any, ...]:
        assert (length >= 13, device) == (True, 0)
        return self._answer(lambda: self._device.name.encode() + b"\0")

    def cudaIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:
        handle = real.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), self._device.share(address), HANDLE_BYTES)
        return self._answer(lambda: handle)

    def cudaIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:
        assert flags == real.cudaIpcMemLazyEnablePeerAccess
        its = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
        return self._answer(self._device.open, its, error=INVALID)

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:
        return self._answer(self._device.leave, address)


class FakeKernels(CudaKernels):
    """The kernels that move pieces and make digests, on a simulated device."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__("sm_90")
        self._device = device
        self._digesting: dict[int, list[Kernel]] = {}
        """Kernels of a digest that were launched on each stream; the last one makes it."""

    def load(self, kernel: Kernel) -> Any:
        trouble = self._device.move_trouble()
        if trouble:
            raise DeviceError(trouble)
        return None

    def launch(
        self, stream: int, kernel: Kernel, grid: tuple[int, int], arguments: Sequence[Any]
    ) -> None:
        assert min(grid) > 0
        if kernel in DIGESTS:
            self._digest(stream - FIRST_HANDLE, kernel, arguments)
            return
        (pieces,) = arguments
        table = np.frombuffer(pieces, np.uint64).copy()
        room = {MOVE_PIECES: PIECES_MAX, MOVE_MANY: MANY_MAX}[kernel]
        columns = table[:-1].reshape(3, room)[:, : int(table[-1])]
        self._device.move(stream - FIRST_HANDLE, *columns)

    def _digest(self, stream: int, kernel: Kernel, arguments: Sequence[Any]) -> None:
        launched = self._digesting.setdefault(stream, [])
        launched.append(kernel)
        if kernel != DIGESTS[-1]:
            return
        assert tuple(launched) == DIGESTS
        launched.clear()
        given, sums, found = arguments
        table = np.frombuffer(given, np.uint64)
        count, size = table[PAYLOADS_MAX:].tolist()
        assert count == 1
        self._device.digest(stream, int(table[0]), size, sums=sums.value, found=found.value)

"""NVIDIA's runtime and driver, as their bindings offer them, over a simulated device: for
`kernels.cuda`.

Constants, enumerations and structures are the real ones. Batches of copies come by a pointer to a
function with the driver's signature.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver, runtime as real

from kvstore.kernels.cuda import CudaKernels, _CopyBatch
from kvstore.kernels.launches import (
    DIGESTS,
    MANY_MAX,
    MOVE_MANY,
    MOVE_PIECES,
    PAYLOADS_MAX,
    PIECES_MAX,
    Kernel,
)
from kvstore.kernels.port import HANDLE_BYTES, DeviceError
from tests.kit.simulated_device import ENGINE_STREAM, UUID, SimulatedDevice

OK, FAILED = real.cudaError_t.cudaSuccess, real.cudaError_t.cudaErrorIllegalAddress
NO_MEMORY = real.cudaError_t.cudaErrorMemoryAllocation
FIRST_HANDLE = 0x7F00_0000
"""Handles are addresses, not small numbers."""


class FakeCuda:
    """Functions of the runtime that `kernels.cuda` calls. `engine_stream` is the engine's."""

    engine_stream = FIRST_HANDLE + ENGINE_STREAM
    can_use_host = 1

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._thread = threading.local()
        self._engine_thread = threading.get_ident()
        self._copy_batch = _CopyBatch(self._batch)
        self._streams: list[int] = []
        self._events: list[int] = []
        self.failures: list[AssertionError] = []
        """Of calls that come from C, where an exception ends."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(real if name.startswith("cuda") else driver, name)
        assert not name.startswith("cuda") or isinstance(found, (int, type)), f"{name}: not faked"
        return found

    def _check_thread(self) -> None:
        assert getattr(self._thread, "device", None) == 0, "no device was chosen in this thread"
        is_apart = getattr(self._thread, "is_apart", False)
        assert is_apart != (threading.get_ident() == self._engine_thread), "it would end a capture"

    def _answer(self, function: Any, *arguments: Any, error: Any = FAILED) -> tuple[Any, ...]:
        self._check_thread()
        try:
            value = function(*arguments)
        except DeviceError as found:
            status = getattr(real.cudaError_t, str(found), error)
            self._thread.last_error = status
            return (status, None)
        return (OK,) if value is None else (OK, value)

    def cudaGetLastError(self) -> tuple[Any, ...]:
        """Of this thread; the engine asks for it, too."""
        last = getattr(self._thread, "last_error", OK)
        self._thread.last_error = OK
        return (last,)

    def cudaDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        assert device == 0
        known = {
            real.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem: self.can_use_host
        }
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
        answer = self._answer(lambda: FIRST_HANDLE + self._device.stream(is_urgent=priority == -5))
        self._streams += answer[1:]
        return answer

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == real.cudaEventDisableTiming
        answer = self._answer(lambda: FIRST_HANDLE + self._device.event())
        self._events += answer[1:]
        return answer

    def cudaEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        assert event in self._events, "a destroyed event"
        return self._answer(self._device.record, event - FIRST_HANDLE, stream - FIRST_HANDLE)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        return self._answer(self._device.wait, stream - FIRST_HANDLE, event - FIRST_HANDLE)

    def cudaEventQuery(self, event: int) -> tuple[Any, ...]:
        assert event in self._events, "a destroyed event"
        status, *values = self._answer(self._device.has_happened, event - FIRST_HANDLE)
        if values == [False]:
            status = self._thread.last_error = real.cudaError_t.cudaErrorNotReady
        return (status,)

    def cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self._streams.remove(stream)
        return self._answer(lambda: None)

    def cudaEventDestroy(self, event: int) -> tuple[Any, ...]:
        self._events.remove(event)
        return self._answer(lambda: None)

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> tuple[Any, ...]:
        legacy = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
        assert (symbol, version, flags) == (b"cuMemcpyBatchAsync", 13_000, legacy.value)
        address = ctypes.cast(self._copy_batch, ctypes.c_void_p).value
        return (driver.CUresult.CUDA_SUCCESS, address, None)

    def _batch(self, *arguments: Any) -> int:
        try:
            return int(self._copied(*arguments))
        except AssertionError as error:
            self.failures.append(error)
            return int(driver.CUresult.CUDA_ERROR_UNKNOWN)

    def _copied(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        first_of: int,
        attribute_count: int,
        stream: int,
    ) -> Any:
        """cuMemcpyBatchAsync, whose arrays are read before it returns."""
        self._check_thread()
        assert (attribute_count, ctypes.c_size_t.from_address(first_of).value) == (1, 0)
        order = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        assert ctypes.c_int.from_address(attributes).value == order.value
        assert stream, "the default stream takes no batches"
        arrays = (
            np.frombuffer(ctypes.string_at(each, 8 * count), np.uint64)
            for each in (targets, sources, sizes)
        )
        try:
            self._device.copy(stream - FIRST_HANDLE, *arrays)
        except DeviceError as error:
            is_invalid = str(error) == "cudaErrorInvalidValue"
            status = driver.CUresult
            return (
                status.CUDA_ERROR_INVALID_VALUE if is_invalid else status.CUDA_ERROR_ILLEGAL_ADDRESS
            )
        return driver.CUresult.CUDA_SUCCESS

    def cudaMemsetAsync(self, target: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        assert value == 0
        pieces = np.array([target], np.uint64), np.array([size], np.uint64)
        return self._answer(self._device.clear, stream - FIRST_HANDLE, *pieces)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> tuple[Any, ...]:
        assert flags == real.cudaHostRegisterPortable | real.cudaHostRegisterMapped
        return self._answer(self._device.pin, address, size, error=NO_MEMORY)

    def cudaHostUnregister(self, address: int) -> tuple[Any, ...]:
        return self._answer(self._device.unpin, address)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        assert ordinal == 0
        return (driver.CUresult.CUDA_SUCCESS, ordinal)

    def cuDeviceGetUuid(self, device: int) -> tuple[Any, ...]:
        assert device == 0
        return (driver.CUresult.CUDA_SUCCESS, SimpleNamespace(bytes=UUID.bytes))

    def cudaIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:
        handle = real.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), self._device.share(address), HANDLE_BYTES)
        return self._answer(lambda: handle)

    def cudaIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:
        assert flags == real.cudaIpcMemLazyEnablePeerAccess
        its = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
        return self._answer(self._device.open, its)

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:
        return self._answer(self._device.leave, address)


class FakeKernels(CudaKernels):
    """The kernels that move pieces and make digests, on a simulated device."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__("sm_90", driver=driver)
        self._device = device
        self._digesting: dict[int, list[Kernel]] = {}
        """Kernels of a digest that were launched on each stream; the last one makes it."""

    def load(self, kernel: Kernel) -> Any:
        trouble = self._device.kernel_trouble()
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
        self._device.digest(stream, table[:count], size, sums=sums.value, found=found.value)

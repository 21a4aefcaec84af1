"""One CUDA device, through NVIDIA's bindings of its runtime: `kernels.device.Device`.

Pieces of a block are copied by the device's copy engines, a call a block (cudaMemcpyBatchAsync
of CUDA 13). Its arguments are checked against the real library, its order of events
against a simulated one. **Not run on a device yet.**

Memory is shared by CUDA's IPC handles: between processes that see the device, in one IPC namespace.

Does not cover: pages that need another order of bytes, kernels.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Final

from kvstore.kernels.device import Addresses, DeviceError
from kvstore.kernels.shared import HANDLE_BYTES

_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""
_NAME_BYTES: Final = 32
"""Room for "0000:3B:00.0", which CUDA_VISIBLE_DEVICES does not change."""


def cuda_runtime() -> Any:
    """The bindings.

    Raises:
        DeviceError: they are not installed, or the library cannot be loaded.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise DeviceError(
            f"NVIDIA's bindings are missing ({error}): pip install 'kvstore-llm[cuda]'"
        ) from None
    return runtime


class CudaDevice:
    """See the module, and the port for the methods."""

    def __init__(
        self, ordinal: int, *, engine_stream: Callable[[], int], runtime: Any = None
    ) -> None:
        """
        Args:
            ordinal: of the device, as this process counts them.
            engine_stream: address of the calling thread's stream on which the engine computes.
            runtime: as of `cuda_runtime`, which is the default.

        Raises:
            DeviceError: no bindings, no driver, or no such device.
        """
        self._runtime = runtime or cuda_runtime()
        self._ordinal = ordinal
        self._engine_stream = engine_stream
        self._thread = threading.local()
        """Whether the device was chosen in this thread."""
        self._least, self._greatest = self._call(self._runtime.cudaDeviceGetStreamPriorityRange)
        attributes = self._runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = (
            self._runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        )
        self._in_stream_order = [attributes]

    def _call(self, function: Callable[..., Any], *arguments: object) -> tuple[Any, ...]:
        """The values that a function of the runtime returns beside its status."""
        self._choose()
        return self._check(function, function(*arguments))

    def _choose(self) -> None:
        """The runtime keeps one device for each thread."""
        if not getattr(self._thread, "has_chosen", False):
            self._check(self._runtime.cudaSetDevice, self._runtime.cudaSetDevice(self._ordinal))
            self._thread.has_chosen = True

    def _check(self, function: Callable[..., Any], result: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *values = result
        if status != self._runtime.cudaError_t.cudaSuccess:
            raise DeviceError(f"{getattr(function, '__name__', function)}: {status.name}")
        return tuple(values)

    def stream(self, *, is_urgent: bool) -> int:
        priority = self._greatest if is_urgent else self._least
        # Ordered with the engine by events alone, not by the default stream.
        (stream,) = self._call(
            self._runtime.cudaStreamCreateWithPriority,
            self._runtime.cudaStreamNonBlocking,
            priority,
        )
        return int(stream)

    def event(self) -> int:
        (event,) = self._call(
            self._runtime.cudaEventCreateWithFlags, self._runtime.cudaEventDisableTiming
        )
        return int(event)

    def record(self, event: int, stream: int | None) -> None:
        of = self._engine_stream() if stream is None else stream
        self._call(self._runtime.cudaEventRecord, event, of)

    def wait(self, stream: int, event: int) -> None:
        self._call(self._runtime.cudaStreamWaitEvent, stream, event, 0)

    def has_happened(self, event: int) -> bool:
        self._choose()
        (status,) = self._runtime.cudaEventQuery(event)
        if status == self._runtime.cudaError_t.cudaErrorNotReady:
            return False
        self._check(self._runtime.cudaEventQuery, (status,))
        return True

    def copy(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self._call(
            self._runtime.cudaMemcpyBatchAsync,
            targets.tolist(),
            sources.tolist(),
            sizes.tolist(),
            len(sizes),
            self._in_stream_order,
            [0],
            1,
            stream,
        )

    def clear(self, stream: int, targets: Addresses, sizes: Addresses) -> None:
        for target, size in zip(targets.tolist(), sizes.tolist(), strict=True):
            self._call(self._runtime.cudaMemsetAsync, target, 0, size, stream)

    def pin(self, address: int, size_bytes: int) -> None:
        self._call(self._runtime.cudaHostRegister, address, size_bytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        self._call(self._runtime.cudaHostUnregister, address)

    @property
    def name(self) -> str:
        (name,) = self._call(self._runtime.cudaDeviceGetPCIBusId, _NAME_BYTES, self._ordinal)
        return str(name.decode().rstrip("\0"))

    def allocate(self, size_bytes: int) -> int:
        (address,) = self._call(self._runtime.cudaMalloc, size_bytes)
        return int(address)

    def free(self, address: int) -> None:
        self._call(self._runtime.cudaFree, address)

    def share(self, address: int) -> bytes:
        (handle,) = self._call(self._runtime.cudaIpcGetMemHandle, address)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        its = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(its.getPtr(), handle, HANDLE_BYTES)
        flags = self._runtime.cudaIpcMemLazyEnablePeerAccess  # the only ones there are
        (address,) = self._call(self._runtime.cudaIpcOpenMemHandle, its, flags)
        return int(address)

    def leave(self, address: int) -> None:
        self._call(self._runtime.cudaIpcCloseMemHandle, address)

"""One CUDA device, through NVIDIA's bindings of its runtime: `kernels.port.Device`.

Copies go by the device's copy engines, many in a call (cuMemcpyBatchAsync of CUDA 13, by ctypes:
its binding takes lists, whose conversion costs 0.7 us an entry), pieces within the device by a
kernel of `csrc/`. Arguments are checked against the real library, the order of events against a
simulated one, the kernels run on a host. **Not run on a device yet.**

A runtime keeps its last error for each thread. The bindings may bring a runtime of their own beside
PyTorch's, or share it: no call leaves an error behind that the engine could take for its own.

Memory is shared by CUDA's IPC handles: between processes that see the device, in one IPC namespace.

Does not cover: pages that need another order of bytes, machine code (`launches.py`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.installation import pip_install
from kvstore.kernels.launches import KERNELS, THREADS, Kernel, Launch, cubin, digests, moved
from kvstore.kernels.port import HANDLE_BYTES, Addresses, DeviceError

_PIN_FLAGS: Final = 1 | 2
"""cudaHostRegisterPortable, Mapped: for every context of the process, and for kernels."""
LEGACY_STREAM: Final = 1
"""Handle of PyTorch's default stream: 0 could mean the bindings' own default stream of a thread."""
OTHER_ADDRESSES: Final = (
    "this system gives pinned memory of the host other addresses on the device (Windows Subsystem "
    "for Linux?), which kvstore does not support"
)
_BATCH_VERSION: Final = 13_000
_CopyBatch = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p,) * 3,  # targets, sources, sizes
    ctypes.c_size_t,
    *(ctypes.c_void_p,) * 2,  # attributes, and the first copy of each
    ctypes.c_size_t,
    ctypes.c_void_p,  # stream
)
"""cuMemcpyBatchAsync of CUDA 13."""


def _bindings(name: str) -> Any:
    """A module of the bindings.

    Raises:
        DeviceError: they are not installed, or the library cannot be loaded.
    """
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise DeviceError(
            f"NVIDIA's bindings are missing ({error}): {pip_install('cuda')}"
        ) from None


cuda_runtime: Callable[[], Any] = functools.partial(_bindings, "runtime")
cuda_driver: Callable[[], Any] = functools.partial(_bindings, "driver")


def _driver_call(driver: Any, name: str, *arguments: Any) -> Any:
    """The value that a function of the driver's bindings returns beside its status, if any."""
    try:
        status, *values = getattr(driver, name)(*arguments)
    except RuntimeError as error:
        raise DeviceError(f"{name}: {str(error).splitlines()[0]}") from None
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{name}: {status.name}")
    return values[0] if values else None


class CudaKernels:
    """Kernels of `csrc/` on one architecture, each source loaded when it is first needed. Called
    in threads that have chosen the device."""

    def __init__(self, arch: str, *, folder: Path | None = None, driver: Any = None) -> None:
        """`arch`: such as `sm_90`. `folder`: of machine code, as of `launches.cubin`. `driver`:
        as of `cuda_driver`, which is the default."""
        self._arch, self._folder = arch, folder
        self._call = functools.partial(_driver_call, driver or cuda_driver())
        self._libraries: dict[str, Any] = {}
        self._functions: dict[Kernel, Any] = {}
        self._loading = threading.Lock()

    def load(self, kernel: Kernel) -> Any:
        """The function, in the memory of the device: a first launch allocates nothing.

        Raises:
            DeviceError: it cannot be compiled or loaded.
        """
        found = self._functions.get(kernel)
        if found is not None:
            return found
        with self._loading:
            library = self._libraries.get(kernel.source)
            if library is None:
                code = cubin(kernel.source, self._arch, folder=self._folder)
                library = self._call("cuLibraryLoadData", code, [], [], 0, [], [], 0)
                self._libraries[kernel.source] = library
            held = self._call("cuLibraryGetKernel", library, kernel.name.encode())
            self._functions[kernel] = self._call("cuKernelGetFunction", held)
        return self._functions[kernel]

    def launch(
        self, stream: int, kernel: Kernel, grid: tuple[int, int], arguments: Sequence[Any]
    ) -> None:
        """Give a launch to a stream; see `launches.Launch`. Arguments are copied."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        size = (*grid, 1, THREADS, 1, 1, 0)
        function = self.load(kernel)
        self._call("cuLaunchKernel", function, *size, stream, ctypes.addressof(pointers), 0)


class CudaDevice:
    """See the module, and the port for the methods."""

    def __init__(
        self,
        ordinal: int,
        *,
        engine_stream: Callable[[], int],
        runtime: Any = None,
        driver: Any = None,
        kernels: CudaKernels | None = None,
    ) -> None:
        """
        The engine's thread calls this.

        Args:
            ordinal: of the device, as this process counts them.
            engine_stream: address of the calling thread's stream on which the engine computes.
            runtime, driver: as of `cuda_runtime` and `cuda_driver`, which are the defaults.
            kernels: for this device; None: compiled for its architecture, if they are needed.

        Raises:
            DeviceError: no bindings, no driver, no such device, or one that reaches pinned memory
                under other addresses.
        """
        self._runtime, self._driver = runtime or cuda_runtime(), driver or cuda_driver()
        self._ordinal = ordinal
        self._engine_stream = engine_stream
        self._engine_thread = threading.get_ident()
        self._thread = threading.local()
        """Whether the device was chosen in this thread."""
        self._least, self._greatest = self._call(self._runtime.cudaDeviceGetStreamPriorityRange)
        if not self._attribute("CanUseHostPointerForRegisteredMem"):
            # A copy by the host's address would fault later, and take the engine with it.
            raise DeviceError(OTHER_ADDRESSES)
        self._in_stream_order = self._driver.CUmemcpyAttributes()
        order = self._driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._in_stream_order.srcAccessOrder = order
        self._copy_batch: Any = None
        self._streams: list[int] = []
        self._events: list[int] = []
        self._kernels = kernels

    def _call(self, function: Callable[..., Any], *arguments: object, but: str = "") -> Any:
        """The values that a function of the runtime returns beside its status; None: that is the
        error `but`, which has a meaning."""
        self._choose()
        return self._check(function, function(*arguments), but)

    def _choose(self) -> None:
        """Choose the device in this thread, as the runtime keeps one for each, and in threads other
        than the engine's leave graph captures: while the engine captures a graph, a call of theirs
        that allocates, pins or asks for an event would fail, and end the capture."""
        if getattr(self._thread, "has_chosen", False):
            return
        runtime = self._runtime
        self._check(runtime.cudaSetDevice, runtime.cudaSetDevice(self._ordinal))
        if threading.get_ident() != self._engine_thread:
            exchange = runtime.cudaThreadExchangeStreamCaptureMode
            apart = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
            self._check(exchange, exchange(apart))
        self._thread.has_chosen = True

    def _check(self, function: Callable[..., Any], result: tuple[Any, ...], but: str = "") -> Any:
        status, *values = result
        if status == self._runtime.cudaError_t.cudaSuccess:
            return values
        self._runtime.cudaGetLastError()
        if status.name != but:
            raise DeviceError(f"{getattr(function, '__name__', function)}: {status.name}")
        return None

    def stream(self, *, is_urgent: bool) -> int:
        priority = self._greatest if is_urgent else self._least
        # Ordered with the engine by events alone, not by the default stream.
        (stream,) = self._call(
            self._runtime.cudaStreamCreateWithPriority,
            self._runtime.cudaStreamNonBlocking,
            priority,
        )
        self._streams.append(int(stream))
        return int(stream)

    def event(self) -> int:
        (event,) = self._call(
            self._runtime.cudaEventCreateWithFlags, self._runtime.cudaEventDisableTiming
        )
        self._events.append(int(event))
        return int(event)

    def record(self, event: int, stream: int | None) -> None:
        of = (self._engine_stream() or LEGACY_STREAM) if stream is None else stream
        self._call(self._runtime.cudaEventRecord, event, of)

    def wait(self, stream: int, event: int) -> None:
        self._call(self._runtime.cudaStreamWaitEvent, stream, event, 0)

    def has_happened(self, event: int) -> bool:
        found = self._call(self._runtime.cudaEventQuery, event, but="cudaErrorNotReady")
        return found is not None

    def copy(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self._choose()
        if self._copy_batch is None:
            self._copy_batch = self._batch_function()
        arrays = [np.ascontiguousarray(each, np.uint64) for each in (targets, sources, sizes)]
        begin = ctypes.c_size_t(0)
        status = self._copy_batch(
            *(each.ctypes.data for each in arrays),
            len(sizes),
            self._in_stream_order.getPtr(),
            ctypes.addressof(begin),
            1,
            stream,
        )
        if status:
            known = {each.value: each.name for each in self._driver.CUresult}
            raise DeviceError(f"cuMemcpyBatchAsync: {known.get(status, status)}")

    def _batch_function(self) -> Any:
        legacy = self._driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
        arguments = (b"cuMemcpyBatchAsync", _BATCH_VERSION, legacy.value)
        address = _driver_call(self._driver, "cuGetProcAddress", *arguments)
        if not address:
            raise DeviceError("the driver has no cuMemcpyBatchAsync of CUDA 13")
        return _CopyBatch(int(address))

    def kernel_trouble(self) -> str:
        try:
            for kernel in KERNELS:
                self.kernels().load(kernel)
        except DeviceError as error:
            return str(error)
        return ""

    def move(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        moved(self.launcher(stream), targets, sources, sizes)

    def digest(self, stream: int, payloads: Addresses, size: int, *, sums: int, found: int) -> None:
        digests(self.launcher(stream), payloads, size, sums=sums, found=found)

    def launcher(self, stream: int) -> Launch:
        """The function that launches kernels on a stream."""
        return functools.partial(self.kernels().launch, stream)

    def kernels(self) -> CudaKernels:
        """The kernels for this device, made at the first call; chooses the device in this
        thread."""
        self._choose()
        if self._kernels is None:
            major, minor = (
                self._attribute(f"ComputeCapability{part}") for part in ("Major", "Minor")
            )
            self._kernels = CudaKernels(f"sm_{major}{minor}", driver=self._driver)
        return self._kernels

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._runtime.cudaDeviceAttr, f"cudaDevAttr{name}")
        (value,) = self._call(self._runtime.cudaDeviceGetAttribute, attribute, self._ordinal)
        return int(value)

    def allocate(self, size_bytes: int) -> int:
        found = self._call(self._runtime.cudaMalloc, size_bytes, but="cudaErrorMemoryAllocation")
        return int(found[0]) if found else 0

    def free(self, address: int) -> None:
        self._call(self._runtime.cudaFree, address)

    def clear(self, stream: int, targets: Addresses, sizes: Addresses) -> None:
        for target, size in zip(targets.tolist(), sizes.tolist(), strict=True):
            self._call(self._runtime.cudaMemsetAsync, target, 0, size, stream)

    def pin(self, address: int, size_bytes: int) -> None:
        self._call(self._runtime.cudaHostRegister, address, size_bytes, _PIN_FLAGS)

    def unpin(self, address: int) -> None:
        self._call(self._runtime.cudaHostUnregister, address)

    @property
    def name(self) -> str:
        """UUID of the GPU, or of the part of one (MIG) that this is: parts share a PCI address."""
        device = _driver_call(self._driver, "cuDeviceGet", self._ordinal)
        return str(uuid.UUID(bytes=_driver_call(self._driver, "cuDeviceGetUuid", device).bytes))

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

    def close(self) -> None:
        streams, self._streams = self._streams, []
        events, self._events = self._events, []
        for stream in streams:
            self._call(self._runtime.cudaStreamDestroy, stream)
        for event in events:
            self._call(self._runtime.cudaEventDestroy, event)

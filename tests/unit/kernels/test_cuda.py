"""The bindings of CUDA: calls and arguments are the real library's."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver, runtime as real

from kvstore.kernels.cuda import CudaDevice, CudaKernels
from kvstore.kernels.launches import MOVE_PIECES, Launch, moved
from kvstore.kernels.port import DeviceError
from tests.kit.fake_cuda import FakeCuda, FakeKernels
from tests.kit.simulated_device import UUID, SimulatedDevice

HAS_DEVICE = real.cudaGetDeviceCount()[0] == real.cudaError_t.cudaSuccess
PIECES = np.array([4096, 8192], np.uint64)
pytestmark = pytest.mark.skipif(HAS_DEVICE, reason="with a device `make gpu-check` calls it")


class Begun:
    """The real runtime, where the first two calls succeed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def cudaSetDevice(self, ordinal: int) -> tuple[Any, ...]:
        assert real.cudaSetDevice(ordinal)[0] != real.cudaError_t.cudaSuccess
        return (real.cudaError_t.cudaSuccess,)

    def cudaDeviceGetAttribute(self, attribute: Any, ordinal: int) -> tuple[Any, ...]:
        status, *_ = real.cudaDeviceGetAttribute(attribute, ordinal)
        can = real.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem
        return (real.cudaError_t.cudaSuccess, 1) if attribute == can else (status, 0)

    def cudaDeviceGetStreamPriorityRange(self) -> tuple[Any, ...]:
        _, least, greatest = (*real.cudaDeviceGetStreamPriorityRange(), 0, 0)[:3]
        return (real.cudaError_t.cudaSuccess, least or 0, greatest or 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda device: device.stream(is_urgent=True),
        lambda device: device.event(),
        lambda device: device.record(64, None),
        lambda device: device.record(64, 128),
        lambda device: device.wait(128, 64),
        lambda device: device.has_happened(64),
        lambda device: device.clear(128, PIECES, PIECES),
        lambda device: device.pin(4096, 4096),
        lambda device: device.unpin(4096),
        lambda device: device.move(128, PIECES, PIECES, PIECES),
        lambda device: device.digest(128, PIECES, 4096, sums=4096, found=4096),
        lambda device: device.allocate(4096),
        lambda device: device.free(4096),
        lambda device: device.share(4096),
        lambda device: device.open(bytes(64)),
        lambda device: device.leave(4096),
        lambda device: [device._streams.append(128), device.close()],
        lambda device: [device._events.append(128), device.close()],
    ],
)
def test_the_real_runtime_takes_every_call_and_misses_a_driver(
    call: Callable[[CudaDevice], object],
) -> None:
    """A function that is not there, or arguments of another kind, would be another error."""
    device = CudaDevice(0, engine_stream=lambda: 128, runtime=Begun())
    with pytest.raises(
        DeviceError, match=r"^cuda[A-Za-z]+: cudaError(InsufficientDriver|NoDevice)"
    ):
        call(device)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cuLibraryLoadData", lambda kernels: kernels.load(MOVE_PIECES)),
        ("cuLibraryGetKernel", lambda kernels: _loaded(kernels).load(MOVE_PIECES)),
        ("cuKernelGetFunction", lambda kernels: kernels._call("cuKernelGetFunction", 4096)),
        ("cuDeviceGet", lambda _: _begun().name),
        ("cuGetProcAddress", lambda _: _begun().copy(128, PIECES, PIECES, PIECES)),
        ("cuLaunchKernel", lambda kernels: moved(_launch(kernels), PIECES, PIECES, PIECES)),
    ],
)
def test_the_real_driver_takes_every_call_and_is_missing(
    name: str, call: Callable[[CudaKernels], object], tmp_path: Path
) -> None:
    """Arguments are read before the library is looked for."""
    with pytest.raises(DeviceError, match=f"^{name}: "):
        call(CudaKernels("sm_90", folder=tmp_path))


def _begun() -> CudaDevice:
    return CudaDevice(0, engine_stream=lambda: 128, runtime=Begun())


def _loaded(kernels: CudaKernels) -> CudaKernels:
    kernels._libraries["move"] = 4096
    return kernels


def _launch(kernels: CudaKernels) -> Launch:
    kernels._functions[MOVE_PIECES] = 4096
    return functools.partial(kernels.launch, 128)


def cuda_device(runtime: FakeCuda, stream: int = FakeCuda.engine_stream) -> CudaDevice:
    kernels = FakeKernels(runtime._device)
    return CudaDevice(
        0, engine_stream=lambda: stream, runtime=runtime, driver=runtime, kernels=kernels
    )


def test_a_device_that_calls_pinned_memory_by_another_name_is_refused() -> None:
    """A copy by the host's address would be an error of the engine's, later."""
    runtime = FakeCuda(SimulatedDevice(1, 4096))
    runtime.can_use_host = 0
    with pytest.raises(DeviceError, match="other addresses"):
        cuda_device(runtime)


def test_pytorchs_default_stream_is_the_one_of_all_threads() -> None:
    """Its handle is 0, which the bindings may take for one of the calling thread's own."""
    runtime, recorded = FakeCuda(SimulatedDevice(1, 4096)), []

    def record(event: int, stream: int) -> tuple[Any, ...]:
        recorded.append(stream)
        return (real.cudaError_t.cudaSuccess,)

    setattr(runtime, "cudaEventRecord", record)  # noqa: B010
    device = cuda_device(runtime, 0)
    device.record(device.event(), None)
    assert recorded == [int(real.cudaStreamLegacy)]


def test_its_name_is_that_of_a_part_of_a_gpu() -> None:
    """Two parts (MIG) have one PCI address, and no memory in common."""
    assert cuda_device(FakeCuda(SimulatedDevice(1, 4096))).name == str(UUID)


def test_a_batch_of_copies_is_read_by_pointer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any arrays, also views with a stride."""
    simulated, seen = SimulatedDevice(1), []
    device = cuda_device(FakeCuda(simulated))
    stream = device.stream(is_urgent=False)
    columns = np.arange(30, dtype=np.uint64).reshape(10, 3) + np.uint64(4096)
    monkeypatch.setattr(simulated, "copy", lambda _, *pieces: seen.extend(pieces))
    device.copy(stream, *columns.T)
    assert [each.tolist() for each in seen] == columns.T.tolist()


def test_a_driver_without_batches_says_so() -> None:
    runtime = FakeCuda(SimulatedDevice(1, 4096))
    setattr(runtime, "cuGetProcAddress", lambda *_: (driver.CUresult.CUDA_SUCCESS, 0, None))  # noqa: B010
    device = cuda_device(runtime)
    with pytest.raises(DeviceError, match="the driver has no cuMemcpyBatchAsync of CUDA 13"):
        device.copy(128, PIECES, PIECES, PIECES)


def test_an_error_that_the_bindings_do_not_know_is_named_by_its_number() -> None:
    """A driver newer than they are."""
    device = cuda_device(FakeCuda(SimulatedDevice(1, 4096)))
    device._copy_batch = lambda *_: 98_765
    with pytest.raises(DeviceError, match=r"^cuMemcpyBatchAsync: 98765$"):
        device.copy(128, PIECES, PIECES, PIECES)


def test_streams_and_events_are_given_back() -> None:
    runtime = FakeCuda(SimulatedDevice(1, 4096))
    device = cuda_device(runtime)
    device.stream(is_urgent=True), device.event()
    device.close()
    assert (runtime._streams, runtime._events) == ([], [])


def test_other_threads_than_the_engines_have_no_part_in_its_captures() -> None:
    """A call from one of them would end the capture of a graph; the engine's own mode stays."""
    simulated = SimulatedDevice(1, 4096)
    runtime = FakeCuda(simulated)
    device = cuda_device(runtime)
    events = [device.event()]
    thread = threading.Thread(target=lambda: events.append(device.event()))
    thread.start()
    thread.join()
    assert len(events) == 2
    status = real.cudaThreadExchangeStreamCaptureMode(
        real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    )[0]
    assert status == real.cudaError_t.cudaErrorInsufficientDriver, "the real one takes it"


def test_no_error_is_left_behind_for_the_engine() -> None:
    """Its own check after each launch would take it for one of its own."""
    simulated = SimulatedDevice(1, 4096)
    runtime = FakeCuda(simulated)
    device = cuda_device(runtime)
    event, stream = device.event(), device.stream(is_urgent=False)
    simulated.launch(lambda memory: None)
    device.record(event, None)
    assert device.has_happened(event) is False
    assert runtime.cudaGetLastError() == (0,)
    simulated.allocations_max = 1
    assert device.allocate(4096) == 0
    assert runtime.cudaGetLastError() == (0,)
    simulated.failure = "an illegal memory access was encountered"
    with pytest.raises(DeviceError):
        device.clear(stream, PIECES, PIECES)
    assert runtime.cudaGetLastError() == (0,)


def test_without_a_driver_it_says_so_at_once() -> None:
    with pytest.raises(DeviceError, match="cudaSetDevice: cudaError"):
        CudaDevice(0, engine_stream=lambda: 0)


def test_without_bindings_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cuda.bindings", "cuda.bindings.runtime", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DeviceError, match=r"pip install .*\[cuda\]'$"):
        CudaDevice(0, engine_stream=lambda: 0)

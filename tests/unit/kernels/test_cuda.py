"""The bindings of CUDA: calls and arguments are the real library's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import runtime as real

from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.device import DeviceError

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
        lambda device: device.copy(128, PIECES, PIECES + np.uint64(1), PIECES),
        lambda device: device.clear(128, PIECES, PIECES),
        lambda device: device.pin(4096, 4096),
        lambda device: device.unpin(4096),
        lambda device: device.name,
        lambda device: device.allocate(4096),
        lambda device: device.free(4096),
        lambda device: device.share(4096),
        lambda device: device.open(bytes(64)),
        lambda device: device.leave(4096),
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


def test_without_a_driver_it_says_so_at_once() -> None:
    with pytest.raises(DeviceError, match="cudaSetDevice: cudaError"):
        CudaDevice(0, engine_stream=lambda: 0)


def test_without_bindings_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"pip install 'kvstore-llm\[cuda\]'"):
        CudaDevice(0, engine_stream=lambda: 0)

"""First on the path of a process: CUDA's runtime and driver are those over a simulated device."""

from __future__ import annotations

from kvstore.kernels import cuda
from kvstore.types import PAGE_BYTES
from tests.kit.fake_cuda import FakeCuda
from tests.kit.simulated_device import SEED, SimulatedDevice

_runtime = FakeCuda(SimulatedDevice(SEED, PAGE_BYTES))
cuda.cuda_runtime = cuda.cuda_driver = lambda: _runtime

"""Host time and calls of CUDA for each block that the copy engine moves, one by one and batched.

    python bench/micro/copy_calls.py [--rounds 400]

Blocks of 80 pieces of 8 KiB and runs of 2 MiB are stored and loaded by `kernels.device`, hashed by
kernels, as many under way as there may be, through `kernels.cuda` and a driver and runtime that do
nothing and have done everything at once. So what is measured is Python's time for each block, and
how many calls NVIDIA's bindings get, which cost some microseconds each on top. `batch_max` 1 is one
block a call. All in one process, in turns. The link moves 640 KiB in 12 us, 2 MiB in 39.

Writes bench/results/copy_calls.json. Needs no GPU: `bench/gpu/copies.py` says what comes
of it on one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.kernels import moves
from kvstore.kernels.cuda import CudaDevice, CudaKernels, _CopyBatch
from kvstore.kernels.device import DeviceCopies
from kvstore.kernels.port import DeviceCache, LayerPages
from kvstore.ports import BlockCopy, CopyWay
from kvstore.units import KIB

SHAPES = {"pieces": (80, 8 * KIB), "runs": (1, 2048 * KIB)}
BLOCKS, SEED = 64, 1

VALUES: dict[str, tuple[Any, ...]] = {
    "cudaDeviceGetStreamPriorityRange": (0, -5),
    "cuDeviceGetUuid": (SimpleNamespace(bytes=bytes(16)),),
    **dict.fromkeys(("cudaEventQuery", "cudaEventRecord", "cudaStreamWaitEvent"), ()),
}
"""What calls return beside their status, if it is no address."""


class Nothing:
    """Runtime and driver: constants are the real ones, and calls succeed and are counted."""

    def __init__(self) -> None:
        from cuda.bindings import driver, runtime

        self._real = (runtime, driver)
        self.calls = 0
        self._batch = _CopyBatch(self._copied)

    def _copied(self, *_: Any) -> int:
        self.calls += 1
        return 0

    def cuGetProcAddress(self, *_: Any) -> tuple[Any, ...]:
        _, driver = self._real
        return (driver.CUresult(0), ctypes.cast(self._batch, ctypes.c_void_p).value, None)

    def __getattr__(self, name: str) -> Any:
        runtime, driver = self._real
        found = getattr(runtime, name, None) or getattr(driver, name)
        if isinstance(found, (int, type)):
            return found
        is_driver = name.startswith("cu") and not name.startswith("cuda")
        status = driver.CUresult(0) if is_driver else runtime.cudaError_t(0)
        value = VALUES.get(name, (1 << 20,))

        def call(*_: Any) -> tuple[Any, ...]:
            self.calls += 1
            return (status, *value)

        setattr(self, name, call)
        return call


class Loaded(CudaKernels):
    """Kernels that need no compiler."""

    def load(self, kernel: Any) -> Any:
        return 1


def measured(pieces: int, size: int, batch_max: int, rounds: int) -> dict[str, float]:
    """Microseconds and calls for each block, of the median round."""
    moves.BATCH_MAX = batch_max  # type: ignore[misc]
    nothing = Nothing()
    cuda = CudaDevice(
        0,
        engine_stream=lambda: 0,
        runtime=nothing,
        driver=nothing,
        kernels=Loaded("sm_90", driver=nothing),
    )
    layers = [LayerPages(1 << 30 | at * 64 * size, size, size) for at in range(pieces)]
    copies = DeviceCopies(cuda, [DeviceCache(layers, BLOCKS)])
    slots = np.zeros(BLOCKS * pieces * size, np.uint8)
    count = copies.copies_max
    copies.attach(slots, lambda: slots.size)
    seconds, calls = [], 0
    for number in range(rounds + 10):
        way = (CopyWay.STORE, CopyWay.LOAD)[number % 2]
        before, begin = nothing.calls, time.perf_counter()
        mark, left = copies.mark(), count
        for block in range(count):
            order = BlockCopy(block, way, 0, block, block * pieces * size, b"header", after=mark)
            copies.begin(order)
        while left:
            left -= len(copies.ended())
        seconds.append(time.perf_counter() - begin)
        calls = nothing.calls - before
    copies.close()
    # The first rounds wait for memory to be pinned.
    return {
        "host_us": round(statistics.median(seconds[10:]) / count * 1e6, 2),
        "calls": round(calls / count, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    after = moves.BATCH_MAX
    result: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        result[name] = {
            f"batch_max_{batch_max}": measured(*shape, batch_max, options.rounds)
            for batch_max in (1, after)
        }
    print(json.dumps(result, indent=1))
    print(f"copy calls: {record.write('copy_calls', result, seed=SEED)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

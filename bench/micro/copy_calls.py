"""Host time and calls of CUDA for each block that the copy engine moves, one by one and batched.

    python bench/micro/copy_calls.py [--rounds 400]

Blocks of 80 pieces of 8 KiB (staged) and of 16 pieces of 8 KiB (moved straight) are stored and
loaded by `kernels.device.DeviceCopies`, eight under way, through `kernels.cuda` and a driver and
runtime that do nothing and have done everything at once. So what is measured is Python's time for
each block, hashing left out, and how many calls NVIDIA's bindings get, which cost some microseconds
each on top. `batch_max` 1 is one block a call, as before batches. All in one process, in turns.

Writes bench/results/copy_calls.json. Needs no GPU: on one, `gpu_copies.py` says what comes of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.kernels import device as engine
from kvstore.kernels.caches import DeviceCache, LayerPages
from kvstore.kernels.cuda import CudaDevice, CudaKernels
from kvstore.kernels.hashes import Hashing
from kvstore.kernels.reference import Bytes
from kvstore.ports import BlockCopy, CopyWay
from kvstore.units import KIB

SHAPES = {"staged": (80, 8 * KIB), "moved": (16, 8 * KIB)}
BLOCKS, SEED = engine.COPIES_MAX, 1

VALUES: dict[str, tuple[Any, ...]] = {
    "cudaDeviceGetStreamPriorityRange": (0, -5),
    "cudaDeviceGetPCIBusId": (b"0000:00:00.0",),
    **dict.fromkeys(("cudaEventQuery", "cudaEventRecord", "cudaStreamWaitEvent"), ()),
}
"""What calls return beside their status, if it is no address."""


class Nothing:
    """Runtime and driver: constants are the real ones, and calls succeed and are counted."""

    def __init__(self) -> None:
        from cuda.bindings import driver, runtime

        self._real = (runtime, driver)
        self.calls = 0

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


class NoHashes:
    """Checksums that cost nothing."""

    def begin(self, header: bytes, block: Bytes) -> Hashing:
        return lambda: b""

    def close(self) -> None:
        """Nothing was begun."""


class Loaded(CudaKernels):
    """Kernels that need no compiler."""

    def load(self, kernel: Any) -> Any:
        return 1


def measured(pieces: int, size: int, batch_max: int, rounds: int) -> dict[str, float]:
    """Microseconds and calls for each block, of the median round."""
    engine.BATCH_MAX = batch_max  # type: ignore[misc]
    nothing = Nothing()
    cuda = CudaDevice(
        0, engine_stream=lambda: 0, runtime=nothing, kernels=Loaded("sm_90", driver=nothing)
    )
    layers = [LayerPages(1 << 30 | at * 64 * size, size, size) for at in range(pieces)]
    copies = engine.DeviceCopies(cuda, [DeviceCache(layers, BLOCKS)], hashes=NoHashes())
    slots = np.zeros(BLOCKS * pieces * size, np.uint8)
    copies.attach(slots, lambda: slots.size)
    seconds, calls = [], 0
    for number in range(rounds + 10):
        way = (CopyWay.STORE, CopyWay.LOAD)[number % 2]
        before, begin = nothing.calls, time.perf_counter()
        mark, left = copies.mark(), BLOCKS
        for block in range(BLOCKS):
            order = BlockCopy(block, way, 0, block, block * pieces * size, b"header", after=mark)
            copies.begin(order)
        while left:
            left -= len(copies.ended())
        seconds.append(time.perf_counter() - begin)
        calls = nothing.calls - before
    copies.close()
    # The first rounds wait for memory to be pinned.
    return {
        "host_us": round(statistics.median(seconds[10:]) / BLOCKS * 1e6, 2),
        "calls": round(calls / BLOCKS, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    after = engine.BATCH_MAX
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

"""What `make gpu-check` runs on a GPU, here on a simulated one and on the host: the program itself
is right, whatever its rates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.micro import gpu_kernels
from bench.micro.gpu_arena import gpu_name
from kvstore.kernels.strategy import BlockMoves
from kvstore.testing.simulated_device import SimulatedDevice
from kvstore.units import KIB
from tests.kit.host_kernels import HostKernels
from tests.style.tree import ROOT


class HostMemory(HostKernels):
    """`gpu_kernels.Memory`."""

    def copy(self, target: int, source: int, size: int) -> None:
        self.write(target, self.get(source, size))

    def wait(self) -> None:
        """Every call has waited."""


@pytest.fixture
def memory(program: Path) -> Iterator[HostMemory]:
    memory = HostMemory(program)
    yield memory
    memory.close()


def test_every_kernel_is_compared_with_its_reference(memory: HostMemory) -> None:
    found = gpu_kernels.kernels(memory, 2 * 640 * KIB)
    assert found.keys() == {
        *("copy_within_gb_per_s", "digests", "reshard", "fp8_encode", "fp8_decode"),
        *("planes_encode", "planes_decode"),
    }
    rows = [row for row in found.values() if isinstance(row, dict)]
    assert all(row["wrong"] == 0 and row["gb_per_s"] > 0 for row in rows)


def test_a_kernel_that_does_nothing_is_found(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "launch", lambda *_: None)
    found = gpu_kernels.kernels(memory, 2 * 640 * KIB)
    assert all(row["wrong"] for row in found.values() if isinstance(row, dict))


def test_cycles_compare_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(3, 4096)
    assert gpu_kernels.cycles(device, 60) == {"cycles": 60, "wrong_bytes": 0}
    assert (device.allocation_count, device.pinned_bytes) == (1, 0)
    begin = BlockMoves.__init__

    def one_less(moves: BlockMoves, *arguments: Any) -> None:
        begin(moves, *arguments)
        moves._block_bytes = [size - np.uint64(1) for size in moves._block_bytes]

    monkeypatch.setattr(BlockMoves, "__init__", one_less)
    assert gpu_kernels.cycles(device, 60)["wrong_bytes"] > 0


@pytest.mark.parametrize("verb", ["store", "load"])
def test_cycles_see_that_nothing_was_moved(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockMoves, verb, lambda *_: None)
    assert gpu_kernels.cycles(SimulatedDevice(3, 4096), 3)["wrong_bytes"] > 0


def test_ways_are_measured_for_each_shape() -> None:
    found = gpu_kernels.ways(SimulatedDevice(3, 4096), 4 * KIB, [(2, 64), (5, 512)])
    for row in found:
        for verb in ("store", "load"):
            assert row[verb].keys() == {"copy", "move", "staged", "one_copy", "fastest"}
            assert row[verb]["fastest"] in {"copy", "move", "staged"}


@pytest.mark.skipif(bool(gpu_name()), reason="with a GPU `make gpu-check` calls it")
def test_without_a_gpu_it_says_that_it_was_skipped() -> None:
    program = [sys.executable, str(ROOT / "bench" / "micro" / "gpu_kernels.py")]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stdout == "kernels: skipped, because there is no NVIDIA GPU on this machine\n"

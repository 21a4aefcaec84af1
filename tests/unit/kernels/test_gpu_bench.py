"""What `make gpu-check` runs on a GPU, here on a simulated one and on the host: the program itself
is right, whatever its rates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.micro import gpu_kernels, gpu_sanitizer
from bench.micro.gpu_arena import gpu_name
from kvstore.kernels.strategy import BlockMoves
from kvstore.units import KIB
from tests.kit.host_kernels import HostKernels
from tests.kit.simulated_device import SimulatedDevice
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
    said = "kernels: skipped, because there is no NVIDIA GPU on this machine\n"
    assert _run("gpu_kernels.py", "--check").stdout == said
    said = "sanitizer: skipped, because there is no NVIDIA GPU on this machine\n"
    assert _run("gpu_sanitizer.py").stdout == said


def _run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(ROOT / "bench" / "micro" / name), *arguments]
    there = {**os.environ, "PYTHONPATH": str(ROOT)}  # for a changed program in a folder of its own
    return subprocess.run(program, capture_output=True, text=True, check=False, env=there)


def test_without_the_sanitizer_it_says_where_it_is_to_be_had() -> None:
    assert "CUDA toolkit" in gpu_sanitizer.reason_to_skip("a GPU", None)
    assert not gpu_sanitizer.reason_to_skip("a GPU", "/usr/local/cuda/bin/compute-sanitizer")


def test_checksums_are_measured_on_both_sides(memory: HostMemory) -> None:
    for row in gpu_kernels.checksums(memory, 256 * KIB):
        assert row.keys() == {"block_bytes", "one", "threads", "kernels", "fastest"}
        assert row["fastest"] in {"one", "threads", "kernels"}


@pytest.mark.skipif(os.geteuid() != 0, reason="memory of a simulated device is root's")
@pytest.mark.skipif(bool(gpu_name()), reason="with a GPU `make gpu-check` calls it")
@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_slab_is_shared_fenced_and_outlived(tmp_path: Path, *, is_fenced: bool) -> None:
    """Between processes. Shown too early, bytes are found under the word of others."""
    program = tmp_path / "bench" / "micro" / "gpu_hbm.py"
    program.parent.mkdir(parents=True)
    source = (ROOT / "bench" / "micro" / "gpu_hbm.py").read_text()
    steps = [
        "        self.host[:] = number % 251\n",
        "        self.copy(self.slab, self.host.ctypes.data)\n",
    ]
    assert source.count("".join(steps)) == 1
    early = source.replace("".join(steps), "".join(reversed(steps)))
    program.write_text(source if is_fenced else early)
    done = _run(str(program), "--rounds", "200", "--out", str(tmp_path / "out.json"))
    failed = json.loads((tmp_path / "out.json").read_text())["failed"]
    assert ("generations_fence_stale_bytes" in failed) is not is_fenced
    assert bool(failed) is not is_fenced, failed
    assert done.returncode == bool(failed), done.stderr

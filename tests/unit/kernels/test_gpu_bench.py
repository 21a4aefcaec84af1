"""Parts of the run on a GPU, here on a simulated one and on the host: they are right themselves,
whatever the rates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import copies, edges, goals, kernels, rank
from bench.gpu.findings import Findings, Options
from bench.gpu.machine import Bytes, Gpu, open_gpu, pages
from bench.gpu.rank import Rank, Shape
from bench.gpu.smi import describe_gpu
from kvstore.kernels.moves import BlockMoves
from kvstore.ports import CopyWay
from kvstore.units import KIB
from kvstore.wire.checksum import PIECE_BYTES
from tests.kit.host_kernels import HostKernels
from tests.style.tree import ROOT

REHEARSAL = Options(seed=3, is_rehearsal=True)
SIZES = [1, 17, 240, 1025, 70_000, PIECE_BYTES + 1]
SHAPE, BLOCKS = Shape(3, 512), 6


class HostMemory:
    """`bench.gpu.kernels.Memory`: the real kernels, as a program of the host."""

    def __init__(self, program: Path) -> None:
        self._kernels = HostKernels(program)
        self.launch = self._kernels.launch

    def put(self, data: Bytes) -> int:
        return self._kernels.put(data)

    def get(self, address: int, size: int) -> bytes:
        return self._kernels.get(address, size)

    def free(self) -> None:
        self._kernels.free()

    def wait(self) -> None:
        """Every call has waited."""

    def close(self) -> None:
        self._kernels.close()


@pytest.fixture
def memory(program: Path) -> Iterator[HostMemory]:
    memory = HostMemory(program)
    yield memory
    memory.close()


@pytest.fixture
def gpu() -> Gpu:
    return open_gpu(REHEARSAL)


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────


def test_every_kernel_is_compared_with_its_reference(memory: HostMemory) -> None:
    found = kernels.moves(memory, 5)
    assert len(found) == len(kernels.PIECES)
    assert all(row["wrong_bytes"] == 0 for row in found.values()), found
    assert kernels.digests(memory, 5, SIZES)["wrong_sizes"] == []


def test_a_kernel_that_does_nothing_is_found(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "launch", lambda *_: None)
    assert all(row["wrong_bytes"] > 0 for row in kernels.moves(memory, 5).values())
    assert kernels.digests(memory, 5, SIZES)["wrong_sizes"] == SIZES


def test_sizes_are_drawn_anew_with_each_seed() -> None:
    first, second = kernels.digest_sizes(1), kernels.digest_sizes(2)
    assert len(first) == len(second) == 81
    assert set(first) & set(second) >= set(kernels.EDGES)
    assert first != second


@pytest.mark.parametrize("by_pieces", [False, True])
def test_cycles_compare_every_byte(gpu: Gpu, *, by_pieces: bool) -> None:
    assert kernels.cycles(gpu, 4, 8, by_pieces=by_pieces) == {"cycles": 8, "wrong_bytes": 0}


@pytest.mark.parametrize("by_pieces", [False, True])
@pytest.mark.parametrize("verb", ["store", "load"])
def test_cycles_see_that_nothing_was_moved(
    verb: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, *, by_pieces: bool
) -> None:
    monkeypatch.setattr(BlockMoves, verb, lambda *_: None)
    assert kernels.cycles(gpu, 4, 3, by_pieces=by_pieces)["wrong_bytes"] > 0


def test_cycles_see_a_byte_beside_the_blocks_of_the_device(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = type(gpu.witness).read

    def finds_another(witness: Any, address: int, size: int) -> Bytes:
        found = read(witness, address, size)
        found[-1] ^= 1
        return found

    monkeypatch.setattr(type(gpu.witness), "read", finds_another)
    assert kernels.cycles(gpu, 4, 3, by_pieces=False)["wrong_bytes"] == 3


def test_cycles_see_a_byte_beside_the_slots(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Bytes] = []
    store = BlockMoves.store

    def keeps(size: int) -> Bytes:
        made.append(pages(size))
        return made[-1]

    def writes_one_more(moves: BlockMoves, *given: Any) -> None:
        store(moves, *given)
        made[-1][-1] ^= 1

    monkeypatch.setattr(kernels, "pages", keeps)
    monkeypatch.setattr(BlockMoves, "store", writes_one_more)
    assert kernels.cycles(gpu, 4, 3, by_pieces=False)["wrong_bytes"] == 3


# ── copies ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_block_major", [False, True])
def test_random_cycles_are_compared_with_the_witness(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, *, is_block_major: bool
) -> None:
    made = Rank(gpu, SHAPE._replace(is_block_major=is_block_major), BLOCKS, seed=1)
    assert made.table != sorted(made.table)
    assert made.wrong_cycles(10, seed=1) == 0
    monkeypatch.setattr(rank, "checksum_of", lambda header, parts: b"another")
    assert made.wrong_cycles(3, seed=1) == 3
    monkeypatch.undo()
    monkeypatch.setattr(made, "read", made.slot)
    assert made.wrong_cycles(3, seed=1) > 0
    made.close()


def test_a_rate_leaves_no_copy_under_way(gpu: Gpu) -> None:
    made = Rank(gpu, SHAPE, BLOCKS, seed=1)
    assert made.rate((CopyWay.STORE, CopyWay.LOAD), 0.02) > 0
    assert not made.do(CopyWay.STORE, 1, 2).reason
    made.close()


@pytest.mark.parametrize("by_pieces", [False, True])
def test_a_block_lies_across_two_chunks(gpu: Gpu, *, by_pieces: bool) -> None:
    found = copies.across_chunks(gpu, REHEARSAL, by_pieces=by_pieces)
    assert found["wrong_cycles"] == 0
    assert found["pinned_mib"] == 65


def test_copies_that_are_not_cut_at_chunks_are_found(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.kernels.moves.cut", lambda *given: given[:3])
    with pytest.raises(AssertionError, match="INVALID_VALUE"):
        copies.across_chunks(gpu, REHEARSAL, by_pieces=False)


def test_shapes_are_those_of_the_models() -> None:
    sizes = {name: shape.block_bytes // KIB for name, shape in copies.SHAPES.items()}
    assert (sizes[goals.RUNS], sizes[goals.PAGES]) == (2048, 2048)
    assert sizes["Llama-3-70B tp8"] == 640
    assert copies.SHAPES[goals.PAGES].page_bytes == 64 * KIB


# ── parts over the simulated device ──────────────────────────────────────────────────────────────


def test_rehearsed_parts_meet_their_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {name: copies.SHAPES[name] for name in (goals.RUNS, goals.PAGES)}
    monkeypatch.setattr(copies, "SHAPES", copies.SHAPES | some)
    for name in copies.SHAPES.keys() - some.keys() - {copies.CROSSING}:
        monkeypatch.delitem(copies.SHAPES, name)
    for module, name in ((kernels, "kernels"), (copies, "copies")):
        findings = Findings()
        module.run(findings, REHEARSAL)
        assert goals.missed(name, findings.values, is_rehearsal=True) == []


def test_edges_see_what_the_simulated_device_refuses() -> None:
    findings = Findings()
    edges.run(findings, REHEARSAL)
    found = findings.values
    assert "INVALID_VALUE" in found["across_two_pins"]["load by copy"]
    assert found["batch_with_one_across"]["entries_that_happened"][2:] == [False, False]
    assert found["calls"].keys() > {"mark", "wait", "look", "batch of 1"}


# ── processes ────────────────────────────────────────────────────────────────────────────────────


def _rehearsed(name: str, folder: Path) -> dict[str, object]:
    """A part, of a changed program in that folder if there is one."""
    into = folder / "out.json"
    command = [sys.executable, "-m", "bench.gpu.part", name, "--rehearse", "--into", str(into)]
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=there, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(into.read_text())
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="memory of a simulated device is root's")
@pytest.mark.skipif(bool(describe_gpu()), reason="with a GPU `make gpu-check` calls it")
@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_slab_is_shared_fenced_and_outlived(tmp_path: Path, *, is_fenced: bool) -> None:
    """Between processes. Shown too early, bytes are found under the word of others."""
    program = tmp_path / "bench" / "gpu" / "hbm.py"
    program.parent.mkdir(parents=True)
    source = (ROOT / "bench" / "gpu" / "hbm.py").read_text()
    steps = [
        "        self.host[:] = number % 251\n",
        "        self.copy(self.slab, self.host.ctypes.data)\n",
    ]
    assert source.count("".join(steps)) == 1
    early = source.replace("".join(steps), "".join(reversed(steps)))
    program.write_text(source if is_fenced else early)
    failed = _rehearsed("hbm", tmp_path)["failed"]
    assert isinstance(failed, list)
    assert ("generations_fence_stale_bytes" in failed) is not is_fenced
    assert bool(failed) is not is_fenced, failed


@pytest.mark.skipif(bool(describe_gpu()), reason="with a GPU `make gpu-check` calls it")
def test_two_processes_register_a_nodes_memory_and_one_is_killed(tmp_path: Path) -> None:
    found = _rehearsed("arena", tmp_path)
    assert found["failed"] == []
    assert len(found["checks"]) == 5  # type: ignore[arg-type]

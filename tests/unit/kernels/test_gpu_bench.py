"""Parts of the run on a GPU, here on a simulated one and on the host: they are right themselves,
whatever the rates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from bench.gpu import arena, beside, copies, edges, goals, kernels, node, rank, smi
from bench.gpu.child import Child
from bench.gpu.engine import Loaded
from bench.gpu.findings import Findings, NotHere, Options
from bench.gpu.machine import Bytes, Gpu, open_gpu, pages
from bench.gpu.rank import Rank, Shape
from bench.gpu.smi import describe_gpu
from kvstore.kernels.moves import BlockMoves
from kvstore.ports import CopyWay
from kvstore.wire.record import PIECE_BYTES
from tests.kit.host_kernels import HostKernels
from tests.style.tree import ROOT

REHEARSAL = Options(seed=3, is_rehearsal=True)
SIZES = [1, 17, 240, 1025, 70_000, PIECE_BYTES + 1]
SHAPE, BLOCKS = Shape(3, 512), 6


class HostMemory(HostKernels):
    """`bench.gpu.kernels.Memory`: the real kernels, as a program of the host."""

    def wait(self) -> None:
        """Every call has waited."""


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
    found = _rehearsed("hbm", tmp_path)
    failed, fenced = found["failed"], found["fenced"]
    assert isinstance(failed, list)
    assert isinstance(fenced, dict)
    assert fenced["void"] > 0
    assert fenced["good" if is_fenced else "wrong"] > 0
    assert ("generations_fence_stale_bytes" in failed) is not is_fenced
    assert bool(failed) is not is_fenced, failed
    assert "cudaIpcOpenMemHandle: " in str(found["handle_of_the_dead"])


@pytest.mark.skipif(bool(describe_gpu()), reason="with a GPU `make gpu-check` calls it")
def test_two_processes_register_a_nodes_memory_and_one_is_killed(tmp_path: Path) -> None:
    found = _rehearsed("arena", tmp_path)
    assert found["failed"] == []
    assert len(found["checks"]) == 5  # type: ignore[arg-type]


def test_a_rank_is_killed_when_copies_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    worker = object.__new__(arena.Worker)

    def rate(*_: Any) -> float:
        steps.append("copies")
        if len(steps) == 3:
            raise StopIteration
        return 1.0

    worker.rank = SimpleNamespace(rate=rate)  # type: ignore[assignment]
    monkeypatch.setattr(arena, "say", lambda _: steps.append("says"))
    with pytest.raises(StopIteration):
        worker.churn()
    assert steps == ["copies", "says", "copies"]


@pytest.mark.parametrize("name", ["hbm", "arena"])
@pytest.mark.skipif(bool(describe_gpu()), reason="there may be a cupy that works")
def test_a_process_without_its_witness_says_so(name: str, tmp_path: Path) -> None:
    """Its parent was told only that it ended."""
    (tmp_path / "cupy.py").write_text("raise ImportError('no cupy')")
    monkey = pytest.MonkeyPatch()
    monkey.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    word = os.memfd_create("word")
    os.ftruncate(word, 4096)
    arguments = {
        "hbm": ["--role", "node", "--word", str(word), "--seed", "1"],
        "arena": ["--worker", str(word), str(word), "0", "4096", "1"],
    }
    try:
        with pytest.raises(NotHere, match="no cupy"):
            Child(f"bench.gpu.{name}", arguments[name], [word])
    finally:
        monkey.undo()
        os.close(word)


# ── the node part ────────────────────────────────────────────────────────────────────────────────


class Loads:
    """`bench.gpu.engine.Engine`, whose loads take a while, none at all, or fail."""

    def __init__(
        self, *seconds: float, rest_s: float = 0.0, error: Exception | None = None
    ) -> None:
        """`seconds`: of each load, the last one for all that follow."""
        self.loading, self.scheduler = threading.Event(), SimpleNamespace(gone="")
        self._seconds, self._rest_s, self._error = [*seconds], rest_s, error

    def spoil(self, *_: Any) -> None:
        if self._rest_s:
            threading.Event().wait(self._rest_s)

    def load(self, *_: Any) -> Loaded:
        if self._error is not None:
            raise self._error
        took = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        if took:
            self.loading.set()
            threading.Event().wait(took)
            self.loading.clear()
        return Loaded(1, 0, 0, took, [])

    def crash(self) -> None:
        self.scheduler.gone = "killed"


def _beside_a_kill(loads: Any) -> tuple[list[Loaded], bool]:
    crash: Callable[[], object] = loads.crash
    return node.loads_beside_a_kill(loads, crash, [0], [b""])


def test_a_node_is_killed_while_a_load_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "KILL_WITHIN_S", 0.2)
    assert _beside_a_kill(Loads(0.03))[1]
    assert not _beside_a_kill(Loads(0.0))[1]
    monkeypatch.setattr(node, "KILL_AFTER_S", 0.02)
    monkeypatch.setattr(node, "KILL_WITHIN_S", 5.0)
    loads, was_loading = _beside_a_kill(Loads(0.001, 0.001, 0.3, rest_s=0.05))
    assert was_loading, "killed after a load that was too short, not in the next one"
    assert len(loads) == 3


def test_a_load_that_hangs_beside_a_kill_is_no_lease_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "KILL_WITHIN_S", 0.01)
    assert _beside_a_kill(Loads(error=RuntimeError("no lease"))) == ([], False)
    assert _beside_a_kill(Loads(error=ConnectionResetError())) == ([], False)
    with pytest.raises(TimeoutError, match="did not end"):
        _beside_a_kill(Loads(error=TimeoutError("a load did not end")))


# ── memory in use ────────────────────────────────────────────────────────────────────────────────


def test_memory_that_the_driver_does_not_name_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = Findings()
    monkeypatch.setattr(smi, "_smi", lambda _: "[N/A]")
    baseline = smi.memory_in_use()
    assert baseline.keys() == {"shared"}
    assert smi.device_memory_checks(baseline, findings) == {}
    assert findings.values["device_memory"].startswith("not judged")
    monkeypatch.setattr(smi, "_smi", lambda _: "100")
    held = smi.device_memory_checks(smi.memory_in_use(), findings)
    assert held == {"device_memory_at_baseline": True}


def test_copies_pause_between_two_looks(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the product's thread does: one that spins has the interpreter half of the time."""
    made, pauses = Rank(gpu, SHAPE, BLOCKS, seed=1), list[float]()
    monkeypatch.setattr(rank, "_PAUSE", SimpleNamespace(wait=pauses.append))
    made.rate((CopyWay.STORE,), 0.02)
    assert pauses == []
    made.rate((CopyWay.STORE,), 0.02, pause_s=0.0001)
    assert pauses
    assert set(pauses) == {0.0001}
    made.close()


# ── beside ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("works", [True, False])
def test_copies_that_fail_beside_products_are_recorded(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, *, works: bool
) -> None:
    if not works:
        monkeypatch.setattr(Rank, "rate", mock.Mock(side_effect=RuntimeError("no copies")))
    monkeypatch.setattr(beside, "milliseconds", lambda *_: 1.0)
    torch: Any = SimpleNamespace(bfloat16=None)
    for name in ("randn", "randn_like", "empty_like"):
        setattr(torch, name, lambda *_, **__: [])
    found = beside.beside_copies(torch, gpu, SHAPE, seed=1)
    rows = [row for works_ in found.values() for row in works_.values()]
    assert len(rows) == 4
    assert all(row["errors"] == ([] if works else ["RuntimeError: no copies"]) for row in rows)
    missed = goals.missed("beside", {"products": {"x": found}})
    assert any("errors: RuntimeError: no copies" in each for each in missed) is not works


def test_work_is_queued_before_its_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is recorded while the GPU idles has the gaps between launches, too."""
    monkeypatch.setattr(beside, "SECONDS", 0.0001)
    steps: list[str] = []

    class Event:
        def __init__(self, **_: Any) -> None: ...
        def record(self) -> None:
            steps.append("event")

        def synchronize(self) -> None: ...
        def elapsed_time(self, _: Any) -> float:
            return 20.0

    cuda = SimpleNamespace(Event=Event, _sleep=lambda _: steps.append("sleep"))
    took = beside.milliseconds(SimpleNamespace(cuda=cuda), lambda: steps.append("work"))
    assert took == 20.0 / beside.GROUP
    assert steps[: 3 + beside.GROUP] == ["sleep", "event", *["work"] * beside.GROUP, "event"]

"""Spike: two processes pin the arena with CUDA, copy both ways, one is killed, the other goes on.

    python bench/micro/gpu_arena.py [--arena-mib 1024] [--out FILE]

The parent makes the arena as a node does and never touches CUDA; workers are started with its
descriptors as an engine's ranks receive them. Steps, each checked:

    1  A and B map the arena, register all of it (cudaHostRegister), fill a paged cache on the GPU
    2  A stores blocks, B loads and compares them; then the other way round
    3  A copies both ways without end and is killed (SIGKILL) in the middle
    4  B stores and loads again, compares; a new process C registers the same arena, loads and
       compares B's blocks
    5  everybody ends: used device memory and the machine's shared memory are back at the baseline

Prints one JSON object. Exit code 0: every check held, or there is no NVIDIA GPU here (then "ran" is
false); 1: a check did not hold ("failed" says which); 2: there is a GPU, but the spike failed to
run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.arena import Arena, ArenaView, GenerationView
from kvstore.types import Incarnation

LAYERS, BLOCKS, PAGE_BYTES = 16, 64, 128 << 10
BLOCK_BYTES = LAYERS * PAGE_BYTES
MOVED = 16
"""Blocks moved in one go."""
SLACK_BYTES = 64 << 20
"""Other users of the machine may move the baseline by this much."""
BASELINE_S = 15.0
ANSWER_S = 120.0
INCARNATION = 1


# ── a worker ─────────────────────────────────────────────────────────────────────────────────────


class Worker:
    """One rank: a paged cache on the GPU, the arena pinned, one side stream each way."""

    def __init__(self, arena_fd: int, generation_fd: int, *, arena_bytes: int, seed: int) -> None:
        import torch

        self.torch = torch
        size = os.fstat(generation_fd).st_size
        page = GenerationView(
            generation_fd, size_bytes=size, arena_bytes=arena_bytes, incarnation=INCARNATION
        )
        self.view = ArenaView(arena_fd, size_bytes=arena_bytes, generations=page)
        self.arena = self.view.array
        begin = time.perf_counter()
        self._check(torch.cuda.cudart().cudaHostRegister(self.view.address, arena_bytes, 0))
        self.register_ms = (time.perf_counter() - begin) * 1e3
        self.slots = torch.from_numpy(self.arena).view(-1, BLOCK_BYTES)
        generator = torch.Generator().manual_seed(seed)
        shape = (LAYERS, BLOCKS, PAGE_BYTES)
        self.truth = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        self.cache = self.truth.to("cuda")
        self.stores, self.loads = torch.cuda.Stream(), torch.cuda.Stream()

    def _check(self, error: Any) -> None:
        if int(error) != 0:
            raise RuntimeError(f"CUDA runtime error {int(error)}: {error}")

    def store(self, first_slot: int) -> dict[str, Any]:
        """Blocks 0 … MOVED to slots; waits for them."""
        return self._timed(self.stores, lambda: self._issue_store(first_slot))

    def load(self, first_slot: int) -> dict[str, Any]:
        """Slots to the blocks after those; waits, returns a digest of what arrived on the GPU."""
        answer = self._timed(self.loads, lambda: self._issue_load(first_slot))
        arrived = self.cache[:, MOVED : 2 * MOVED].cpu()
        return answer | {"digest": _digest(arrived)}

    def expected(self) -> dict[str, Any]:
        """Digest of the blocks that `store` sends, from the host's own copy."""
        return {"digest": _digest(self.truth[:, :MOVED])}

    def churn(self, first_slot: int) -> None:
        """Copy both ways until killed; says once that it has begun."""
        _say({"churning": True})
        while True:
            self.store(first_slot)
            self._timed(self.loads, lambda: self._issue_load(first_slot))

    def close(self) -> dict[str, Any]:
        self.torch.cuda.synchronize()
        self._check(self.torch.cuda.cudart().cudaHostUnregister(self.view.address))
        return {"closed": True}

    def _issue_store(self, first_slot: int) -> None:
        for block in range(MOVED):
            slot = self.slots[first_slot + block].view(LAYERS, PAGE_BYTES)
            for layer in range(LAYERS):
                slot[layer].copy_(self.cache[layer, block], non_blocking=True)

    def _issue_load(self, first_slot: int) -> None:
        for block in range(MOVED):
            slot = self.slots[first_slot + block].view(LAYERS, PAGE_BYTES)
            for layer in range(LAYERS):
                self.cache[layer, MOVED + block].copy_(slot[layer], non_blocking=True)

    def _timed(self, stream: Any, issue: Any) -> dict[str, Any]:
        cuda = self.torch.cuda
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            issue()
            end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        return {"gib_per_s": round(MOVED * BLOCK_BYTES / seconds / 2**30, 2)}


def _digest(blocks: Any) -> str:
    """Of [layer][block][page] on the host."""
    import xxhash

    contiguous: np.ndarray[Any, Any] = blocks.contiguous().numpy()
    return xxhash.xxh3_128_hexdigest(contiguous.data)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def work(options: argparse.Namespace) -> None:
    """Obey the parent's lines: a verb, and a slot where it takes one."""
    arena_fd, generation_fd = options.worker
    worker = Worker(arena_fd, generation_fd, arena_bytes=options.arena_mib << 20, seed=options.seed)
    _say({"register_ms": round(worker.register_ms, 1)})
    for line in sys.stdin:
        verb, *slot = line.split()
        if verb == "churn":
            worker.churn(int(slot[0]))
        _say(getattr(worker, verb)(*map(int, slot)))
        if verb == "close":
            return


# ── the parent ───────────────────────────────────────────────────────────────────────────────────


class Child:
    """A worker process, spoken to in lines. A worker that does not answer in time is killed, and
    its silence is an error."""

    def __init__(self, command: Sequence[str], fds: Sequence[int]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )
        self.greeting = self.answer()

    def ask(self, line: str) -> dict[str, Any]:
        self.send(line)
        return self.answer()

    def send(self, line: str) -> None:
        """Give an order whose `answer` is fetched later."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Close it, or kill it; reaped in both cases."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        late = threading.Timer(ANSWER_S, self.process.kill)
        late.start()
        try:
            line = self.process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            raise RuntimeError("a worker ended or did not answer; its error is on stderr")
        answer: dict[str, Any] = json.loads(line)
        return answer


def gpu_name() -> str:
    """The first GPU's name, empty without one. Asks the driver, starts no CUDA."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def memory_in_use() -> dict[str, int]:
    """Bytes of device memory and of shared memory in use on this machine."""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    shared = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("Shmem:")
    )
    return {"device": int(done.stdout.splitlines()[0]) << 20, "shared": shared}


def back_at(baseline: dict[str, int], kind: str) -> bool:
    """Wait until that memory is at its baseline, at most BASELINE_S."""
    deadline, pause = time.monotonic() + BASELINE_S, threading.Event()
    while memory_in_use()[kind] > baseline[kind] + SLACK_BYTES:
        if time.monotonic() > deadline:
            return False
        pause.wait(0.2)
    return True


def spike(arena: Arena, baseline: dict[str, int]) -> dict[str, Any]:
    """Steps 1 to 5 but for the shared memory; `checks` maps each to whether it held."""
    half = arena.arena_bytes // BLOCK_BYTES // 2
    checks: dict[str, bool] = {}
    children: list[Child] = []

    def start(seed: int) -> Child:
        fds = (arena.arena_fd, arena.generation_fd)
        command = [sys.executable, __file__, "--arena-mib", str(arena.arena_bytes >> 20)]
        command += ["--seed", str(seed), "--worker", *map(str, fds)]
        children.append(Child(command, fds))
        return children[-1]

    try:
        a, b = start(1), start(2)
        result: dict[str, Any] = {"register_ms": [a.greeting, b.greeting]}
        result["store"] = [a.ask("store 0"), b.ask(f"store {half}")]
        loads = [b.ask("load 0"), a.ask(f"load {half}")]
        result["load"] = [load["gib_per_s"] for load in loads]
        checks["b_loads_what_a_stored"] = loads[0]["digest"] == a.ask("expected")["digest"]
        checks["a_loads_what_b_stored"] = loads[1]["digest"] == b.ask("expected")["digest"]

        with_both = memory_in_use()
        a.ask("churn 0")
        a.process.kill()
        a.process.wait()
        expected = b.ask("expected")["digest"]
        b.ask(f"store {half}")
        checks["b_goes_on_after_a_was_killed"] = b.ask(f"load {half}")["digest"] == expected
        only_b = {"device": baseline["device"] + (with_both["device"] - baseline["device"]) // 2}
        checks["a_gave_its_device_memory_back"] = back_at(only_b, "device")
        c = start(3)
        checks["c_registers_the_same_arena"] = c.ask(f"load {half}")["digest"] == expected
        for child in (b, c):
            child.ask("close")
    finally:
        for child in children:
            child.end()
    checks["device_memory_at_baseline"] = back_at(baseline, "device")
    return result | {"checks": checks}


def run(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    name = gpu_name()
    if not name:
        return {"ran": False, "reason": "not run: no NVIDIA GPU here"}, 0
    baseline = memory_in_use()
    arena = Arena(arena_bytes=options.arena_mib << 20, incarnation=Incarnation(INCARNATION))
    try:
        arena.populate(0, arena.arena_bytes)
        arena.set_ready(arena.arena_bytes)
        result = spike(arena, baseline)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return {"ran": False, "gpu": name, "reason": str(error)}, 2
    finally:
        arena.close()
    result["checks"]["shared_memory_at_baseline"] = back_at(baseline, "shared")
    failed = [check for check, held in result["checks"].items() if not held]
    return {"ran": True, "gpu": name, "failed": failed} | result, 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arena-mib", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    result, code = run(options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

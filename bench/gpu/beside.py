"""Part `beside`: the engine's work beside copies that another thread keeps under way.

    products  what is left of matrix products, and of a kernel bound by memory, beside stores and
              beside loads: by events, with the noise of two baselines
    captures  CUDA graphs captured while that thread copies, pins, and takes and frees memory
    steps     blocks loaded in each step while the engine takes a mark a step

Needs torch.cuda, whose stream is the engine's.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.gpu.findings import Findings, NotHere, Options
from bench.gpu.goals import CAPTURES, STEPS_BLOCKS
from bench.gpu.machine import Gpu, open_gpu, pages
from bench.gpu.rank import Rank, Shape
from kvstore.connector.copier import UNDER_WAY_S
from kvstore.ports import CopyWay
from kvstore.units import KIB, MIB

SHAPES = {"pages of 8 KiB": Shape(80, 8 * KIB), "pages of 64 KiB": Shape(32, 64 * KIB)}
BLOCKS = 32
SECONDS = 0.6
GROUP = 10
"""Pieces of work between two events."""
QUEUED_CYCLES = 2_000_000
"""About a millisecond of a GPU: time to launch a group, so that no event sees a gap."""
SWITCH_S = 0.000_1
"""As long as the product's thread pauses: with Python's own 5 ms the two would wait for each other
for longer than anything here takes."""
STEPS_TRIED, STEP_CYCLES = 30, 20_000_000
"""Some 12 ms of a GPU for each step."""
PINNED_BYTES = 4 * MIB
_PAUSE = threading.Event()
"""Never set."""


def run(findings: Findings, options: Options) -> None:
    try:
        import torch
    except ImportError as error:
        raise NotHere("torch") from error
    if not torch.cuda.is_available():
        raise NotHere("a torch that can use the GPU")
    gpu = open_gpu(options, engine_stream=lambda: int(torch.cuda.current_stream(0).cuda_stream))
    torch.manual_seed(options.seed)
    sys.setswitchinterval(SWITCH_S)
    products: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        products[name] = beside_copies(torch, gpu, shape, options.seed)
        findings.say(products=products)
    findings.say(steps=loads_beside_marks(torch, gpu, options.seed))
    # Last: a capture that is ended by another thread's call leaves torch in trouble.
    findings.say(captures=captures(torch, gpu, options.seed))


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[list[str]]:
    """Another thread repeats it; yields why it ended early, if it did."""
    stop, errors = threading.Event(), list[str]()

    def run() -> None:
        try:
            while not stop.is_set():
                work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            errors.append(f"{type(error).__name__}: {error}"[:200])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield errors
    finally:
        stop.set()
        thread.join()


# ── products ─────────────────────────────────────────────────────────────────────────────────────


def beside_copies(torch: Any, gpu: Gpu, shape: Shape, seed: int) -> dict[str, Any]:
    """By way of the copies: share of the work's rate that is left."""
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    right, out = torch.randn_like(left), torch.empty_like(left)
    big = [torch.randn(256 * MIB // 4, device="cuda") for _ in range(2)]
    works = {
        "matmul": lambda: torch.matmul(left, right, out=out),
        "memory": lambda: big[0].copy_(big[1]),
    }
    rank, found = Rank(gpu, shape, BLOCKS, seed=seed), dict[str, Any]()
    for way in (CopyWay.STORE, CopyWay.LOAD):
        rows = found[way.value] = {}
        for name, work in works.items():
            rates: list[float] = []
            before = milliseconds(torch, work)
            with meanwhile(copying(rank, way, rates)) as errors:
                _PAUSE.wait(0.1)
                beside = milliseconds(torch, work)
            after = milliseconds(torch, work)
            rows[name] = {
                "left": round(min(before, after) / beside, 4),
                "noise": round(abs(before - after) / before, 4),
                "copied_gb_per_s": round(float(np.median(rates)), 1) if rates else 0.0,
                "errors": errors,
            }
    rank.close()
    return found


def copying(rank: Rank, way: CopyWay, rates: list[float]) -> Callable[[], None]:
    """Copies for a moment, by a thread that looks at them as often as the product's does."""
    return lambda: rates.append(rank.rate((way,), 0.05, pause_s=UNDER_WAY_S))


def milliseconds(torch: Any, work: Callable[[], object]) -> float:
    """Of one, by events: the median of groups."""
    spans, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(QUEUED_CYCLES)  # noqa: SLF001 - see there
        first.record()
        for _ in range(GROUP):
            work()
        last.record()
        last.synchronize()
        spans.append(first.elapsed_time(last) / GROUP)
    return float(np.median(spans))


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────


def captures(torch: Any, gpu: Gpu, seed: int) -> dict[str, Any]:
    """How many succeeded, and replays that were wrong."""
    left = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    right, out = torch.randn_like(left), torch.empty_like(left)
    expected = torch.matmul(left, right)
    rank = Rank(gpu, SHAPES["pages of 8 KiB"], BLOCKS, seed=seed)
    extra, device, rounds = pages(64 * MIB), gpu.open_device(), [0]
    made = wrong = 0
    reason = ""

    def is_close(product: Any) -> bool:
        """Not equal: a graph's workspace may have another size, and sums another order."""
        return bool(torch.allclose(product.float(), expected.float(), rtol=0.05, atol=1.0))

    def busy() -> None:
        rank.rate((CopyWay.STORE, CopyWay.LOAD), 0.01, pause_s=UNDER_WAY_S)
        place = int(extra.ctypes.data) + rounds[0] * PINNED_BYTES % extra.size
        device.pin(place, PINNED_BYTES)
        device.unpin(place)
        device.free(device.allocate(MIB))
        rounds[0] += 1

    with meanwhile(busy) as errors:
        try:
            for _ in range(CAPTURES):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(50):
                        torch.matmul(left, right, out=out)
                        _PAUSE.wait(0.002)
                out.fill_(float("nan"))
                graph.replay()
                torch.cuda.synchronize()
                made, wrong = made + 1, wrong + (not is_close(out))
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
    return {
        "made": made,
        "wrong_replays": wrong + len(errors),
        "rounds_beside": rounds[0],
        "errors": [*errors, *([reason] if reason else [])],
    }


# ── steps ────────────────────────────────────────────────────────────────────────────────────────


def loads_beside_marks(torch: Any, gpu: Gpu, seed: int) -> dict[str, Any]:
    """Blocks loaded in each step: all were ordered in the first one, behind its mark."""
    rank = Rank(gpu, SHAPES["pages of 8 KiB"], BLOCKS, seed=seed)
    start, done, todo = rank.copies.mark(), [0], list(range(STEPS_BLOCKS))
    under_way = [0]

    def copy() -> None:
        while todo and under_way[0] < rank.copies.copies_max:
            number = todo.pop(0) % BLOCKS
            rank.order(CopyWay.LOAD, number, number, after=start)
            under_way[0] += 1
        ended = len(rank.copies.ended())
        under_way[0], done[0] = under_way[0] - ended, done[0] + ended
        if not ended:
            _PAUSE.wait(UNDER_WAY_S)

    per_step: list[int] = []
    with meanwhile(copy) as errors:
        while len(per_step) < STEPS_TRIED and done[0] < STEPS_BLOCKS:
            before = done[0]
            torch.cuda._sleep(STEP_CYCLES)  # noqa: SLF001 - nothing else keeps a GPU busy for a time
            rank.copies.mark()
            torch.cuda.current_stream().synchronize()
            per_step.append(done[0] - before)
    torch.cuda.synchronize()
    rank.close()
    return {"blocks_per_step": per_step, "steps": len(per_step), "errors": errors}

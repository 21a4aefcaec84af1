"""`make bench-policies`: which eviction policy misses least, and what the admission to disk saves.

policies  Every workload at several cache sizes, replayed through the node's engine (`replay`) with
          each policy that ships, with S3-FIFO as published, and beside Belady's optimum, which
          knows the future. A hit is the leading run only, by blocks and by tokens of the prompts.
disk      The same with a file tier of a fifth of all blocks behind dram of a fiftieth, with all
          blocks written and with those that were seen twice: blocks written, what reclaimed
          segments keep included, and hits of dram and disk together.

Workloads: a request log in Mooncake's form where its path is given (argument or KVSTORE_TRACE), and
three that are generated from a seed (`workloads`). Deterministic: no clock, no bytes.

Writes bench/results/policies.json and policies.png.
"""

from __future__ import annotations

import argparse
import heapq
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from bench.scenarios import s3fifo
from bench.scenarios.replay import Disk, Hits, replay
from bench.scenarios.workloads import (
    BLOCK_TOKENS,
    GENERATED,
    Workload,
    next_uses,
    recorded,
)
from kvstore.types import AdmissionMode

SEED: Final = 20261121
REQUESTS: Final = 2000
SIZES: Final = {"trace": (0.02, 0.05, 0.1, 0.2, 0.4)}
SIZES_GENERATED: Final = (0.03, 0.1, 0.3)
POLICIES: Final = ("lru", "reuse", "s3fifo")
DISK_DRAM_SHARE, DISK_SHARE = 0.02, 0.2


def optimum(workload: Workload, *, slots: int) -> Hits:
    """Belady's: what goes is what is named again last, the end of a chain before its start."""
    held: dict[int, tuple[int, int]] = {}
    order: list[tuple[int, int, int]] = []
    hits = Hits()
    for request, later in zip(workload.requests, next_uses(workload), strict=True):
        run = 0
        while run < len(request.blocks) and request.blocks[run] in held:
            run += 1
        hits.add(request, hit=run, block_tokens=BLOCK_TOKENS)
        for place, (block, at) in enumerate(zip(request.blocks, later, strict=True)):
            held[block] = (-at, -place)
            heapq.heappush(order, (-at, -place, block))
        while len(held) > slots:
            at, place, block = heapq.heappop(order)
            if held.get(block) == (at, place):
                del held[block]
    return hits


def measure_policies(workload: Workload, sizes: Sequence[float]) -> dict[str, Any]:
    """Miss ratios of one workload by size and policy."""
    rows = []
    for share in sizes:
        slots = int(share * workload.block_count)
        row: dict[str, Any] = {"share": share, "slots": slots}
        for policy in POLICIES:
            hits = replay(workload, policy=policy, slots=slots, block_tokens=BLOCK_TOKENS)
            row[policy] = hits.ratios()
        row["optimum"] = optimum(workload, slots=slots).ratios()
        rows.append(row)
        figures = "  ".join(f"{p} {row[p]['miss_blocks']:.3f}" for p in (*POLICIES, "optimum"))
        print(f"{workload.name:6} {slots:6} slots   {figures}", flush=True)
    return {
        "requests": len(workload.requests),
        "blocks_named": sum(len(request.blocks) for request in workload.requests),
        "blocks_different": workload.block_count,
        "sizes": rows,
    }


def measure_disk(workload: Workload) -> dict[str, Any]:
    """Blocks written and hit ratios of dram with a disk behind it, by mode of admission."""
    count = workload.block_count
    slots, capacity = int(DISK_DRAM_SHARE * count), int(DISK_SHARE * count)
    modes = {}
    for mode in AdmissionMode:
        disk = Disk(mode, capacity=capacity)
        hits = replay(workload, policy="lru", slots=slots, block_tokens=BLOCK_TOKENS, disk=disk)
        modes[mode.value] = {"blocks_written": disk.written, **hits.ratios()}
        print(f"{workload.name:6} disk, {mode.value}: {modes[mode.value]}", flush=True)
    everything, seen_twice = (modes[mode.value] for mode in AdmissionMode)
    return {
        "dram_slots": slots,
        "disk_blocks": capacity,
        "modes": modes,
        "written_share": round(seen_twice["blocks_written"] / everything["blocks_written"], 4),
        "hit_blocks_cost": round(seen_twice["miss_blocks"] - everything["miss_blocks"], 4),
    }


def _workloads(trace: str, requests: int) -> list[Workload]:
    made = [make(SEED, requests) for make in GENERATED.values()]
    if not trace:
        print("No request log is given (argument or KVSTORE_TRACE): only generated workloads run.")
        return made
    return [recorded(Path(trace)), *made]


def main() -> int:
    parser = argparse.ArgumentParser(description="Miss ratios of eviction policies.")
    parser.add_argument(
        "trace",
        nargs="?",
        default=os.environ.get("KVSTORE_TRACE", ""),
        help="request log: a JSON object a line with input_length and hash_ids",
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, help="per generated workload")
    options = parser.parse_args()
    if options.trace and not Path(options.trace).is_file():
        print("The request log is not there: give another path, or none.", file=sys.stderr)
        return 2
    s3fifo.register()
    workloads = _workloads(options.trace, options.requests)
    result: dict[str, Any] = {
        "block_tokens": BLOCK_TOKENS,
        "workloads": {
            w.name: measure_policies(w, SIZES.get(w.name, SIZES_GENERATED)) for w in workloads
        },
        "disk": {w.name: measure_disk(w) for w in workloads},
    }
    path = record.write("policies", result, seed=SEED)
    print(f"written: {path.name} and {plot.draw(path).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

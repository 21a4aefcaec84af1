"""How long the router's loop stands still when a worker leaves, with a full tree of sent prefixes.

BLOCKS entries, each sent to SHARERS of 64 workers; each worker has requests under way. One after
another leaves and another one comes: CPU time, in ms, of the step of `WorkerLeft`, and of the next
decision, which pays for what the step put off. Writes bench/results/worker_left.json.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

import numpy as np

from bench import record
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Arrived, Joined, RouteEvent, WorkerLeft
from kvstore.routing.policy import parse
from kvstore.routing.values import RouteRequest, WorkerSpec
from kvstore.types import KEY_BYTES

WORKERS: Final = 64
BLOCKS: Final = 1_000_000
CHAIN: Final = 1000
SHARERS: Final = 3
REQUESTS: Final = 16
"""Under way at each worker."""
LEAVERS: Final = 200
GOAL_MS: Final = 5.0


def joined(number: int) -> Joined:
    return Joined(WorkerSpec(worker=f"w{number}", address=f"w{number}", pool="p"))


def asked(number: int, keys: bytes) -> Arrived:
    request = RouteRequest(
        request_id=str(number),
        model="m",
        prompt_tokens=CHAIN * 16,
        keys=keys,
        text_bytes=1,
    )
    return Arrived(request)


def step_ms(core: RouterCore, event: RouteEvent, now_ns: int) -> float:
    begin_ns = time.thread_time_ns()
    core.step(event, now_ns)
    return (time.thread_time_ns() - begin_ns) / 1e6


def measure() -> dict[str, Any]:
    """Milliseconds of CPU time."""
    core = RouterCore(parse({"tree_blocks_max": BLOCKS}), seed=1)
    random = np.random.default_rng(1)
    for number in range(WORKERS):
        core.step(joined(number), 0)
    chains = []
    while len(core.tree) < BLOCKS:
        chains.append(random.bytes(KEY_BYTES * CHAIN))
        for number in random.choice(WORKERS, SHARERS, replace=False).tolist():
            core.tree.insert(chains[-1], f"w{number}", 0, step=1)
    count = WORKERS * REQUESTS
    for number in range(count):
        core.step(asked(number, random.bytes(KEY_BYTES * 10)), 1)
    left, next_ms = [], []
    for n in range(LEAVERS):
        left.append(step_ms(core, WorkerLeft(f"w{n}"), 2))
        core.step(joined(WORKERS + n), 2)
        next_ms.append(step_ms(core, asked(count + n, chains[n]), 3))
        core.take_drafts()
    assert len(core.tree) >= BLOCKS - CHAIN
    return {"left_ms": record.summary(left), "next_decision_ms": record.summary(next_ms)}


def main() -> int:
    result: dict[str, Any] = {
        "workers": WORKERS,
        "blocks": BLOCKS,
        "goal_ms": GOAL_MS,
        **measure(),
    }
    print(result)
    print(f"written: {record.write('worker_left', result, seed=1).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

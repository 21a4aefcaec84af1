"""Time of one routing decision: a 32k-token prompt, 64 workers, keys in, decision and receipt out.

The index is asked in process (its answer is part of the time of `with index`), half of the fleet
holds parts of the prompt, and all workers have requests under way.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

import numpy as np

from bench import record
from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Match
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Arrived, Ending, FirstToken, Joined, RequestEnded, Routed
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import (
    PrefixAnswer,
    RouteRequest,
    WorkerSpec,
)

WORKERS: Final = 64
TOKENS: Final = 32_768
BLOCK_TOKENS: Final = 16
DECISIONS: Final = 3000


def _keys(seed: int) -> bytes:
    blocks = TOKENS // BLOCK_TOKENS
    return b"".join(hashlib.sha256(f"{seed} {n}".encode()).digest() for n in range(blocks))


def measure(*, has_index: bool) -> dict[str, float]:
    """Microseconds of `Arrived`, first insert of a prompt's keys included."""
    core = RouterCore(RoutingPolicy(), seed=1)
    for n in range(WORKERS):
        spec = WorkerSpec(
            worker=f"w{n}",
            address=f"w{n}",
            pool="p",
            node=f"n{n // 2}",
            engine=f"e{n}",
            memory_tokens=4_000_000,
        )
        core.step(Joined(spec), 0)
    prompts = [_keys(seed) for seed in range(16)]
    answer = None
    if has_index:
        matches = [
            Match(Holder(f"n{n // 2}", f"e{n}"), int(n * 17 % 2048)) for n in range(0, WORKERS, 2)
        ]
        matches += [Match(Holder(f"n{n}"), 0, n * 31 % 2048, 2048) for n in range(0, 32, 2)]
        answer = PrefixAnswer(Trust.EXACT, matches, 7)
    times, processor, now_ns = [], [], 1
    under_way: list[str] = []
    for number in range(DECISIONS):
        now_ns += 3_000_000
        request = RouteRequest(
            request_id=str(number),
            model="m",
            prompt_tokens=TOKENS,
            keys=prompts[number % len(prompts)],
            block_tokens=BLOCK_TOKENS,
            answer=answer,
        )
        begin_ns, begin_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        commands = core.step(Arrived(request), now_ns)
        processor.append((time.thread_time_ns() - begin_cpu_ns) / 1e3)
        times.append((time.perf_counter_ns() - begin_ns) / 1e3)
        assert isinstance(commands[0], Routed)
        under_way.append(request.request_id)
        core.step(FirstToken(request.request_id), now_ns + 1_000_000)
        if len(under_way) > 4 * WORKERS:
            core.step(RequestEnded(under_way.pop(0), Ending.DONE, 100, 10), now_ns + 1_000_001)
        core.take_drafts()
    return {
        f"{name}_p{percent}_us": round(float(np.percentile(np.array(values[100:]), percent)), 1)
        for name, values in (("wall", times), ("processor", processor))
        for percent in (50, 99)
    }


def main() -> int:
    result: dict[str, Any] = {
        "workers": WORKERS,
        "prompt_tokens": TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "with_answer_of_the_index": measure(has_index=True),
        "approximate_tree_alone": measure(has_index=False),
    }
    print(result)
    print(f"written: {record.write('route_decision', result, seed=1).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

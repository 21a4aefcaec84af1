"""What the live miss-ratio curve costs the node's loop and its memory.

Lookups of KEYS blocks, each named by a hint before: documents of Zipf popularity, four times what
dram holds. CPU time of all calls, ticks included, over the looked-up blocks; the first quarter,
in which the caches fill, is reported by itself. Memory: what tracemalloc sees of the whole curve.
A small dram samples more of its blocks, and costs more. Writes bench/results/curve_cost.json.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.scenarios.curve import asker
from kvstore.engine.memory.policies import POLICIES
from kvstore.engine.why.curve import BlockEvent, Curve
from kvstore.types import SLOT_BYTES_MIN
from kvstore.units import MIB, NS_PER_US

SEED: Final = 1
KEYS: Final = 256
DRAM_BLOCKS: Final = (1 << 12, 1 << 15, 1 << 18)
"""64 GiB hold 2 ** 15 blocks of 16 tokens, 128 KiB a token."""
LOOKUPS: Final = 4000
LOOKUPS_PER_TICK: Final = 4
"""10,240 blocks a second: 163,840 tokens."""
GOAL_US_PER_KEY: Final = 1.0
GOAL_BYTES: Final = 2 * MIB


def measure(policy: str, dram_blocks: int, lookups: int) -> dict[str, Any]:
    """Cost with one size of dram."""
    random = np.random.default_rng(SEED)
    count = 4 * dram_blocks // KEYS
    table = np.frombuffer(random.bytes(32 * KEYS * count), dtype="<u8").reshape(count, KEYS, 4)
    weights = np.arange(1, count + 1) ** -0.9
    chosen = random.choice(count, size=lookups, p=weights / weights.sum()).tolist()
    tracemalloc.start()
    curve, who = Curve(policy, dram_blocks * SLOT_BYTES_MIN), asker(block_tokens=16)
    took_ns, ticks_us = [], []
    for number, document in enumerate(chosen, 1):
        if number == 1 + lookups // 4:
            size_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()  # it takes time itself
        keys = table[document]
        begin_ns = time.thread_time_ns()
        curve.see(BlockEvent.NAMED, who, keys)
        curve.see(BlockEvent.ASKED, who, keys)
        if number % LOOKUPS_PER_TICK == 0:
            tick_ns = time.thread_time_ns()
            curve.tick(number)
            ticks_us.append((time.thread_time_ns() - tick_ns) / NS_PER_US)
        took_ns.append(time.thread_time_ns() - begin_ns)
    assert not curve.trouble, curve.trouble
    begin = lookups // 4
    row = {
        "policy": policy,
        "dram_blocks": dram_blocks,
        "us_per_key": round(sum(took_ns[begin:]) / (lookups - begin) / KEYS / NS_PER_US, 3),
        "tick_us": record.summary(ticks_us[begin // LOOKUPS_PER_TICK :]),
        "peak_bytes": size_bytes,
        "sampled": [round(cache.rate, 5) for cache in curve.caches],
    }
    print(row, flush=True)
    return row


def main() -> int:
    rows = [measure(policy, blocks, LOOKUPS) for policy in POLICIES for blocks in DRAM_BLOCKS]
    result = {"goal_us_per_key": GOAL_US_PER_KEY, "goal_bytes": GOAL_BYTES, "keys": KEYS}
    print(f"written: {record.write('curve_cost', result | {'rows': rows}, seed=SEED).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-curve`: the live miss-ratio curve of a node beside exact replays.

Each workload is looked up request after request (hint, lookup), and the curve's share of prompt
tokens at 0.5, 1, 2, 4 and 8 times dram is compared with that of a replay under the same definition:
the real policy, at the full capacity, every block, the leading run only (`exact`). A third figure
is that of the node's own engine (`replay`), which also has credits, leases, a reserve of free slots
and eight requests at a time. Errors are in points. Deterministic: no clock, no bytes.

Workloads: a request log in Mooncake's form where its path is given (argument or KVSTORE_TRACE), and
those of `workloads`. Writes bench/results/curve.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.micro.engine_ops import SPACE, WHOLE
from bench.scenarios.replay import replay
from bench.scenarios.workloads import BLOCK_TOKENS, GENERATED, Workload, recorded
from kvstore.engine.memory.policies import POLICIES, Words, maker
from kvstore.engine.memory.shares import OTHERS
from kvstore.engine.memory.table import Keys
from kvstore.engine.sessions.owners import Asker
from kvstore.engine.why.curve import SCALES, BlockEvent, Curve
from kvstore.types import KEY_BYTES, SLOT_BYTES_MIN, SpaceId

SEED: Final = 20261121
REQUESTS: Final = 3000
DRAM_SHARES: Final = (0.02,)
"""Of all blocks of a workload."""
GOAL_MEAN_POINTS, GOAL_WORST_POINTS = 2.0, 5.0


def asker(*, slot_bytes: int = SLOT_BYTES_MIN, block_tokens: int = BLOCK_TOKENS) -> Asker:
    """The one KV cache group that asks."""
    whole = (WHOLE,), (1,), (slot_bytes,), (slot_bytes,), SPACE.head_bytes
    return Asker("t", SpaceId(bytes(32)), *whole, block_tokens, quota=OTHERS, engine="e", title="e")


class ExactCache:
    """A cache of so many blocks under the node's policy; requests one after the other."""

    def __init__(self, policy: str, slots: int, table: Keys) -> None:
        self._slots, self._table = slots, table
        rows = slots + 1
        self._stamps = np.zeros(rows, dtype=np.int64)
        self._all = np.ones(rows, dtype=bool)
        self._policy = maker(policy, self._stamps)(members=lambda: self._all, slot_count_max=slots)
        self._block = np.zeros(rows, dtype=np.int64)
        self._row_of = np.full(len(table), -1, dtype=np.int64)
        self._free = list(range(slots))
        self._next_stamp = 1

    def request(self, blocks: Words) -> int:
        """Serve one; returns the length of its leading run."""
        stamps = self._new_stamps(len(blocks))
        rows = self._row_of[blocks]
        held = rows >= 0
        run = len(blocks) if held.all() else int(np.argmin(held))
        self._policy.use(rows[held][::-1], stamps[held][::-1])
        self._policy.touch(rows[:run][::-1], self._new_stamps(run)[::-1])
        # The end of a chain that is longer than the cache would leave at once.
        new = np.flatnonzero(~held)[: self._slots]
        while (missing := len(new) - len(self._free)) > 0:
            self._evict(missing)  # at times `reuse` gives fewer than it could
        rows = np.array([self._free.pop() for _ in new], dtype=np.int64)
        self._row_of[blocks[new]], self._block[rows] = rows, blocks[new]
        self._policy.insert(rows[::-1], stamps[new][::-1], self._table[blocks[new], 0][::-1])
        return run

    def _new_stamps(self, count: int) -> Words:
        """The first is the newest."""
        self._next_stamp += count
        return np.arange(self._next_stamp - 1, self._next_stamp - 1 - count, -1)

    def _evict(self, count: int) -> None:
        for row in self._policy.pop(count, lambda words: self._all[words]).tolist():
            self._row_of[self._block[row]] = -1
            self._free.append(row)


def exact(workload: Workload, policy: str, slots: int) -> float:
    """Share of the tokens in full blocks that leading runs have."""
    cache = ExactCache(policy, slots, keys_of(workload))
    asked = hit = 0
    for blocks in chains(workload):
        hit += cache.request(blocks)
        asked += len(blocks)
    return hit / asked


def keys_of(workload: Workload) -> Keys:
    """Keys by block number, [n, 4]."""
    return np.frombuffer(workload.key_table(), dtype="<u8").reshape(-1, KEY_BYTES // 8)


def chains(workload: Workload) -> Iterator[Words]:
    """Full blocks of each request that has any."""
    for request in workload.requests:
        if request.blocks:
            yield np.array(request.blocks, dtype=np.int64)


def live(workload: Workload, policy: str, slots: int) -> Curve:
    """The curve after all requests, as a node makes it."""
    curve, table, who = Curve(policy, slots * SLOT_BYTES_MIN), keys_of(workload), asker()
    for number, blocks in enumerate(chains(workload), 1):
        keys = table[blocks]
        curve.see(BlockEvent.NAMED, who, keys)
        curve.see(BlockEvent.ASKED, who, keys)
        curve.tick(number)
    assert not curve.trouble, curve.trouble
    return curve


def measure(workload: Workload, policy: str, share: float, *, with_engine: bool) -> dict[str, Any]:
    """One workload, policy and size of dram."""
    slots = int(share * workload.block_count)
    rows = live(workload, policy, slots).report(len(workload.requests) + 1)
    found: list[dict[str, Any]] = []
    for scale, row in zip(SCALES, rows, strict=True):
        assert row.hit_ratio is not None, "too few lookups"
        true = exact(workload, policy, int(scale * slots))
        its = {"capacity": row.capacity, "exact": round(true, 4), "curve": round(row.hit_ratio, 4)}
        its["error_points"] = round(100 * (row.hit_ratio - true), 2)
        if with_engine:
            hits = replay(
                workload, policy=policy, slots=int(scale * slots), block_tokens=BLOCK_TOKENS
            )
            its["engine"] = round(hits.blocks_hit / hits.blocks, 4)
        found.append(its)
    errors = [each["error_points"] for each in found]
    print(f"{workload.name:6} {policy:6} dram {slots:6} blocks   errors {errors}", flush=True)
    return {"policy": policy, "dram_blocks": slots, "capacities": found}


def main() -> int:
    parser = argparse.ArgumentParser(description="The live miss-ratio curve, beside exact replays.")
    parser.add_argument(
        "trace",
        nargs="?",
        default=os.environ.get("KVSTORE_TRACE", ""),
        help="request log: a JSON object a line with input_length and hash_ids",
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, help="per generated workload")
    parser.add_argument("--engine", action="store_true", help="replay the node's engine, too")
    options = parser.parse_args()
    if options.trace and not Path(options.trace).is_file():
        print("The request log is not there: give another path, or none.", file=sys.stderr)
        return 2
    workloads = [make(SEED, options.requests) for make in GENERATED.values()]
    if options.trace:
        workloads.insert(0, recorded(Path(options.trace)))
    found = {
        each.name: [
            measure(each, policy, share, with_engine=options.engine)
            for policy in POLICIES
            for share in DRAM_SHARES
        ]
        for each in workloads
    }
    errors = [
        abs(its["error_points"])
        for rows in found.values()
        for row in rows
        for its in row["capacities"]
    ]
    result = {
        "goal_mean_points": GOAL_MEAN_POINTS,
        "goal_worst_points": GOAL_WORST_POINTS,
        "mean_points": round(float(np.mean(errors)), 2),
        "worst_points": max(errors),
        "workloads": found,
    }
    print(f"mean {result['mean_points']}, worst {result['worst_points']} points")
    print(f"written: {record.write('curve', result, seed=SEED).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

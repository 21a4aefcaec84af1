"""A replica's store by itself: Match and told keys, in a Redis beside its own memory.

    python bench/micro/index_store.py

One process and one redis-server on loopback, no gRPC (`index_grpc.py` has that). The local store
runs its loops as they stand; compiled they are faster (`index_ops.py`). Writes
bench/results/index_store.json.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench.record import write
from kvstore.index.holdings import Holdings
from kvstore.index.index import Index
from kvstore.ports import IndexStore
from kvstore.stores.address import store_config
from kvstore.stores.connection import Deadlines
from kvstore.stores.redis import RedisStore
from kvstore.types import KEY_BYTES, Incarnation, SpaceId, Tier
from kvstore.wire.feed import Delta, Hello, Stored
from tests.kit.redis_process import RedisProcess

SPACE: Final = SpaceId(bytes(32))
BLOCKS: Final = 200_000
DELTA_KEYS: Final = 4096
NODES: Final = 16
SHARED_BLOCKS: Final = 4096
"""That each node has: a system prompt and what follows it."""
MATCH_KEYS: Final = (32, 512, 4096)
MATCH_COUNT: Final = 500
SEED: Final = 1
NOW_MS: Final = 10_000
"""Time stands still, so that no node is silent."""


async def tell(store: IndexStore, node: str, keys: bytes) -> None:
    """As the first deltas of a node."""
    who = (node, Incarnation(1), 1)
    await store.hear(Hello(*who, 0), NOW_MS)
    step = DELTA_KEYS * KEY_BYTES
    for sequence, at in enumerate(range(0, len(keys), step), start=1):
        change = Stored("t", SPACE, Tier.DRAM, keys[at : at + step])
        await store.hear(Delta(*who, sequence, (change,)), NOW_MS)


async def asked(
    store: IndexStore, prompt: bytes, spent_s: Callable[[], float], *, holders: int
) -> dict[str, float]:
    """Milliseconds of Match, one after the other; and of processor time, of both processes."""
    took = []
    before_s = spent_s()
    for _ in range(MATCH_COUNT):
        begin_s = time.perf_counter()
        answer = await store.match("t", SPACE, prompt, NOW_MS)
        took.append((time.perf_counter() - begin_s) * 1e3)
        assert len(answer.matches) == holders
    cuts = statistics.quantiles(took, n=100)
    processor = (spent_s() - before_s) * 1e3 / MATCH_COUNT
    return {
        "p50": round(cuts[49], 3),
        "p99": round(cuts[98], 3),
        "processor": round(processor, 3),
    }


async def measure(store: IndexStore, spent_s: Callable[[], float]) -> dict[str, Any]:
    """All numbers of one store."""
    random = np.random.default_rng(SEED)
    shared = random.bytes(SHARED_BLOCKS * KEY_BYTES)
    alone = random.bytes(BLOCKS * KEY_BYTES)
    await store.tick(NOW_MS)
    begin_s = time.perf_counter()
    await tell(store, "n0", alone)
    took_s = time.perf_counter() - begin_s
    await store.tick(NOW_MS)
    sizes = store.statistics()
    found: dict[str, Any] = {
        "keys_per_s": round(BLOCKS / took_s),
        "bytes_per_entry": round(sizes.memory_bytes / sizes.entry_count),
    }
    for number in range(1, NODES + 1):
        # Each goes a little less far than the one before, so that sets differ along the prompt.
        await tell(store, f"n{number}", shared[: (SHARED_BLOCKS - 16 * number) * KEY_BYTES])
    nobody = random.bytes(MATCH_KEYS[-1] * KEY_BYTES)
    for name, keys, holders in (
        ("one_holder", alone, 1),
        (f"{NODES}_holders", shared, NODES),
        ("nobody", nobody, 0),
    ):
        found[f"match_ms_{name}"] = {
            str(n): await asked(store, keys[: n * KEY_BYTES], spent_s, holders=holders)
            for n in MATCH_KEYS
        }
    await store.close()
    return found


def cpu_s(redis: RedisProcess) -> float:
    """Processor time of the server so far."""
    lines = dict(line.split(":") for line in redis.cli("info", "cpu").splitlines() if ":" in line)
    return float(lines["used_cpu_user"]) + float(lines["used_cpu_sys"])


def main() -> None:
    """Run and record."""
    entries = 2 * BLOCKS
    index = Index(Holdings(entries, is_native=False), now_ms=NOW_MS)
    results: dict[str, Any] = {"local": asyncio.run(measure(index, time.process_time))}
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisProcess.start(Path(folder)) as redis,
    ):
        config = store_config(redis.url, password_file=None, ca=None)
        store = RedisStore(config, entry_count_max=entries, deadlines=Deadlines(5.0, 5.0))
        results["redis"] = asyncio.run(measure(store, lambda: time.process_time() + cpu_s(redis)))
        results["redis_version"] = redis.cli("info", "server").split("redis_version:")[1].split()[0]
    print(results)
    print(write("index_store", results, seed=SEED))


if __name__ == "__main__":
    main()

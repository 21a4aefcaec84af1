"""Share of re-layout in a push of 64 MiB between engines of different tensor-parallel sizes.

    python bench/micro/push_layout.py [--rounds 5] [--out push_layout]

`layout` is the copy out of the landing slab into the decode node's own shards, as `peers.pushes`
times it, in seconds of processor time, so that a busy machine does not change it; with 1→1 blocks
are copied whole. `transfer` is the write of the same bytes through two transfer workers, UCX over
tcp, and on a busy machine longer than it should be. In a node both go on at the same time.
`layout_share` is layout ÷ transfer, `added_share` what is more than for 1→1 ÷ transfer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.micro.push_speed import BLOCKS, SEED, SIZE_BYTES, UCX, TransferWorkers, scattered
from kvstore.engine.events import Land
from kvstore.peers.peer_session import PeerContext
from kvstore.peers.pushes import KINDS, SLOW_S, PushCarrier, Stages
from kvstore.testing.raw_engine import HEAD_COUNT, LAYER_COUNT
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES, Shard
from kvstore.wire.record import Scope, scopes_of

SIZES: Final = ((1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2))
WRITE_BYTES: Final = 4 << 20
"""What is landed at a time."""
GOAL: Final = 0.1


class _OwnTime:
    """A clock of the processor time of a thread."""

    def now_ns(self) -> int:
        return time.thread_time_ns()


def layout_s(there: int, here: int, block_bytes: int) -> float:
    """Processor seconds of copying out 64 MiB."""
    nothing: Any = None
    landed: asyncio.Queue[object] = asyncio.Queue()
    memory = np.ones(2 * SIZE_BYTES, np.uint8)
    stages = Stages(KINDS, _OwnTime(), slow_s=SLOW_S)
    context = PeerContext(landed.put_nowait, nothing, nothing, memory, _OwnTime(), None, stages)
    carrier = PushCarrier(context, nothing, {}, draw_epoch=lambda: 1)

    async def land() -> None:
        for order in orders(there, here, block_bytes):
            carrier.carry_out(order)
            await landed.get()

    asyncio.run(land())
    carrier.close()
    return carrier.stages.timings["land_copy"].total_ns / 1e9


def orders(there: int, here: int, block_bytes: int) -> list[Land]:
    """Blocks in a row in the landing slab, to anywhere behind it; they belong to no key."""
    count, per = SIZE_BYTES // block_bytes, max(1, WRITE_BYTES // block_bytes)
    pages = np.arange(SIZE_BYTES, 2 * SIZE_BYTES, block_bytes // here) // PAGE_BYTES
    slots = np.random.default_rng(SEED).permutation(pages).astype("<u4").reshape(count, here)
    extents = (np.arange(count) * block_bytes // PAGE_BYTES).astype("<u4")
    return [
        Land(
            job=at,
            node="b",
            targets=scopes(here, block_bytes),
            keys=bytes(KEY_BYTES * len(extents[at : at + per])),
            head_bytes=(block_bytes // (LAYER_COUNT * HEAD_COUNT),),
            slots=slots[at : at + per].ravel(),
            sources=scopes(there, block_bytes),
            checksums=bytes(CHECKSUM_BYTES * there * len(extents[at : at + per])),
            extents=extents[at : at + per].tobytes(),
        )
        for at in range(0, count, per)
    ]


def scopes(ranks: int, block_bytes: int) -> tuple[Scope, ...]:
    """Of so many ranks that share the heads of a block."""
    heads = HEAD_COUNT // ranks
    shards = [Shard(0, LAYER_COUNT, at, at + heads) for at in range(0, HEAD_COUNT, heads)]
    return scopes_of("t", bytes(32), shards, [block_bytes // ranks] * ranks)


def measure(rounds: int, block_bytes: int) -> dict[str, object]:
    """Medians in seconds, and shares by sizes."""
    layouts = {sizes: [layout_s(*sizes, block_bytes) for _ in range(rounds)] for sizes in SIZES}
    with ExitStack() as stack:
        transfer_workers, pieces = TransferWorkers(stack), scattered(block_bytes)
        took = [transfer_workers.write_ns(pieces) / 1e9 for _ in range(rounds + 1)][1:]
    transfer_s = float(np.median(took))
    plain_s = float(np.median(layouts[1, 1]))
    by_sizes = {}
    for (there, here), values in layouts.items():
        median_s = float(np.median(values))
        by_sizes[f"{there}→{here}"] = {
            "layout_s": round(median_s, 4),
            "layout_share": round(median_s / transfer_s, 3),
            "added_share": round((median_s - plain_s) / transfer_s, 3),
        }
    return {"transfer_seconds": record.summary(took), "sizes": by_sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="push_layout")
    arguments = parser.parse_args()
    os.environ.update(UCX)
    result: dict[str, object] = {
        "what": "copies of 64 MiB out of the landing slab, by parallel sizes, beside the transfer",
        "rounds": arguments.rounds,
        "goal": GOAL,
        "load_average": round(os.getloadavg()[0], 1),
    }
    for label, block_bytes in BLOCKS.items():
        result[label] = measure(arguments.rounds, block_bytes)
        print(label, result[label], flush=True)
    print(record.write(arguments.out, result, seed=SEED))


if __name__ == "__main__":
    main()

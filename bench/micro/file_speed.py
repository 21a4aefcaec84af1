"""How fast the file tier writes and reads, beside a plain loop of the same I/O in the same run.

    python bench/micro/file_speed.py [--dir DIR] [--rounds 7] [--out bench/results/file_speed.json]

Blocks of 2 MiB out of an arena of 256 MiB, in batches of 25, as an engine's step makes them. Plain
is one thread, one descriptor, the same runs of page and payload, the same flags, one fsync at the
end; no checksum, no queue. The tier does all it does: header pages, index, footer, fsync, and on
reads the verification of every block. Ways are interleaved, a new directory each round; ratios are
those of the medians. Exit code 0; no figure is judged here.
"""

from __future__ import annotations

import argparse
import mmap
import os
import select
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.node.node import MonotonicClock
from kvstore.tier_events import FileRead, FileWritten, ReadFile, RecoveryDone, WriteFile
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.tier import FileTier
from kvstore.types import PAGE_BYTES, Shard
from kvstore.units import GIB, MIB
from kvstore.wire.record import Scope, checksum_of

BLOCK_BYTES, BLOCKS, BATCH = 2 * MIB, 125, 25
PAGES = BLOCK_BYTES // PAGE_BYTES
ARENA_BYTES = 256 * MIB
SCOPE = Scope("bench", b"s" * 32, Shard(0, 16, 0, 4), BLOCK_BYTES)
SEED = 1
WRITE_RUN, READ_RUN = 3, 1
"""Blocks in one call, as the tier makes them of this size."""


class Blocks:
    """An arena full of random blocks, with keys and checksums."""

    def __init__(self) -> None:
        self.arena: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, ARENA_BYTES), np.uint8)
        self.arena[:] = np.random.default_rng(SEED).integers(0, 256, ARENA_BYTES, np.uint8)
        self.view = self.arena.data
        self.slots = np.arange(BLOCKS, dtype=np.uint32) * np.uint32(PAGES)
        self.keys = [n.to_bytes(32, "big") for n in range(BLOCKS)]
        prefix = SCOPE.prefix()
        self.sums = [
            checksum_of(prefix + key, [self.payload(n)]) for n, key in enumerate(self.keys)
        ]

    def payload(self, number: int) -> memoryview:
        return self.view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


def plain(blocks: Blocks, folder: Path, *, direct: bool) -> tuple[float, float]:
    """Seconds to write and to read all blocks."""
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    header = memoryview(mmap.mmap(-1, PAGE_BYTES))
    record_bytes = PAGE_BYTES + BLOCK_BYTES
    fd = os.open(folder / "plain", flags, 0o600)
    try:
        begin = time.perf_counter()
        for first in range(0, BLOCKS, WRITE_RUN):
            run = range(first, min(first + WRITE_RUN, BLOCKS))
            buffers = [part for n in run for part in (header, blocks.payload(n))]
            os.pwritev(fd, buffers, first * record_bytes)
        os.fsync(fd)
        wrote = time.perf_counter() - begin
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        for first in range(0, BLOCKS, READ_RUN):
            run = range(first, min(first + READ_RUN, BLOCKS))
            buffers = [part for n in run for part in (header, blocks.payload(n))]
            os.preadv(fd, buffers, first * record_bytes)
        return wrote, time.perf_counter() - begin
    finally:
        os.close(fd)


class Timed:
    """A tier, driven by its eventfd."""

    def __init__(self, blocks: Blocks, folder: Path, *, direct: bool) -> None:
        self.blocks = blocks
        config = FileConfig(folder / "store", capacity_bytes=4 * GIB, direct=direct)
        self.tier = FileTier(config, blocks.arena, MonotonicClock()).start()
        self.poll = select.poll()
        self.poll.register(self.tier.fileno(), select.POLLIN)
        self.places = np.zeros(BLOCKS, np.uint64)
        self.good = 0
        self.wait(RecoveryDone, 1)

    def wait(self, kind: type[object], count: int) -> None:
        while count:
            self.poll.poll(60_000)
            for event in self.tier.take_events():
                count -= isinstance(event, kind)
                if isinstance(event, FileWritten):
                    begin = event.job * BATCH
                    self.places[begin : begin + BATCH] = np.frombuffer(event.locations, np.uint64)
                if isinstance(event, FileRead):
                    self.good += sum(event.good)

    def batch(self, job: int) -> tuple[bytes, NDArray[np.uint32], bytes]:
        part = slice(job * BATCH, (job + 1) * BATCH)
        keys, sums = self.blocks.keys[part], self.blocks.sums[part]
        return b"".join(keys), self.blocks.slots[part], b"".join(sums)

    def run(self) -> tuple[float, float]:
        """Seconds to write (until all is closed and synced) and to read all blocks."""
        jobs = range(BLOCKS // BATCH)
        begin = time.perf_counter()
        for job in jobs:
            keys, slots, sums = self.batch(job)
            assert self.tier.submit(WriteFile(job, SCOPE, keys, slots, sums))
        self.wait(FileWritten, len(jobs))
        wrote = time.perf_counter() - begin
        assert self.places.all()
        self.blocks.arena[:] = 0
        begin = time.perf_counter()
        for job in jobs:
            keys, slots, sums = self.batch(job)
            places = self.places[job * BATCH : (job + 1) * BATCH]
            assert self.tier.submit(ReadFile(job, SCOPE, keys, slots, sums, places.tobytes()))
        self.wait(FileRead, len(jobs))
        read = time.perf_counter() - begin
        assert self.good == BLOCKS, "every block is verified"
        begin = time.perf_counter()
        self.tier.close()
        return wrote + time.perf_counter() - begin, read


def _ratios(plain: Sequence[float], tier: Sequence[float]) -> dict[str, float]:
    """Speed of the tier by that of the plain loop, round by round."""
    return record.summary([p / t for p, t in zip(plain, tier, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("build"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--buffered", action="store_true", help="through the page cache")
    parser.add_argument("--name", default="file_speed")
    options = parser.parse_args()
    options.dir.mkdir(exist_ok=True)
    blocks = Blocks()
    rounds = []
    for _ in range(options.rounds + 1):
        folder = Path(tempfile.mkdtemp(dir=options.dir))
        try:
            timed = Timed(blocks, folder, direct=not options.buffered)
            direct = timed.tier.is_direct
            tier = timed.run()
            rounds.append((*plain(blocks, folder, direct=direct), *tier))
        finally:
            shutil.rmtree(folder)
    moved = BLOCKS * BLOCK_BYTES / 2**30
    ways = ("plain_write", "plain_read", "tier_write", "tier_read")
    seconds = dict(zip(ways, zip(*rounds[1:], strict=True), strict=True))
    speed = {way: round(moved / statistics.median(its), 3) for way, its in seconds.items()}
    result = {
        "rounds": options.rounds,
        "block_bytes": BLOCK_BYTES,
        "blocks": BLOCKS,
        "direct": direct,
        "plain_write_gib_s": speed["plain_write"],
        "tier_write_gib_s": speed["tier_write"],
        "plain_read_gib_s": speed["plain_read"],
        "tier_read_gib_s": speed["tier_read"],
        "write_over_plain": round(speed["tier_write"] / speed["plain_write"], 3),
        "read_over_plain": round(speed["tier_read"] / speed["plain_read"], 3),
        "samples_s": seconds,
    }
    print(record.write(options.name, result, seed=SEED).read_text())


if __name__ == "__main__":
    main()

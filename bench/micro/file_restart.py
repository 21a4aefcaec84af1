"""How soon a million blocks on disk are known again after a restart.

    python bench/micro/file_restart.py [--dir DIR] [--records 1000000]

Makes closed segments of 128 MiB with blocks of 64 KiB whose payloads are holes (footers are real,
record pages are not read at start), opens a tier on them and drains its events: time to the first
`Known`, to `RecoveryDone`, and the longest `take_events`. Writes bench/results/file_restart.json.
Exit code 0; no figure is judged here, but every record must be announced.
"""

from __future__ import annotations

import argparse
import mmap
import os
import select
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.serve.clock import MonotonicClock
from kvstore.tiers.file import FileConfig, FileTier, Known, RecoveryDone
from kvstore.tiers.file.directory import segment_name
from kvstore.types import PAGE_BYTES, Shard
from kvstore.units import KIB, MIB, TIB
from kvstore.wire.record import Scope, record_pages
from kvstore.wire.segment import SegmentHead, Table, footer, segment_page, store_page

SCOPE = Scope("bench", b"s" * 32, Shard(0, 16, 0, 4), 64 * KIB)
STORE_ID = b"d" * 16
SEED = 1


def build(folder: Path, record_count: int) -> int:
    """Make the directory; returns how many segments."""
    folder.mkdir()
    (folder / "store").write_bytes(store_page(STORE_ID))
    rng = np.random.default_rng(SEED)
    per_segment = (128 * MIB - MIB) // (record_pages(SCOPE) * PAGE_BYTES)
    number = 0
    for first in range(0, record_count, per_segment):
        count = min(per_segment, record_count - first)
        number += 1
        head = SegmentHead(STORE_ID, number.to_bytes(16, "big"), number)
        pages = 1 + np.arange(count, dtype=np.uint32) * np.uint32(record_pages(SCOPE))
        keys = rng.integers(0, 256, (count, 32), np.uint8)
        sums = rng.integers(0, 256, (count, 16), np.uint8)
        table = Table((SCOPE,), (), pages, np.zeros(count, np.uint32), keys, sums)
        end = 1 + count * record_pages(SCOPE)
        with (folder / segment_name(number)).open("wb") as file:
            file.write(segment_page(head))
            file.seek(end * PAGE_BYTES)
            file.write(footer(head, table, first_page=end))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("build"))
    parser.add_argument("--records", type=int, default=1_000_000)
    options = parser.parse_args()
    options.dir.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        segments = build(folder / "store", options.records)
        arena = np.frombuffer(mmap.mmap(-1, MIB), np.uint8)
        begin = time.perf_counter()
        config = FileConfig(folder / "store", capacity_bytes=TIB)
        tier = FileTier.open(config, arena, MonotonicClock())
        opened = time.perf_counter() - begin
        poll = select.poll()
        poll.register(tier.fileno(), select.POLLIN)
        first, known, longest, done = 0.0, 0, 0.0, False
        while not done:
            assert poll.poll(60_000)
            before = time.perf_counter()
            events = tier.take_events()
            longest = max(longest, time.perf_counter() - before)
            for event in events:
                if isinstance(event, Known):
                    first = first or time.perf_counter() - begin
                    known += len(event.keys) // 32
                done |= isinstance(event, RecoveryDone)
        total = time.perf_counter() - begin
        tier.close()
        assert known == options.records, known
    finally:
        shutil.rmtree(folder)
    result = {
        "records": options.records,
        "segments": segments,
        "open_s": round(opened, 4),
        "first_known_s": round(first, 4),
        "all_known_s": round(total, 4),
        "take_events_max_ms": round(longest * 1e3, 3),
    }
    print(record.write("file_restart", result, seed=SEED).read_text())


if __name__ == "__main__":
    main()

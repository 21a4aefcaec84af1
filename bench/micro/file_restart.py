"""How soon a million blocks on disk are known again after a restart.

    python bench/micro/file_restart.py [--dir DIR] [--records 1000000]

Makes closed segments of 128 MiB with blocks of 64 KiB whose payloads are holes (footers are real,
record pages are not read at start), opens a tier on them and drains its events: time to the first
`Known`, to `RecoveryDone`, and the longest `take_events`.

Then a whole node: it stores a few real blocks behind the million, is killed with SIGKILL, and is
started again; an engine attaches and asks for the oldest of them until it comes back from disk,
byte for byte. From the exec of the node until then, and from its ready line. Every block is known
again at last.

Writes bench/results/file_restart.json. Exit code 0; no figure is judged here, but every record must
be announced.
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
import threading
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.cli.ask import node_client
from kvstore.engine.why.report import TierReport
from kvstore.node.node import MonotonicClock
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.tier_events import FileKnown, RecoveryDone
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.directory import segment_name
from kvstore.tiers.file.tier import FileTier
from kvstore.types import PAGE_BYTES, Shard
from kvstore.units import KIB, MIB, TIB
from kvstore.wire.record import Scope, record_pages
from kvstore.wire.segment import ROW, SegmentHead, Table, footer, segment_page, store_page

SCOPE = Scope("bench", b"s" * 32, Shard(0, 16, 0, 4), 64 * KIB)
STORE_ID = b"d" * 16
SEED = 1
KEYS = 32
RESTARTS = 5
CAPACITY = "246GiB"
"""A node keeps a row for every 256 KiB of disk; the million themselves are holes."""


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
        rows = np.zeros(count, ROW)
        rows["page"] = 1 + np.arange(count) * record_pages(SCOPE)
        rows["key"] = rng.integers(0, 256, (count, 32), np.uint8)
        rows["checksum"] = rng.integers(0, 256, (count, 16), np.uint8)
        table = Table((SCOPE,), (), rows)
        end = 1 + count * record_pages(SCOPE)
        with (folder / segment_name(number)).open("wb") as file:
            file.write(segment_page(head))
            file.seek(end * PAGE_BYTES)
            file.write(footer(head, table, first_page=end))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return number


def recover(store: Path, record_count: int) -> dict[str, float]:
    """Open the tier by itself and drain its events."""
    arena = np.frombuffer(mmap.mmap(-1, MIB), np.uint8)
    begin = time.perf_counter()
    tier = FileTier(FileConfig(store, capacity_bytes=TIB), arena, MonotonicClock()).start()
    opened = time.perf_counter() - begin
    poll = select.poll()
    poll.register(tier.fileno(), select.POLLIN)
    first, known, longest, done = 0.0, 0, 0.0, False
    while not done:
        assert poll.poll(60_000)
        before = time.perf_counter()
        events = list(tier.take_events())
        longest = max(longest, time.perf_counter() - before)
        for event in events:
            if isinstance(event, FileKnown):
                first = first or time.perf_counter() - begin
                known += len(event.keys) // 32
            done |= isinstance(event, RecoveryDone)
    total = time.perf_counter() - begin
    tier.close()
    assert known == record_count, known
    return {
        "open_s": round(opened, 4),
        "first_known_s": round(first, 4),
        "all_known_s": round(total, 4),
        "take_events_max_ms": round(longest * 1e3, 3),
    }


def restart(folder: Path, record_count: int) -> list[dict[str, float]]:
    """Kill and start a node RESTARTS times; times of each start."""
    keys = make_keys(KEYS)
    with start_node(folder) as node, RawEngine(node.socket) as engine:
        engine.open()
        engine.store(keys)
        wait_known(node, record_count + KEYS)
        node.kill()
    rounds = []
    for _ in range(RESTARTS):
        begin = time.perf_counter()
        with start_node(folder) as node, RawEngine(node.socket) as engine:
            ready = time.perf_counter()
            engine.open()
            reply = engine.lease_stored(keys[:1])
            hit = time.perf_counter()
            assert engine.is_right(reply, keys[:1])
            wait_known(node, record_count + KEYS)
            all_known = time.perf_counter()
            node.kill()
        rounds.append(
            {
                "ready_s": round(ready - begin, 4),
                "first_hit_s": round(hit - begin, 4),
                "first_hit_after_ready_s": round(hit - ready, 4),
                "all_known_at_most_s": round(all_known - begin, 4),
            }
        )
    return rounds


def start_node(folder: Path) -> NodeProcess:
    place = f"{folder / 'store'}:{CAPACITY}"
    return NodeProcess.start(folder, dram="64MiB", flags=["--file", place])


def wait_known(node: NodeProcess, count: int) -> None:
    """Until the node tells of so many blocks on disk."""
    deadline = time.monotonic() + 60
    with node_client(node.socket) as client:
        while time.monotonic() < deadline:
            rows = client.rows("tiers", TierReport)
            held = sum(row.blocks for row in rows if row.tier == "file")
            if held == count:
                return
            threading.Event().wait(0.02)
    raise TimeoutError(f"{held} of {count} blocks were known in time")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("build"))
    parser.add_argument("--records", type=int, default=1_000_000)
    options = parser.parse_args()
    options.dir.mkdir(exist_ok=True)
    # The node's socket is in here too, and a socket's path is short.
    folder = Path(tempfile.mkdtemp(dir=options.dir)).resolve()
    try:
        segments = build(folder / "store", options.records)
        tier = recover(folder / "store", options.records)
        rounds = restart(folder, options.records)
    finally:
        shutil.rmtree(folder)
    result = {
        "records": options.records,
        "segments": segments,
        **tier,
        "node": {
            "rounds": rounds,
            **{f"{name}_p50": statistics.median(r[name] for r in rounds) for name in rounds[0]},
        },
    }
    print(record.write("file_restart", result, seed=SEED).read_text())


if __name__ == "__main__":
    main()

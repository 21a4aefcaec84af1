"""The scrub of a real node: what rots in memory or on disk is found, and nobody asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.cli.fsck import fsck
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.types import PAGE_BYTES
from kvstore.wire.messages import slots_array
from tests.integration.node.conftest import eventually, tiers
from tests.integration.node.test_files import start, whole, written
from tests.kit.gauges import samples

pytestmark = pytest.mark.slow

SCRUBBING = ["--scrub", "256MiB"]
COUNT = 40


def test_a_flipped_byte_in_dram_is_found_and_the_block_read_from_disk(tmp_path: Path) -> None:
    keys = make_keys(COUNT)
    with (
        start(tmp_path / "a", tmp_path / "files", flags=SCRUBBING) as node,
        RawEngine(node.socket) as engine,
    ):
        engine.open()
        engine.store(keys)
        assert written(node, COUNT)
        reply = engine.lease(keys)
        engine.release(reply)
        arena = engine.ranks[0].arena
        assert arena is not None
        slot = int(slots_array(reply.slots)[7])
        # An engine may write where it may read: the mapping is that of its trust domain.
        arena.array[slot * PAGE_BYTES + 12_345] ^= 0x10
        assert eventually(lambda: tiers(node)["dram"]["scrub_bad"] == 1)
        assert tiers(node)["dram"]["blocks"] == COUNT - 1
        again = engine.lease(keys)
        assert engine.read(again) == whole(keys, engine), "from disk, as it was stored"
        assert eventually(lambda: tiers(node)["dram"]["scrub_age_ms"] >= 0)
        found = samples(node)
        assert found['kvstore_scrub_bad_total{tier="dram"}'] == 1
        assert found['kvstore_scrubbed_blocks_total{tier="dram"}'] >= COUNT
        assert found['kvstore_scrub_age_seconds{tier="dram"}'] >= 0
        assert eventually(lambda: "dropped 1 (first: " in node.log)
        assert re.search(r"scrub of dram: .* \(first: [0-9a-f]{8}\)", node.log)
        assert keys[7].hex() not in node.log
        assert tiers(node)["dram"]["scrub_bad"] == 1


def test_a_flipped_byte_in_a_segment_is_found_and_fsck_agrees(tmp_path: Path) -> None:
    keys, files = make_keys(COUNT), tmp_path / "files"
    with (
        start(tmp_path / "a", files, dram="4MiB", flags=SCRUBBING) as node,
        RawEngine(node.socket) as engine,
    ):
        engine.open()
        for begin in range(0, COUNT, 10):
            engine.store(keys[begin : begin + 10])
            assert written(node, begin + 10)
        segment = next(files.glob("seg-*.kv"))
        content = segment.read_bytes()
        at = content.index(engine.contents(keys[7]))
        with segment.open("r+b") as file:
            file.seek(at + 1000)
            file.write(bytes([content[at + 1000] ^ 1]))
        assert eventually(lambda: tiers(node)["file"]["scrub_bad"] == 1)
        assert tiers(node)["file"]["blocks"] == COUNT - 1
        found = samples(node)
        assert found['kvstore_scrub_bad_total{tier="file"}'] == 1
        assert found["kvstore_file_blocks_damaged_total"] == 1
        assert eventually(lambda: tiers(node)["file"]["scrub_age_ms"] >= 0)
        report = fsck(files)
        assert dict(report.problems) == {"damaged records": 1}
        assert report.records == COUNT - 1


def test_off_is_off(tmp_path: Path) -> None:
    with (
        start(tmp_path / "a", tmp_path / "files", flags=["--scrub", "off"]) as node,
        RawEngine(node.socket) as engine,
    ):
        engine.open()
        engine.store(make_keys(COUNT))
        assert written(node, COUNT)
        threads = [p.read_text().strip() for p in Path(f"/proc/{node.pid}/task").glob("*/comm")]
        assert not any("scrub" in name for name in threads)
        assert {tier["scrubbed_blocks"] for tier in tiers(node).values()} == {0}

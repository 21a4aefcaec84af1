"""What a node kept over a crash of its process is served to others before any engine attaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.testing.raw_engine import RawEngine, make_keys
from tests.kit.peers import PeerPair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_restarted_node_serves_what_it_kept_before_any_engine_attaches(tmp_path: Path) -> None:
    keys = make_keys(8)
    with PeerPair.start(tmp_path, transport="tcp", dram="8MiB") as pair:
        with RawEngine(pair.b.socket) as there:
            there.open()
            there.store(keys)
            there.lease_stored(keys)
        pair.b.crash()
        with RawEngine(pair.a.socket) as here:
            here.open()
            assert here.read(pair.fetch(here, keys)) == [here.contents(key) for key in keys]
        assert "8 blocks (512 KiB) were kept in memory" in pair.b.log

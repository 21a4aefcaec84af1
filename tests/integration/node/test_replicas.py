"""Ranks that hold the same shard, on a real node: stored once, read by each."""

from __future__ import annotations

import pytest

from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import EngineGone, RawEngine, make_keys
from tests.integration.node.conftest import eventually
from tests.kit.gauges import look

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (4, 2)])
def test_a_block_is_stored_once_a_shard_and_read_by_every_rank(
    node: NodeProcess, ranks: int, replicas: int
) -> None:
    keys = make_keys(6)
    with RawEngine(node.socket, rank_count=ranks, replicas=replicas) as engine:
        engine.open()
        engine.store(keys)
        reply = engine.lease_stored(keys)
        for rank in range(ranks):
            expected = [engine.contents(key, rank=rank) for key in keys]
            assert engine.read(reply, rank=rank) == expected
        assert look(node).slots_sealed == len(keys) * ranks // replicas
        # One rank of four is enough to end the session.
        engine.ranks[-1].close()
        with pytest.raises(EngineGone, match="the rank detached"):
            engine.wait(lambda: False)
    assert eventually(lambda: look(node).slots_granted == 0)

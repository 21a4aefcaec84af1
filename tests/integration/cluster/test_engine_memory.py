"""What engines hold in their own memory is in the index, as long as somebody says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.index import IndexClient
from kvstore.index.chain import block_keys
from kvstore.index.feed import Holder, Trust
from kvstore.testing.raw_engine import BLOCK_TOKENS as RAW_BLOCK_TOKENS, RawEngine
from tests.integration.cluster.kit import CONVERGES_S, SPACE, TENANT, Site
from tests.integration.node.conftest import eventually
from tests.kit.command import kvstore
from tests.kit.engine_publisher import (
    BLOCK_TOKENS,
    CLEARED,
    SEED,
    EnginePublisher,
    removed,
    stored,
)
from tests.kit.gauges import samples

pytestmark = pytest.mark.slow

TOKENS = list(range(5 * BLOCK_TOKENS))
KEYS = block_keys(TOKENS, block_tokens=BLOCK_TOKENS, seed=SEED)


def becomes(client: IndexClient, expected: dict[Holder, tuple[int, int]]) -> bool:
    """Whether these come to hold so many leading blocks in hbm, and in dram or faster."""

    def asks() -> bool:
        found = client.match(TENANT, SPACE, b"".join(KEYS)).matches
        return {
            match.holder: (match.hbm_blocks, match.dram_blocks)
            for match in found
            if match.trust is Trust.EXACT
        } == expected and len(found) == len(expected)

    return eventually(asks, timeout_s=CONVERGES_S)


def test_an_engine_without_a_connector_is_in_the_index_whatever_restarts(tmp_path: Path) -> None:
    site, endpoint = Site(tmp_path), f"ipc://{tmp_path}/kv"
    flag = f"gpu0={endpoint},replay={endpoint}.replay,space={SPACE.hex()},rank=1"
    gpu = Holder("n1", "gpu0", 1)
    with EnginePublisher(endpoint) as engine:
        engine.publish(stored(TOKENS, 0, 2))
        with site.index() as index:
            address = index.address
            node = site.node("n1", "--index", address, "--engine-events", flag)
            with node, site.client(address) as client:
                assert becomes(client, {gpu: (2, 2)})
                engine.publish(stored(TOKENS, 2, 4), removed(TOKENS, 3))
                assert becomes(client, {gpu: (3, 3)})
                shown = kvstore("inspect", "nodes", "--json", "--socket", str(node.socket))
                (row,) = json.loads(shown.stdout)["engines"]
                assert (row["engine"], row["rank"], row["state"]) == ("gpu0", 1, "live")
                assert (row["blocks"], row["space"]) == (3, SPACE.hex()[:16])
                assert samples(node)["kvstore_engine_blocks"] == 3
                assert index.stop() == 0
                with site.index("i2", listen=address):
                    assert becomes(client, {gpu: (3, 3)}), "by a snapshot"
                    node.crash()
                    assert becomes(client, {gpu: (3, 3)}), "by a replay"
                    engine.publish(CLEARED)
                    assert becomes(client, {})


def test_an_attached_engine_says_where_it_publishes_and_is_gone_with_its_scheduler(
    tmp_path: Path,
) -> None:
    site, endpoint = Site(tmp_path), f"ipc://{tmp_path}/kv"
    with (
        EnginePublisher(endpoint) as publisher,
        site.node("n1", "--index-listen", "127.0.0.1:0", with_index=True) as node,
        site.client(node.index) as client,
    ):
        events = (publisher.endpoint, publisher.replay_endpoint)
        more: dict[str, Any] = {"whole": True, "block_size": RAW_BLOCK_TOKENS}
        with RawEngine(node.socket, events=events) as engine:
            engine.open()
            engine.store(KEYS[:1])
            publisher.publish(stored(TOKENS, 0, 3, **more))
            expected = {Holder("n1", "engine", 0): (3, 3), Holder("n1"): (0, 1)}
            assert becomes(client, expected)
        assert becomes(client, {Holder("n1"): (0, 1)}), "its events still come, it does not"

"""Several models on one node: a greedy one cannot push another below what was promised to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from tests.integration.node.test_inspect import inspected
from tests.kit.gauges import samples

pytestmark = pytest.mark.slow

BLOCKS = 64
"""Of 64 KiB, in 4 MiB of dram."""


@pytest.mark.parametrize("name", ["modest", "team"])
def test_a_greedy_model_leaves_another_its_share(tmp_path: Path, name: str) -> None:
    mine, greedy_keys = make_keys(24, seed="m"), make_keys(5 * BLOCKS, seed="g")
    config = tmp_path / "node.yaml"
    config.write_text(f"quota: {{{name}: 50%}}\n")
    flags = ["--config", str(config)]
    with (
        NodeProcess.start(tmp_path, dram="4MiB", flags=flags) as node,
        RawEngine(node.socket, engine_id="a", model="modest", tenant="team") as modest,
        RawEngine(node.socket, engine_id="b", model="greedy") as greedy,
    ):
        modest.open()
        greedy.open()
        modest.store(mine)
        modest.release(modest.lease_stored(mine))
        greedy.store(greedy_keys)
        greedy.release(greedy.lease_stored(greedy_keys[-4:]))
        reply = modest.lease(mine)
        assert len(reply.slots) == 4 * len(mine)
        assert modest.read(reply) == [modest.contents(key) for key in mine]
        own, others = inspected(node, "tiers")["quotas"]
        assert (own["quota"], own["promised_bytes"]) == (name, 2 << 20)
        assert own["used_bytes"] >= 24 * modest.block_bytes
        assert (others["quota"], others["promised_bytes"]) == ("", 2 << 20)
        metrics = samples(node)
        assert metrics[f'kvstore_quota_promised_bytes{{quota="{name}"}}'] == 2 << 20
        assert metrics[f'kvstore_quota_used_bytes{{quota="{name}"}}'] == own["used_bytes"]


def test_without_a_quota_the_greedy_one_takes_it_all(tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    mine = make_keys(24, seed="m")
    with (
        NodeProcess.start(tmp_path, dram="4MiB") as node,
        RawEngine(node.socket, engine_id="a", model="modest") as modest,
        RawEngine(node.socket, engine_id="b", model="greedy") as greedy,
    ):
        modest.open()
        greedy.open()
        modest.store(mine)
        modest.release(modest.lease_stored(mine))
        greedy.store(make_keys(5 * BLOCKS, seed="g"))
        assert "quotas" not in inspected(node, "tiers")
        assert len(modest.lease(mine).slots) < 4 * len(mine)

"""An engine that gets nothing from its node: the operator sees it on every page."""

from __future__ import annotations

import pytest

from kvstore.connector.config import ConnectorConfig
from kvstore.connector.scheduler_side import SchedulerSide
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine
from tests.integration.node.conftest import eventually
from tests.integration.node.test_inspect import inspected
from tests.kit.cores import core_config
from tests.kit.gauges import page, samples
from tests.kit.one_group import OneGroup

pytestmark = pytest.mark.slow

REASON = "the KV cache is on cuda: this version serves CPU caches only"


def test_a_cache_that_is_not_served_is_seen_by_the_operator(node: NodeProcess) -> None:
    config = core_config(
        engine_id="gpu", nonce="n", process="p", tenant="t", rank_count=1, block_tokens=16
    )
    with RawEngine(node.socket, engine_id="cpu") as served:
        served.open()
        assert page(node, "/healthz") == (200, "ok\n")
        side = SchedulerSide(ConnectorConfig(socket=str(node.socket)), config, OneGroup(16))
        side.cannot_be_served(REASON)

        def told() -> bool:
            side.poll()
            return samples(node)["kvstore_engines_unserved"] == 1

        assert eventually(told)
        assert page(node, "/healthz")[1] == f"ok, but engine gpu is not served: {REASON}\n"
        assert inspected(node, "nodes")["unserved"] == [
            {"engine": "gpu", "tenant": "t", "reason": REASON}
        ]
        side.close()
        assert eventually(lambda: samples(node)["kvstore_engines_unserved"] == 0)
        assert page(node, "/healthz") == (200, "ok\n")

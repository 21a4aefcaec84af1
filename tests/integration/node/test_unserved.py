"""An engine that gets nothing from its node: the operator sees it on every page."""

from __future__ import annotations

import re
import urllib.request

import pytest

from kvstore.connector.config import ConnectorConfig
from kvstore.connector.scheduler_side import SchedulerSide
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine
from tests.integration.node.conftest import eventually
from tests.integration.node.test_inspect import inspected
from tests.kit.cores import core_config
from tests.kit.one_group import OneGroup

pytestmark = pytest.mark.slow

REASON = "the KV cache is on cuda: this version serves CPU caches only"


def page(node: NodeProcess, path: str) -> str:
    with urllib.request.urlopen(node.metrics_url.replace("/metrics", path), timeout=10) as answer:
        return str(answer.read().decode())


def unserved(node: NodeProcess) -> int:
    found = re.search(r"^kvstore_engines_unserved (\S+)$", page(node, "/metrics"), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def test_a_cache_that_is_not_served_is_seen_by_the_operator(node: NodeProcess) -> None:
    config = core_config(
        engine_id="gpu", nonce="n", process="p", tenant="t", rank_count=1, block_tokens=16
    )
    with RawEngine(node.socket, engine_id="cpu") as served:
        served.open()
        assert page(node, "/healthz") == "ok\n"
        side = SchedulerSide(ConnectorConfig(socket=str(node.socket)), config, OneGroup(16))
        side.cannot_be_served(REASON)

        def told() -> bool:
            side.poll()
            return unserved(node) == 1

        assert eventually(told)
        assert page(node, "/healthz") == f"ok, but engine gpu is not served: {REASON}\n"
        assert inspected(node, "nodes")["unserved"] == [
            {"engine": "gpu", "tenant": "t", "reason": REASON}
        ]
        side.close()
        assert eventually(lambda: unserved(node) == 0)
        assert page(node, "/healthz") == "ok\n"

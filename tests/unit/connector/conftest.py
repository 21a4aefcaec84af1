"""What tests of the connector get: a node by hand, and limits of the log that earlier tests have
not used up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.obs.logs import RateLimit
from tests.unit.connector.scripted_node import ScriptedNode, node_at


@pytest.fixture(autouse=True)
def fresh_log_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm.kvstore.rank", "vllm.kvstore.scheduler"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [RateLimit()])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ScriptedNode]:
    with node_at(tmp_path / "node.sock") as node:
        yield node

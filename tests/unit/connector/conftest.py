"""What tests of the connector get: a node by hand, and limits of the log that earlier tests have
not used up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvstore.obs.logs import RateLimit
from tests.kit.scripted_node import ScriptedNode, node_at


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """On a busy machine vLLM takes minutes to import: not within the time limit of a test."""
    if item.path.parent == Path(__file__).parent and find_spec("vllm") is not None:
        import_module("vllm.v1.request")
    return (yield)


@pytest.fixture(autouse=True)
def fresh_log_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm.kvstore.rank", "vllm.kvstore.scheduler"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [RateLimit()])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ScriptedNode]:
    with node_at(tmp_path / "node.sock") as node:
        yield node

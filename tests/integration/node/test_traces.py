"""Traces of a real node, as a collector that speaks OTLP gets them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.process import NodeProcess, RouterProcess
from kvstore.testing.raw_engine import BLOCK_TOKENS, RawEngine, make_keys
from kvstore.wire.messages import Story
from tests.integration.node.conftest import eventually
from tests.kit.collector import Collector, collecting
from tests.kit.gauges import samples

pytestmark = pytest.mark.slow

KEYS = make_keys(5, seed="traced")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def told(engine: RawEngine, request: str) -> None:
    """A request that was looked up, and has ended."""
    reply = engine.lease(KEYS)
    its = {"session": engine.session, "leases": [reply.lease]}
    count = len(KEYS) * BLOCK_TOKENS
    assert engine.scheduler.send(Story(request, prompt_tokens=count, **its))  # type: ignore[arg-type]
    engine.release(reply)


def counted(node: NodeProcess) -> dict[str, float]:
    """The metric, by result."""
    name = 'kvstore_traced_requests_total{result="'
    found = samples(node).items()
    return {key[len(name) : -2]: value for key, value in found if key.startswith(name)}


def test_a_collector_that_is_away_costs_traces_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens: refused
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with (
            NodeProcess.start(tmp_path, flags=["--trace", url]) as node,
            RawEngine(node.socket, engine_id="one") as engine,
        ):
            engine.open()
            for number in range(20):
                told(engine, f"r{number}")  # each a lookup, which the node answers in time
            assert eventually(lambda: counted(node)["dropped"] == 20, timeout_s=30)
            assert counted(node) == {"exported": 0, "dropped": 20}
            assert "the collector takes no spans" in node.log
            told(engine, "last")
            begin_s = time.monotonic()
            assert node.stop() == 0
            assert time.monotonic() - begin_s < 3
        assert node.log.count("--trace") == 1, "an outage is one line"


@pytest.mark.parametrize("is_on", [False, True])
def test_off_is_not_imported(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    flags = ["--trace", collector.url] if is_on else []
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # each import is a line on stderr
    with NodeProcess.start(tmp_path, flags=flags) as node:
        node.stop()
    worker = ["--worker", "a=http://127.0.0.1:1"]
    with RouterProcess.start(tmp_path, [*worker, *flags]) as router:
        router.stop()
    for process in (node, router):
        assert "kvstore.net" in process.log
        assert ("opentelemetry" in process.log) is is_on
        assert ("kvstore.obs.traces" in process.log) is is_on

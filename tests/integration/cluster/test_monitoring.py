"""A real Prometheus beside node, index and router under load: no panel is empty, and each fault
raises its alert and no other.

Engines are a raw one, which stores and loads, and scripted ones behind the router. Panels of vLLM's
own metrics are not asked here: `tests/unit/deploy/test_monitoring.py` compares their names with
vLLM's list.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.index.chain import block_keys
from kvstore.testing.process import Lab, NodeProcess, RouterProcess
from kvstore.testing.raw_engine import BLOCK_TOKENS, RawEngine
from kvstore.wire.messages import Story
from scripts import alerts, dashboard
from scripts.alerts import ALERTS, Alert
from tests.integration.node.conftest import eventually
from tests.kit.peers import attached
from tests.kit.processes import IndexProcess
from tests.kit.programs import need
from tests.kit.prometheus_process import PrometheusProcess
from tests.kit.router_thread import ASK, ask
from tests.kit.scripted_worker import ScriptedWorker

# Alone: the rules are sped up 120 times, so a busy machine would look like one that is down.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]

HASTE = 120
PROMPTS = [[1000 * n + t for t in range(8 * BLOCK_TOKENS)] for n in range(1, 5)]
VARIABLES = {"$__rate_interval": "10s", "$ttft_objective": "0.2", "$success_objective": "0.999"}
SAVED_NS, WAITED_NS = 300_000_000, 2_000_000


def hastened(alert: Alert) -> Alert:
    """All but one: its gauge itself looks back over a minute."""
    return alert if alert.name == "KVStoreHeartbeatGap" else alerts.hastened(alert, HASTE)


def keys_of(prompt: Sequence[int]) -> list[bytes]:
    return list(block_keys(prompt, block_tokens=BLOCK_TOKENS, seed="0"))


class System(NamedTuple):
    """All processes."""

    folder: Path
    node: NodeProcess
    replica: IndexProcess
    workers: list[ScriptedWorker]
    prometheus: PrometheusProcess


def served(engine: RawEngine, prompt: list[int], number: int, stored: set[bytes]) -> None:
    """One request at the node: what is there is loaded, the rest computed and stored."""
    keys = keys_of(prompt)
    reply = engine.lease(keys)
    loaded = len(engine.read(reply))
    engine.release(reply)
    if fresh := [key for key in keys if key not in stored]:
        engine.store(fresh)
        stored.update(fresh)
    told = Story(
        request=f"r{number}",
        prompt_tokens=len(prompt),
        loaded_tokens=loaded * BLOCK_TOKENS,
        outcome="" if loaded else "not stored",
        session=engine.session,
        leases=[reply.lease],
        lookup_ns=WAITED_NS,
        saved_ns=SAVED_NS if loaded else 0,
    )
    assert engine.scheduler.send(told)


@contextlib.contextmanager
def load(node: NodeProcess, workers: list[ScriptedWorker], router: RouterProcess) -> Iterator[None]:
    """Requests through the router until the context ends; the node has what its engines saw."""
    is_over = threading.Event()

    def engines() -> None:
        stored: set[bytes] = set()
        number = 0
        with attached(node.socket) as engine:
            while not is_over.wait(0.2):
                engine.hear(0.0)
                for worker in workers:
                    with contextlib.suppress(OSError):  # one was killed
                        for body in map(json.loads, worker.bodies()):
                            prompt = body.get("prompt", "")
                            ids = prompt if isinstance(prompt, list) else list(prompt.encode())
                            served(engine, ids, number := number + 1, stored)

    def clients() -> None:
        port = router.port
        while not is_over.wait(0.2):
            for prompt in PROMPTS:
                ask(port, ASK | {"prompt": prompt, "stream": True})

    threads = [threading.Thread(target=each) for each in (engines, clients)]
    for thread in threads:
        thread.start()
    try:
        router.await_parity()
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    need("prometheus")
    with contextlib.ExitStack() as stack:
        index = stack.enter_context(IndexProcess.start(tmp_path))
        tls = Lab(tmp_path / "pki").flags("index", "i2")  # for the panel of certificates
        other = stack.enter_context(IndexProcess.start(tmp_path, tls, name="i2"))
        node = stack.enter_context(
            NodeProcess.start(
                tmp_path,
                flags=[
                    *("--insecure", "--node-name", "n1", "--index", index.address),
                    *("--peer-listen", "127.0.0.1:0", "--transport", "tcp"),
                    *("--file", f"{tmp_path / 'files'}:64MiB", "--scrub", "256MiB"),
                ],
            )
        )
        workers = [stack.enter_context(ScriptedWorker.start(tmp_path, name)) for name in "ab"]
        flags = [f"--worker={w.flag},node=n1,block={BLOCK_TOKENS},seed=0" for w in workers]
        router = stack.enter_context(
            RouterProcess.start(
                tmp_path, [*flags, "--index", index.address, "--index-timeout", "500", "--insecure"]
            )
        )
        stack.enter_context(load(node, workers, router))
        targets = {"node": node, "index": index, "index-tls": other, "router": router}
        prometheus = stack.enter_context(
            PrometheusProcess.start(
                tmp_path,
                {job: each.metrics_url for job, each in targets.items()},
                alerts.rules([hastened(alert) for alert in ALERTS]),
            )
        )
        yield System(tmp_path, node, index, workers, prometheus)


def empty_queries(prometheus: PrometheusProcess) -> list[str]:
    """Panels of ours without a number."""
    found = []
    for panel in (panel for row in dashboard.ROWS.values() for panel in row):
        for legend, query in panel.queries.items():
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            if "vllm:" in query:
                continue
            values = [each["value"][1] for each in prometheus.query(query)]
            if not values or "NaN" in values:
                found.append(f"{panel.title}/{legend}")
    return found


def raises(prometheus: PrometheusProcess, name: str) -> None:
    """Wait for this alert; nothing else may fire meanwhile."""

    def has_come() -> bool:
        firing = prometheus.firing()
        assert firing <= {name}, firing
        return firing == {name}

    assert eventually(has_come), f"{name} did not fire"


def flip_a_bit(folder: Path, content: bytes) -> None:
    """Of a block on disk."""
    for segment in folder.glob("seg-*.kv"):
        if (at := segment.read_bytes().find(content)) >= 0:
            with segment.open("r+b") as file:
                file.seek(at + 77)
                file.write(bytes([content[77] ^ 1]))
            return
    raise AssertionError("the block is in no segment")


def test_no_panel_is_empty_and_each_fault_raises_its_alert_alone(system: System) -> None:
    prometheus = system.prometheus
    missing: list[str] = []

    def has_numbers() -> bool:
        missing[:] = empty_queries(prometheus)
        return not missing

    assert eventually(has_numbers), missing
    assert prometheus.firing() == set()

    with RawEngine(system.node.socket, engine_id="looks") as engine:
        content = engine.contents(keys_of(PROMPTS[0])[3])
    flip_a_bit(system.folder / "files", content)
    raises(prometheus, "KVStoreIntegrityFailure")
    assert eventually(lambda: prometheus.firing() == set()), "the window passes"

    killed = system.workers[1]
    killed.kill()
    raises(prometheus, "KVStoreEngineUnserved")
    port = int(killed.url.rpartition(":")[2])
    with ScriptedWorker.start(system.folder, "again", port=port):
        assert eventually(lambda: prometheus.firing() == set())
        system.replica.stop()
        raises(prometheus, "KVStoreFeedLost")

"""P3: engine, scheduler process or worker killed -9: the node is back at baseline within 10 s."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from kvstore.demo.engine import EngineError
from kvstore.demo.workload import Encode, text_tokens
from kvstore.testing.process import NodeProcess
from tests.integration.engine.nursery import EngineNursery
from tests.integration.engine.support import BLOCK_TOKENS, PATIENT, at_baseline, wait_until
from tests.kit.engines import EngineConfig, complete_many, scheduler_pid, server_pid, worker_pids
from tests.kit.gauges import descriptors

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.by_exec,
    pytest.mark.timeout(300),
]

SEED = 9


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess.start(tmp_path, dram="64MiB") as process:
        yield process


@pytest.mark.parametrize("victim", ["engine", "scheduler", "worker"])
def test_after_a_kill_the_node_is_at_baseline(
    vllm: EngineNursery,
    tiny_model: Path,
    node: NodeProcess,
    encode: Encode,
    tmp_path: Path,
    victim: str,
) -> None:
    rng = random.Random(f"{SEED} {victim}")
    baseline = len(descriptors(node.pid))
    config = EngineConfig(model=tiny_model, socket=node.socket, connector_extra=PATIENT)
    with vllm.start(config, log=tmp_path / "engine.log") as engine:
        prompts = [text_tokens(rng, encode, 20 * BLOCK_TOKENS) for _ in range(6)]
        for prompt in prompts[:3]:
            engine.complete(prompt, max_tokens=1)
        engine.forget()

        def busy() -> None:
            try:
                complete_many(engine, prompts * 3, max_tokens=40, concurrency=6)
            except EngineError:
                return  # it is being killed

        load = Thread(target=busy)
        load.start()
        wait_until(lambda: engine.hits().external_hits > 0, "loads are under way")
        pid = {
            "engine": server_pid(engine),
            "scheduler": scheduler_pid(engine),
            "worker": worker_pids(engine)[0],
        }[victim]
        os.kill(pid, signal.SIGKILL)
        if victim == "engine":
            engine.kill()
        load.join()  # within the time limit of the test
        # vLLM ends its other processes when one dies; none of ours may keep them.
        assert engine.wait(60), "vLLM did not end"
        wait_until(lambda: at_baseline(node), "the node is back at baseline")
        wait_until(lambda: len(descriptors(node.pid)) == baseline, "descriptors are closed")

"""Steps as vLLM's second model runner makes them (`v1/worker/gpu/model_runner.py` of 0.32).

    zeros and copies of new blocks ─ handle_preemptions ─ forward ─ start_load_kv ─ wait_for_save

The order is read off the installed engine; on CPUs it runs the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client.core.plan import LoadJob, StepPlan, StoreJob
from kvstore.connector.config import ConnectorConfig
from kvstore.connector.worker_side import WorkerSide
from kvstore.wire.messages import Drop, Seal, slots_array
from tests.kit.cores import has_work
from tests.kit.scripted_node import WAIT_S, ScriptedNode
from tests.unit.connector.test_worker_side import (
    job,
    kv_cache_config,
    kv_caches,
    vllm_config,
)


@pytest.fixture
def caches() -> dict[str, Any]:
    return kv_caches()


@pytest.fixture
def side(tmp_path: Path, caches: dict[str, Any]) -> Iterator[WorkerSide]:
    config, cache = vllm_config("/a"), kv_cache_config()
    config.use_v2_model_runner = cache.needs_kv_cache_zeroing = True
    side = WorkerSide(ConnectorConfig(socket=str(tmp_path / "node.sock")), config, cache)
    side.register_kv_caches(caches)
    yield side
    side.shutdown()


def step(side: WorkerSide, plan: StepPlan) -> set[str]:
    side.handle_preemptions(plan)
    side.start_load_kv(plan)
    side.wait_for_save(plan)
    return side.get_finished()[0]


def ended(side: WorkerSide) -> None:
    """Wait for the copies, without a step."""
    handoff = side._handoff
    assert handoff is not None
    with handoff._changed:
        assert handoff._wait(lambda: not has_work(handoff._core), WAIT_S)


def test_a_block_that_was_zeroed_before_it_was_named_is_not_sealed(
    node: ScriptedNode, side: WorkerSide, caches: dict[str, Any]
) -> None:
    """The store read zeros, and their checksum fits."""
    node.open_session(5)
    for cache in caches.values():
        cache[1] = 0  # by the step whose fence comes next
    step(side, StepPlan(stores=(job(StoreJob, (1, 2), job=1),)))
    ended(side)
    step(side, StepPlan(fence_blocks=(1,)))
    assert len(slots_array(node.receive(Seal).slots)) == 1
    assert len(slots_array(node.receive(Drop).slots)) == 1


def test_loads_begin_before_the_forward_and_once(
    node: ScriptedNode, side: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind it they would wait for the whole step."""
    node.open_session(5)
    plan = StepPlan(loads=(job(LoadJob, (2,), request="r", lease=1),))
    submitted: list[StepPlan] = []
    monkeypatch.setattr(side, "_submit", submitted.append)
    side.handle_preemptions(plan)
    assert [each.loads for each in submitted] == [plan.loads]
    side.start_load_kv(plan)
    side.wait_for_save(plan)
    assert len(submitted) == 1
    side.start_load_kv(plan)
    assert len(submitted) == 2, "of a cache that was off in `handle_preemptions`"


@pytest.mark.parametrize(
    ("context", "kwargs", "expected"),
    [
        (None, {"num_tokens": 17}, False),  # the second runner, after its forward
        (None, {}, True),  # of either, without a forward
        ({}, {}, False),  # the first one
    ],
)
def test_a_step_with_tokens_is_not_idle(context: Any, kwargs: Any, expected: bool) -> None:
    """An idle one waits for loads."""
    from kvstore.connector.vllm import KVStoreConnector, KVStoreMetadata

    connector: Any = object.__new__(KVStoreConnector)
    connector.is_off, connector._errors = False, 0
    connector._worker = SimpleNamespace(start_load_kv=lambda plan: None)
    connector._connector_metadata = KVStoreMetadata(StepPlan())
    connector.start_load_kv(SimpleNamespace(attn_metadata=context), **kwargs)
    assert connector._idle_step is expected


def test_the_order_is_that_of_the_engine() -> None:
    """If another version names blocks before it overwrites them, stores need not wait."""
    import vllm

    folder = Path(vllm.__file__).parent
    source = (folder / "v1" / "worker" / "gpu" / "model_runner.py").read_text()
    execute = source[source.index("    def execute_model(") :]
    assert execute.index("self.update_requests(") < execute.index("self.kv_connector.pre_forward(")
    update = source[source.index("    def update_requests(") :]
    end = update.index("    def ", 10)
    assert "zero_block_ids" in update[:end]
    assert "copy_kv_cache_blocks_inplace" in update[:end]

"""Outputs of several ranks and steps in one, as vLLM hands them to the scheduler's connector."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client.core.plan import LoadResult, RankReport
from kvstore.wire import messages as m
from tests.unit.client.conftest import AnsweredCore
from tests.unit.client.test_two_ranks import under_load
from tests.unit.connector.test_guard import scheduler_connector

pytestmark = pytest.mark.engine


def test_outputs_that_are_replayed_after_a_workers_failure_end_each_load_once() -> None:
    """Since 0.33 those of the others join the next step's: two reports of a rank at once."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput

    from kvstore.connector.vllm import KVStoreWorkerMetadata

    node = AnsweredCore(rank_count=2)
    node.attach()
    leases = {name: under_load(node, name) for name in ("a", "b")}
    connector = scheduler_connector()

    def reported(reports: list[RankReport]) -> None:
        for each in reports:
            node.core.reported(each, node.now_ns)

    connector._scheduler = SimpleNamespace(reported=reported)

    def output(rank: int, *ended: str) -> Any:
        loads = tuple(LoadResult(name, leases[name], 3, (), 1, 1) for name in ended)
        reports = [RankReport(rank, loads=loads, blocks_sealed=1)]
        made = KVConnectorOutput(
            finished_recving=set(ended), kv_connector_worker_meta=KVStoreWorkerMetadata(reports)
        )
        return SimpleNamespace(kv_connector_output=made)

    aggregator = KVOutputAggregator(2)
    replayed, step = [output(1, "a")], [output(0, "a", "b"), output(1, "b")]
    if hasattr(aggregator, "ft_defer_kv_connector_outputs"):
        aggregator.ft_defer_kv_connector_outputs([each.kv_connector_output for each in replayed])
    else:
        step += replayed
    taken = aggregator.aggregate(step).kv_connector_output
    assert taken.finished_recving == {"a", "b"}
    assert node.core.lookups.leases_open == 2
    connector.update_connector_output(taken)
    assert not connector.is_off
    assert node.core.lookups.leases_open == 0
    assert node.core.stats.take()["store_blocks_sealed"] == 3
    node.exchange()
    released = [lease for each in node.of(m.LeaseRelease) for lease in each.leases]
    assert sorted(released) == sorted(leases.values()), "each once"
    nothing = aggregator.aggregate([output(0), output(1)]).kv_connector_output
    assert nothing.finished_recving is None

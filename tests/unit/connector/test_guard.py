"""P2: no error of ours reaches the engine, and after one the cache is off but loads still end."""

from __future__ import annotations

import functools
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connector.scheduler_side import Attendant

pytestmark = pytest.mark.engine


class Broken:
    """Every call fails, except what must still work after a failure."""

    def __init__(self) -> None:
        self.closed = False
        self.rescued = object()

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object, **__: object) -> None:
            raise KeyError(name)

        return fail

    def close(self, unserved: str = "") -> None:
        self.closed = bool(unserved)

    def rescue_plan(self) -> object:
        return self.rescued

    def take_stats(self) -> dict[str, int]:
        return {}


def scheduler_connector() -> Any:
    """A connector without the engine's constructor around it."""
    from kvstore.connector.vllm import KVStoreConnector

    connector: Any = object.__new__(KVStoreConnector)
    connector.is_off, connector._errors, connector._worker = False, 0, None
    connector._scheduler = Broken()
    return connector


@pytest.mark.parametrize(
    ("method", "arguments", "answer"),
    [
        ("on_new_request", (None,), None),
        ("get_num_new_matched_tokens", (None, 0), (0, False)),
        ("update_state_after_alloc", (None, None, 0), None),
        ("update_connector_output", (SimpleNamespace(kv_connector_worker_meta=None),), None),
        ("request_finished_all_groups", (None, ()), (False, None)),
        ("request_finished", (None, []), (False, None)),
        ("get_external_cache_hit_sources", (None, 128), {"host": 128}),
        ("has_pending_push_work", (), False),
        ("bind_gpu_block_pool", (None,), None),
        ("reset_cache", (), True),
    ],
)
def test_a_failing_scheduler_side_answers_as_no_cache(
    method: str, arguments: tuple[object, ...], answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    connector = scheduler_connector()
    broken = connector._scheduler
    with caplog.at_level(logging.ERROR, logger="vllm.kvstore"):
        for _ in range(3):
            assert getattr(connector, method)(*arguments) == answer
    if method != "update_connector_output":  # without a report there is nothing to fail at
        assert connector.is_off
        assert broken.closed
        assert len(caplog.records) == 1


def test_a_load_that_was_promised_before_the_cache_went_off_is_planned() -> None:
    """Another thread's error, between the answer and the request's admission."""
    connector = scheduler_connector()
    connector.turn_off("attend", KeyError("bug"))
    seen: list[object] = []
    connector._scheduler.update_state_after_alloc = lambda *of: seen.append(of)
    connector.update_state_after_alloc("request", "blocks", 128)
    assert seen == [("request", "blocks", 128)]


def test_loads_that_were_promised_reach_the_ranks_after_a_failure() -> None:
    connector = scheduler_connector()
    rescued = connector._scheduler.rescued
    assert connector.build_connector_meta(None).plan is rescued
    assert connector.is_off
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {"connector_errors": 1}


@pytest.mark.parametrize(
    ("file_tokens", "split"),
    [(0, {"host": 384}), (128, {"host": 256, "disk": 128}), (384, {"disk": 384})],
)
def test_hits_are_split_by_tier(file_tokens: int, split: dict[str, int]) -> None:
    connector = scheduler_connector()
    connector._scheduler = SimpleNamespace(file_tokens=lambda request: file_tokens)
    assert connector.get_external_cache_hit_sources(None, 384) == split
    assert sum(split.values()) == 384


def test_stats_add_up_and_make_a_line() -> None:
    from kvstore.connector.stats import KVStoreStats

    stats = KVStoreStats(data={"hits": 1, "load_bytes": 2**30, "load_ns": 10**9})
    stats.aggregate(KVStoreStats(data={"hits": 2, "misses:not stored": 1}))
    line = stats.reduce()
    assert line["kvstore hits"] == 3
    assert line["misses"] == 1
    assert line["load GiB/s"] == 1.0
    stats.reset()
    assert stats.is_empty()


def test_counters_have_labels_and_seconds_and_never_fall() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from kvstore.connector.stats import KVStorePromMetrics

    registry = CollectorRegistry()
    config: Any = SimpleNamespace(kv_transfer_config=None)
    types: Any = {
        Counter: functools.partial(Counter, registry=registry),
        Gauge: None,
        Histogram: None,
    }
    made = KVStorePromMetrics(config, types, ["model_name", "engine"], {0: ["m", 0], 1: ["m", 1]})
    engine = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value("vllm:kvstore_hits_total", engine) == 0
    of_disk = engine | {"tier": "file"}
    assert registry.get_sample_value("vllm:kvstore_hit_tokens_total", of_disk) == 0
    data = {"saved_prefill_ns": 2 * 10**9, "waited_ns": 5 * 10**8, "hit_tokens:file": 7}
    for _ in range(2):
        made.observe(data | {"misses:node unreachable": 3, "hits": 1, "of another version": 1}, 1)
    for name, labels, value in (
        ("saved_prefill_seconds", {}, 4),
        ("waited_seconds", {}, 1),
        ("hit_tokens", {"tier": "file"}, 14),
        ("misses", {"reason": "node unreachable"}, 6),
        ("hits", {}, 2),
    ):
        found = registry.get_sample_value(f"vllm:kvstore_{name}_total", engine | labels)
        assert found == pytest.approx(value), name
    made.observe({"saved_prefill_ns": -1}, 1)
    assert registry.get_sample_value("vllm:kvstore_saved_prefill_seconds_total", engine) == 4


@pytest.mark.parametrize("released", [False, True])
def test_a_failed_rank_still_ends_loads_that_come_later(released: bool) -> None:
    """Also one whose engine released its cache: 0.33 says so, whether or not it may sleep."""
    from kvstore.client.core.plan import LoadJob, StepPlan
    from kvstore.connector.vllm import KVStoreConnector, KVStoreMetadata

    class Worker:
        """Fails a step's first hook; after its shutdown it refuses loads, as the real one does."""

        def __init__(self) -> None:
            self.down = False
            self.ended: set[str] = set()

        def handle_preemptions(self, plan: StepPlan) -> None:
            raise KeyError("bug")

        def start_load_kv(self, plan: StepPlan) -> None:
            assert self.down
            self.ended |= {load.request for load in plan.loads}

        def get_finished(self, *, idle: bool) -> tuple[set[str], set[str]]:
            return self.ended, self.ended

        def shutdown(self) -> None:
            self.down = True

    connector: Any = object.__new__(KVStoreConnector)
    connector.is_off, connector._errors, connector._scheduler = False, 0, None
    connector._worker = Worker()
    load = LoadJob(request="r", lease=1, session=1, block_ids=(4,), keys=bytes(32))
    metadata = KVStoreMetadata(StepPlan(loads=(load,)))
    assert connector.get_kv_connector_stats() is None
    if released:
        connector.unregister_kv_caches()
    else:
        connector.handle_preemptions(metadata)
        stats = connector.get_kv_connector_stats()
        assert stats is not None
        assert stats.data == {"connector_errors": 1}
    assert connector.is_off
    assert connector.get_kv_connector_stats() is None
    connector._connector_metadata = metadata
    connector.start_load_kv(SimpleNamespace(attn_metadata=None))
    results = connector.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})


def test_ranks_that_cannot_be_served_tell_the_node_by_the_scheduler() -> None:
    from kvstore.connector.vllm import BROKEN, KVStoreConnector

    def rank(unserved: str) -> Any:
        connector: Any = object.__new__(KVStoreConnector)
        connector.is_off, connector._errors, connector._scheduler = False, 0, None
        connector._worker = SimpleNamespace(unserved=unserved)
        return connector

    broken = rank("")
    broken._worker = SimpleNamespace(shutdown=lambda: None)  # it has no `unserved`: a bug of ours
    told: list[str] = []
    connector = scheduler_connector()
    connector._scheduler = SimpleNamespace(cannot_be_served=told.append)
    assert rank("").get_handshake_metadata() is None
    found = {(0, 1): rank("its cache is on cuda").get_handshake_metadata()}
    connector.set_xfer_handshake_metadata_pp_aware(found)
    found[0, 0] = broken.get_handshake_metadata()
    connector.set_xfer_handshake_metadata_pp_aware(found)
    assert told == ["its cache is on cuda", BROKEN]


def test_an_error_of_a_look_turns_the_cache_off_and_ends_the_thread() -> None:
    connector = scheduler_connector()
    connector._attendant = Attendant(weakref.WeakMethod(connector.attend), tick_s=0)
    connector._attendant.start()
    connector._attendant._thread.join(30)
    assert connector.is_off
    assert connector._scheduler.closed

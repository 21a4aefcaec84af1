"""Which of vLLM 0.32's own tests run against kvstore, and which of those files' tests do not apply.

`kvstore/docs/upstream-tests.md` says the same in words, and goes through the other files.
"""

from __future__ import annotations

from typing import Final

UNIT: Final = "tests/v1/kv_connector/unit"
CORE: Final = "tests/v1/core"

WHOLE_FILES: Final = (
    f"{UNIT}/test_cache_pollution_prevention.py",
    f"{UNIT}/test_error_propagation.py",
    f"{UNIT}/test_invalid_blocks_correctness.py",
    f"{UNIT}/test_kv_load_failure_recovery.py",
    f"{UNIT}/test_remote_prefill_lifecycle.py",
)

SINGLE_TESTS: Final = (
    f"{CORE}/test_scheduler.py::test_schedule_prefills_gating",
    f"{CORE}/test_scheduler.py::test_pause_new_drains_async_kv_loads",
    f"{CORE}/test_scheduler.py::test_kv_connector_basic",
    f"{CORE}/test_scheduler.py::test_kv_connector_honors_skip_reading_prefix_cache",
    f"{CORE}/test_scheduler.py::test_external_prefix_cache_metrics",
    f"{CORE}/test_scheduler.py::test_kv_connector_unable_to_allocate",
    f"{CORE}/test_scheduler.py::test_kv_connector_handles_preemption",
    f"{CORE}/test_scheduler.py::test_priority_scheduling_preemption_and_resumption_when_out_of_kv",
    f"{CORE}/test_scheduler.py::test_prepend_skipped_requests_order",
    f"{CORE}/test_scheduler.py::test_abort_request_waiting_for_remote_kvs",
    f"{CORE}/test_scheduler.py::test_abort_request_finished_recving",
    f"{CORE}/test_scheduler.py::test_async_load_reservation_prevents_wedge_e2e",
    f"{CORE}/test_async_scheduler.py::test_kv_pressure_preempt_mid_handoff",
    f"{CORE}/test_deferred_block_free.py::test_gate_enabled_for_async_consumer",
)
"""Of files that are about the scheduler: those that ask for a connector."""

DOES_NOT_APPLY: Final = {
    f"{UNIT}/test_remote_prefill_lifecycle.py::test_basic_lifecycle": (
        "counts half a block as delivered; a store has whole blocks"
    ),
    f"{UNIT}/test_remote_prefill_lifecycle.py::test_no_spurious_prefix_caching": (
        "expects that a second request with the same prompt finds nothing; a store serves it too"
    ),
    f"{CORE}/test_scheduler.py::test_external_prefix_cache_metrics[False-True]": (
        "a hit of a quarter of a block; a store has whole blocks"
    ),
    f"{CORE}/test_async_scheduler.py::test_kv_pressure_preempt_mid_handoff[kv_producer-False]": (
        "expects a producer to insist on delivery; a store that drops one has a miss later"
    ),
}

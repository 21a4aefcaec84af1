"""A rank's half of the connector: vllm's step hooks to the copy thread, and back.

Translates only. Runs on the engine's worker thread and waits in two places, both bounded: for
stores that read blocks about to be overwritten, and, when the step has nothing else to do, a moment
for a load that is about to end. No failure of the node raises here; a rank that cannot serve its
cache reports the reason once, and from then on ends every job as failed.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import TYPE_CHECKING

import msgspec

from kvstore.arena import in_children
from kvstore.client.core.plan import RankReport, StepPlan
from kvstore.client.core.rank import RankCore
from kvstore.connector import devices
from kvstore.connector.checks import NotServed
from kvstore.connector.copier import Copier, Handoff
from kvstore.connector.mapping import describe, grouped, hello_fields, models_of
from kvstore.connector.weights import digest_weights
from kvstore.ports import CopyEngine
from kvstore.wire.messages import HelloRank

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstore.connector.config import ConnectorConfig

logger = logging.getLogger("vllm.kvstore.rank")

FENCE_S_MAX = 0.1
"""Longest wait for fenced stores, which overtake all others and take about 0.3 ms a block."""
STALL_NS_MIN = 100_000
"""Shortest wait at a fence that is reported: one without stores to wait for takes some 10 us."""
IDLE_WAIT_S_MAX = 0.005
SHUTDOWN_S_MAX = 2.0


class WorkerSide:
    """One per worker process. All methods belong to the engine's worker thread."""

    def __init__(
        self,
        config: ConnectorConfig,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        open_copies: devices.OpenCopies = devices.open_copies,
    ) -> None:
        """`open_copies`: makes the copy engine for the caches, by KV cache group."""
        self._open_copies = open_copies
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        its, rank = hello_fields(config, vllm_config), vllm_config.parallel_config.rank
        self._hello = HelloRank(**its, rank=rank, process="", groups=())
        """Without what is known of this process once its cache exists."""
        self._serve_nothing("the rank has no cache yet")
        self._nothing = self._report = RankReport(self._hello.rank)
        """Returned by `get_finished`, not yet reported to the scheduler."""
        self._load_errors: set[int] = set()
        self._failed: set[str] = set()
        """Requests of which a load failed, and which are computed whole once all have ended."""
        self._unsaved = StepPlan()
        """Plan of a step that began, until `wait_for_save` is called."""
        self._submitted: StepPlan | None = None
        """Plan whose loads were submitted before the forward."""
        # The second model runner launches what it has for new blocks before it names them here,
        # and asks for loads after its forward only.
        self._is_second_runner = bool(getattr(vllm_config, "use_v2_model_runner", False))
        self._is_fenced_late = self._is_second_runner and (
            bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
            or len(kv_cache_config.kv_cache_groups) > 1  # copies of partial blocks
        )
        in_children[self] = WorkerSide.forget

    def _serve_nothing(self, reason: str) -> None:
        """Have neither copies nor a socket: every job ends as failed for this reason."""
        self.unserved = reason
        """Why this rank's cache is not served; empty when it is."""
        core = RankCore(self._hello)
        core.retire(reason)
        self._handoff = Handoff(core)
        self._handoff.wake.close()
        self._copies: CopyEngine | None = None
        self._copier: Copier | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The paged cache exists: find its space and shard, and start to attach."""
        try:
            hello, copies = self._describe(kv_caches)
        except NotServed as error:
            self._serve_nothing(str(error))
            logger.warning("kvstore: the cache is off: %s", error)
            return
        self.unserved, self._copies = "", copies
        self._handoff = Handoff(
            RankCore(hello, copies_max=copies.copies_max, is_fenced_late=self._is_fenced_late)
        )
        self._copier = Copier(self._handoff, copies, self._config)
        self._copier.start()

    def _describe(self, kv_caches: dict[str, torch.Tensor]) -> tuple[HelloRank, CopyEngine]:
        device = devices.device_of(kv_caches)
        by_group = grouped(self._kv_cache_config, kv_caches)
        begin_ns = time.monotonic_ns()
        weights = [digest_weights(*each) for each in models_of(self._vllm_config)]
        digests = [each.digest for each in weights]
        block_count = self._kv_cache_config.num_blocks
        for layers in by_group:
            devices.cache_pages(layers, block_count=block_count)  # raises NotServed without pages
        configs = self._vllm_config, self._kv_cache_config
        groups, held = zip(
            *(describe(*configs, its, weights=digests, group=n) for n, its in enumerate(by_group)),
            strict=True,
        )
        copies = self._open_copies(held, block_count)
        if reason := devices.prove(copies, held, block_count):
            copies.close()
            raise NotServed(f"copies from and to the KV cache do not work on {device}: {reason}")
        for number, each in enumerate(groups):
            assert copies.block_bytes(number) == each.block_bytes, (number, each)
        logger.info(
            "kvstore: weights %s from %d files, %.1f MiB read in %.0f ms",
            " and ".join(each.digest[:8] for each in weights),
            sum(each.file_count for each in weights),
            sum(each.read_bytes for each in weights) / 2**20,
            (time.monotonic_ns() - begin_ns) / 1e6,
        )
        own = {"process": secrets.token_hex(8), "groups": groups, "gpu": copies.gpu}
        return msgspec.structs.replace(self._hello, **own), copies

    # ── a step, in order ─────────────────────────────────────────────────────────────────────────

    def handle_preemptions(self, plan: StepPlan) -> None:
        """Wait until no store reads blocks that this step overwrites; abandon those that last."""
        # With drafts the engine calls `wait_for_save` on the last pipeline stage alone. On the
        # others the step before has run by now, and nothing has been overwritten yet.
        self.wait_for_save(self._unsaved)
        self._fence(plan)
        if self._is_second_runner:
            self._submitted = plan
            self._submit_loads(plan)

    def _fence(self, plan: StepPlan) -> None:
        if self._is_fenced_late:
            with self._handoff.core() as core:
                core.settle(plan.fence_blocks)
            return
        if not plan.fence_blocks:
            return
        begin_ns = time.perf_counter_ns()
        if not self._handoff.keep_off(plan.fence_blocks, timeout_s=FENCE_S_MAX):
            logger.warning("kvstore: stores were abandoned: their blocks are needed")
        waited_ns = time.perf_counter_ns() - begin_ns
        if waited_ns > STALL_NS_MIN:
            self._report = self._report.plus(fence_ns=waited_ns)

    def start_load_kv(self, plan: StepPlan) -> None:
        """Submit the step's loads."""
        self._unsaved = plan
        if plan.step:  # the report is taken when it has run, and goes with its results
            self._report = msgspec.structs.replace(self._report, step=plan.step)
        if plan is not self._submitted:
            self._submit_loads(plan)
        self._submitted = None

    def _submit_loads(self, plan: StepPlan) -> None:
        if plan.loads:
            self._submit(StepPlan(loads=plan.loads))

    def wait_for_save(self, plan: StepPlan) -> None:
        """The forward ran: submit the step's stores."""
        self._unsaved = StepPlan()
        if plan.stores:
            self._submit(StepPlan(stores=plan.stores))

    def get_finished(self, *, idle: bool = False) -> tuple[set[str], set[str]]:
        """Requests whose load ended, well or not, each once; and those of them of whose load
        nothing is valid, with several KV cache groups.

        With `idle` the step had nothing to compute: wait a moment for a load to end, rather than
        let the engine sleep and ask again.
        """
        if idle:
            self._handoff.wait_for_load(IDLE_WAIT_S_MAX)
        with self._handoff.core() as core:
            report, loading = core.take_report(), core.loading
        results = {name: getattr(report, name) for name in report.__struct_fields__[1:]}
        self._report = self._report.plus(**results)
        failures = [load for load in report.loads if load.failed_block_ids]
        if len(self._kv_cache_config.kv_cache_groups) > 1:
            self._failed.update(load.request for load in failures)
        else:
            self._load_errors.update(*(load.failed_block_ids for load in failures))
        # Of a request there is a load for each KV cache group.
        finished = {load.request for load in report.loads} - loading
        failed = self._failed & finished
        self._failed -= failed
        return finished, failed

    def block_ids_with_load_errors(self) -> set[int]:
        """Target blocks of the loads that `get_finished` just named which hold nothing valid.
        With several KV cache groups none: the engine asks for whole requests then."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def build_worker_meta(self) -> RankReport | None:
        """Results up to the last `get_finished`; None if there are none."""
        report, self._report = self._report, self._nothing
        return None if report == self._nothing else report

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def shutdown(self) -> None:
        """Detach after the copy in flight. Jobs that are left, and later ones, end as failed."""
        self._handoff.stop()
        if self._copier is not None and self._copier.join(SHUTDOWN_S_MAX):
            self._handoff.wake.close()

    def forget(self) -> None:
        """In a forked child: thread, socket and memory stayed with the parent."""
        self._serve_nothing("this is a forked child of a worker")

    def _submit(self, plan: StepPlan) -> None:
        mark = self._copies.mark() if self._copies is not None else 0
        self._handoff.submit(plan, mark)

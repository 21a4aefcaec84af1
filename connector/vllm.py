"""`KVStoreConnector`: the class that vllm loads through --kv-transfer-config.

Knows vllm's interface (0.32 and 0.33) and nothing else: every method hands over to the scheduler's
or the rank's half. One guard stands around each of them, because nothing of ours may raise into the
engine (guarantee P2): after an error of our own the cache is off for the life of this process, with
one log line, and loads that the engine waits for still end.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.metrics.stats import CacheHitSource

from kvstore.client.core.plan import RankReport, SchedulerConfig, StepPlan
from kvstore.connector.checks import check_engine
from kvstore.connector.config import ROLES, ConnectorConfig, event_endpoints, parse_config
from kvstore.connector.devices import OpenCopies, open_copies
from kvstore.connector.groups import EngineGroups
from kvstore.connector.mapping import hello_fields, lookahead_tokens
from kvstore.connector.scheduler_side import TURN, Attendant, SchedulerSide
from kvstore.connector.stats import KVStorePromMetrics, KVStoreStats
from kvstore.connector.worker_side import WorkerSide
from kvstore.wire.messages import HelloScheduler

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvstore")

BROKEN = "an error in its connector: see the engine's log"
TWICE = (
    "KVStoreConnector is configured twice for one engine, node and tenant: name it once in"
    ' "connectors" of --kv-transfer-config, or give the second another socket or tenant'
)

F = TypeVar("F", bound=Callable[..., Any])
_FOR_THE_CORE: Final = {*ConnectorConfig.__struct_fields__} & {*SchedulerConfig.__struct_fields__}
"""Keys of the connector's configuration that the core has under the same name."""


@dataclass
class KVStoreMetadata(base.KVConnectorMetadata):
    """A step's orders, on their way to the ranks."""

    plan: StepPlan


@dataclass
class KVStoreHandshake(base.KVConnectorHandshakeMetadata):
    """The reason of a rank that cannot be served; other ranks send no handshake."""

    unserved: str


@dataclass
class KVStoreWorkerMetadata(base.KVConnectorWorkerMetadata):
    """Reports of ranks, on their way to the scheduler."""

    reports: list[RankReport] = field(default_factory=list)

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> KVStoreWorkerMetadata:
        """Join the reports of two ranks or steps."""
        assert isinstance(other, KVStoreWorkerMetadata)
        return KVStoreWorkerMetadata(self.reports + other.reports)


def _guarded(
    fallback: Callable[[KVStoreConnector], Any], *, also_when_off: bool = False
) -> Callable[[F], F]:
    """Decorator: no error of ours leaves the method. The error is counted, the cache is turned off,
    and `fallback` makes the result.

    `also_when_off`: the method is called even when the cache is off, since loads that the engine
    waits for must still end; after a shutdown the rank's half fails every load, once each.
    """

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: KVStoreConnector, *args: Any, **kwargs: Any) -> Any:
            with TURN:
                if self.is_off and not also_when_off:
                    return fallback(self)
                try:
                    return method(self, *args, **kwargs)
                except Exception as error:
                    self.turn_off(method.__name__, error)
                    return fallback(self)

        return cast("F", guarded)

    return wrap


class KVStoreConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """See the module. One instance in the scheduler's process, one in each worker's."""

    open_copies: OpenCopies = staticmethod(open_copies)
    """Makes a rank's copy engine."""

    def __init__(
        self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config, kv_cache_config)
        transfer = self._kv_transfer_config
        config = parse_config(transfer.kv_connector_extra_config)
        engine = (transfer.engine_id or "", vllm_config.instance_id)
        rank = vllm_config.parallel_config.rank
        identity = (config.socket, config.tenant, *engine, role, rank)
        if self._attached.setdefault(identity, self) is not self:
            raise ValueError(TWICE)
        self._identity = identity
        self.is_off = False
        self._errors = 0
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is base.KVConnectorRole.SCHEDULER:
            lora = vllm_config.lora_config
            groups = EngineGroups(vllm_config, kv_cache_config)
            self._scheduler = SchedulerSide(
                config,
                _core_config(config, vllm_config, groups),
                groups,
                adapter_dtype="" if lora is None else str(lora.lora_dtype),
                in_lockstep=vllm_config.parallel_config.data_parallel_size > 1,
            )
            self._attendant = Attendant(weakref.WeakMethod(self.attend))
            self._attendant.start()
        else:
            self._worker = WorkerSide(
                config, vllm_config, kv_cache_config, open_copies=self.open_copies
            )

    def turn_off(self, where: str, error: Exception) -> None:
        """After an error of our own: detach and stay off. Said once."""
        self._errors += 1
        if self.is_off:
            return
        self.is_off = True
        logger.error(
            "kvstore: error in %s; the cache is off until the engine restarts, requests are "
            "computed. Please report this.",
            where,
            exc_info=error,
        )
        with contextlib.suppress(Exception):
            self._detach(BROKEN)

    _attendant: Attendant | None = None
    _attached: ClassVar[weakref.WeakValueDictionary[Any, KVStoreConnector]] = (
        weakref.WeakValueDictionary()
    )
    """Connectors of this process, by their identity at the node, which would detach each of two
    with the same identity for the other."""
    _identity: object = None

    def _detach(self, unserved: str = "") -> None:
        self._attached.pop(self._identity, None)
        if self._attendant is not None:
            self._attendant.stop()
        if self._scheduler is not None:
            self._scheduler.close(unserved)
        if self._worker is not None:
            self._worker.shutdown()

    @property
    def requires_kv_delivery(self) -> bool:
        """False: the cache is best effort, and a dropped store is a future miss."""
        return False

    @property
    def _in_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _in_worker(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    # ── scheduler side ───────────────────────────────────────────────────────────────────────────

    @_guarded(lambda self: None)
    def attend(self) -> None:
        """On a thread of its own: stay attached while the engine is idle."""
        self._in_scheduler.attend()

    @_guarded(lambda self: None)
    def on_new_request(self, request: Request) -> None:
        """A request was added."""
        self._in_scheduler.on_new_request(request)

    @_guarded(lambda self: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond the prefix-cache hit; loads are always asynchronous."""
        return self._in_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    @_guarded(lambda self: None, also_when_off=True)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks were allocated; plans the load when there is one."""
        self._in_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """The tokens of a hit, by the tier that they came from."""
        file_tokens = min(self._file_tokens(request), num_external_tokens)
        split = {
            CacheHitSource.HOST: num_external_tokens - file_tokens,
            CacheHitSource.DISK: file_tokens,
        }
        return {source: tokens for source, tokens in split.items() if tokens}

    @_guarded(lambda self: 0)
    def _file_tokens(self, request: Request) -> int:
        return self._in_scheduler.file_tokens(request)

    @_guarded(lambda self: KVStoreMetadata(self._in_scheduler.rescue_plan()))
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> base.KVConnectorMetadata:
        """The step's orders to the ranks."""
        return KVStoreMetadata(self._in_scheduler.build_plan(scheduler_output))

    @_guarded(lambda self: None)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], base.KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the reasons of ranks whose caches cannot be served; once, at the start."""
        for _, found in sorted(metadata.items(), key=lambda item: item[0]):
            if isinstance(found, KVStoreHandshake):
                self._in_scheduler.cannot_be_served(found.unserved)
                return

    @_guarded(lambda self: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the ranks' reports of the step."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KVStoreWorkerMetadata):
            self._in_scheduler.reported(meta.reports)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(lambda self: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; its blocks may be reused at once (fences protect running copies)."""
        return False, self._in_scheduler.request_finished(request)

    @_guarded(lambda self: False)
    def has_pending_push_work(self) -> bool:
        """True while copies run that an idle engine should step for; bounded."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    @_guarded(lambda self: None)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool of the engine's own blocks, once it exists."""
        self._in_scheduler.bind_block_pool(gpu_block_pool)

    @_guarded(lambda self: True)  # a cache that is off serves nothing, old or new
    def reset_cache(self) -> bool | None:
        """Serve this engine nothing more that was stored before. Returns False if its own cache
        still holds blocks of before."""
        return self._in_scheduler.reset(secrets.token_hex(8))

    # ── worker side, in the order of a step ──────────────────────────────────────────────────────

    @_guarded(lambda self: None)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The paged cache exists; the rank starts to attach."""
        self._in_worker.register_kv_caches(kv_caches)

    @_guarded(lambda self: KVStoreHandshake(BROKEN))
    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        """Why this rank is not served, for the scheduler, which can pass it on to the node."""
        unserved = self._in_worker.unserved
        return KVStoreHandshake(unserved) if unserved else None

    @_guarded(lambda self: None)
    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        """First in a step: wait for copies out of blocks that are about to be overwritten."""
        assert isinstance(kv_connector_metadata, KVStoreMetadata)
        self._in_worker.handle_preemptions(kv_connector_metadata.plan)

    @_guarded(lambda self: None, also_when_off=True)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit the step's loads; they run beside the engine."""
        # The second model runner calls this after its forward, whose context is gone by then.
        self._idle_step = forward_context.attn_metadata is None and "num_tokens" not in kwargs
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVStoreMetadata)
        self._in_worker.start_load_kv(metadata.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads are of whole requests, never of layers."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: stores are of whole blocks, after the forward."""

    @_guarded(lambda self: None)
    def wait_for_save(self) -> None:
        """The forward ran: submit the step's stores. Does not wait for them."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVStoreMetadata)
        self._in_worker.wait_for_save(metadata.plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Requests whose loads ended, well or not, each exactly once."""
        finished, failed = self._ended_loads()
        return base.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    @_guarded(lambda self: (set(), set()), also_when_off=True)
    def _ended_loads(self) -> tuple[set[str], set[str]]:
        return self._in_worker.get_finished(idle=self._idle_step)

    _idle_step = False

    @_guarded(lambda self: set(), also_when_off=True)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Target blocks whose load failed; the engine recomputes them."""
        return self._in_worker.block_ids_with_load_errors()

    @_guarded(lambda self: None, also_when_off=True)
    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        """This rank's report, if there is one."""
        report = self._in_worker.build_worker_meta()
        return None if report is None else KVStoreWorkerMetadata([report])

    # ── both sides ───────────────────────────────────────────────────────────────────────────────

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts for vllm's metrics and log line."""
        with TURN:
            data = self._scheduler.take_stats() if self._scheduler is not None else {}
            if self._errors:
                data["connector_errors"], self._errors = self._errors, 0
        return KVStoreStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats from their shipped form."""
        return KVStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Prometheus counters in the frontend."""
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """One page per layer and block, heads outermost."""
        return "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """No: copies run beside the engine's steps, also while it would unmap the cache."""
        return False

    @_guarded(lambda self: None)
    def unregister_kv_caches(self) -> None:
        """The cache is about to be unmapped, which an engine with --enable-cumem-allocator can do
        without sleep mode. Running copies end first; the cache stays off."""
        logger.warning(
            "kvstore: the engine releases its KV cache memory; the cache is off until the engine"
            " restarts, requests are computed"
        )
        self.is_off = True
        self._detach()

    @_guarded(lambda self: None)
    def shutdown(self) -> None:
        """Detach; running copies end first."""
        self._detach()


def _core_config(
    config: ConnectorConfig, vllm_config: VllmConfig, groups: EngineGroups
) -> SchedulerConfig:
    data_rank = vllm_config.parallel_config.data_parallel_index
    events, events_replay = event_endpoints(vllm_config.kv_events_config, data_rank)
    if groups.served[0]:
        # Readers take the events of the engine's first group for those of the prefix.
        events = events_replay = ""
    hello = HelloScheduler(
        **hello_fields(config, vllm_config),
        rank_count=vllm_config.parallel_config.world_size,
        process=secrets.token_hex(8),
        label=str(vllm_config.model_config.served_model_name or vllm_config.model_config.model),
        data_rank=data_rank,
        events=events,
        events_replay=events_replay,
        address=config.address,
        role=ROLES.get(vllm_config.kv_transfer_config.kv_role or "", ""),
    )
    return SchedulerConfig(
        hello=hello,
        block_tokens=groups.block_sizes[0],
        group_tokens=groups.block_sizes,
        group_names=groups.names,
        key_tokens=groups.key_tokens,
        lookahead_tokens=lookahead_tokens(vllm_config),
        **{name: getattr(config, name) for name in _FOR_THE_CORE},
    )

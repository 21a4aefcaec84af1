"""What /metrics and /healthz say: the state of the loop, asked on the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvstore.engine.engine import Engine
from kvstore.engine.report import NO_BUDGET
from kvstore.obs.metrics import Family, family, histogram
from kvstore.ports import Tier
from kvstore.serve.attach import Attach
from kvstore.serve.driver import STEP_BUCKETS_NS, Driver, NodeBusy
from kvstore.serve.files import FileEnd
from kvstore.serve.http import Page, text_page
from kvstore.serve.listener import Listener
from kvstore.types import Incarnation
from kvstore.units import NS_PER_S

HEALTH_TIMEOUT_S: Final = 0.25
METRICS_TIMEOUT_S: Final = 1.0


class EventCounters:
    """What was published since the start; each is written by one thread."""

    def __init__(self) -> None:
        self.batches = 0
        self.keys_lost = 0
        self.replays = 0
        self.requests_refused = 0


class NodeCollector(Collector):
    """The metrics of one node, read between two steps so that they belong together."""

    def __init__(
        self,
        *,
        driver: Driver,
        attach: Attach,
        tier: Tier,
        incarnation: Incarnation,
        version: str,
        events: EventCounters,
    ) -> None:
        self._events = events
        self._driver = driver
        self._attach = attach
        self._tier = tier
        self._info = (version, f"{incarnation:016x}")

    def collect(self) -> Iterator[Family]:
        """Raises NodeBusy when the loop does not answer."""
        return iter(
            self._driver.query(
                lambda engine: [*self._process_families(), *_engine_families(engine)],
                timeout_s=METRICS_TIMEOUT_S,
            )
        )

    def describe(self) -> list[Family]:
        return []

    def _process_families(self) -> list[Family]:
        loop, door = self._driver.counters, self._attach.counters
        return [
            family("kvstore_info", [(self._info, 1)]),
            family("kvstore_ready_bytes", [(("dram",), self._tier.ready_bytes)]),
            family("kvstore_capacity_bytes", [(("dram",), self._tier.capacity_bytes)]),
            family("kvstore_connections", [((), self._attach.socket_count)]),
            family("kvstore_connections_accepted_total", [((), door.accepted)]),
            family(
                "kvstore_connections_refused_total", [((k,), n) for k, n in door.refused.items()]
            ),
            family("kvstore_connections_ended_total", [((k,), n) for k, n in door.ended.items()]),
            family(
                "kvstore_datagrams_total",
                [(("received",), door.datagrams_received), (("sent",), door.datagrams_sent)],
            ),
            histogram(
                "kvstore_step_seconds",
                bounds=[bound / NS_PER_S for bound in STEP_BUCKETS_NS],
                counts=list(loop.step_buckets),
                total=loop.step_ns / NS_PER_S,
            ),
            family("kvstore_loop_failures_total", [((), loop.failures)]),
            family("kvstore_heartbeat_gap_seconds", [((), loop.beat_gap_ns_max / NS_PER_S)]),
            family("kvstore_queries_total", [((), loop.queries)]),
            *(
                family(f"kvstore_event_{name}_total", [((), count)])
                for name, count in vars(self._events).items()
            ),
        ]


def _engine_families(engine: Engine) -> list[Family]:
    (node,), tiers, counters = engine.nodes(), engine.tiers(), engine.counters
    dram, file = tiers
    has_budget = file.budget_left_bytes != NO_BUDGET
    return [
        family("kvstore_blocks", [((tier.tier,), tier.blocks) for tier in tiers]),
        family("kvstore_used_bytes", [((tier.tier,), tier.used_bytes) for tier in tiers]),
        family(
            "kvstore_slots",
            [
                (("sealed",), dram.slots_sealed),
                (("granted",), dram.slots_granted),
                (("quarantined",), dram.slots_quarantined),
                (("leased",), dram.slots_leased),
            ],
        ),
        family(
            "kvstore_file_budget_left_bytes", [((), file.budget_left_bytes)] if has_budget else []
        ),
        family("kvstore_sessions", [((), node.sessions)]),
        family("kvstore_leases", [((), node.leases)]),
        *(
            family(f"kvstore_{name}_total", [((), getattr(counters, name))])
            for name in counters.__slots__
        ),
    ]


def make_pages(
    collector: NodeCollector, driver: Driver, listener: Listener, files: FileEnd | None = None
) -> dict[str, Callable[[], Page]]:
    """The pages of a node by path. A node whose disk is in trouble serves from memory: it is
    healthy, and says what it lacks."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    def metrics() -> Page:
        try:
            return Page(200, CONTENT_TYPE_LATEST, generate_latest(registry))
        except NodeBusy as error:
            return text_page(503, str(error))

    def health() -> Page:
        try:
            trouble = driver.query(
                lambda _: files.trouble if files else "", timeout_s=HEALTH_TIMEOUT_S
            )
        except NodeBusy as error:
            return text_page(503, str(error))
        if not listener.is_in_place:
            return text_page(503, f"{listener.path} is not this node's socket any more: restart it")
        return text_page(200, f"ok, but {trouble}" if trouble else "ok")

    return {"/metrics": metrics, "/healthz": health}

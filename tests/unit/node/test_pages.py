"""/healthz: a node whose disk or events are in trouble is healthy and says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.engine.sessions.owners import UnservedReport
from kvstore.engine.why.curve import SCALES
from kvstore.engine.why.ledger import NAMES_MAX, PAIRS_MAX
from kvstore.errors import NodeBusy
from kvstore.index.engine_feed import EngineCounters
from kvstore.net.http import Page
from kvstore.node.attach import AttachCounters
from kvstore.node.driver import DriverCounters
from kvstore.node.pages import NodeCollector, make_pages
from kvstore.obs.metrics import INDEX_METRICS, Timings, families
from kvstore.peers.changes import FeedCounters
from kvstore.peers.fetcher import KINDS as FETCH_KINDS
from kvstore.peers.member import ClusterMember, Peering
from kvstore.peers.pushes import KINDS as PUSH_KINDS
from kvstore.types import Incarnation, SpaceId, Tier
from kvstore.wire.messages import Story
from tests.unit.engine.harness import Peer
from tests.unit.engine.slab import SlabNode

SERIES_MAX = 400
TIERS = 4
NAMED = 3 * (NAMES_MAX + 1 + TIERS)
"""Series at most: three each, with those of all others."""


class ScriptedDriver:
    def __init__(self) -> None:
        self.busy = False
        self.off: list[tuple[str, SpaceId, Tier | None]] = []
        self.lacking: list[UnservedReport] = []
        self.pinning = ""

    def query(self, ask: Any, *, timeout_s: float) -> Any:
        assert timeout_s > 0
        if self.busy:
            raise NodeBusy("the node is busy")
        return ask(self)

    def unserved(self) -> list[UnservedReport]:
        return self.lacking

    def unpinned(self) -> str:
        return self.pinning

    def spaces_off(self) -> list[tuple[str, SpaceId, Tier | None]]:
        return self.off


class EmptyCollector:
    """Parts of a node that its pages ask, without metrics."""

    def __init__(self, driver: Any, door: Any, trouble: str = "", **parts: Any) -> None:
        its = dict.fromkeys(("files", "publisher", "member")) | parts
        driver.executor = SimpleNamespace(attach=SimpleNamespace(door=door), **its)
        self.driver, self.refused = driver, ""
        self.code = SimpleNamespace(trouble=lambda: trouble)

    def collect(self) -> list[Any]:
        return []

    describe = collect


@pytest.mark.parametrize("trouble", ["", "the disk tier in /x takes no writes: it is full"])
def test_a_node_without_its_disk_is_healthy_and_says_what_it_lacks(trouble: str) -> None:
    driver, listener = ScriptedDriver(), SimpleNamespace(is_in_place=True, path="/run/n")
    files = SimpleNamespace(trouble=trouble)
    pages = make_pages(cast("Any", EmptyCollector(driver, listener, files=files)))
    expected = f"ok, but {trouble}\n" if trouble else "ok\n"
    assert pages["/healthz"]() == Page(200, "text/plain; charset=utf-8", expected.encode())
    publisher = SimpleNamespace(trouble="/e is gone")
    collector = EmptyCollector(driver, listener, files=files, publisher=publisher)
    pages = make_pages(cast("Any", collector))
    both = f"ok, but {trouble}, and /e is gone\n" if trouble else "ok, but /e is gone\n"
    assert pages["/healthz"]().body.decode() == both
    driver.busy = True
    assert pages["/healthz"]().status == 503
    collector = EmptyCollector(ScriptedDriver(), listener)
    assert make_pages(cast("Any", collector))["/healthz"]().body == b"ok\n"


def test_a_space_that_is_off_is_named_with_what_to_do() -> None:
    driver, listener = ScriptedDriver(), SimpleNamespace(is_in_place=True, path="/run/n")
    files = SimpleNamespace(trouble="the disk is full")
    pages = make_pages(cast("Any", EmptyCollector(driver, listener, files=files)))
    driver.off = [("t", SpaceId(b"\xab" * 32), Tier.FILE), ("u", SpaceId(bytes(32)), None)]
    assert pages["/healthz"]().body.decode() == (
        "ok, but the disk is full; space abababababababab of tenant t (and 1 more) is switched off"
        " in the disk tier: a shadow check found different values;"
        " 'kvstore clear --space abababababababab' switches it on again\n"
    )


def test_engines_that_get_nothing_are_named_with_the_reason() -> None:
    driver, listener = ScriptedDriver(), SimpleNamespace(is_in_place=True, path="/run/n")
    collector = EmptyCollector(driver, listener)
    page = make_pages(cast("Any", collector))["/healthz"]
    collector.refused = "a process that wants to attach is refused: uid 5 is not allowed"
    assert page().body.decode() == f"ok, but {collector.refused}\n"
    driver.lacking = [UnservedReport("e (llama)", "t", "the KV cache is on cuda")] * 2
    assert page().body.decode() == (
        "ok, but engine e (llama) (and 1 more) is not served: the KV cache is on cuda\n"
    )


def test_a_rank_that_cannot_pin_memory_is_named_with_the_way_to_mend_it() -> None:
    driver, listener = ScriptedDriver(), SimpleNamespace(is_in_place=True, path="/run/n")
    page = make_pages(cast("Any", EmptyCollector(driver, listener)))["/healthz"]
    driver.pinning = "engine e (llama): memory cannot be pinned: raise the memlock limit"
    assert page().body.decode() == f"ok, but {driver.pinning}\n"


def test_a_page_with_everything_on_has_few_series() -> None:
    node = SlabNode(quotas=(("llama", 1 << 14),), fetches=True)
    tier = SimpleNamespace(ready_bytes=1, capacity_bytes=1)
    tokens: dict[str, Any] = {"prompt_tokens": 99, "loaded_tokens": 9, "lookup_ns": 9}
    peers = [Peer(node, f"e{n}", tenant=f"tenant {n}") for n in range(PAIRS_MAX + 9)]
    for peer in peers:
        node.hear(peer.scheduler, Story("r"))
    for peer in peers:
        node.hear(peer.scheduler, Story("r", **tokens, file_tokens=3, peer_tokens=3, saved_ns=8))
        node.hear(peer.scheduler, Story("r", lookup_ns=9))
    attach = SimpleNamespace(counters=AttachCounters(), socket_count=3)
    timings = {kind: Timings() for kind in (*FETCH_KINDS, *PUSH_KINDS, "write")}
    peering = SimpleNamespace(
        fetcher=SimpleNamespace(damaged=0, not_kept=0),
        preparer=SimpleNamespace(refused_count=0),
        transfer_worker=SimpleNamespace(restarts=0, refused=0),
        transport="nixl",
        _context=SimpleNamespace(stages=SimpleNamespace(timings=timings)),
    )
    peering.metrics = lambda: Peering.metrics(cast("Any", peering))
    memory = SimpleNamespace(block_count=1, counters=EngineCounters())
    member: Any = SimpleNamespace(
        feeder=SimpleNamespace(counters=FeedCounters(), connected_count=1),
        peering=peering,
        memory=memory,
        _tls=SimpleNamespace(ends_s=1),
        metrics=lambda: ClusterMember.metrics(member),
        index_metrics=lambda: {m.name.removeprefix("kvstore_"): {} for m in INDEX_METRICS},
    )
    traces = SimpleNamespace(counts={"exported": 1, "dropped": 0})
    parts: dict[str, Any] = {"attach": attach, "tier": tier, "member": member, "traces": traces}
    driver: Any = SimpleNamespace(
        query=lambda ask, *, timeout_s: ask(node.engine),
        counters=DriverCounters(),
        executor=SimpleNamespace(**parts, publisher=None),
    )
    code: Any = SimpleNamespace(version="1")
    collector = NodeCollector(driver, Incarnation(1), code)
    assert collector.collect()["blocks_hit_total"] is not node.engine.ledger.hits, "which goes on"
    shown = list(families(collector.collect()))
    lines = [sample for each in shown for sample in each.samples]
    named = [sample for sample in lines if "tenant" in sample.labels]
    assert len(named) <= NAMED
    named_tenants = {sample.labels["tenant"] for sample in named}
    assert len(named_tenants) == PAIRS_MAX + 1
    others = {sample.labels.get("tier") for sample in named if sample.labels["tenant"] == "other"}
    assert others == {None, "dram", "file", "peer", "none"}
    absent = {each.name for each in shown if not each.samples and "index" not in each.name}
    late = {"kvstore_expected_hit_ratio", "kvstore_scrub_age_seconds"}
    assert absent == {"kvstore_file_budget_left_bytes", *late}
    of_both_tiers, of_trusts = 2, 4
    of_an_index = len(INDEX_METRICS) - 1 + of_trusts
    of_a_curve = len(SCALES)
    assert len(lines) + of_an_index + 1 + of_both_tiers + of_a_curve <= SERIES_MAX

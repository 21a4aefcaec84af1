"""Pages of a node. /healthz: a node whose disk or events are in trouble is healthy and says so. The
page for operators has rows of inspect and explain, of bounded length, without keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.engine.sessions.owners import UnservedReport
from kvstore.engine.why.curve import SCALES
from kvstore.engine.why.ledger import NAMES_MAX, PAIRS_MAX
from kvstore.errors import NodeBusy
from kvstore.index.engine_feed import EngineCounters
from kvstore.net.http import Page
from kvstore.net.site import REQUESTS_SHOWN, STATE_BYTES_MAX
from kvstore.node.attach import AttachCounters
from kvstore.node.driver import DriverCounters
from kvstore.node.pages import NodeCollector, make_pages
from kvstore.obs.metrics import INDEX_METRICS, Timings, families
from kvstore.obs.reasons import story_as_dict
from kvstore.peers.changes import FeedCounters
from kvstore.peers.fetcher import KINDS as FETCH_KINDS
from kvstore.peers.member import ClusterMember, Peering
from kvstore.peers.pushes import KINDS as PUSH_KINDS
from kvstore.types import Incarnation, SpaceId, Tier
from kvstore.wire.messages import REQUEST_BYTES_MAX, Story
from tests.unit.engine.harness import TOKENS, Peer, keys
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


class Health:
    """/healthz of a node with these parts, whose socket is in place."""

    def __init__(self, **parts: Any) -> None:
        self.driver = ScriptedDriver()
        door = SimpleNamespace(is_in_place=True, path="/run/n")
        self.node = EmptyCollector(self.driver, door, **parts)
        self.page = make_pages(cast("Any", self.node))["/healthz"]

    def text(self) -> str:
        return self.page().body.decode()


@pytest.mark.parametrize("trouble", ["", "the disk tier in /x takes no writes: it is full"])
def test_a_node_without_its_disk_is_healthy_and_says_what_it_lacks(trouble: str) -> None:
    files = SimpleNamespace(trouble=trouble)
    expected = f"ok, but {trouble}\n" if trouble else "ok\n"
    page = Page(200, "text/plain; charset=utf-8", expected.encode())
    assert Health(files=files).page() == page
    health = Health(files=files, publisher=SimpleNamespace(trouble="/e is gone"))
    both = f"ok, but {trouble}, and /e is gone\n" if trouble else "ok, but /e is gone\n"
    assert health.text() == both
    health.driver.busy = True
    assert health.page().status == 503
    assert Health().text() == "ok\n"


def test_a_space_that_is_off_is_named_with_what_to_do() -> None:
    health = Health(files=SimpleNamespace(trouble="the disk is full"))
    health.driver.off = [("t", SpaceId(b"\xab" * 32), Tier.FILE), ("u", SpaceId(bytes(32)), None)]
    assert health.text() == (
        "ok, but the disk is full; space abababababababab of tenant t (and 1 more) is switched off"
        " in the disk tier: a shadow check found different values;"
        " 'kvstore clear --space abababababababab' switches it on again\n"
    )


def test_engines_that_get_nothing_or_cannot_pin_memory_are_named_with_the_reason() -> None:
    health = Health()
    health.driver.pinning = "engine e (llama): memory cannot be pinned: raise the memlock limit"
    assert health.text() == f"ok, but {health.driver.pinning}\n"
    health = Health()
    health.node.refused = "a process that wants to attach is refused: uid 5 is not allowed"
    assert health.text() == f"ok, but {health.node.refused}\n"
    health.driver.lacking = [UnservedReport("e (llama)", "t", "the KV cache is on cuda")] * 2
    assert health.text() == (
        "ok, but engine e (llama) (and 1 more) is not served: the KV cache is on cuda\n"
    )


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


# ── the page that operators look at ──────────────────────────────────────────────────────────────


class OperatorPage:
    """The page of a node without a process."""

    def __init__(self, member: Any = None) -> None:
        self.node = SlabNode(fetches=True)
        driver = SimpleNamespace(query=self._query)
        door = SimpleNamespace(is_in_place=True, path="/run/n")
        self._pages = make_pages(cast("Any", EmptyCollector(driver, door, member=member)))

    def _query(self, ask: Callable[[Any], Any], *, timeout_s: float) -> Any:
        return ask(self.node.engine)

    def state(self) -> dict[str, Any]:
        page = self._pages["/state.json"]()
        assert page.status == 200
        assert len(page.body) <= STATE_BYTES_MAX
        return cast("dict[str, Any]", json.loads(page.body))

    def request(self, number: int) -> Any:
        return json.loads(self._pages["/request.json?"](f"id={number}").body)


@pytest.fixture
def page() -> OperatorPage:
    return OperatorPage()


def test_requests_are_those_of_explain_and_one_is_its_json(page: OperatorPage) -> None:
    peer = Peer(page.node, tenant="<b>t</b>")
    story: dict[str, Any] = {"prompt_tokens": 4 * TOKENS, "loaded_tokens": 3 * TOKENS}
    page.node.hear(peer.scheduler, Story("one", **story, lookup_ns=5_000, load_ns=7_000))
    page.node.hear(peer.scheduler, Story("two", prompt_tokens=TOKENS, outcome="not stored"))
    explain = page.node.engine.explain
    newest, oldest = explain.requests("", limit=9)
    two, one = page.state()["requests"]
    assert (one["number"], one["tenant"], one["loaded_tokens"]) == (1, "<b>t</b>", 3 * TOKENS)
    assert (one["lookup_us"], one["load_us"], one["outcome"]) == (5, 7, "")
    shown = story_as_dict(newest, explain.request(newest.number)[1])
    assert (two["outcome"], two["text"]) == (shown["outcome"], shown["text"])
    assert page.request(2) == json.loads(json.dumps(shown))
    assert page.request(1)["ranges"] == story_as_dict(oldest, explain.request(1)[1])["ranges"]
    assert page._pages["/request.json?"]("id=3").status == 404


def test_the_longest_names_fit_and_no_key_is_shown(page: OperatorPage) -> None:
    peers = [Peer(page.node, f"e{n}" + "x" * 60, tenant=f"{n}" + "t" * 200) for n in range(9)]
    page.node.step(peers[0].sealed(0, 1))
    count = REQUESTS_SHOWN + 9
    for number in range(count):
        story = Story("r" * REQUEST_BYTES_MAX, prompt_tokens=9, outcome="breaker open", load_ns=1)
        page.node.hear(peers[number % 9].scheduler, story)
    state = page.state()
    assert state["totals"]["requests"] == REQUESTS_SHOWN
    assert state["requests"][0]["number"] == count
    text = json.dumps(state) + json.dumps(page.request(state["requests"][0]["number"]))
    digits = {keys(number).hex() for number in range(2)}
    assert not [each for each in digits if each[:9] in text]
    assert not re.search(r"[0-9a-f]{17}", text)


def test_a_member_of_a_cluster_has_its_name_and_transfers() -> None:
    transfers = [{"kind": "move", "backend": "tcp"}]
    member = SimpleNamespace(node="n1", transfers=lambda: transfers, trouble="")
    state = OperatorPage(member).state()
    assert (state["name"], state["transfers"]) == ("n1", transfers)

"""Every way in which a block can miss, as `kvstore explain` tells it afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import astuple

from kvstore.engine.events import Clear
from kvstore.engine.why import explain, findings
from kvstore.engine.why.explain import RequestReport, fits
from kvstore.engine.why.findings import RangeReport
from kvstore.engine.why.reasons import Reason
from kvstore.obs.reasons import of_range, of_request, word
from kvstore.proto.rows import decode_rows, encode_rows
from kvstore.tier_events import FileLate
from kvstore.types import SpaceId
from kvstore.wire.messages import LeaseRelease, Story
from kvstore.wire.space import fingerprint
from tests.unit.engine.disk import SPACE, DiskNode, gone, known
from tests.unit.engine.harness import (
    HALVES,
    TOKENS,
    Node,
    Peer,
    attached,
    keys,
    space,
)

Row = tuple[int, int, str, Reason]
"""First block, blocks, tier, reason."""


def told(node: Node, peer: Peer, *, blocks: int, loaded: int = 0, **changes: Any) -> RequestReport:
    """A request of the peer's last lookup ends."""
    fields: dict[str, Any] = {
        "request": "cmpl-r-0-1f2e3d4c",
        "prompt_tokens": blocks * TOKENS + 3,
        "loaded_tokens": loaded * TOKENS,
        "session": peer.session,
        "leases": [1],
        "outcome": "" if loaded else "not stored",
    }
    node.hear(peer.scheduler, Story(**(fields | changes)))
    return node.engine.explain.requests("", limit=1)[0]


def rows(node: Node) -> list[Row]:
    """Of the latest request."""
    return [(r.first_block, r.blocks, r.tier, r.reason) for r in ranges(node)]


def ranges(node: Node) -> list[RangeReport]:
    """Of the latest request. The first line of explain says what its table says."""
    (latest,) = node.engine.explain.requests("", limit=1)
    found = node.engine.explain.request(latest.number)[1]
    missed = next((row for row in found if row.reason), None)
    if latest.outcome and missed is not None:
        assert (latest.outcome, latest.missed) == (missed.reason, missed)
        assert of_request(latest).startswith(of_range(missed, latest))
    return found


def texts(node: Node) -> list[str]:
    """As an operator reads them."""
    (latest,) = node.engine.explain.requests("", limit=1)
    return [of_range(row, latest) for row in node.engine.explain.request(latest.number)[1]]


def test_what_was_held_is_from_dram_and_the_rest_was_never_stored() -> None:
    node, peer = attached(Node())
    peer.store(1, 2)
    peer.lease(1, 1, 2, 3, 4, 5)
    row = told(node, peer, blocks=6, loaded=2, load_ns=1_500_000, queued_ns=2_000_000)
    assert (row.prompt_tokens, row.loaded_tokens, row.load_us) == (6 * TOKENS + 3, 32, 1500)
    assert (row.tenant, row.block_tokens, row.queued_us) == ("t", TOKENS, 2000)
    assert rows(node) == [
        (0, 2, "dram", Reason.NONE),
        (2, 3, "", Reason.NEVER_STORED),
        (5, 1, "", Reason.BEYOND_THE_QUESTION),
    ]


def test_what_an_earlier_lookup_loaded_is_no_miss_of_the_last_one() -> None:
    """Of a request that was preempted, and whose blocks had left when it asked again."""
    node, peer = attached(Node())
    peer.lease(1, 1, 2, 3)
    told(node, peer, blocks=3, loaded=2, outcome="not stored")
    assert rows(node) == [(0, 2, "", Reason.NONE), (2, 1, "", Reason.NEVER_STORED)]
    ledger = node.engine.ledger
    assert (sum(ledger.hits.values()), sum(ledger.misses.values())) == (2, 1)


def test_evicted_when_and_for_whom() -> None:
    node, peer = attached(Node(slots=8))
    peer.store(1)
    node.tick(ms=500)
    other = Peer(node, "busy")
    other.store(*range(100, 112))
    node.tick(ms=2000)
    peer.lease(1, 1, 2)
    node.tick(ms=7000)
    row = told(node, peer, blocks=2, age_ns=3 * 10**9)
    assert row.ended_ms_ago == 3000
    assert rows(node) == [(0, 1, "", Reason.EVICTED_FOR_STORES), (1, 1, "", Reason.NEVER_STORED)]
    text = texts(node)[0]
    assert text == "evicted from dram to make room for stores of busy (busy), 2.0 s before"
    (now, _) = node.engine.explain.prefix("t", SPACE, keys(1, 2))
    assert (
        of_range(now, None) == "evicted from dram to make room for stores of busy (busy), 9.0 s ago"
    )


def test_what_left_after_the_question_is_not_its_reason() -> None:
    node, peer = attached(Node())
    peer.lease(1, 1)
    node.now_ns += 10_000_000
    peer.store(1)
    node.step(Clear(None, None))
    told(node, peer, blocks=1)
    assert rows(node) == [(0, 1, "", Reason.FORGOTTEN)]


@pytest.mark.parametrize("reason", [Reason.CLEARED, Reason.FAILED_CHECK])
def test_what_left_was_cleared_or_failed_a_check(reason: Reason) -> None:
    node, peer = attached(Node())
    [place] = peer.seal(1)
    if reason is Reason.CLEARED:
        node.step(Clear(None, None))
    else:
        peer.distrust(place)
    peer.lease(1, 1)
    told(node, peer, blocks=1)
    assert rows(node) == [(0, 1, "", reason)]


@pytest.mark.parametrize(
    ("tenant", "reason"), [("t", Reason.OTHER_SPACE), ("u", Reason.NEVER_STORED)]
)
def test_another_space_is_told_within_the_tenant_only(tenant: str, reason: Reason) -> None:
    node = Node()
    other = Peer(node, "other", space=space("other", layer_bytes=16 << 10), tenant=tenant)
    other.store(1, 2)
    peer = Peer(node)
    peer.lease(1, 1, 2, 3)
    told(node, peer, blocks=3)
    first, *rest = rows(node)
    assert first == (0, 2 if tenant == "t" else 3, "", reason)
    assert rest == ([(2, 1, "", Reason.NEVER_STORED)] if tenant == "t" else [])
    its = fingerprint(other.space, weights_epoch="").hex()[:16]
    assert (its in texts(node)[0]) == (tenant == "t")


@pytest.mark.parametrize(
    ("outcome", "reason", "held"),
    [
        ("deadline", Reason.DEADLINE, True),
        ("cost gate", Reason.COST_GATE, True),
        ("load failed", Reason.LOAD_FAILED, True),
        ("shadow check", Reason.SHADOW_CHECK, True),
        ("node unreachable", Reason.NODE_UNREACHABLE, False),
        ("breaker open", Reason.BREAKER_OPEN, False),
        ("no full block", Reason.NO_FULL_BLOCK, False),
        ("not stored", Reason.NOT_STORED, False),
        ("group not stored", Reason.GROUP_NOT_STORED, True),
        ("pinned share used up", Reason.PINNED_SHARE_USED_UP, False),
        ("adapter", Reason.ADAPTER, False),
        ("image uuid", Reason.IMAGE_UUID, False),
        ("images off", Reason.IMAGES_OFF, False),
        ("not asked", Reason.NOT_ASKED, False),
        ("of a later version", Reason.OTHER_VERSION, False),
    ],
)
def test_what_the_engine_decided(outcome: str, reason: Reason, held: bool) -> None:
    node, peer = attached(Node())
    leases = []
    if held:
        peer.store(1, 2)
        peer.lease(1, 1, 2)
        leases = [1]
    row = told(node, peer, blocks=2, outcome=outcome, leases=leases, detail="x\x1b[2Jy")
    assert row.outcome is reason
    assert word(row.outcome) == (outcome if reason is not Reason.OTHER_VERSION else "not known")
    assert of_request(row).endswith(": x?[2Jy"), "a terminal is not given orders"
    assert rows(node) == [(0, 2, "dram" if held else "", reason)]


def test_the_engines_own_cache_comes_first() -> None:
    node, peer = attached(Node())
    peer.store(3, 4)
    peer.lease(1, 3, 4)
    told(node, peer, blocks=4, local_tokens=2 * TOKENS, first_block=2, loaded=2)
    assert rows(node) == [(0, 2, "engine", Reason.NONE), (2, 2, "dram", Reason.NONE)]
    told(node, peer, blocks=4, local_tokens=3 * TOKENS, first_block=2, loaded=1)
    assert rows(node) == [(0, 3, "engine", Reason.NONE), (3, 1, "dram", Reason.NONE)], (
        "its cache grew meanwhile"
    )


# ── disk ─────────────────────────────────────────────────────────────────────────────────────────


def on_disk(*numbers: int, **config: Any) -> tuple[DiskNode, Peer]:
    node, peer = attached(DiskNode(**config))
    node.step(known(*numbers))
    return node, peer


def test_from_disk_by_the_hint_is_from_disk_for_the_first_who_asks() -> None:
    node, peer = on_disk(1, 2)
    peer.hint(1, 2)
    node.read_all()
    assert peer.lease(1, 1, 2).from_file == 2
    told(node, peer, blocks=2, loaded=2)
    assert rows(node) == [(0, 2, "file", Reason.NONE)]
    node.hear(peer.scheduler, LeaseRelease(leases=[1]))
    assert peer.lease(2, 1, 2).from_file == 0
    told(node, peer, blocks=2, loaded=2, leases=[2])
    assert rows(node) == [(0, 2, "dram", Reason.NONE)]


@pytest.mark.parametrize(
    ("waited_ns", "reason"), [(0, Reason.PROMOTION_COST), (1, Reason.PROMOTION_DEADLINE)]
)
def test_on_disk_and_not_waited_for(waited_ns: int, reason: Reason) -> None:
    node, peer = on_disk(1, 2)
    peer.lease(1, 1, 2)
    told(node, peer, blocks=2, promotion_ns=waited_ns)
    assert rows(node) == [(0, 2, "file", reason)]
    assert len(node.reads) == 1
    node.step(FileLate(node.reads[0].job))
    node.read_all()


def test_on_disk_without_room_in_dram() -> None:
    node, peer = on_disk(*range(1, 17), slots=8)
    peer.lease(1, *range(1, 9))
    while node.reads:
        node.read_all()
    assert peer.lease(2, *range(9, 17)).promoting == 0
    told(node, peer, leases=[2], blocks=8)
    assert rows(node) == [(0, 8, "file", Reason.NOT_READ)]


def test_reclaimed_or_lost_on_disk() -> None:
    node, peer = on_disk(1)
    node.step(known(2, at=50))
    node.step(gone(2, at=50))
    node.reclaim(1)
    peer.lease(1, 1, 2)
    told(node, peer, blocks=2)
    assert rows(node) == [(0, 1, "", Reason.RECLAIMED), (1, 1, "", Reason.FILE_LOST)]
    assert texts(node)[0].startswith("its segment on disk")


def test_room_for_blocks_from_disk_is_said() -> None:
    node, peer = on_disk(*range(1, 5), slots=8, credit_share=0.1)
    peer.store(*range(50, 57))
    node.write_nothing()
    peer.hint(*range(1, 5))
    node.read_all()
    left = [n for n in range(50, 57) if not peer.hint(n)[0]]
    assert left
    peer.lease(1, left[0])
    told(node, peer, blocks=1)
    assert rows(node) == [(0, 1, "", Reason.EVICTED_FOR_READS)]
    assert "to make room for blocks e (e) read from disk, " in texts(node)[0]


def test_no_two_reasons_have_one_code() -> None:
    assert len(Reason.__members__) == len({reason.value for reason in Reason})


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────


def test_the_ring_keeps_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "STORIES_MAX", 3)
    node, peer = attached(Node())
    for i in range(5):
        told(node, peer, blocks=1, request=f"r{i}", leases=[])
    found = node.engine.explain.requests("", limit=10)
    assert [row.request for row in found] == ["r4", "r3", "r2"]
    assert node.engine.explain.request(1)[1] == []
    assert len(node.engine.explain.requests("", limit=2)) == 2


def test_more_lookups_than_can_be_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "PENDING_KEYS_MAX", 3)
    node, peer = attached(Node())
    peer.lease(1, 1, 2)
    peer.lease(2, 1, 2)
    told(node, peer, blocks=2, leases=[2])
    assert rows(node) == [(0, 2, "", Reason.UNEXAMINED)]
    node.tick()
    peer.lease(3, 1, 2)
    told(node, peer, blocks=2, leases=[3])
    assert rows(node) == [(0, 2, "", Reason.NEVER_STORED)], "a tick made room"


def test_a_chequered_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "RANGES_MAX", 3)
    node, peer = attached(Node())
    peer.store(2, 4, 6)
    peer.lease(1, *range(1, 8))
    told(node, peer, blocks=7)
    assert rows(node)[2:] == [(2, 5, "", Reason.TOO_MIXED)]


def test_another_engines_lease_is_not_joined() -> None:
    node = Node()
    peer, other = Peer(node), Peer(node, "other")
    peer.store(1)
    peer.lease(1, 1)
    told(node, other, blocks=1, session=peer.session)
    assert rows(node) == [(0, 1, "", Reason.NOT_REMEMBERED)]


def test_a_story_before_any_session_is_not_heard() -> None:
    node, peer = attached(Node())
    lonely = node.connect(peer.scheduler_hello(engine_id="lonely"))
    node.hear(lonely, Story(request="r"))
    assert node.engine.explain.requests("", limit=10) == []


def test_nonsense_in_a_story_fits_the_answer() -> None:
    node, peer = attached(Node())
    peer.lease(1, 1)
    row = told(node, peer, blocks=1, **dict.fromkeys(explain._COUNTS, 2**63 - 1))
    parts: list[RequestReport | RangeReport] = [row, *ranges(node)]
    for part in parts:
        assert decode_rows(type(part), encode_rows([part])) == [part]
        assert all(n < 2 * explain.COUNT_MAX for n in astuple(part) if isinstance(n, int))


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("cmpl-4f1a-0-1f2e3d4c", True),
        ("cmpl-4f", True),
        ("4f1a", True),
        ("", True),
        ("4f", False),
        ("1a-0", False),
        ("cmpl-4f1a-1", False),
    ],
)
def test_a_request_is_found_by_the_id_its_client_has(asked: str, found: bool) -> None:
    assert fits("cmpl-4f1a-0-1f2e3d4c", asked) == found


# ── by prefix ────────────────────────────────────────────────────────────────────────────────────


def test_a_prefix_now() -> None:
    node, peer = on_disk(1)
    peer.store(2)
    node.write_nothing()
    found = node.engine.explain.prefix("t", SPACE, keys(1, 2, 3))
    assert [(r.first_block, r.blocks, r.tier, r.reason) for r in found] == [
        (0, 1, "file", Reason.NONE),
        (1, 1, "dram", Reason.NONE),
        (2, 1, "", Reason.NEVER_STORED),
    ]
    assert [r.tier for r in node.engine.explain.prefix("t", SPACE, keys(2, 1))] == ["dram", "file"]
    assert node.engine.explain.prefix("u", SPACE, keys(1)) == []
    assert node.engine.explain.prefix("t", SpaceId(bytes(32)), keys(1)) == []


def test_a_prefix_that_is_not_there_in_all_shards() -> None:
    node, peer = attached(Node(), shards=HALVES)
    peer.store(1)
    peer.seal(2, rank=0)
    found = node.engine.explain.prefix("t", SPACE, keys(1, 2))
    assert [(r.blocks, r.tier, r.reason) for r in found] == [
        (1, "dram", Reason.NONE),
        (1, "", Reason.NOT_ALL_SHARDS),
    ]

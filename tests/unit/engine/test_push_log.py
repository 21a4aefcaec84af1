"""What is told of a push afterwards: stages, blocks, why no more; on both nodes, and in bounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.engine.events import Staged
from kvstore.engine.why import findings
from kvstore.engine.why.explain import RequestReport
from kvstore.engine.why.findings import Trail
from kvstore.engine.why.reasons import PushReport, Reason
from kvstore.obs.reasons import of_pushes, of_range, story_as_dict
from kvstore.proto.rows import decode_rows, encode_rows
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import LeaseRelease
from tests.kit.parts_check import check_trail
from tests.unit.engine import test_explain
from tests.unit.engine.harness import Node, Peer
from tests.unit.engine.pushing import PushPair


@pytest.fixture
def pair() -> Iterator[PushPair]:
    """Its checks hold at the end, too."""
    pair = PushPair()
    yield pair
    pair.at_rest()


def told(node: Node, peer: Peer, *, blocks: int, loaded: int = 0) -> RequestReport:
    times = {"queued_ns": 20 * NS_PER_MS, "first_token_ns": 50 * NS_PER_MS}
    told = test_explain.told(node, peer, blocks=blocks, loaded=loaded, transfer="r", **times)
    (row,) = decode_rows(RequestReport, encode_rows([told]))
    return row


def cut_short(pair: PushPair, reason: str = "aborted") -> None:
    """Of four blocks one is here before, two are pushed, one never comes."""
    pair.decode.store(1)
    pair.open()
    pair.expect(1, 2, 3, 4)
    pair.store(1, 2)
    pair.pump()
    pair.tick(5)
    pair.store(3)
    pair.pump()
    pair.tick(2)
    pair.close(reason=reason)
    pair.pump()


def test_a_request_says_what_was_pushed_what_was_computed_and_why(pair: PushPair) -> None:
    cut_short(pair)
    pair.decode.lease(1, 1, 2, 3, 4)
    row = told(pair.d, pair.decode, blocks=4, loaded=3)
    (push,) = row.pushes
    assert (push.side, push.node, push.blocks, push.held, push.pushed) == ("decode", "p", 4, 1, 2)
    assert push.reason == "aborted"
    assert (push.granted_us, push.first_us) == (1, 1)
    assert (push.last_us, push.sealed_us, push.ended_us) == (5000, 5000, 7000)
    assert row.first_token_us == 50_000
    ranges = pair.d.engine.explain.request(row.number)[1]
    assert [(r.first_block, r.blocks, r.tier, r.reason) for r in ranges] == [
        (0, 1, "dram", Reason.NONE),
        (1, 2, "peer", Reason.NONE),
        (3, 1, "", Reason.NOT_PUSHED),
    ]
    assert of_range(ranges[1], row) == "loaded, after node p pushed it"
    assert of_range(ranges[2], row) == "not pushed by node p: aborted"
    assert of_pushes(row) == (
        "2 of 3 blocks from node p, 1 were here: granted 0.0 ms, first 0.0 ms, last 5.0 ms,"
        " sealed 5.0 ms, ended 7.0 ms; no more: aborted"
    )
    assert story_as_dict(row, None)["pushes"][0]["reason"] == "aborted"
    pair.d.hear(pair.decode.scheduler, LeaseRelease([1]))


def test_the_prefill_node_says_where_blocks_went(pair: PushPair) -> None:
    cut_short(pair)
    (push,) = told(pair.p, pair.prefill, blocks=4).pushes
    assert (push.side, push.node, push.blocks, push.pushed) == ("prefill", "d", 3, 2)
    assert push.reason == "aborted"
    assert "2 of 3 blocks to node d" in of_pushes(told(pair.p, pair.prefill, blocks=4))


def test_both_nodes_count_what_was_cut_short(pair: PushPair) -> None:
    pair.open()
    pair.expect(5, 6)
    pair.store(5, 6)
    pair.pump()
    assert [node.engine.counters.pushes_cut_short for node in (pair.p, pair.d)] == [0, 0]
    cut_short(pair)
    assert [node.engine.counters.pushes_cut_short for node in (pair.p, pair.d)] == [1, 1]


def test_reasons_of_pushes_reach_the_request(pair: PushPair) -> None:
    pair.open()
    pair.expect(1, 2, ms=1000)
    pair.pump()
    pair.pump(after_ms=1000)
    pair.decode.lease(1, 1, 2)
    row = told(pair.d, pair.decode, blocks=2)
    assert [push.reason for push in row.pushes] == ["its deadline has passed"]
    (rest,) = pair.d.engine.explain.request(row.number)[1]
    assert (rest.blocks, rest.reason, rest.node) == (2, Reason.NOT_PUSHED, "p")
    pair.close()


def test_what_came_another_way_has_its_own_reason(pair: PushPair) -> None:
    """A push that was cut short explains absent blocks of its own, and no others."""
    cut_short(pair)
    pair.decode.lease(1, 1, 2, 3, 4, 5, 6)
    row = told(pair.d, pair.decode, blocks=6, loaded=3)
    reasons = [(r.first_block, r.reason) for r in pair.d.engine.explain.request(row.number)[1]]
    assert reasons[1:] == [(1, Reason.NONE), (3, Reason.NOT_PUSHED), (4, Reason.NEVER_STORED)]
    pair.d.hear(pair.decode.scheduler, LeaseRelease([1]))


def test_stages_that_end_here_are_timed(pair: PushPair) -> None:
    pair.open()
    pair.expect(1)
    pair.store(1)
    pair.pump_until_it_lands()
    pair.d.now_ns += 7 * NS_PER_MS
    before = len(pair.d.said)
    pair.land()
    (sealed,) = [c for c in pair.d.said[before:] if isinstance(c, Staged)]
    assert (sealed.stage, sealed.node, sealed.took_ns) == ("push_seal", "p", 7 * NS_PER_MS)
    assert sealed.size_bytes > 0
    pair.close()
    pair.pump()
    told(pair.d, pair.decode, blocks=1, loaded=1)
    token = pair.d.said[-1]
    assert isinstance(token, Staged)
    assert (token.stage, token.took_ns) == ("push_token", 30 * NS_PER_MS)


def test_the_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "TRANSFERS_MAX", 2)
    monkeypatch.setattr(findings, "PARTS_MAX", 3)
    log = Trail(block_count_max=16)
    report = PushReport(side="decode", node="p", blocks=1, pushed=1, reason="")
    for name in "abc":
        for _ in range(5):
            log.pushed("t", name, report)
    assert [len(log.pushes("t", name)) for name in "abc"] == [0, 3, 3]
    check_trail(log)

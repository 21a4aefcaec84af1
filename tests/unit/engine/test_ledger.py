"""One table, its first line, and the sums of all tables."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import astuple, replace

from kvstore.cli.look import show_story
from kvstore.engine.why import ledger
from kvstore.engine.why.findings import RangeReport
from kvstore.engine.why.reasons import CLASSES, OTHER_CLASS, Reason, Search
from kvstore.obs.reasons import of_range, of_request, word
from kvstore.wire.messages import Story
from tests.unit.engine.harness import TOKENS, Node, Peer, attached, space
from tests.unit.engine.test_explain import rows, told


def test_every_reason_has_a_class_and_other_is_for_what_nobody_asked() -> None:
    assert set(CLASSES) == set(Reason)
    assert len(set(CLASSES.values()) - {OTHER_CLASS}) == 10
    assert {reason for reason, its in CLASSES.items() if its == OTHER_CLASS} == {
        *(Reason.NONE, Reason.UNEXAMINED, Reason.TOO_MIXED, Reason.NOT_REMEMBERED),
        *(Reason.BEHIND_A_GAP, Reason.BEHIND_A_GAP_ON_DISK, Reason.OTHER_VERSION),
        *(Reason.BEYOND_THE_QUESTION, Reason.NOT_NEEDED, Reason.NOT_ASKED),
        *(Reason.NO_FULL_BLOCK, Reason.OWN_CACHE),
        *(Reason.NOBODY_HAS_IT, Reason.HERE_BY_NOW, Reason.FETCHED),
    }


def test_the_first_line_of_explain_is_that_of_its_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    node, peer = attached(Node())
    for reason in [reason for reason in Reason if reason]:
        check_first_line(reason, node, peer, capsys)


def check_first_line(
    reason: Reason, node: Node, peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    row = told(node, peer, blocks=2, leases=[], promotion_ns=198_000_000)
    search = Search(1, 2, reason, node="far") if reason >= Reason.NO_ANSWER_YET else None
    its = RangeReport(0, 2, "", reason, "far", search.sought if search else Reason.NONE)
    its = replace(its, search=search)
    show_story(replace(row, outcome=reason, missed=its), [its])
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("outcome")]
    assert line.split(maxsplit=1)[1] == f"{word(reason)}: {of_range(its, row)}"
    assert f"{word(reason)}  " in out.partition("missed")[2]
    assert "{" not in out


def test_after_a_reset_of_the_engine_its_blocks_are_told_as_reset() -> None:
    node = Node()
    before = Peer(node, "before")
    before.store(1, 2)
    other = Peer(node, "other", space=space("other", layer_bytes=16 << 10))
    other.store(3)
    after = Peer(node, "after", epoch="of the reset")
    after.lease(1, 1, 2)
    row = told(node, after, blocks=2)
    assert rows(node) == [(0, 2, "", Reason.RESET)]
    assert word(row.outcome) == "reset by the engine"
    assert of_request(row).startswith("stored before the engine's cache was reset")
    after.lease(2, 3)
    assert told(node, after, blocks=1, leases=[2]).outcome is Reason.OTHER_SPACE
    after.store(4)
    before.lease(3, 4)
    row = told(node, before, blocks=1, leases=[3])
    assert row.outcome is Reason.OTHER_SPACE, "its own engine was not reset"


def test_sums_have_the_classes_of_what_explain_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "PAIRS_MAX", 1)
    node, peer = attached(Node())
    peer.store(1, 2, 4)
    peer.lease(1, 1, 2, 3, 4)
    told(node, peer, blocks=6, loaded=2, saved_ns=7, lookup_ns=1, promotion_ns=2, load_ns=3)
    told(node, peer, blocks=3, leases=[], outcome="node unreachable", local_tokens=TOKENS)
    sums = node.engine.ledger
    assert sums.hits == {"dram": 2, "file": 0, "peer": 0}
    assert {k: n for k, n in sums.misses.items() if n} == {
        "never-stored": 2,  # 3, and 4 behind it
        "other": 2,  # not asked for
        "unreachable": 2,
    }
    (account,) = sums.accounts.values()
    assert (account.prompt_tokens, account.loaded_tokens) == (9 * TOKENS + 6, 2 * TOKENS)
    assert account.stored_bytes == node.engine.counters.stored_bytes > 0
    assert [(tier, its.saved_ns, its.spent_ns) for (*_, tier), its in sums.savings.items()] == [
        ("dram", 7, 4),
        ("none", 0, 2),  # it waited for blocks that did not come
    ]
    late = Peer(node, tenant="another")
    told(node, late, blocks=1, lookup_ns=5)
    assert list(sums.accounts)[1:] == [("other", "other")]
    assert list(sums.savings)[2:] == [("other", "other", "none")]
    assert sums.total().spent_ns == 11


def test_a_request_is_split_among_its_tiers_and_nothing_is_left_over() -> None:
    sums = ledger.Ledger()
    tokens: dict[str, Any] = {
        "prompt_tokens": 9,
        "loaded_tokens": 7,
        "file_tokens": 2,
        "peer_tokens": 4,
    }
    story = Story("r", **tokens, saved_ns=100, lookup_ns=10, promotion_ns=50, load_ns=11)
    sums.count(("m", "t"), story, [], gpu_count=4)
    assert {tier: replace(its, net_gpu_ns=0) for (*_, tier), its in sums.savings.items()} == {
        "dram": ledger.Savings(1, 14, 3),
        "file": ledger.Savings(2, 28, 6 + 16),
        "peer": ledger.Savings(4, 58, 12 + 34),
    }
    assert sums.total().net_gpu_ns == 4 * (100 - 71)


def test_rows_that_saved_the_same_have_an_order() -> None:
    sums = ledger.Ledger()
    for pair in (("b", "t"), ("a", "u"), ("a", "t")):
        sums.count(pair, Story("r", loaded_tokens=1, saved_ns=8, load_ns=2), [])
    assert [(row.model, row.tenant) for row in sums.report()] == [
        ("a", "t"),
        ("a", "u"),
        ("b", "t"),
    ]


@given(
    st.lists(st.integers(0, 1 << 50), min_size=4, max_size=4),
    st.lists(st.integers(0, 1 << 32), min_size=3, max_size=3),
)
def test_shares_of_tiers_add_up_whatever_an_engine_tells(
    times: list[int], tokens: list[int]
) -> None:
    saved, lookup, promotion, load = times
    loaded, file, peer = tokens  # more from disk than was loaded, too
    story = Story("r", loaded_tokens=loaded, file_tokens=file, peer_tokens=peer, saved_ns=saved)
    story = replace(story, lookup_ns=lookup, promotion_ns=promotion, load_ns=load)
    sums = ledger.Ledger()
    sums.count(("m", "t"), story, [])
    spent = lookup + promotion + load
    lost = max(0, spent - saved)
    assert sums.total() == ledger.Savings(loaded, saved, spent, lost, saved - spent)
    assert all(min(astuple(its)[:4]) >= 0 for its in sums.savings.values())


def test_names_from_outside_are_cut_and_counted_but_never_more_than_there_is_room_for() -> None:
    sums = ledger.Ledger()
    hostile = 'a"} 1\nkvstore_up 0', "\x1b[2J" + "t" * 500
    for number in range(1000):
        tenant = hostile[1] + str(number)  # equal as far as they are kept
        sums.count((hostile[0], tenant), Story("r", load_ns=1), [])
    (pair,) = sums.accounts
    assert pair == ('a"} 1?kvstore_up 0', ("?[2J" + "t" * 500)[: ledger.NAME_LENGTH_MAX])
    for number in range(1000):
        sums.count(("m", f"t{number}"), Story("r", load_ns=1), [])
        assert len(sums.accounts) <= ledger.PAIRS_MAX + 1
        assert len(sums.accounts) + len(sums.savings) <= ledger.NAMES_MAX + 2
    again = ledger.Ledger()
    for number in range(1000):
        again.count(("m", f"t{number}"), Story("r", load_ns=1), [])
    assert [name[1] for name in again.savings][:3] == ["t0", "t1", "t2"]
    assert again.total().spent_ns == 1000
    for families in (sums.accounts, sums.savings):
        assert sum("other" in name for name in families) == 1

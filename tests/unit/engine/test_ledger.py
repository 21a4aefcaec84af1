"""One table, its first line, and the sums of all tables."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvstore.cli.look import show_story
from kvstore.cli.reasons import of_range, of_request, word
from kvstore.engine.why import ledger
from kvstore.engine.why.findings import RangeReport
from kvstore.engine.why.reasons import CLASSES, OTHER_CLASS, Reason
from kvstore.engine.why.searches import Search
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


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason])
def test_the_first_line_of_explain_is_that_of_its_table(
    reason: Reason, capsys: pytest.CaptureFixture[str]
) -> None:
    node, peer = attached(Node())
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


def test_nothing_to_load_where_the_engines_own_cache_had_it() -> None:
    node, peer = attached(Node())
    ends: dict[str, Any] = {"outcome": "no full block", "leases": [], "local_tokens": 2 * TOKENS}
    row = told(node, peer, blocks=2, **ends)
    assert (word(row.outcome), of_request(row)) == (
        "nothing to load",
        "nothing to load: the engine's own cache had it",
    )
    assert rows(node) == [(0, 2, "engine", Reason.NONE)]
    row = told(node, peer, blocks=3, **ends)
    assert (row.outcome, rows(node)[1]) == (Reason.OWN_CACHE, (2, 1, "", Reason.OWN_CACHE))


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
    monkeypatch.setattr(ledger, "NAMED_MAX", 1)
    node, peer = attached(Node())
    peer.store(1, 2, 4)
    peer.lease(1, 1, 2, 3, 4)
    told(node, peer, blocks=6, loaded=2, saved_ns=7, lookup_ns=1, promotion_ns=2, load_ns=3)
    told(node, peer, blocks=3, leases=[], outcome="node unreachable", local_tokens=TOKENS)
    sums = node.engine.explain.ledger
    assert sums.hits == {"dram": 2, "file": 0, "peer": 0}
    assert {k: n for k, n in sums.misses.items() if n} == {
        "never-stored": 2,  # 3, and 4 behind it
        "other": 2,  # not asked for
        "unreachable": 2,
    }
    (account,) = sums.accounts.values()
    assert (account.prompt_tokens, account.loaded_tokens) == (9 * TOKENS + 6, 2 * TOKENS)
    assert (account.saved_ns, account.waited_ns) == (7, 6)
    late = Peer(node, tenant="another")
    told(node, late, blocks=1)
    assert list(sums.accounts)[1:] == [("other", "other")]
    assert sums.total().prompt_tokens == 10 * TOKENS + 9

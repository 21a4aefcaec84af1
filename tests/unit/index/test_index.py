"""The index as its service drives it: words of nodes in, answers out."""

from __future__ import annotations

from kvstore.index.feed import Beat, Delta, Hello, Stored, Trust, Verdict
from kvstore.index.index import Answer, Holder, Index, Match
from kvstore.types import Incarnation, SpaceId, Tier

SPACE = SpaceId(bytes(32))


def keys(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(32, "little") for n in numbers)


def hello(node: str, *, incarnation: int = 1, stream: int = 1, sequence: int = 0) -> Hello:
    return Hello(node, Incarnation(incarnation), stream, sequence)


def delta(node: str, sequence: int, *changes: Stored) -> Delta:
    return Delta(node, Incarnation(1), 1, sequence, changes)


def stored(*numbers: int, tier: Tier = Tier.DRAM, engine: str = "") -> Stored:
    return Stored("t", SPACE, tier, keys(*numbers), engine)


def test_an_answer_has_all_holders_with_their_lengths_by_tier() -> None:
    index = Index(entry_count_max=100, slot_count_max=8, now_ms=0)
    for node in ("a", "b"):
        assert index.hear(hello(node), 5000) is Verdict.GO_ON
    changes = [stored(1, tier=Tier.HBM, engine="e"), stored(1, 2), stored(3, tier=Tier.FILE)]
    assert index.hear(delta("a", 1, *changes), 5000) is Verdict.GO_ON
    assert index.hear(delta("b", 1, stored(1)), 5000) is Verdict.GO_ON
    assert index.hear(Beat("a", Incarnation(1), 1, 1), 5100) is Verdict.GO_ON
    answer = index.match("t", SPACE, keys(1, 2, 3, 4), 5100)
    assert answer.trust is Trust.EXACT
    assert sorted(answer.matches, key=lambda m: (m.holder.node, m.holder.engine)) == [
        Match(Holder("a"), 0, 2, 3, Trust.EXACT),
        Match(Holder("a", "e"), 1, 1, 1, Trust.EXACT),
        Match(Holder("b"), 0, 1, 1, Trust.EXACT),
    ]
    assert index.match("other", SPACE, keys(1), 5100) == Answer(Trust.EXACT, [])
    assert index.match("t", SpaceId(b"x" * 32), keys(1), 5100) == Answer(Trust.EXACT, [])

"""What the index in memory promises beyond the contract of all stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.index.feed import FORGET_MS, OUT_MS, STALE_MS, Feed, Holder, Scope, Trust, Verdict
from kvstore.index.holdings import Holdings
from kvstore.index.index import Index, Match, Member
from kvstore.proto import forms, index_pb2 as pb
from kvstore.types import Incarnation
from kvstore.wire.feed import Left
from kvstore.wire.load import Load
from tests.kit.index_check import check, done
from tests.unit.index.words import (
    NODE,
    SPACE,
    beat,
    closed,
    delta,
    hello,
    keys,
    lengths,
    stored,
)

NOW = 10_000
A = Holder(NODE)


def new_index(*, entries: int = 100, nodes: int = 4) -> Index:
    flat = Holdings(entries, slot_count_max=8, is_native=False)
    return Index(flat, node_count_max=nodes, now_ms=0)


def told(*numbers: int) -> Index:
    """An index to which node a told these, as its delta 1."""
    index = new_index()
    assert done(index.hear(hello(), NOW)) is Verdict.GO_ON
    assert done(index.hear(delta(1, stored(*numbers)), NOW)) is Verdict.GO_ON
    return index


def trust(index: Index, now_ms: int) -> Trust | None:
    """Of the one holder of block 1; None: it is in no answer."""
    matches = done(index.match("t", SPACE, keys(1), now_ms)).matches
    assert len(matches) <= 1
    return matches[0].trust if matches else None


@pytest.mark.parametrize("ends", [True, False])
def test_a_dead_ones_hello_that_comes_late_does_not_shut_its_successor_out(ends: bool) -> None:
    # Found by the seeded world: for a minute nothing of the node was found.
    index = told(1)
    assert done(index.hear(hello(incarnation=3), NOW)) is Verdict.GO_ON
    assert done(index.hear(hello(incarnation=2), NOW)) is Verdict.GO_ON
    assert done(index.hear(hello(incarnation=3, stream=2), NOW)) is Verdict.CLOSE
    later = NOW + (1 if ends else STALE_MS)
    if ends:
        done(index.hear(closed(incarnation=2), later))
    assert done(index.hear(hello(incarnation=3, stream=3), later)) is Verdict.GO_ON
    assert trust(index, later) is None  # it holds nothing
    assert done(index.hear(hello(incarnation=2, stream=2), later)) is Verdict.CLOSE


def test_full_forgets_the_longest_unused_and_says_so() -> None:
    index = new_index(entries=10)
    done(index.hear(hello(), NOW))
    done(index.hear(hello(node="b"), NOW))
    done(index.hear(delta(1, stored(*range(100, 104)), node="b"), NOW))
    done(index.hear(delta(1, stored(*range(6))), NOW))
    assert lengths(index, NOW, *range(100, 104)) == {Holder("b"): 4}
    done(index.hear(delta(2, stored(20, 21)), NOW))
    # Not what was asked for, though it was told first; and of a chain its end.
    assert lengths(index, NOW, *range(100, 104)) == {Holder("b"): 4}
    [match] = done(index.match("t", SPACE, keys(*range(6)), NOW)).matches
    assert match == Match(A, 0, 4, 4, Trust.CATCHING_UP)
    [match] = done(index.match("t", SPACE, keys(100), NOW)).matches
    assert match.trust is Trust.EXACT
    assert index.statistics().evicted_count == 2
    check(index)


def test_a_word_does_not_make_the_next_answer_look_at_every_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = new_index(nodes=500)
    for number in range(500):
        done(index.hear(hello(node=str(number)), NOW))
    done(index.match("t", SPACE, keys(1), NOW))
    looks = 0
    trust = Feed.trust

    def counted(feed: Feed, now_ms: int) -> Trust | None:
        nonlocal looks
        looks += 1
        return trust(feed, now_ms)

    monkeypatch.setattr(Feed, "trust", counted)
    for number in range(100):
        done(index.hear(beat(0, node=str(number)), NOW + number))
        assert done(index.match("t", SPACE, keys(1), NOW + number)).trust is Trust.EXACT
    assert looks == 100
    check(index)


def test_whoever_is_doubted_is_so_until_heard_or_out() -> None:
    index = new_index()

    def answer(now_ms: int) -> Trust:
        check(index)
        return done(index.match("t", SPACE, keys(1), now_ms)).trust

    done(index.hear(hello(), NOW))
    done(index.hear(hello(node="b"), NOW + 1))
    assert answer(NOW + STALE_MS - 1) is Trust.EXACT
    done(index.hear(beat(0, node="b"), NOW + STALE_MS - 1))
    assert answer(NOW + STALE_MS) is Trust.CATCHING_UP
    done(index.hear(beat(0), NOW + STALE_MS))
    assert answer(NOW + STALE_MS) is Trust.EXACT
    assert done(index.hear(beat(7), NOW + STALE_MS)) is Verdict.ASK
    assert answer(NOW + STALE_MS) is Trust.CATCHING_UP
    assert answer(NOW + STALE_MS + OUT_MS - 1) is Trust.CATCHING_UP
    assert answer(NOW + STALE_MS + OUT_MS) is Trust.EXACT
    assert answer(NOW + STALE_MS + FORGET_MS) is Trust.EXACT
    assert not index.nodes


def test_wrong_sizes_are_told() -> None:
    with pytest.raises(ValueError, match="entries must be more than slots"):
        Holdings(8, slot_count_max=8)
    with pytest.raises(ValueError, match="33 bytes are no keys of 32 bytes each"):
        done(told(1).match("t", SPACE, bytes(33), NOW))


class NeverWalked(dict[tuple[str, int], dict[Scope, int]]):
    """Looked up in, and never gone through."""

    def __iter__(self) -> Iterator[tuple[str, int]]:
        raise AssertionError("all places are looked at")


def test_an_engine_that_left_is_not_looked_for_in_all_places() -> None:
    index = told(1)
    done(index.hear(delta(2, stored(1, engine="e"), stored(1, engine="e", tenant="u")), NOW))
    places = index.nodes[NODE].places
    places.slots = NeverWalked(places.slots.items())
    done(index.hear(delta(3, Left("f"), Left("e")), NOW))
    assert lengths(index, NOW, 1) == {A: 1}
    assert len(places.slots) == 1
    places.slots = dict(places.slots.items())
    check(index)


def test_what_a_node_does_travels_in_answers_whole() -> None:
    fields = list(Load.__struct_fields__)
    busy = Load(**{name: 2**40 + number for number, name in enumerate(fields)})
    told = Member("a", Incarnation(1), "", Trust.EXACT, 0, busy)
    message = forms.node_row(told, engines=False).SerializeToString()
    assert forms.member_of(pb.Node.FromString(message)) == told
    assert [field.name for field in pb.Load.DESCRIPTOR.fields] == fields

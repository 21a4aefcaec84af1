"""A node's words in every order, some of them twice: what is called exact is exact.

After each event: if the node is believed exactly, the index has just what the node had at the last
sequence number that the index took in. And however it went: the node heals it by doing what it is
asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import pytest

from kvstore.index.feed import Event, Feed, Places, Trust, Verdict
from kvstore.index.holdings import Holdings
from kvstore.index.index import Index
from kvstore.wire.feed import Delta, SnapshotPart
from tests.kit.index_check import check, done
from tests.kit.planted import Patch, instead_of
from tests.unit.index.words import (
    NODE,
    beat,
    closed,
    delta,
    hello,
    lengths,
    part,
    removed,
    stored,
)

NOW = 10_000
UNIVERSE = (1, 2, 3, 4, 5)
Truth = dict[tuple[int, int], set[int]]
"""Blocks that the node holds, by incarnation and sequence number."""

TELLS: tuple[list[Event], Truth] = (
    [hello(), delta(1, stored(1, 2)), delta(2, removed(1)), delta(3, stored(3)), beat(3)],
    {(1, 0): set(), (1, 1): {1, 2}, (1, 2): {2}, (1, 3): {2, 3}},
)
FILLS: tuple[list[Event], Truth] = (
    [
        hello(sequence=2),
        part(2, 0, stored(1)),
        delta(3, removed(1), stored(4)),
        part(3, 1, stored(2, 3), is_last=True),
        delta(4, removed(2)),
        beat(4),
    ],
    {(1, 2): {1, 2, 3}, (1, 3): {2, 3, 4}, (1, 4): {3, 4}},
)
RESTARTS: tuple[list[Event], Truth] = (
    [
        hello(),
        delta(1, stored(1, 2)),
        closed(),
        hello(incarnation=2),
        delta(1, stored(3), incarnation=2),
        beat(1, incarnation=2),
    ],
    {(1, 0): set(), (1, 1): {1, 2}, (2, 0): set(), (2, 1): {3}},
)
DIALS_AGAIN: tuple[list[Event], Truth] = (
    [
        hello(),
        delta(1, stored(1)),
        hello(stream=2, sequence=1),
        closed(),
        delta(2, stored(2), stream=2),
        beat(2, stream=2),
    ],
    {(1, 0): set(), (1, 1): {1}, (1, 2): {1, 2}},
)
STORIES = {"tells": TELLS, "fills": FILLS, "restarts": RESTARTS, "dials again": DIALS_AGAIN}


def _orders(events: list[Event]) -> Iterator[Sequence[Event]]:
    yield from permutations(events)
    for twice in events:
        yield from ([*order, twice] for order in permutations(events))
        yield [event for event in events for _ in range(1 + (event is twice))]


def _told(index: Index) -> set[int]:
    return {number for number in UNIVERSE if lengths(index, NOW, number)}


def _is_exact_where_it_says_so(index: Index, truth: Truth) -> bool:
    feed = index.nodes.get(NODE)
    if feed is None:
        return True
    is_exact = feed.trust(NOW) is Trust.EXACT
    return not is_exact or _told(index) == truth[feed.body.incarnation, feed.body.sequence]


def _heal(index: Index, held: set[int], *, incarnation: int, sequence: int) -> None:
    """What a node does that is told to close, and asked for a snapshot."""
    verdict = done(index.hear(hello(incarnation=incarnation, stream=9, sequence=sequence), NOW))
    if verdict is Verdict.CLOSE:  # a replaced one cannot come back: the node is started anew
        incarnation = 3
        verdict = done(index.hear(hello(incarnation=3, stream=9, sequence=sequence), NOW))
    if verdict is Verdict.ASK:
        whole = part(sequence, 0, stored(*held), is_last=True, incarnation=incarnation, stream=9)
        verdict = done(index.hear(whole, NOW))
    assert verdict is Verdict.GO_ON


def _verify(story: tuple[list[Event], Truth]) -> int:
    events, truth = story
    last = max(truth)
    count = 0
    for order in _orders(events):
        index = Index(Holdings(50, slot_count_max=16, is_native=False), now_ms=0)
        for event in order:
            done(index.hear(event, NOW))
            assert _is_exact_where_it_says_so(index, truth), order
        _heal(index, truth[last], incarnation=last[0], sequence=last[1])
        assert index.nodes[NODE].trust(NOW) is Trust.EXACT, order
        assert _told(index) == truth[last], order
        check(index)
        count += 1
    return count


@pytest.mark.parametrize("name", STORIES)
def test_in_every_order(name: str) -> None:
    assert _verify(STORIES[name]) > 600


@instead_of(Feed, "_delta")
def _gap_is_not_seen(delta_: Any, self: Feed, word: Delta, now_ms: int) -> Any:
    self.body.sequence = word.sequence - 1
    return delta_(self, word, now_ms)


@instead_of(Feed, "_part")
def _old_part_counts(part_: Any, self: Feed, word: object, now_ms: int) -> Any:
    sequence = word.sequence  # type: ignore[attr-defined]
    self.body.sequence = min(self.body.sequence, sequence)
    return part_(self, word, now_ms)


def _restart_keeps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Places, "forget", lambda self: None)


@instead_of(Places, "fill")
def _snapshot_adds(_: Any, self: Places, part: SnapshotPart) -> None:
    for each in part.stored:
        self._store(each, self.slots)


@pytest.mark.parametrize(
    ("break_it", "story"),
    [
        (_gap_is_not_seen, TELLS),
        (_old_part_counts, FILLS),
        (_restart_keeps, RESTARTS),
        (_snapshot_adds, FILLS),
    ],
)
def test_what_is_broken_is_seen(
    break_it: Patch,
    story: tuple[list[Event], Truth],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        _verify(story)

"""What every eviction policy promises, run by each of them: see `memory/policies.py`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from kvstore.engine.memory import policies
from kvstore.engine.memory.policies import POLICIES, Policy, Stamps, Words, maker
from kvstore.errors import ConfigError

WORDS = 24
OTHERS = 8
"""Words behind those that are in no slab of the pool."""


class Held:
    """A policy, and what it must hold."""

    def __init__(self, name: str) -> None:
        self.stamps = np.zeros(WORDS + OTHERS, dtype=np.int64)
        self.members = np.arange(WORDS + OTHERS) < WORDS
        self.policy = maker(name, self.stamps)(members=lambda: self.members, slot_count_max=WORDS)
        self.next_stamp = 1
        self.held: set[int] = set()
        self.pinned: set[int] = set()

    def _batch(self, words: list[int]) -> tuple[Words, Stamps]:
        """A chain from its end to its start, as `Slots` passes it, and its stamps."""
        first, self.next_stamp = self.next_stamp, self.next_stamp + len(words)
        return np.array(words[::-1], dtype=np.int64), np.arange(first, self.next_stamp)

    def oldest_stamp(self) -> int | None:
        """As `Slots.oldest_stamp` finds it."""
        stamps = self.stamps[self.members & (self.stamps > 0)]
        return int(stamps.min()) if len(stamps) else None

    def insert(self, *words: int, prints: list[int] | None = None) -> None:
        assert not self.held & set(words)
        batch, stamps = self._batch(list(words))
        numbers = [w + 1000 * self.next_stamp for w in words] if prints is None else prints
        self.policy.insert(batch, stamps, np.array(numbers[::-1], dtype=np.uint64))
        self.held |= set(words)

    def use(self, *words: int) -> None:
        self.policy.use(*self._batch(list(words)))

    def touch(self, *words: int) -> None:
        self.policy.touch(*self._batch(list(words)))

    def forget(self, *words: int) -> None:
        self.policy.forget(np.array(words, dtype=np.int64))
        self.held -= set(words)

    def may_go(self, words: Words | slice) -> NDArray[np.bool_]:
        may: NDArray[np.bool_] = ~np.isin(np.arange(WORDS + OTHERS)[words], list(self.pinned))
        return may

    def pop(self, count: int) -> list[int]:
        got: list[int] = self.policy.pop(count, self.may_go).tolist()
        may = self.held - self.pinned
        assert len(got) == min(count, len(may)), "all that is wanted or all there is"
        assert set(got) <= may, "pinned, or not held"
        assert len(set(got)) == len(got), "twice"
        self.held -= set(got)
        assert set(np.flatnonzero(self.stamps > 0).tolist()) == self.held, (
            "what is held has a stamp"
        )
        return got


@pytest.fixture(params=sorted(POLICIES))
def held(request: pytest.FixtureRequest) -> Held:
    return Held(request.param)


@pytest.fixture(autouse=True, params=[2, 6, 1024], ids=["short", "middle", "long"])
def queue_min(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short queue is made again and again, a long one holds everything; in one between some
    are touched before it is used up."""
    monkeypatch.setattr(policies, "_QUEUE_MIN", request.param)
    # So few keys that those that went are all remembered, whatever bucket they meet in.
    monkeypatch.setattr(policies, "REMEMBERED", 4096)


def test_it_is_a_policy(held: Held) -> None:
    assert isinstance(held.policy, Policy)


def test_one_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"called 'belady': use lru or reuse"):
        maker("belady", np.zeros(1, dtype=np.int64))


def test_nothing_is_popped_when_nothing_is_held(held: Held) -> None:
    assert held.pop(3) == []
    assert held.oldest_stamp() is None


def test_a_chain_loses_its_end_before_its_start(held: Held) -> None:
    held.insert(5, 3, 9, 1)
    assert held.pop(1) == [1]
    held.use(5, 3, 9)
    assert held.pop(2) == [9, 3]
    assert held.pop(2) == [5]


@pytest.mark.parametrize("again", ["use", "touch"])
def test_what_is_wanted_again_outlives_what_is_not(held: Held, again: str) -> None:
    held.insert(1)
    held.insert(2)
    getattr(held, again)(1)
    assert held.pop(2) == [2, 1]


def test_what_came_back_and_what_is_wanted_again_both_go(held: Held) -> None:
    held.insert(1, prints=[11])
    assert held.pop(1) == [1]
    held.insert(1, prints=[11])
    held.insert(2)
    held.use(2)
    assert held.pop(2) == [1, 2]


def test_what_another_process_left_goes_in_the_order_of_its_stamps(held: Held) -> None:
    held.stamps[[4, 2, 9]] = [30, 10, 20]
    held.policy.resume(np.array([2, 4, 9]), np.array([1, 2, 3], dtype=np.uint64))
    held.held, held.next_stamp = {2, 4, 9}, 31
    held.insert(1)
    held.use(9)
    held.insert(5)
    assert held.oldest_stamp() == 10
    order = [held.pop(1)[0] for _ in range(5)]
    assert order[:2] == [2, 4]
    assert order.index(9) > order.index(1)


def test_pinned_slots_are_passed_over_and_go_when_they_are_let_go(held: Held) -> None:
    held.insert(*range(WORDS))
    held.use(4, 5)
    held.pinned = set(range(WORDS - 1))
    assert held.pop(WORDS) == [WORDS - 1]
    assert held.pop(1) == []
    held.pinned = {5}
    assert len(held.pop(WORDS)) == WORDS - 2
    held.pinned = set()
    assert held.pop(1) == [5]


def test_what_is_forgotten_does_not_come_up_and_may_come_back(held: Held) -> None:
    held.insert(1, 2, 3)
    held.use(1, 2)
    held.forget(2, 3, 7)
    held.insert(3)
    assert sorted(held.pop(3)) == [1, 3]


def test_a_slot_that_is_named_twice_counts_once(held: Held) -> None:
    held.insert(1, 2, 3)
    held.use(1, 1, 2, 1, 2)
    held.touch(3, 3)
    assert sorted(held.pop(9)) == [1, 2, 3]
    held.insert(1, 2, 3)
    assert len(held.pop(2)) == 2


def test_a_chain_whose_end_lies_behind_what_was_looked_at_keeps_its_start(held: Held) -> None:
    for number in range(6):
        held.insert(number)
    held.insert(10, 11)
    assert held.pop(1) == [0]
    for number in range(2, 6):
        held.use(number)
    held.insert(12)
    held.touch(10, 12)
    held.use(10)
    assert 10 not in held.pop(6) or 11 not in held.held


def test_what_comes_in_with_an_older_stamp_goes_before_what_is_younger(held: Held) -> None:
    held.next_stamp = 100
    held.insert(*range(6))
    assert held.pop(1) == [5]
    held.next_stamp = 50
    held.insert(10, 11)
    assert held.pop(2) == [11, 10]
    held.next_stamp = 60
    held.insert(10)
    held.use(10)
    held.next_stamp = 200
    held.use(0, 1, 2, 3, 4)
    assert held.pop(1) == [10]


def test_slots_of_other_pools_are_left_alone(held: Held) -> None:
    held.insert(1, 2)
    held.stamps[WORDS] = 1
    assert held.oldest_stamp() == held.stamps[2]
    assert held.policy.pop(9, held.may_go).tolist() == [2, 1]
    assert held.stamps[WORDS] == 1


def test_the_oldest_stamp_is_that_of_the_one_wanted_longest_ago(held: Held) -> None:
    held.insert(1, 2, 3)
    held.use(3)
    held.touch(2)
    assert held.oldest_stamp() == held.stamps[1] == held.stamps[[1, 2, 3]].min()


steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "use", "touch", "pop", "pop one", "pin", "forget"]),
        st.lists(st.integers(0, WORDS - 1), unique=True, min_size=1),
        st.booleans(),
    ),
    max_size=60,
)


@given(name=st.sampled_from(sorted(POLICIES)), todo=steps)
def test_any_order_of_calls_keeps_the_accounts(
    name: str, todo: list[tuple[str, list[int], bool]]
) -> None:
    held = Held(name)
    for what, words, known in todo:
        inside = [w for w in words if w in held.held]
        match what:
            case "insert":
                new = [w for w in words if w not in held.held]
                held.insert(*new, prints=[w + 1 for w in new] if known else None)
            case "use":
                held.use(*inside)
            case "touch":
                held.touch(*inside)
            case "pop" | "pop one":
                held.pop(len(words) if what == "pop" else 1)
            case "pin":
                held.pinned = set(words) if known else set()
            case _:
                held.forget(*words)
    held.pinned = set()
    held.pop(WORDS)
    assert not held.held


class Tree:
    """Prompts that share prefixes: node n hangs on PARENTS[n]. Each request names a node and all
    those before it, uses what is there of the leading run and stores the rest."""

    PARENTS = (-1, 0, 1, 2, 1, 4, 5, 0, 7, 8, 8, 10, -1, 12, 13, 14, 13, 16)

    def __init__(self, name: str) -> None:
        self.held = Held(name)
        self.free = list(range(WORDS))
        self.word: dict[int, int] = {}

    def request(self, node: int) -> None:
        chain: list[int] = []
        while node >= 0:
            chain.insert(0, node)
            node = self.PARENTS[node]
        missing = [n for n in chain if n not in self.word]
        if missing:
            self.word.update((n, self.free.pop()) for n in missing)
            words = [self.word[n] for n in missing]
            self.held.insert(*words, prints=[n + 1 for n in missing])
        # Which also puts those before what was just stored in front of it.
        self.held.touch(*(self.word[n] for n in chain))
        used = [n for n in chain if n not in missing]
        if used:
            self.held.use(*(self.word[n] for n in used))

    def orphans_after_pop(self, count: int) -> list[int]:
        """Nodes that stayed while what is before them went."""
        gone = set(self.held.pop(count))
        self.free += sorted(gone)
        self.word = {n: w for n, w in self.word.items() if w not in gone}
        return [n for n in self.word if self.PARENTS[n] >= 0 and self.PARENTS[n] not in self.word]


@given(
    name=st.sampled_from(sorted(POLICIES)),
    todo=st.lists(
        st.one_of(
            st.tuples(st.just("request"), st.integers(0, len(Tree.PARENTS) - 1)),
            st.tuples(st.just("pop"), st.integers(1, 6)),
        ),
        max_size=80,
    ),
)
def test_no_block_outlives_those_before_it(name: str, todo: list[tuple[str, int]]) -> None:
    tree = Tree(name)
    for what, number in todo:
        if what == "request":
            tree.request(number)
        else:
            assert not tree.orphans_after_pop(number)

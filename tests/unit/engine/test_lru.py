"""Lru against the order of use, kept in a list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from numpy.typing import NDArray

from kvstore.engine.memory import policies
from kvstore.engine.memory.policies import Lru

WORDS = 20


@pytest.fixture(autouse=True, params=[2, 1024], ids=["short queue", "long queue"])
def queue_min(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short queue it is made again and again; with a long one it holds everything."""
    monkeypatch.setattr(policies, "_QUEUE_MIN", request.param)


class Checked:
    """An Lru and a list in order of use that must agree."""

    def __init__(self) -> None:
        self.stamps = np.zeros(WORDS, dtype=np.int64)
        members = np.ones(WORDS, dtype=bool)
        self.lru = Lru(self.stamps, members=lambda: members, slot_count_max=WORDS)
        self.next_stamp = 1
        self.order: list[int] = []
        self.pinned: set[int] = set()
        self.pinned_since_use: set[int] = set()

    def touch(self, *words: int) -> None:
        """What is not held yet comes in."""
        these, stamps = np.array(words, dtype=np.int64), self.next_stamp + np.arange(len(words))
        held = np.isin(these, self.order)
        self.lru.insert(these[~held], stamps[~held], these[~held].astype(np.uint64))
        self.lru.touch(these[held], stamps[held])
        self.next_stamp += len(words)
        self.order = [w for w in self.order if w not in words] + list(words)
        self.pinned_since_use -= set(words) - self.pinned

    def pin(self, *words: int) -> None:
        self.pinned = set(words)
        self.pinned_since_use |= self.pinned

    def pop(self, count: int) -> list[int]:
        def may_go(words: NDArray[np.int64] | slice) -> NDArray[np.bool_]:
            return ~np.isin(np.arange(WORDS)[words], list(self.pinned))

        got: list[int] = self.lru.pop(count, may_go).tolist()
        may = [w for w in self.order if w not in self.pinned]
        assert len(got) == min(count, len(may)), "all that is wanted and there"
        assert set(got) <= set(may), "pinned, or not held"
        assert len(set(got)) == len(got), "twice"
        # One that was pinned when the queue was made may wait for the next queue; others may not.
        for victim in got:
            older = self.order[: self.order.index(victim)]
            assert set(older) <= set(got) | self.pinned | self.pinned_since_use, "a younger one"
        if not self.pinned_since_use:
            assert got == may[:count]
        self.forgotten(*got)
        return got

    def forget(self, *words: int) -> None:
        """As `Slots.free` does it."""
        self.stamps[np.array(words, dtype=np.int64)] = 0
        self.forgotten(*words)

    def forgotten(self, *words: int) -> None:
        self.order = [w for w in self.order if w not in words]

    def check_oldest(self) -> None:
        oldest = int(self.stamps[self.order[0]]) if self.order else None
        stamps = self.stamps[self.stamps > 0]
        assert (int(stamps.min()) if len(stamps) else None) == oldest


steps = st.lists(
    st.tuples(
        st.sampled_from(["touch", "pop", "pop one", "pin", "unpin", "forget"]),
        st.lists(st.integers(0, WORDS - 1), unique=True, min_size=1),
    ),
    max_size=60,
)


# What is used while it waits to go; pinned when the queue is made, or after it was chosen; all is
# pinned; forgotten, and one that comes back as new.
@example([("touch", [1, 2, 3, 4]), ("pop one", [0]), ("touch", [2]), ("pop", [0, 1]), ("pop", [0])])
@example([("touch", [1, 2, 3, 4]), ("pin", [1, 2]), ("pop one", [0]), ("unpin", [0]), ("pop", [0])])
@example([("touch", [1, 2, 3, 4]), ("pop one", [0]), ("pin", [2, 3]), ("pop", [0, 1, 2, 4])])
@example([("touch", [*range(WORDS)]), ("pin", [*range(WORDS)]), ("pop", [1, 2, 3])])
@example([("touch", [1, 2, 3, 4]), ("pop one", [0]), ("forget", [2, 4]), ("pop", [1, 2, 3])])
@example([("touch", [1, 2, 3]), ("forget", [1]), ("touch", [1]), ("pop", [1, 2, 3])])
@given(steps)
def test_behaves_like_a_list_in_order_of_use(todo: list[tuple[str, list[int]]]) -> None:
    lru = Checked()
    for what, words in todo:
        match what:
            case "touch":
                lru.touch(*words)
            case "pop":
                lru.pop(len(words))
            case "pop one":
                lru.pop(1)
            case "pin":
                lru.pin(*words)
            case "unpin":
                lru.pin()
            case _:
                lru.forget(*words)
        lru.check_oldest()


def test_one_that_was_passed_over_goes_before_what_is_younger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "_QUEUE_MIN", 1024)
    lru = Checked()
    lru.touch(*range(WORDS))
    assert lru.pop(1) == [0]
    lru.pin(1)
    assert lru.pop(1) == [2]
    lru.pin()
    assert lru.pop(2) == [1, 3]


def test_the_queue_of_what_comes_in_old_and_goes_otherwise_does_not_grow_for_ever() -> None:
    lru = Checked()
    lru.touch(*range(WORDS // 2, WORDS))
    assert lru.pop(1) == [WORDS // 2]
    for stamp in range(-100 * WORDS, 0):
        lru.lru.insert(np.array([1]), np.array([stamp]), np.zeros(1, dtype=np.uint64))
        lru.forget(1)
    assert lru.lru._oldest._queue.shape[1] <= 2 * WORDS
    assert lru.pop(1) == [WORDS // 2 + 1]

"""When another node process is started, with what, and when no more."""

from __future__ import annotations

from kvstore.supervisor.child import (
    DEATHS_MAX,
    PAUSES_NS,
    REFUSAL_PAUSES_NS,
    SOON_NS,
    WARM_ATTEMPTS_MAX,
    Again,
    Restarts,
)


def test_the_first_death_is_followed_at_once_and_with_everything() -> None:
    assert Restarts().ended(served_ns=1) == Again(0, keep=True)
    assert Restarts().ended(served_ns=SOON_NS + 1) == Again(0, keep=True)


def test_deaths_soon_after_the_start_wait_longer_and_end() -> None:
    restarts = Restarts()
    outcomes = [restarts.ended(served_ns=1) for _ in range(DEATHS_MAX + 1)]
    pauses = [again.pause_ns for again in outcomes if isinstance(again, Again)]
    assert len(pauses) == DEATHS_MAX
    assert pauses == sorted(pauses)
    assert pauses[-1] == PAUSES_NS[-1]
    assert outcomes[-1] is None


def test_a_process_that_served_long_begins_the_count_anew() -> None:
    restarts = Restarts()
    for _ in range(10 * DEATHS_MAX):
        assert restarts.ended(served_ns=1) == Again(0, keep=True)
        assert isinstance(restarts.ended(served_ns=1), Again)
        assert restarts.ended(served_ns=SOON_NS + 1) == Again(0, keep=True)


def test_memory_with_which_none_comes_to_serve_is_let_go() -> None:
    restarts = Restarts()
    kept = []
    for _ in range(WARM_ATTEMPTS_MAX + 1):
        again = restarts.ended(served_ns=0)
        assert isinstance(again, Again)
        kept.append(again.keep)
    assert kept == [True] * (WARM_ATTEMPTS_MAX - 1) + [False] * 2
    assert restarts.ended(served_ns=1) == Again(PAUSES_NS[3], keep=True), "one that served"


def test_one_that_says_why_it_cannot_start_is_tried_for_ever_with_all_that_was_kept() -> None:
    restarts = Restarts()
    outcomes = [restarts.refused() for _ in range(10 * DEATHS_MAX)]
    assert all(again.keep for again in outcomes)
    pauses = [again.pause_ns for again in outcomes]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (REFUSAL_PAUSES_NS[0], REFUSAL_PAUSES_NS[-1])
    assert restarts.ended(served_ns=0) == Again(0, keep=True), "nor does it count for others"
    assert restarts.refused().pause_ns == REFUSAL_PAUSES_NS[0]

"""A name that two living processes have; one that a dead one left is not among them."""

from __future__ import annotations

from kvstore.index.feed import NAMES_MAX, RIVAL_MS, Rivals
from kvstore.types import Incarnation

ONE, OTHER = Incarnation(1), Incarnation(2)


def test_a_process_that_dials_again_after_it_was_refused_is_alive() -> None:
    rivals = Rivals()
    assert not rivals.refused("n1", ONE, "10.0.0.1", 1000)
    assert rivals.of("n1", 1000) is None, "a Hello of a dead process may come late"
    assert rivals.refused("n1", ONE, "10.0.0.1", 1000 + RIVAL_MS)
    assert rivals.of("n1", 1000 + RIVAL_MS) == "10.0.0.1"
    assert rivals.names(1000 + 2 * RIVAL_MS) == ["n1"]
    assert rivals.names(1001 + 2 * RIVAL_MS) == []
    assert rivals.of("n2", 1000) is None


def test_processes_that_follow_each_other_are_no_rivals() -> None:
    rivals = Rivals()
    assert not rivals.refused("n1", ONE, "h", 0)
    assert not rivals.refused("n1", OTHER, "h", 1)
    assert not rivals.refused("n1", OTHER, "h", 2 + RIVAL_MS), "a minute later, say"


def test_no_more_names_are_kept_than_there_is_room_for() -> None:
    rivals = Rivals()
    for number in range(NAMES_MAX + 10):
        for _ in range(2):
            rivals.refused(str(number), ONE, "h", 0)
    names = rivals.names(0)
    assert len(names) == NAMES_MAX
    assert "0" not in names

"""Who of those that dial in may stay."""

from __future__ import annotations

from kvstore.transport.guests import ADMITTED_MAX, ARRIVING_MAX, NODE_MAX, QUIET_NS, Guests


def _full() -> Guests[int]:
    """With as many as are admitted; each was heard at its number."""
    guests: Guests[int] = Guests()
    for number in range(ADMITTED_MAX):
        guests.arrive(number)
        assert guests.admit(number, "", number) is None
    return guests


def test_the_oldest_that_arrives_goes_for_the_newest() -> None:
    guests: Guests[int] = Guests()
    for number in range(ARRIVING_MAX):
        assert guests.arrive(number) is None
    assert guests.arrive(-1) == 0
    guests.leave(0)
    assert guests.arrive(-2) == 1


def test_those_that_arrive_take_no_place_of_those_that_are_admitted() -> None:
    guests: Guests[int] = Guests()
    for number in range(2 * ARRIVING_MAX):
        if (gone := guests.arrive(number)) is not None:
            guests.leave(gone)
    assert guests.admit(2 * ARRIVING_MAX - 1, "", 0) is None
    assert len(guests.everybody) == ARRIVING_MAX


def test_who_has_been_quiet_longest_goes_when_room_is_needed_and_nobody_heard_lately() -> None:
    guests = _full()
    guests.arrive(-1)
    assert guests.admit(-1, "", QUIET_NS - 1) == -1
    guests.leave(-1)
    assert guests.everybody == list(range(ADMITTED_MAX))
    guests.heard(0, ADMITTED_MAX)
    guests.arrive(-1)
    assert guests.admit(-1, "", QUIET_NS + 1) == 1
    guests.leave(1)
    assert guests.everybody == [*range(2, ADMITTED_MAX), 0, -1]
    assert 1 not in guests
    assert -1 in guests


def test_every_node_of_a_large_cluster_has_room_whatever_one_of_them_does() -> None:
    guests: Guests[int] = Guests()
    for number in range(1000):
        guests.arrive(number)
        assert guests.admit(number, f"n{number}", 0) is None
    for number in range(1000, 5000):
        guests.arrive(number)
        if (gone := guests.admit(number, "greedy", 0)) is not None:
            assert gone == number - NODE_MAX, "its own, the longest quiet"
            guests.leave(gone)
    guests.arrive(-1)
    assert guests.admit(-1, "n1000", 0) is None
    assert len(guests.everybody) == 1001 + NODE_MAX


def test_of_its_own_connections_a_node_loses_the_one_that_was_quiet_longest() -> None:
    guests: Guests[int] = Guests()
    for number in range(NODE_MAX):
        guests.arrive(number)
        guests.admit(number, "n", number)
    guests.heard(0, NODE_MAX)
    guests.arrive(-1)
    assert guests.admit(-1, "n", NODE_MAX) == 1

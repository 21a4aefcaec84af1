"""When a transfer worker is killed, without one."""

from __future__ import annotations

import pytest

from kvstore.peers.transfer_worker import (
    GRACE_NS,
    LIMBO_DIVISOR,
    LONG_NS,
    PAUSES_NS,
    SILENT_NS,
    START_NS,
    Recycle,
    Watch,
    WatchedTransfer,
)
from kvstore.units import NS_PER_S

ARENA = 1 << 30


@pytest.fixture
def watch() -> Watch:
    made = Watch(arena_bytes=ARENA)
    made.began(0)
    made.heard(0)
    return made


def _post(watch: Watch, number: int, *, size: int = 1, deadline_ns: int = NS_PER_S) -> None:
    its = WatchedTransfer(f"peer-{number}", size, deadline_ns, lambda _: None)
    watch.transfers[number] = its


@pytest.mark.parametrize("is_late", [False, True])
def test_what_ends_in_time_or_once_it_is_forgotten_costs_no_transfer_worker(
    watch: Watch, *, is_late: bool
) -> None:
    _post(watch, 1)
    assert watch.look(NS_PER_S - (not is_late)) == ({"peer-1"} if is_late else set())
    del watch.transfers[1]
    assert watch.look(NS_PER_S + GRACE_NS) == set()


def test_a_late_one_is_forgotten_first_and_then_the_transfer_worker_is_recycled(
    watch: Watch,
) -> None:
    _post(watch, 1)
    assert watch.next_ns() <= NS_PER_S
    assert watch.look(NS_PER_S) == {"peer-1"}
    assert watch.look(NS_PER_S + GRACE_NS - 1) == set()
    assert watch.next_ns() <= NS_PER_S + GRACE_NS
    assert isinstance(watch.look(NS_PER_S + GRACE_NS), Recycle)
    watch.died(2 * NS_PER_S)
    watch.began(3 * NS_PER_S)
    assert watch.look(3 * NS_PER_S) == set()


def test_limbo_is_borne_up_to_a_share_of_the_arena(watch: Watch) -> None:
    _post(watch, 1, size=ARENA // LIMBO_DIVISOR)
    _post(watch, 2, size=1)
    watch.in_limbo(1)
    assert watch.look(1) == set()
    watch.in_limbo(2)
    assert isinstance(watch.look(2), Recycle)


def test_silence_is_the_end(watch: Watch) -> None:
    for second in range(1, 5):
        assert watch.look(second * NS_PER_S) == set()
    assert isinstance(watch.look(SILENT_NS), Recycle)


def test_beats_are_no_silence(watch: Watch) -> None:
    for second in range(1, 60):
        watch.heard(second * NS_PER_S)
        assert watch.look(second * NS_PER_S) == set()


def test_a_look_that_comes_late_says_nothing_about_beats(watch: Watch) -> None:
    assert watch.look(100 * NS_PER_S) == set()
    assert watch.look(101 * NS_PER_S) == set()


def test_a_start_may_take_longer() -> None:
    watch = Watch(arena_bytes=ARENA)
    watch.began(0)
    for second in range(1, START_NS // NS_PER_S):
        assert watch.look(second * NS_PER_S) == set()
    assert isinstance(watch.look(START_NS), Recycle)


def test_one_that_dies_again_and_again_is_started_less_and_less() -> None:
    watch = Watch(arena_bytes=ARENA)
    pauses = []
    for death in range(8):
        watch.began(death * NS_PER_S)
        pauses.append(watch.died(death * NS_PER_S + 1))
    assert tuple(pauses) == PAUSES_NS + PAUSES_NS[-1:] * 2
    watch.began(100 * NS_PER_S)
    assert watch.died(100 * NS_PER_S + LONG_NS + 1) == PAUSES_NS[0]

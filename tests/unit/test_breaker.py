"""When the cache is off, and for how long."""

from __future__ import annotations

from kvstore.breaker import Breaker
from kvstore.units import NS_PER_S


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(failures_max=3, cooldown_ms=1000)
    for _ in range(5):
        breaker.failed(0)
        breaker.failed(0)
        breaker.succeeded()
    assert not breaker.is_open
    assert [breaker.failed(0) for _ in range(3)] == [False, False, True]
    assert not breaker.allows(NS_PER_S - 1)
    assert breaker.allows(NS_PER_S)


def test_what_fails_while_it_is_open_does_not_lengthen_the_wait() -> None:
    breaker = Breaker(failures_max=3, cooldown_ms=1000)
    for _ in range(30):
        breaker.failed(0)
    assert breaker.allows(NS_PER_S)


def test_each_failed_probe_doubles_the_wait_up_to_32_times() -> None:
    breaker = Breaker(failures_max=1, cooldown_ms=1000)
    now_ns = 0
    breaker.failed(now_ns)
    waits = []
    for _ in range(8):
        begin_ns = now_ns
        while not breaker.allows(now_ns):
            now_ns += NS_PER_S // 2
        waits.append((now_ns - begin_ns) // NS_PER_S)
        breaker.failed(now_ns)
    assert waits == [1, 2, 4, 8, 16, 32, 32, 32]
    while not breaker.allows(now_ns):
        now_ns += NS_PER_S
    breaker.succeeded()
    assert breaker.allows(now_ns)


def test_a_probe_that_began_closes_it_until_the_next_failure_which_opens_it_for_longer() -> None:
    breaker = Breaker(failures_max=3, cooldown_ms=1000)
    for _ in range(3):
        breaker.failed(0)
    for doubling in (1, 2, 3):
        now_ns = 10**12 * doubling
        assert breaker.allows(now_ns)
        breaker.begun()
        assert not breaker.is_open
        assert breaker.failed(now_ns)
        assert not breaker.may_allow(now_ns + 10**9 * 2**doubling - 1)
        assert breaker.may_allow(now_ns + 10**9 * 2**doubling)
    breaker.succeeded()
    breaker.begun()
    assert not breaker.failed(0)

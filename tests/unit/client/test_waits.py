"""How long to wait for blocks on their way, and what waits in vain may cost together."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from kvstore.client.core.costs import (
    ADVANCE_SHARE,
    MEMORY_NS,
    ODDS_MAX,
    VAIN_SHARE,
    BlockWait,
    Odds,
    WaitAccount,
)
from kvstore.units import NS_PER_MS

MS = NS_PER_MS


def odds(*ratios: float) -> Odds:
    made = Odds()
    for ratio in ratios:
        made.ended(ratio)
    return made


# ── what is expected ─────────────────────────────────────────────────────────────────────────────


def test_a_wait_that_outlasts_all_others_may_take_as_long_again() -> None:
    assert odds().patience_ns(10, 100) == 100
    assert odds(0.5, 1.5).patience_ns(10, 100) == 100


def test_a_wait_ends_where_only_those_are_left_that_took_much_longer() -> None:
    """Nine of ten reads take 10 ms, the tenth a second: who has waited 10 ms knows which it is."""
    disk = odds(*[1.0] * 21, 100.0, 100.0, 100.0)
    assert disk.patience_ns(10, 400) == 10
    assert disk.patience_ns(10, 1000) == 1000, "still less than computing"


def test_a_place_that_disappointed_is_tried_again() -> None:
    disk = odds(*[1000.0] * (ODDS_MAX + 1))
    assert disk.patience_ns(1, 100) == 0
    refused = 0
    while not disk.patience_ns(1, 100):
        disk.forget()
        refused += 1
    assert 0 < refused < ODDS_MAX, "fewer than were in vain"


# ── what it may cost ─────────────────────────────────────────────────────────────────────────────


def test_half_of_the_saving_is_lent_and_a_debt_leaves_the_own_share() -> None:
    account = WaitAccount()
    account.weighed(100, 0)
    first = BlockWait(account, 100, 10, 0)
    assert first.until_ns == 54, "half, and 4 %"
    first.ended(0, 54)
    account.weighed(100, 0)
    assert account.balance_ns == pytest.approx(-46)
    assert BlockWait(account, 100, 1, 0).until_ns == 4


def test_those_who_wait_together_share_the_balance() -> None:
    account = WaitAccount()
    account.weighed(1000, 0)  # earns 40
    waits = [BlockWait(account, 100, 10, 0) for _ in range(4)]
    assert [wait.until_ns for wait in waits] == [90, 70, 63, 60]
    for wait in waits:
        wait.dropped()
    assert BlockWait(account, 100, 10, 0).until_ns == 90, "who is gone waits no more"


def test_old_riches_and_old_debts_fade() -> None:
    for sign in (1, -1):
        account = WaitAccount()
        account.weighed(0, 0)
        account.balance_ns = sign * 100.0
        account.weighed(0, MEMORY_NS)
        assert account.balance_ns == pytest.approx(sign * 100 / math.e)


def test_what_arrives_prolongs_a_wait_and_what_it_saved_is_no_loss() -> None:
    account = WaitAccount()
    account.weighed(0, 0)
    wait = BlockWait(account, 1000, 800, 0)
    assert wait.until_ns == 500
    wait.arrived(400, 600, 0, 450)
    assert wait.until_ns == 900, "half of its saving, and what it saved by now"
    wait.ended(0, 900)
    assert account.balance_ns == -500


@pytest.mark.parametrize(
    ("came", "left", "ratio"),
    [(1000, 0, 2.0), (0, 1000, 4.0), (500, 500, 3.0)],
)
def test_what_did_not_come_is_taken_to_need_as_long_again(
    came: int, left: int, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, seen = WaitAccount(), list[float]()
    monkeypatch.setattr(account.odds, "ended", seen.append)
    wait = BlockWait(account, 1000 * MS, 10 * MS, 0)
    if came:
        wait.arrived(came * MS, left * MS, 0, 10 * MS)
    wait.ended(0, 20 * MS)
    assert seen == [pytest.approx(ratio)]


# ── requests that come together ──────────────────────────────────────────────────────────────────


def test_while_others_are_computed_a_wait_costs_nothing() -> None:
    account = WaitAccount()
    assert not account.may_wait(estimate_ns=150, saving_ns=100)
    assert account.may_wait(estimate_ns=150, saving_ns=100, queued_ns=100)
    wait = BlockWait(account, 100, 150, 0, queued_ns=200, queue_ns_max=200)
    assert wait.until_ns == 250, "its turn, and half of its saving"
    wait.ended(0, 200)
    assert account.balance_ns == 0


def test_a_wait_that_came_to_its_end_looks_who_has_begun_to_compute() -> None:
    account = WaitAccount()
    account.balance_ns = 1000.0
    wait = BlockWait(account, 100, 10, 0, queue_ns_max=300)
    assert wait.until_ns == 100, "nobody computes, so it would be the next one"
    assert not wait.is_over(100, 100)
    assert wait.until_ns == 200, "the one before it gave up"
    assert wait.is_over(0, 200)
    assert wait.ended(0, 200) == 0, "it is done no later than in its turn"


def test_a_queue_that_is_computed_sooner_than_expected_ends_the_wait() -> None:
    """Its steps are larger, or a request before it was aborted: the engine has nothing to do."""
    account = WaitAccount()
    wait = BlockWait(account, 100, 450, 0, queued_ns=1000, queue_ns_max=1000)
    assert wait.until_ns > 1000
    assert not wait.is_over(500, 500)
    assert wait.until_ns > 1000, "as expected"
    assert wait.is_over(0, 600), "its rest is expected to take longer than computing it"


def test_those_who_come_later_do_not_pass_it_for_ever() -> None:
    account = WaitAccount()
    wait = BlockWait(account, 100, 10, 0, queued_ns=50, queue_ns_max=50)
    for now_ns in range(0, 1000, 10):
        wait.look_at_queue(10_000, now_ns)
    assert wait.until_ns <= 50 + 100
    assert wait.ended(10_000, 150) == 150, "they are in front of it now"
    slow = BlockWait(WaitAccount(), 100, 450, 0, queued_ns=50, queue_ns_max=50)
    assert slow.is_over(10_000, 60), "its turn is over, and the rest takes long"


def test_what_is_late_was_expected_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node says that no block will come any more: nothing is left, and none came."""
    account, seen = WaitAccount(), list[float]()
    monkeypatch.setattr(account.odds, "ended", seen.append)
    wait = BlockWait(account, 1000 * MS, 500 * MS, 0)
    wait.arrived(0, 0, 0, 2000 * MS)
    wait.ended(0, 2000 * MS)
    assert seen == [4.0]


requests = st.lists(
    st.tuples(
        st.integers(1, 1000).map(lambda ms: ms * MS),  # computing it
        st.floats(0.0, 3.0),  # the estimate, of that
        st.floats(0.0, 100.0),  # what it really takes, of the estimate
        st.integers(0, 10_000).map(lambda ms: ms * MS),  # until the next one comes
    ),
    max_size=60,
)


@given(requests)
def test_waits_in_vain_stay_within_their_share_but_for_what_was_lent(
    run: list[tuple[int, float, float, int]],
) -> None:
    """One by one, and with a memory that forgets nothing: whatever the estimates are worth."""
    account, now_ns = WaitAccount(), 0
    lost = earned = lent = 0.0
    for compute_ns, estimate, really, pause_ns in run:
        account.weighed(compute_ns, 0)  # no time passes for the account
        earned += compute_ns / VAIN_SHARE
        lent = max(lent, compute_ns / ADVANCE_SHARE)
        estimate_ns = estimate * compute_ns
        if account.odds.patience_ns(estimate_ns, compute_ns):
            wait = BlockWait(account, compute_ns, estimate_ns, now_ns)
            end_ns = now_ns + int(really * estimate_ns)
            took_ns = min(end_ns, wait.until_ns) - now_ns
            came = compute_ns if end_ns <= wait.until_ns else 0
            if came:
                wait.arrived(came, 0, 0, end_ns)
            wait.ended(0, now_ns + took_ns)
            assert took_ns <= compute_ns + 1
            lost += max(0, took_ns - came)
        else:
            account.odds.forget()
        now_ns += pause_ns
        assert lost <= earned + lent + len(run)
    assert account.waiting == 0

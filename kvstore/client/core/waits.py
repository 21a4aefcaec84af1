"""Waits for blocks that are on their way from disk or from another node: how long one lasts.

    begun ──blocks arrive: less is left to come, and less to compute──▶ all came
      └── computing the rest is expected to be quicker, or the account is empty ──▶ given up

The rest of a wait is expected from the estimate and from how earlier waits compared with theirs: of
those that took longer than this one so far, the mean of what they took beyond. Without any such, it
is expected to take as long again (the waiting time of Lindy's law, as for a heavy tail).

A request that computes has its turn after those before it. So a wait is compared with the time that
these take and the request's own: while the engine computes others, it delays nothing. A wait that
has come to its end looks at the queue once more, since another one may have given up meanwhile,
which computes now. Requests that come together are loaded as far as their blocks come sooner than
their turn to be computed would have ended, and the first of them is the first to give up. Later
requests are not counted, or they would pass this one for ever.

Expectations err, so each source has an account. A load that is weighed earns VAIN_SHARE of the time
to compute its request in its turn; a wait after which this would have been sooner spends the
difference. In debt, a wait risks only its own earnings; otherwise an advance of half its saving,
and its part of the balance. So the time lost to waits stays within that share of the compute time,
over some minutes, but for the advance to the first request that meets a source which has become
slow.

No wait loses more than computing takes, as with ski rental (Karlin et al., 1988).
Pure. Does not cover: the estimate (`kvstore.engine.moves.jobs`).
"""

from __future__ import annotations

import math
from collections import deque

from kvstore.units import NS_PER_MS, NS_PER_S

VAIN_SHARE = 25
"""1 / VAIN_SHARE of the compute time may be waited in vain: 4 %, which leaves the rest of 5 % to
all other costs of a lookup."""
ADVANCE_SHARE = 2
"""Without a debt, a wait may lose 1 / ADVANCE_SHARE of its saving in advance."""
MEMORY_NS = 120 * NS_PER_S
"""Time in which a balance, or a debt, fades to a third."""
SOONER = 7 / 8
"""The end of a wait is set anew when the queue will end in less than this share of the time that
was expected."""
ODDS_MAX = 32
"""Waits that are remembered."""
FIRST_ODDS = (0.25, 0.5, 0.5, 0.75, 1.0, 1.0, 1.5, 2.5)
"""Assumed earlier waits: as estimated on average, and spread, as queues spread them."""


class Odds:
    """How long earlier waits took, each as a ratio to its estimate."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(FIRST_ODDS, maxlen=ODDS_MAX)

    def ended(self, ratio: float) -> None:
        """A wait took `ratio` of its estimate."""
        self._ratios.append(ratio)

    def forget(self) -> None:
        """A load was not waited for: replace the longest wait that is remembered by one that took
        as long as estimated. A source that is never tried would stay as bad as it was."""
        self._ratios.remove(max(self._ratios))
        self._ratios.append(1.0)

    def patience_ns(self, estimate_ns: float, worth_ns: float) -> float:
        """How long to wait, from the last arrival on, for blocks that take about `estimate_ns` to
        come and `worth_ns` to compute: until the rest of the wait is expected to be longer than
        that; 0: not at all."""
        times = sorted(ratio * estimate_ns for ratio in self._ratios)
        beyond = sum(times)
        passed = 0.0
        for place, time in enumerate(times):
            left = len(times) - place
            if beyond / left - passed >= worth_ns:
                return passed
            passed, beyond = time, beyond - time
        return max(passed, worth_ns)


class WaitAccount:
    """Account of one source of blocks: time that waits for it may lose, and time that they lost."""

    def __init__(self) -> None:
        self.odds = Odds()
        self.balance_ns = 0.0
        self.waiting = 0
        self._faded_ns = 0

    def weighed(self, compute_ns: float, now_ns: int) -> None:
        """Credit the account with its share of `compute_ns`: a load was weighed against computing
        for so long, whatever was decided."""
        self.balance_ns *= math.exp((self._faded_ns - now_ns) / MEMORY_NS)
        self._faded_ns = now_ns
        self.balance_ns += compute_ns / VAIN_SHARE

    def risk_ns(self, saving_ns: float) -> float:
        """Longest time that a wait may lose which may save `saving_ns`."""
        if self.balance_ns < 0:
            return saving_ns / VAIN_SHARE
        return min(saving_ns, saving_ns / ADVANCE_SHARE + self.balance_ns / (self.waiting + 1))

    def may_wait(self, estimate_ns: float, saving_ns: float, queued_ns: float = 0.0) -> bool:
        """Whether to begin a wait of about `estimate_ns` that saves `saving_ns`, while `queued_ns`
        of other computing comes first. In debt it has to be expected to end within what it may
        lose: waits that are declined pay the debt back, waits that lose every time never would."""
        worth_ns = saving_ns if self.balance_ns >= 0 else self.risk_ns(saving_ns)
        return self.odds.patience_ns(estimate_ns, worth_ns + queued_ns) > 0


class BlockWait:
    """One request's wait for blocks that are on their way."""

    __slots__ = (
        "_account",
        "_arrived_ns",
        "_begun_ns",
        "_estimate_ns",
        "_left_ns",
        "_risk_ns",
        "_saved_ns",
        "_saving_ns",
        "_sooner_ns",
        "queue_ns_max",
        "until_ns",
    )

    def __init__(
        self,
        account: WaitAccount,
        saving_ns: float,
        estimate_ns: float,
        now_ns: int,
        *,
        lost_ns: float = 0.0,
        queued_ns: float = 0.0,
        queue_ns_max: float = 0.0,
    ) -> None:
        """For blocks that save `saving_ns` of computing and take about `estimate_ns`.

        Args:
            account: of their source.
            saving_ns, estimate_ns, now_ns: see above.
            lost_ns: by earlier waits of the same request.
            queued_ns: of computing that comes before its own.
            queue_ns_max: the same if none of those that wait now got a block.
        """
        self._account = account
        self._begun_ns = self._arrived_ns = now_ns
        self._saving_ns, self._estimate_ns = saving_ns, estimate_ns
        self._risk_ns = min(account.risk_ns(saving_ns), max(0.0, saving_ns - lost_ns))
        self._saved_ns, self._left_ns = 0.0, saving_ns
        self.queue_ns_max = queue_ns_max
        self.until_ns = now_ns
        """End of the wait if nothing arrives before."""
        self.look_at_queue(queued_ns, now_ns)
        account.waiting += 1

    def arrived(self, came_ns: float, left_ns: float, queued_ns: float, now_ns: int) -> None:
        """Blocks arrived that save `came_ns`; those still on their way save `left_ns`."""
        self._saved_ns += came_ns
        self._left_ns, self._arrived_ns = left_ns, now_ns
        self.look_at_queue(queued_ns, now_ns)

    def is_over(self, queued_ns: float, now_ns: int) -> bool:
        """Whether the wait is over, so that the request computes the blocks that have not come.
        `queued_ns`: time for the computing that still comes before the request's own."""
        if now_ns >= self.until_ns or now_ns + queued_ns < self._sooner_ns:
            self.look_at_queue(queued_ns, now_ns)
        return now_ns >= self.until_ns

    def look_at_queue(self, queued_ns: float, now_ns: int) -> None:
        """Set the end of the wait anew: `queued_ns` of computing comes before the request's own."""
        turn_ns = self._begun_ns + self.queue_ns_max
        queued_ns = max(0.0, min(queued_ns, turn_ns - now_ns))
        self._sooner_ns = now_ns + queued_ns * SOONER
        expected_ns = self._expected_ns(self._left_ns)
        patience_ns = self._account.odds.patience_ns(expected_ns, self._left_ns + queued_ns)
        end_ns = turn_ns + self._risk_ns + self._saved_ns
        self.until_ns = int(min(self._arrived_ns + patience_ns, end_ns))

    def ended(self, queued_ns: float, now_ns: int) -> float:
        """The wait is over: all blocks came, or the rest is computed. Charges the account with the
        time lost, in ns, and returns it."""
        took_ns = now_ns - self._begun_ns
        # Where none will come any more, nothing is left, and all were expected.
        expected_ns = self._expected_ns(self._saved_ns + self._left_ns or self._saving_ns)
        # The rest would have taken as long again, as far as is known.
        rest_ns = now_ns - self._arrived_ns if self._left_ns else 0
        self._account.odds.ended((took_ns + rest_ns) / max(expected_ns, NS_PER_MS))
        queued_ns = min(queued_ns, self.queue_ns_max)
        lost_ns = max(0.0, took_ns + queued_ns - self.queue_ns_max - self._saved_ns)
        self._account.balance_ns -= lost_ns
        self.dropped()
        return lost_ns

    def dropped(self) -> None:
        """Stop counting this wait; called alone if its request is gone, which says nothing about
        the source."""
        self._account.waiting -= 1

    def _expected_ns(self, saving_ns: float) -> float:
        """Estimated time until blocks have come that save `saving_ns`."""
        return self._estimate_ns * saving_ns / self._saving_ns

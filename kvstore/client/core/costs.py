"""Load or compute: what the engine measures of itself, and what follows for a request (ADR 6).

    loads_pay     a copy from dram takes less than computing: otherwise no lookup is sent
    answer_ns     how long to wait for the node's answer
    wait          for blocks that are on their way: those that come in time are loaded, the rest is
                  computed

**Paces.** A step that computes many tokens has a number, which ranks report when they have run it.
Its time begins with its plan, or with the report of the step before if that one was still running
(async scheduling, vLLM's default), and ends with its own report. Ranks time their copies. Both
estimates are medians of the last few values, so that one slow step does not count.

**Waits** for blocks on their way from disk or from another node:

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
slow. No wait loses more than computing takes, as with ski rental (Karlin et al., 1988).

Pure. Does not cover: the estimates of disks and nodes (`kvstore.engine.moves.jobs`).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from kvstore.client.core.plan import SchedulerConfig
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.load import COMPUTE_NS_MAX, COMPUTE_NS_MIN, LOAD_NS_MAX, LOAD_NS_MIN, clamp
from kvstore.wire.messages import Measured, SessionOpen

# ── waits ─────────────────────────────────────────────────────────────────────────────────────────

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


# ── paces ─────────────────────────────────────────────────────────────────────────────────────────

STEP_TOKENS_MIN = 256
"""Fewest tokens of a step that is timed: shorter ones are mostly overhead and decoding."""
STEPS_MAX = 32
"""Steps that have been planned and not reported; no engine plans as far ahead."""
SAMPLES = 15
LOADS_MIN = 3
"""Fewest loads for an estimate: the first copies touch memory for the first time."""
SOURCE_EVERY = 1024
SOURCE_TRIED = 32
"""Loads in a row, of each SOURCE_EVERY, that try the other source: enough for whole batches."""
SOURCE_MEMORY = 256
"""Loads after which an old one counts for a third."""
SOURCE_GAIN = 0.9
"""The other source takes over if it needs less than this share of the time of the one in use."""


class MedianPace:
    """Nanoseconds per token, the median of the last measurements; a guess until there are
    `samples_min` of them."""

    samples_min = 1

    def __init__(self, guess_ns: int = 0) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._guess_ns = guess_ns
        self.is_known = False
        """Whether this engine, or another of its space, has measured."""

    def told(self, guess_ns: int) -> None:
        """Take another engine's measurement: a better guess."""
        self._guess_ns, self.is_known = guess_ns, True

    @property
    def measured_ns(self) -> int:
        """Measured nanoseconds per token; 0: too few measurements yet."""
        return round(median(self._samples)) if len(self._samples) >= self.samples_min else 0

    @property
    def ns_per_token(self) -> float:
        """The measured value, or the guess before there is one."""
        return median(self._samples) if self.measured_ns else float(self._guess_ns)


class Pace(MedianPace):
    """Pace of computing, by the times of steps."""

    def __init__(self, guess_ns: int) -> None:
        super().__init__(guess_ns)
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=STEPS_MAX)
        """(number, tokens, time of the plan) of each step that is not reported yet, in order."""
        self._last = 0
        """Number of the last step."""
        self._ended_ns = 0
        """When a step was reported the last time."""

    def planned(self, tokens: int, now_ns: int) -> int:
        """Count a planned step that computes `tokens` tokens. Returns the number by which ranks
        report it; 0: it is too short to be timed."""
        if tokens < STEP_TOKENS_MIN:
            return 0
        self._last += 1
        self._steps.append((self._last, tokens, now_ns))
        return self._last

    def reported(self, step: int, now_ns: int) -> bool:
        """A rank has run the step of this number. True if it gave a measurement, as the first
        report of each does."""
        while self._steps and self._steps[0][0] <= step:
            number, tokens, begin_ns = self._steps.popleft()
            if number == step:
                self._samples.append((now_ns - max(begin_ns, self._ended_ns)) / tokens)
                self._ended_ns, self.is_known = now_ns, True
                return True
        return False

    def in_flight_ns(self, now_ns: int) -> float:
        """Estimated time until the steps that were planned and not reported have ended."""
        if not self._steps:
            return 0.0
        begin_ns = max(self._steps[0][2], self._ended_ns)
        tokens = sum(tokens for _, tokens, _ in self._steps)
        return max(0.0, tokens * self.ns_per_token - (now_ns - begin_ns))


class LoadPace(MedianPace):
    """Pace of copies from dram; 0, as if they were free, until some were measured."""

    samples_min = LOADS_MIN

    def loaded(self, tokens: int, duration_ns: int) -> None:
        """Count a rank's copy of `tokens` tokens, which took `duration_ns`."""
        if tokens > 0:
            self._samples.append(duration_ns / tokens)


class SourcePace:
    """Choice between hbm and dram as the source of verified loads, by their measured times."""

    def __init__(self) -> None:
        self._spent_ns = {True: 0.0, False: 0.0}
        self._bytes = {True: 0.0, False: 0.0}
        """Sums of loads from hbm (True) and from dram, old ones fading."""
        self._count = 0
        self._prefers_hbm = False

    def takes_hbm(self) -> bool:
        """Whether the next load comes from hbm."""
        is_tried = self._count % SOURCE_EVERY >= SOURCE_EVERY - SOURCE_TRIED
        self._count += 1
        if not is_tried:
            self._choose()
        return self._prefers_hbm != is_tried

    def ended(self, duration_ns: int, size_bytes: int, *, is_hbm: bool) -> None:
        """Count a load of `size_bytes` that took `duration_ns`, its share of its batch's time. Only
        sums are compared: loads of a batch are seen to end together, so one alone says nothing."""
        fade = 1 - 1 / SOURCE_MEMORY
        self._spent_ns[is_hbm] = fade * self._spent_ns[is_hbm] + duration_ns
        self._bytes[is_hbm] = fade * self._bytes[is_hbm] + size_bytes

    def _choose(self) -> None:
        if all(self._bytes.values()):
            hbm, dram = (self._spent_ns[each] / self._bytes[each] for each in (True, False))
            used, other = (hbm, dram) if self._prefers_hbm else (dram, hbm)
            self._prefers_hbm ^= other < used * SOURCE_GAIN


# ── costs ─────────────────────────────────────────────────────────────────────────────────────────

PROBE_EVERY = 16
"""While loads do not pay, one request in PROBE_EVERY makes a short load, to measure again."""
SOURCES_MAX = 64
"""Most sources with an account of waits of their own; while all of these are in debt, all other
sources share one account."""
_MORE_SOURCES = "+"
TOLD_NS_MAX = 2 * NS_PER_S
"""Longest time to compute that a wait is weighed against until this engine has measured its own
pace: the pace of another engine may be wrong here."""
TELL_EVERY = 32
"""Steps measured between two reports to the node."""


class Costs:
    """Measurements of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.compute = Pace(config.prefill_ns_per_token)
        self.load = LoadPace()
        self._accounts: dict[str, WaitAccount] = {}
        """Accounts of waits, by the node that blocks come from; empty: the disk."""
        self.left_tokens = {True: 0, False: 0}
        """Tokens left to compute. True: by requests that do not wait for blocks; a request that
        comes now is computed after them. False: by requests that wait, if no block comes."""
        self._refusals = 0
        self._untold = 0

    def opened(self, message: SessionOpen) -> None:
        """A session begins: the node's values for this space are a better guess than ours."""
        if message.compute_ns_per_token:
            self.compute.told(clamp(message.compute_ns_per_token, COMPUTE_NS_MIN, COMPUTE_NS_MAX))
        if message.load_ns_per_token:
            self.load.told(clamp(message.load_ns_per_token, LOAD_NS_MIN, LOAD_NS_MAX))
        self._untold = TELL_EVERY

    def reported(self, step: int, now_ns: int) -> None:
        """A rank has run the step of this number (`Pace`)."""
        self._untold += self.compute.reported(step, now_ns)

    def take_news(self) -> Measured | None:
        """The report to send to the node now, if any: at the start of a session, then rarely."""
        if self._untold < TELL_EVERY or not self.compute.measured_ns:
            return None
        self._untold = 0
        return Measured(self.compute.measured_ns, self.load.measured_ns)

    def saved_ns(self, tokens: int) -> int:
        """Estimated time to compute `tokens` tokens; 0 until a pace was measured, since a guess is
        no saving."""
        return round(tokens * self.compute.ns_per_token) if self.compute.is_known else 0

    # ── decisions ────────────────────────────────────────────────────────────────────────────────

    @property
    def loads_pay(self) -> bool:
        """Whether a copy from dram takes less than computing. Assumed while no prompt was computed,
        as on an engine that only decodes: a guess is no reason to compute what is here."""
        return not self.compute.is_known or self.load.ns_per_token <= self.compute.ns_per_token

    def is_worth(self, tokens: int) -> bool:
        """Whether a load of `tokens` tokens pays."""
        return self.loads_pay and tokens >= max(self._config.min_load_tokens, 1)

    def may_probe(self, wanted_tokens: int) -> bool:
        """Whether this request makes the shortest load although loads do not pay, to measure again:
        one in PROBE_EVERY, if the load costs next to nothing beside computing `wanted_tokens`."""
        self._refusals += 1
        cost_ns = self.load.ns_per_token * self.least_tokens
        return (
            self._refusals % PROBE_EVERY == 0
            and cost_ns * VAIN_SHARE <= self.compute.ns_per_token * wanted_tokens
        )

    @property
    def least_tokens(self) -> int:
        """The shortest load, in whole blocks."""
        blocks = -(-self._config.min_load_tokens // self._config.block_tokens)
        return max(blocks, 1) * self._config.block_tokens

    def answer_ns(self, wanted_tokens: int) -> int:
        """How long a request that wants `wanted_tokens` waits for the node, or for its answer.

        A share of the time to compute them: twenty milliseconds saved are not worth seconds of
        computing on a machine whose node did not get to run just then. At most the heartbeat
        timeout.
        """
        least_ns = self._config.lookup_deadline_ms * NS_PER_MS
        most_ns = max(least_ns, self._config.heartbeat_timeout_ms * NS_PER_MS)
        share_ns = int(wanted_tokens * self.compute.ns_per_token) // VAIN_SHARE
        return max(least_ns, min(share_ns, most_ns))

    def computing_ns(self, tokens: int) -> float:
        """Estimated time to compute `tokens` tokens, at most TOLD_NS_MAX until this engine has
        measured its own pace."""
        return min(tokens * self.compute.ns_per_token, self._weighed_ns_max)

    def queued_ns(self, now_ns: int) -> float:
        """Estimated time until the engine has computed the queued requests and the running steps,
        and can begin with another request."""
        return self.computing_ns(self.left_tokens[True]) + self.compute.in_flight_ns(now_ns)

    def saving_ns(self, tokens: int) -> float:
        """Time by which loading `tokens` tokens from dram is quicker than computing them."""
        gain_ns = max(0.0, self.compute.ns_per_token - self.load.ns_per_token)
        return min(tokens * gain_ns, self._weighed_ns_max)

    @property
    def _weighed_ns_max(self) -> float:
        return math.inf if self.compute.measured_ns else TOLD_NS_MAX

    def wait(
        self,
        source: str,
        tokens: int,
        estimate_ns: int,
        now_ns: int,
        *,
        lost_ns: float = 0.0,
        is_first: bool = True,
    ) -> BlockWait | None:
        """Begin a wait for `tokens` that come from `source` in about `estimate_ns`; None: computing
        them is expected to be quicker. `lost_ns`: time lost by earlier waits of the request;
        `is_first`: no wait was weighed for this lookup before."""
        account = self._account(source)
        saving_ns, queued_ns = self.saving_ns(tokens), self.queued_ns(now_ns)
        queue_ns_max = queued_ns + self.computing_ns(self.left_tokens[False])
        if is_first:
            account.weighed(queue_ns_max + self.computing_ns(tokens), now_ns)
        elif account.balance_ns < 0:
            return None  # what it may lose in debt is earned once a lookup
        if account.may_wait(estimate_ns, saving_ns, queued_ns):
            return BlockWait(
                *(account, saving_ns, estimate_ns, now_ns),
                lost_ns=lost_ns,
                queued_ns=queued_ns,
                queue_ns_max=queue_ns_max,
            )
        account.odds.forget()
        return None

    def _account(self, source: str) -> WaitAccount:
        """The account of a source. For a new one the least recently used account that owes nothing
        gives way: a name that nobody has used yet is no way out of a debt."""
        if source not in self._accounts and len(self._accounts) >= SOURCES_MAX:
            settled = (name for name, its in self._accounts.items() if its.balance_ns >= 0)
            if (idle := next(settled, None)) is None:
                source = _MORE_SOURCES
            else:
                del self._accounts[idle]
        account = self._accounts.pop(source, None) or WaitAccount()
        self._accounts[source] = account
        return account

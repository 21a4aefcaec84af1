"""Load or compute: savings of a load compared with its cost, from measurements (ADR 6).

    loads_pay     a copy from dram takes less than computing: otherwise no lookup is sent
    answer_ns     how long to wait for the node's answer
    wait          for blocks that are on their way: those that come in time are loaded, the rest is
                  computed (`waits`)

Pure. Does not cover: the estimates of disks and nodes (`kvstore.engine.moves.jobs`).
"""

from __future__ import annotations

import math

from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.pace import LoadPace, Pace
from kvstore.client.core.waits import VAIN_SHARE, BlockWait, WaitAccount
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.learned import COMPUTE_NS_MAX, COMPUTE_NS_MIN, LOAD_NS_MAX, LOAD_NS_MIN, clamp
from kvstore.wire.messages import Measured, SessionOpen

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

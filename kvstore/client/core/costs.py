"""Load or compute: savings of a load compared with its cost, from measurements (ADR 17).

    loads_pay     a copy from dram takes less than computing: otherwise no lookup is sent
    answer_ns     how long to wait for the node's answer
    patience_ns   how long to wait for blocks from disk: blocks that come within it are loaded, the
                  rest is computed

A wait is worth it if the node's estimate is at most a quarter of the time saved. The wait ends at
twice the estimate, or at 1 / RISK_SHARE of the time saved if that is longer. So an estimate may be
wrong by a factor of two at no loss; a wholly wrong one costs half of the time to be saved.
Pure. Does not cover: the disk's side of it (`kvstore.engine.moves.pace`).
"""

from __future__ import annotations

from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.pace import LoadPace, Pace
from kvstore.units import NS_PER_MS
from kvstore.wire.learned import COMPUTE_NS_MAX, COMPUTE_NS_MIN, LOAD_NS_MAX, LOAD_NS_MIN, clamp
from kvstore.wire.messages import Measured, SessionOpen

WAIT_SHARE = 4
"""A wait begins only if its estimate is at most one part in so many of the time saved."""
RISK_SHARE = 25
"""One part in so many of the time saved may always be risked: 4 %, which leaves the rest of 5 % to
all other costs of a lookup."""
PROBE_EVERY = 16
"""While loads do not pay, one request in so many loads a little, to measure again."""
TELL_EVERY = 32
"""Steps measured between two reports to the node."""


class Costs:
    """Measurements of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.compute = Pace(config.prefill_ns_per_token)
        self.load = LoadPace()
        self._refusals = 0
        self._untold = 0

    def opened(self, message: SessionOpen) -> None:
        """A session begins: the node's values for this space are a better guess than ours."""
        if message.compute_ns_per_token:
            self.compute.told(clamp(message.compute_ns_per_token, COMPUTE_NS_MIN, COMPUTE_NS_MAX))
        if message.load_ns_per_token:
            self.load.told(clamp(message.load_ns_per_token, LOAD_NS_MIN, LOAD_NS_MAX))
        self._untold = TELL_EVERY

    def reported(self, now_ns: int) -> None:
        """The ranks have run a step."""
        self._untold += self.compute.reported(now_ns)

    def take_news(self) -> Measured | None:
        """The report to send to the node now, if any: at the start of a session, then rarely."""
        if self._untold < TELL_EVERY or not self.compute.measured_ns:
            return None
        self._untold = 0
        return Measured(self.compute.measured_ns, self.load.measured_ns)

    # ── decisions ────────────────────────────────────────────────────────────────────────────────

    @property
    def loads_pay(self) -> bool:
        """Whether a copy from dram takes less than computing. Assumed while no prompt was computed,
        as on an engine that only decodes: a guess is no reason to compute what is here."""
        return not self.compute.is_known or self.load.ns_per_token <= self.compute.ns_per_token

    def is_worth(self, tokens: int) -> bool:
        """Whether a load of so many tokens pays."""
        return self.loads_pay and tokens >= max(self._config.min_load_tokens, 1)

    def may_probe(self, wanted_tokens: int) -> bool:
        """Loads do not pay: whether this request, which wants so many tokens, makes the shortest
        load, if that costs next to nothing beside its computing."""
        self._refusals += 1
        cost_ns = self.load.ns_per_token * self.least_tokens
        return (
            self._refusals % PROBE_EVERY == 0
            and cost_ns * RISK_SHARE <= self.compute.ns_per_token * wanted_tokens
        )

    @property
    def least_tokens(self) -> int:
        """The shortest load, in whole blocks."""
        blocks = -(-self._config.min_load_tokens // self._config.block_tokens)
        return max(blocks, 1) * self._config.block_tokens

    def answer_ns(self, wanted_tokens: int) -> int:
        """How long a request that wants so many tokens waits for the node, or for its answer.

        A share of the time to compute them: twenty milliseconds saved are not worth seconds of
        computing on a machine whose node did not get to run just then. At most the heartbeat
        timeout.
        """
        least_ns = self._config.lookup_deadline_ms * NS_PER_MS
        most_ns = max(least_ns, self._config.heartbeat_timeout_ms * NS_PER_MS)
        share_ns = int(wanted_tokens * self.compute.ns_per_token) // RISK_SHARE
        return max(least_ns, min(share_ns, most_ns))

    def patience_ns(self, coming_tokens: int, estimate_ns: int) -> int:
        """How long to wait for so many tokens from disk, given the node's estimate; 0: not at
        all."""
        saved_ns = coming_tokens * (self.compute.ns_per_token - self.load.ns_per_token)
        if estimate_ns * WAIT_SHARE > saved_ns:
            return 0
        patience_ns = max(2 * estimate_ns, saved_ns / RISK_SHARE)
        return int(min(patience_ns, self._config.promotion_deadline_ms * NS_PER_MS))

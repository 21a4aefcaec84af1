"""The record of a decision: what was known, what it came to, and what followed.

Columns have one entry for each of `workers`. Features are the whole input of a decision, so
`decide.replay` makes the decision of another policy from them. Bounded: `receipt_workers_max` of
the policy; in a larger pool the best ones are kept, and a replay chooses among those. No keys,
tokens or texts.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

RECEIPTS_MAX: Final = 4096


class RouteOutcome(msgspec.Struct, frozen=True):
    """Events after the decision, as far as they are known."""

    ttft_s: float | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    attempts: int = 1
    end: str = ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One decision."""

    number: int
    """Counts decisions of the core; with `seed` it fixes the choice among equals."""
    seed: int
    at_ns: int
    request_id: str
    tenant: str
    service: str
    pool: str
    model: str
    policy: str
    policy_hash: str
    index_trust: str
    index_epoch: int
    prompt_tokens: int
    output_tokens: int
    """Estimated, for the need of memory."""
    session_hash: int
    pressure: float = 0.0
    """Seconds for others, per second of compute (`costs.others_per_s`)."""
    chosen: str
    """Empty: none."""
    prefill_worker: str = ""
    fallbacks: tuple[str, ...] = ()
    split_reason: str = ""
    """Word for the local or remote prefill."""
    degraded: tuple[str, ...] = ()
    """Rungs of the degradation ladder that were in effect."""
    held_s: float = 0.0
    attempt: int = 1
    predicted_s: float = 0.0
    """TTFT from arrival, held time included."""
    workers: tuple[str, ...]
    filtered: dict[str, str]
    """Worker → word of the filter."""
    features: dict[str, list[float]]
    """Name → column, by `features.COLUMNS`."""
    weights: list[list[float]] = []
    """Learned ones, a column for each worker; empty: all 1."""
    terms: dict[str, list[float]]
    """Name → column of seconds (policy `cost`) or points, weights of learning applied."""
    scores: list[float]
    """Lower is better."""
    outcome: RouteOutcome = RouteOutcome()


class ReceiptLog:
    """Receipts of ended requests, until they are taken: `RECEIPTS_MAX`, then the oldest go."""

    def __init__(self) -> None:
        self.dropped_count = 0
        self._kept = deque[Receipt](maxlen=RECEIPTS_MAX)

    def keep(self, receipt: Receipt, outcome: RouteOutcome) -> None:
        """Add one."""
        self.dropped_count += len(self._kept) == RECEIPTS_MAX
        self._kept.append(msgspec.structs.replace(receipt, outcome=outcome))

    def take(self) -> list[Receipt]:
        """All, oldest first."""
        taken = list(self._kept)
        self._kept.clear()
        return taken

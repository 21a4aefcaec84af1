"""The record of a decision: what was known, what it came to, and what followed.

Columns have one entry for each of `workers`. Features are the whole input of a decision, so
`decide.replay` makes the decision of another policy from them. Bounded: `receipt_workers_max` of
the policy; in a larger pool the best ones are kept, and a replay chooses among those. No keys,
tokens or texts.

A decision leaves a draft, whose tables are still arrays: most receipts are never read, and those
that are need not be made before the request is sent.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.routing.features import FeatureColumn
from kvstore.routing.rows import Floats

FEATURE_NAMES: Final = tuple(column.name.lower() for column in FeatureColumn)
RECEIPTS_MAX: Final = 4096
"""Drafts of ended requests that wait to be taken; then the oldest go."""


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a node was to bring to dram ahead of time, and its answer."""

    worker: str
    reason: str
    """waits, hot or pinned."""
    blocks: int
    """As asked; below, leading ones by their place at the node when it answered."""
    dram: int = 0
    reading: int = 0
    """On their way from disk."""
    sought: int = 0
    """Asked of other nodes."""
    trouble: str = ""
    """Reason for no prefetch; empty: started."""


class RouteOutcome(msgspec.Struct):
    """Events after the decision, as far as they are known; filled in until the request ends."""

    ttft_s: float | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    attempts: int = 1
    end: str = ""
    ended_ns: int = 0
    """On the clock of `at_ns`."""
    prepared: tuple[Preparation, ...] = ()
    """Responses received before the end of the request."""
    raced_s: float | None = None
    """Delay of the hedged request."""
    race_winner: str = ""
    """Worker whose response was used."""
    race_loser: str = ""
    """Worker whose attempt was aborted or failed."""
    rejected: str = ""
    """Reason of the router's error response, as in `X-Kvstore-Dropped-Reason`; empty: none."""


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
    prompt_is_estimated: bool = False
    """`prompt_tokens` is by the bytes of a prompt that nobody has rendered."""
    output_tokens: int
    """Estimate, for memory use."""
    session_hash: int
    pressure: float = 0.0
    """Seconds that a second of compute costs other requests, by utilisation, cache hits, and
    `load_weight` and `keep_weight` of `costs`."""
    chosen: str
    """Empty: none."""
    prefill_worker: str = ""
    role: str = ""
    """Role of the chosen worker at that moment."""
    fallbacks: tuple[str, ...] = ()
    split_reason: str = ""
    """Word for the local or remote prefill."""
    degraded: tuple[str, ...] = ()
    """Active steps of the degradation ladder."""
    held_s: float = 0.0
    attempt: int = 1
    predicted_s: float = 0.0
    """TTFT from arrival, held time included."""
    objective_s: float = 0.0
    """TTFT above which the request was to be rejected; 0: none."""
    workers: tuple[str, ...] = ()
    filtered: dict[str, str] = {}
    """Worker → word of the filter."""
    load_only: dict[str, str] = {}
    """Worker → reason for its unknown prefixes with the request's LoRA adapter."""
    features: dict[str, list[float]] = {}
    """Name → column, by `features.FEATURE_NAMES`."""
    weights: list[list[float]] = []
    """Learned ones, a column for each worker; empty: all 1."""
    terms: dict[str, list[float]] = {}
    """Name → column of seconds (policy `cost`) or points, weights of learning applied."""
    scores: list[float] = []
    """Lower is better."""
    cached: list[float] = []
    """Prompt tokens that were expected to be cached or loaded at each worker."""
    outcome: RouteOutcome = msgspec.field(default_factory=RouteOutcome)


class ReceiptDraft(msgspec.Struct, frozen=True):
    """Parts of a receipt. The arrays never change any more."""

    plain: Receipt
    """The receipt without its tables."""
    workers: list[str]
    columns: Floats
    terms: dict[str, Floats]
    scores: Floats
    weights: Floats
    cached: Floats

    def receipt(self) -> Receipt:
        """The receipt, made anew by each call."""
        return msgspec.structs.replace(
            self.plain,
            workers=tuple(self.workers),
            features=dict(zip(FEATURE_NAMES, self.columns.tolist(), strict=True)),
            weights=self.weights.tolist(),
            terms={name: column.tolist() for name, column in self.terms.items()},
            scores=self.scores.tolist(),
            cached=self.cached.tolist(),
        )

    def ended(self, outcome: RouteOutcome) -> ReceiptDraft:
        """The draft with the outcome of its request."""
        plain = msgspec.structs.replace(self.plain, outcome=outcome)
        return msgspec.structs.replace(self, plain=plain)

    def feature(self, column: FeatureColumn, worker: str) -> float:
        """Value of a feature at a worker, as the decision used it."""
        return float(self.columns[column, self.workers.index(worker)])

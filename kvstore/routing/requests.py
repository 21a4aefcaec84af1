"""A request under way, and the result of one attempt to place it.

Covers: values. Does not cover: what they come to (`placing`, `core`), flights (`legs`).
"""

from __future__ import annotations

import msgspec

from kvstore.routing.models import ModelSide
from kvstore.routing.receipts import ReceiptDraft, RouteOutcome
from kvstore.routing.split import SplitReason
from kvstore.routing.values import PrefixAnswer, RouteRequest
from kvstore.routing.workers.rows import Floats


class OpenRequest(msgspec.Struct):
    """A request under way."""

    request: RouteRequest
    prefix: PrefixAnswer | None
    side: ModelSide
    service: str
    arrived_ns: int
    number: int
    attempt: int = 0
    failed: set[str] = msgspec.field(default_factory=set)
    """Workers whose leg failed."""
    slow: set[str] = msgspec.field(default_factory=set)
    """Those of them that were silent: tried again when nobody else is left."""
    suspects: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Workers that failed where the request may be the cause, with the reason …"""
    decode_suspects: int = 0
    """… and how often that was no prefiller."""
    is_elsewhere: bool = False
    """A gateway sent it to another worker than the chosen one."""
    was_sent: bool = False
    """A worker got it, and failed."""
    refusals: int = 0
    """Workers that refused it."""
    output_tokens_expected: int = 0
    is_held: bool = False
    was_held: bool = False
    routed_ns: int = 0
    placement: Placement | None = None
    flight: str = ""
    """Under which `placement` is counted at its worker."""
    race: Placement | None = None
    """The second attempt of a race, beside `placement`."""
    is_late: bool = False
    is_local: bool = False
    """Prefillers failed so often that its decoder computes."""
    last_resort: int = 0
    """No worker was fit at the last judgement: place of the reason in `LAST_RESORTS`, from 1."""
    has_begun: bool = False
    uncached: float = 0.0
    """Tokens of a remote prefill that waits."""
    stays_at: str = ""
    """Worker of its session's last request; empty: none, or too long ago."""
    is_prepared: bool = False
    """Its node was asked to bring blocks, or has nothing to bring."""
    likely_worker: str | None = None
    """While it is held: the best one at the last try, for promotion or a fetch ahead of time."""
    expires_ns: int | None = None
    """End of its time to live, once it was held; None: never."""
    outcome: RouteOutcome = msgspec.field(default_factory=RouteOutcome)
    """For its receipt."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def pool(self) -> str:
        return self.side.pool


class Placement(msgspec.Struct):
    """Result of an attempt."""

    worker: str
    prefill_worker: str
    reason: SplitReason
    work_s: float
    """Prefill that it brings, to the prefiller or the worker."""
    need_tokens: int
    uncached: float
    hit_tokens: float
    """Predicted."""
    offered: tuple[float, float]
    """Tokens that its own tiers have, and further ones of other nodes; trusted, but no ratios."""
    predicted_s: float
    """From now."""
    local_s: float
    """Predicted for a local prefill."""
    raw: Floats
    """Terms at the worker that computes, to learn from."""
    has_others: bool
    """Whether another worker could take the request."""
    draft: ReceiptDraft | None = None

"""A request under way, and the result of one attempt to place it.

Covers: values. Does not cover: what they come to (`placing`, `core`), flights (`legs`).
"""

from __future__ import annotations

import msgspec

from kvstore.routing.models import ModelSide
from kvstore.routing.receipts import ReceiptDraft, RouteOutcome
from kvstore.routing.rows import Flight, Floats
from kvstore.routing.split import SplitReason
from kvstore.routing.values import RouteRequest


class OpenRequest(msgspec.Struct):
    """A request under way."""

    request: RouteRequest
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
    """(worker, reason) of failures that the request may have caused."""
    decode_suspects: int = 0
    """Failures ERROR and BROKEN of workers that were not its prefiller."""
    is_elsewhere: bool = False
    """A gateway sent it to another worker than the chosen one."""
    was_sent: bool = False
    """A worker got it, and failed."""
    refusals: int = 0
    """Number of refusals by workers."""
    output_tokens_expected: int = 0
    is_held: bool = False
    was_held: bool = False
    routed_ns: int = 0
    placement: Placement | None = None
    race: Placement | None = None
    """The second attempt of a race, beside `placement`."""
    is_late: bool = False
    is_local: bool = False
    """Prefillers failed so often that its decoder computes the prompt."""
    last_resort: int = 0
    """Place in `LAST_RESORTS`, from 1, of the reason that was overlooked at the last judgement,
    since no worker was fit; 0: none was.
    """
    has_begun: bool = False
    uncached: float = 0.0
    """Uncached tokens of its remote prefill, while that waits in the lanes."""
    laned_ns: int | None = None
    """When it came into a lane of its length (`waiting`), which decides on its turn; None: it is in
    none.
    """
    stays_at: str = ""
    """Worker of its session's last request; empty: none, or too long ago."""
    is_prepared: bool = False
    """Its node was asked to bring blocks, or has nothing to bring."""
    likely_worker: str | None = None
    """Best worker at the last try, while the request is held; for promotion or a fetch ahead of
    time.
    """
    expires_ns: int | None = None
    """End of its time to live, once it was held; None: never."""
    outcome: RouteOutcome = msgspec.field(default_factory=RouteOutcome)
    """Outcome for its receipt, filled in until the request ends."""

    def wait_for_prefiller(self, now_ns: int) -> None:
        """Wait in a lane from now on, by the tokens that were uncached at the last judgement."""
        self.uncached = self.uncached or self.request.prompt_tokens
        self.laned_ns = now_ns

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def pool(self) -> str:
        return self.side.pool


class Placement(msgspec.Struct):
    """Result of an attempt: worker, prefiller, and the predictions for them."""

    worker: str
    prefill_worker: str
    reason: SplitReason
    work_s: float
    """Seconds of prefill that the request brings to the prefiller or, without one, to the
    worker.
    """
    need_tokens: int
    uncached: float
    hit_tokens: float
    """Prompt tokens that are predicted to be cached."""
    offered: tuple[float, float]
    """Tokens that the worker's own tiers have, and further ones of other nodes; times the trust in
    them, without learned ratios.
    """
    predicted_s: float
    """Predicted TTFT, in seconds from the decision."""
    local_s: float
    """Predicted TTFT of a local prefill."""
    raw: Floats
    """Terms without weights at the worker that computes, to learn from."""
    has_others: bool
    """Whether another worker could take the request."""
    draft: ReceiptDraft | None = None
    legs: tuple[Flight, ...] = ()
    """Flights by which it counts at its workers, once it is sent: decode leg, prefill leg."""

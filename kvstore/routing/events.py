"""Events and commands of the core: all that goes in, all that comes out.

    Arrived ─▶ RequestHeld* ─▶ Routed ─▶ (LegFailed ─▶ Routed)* ─▶ RequestEnded    or Rejected

Each request that `Arrived` gets exactly one final word: `Routed` (again after `LegFailed`) until it
`RequestEnded`, or `Rejected`. The shell sends `RouteTick` every 5 to 20 ms while requests are held.
"""

from __future__ import annotations

import enum

import msgspec

from kvstore.routing.receipts import Receipt
from kvstore.routing.values import (
    LoadSample,
    PrefixAnswer,
    RouteRequest,
    SharedLoad,
    WorkerHealth,
    WorkerSpec,
)


class Leg(enum.StrEnum):
    """Part of a request: remote prefill, or all the rest."""

    PREFILL = "prefill"
    DECODE = "decode"


class Failure(enum.StrEnum):
    """Result of a leg that failed. A 4xx of the engine is none of them: it is passed to the client
    as `RequestEnded` with outcome REFUSED and never counts against the worker."""

    CONNECT = "connect"
    """Nothing was sent."""
    STATUS = "status"
    """5xx before the first byte of the answer."""
    TIMEOUT = "timeout"
    BROKEN = "broken"
    """The answer ended in the middle."""


class Ending(enum.StrEnum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"
    """4xx of the engine."""
    ABORTED = "aborted"
    """By the client."""
    FAILED = "failed"
    """After the last attempt."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A worker is there, or its description changed."""

    spec: WorkerSpec


class WorkerLeft(msgspec.Struct, frozen=True, tag=True):
    """A worker is gone. Its legs under way fail on their own (`LegFailed`)."""

    worker: str


class Judged(msgspec.Struct, frozen=True, tag=True):
    """Findings about a worker."""

    worker: str
    health: WorkerHealth = WorkerHealth.UP
    is_parity_red: bool = False
    """Keys of a probe prompt differ: routed by load only."""
    reason: str = ""


class Scraped(msgspec.Struct, frozen=True, tag=True):
    """Numbers from the metrics of a worker."""

    worker: str
    sample: LoadSample


class Shared(msgspec.Struct, frozen=True, tag=True):
    """All that another router has in flight; replaces what that router said before."""

    router: str
    loads: tuple[SharedLoad, ...]


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """A request, with the answer of the index where there is one."""

    request: RouteRequest
    prefix: PrefixAnswer | None = None


class PrefillDone(msgspec.Struct, frozen=True, tag=True):
    """The remote prefill leg succeeded; its blocks were pushed or can be fetched."""

    request_id: str


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """First byte of the answer to the client: achieved TTFT, learned from."""

    request_id: str


class LegFailed(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Routed` (elsewhere, or local prefill) or `Rejected`."""

    request_id: str
    leg: Leg
    failure: Failure
    has_streamed: bool = False
    """Bytes of the answer reached the client: no retry."""


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """A request is over; nothing comes for it afterwards."""

    request_id: str
    end: Ending
    cached_tokens: int | None = None
    """`usage.prompt_tokens_details.cached_tokens`, where the engine says it."""
    output_tokens: int = 0


class RouteTick(msgspec.Struct, frozen=True, tag=True):
    """Time passed: held requests are routed or expire, stale numbers decay."""


RouteEvent = (
    Joined
    | WorkerLeft
    | Judged
    | Scraped
    | Shared
    | Arrived
    | PrefillDone
    | FirstToken
    | LegFailed
    | RequestEnded
    | RouteTick
)


class Routed(msgspec.Struct, frozen=True, tag=True):
    """Send the request now."""

    request_id: str
    worker: str
    """Decode leg, or the whole request."""
    model: str
    """Name to write into the body: served model or adapter."""
    prefill_worker: str | None
    """None: local prefill. Sent at the same time as the decode leg (grant first)."""
    fallbacks: tuple[str, ...]
    """Next best workers, for Envoy's list and for racing."""
    attempt: int
    """1 for the first."""
    priority: int
    """For engines that schedule by priority: lower is first."""
    deadline_s: float
    """Time to the first token after which the attempt has failed (`Failure.TIMEOUT`)."""
    race_after_s: float | None
    """Send it to `fallbacks[0]`, too, when there is no token by then; None: never."""
    receipt: Receipt


class RequestHeld(msgspec.Struct, frozen=True, tag=True):
    """The request waits here; promotion or a fetch may begin at `likely_worker`."""

    request_id: str
    ahead: int
    wait_s: float
    """Expected."""
    likely_worker: str | None


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """Final: answer the client with it."""

    request_id: str
    status: int
    """404, 429, 502, 503 or 504."""
    reason: str
    """A word for the metric and `x-kvstore-dropped-reason`: `RejectReason` values."""
    retry_after_s: float | None
    known_models: tuple[str, ...]
    """With 404."""
    receipt: Receipt | None


class RejectReason(enum.StrEnum):
    """Why a request was not routed. `x-llm-d-request-dropped-reason` has the same spellings."""

    MODEL_UNKNOWN = "rejected-model-unknown"
    NO_ENDPOINTS = "rejected-no-endpoints"
    """503: nothing is healthy, or the subset is empty."""
    SATURATED = "rejected-saturated"
    """429: the queue of the class is full."""
    OBJECTIVE = "rejected-objective"
    """429: the predicted TTFT breaks the objective."""
    EXPIRED = "rejected-ttl-expired"
    DISPLACED = "evicted-priority"
    """429: made room for a higher class."""
    ATTEMPTS = "rejected-attempts"
    """502: no attempt is left, or the answer broke after it began."""


RouteCommand = Routed | RequestHeld | Rejected

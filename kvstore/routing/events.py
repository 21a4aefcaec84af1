"""Events and commands of the core: all that goes in, all that comes out.

    Arrived ─▶ Routed ─▶ (LegFailed ─▶ Routed)* ─▶ RequestEnded          or Rejected
                 └─ Late ─▶ Raced ─▶ RaceOver, once                       Prepare ─▶ PrepareAnswered
    Probed ─▶ StateChange, AbandonWorker

Each request that `Arrived` gets exactly one final word: `Routed` (again after `LegFailed`) until it
`RequestEnded`, or `Rejected`; one that is held gets it later. The shell sends `RouteTick` every 5
to 20 ms while requests are held.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Self

import msgspec

from kvstore.routing.receipts import ReceiptDraft
from kvstore.routing.rows import StateChange
from kvstore.routing.values import LoadSample, ProbeResult, RouteRequest, WorkerSpec
from kvstore.wire.load import EngineLoad
from kvstore.wire.peers import PrepareReply


class Leg(enum.StrEnum):
    """Part of a request: remote prefill, or all the rest."""

    PREFILL = "prefill"
    DECODE = "decode"


class Failure(enum.StrEnum):
    """Result of a leg that failed. A 4xx about the request is none of them: it is passed to the
    client as `RequestEnded` with outcome REFUSED and never counts against the worker.

    |           | another worker            | counts against the worker                     |
    |-----------|---------------------------|-----------------------------------------------|
    | CONNECT   | yes                       | no: its probes decide                         |
    | SILENT    | yes                       | no: its probes decide                         |
    | BUSY      | yes                       | no, it rests for a moment                     |
    | STATUS    | yes, by the retry budget  | yes                                           |
    | REFUSED   | yes, REFUSALS_MAX in all  | where another one serves it, but for a `Lack` |
    | ERROR     | one more                  | where another one serves it, or served others |
    | BROKEN    | one more                  | the same                                      |
    """

    CONNECT = "connect"
    """The connection failed: nothing was sent."""
    SILENT = "silent"
    """The attempt was given up because the worker is silent (`AbandonWorker`)."""
    BUSY = "busy"
    """429, or 503 with Retry-After: load."""
    REFUSED = "refused"
    """A status that the request may have caused, or that other workers may not answer."""
    STATUS = "status"
    """5xx, or another status that no request causes: the engine is at fault."""
    ERROR = "error"
    """500 before the first byte of the response: the request may be the cause."""
    BROKEN = "broken"
    """The connection ended before the response did: the request may be the cause."""


class Lack(enum.StrEnum):
    """The thing that a worker lacks for a request, as its error response says (REFUSED)."""

    MODEL = "model"
    CONTEXT = "context"
    """Context for as many tokens as the request needs."""
    LIMIT = "limit"
    """Permission for as many media in one prompt, or for media of that kind."""
    MEDIA = "media"
    """A model that takes images, audio or video."""


class Fault(msgspec.Struct, frozen=True):
    """Failure of a worker at a request."""

    failure: Failure
    lack: Lack | None = None
    """The thing that the worker lacks; only with REFUSED. None: not known."""
    why: str = ""
    """Reason, in one clause for operators."""


class Ending(enum.StrEnum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"
    """The engine refused it with a 4xx."""
    ABORTED = "aborted"
    """The client left or cancelled it."""
    FAILED = "failed"
    """Its last attempt failed."""


class RouteEvent(msgspec.Struct, frozen=True, tag=True):
    """Base of all events."""


class Joined(RouteEvent, frozen=True, tag=True):
    """A worker is there, or its description changed."""

    spec: WorkerSpec


class WorkerLeft(RouteEvent, frozen=True, tag=True):
    """A worker is gone. Its legs under way fail on their own (`LegFailed`)."""

    worker: str


class Probed(RouteEvent, frozen=True, tag=True):
    """A probe of a worker ended, or is late."""

    worker: str
    result: ProbeResult
    why: str = ""
    """Reason, in one clause for operators."""
    late_s: float = 0.0
    """Seconds beyond the time in which an answer is expected."""


class Scraped(RouteEvent, frozen=True, tag=True):
    """Numbers from the metrics of a worker."""

    worker: str
    sample: LoadSample
    asked_ns: int
    """When the probe was sent: the numbers are from after that."""


class Shared(RouteEvent, frozen=True, tag=True):
    """All that another router has in flight; replaces what that router said before."""

    router: str
    loads: tuple[EngineLoad, ...]


class PrepareAnswered(RouteEvent, frozen=True, tag=True):
    """Answer to a Prepare, which always gets one."""

    number: int
    its: PrepareReply


class Arrived(RouteEvent, frozen=True, tag=True):
    """A request, with the answer of the index where there is one."""

    request: RouteRequest


class RequestEvent(RouteEvent, frozen=True, tag=True):
    """Base of the events about a request under way; ignored if the request has ended."""

    request_id: str


class PrefillDone(RequestEvent, frozen=True, tag=True):
    """The remote prefill leg is over, and the request goes on where it is decoded."""

    fault: Fault | None = None
    """Why the prefill leg failed; None: its blocks were pushed or can be fetched."""


class FirstToken(RequestEvent, frozen=True, tag=True):
    """The first byte of the answer came for the client. The core learns from the achieved TTFT."""

    served_by: str = ""
    """Worker that serves the request, as in `RequestEnded`."""


class Late(RequestEvent, frozen=True, tag=True):
    """No first byte within `Routed.late_after_s`. Answered by `Raced`, or by nothing."""


class RaceOver(RequestEvent, frozen=True, tag=True):
    """One of two attempts has ended, and the other goes on alone."""

    worker: str
    """Worker of the attempt that ended."""
    fault: Fault | None = None
    """Failure of that attempt; None: it was slower, and its connection is closed."""


class LegFailed(RequestEvent, frozen=True, tag=True):
    """A leg of a request failed. Answered by `Routed` (elsewhere, or local prefill) or `Rejected`;
    later, if the request is held again.
    """

    leg: Leg
    fault: Fault
    has_streamed: bool = False
    """Bytes of the answer reached the client: no retry."""
    is_claim: bool = False
    """A caller reports the failure, and the router has not seen it: it counts for this request
    only.
    """


class RequestEnded(RequestEvent, frozen=True, tag=True):
    """A request is over; nothing comes for it afterwards."""

    end: Ending
    cached_tokens: int | None = None
    """`usage.prompt_tokens_details.cached_tokens`, where the engine says it."""
    output_tokens: int = 0
    served_by: str = ""
    """Worker that served it, where a gateway chose another one than `Routed.worker`."""
    why: str = ""
    """Reason, with FAILED; one clause for operators."""


class RouteTick(RouteEvent, frozen=True, tag=True):
    """Time passed: held requests are routed or expire, stale numbers decay."""


class PrepareReason(enum.StrEnum):
    """Why blocks are brought ahead of time."""

    WAITS = "waits"
    """A request for them is held."""
    HOT = "hot"
    """Many requests begin with them, and the workers that hold them are saturated."""
    PINNED = "pinned"
    """A client wants them kept."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Have the node of a worker bring these blocks to dram. PrepareAnswered answers."""

    number: int
    request_id: str
    """Request that it is for; it may have ended."""
    worker: str
    keys: bytes
    """Keys of the blocks, in chain order."""
    reason: PrepareReason


class HintAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a client's hints."""

    pinned_s: float = 0.0
    pinned_tokens: int = 0
    refused: str = ""
    """Word for the reason why nothing is pinned; empty: the prompt is pinned, or no pin
    was wanted.
    """
    ends_session: bool = False


class Routed(msgspec.Struct, frozen=True, tag=True):
    """Send the request now."""

    request_id: str
    worker: str
    """Worker of the decode leg, or of the whole request."""
    model: str
    """Name to write into the body: served model or adapter."""
    prefill_worker: str | None
    """Worker of the prefill leg, sent at the same time as the decode leg (grant first); None: local
    prefill.
    """
    fallbacks: tuple[str, ...]
    """Next best workers, for Envoy's list."""
    attempt: int
    """Number of the attempt, from 1."""
    late_after_s: float
    """Seconds without a first byte after which the request is late. The shell then says `Late` if
    it `may_race`; if a remote prefill runs before the decode leg, it lets the decode worker begin,
    too.
    """
    may_race: bool
    draft: ReceiptDraft
    hints: HintAnswer | None = None
    """Answer to the client's hints; None: it gave none."""


class Raced(msgspec.Struct, frozen=True, tag=True):
    """Send the request to this worker, too. The first byte of an answer decides between the two:
    the other connection is closed, and `RaceOver` says so before `FirstToken`."""

    request_id: str
    worker: str


class AbandonWorker(msgspec.Struct, frozen=True, tag=True):
    """The worker is silent, and another one that may serve its requests is not: end its requests
    that have no first byte yet, with `Failure.SILENT`. Once for each `ProbeResult.SILENT`.
    """

    worker: str


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The request is rejected for good: answer the client with this error."""

    request_id: str
    status: int
    """400, 404, 429, 500, 502 or 503."""
    reason: str
    """A word for the metric and `x-kvstore-dropped-reason`: `RejectReason` values."""
    retry_after_s: float | None
    known_models: tuple[str, ...]
    """Names of the models that there are; with 400 and 404."""
    predicted_s: float = 0.0
    """With OBJECTIVE: the predicted TTFT; `objective_s` is the limit that it breaks."""
    objective_s: float = 0.0
    fault: str = ""
    """With FAULT: the traceback, for the log."""


class RejectReason(enum.StrEnum):
    """Why a request was not routed, and the HTTP status of its answer.
    `x-llm-d-request-dropped-reason` has the same spellings.
    """

    status: int

    def __new__(cls, word: str, status: int) -> Self:
        made = str.__new__(cls, word)
        made._value_, made.status = word, status
        return made

    MODEL_UNKNOWN = "rejected-model-unknown", 404
    MODEL_MISSING = "rejected-model-missing", 400
    """The request names none, and there are several."""
    NO_ENDPOINTS = "rejected-no-endpoints", 503
    """Nothing is healthy, or the subset is empty."""
    SATURATED = "rejected-saturated", 429
    """The queue of the class is full."""
    OBJECTIVE = "rejected-objective", 429
    """The predicted TTFT breaks the objective."""
    EXPIRED = "rejected-ttl-expired", 503
    DISPLACED = "evicted-priority", 429
    """Made room for a higher class."""
    ATTEMPTS = "rejected-attempts", 502
    """No attempt is left, or the answer broke after it began."""
    FAULT = "rejected-fault", 500
    """An error of the router at this request alone."""


class Blocked(enum.Enum):
    """Reason why a request cannot be placed now."""

    LOAD = "load"
    """All workers that fit have too much load now: waiting can help."""
    LANES = "lanes"
    """The remote prefill waits for a prefiller."""
    NO_WORKERS = "no workers"


class Unplaced(NamedTuple):
    """The request is to be rejected."""

    reason: RejectReason
    predicted_s: float = 0.0
    """Predicted TTFT; with OBJECTIVE."""


RouteCommand = Routed | Raced | Rejected | Prepare | AbandonWorker | StateChange

"""Filter, score, choose: a pure function of features, request and policy.

    Features ─▶ filters ─▶ terms × weights ─▶ scores ─▶ near the best ─▶ seeded choice ─▶ Verdict

Filters: health, subset, model, context (`unfit`); queue, running, memory (`dropped`). A request is
held when `dropped` alone leaves nobody. When `unfit` does, those of LAST_RESORTS are tried, the
mildest first: an engine has the last word about what it can do. Memory is by need, what the prompt
adds and what the answer may add, and only where the engine itself has requests waiting: no
prediction keeps a request from an engine that would begin with it.

Policies other than `cost` (least-load, round-robin, session with bounded load) are functions of the
same features: `replay` makes from a receipt the decision of any policy. Learned weights are part of
the features of a receipt (terms hold them), so that the same policy decides the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.routing.costs import terms
from kvstore.routing.features import Case, FeatureColumn, Features
from kvstore.routing.policy import PolicyLimits, RoutingPolicy, policy_hash
from kvstore.routing.receipts import Receipt
from kvstore.routing.requests import OpenRequest
from kvstore.routing.rows import LEARNED, Floats, Term, WorkerState

# ── filters ───────────────────────────────────────────────────────────────────────────────────────


class Dropped(enum.IntEnum):
    """Reason of a filter, as column UNFIT has it. From QUEUE on they are about load: waiting can
    help.
    """

    NONE = 0
    DRAINING = 1
    SUBSET = 2
    MODEL = 3
    ADAPTER = 4
    FAILED_BEFORE = 5
    """An earlier attempt of this request failed there."""
    MEDIA = 6
    """The engine has said that the model takes no images, audio or video."""
    CONTEXT = 7
    """Prompt and output are longer than its context."""
    BREAKER = 8
    """Requests failed there: its circuit breaker is open."""
    TERMINATING = 9
    DOWN = 10
    RESTS = 11
    """The engine said a moment ago that it is full."""
    QUEUE = 12
    RUNNING = 13
    MEMORY = 14
    LANE = 15
    """A prefiller that is full, or kept for shorter prompts."""

    @property
    def word(self) -> str:
        """Its word in receipts."""
        return self.name.lower().replace("_", "-")


LAST_RESORTS: Final = (
    *(Dropped.RESTS, Dropped.BREAKER, Dropped.TERMINATING, Dropped.DOWN),
    *(Dropped.MEDIA, Dropped.CONTEXT),
)
"""The mildest first."""


def unfit(state: WorkerState, opened: OpenRequest, now_ns: int) -> Dropped:
    """Reason why a worker does not fit a request."""
    spec, request = state.spec, opened.request
    model, adapter, subset = opened.side.model, opened.side.adapter, request.subset
    if state.is_draining:
        return Dropped.DRAINING
    if subset is not None and spec.worker not in subset and spec.address not in subset:
        return Dropped.SUBSET
    takes_it = spec.takes_any_model and not opened.side.is_listed
    if spec.models and model not in spec.models and not takes_it:
        return Dropped.MODEL
    if adapter and adapter not in state.adapters and adapter not in spec.adapters:
        return Dropped.ADAPTER  # neither runs, nor is listed
    if spec.worker in opened.failed:
        return Dropped.FAILED_BEFORE
    # From here on in the reverse order of LAST_RESORTS: of several reasons the worst counts.
    if request.prompt_tokens + (request.output_tokens_max or 0) > spec.context_of(model):
        return Dropped.CONTEXT
    if request.media and model in state.without_media:
        return Dropped.MEDIA
    if state.is_down:
        return Dropped.DOWN
    if spec.is_terminating:
        return Dropped.TERMINATING
    if not state.breaker.may_allow(now_ns):
        return Dropped.BREAKER
    return Dropped.RESTS if now_ns < state.rests_until_ns else Dropped.NONE


def dropped(columns: Floats, limits: PolicyLimits, *, need_tokens: int) -> npt.NDArray[np.intp]:
    """Filter that drops each worker (Dropped), 0: it can take the request."""
    codes: npt.NDArray[np.intp] = columns[FeatureColumn.UNFIT].astype(np.intp)
    waiting, queued = columns[FeatureColumn.WAITING], columns[FeatureColumn.QUEUED]
    masks = []
    if limits.queue_max is not None:
        masks.append((Dropped.QUEUE, queued >= limits.queue_max))
    if limits.running_max is not None:
        running = queued + columns[FeatureColumn.STREAMS]
        masks.append((Dropped.RUNNING, running >= limits.running_max))
    if np.count_nonzero(waiting):
        capacity = columns[FeatureColumn.MEMORY_TOKENS]
        new = np.maximum(0.0, need_tokens - columns[FeatureColumn.HBM])
        filled = columns[FeatureColumn.MEMORY] + new / np.maximum(capacity, 1.0)
        is_full = (capacity > 0) & (filled > limits.memory_ceiling) & (waiting > 0)
        masks.append((Dropped.MEMORY, is_full))
    for drop, mask in masks:
        if np.count_nonzero(mask):
            codes[(codes == 0) & mask] = drop
    return codes


def dropped_names(workers: list[str], codes: npt.NDArray[np.intp]) -> dict[str, str]:
    """Worker → word of the filter that drops it; workers that can take the request are left out."""
    if not np.count_nonzero(codes):
        return {}
    return {workers[place]: Dropped(codes[place]).word for place in np.flatnonzero(codes).tolist()}


def is_of_the_moment(codes: npt.NDArray[np.intp]) -> bool:
    """Whether waiting can help: some worker is dropped for its load only."""
    return bool((codes >= Dropped.QUEUE).any())


# ── scores ────────────────────────────────────────────────────────────────────────────────────────

_TERM_NAMES: Final = tuple(term.name.lower() for term in Term)
ADAPTER_S: Final = 0.2
"""Seconds to load a LoRA adapter that a worker does not have."""
NEAR_S: Final = 0.005
"""Seconds by which a worker's cost may exceed the best one and still count as equal."""
_MASK: Final = (1 << 64) - 1
_SESSION_LOAD_MAX: Final = 1.25
"""Bounded load: a request of a session goes elsewhere if the session's worker has this many times
the mean number of requests.
"""
_SESSION_FREE: Final = 8
"""A session never leaves a worker with fewer requests than this."""


def mix(value: int) -> int:
    """64 well-mixed bits of a number (splitmix64): seeded choices without a random module."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def requests_in_flight(columns: Floats) -> Floats:
    """Requests of each worker that wait or run there."""
    return np.asarray(columns[FeatureColumn.QUEUED] + columns[FeatureColumn.STREAMS])


def least_load(columns: Floats, _case: Case) -> dict[str, Floats]:
    """Policy `least-load`: requests in flight at each worker, whatever its caches hold."""
    return {"requests": requests_in_flight(columns)}


def round_robin(columns: Floats, case: Case) -> dict[str, Floats]:
    """Policy `round-robin`: turns until each worker is next, counted from the number of the
    decision.
    """
    count = columns.shape[1]
    turn = np.argsort(np.argsort(columns[FeatureColumn.POSITION]))
    return {"turn": np.asarray((turn - case.number) % count, dtype=np.float64)}


def session(columns: Floats, case: Case) -> dict[str, Floats]:
    """Policy `session`: first the worker of the session's last request, then by hash of (session,
    worker). A worker over its bounded load comes after all others.
    """
    positions = columns[FeatureColumn.POSITION].astype(int).tolist()
    hashes = [mix(case.session_hash ^ mix(position + 1)) / _MASK for position in positions]
    requests = requests_in_flight(columns)
    bound = max(_SESSION_FREE, np.ceil((requests.sum() + 1) / len(requests) * _SESSION_LOAD_MAX))
    scores = np.where(columns[FeatureColumn.STAYS] > 0, -1.0, 1 - np.array(hashes))
    return {"hash": scores, "over": 2.0 * (requests >= bound)}


SCORERS: Final[dict[str, Callable[[Floats, Case], dict[str, Floats]]]] = {
    "least-load": least_load,
    "round-robin": round_robin,
    "session": session,
}
"""Scorers of the policies other than `cost`: (columns, case) → named scores by worker, made of
counts and hashes; lower is better. They are a refuge where the measures of `cost` mislead. Scorers
of other routers are in `bench/routing/baselines.py`.
"""


class RouteVerdict(msgspec.Struct):
    """Result of `decide` for one request: its input, the order of the workers, and numbers of each.
    `order` is empty if no worker can take the request.
    """

    features: Features
    case: Case
    order: list[int]
    """Places of the candidates in `features.workers`: the chosen one first, then by score."""
    codes: npt.NDArray[np.intp]
    scores: Floats
    terms: dict[str, Floats]
    ttft_s: Floats
    """TTFT predicted at each worker by the terms of policy `cost`, whichever policy decides."""
    work_s: Floats
    """Seconds of prefill that the request brings to each worker."""
    uncached: Floats
    raw: Floats
    """(learned terms, workers), in seconds before weights are applied: input of learning."""


def decide(features: Features, case: Case, policy: RoutingPolicy) -> RouteVerdict:
    """Filter and score the workers for a request, and choose one."""
    columns = features.columns
    codes = dropped(columns, policy.limits, need_tokens=case.prompt_tokens + case.output_tokens)
    made, uncached = terms(columns, policy, case)
    raw, others = made[:LEARNED], made[LEARNED]
    seconds = raw * features.weights
    ttft_s = np.add.reduce(seconds, axis=0)
    if policy.policy == "cost" or not features.workers:
        named = dict(zip(_TERM_NAMES, [*seconds, others], strict=True))
        named["cold"] = (1 - columns[FeatureColumn.WARM]) * ADAPTER_S
        scores = ttft_s + others + named["cold"]
        if np.count_nonzero(columns[FeatureColumn.LATE_S]):
            named["late"] = columns[FeatureColumn.LATE_S]
            scores = scores + named["late"]
    else:
        named = SCORERS[policy.policy](columns, case)
        scores = np.sum(list(named.values()), axis=0)
    verdict = RouteVerdict(
        features,
        case,
        order=[],
        codes=codes,
        scores=scores,
        terms=named,
        ttft_s=ttft_s,
        work_s=seconds[Term.COMPUTE] + seconds[Term.INTERFERENCE],
        uncached=uncached,
        raw=raw,
    )
    verdict.order = _order(verdict, policy)
    return verdict


def _order(verdict: RouteVerdict, policy: RoutingPolicy) -> list[int]:
    scores, codes = verdict.scores, verdict.codes
    columns, case = verdict.features.columns, verdict.case
    # Equal scores: the one that has rested longest, so that cold prompts spread.
    order: list[int] = np.lexsort((-columns[FeatureColumn.IDLE_S], scores)).tolist()
    if np.count_nonzero(codes):
        order = [place for place in order if not codes[place]]
    if not order:
        return []
    if policy.policy == "cost":
        best = float(scores[order[0]])
        bound = best + max(policy.choice.within_share * best, NEAR_S)
        near = [place for place in order[: policy.choice.top_k] if scores[place] <= bound]
        if verdict.raw[Term.COMPUTE].max() <= NEAR_S:  # too little to compute for costs to tell
            load = columns[FeatureColumn.QUEUED] + columns[FeatureColumn.STREAMS]
            near = [place for place in near if load[place] == load[near].min()]
        chosen = near[mix(case.seed ^ mix(case.number)) % len(near)]
        order.remove(chosen)
        order.insert(0, chosen)
    return order


def features_of(receipt: Receipt) -> Features:
    """The input of the decision, as the receipt has it."""
    columns = np.zeros((len(FeatureColumn), len(receipt.workers)))
    columns[FeatureColumn.FETCH_RATIO] = 1.0  # an earlier version did not have it
    for column in FeatureColumn:
        if (found := receipt.features.get(column.name.lower())) is not None:
            columns[column] = found
    weights = np.array(receipt.weights or np.ones((LEARNED, len(receipt.workers))))
    return Features(list(receipt.workers), columns, weights)


def replay(receipt: Receipt, policy: RoutingPolicy) -> Receipt:
    """The receipt with the decision that `policy` would have made from the same features."""
    features = features_of(receipt)
    case = msgspec.convert(receipt, Case, from_attributes=True)
    verdict = decide(features, case, policy)
    chosen = features.workers[verdict.order[0]] if verdict.order else ""
    return msgspec.structs.replace(
        receipt,
        policy=policy.policy,
        policy_hash=policy_hash(policy),
        chosen=chosen,
        fallbacks=fallbacks(verdict, policy),
        predicted_s=float(verdict.ttft_s[verdict.order[0]]) if verdict.order else 0.0,
        filtered=dropped_names(features.workers, verdict.codes),
        terms={name: column.tolist() for name, column in verdict.terms.items()},
        scores=verdict.scores.tolist(),
        cached=(receipt.prompt_tokens - verdict.uncached).tolist(),
    )


def fallbacks(verdict: RouteVerdict, policy: RoutingPolicy) -> tuple[str, ...]:
    """Names of the next best workers after the chosen one, at most `fallback_count`."""
    rest = verdict.order[1 : 1 + policy.choice.fallback_count]
    return tuple(verdict.features.workers[place] for place in rest)

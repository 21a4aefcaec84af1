"""Workers that cannot take a request, or only as a last resort, with the reason.

    health, subset, model, context (`unfit`)        queue, running, memory (`dropped`)

A request is held when `dropped` alone leaves nobody. When `unfit` does, those of LAST_RESORTS are
tried, the mildest first: an engine has the last word about what it can do. Memory is by need, what
the prompt adds and what the answer may add, and only where the engine itself has requests waiting:
no prediction keeps a request from an engine that would begin with it.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.routing.features import FeatureColumn
from kvstore.routing.policy import PolicyLimits
from kvstore.routing.requests import OpenRequest
from kvstore.routing.workers.rows import Floats, WorkerState


class Dropped(enum.StrEnum):
    """Reason of a filter, in receipts."""

    NONE = ""
    DRAINING = "draining"
    SUBSET = "subset"
    MODEL = "model"
    ADAPTER = "adapter"
    FAILED = "failed-before"
    """An earlier attempt of this request failed there."""
    MEDIA = "media"
    """The engine has said that the model takes no images, audio or video."""
    CONTEXT = "context"
    """Prompt and output are longer than its context."""
    BREAKER = "breaker"
    """Requests failed there: its circuit breaker is open."""
    TERMINATING = "terminating"
    DOWN = "down"
    RESTS = "rests"
    """The engine said a moment ago that it is full."""
    QUEUE = "queue"
    RUNNING = "running"
    MEMORY = "memory"
    LANE = "lane"
    """A prefiller that is full, or kept for shorter prompts."""


DROPS: Final = tuple(Dropped)
_CODE: Final = {drop: code for code, drop in enumerate(DROPS)}
_OF_THE_MOMENT: Final = _CODE[Dropped.QUEUE]
"""Codes from this one on are about load: waiting can help."""
LANE: Final = _CODE[Dropped.LANE]
LAST_RESORTS: Final = tuple(
    _CODE[drop]
    for drop in (
        *(Dropped.RESTS, Dropped.BREAKER, Dropped.TERMINATING, Dropped.DOWN),
        *(Dropped.MEDIA, Dropped.CONTEXT),
    )
)


def unfit(state: WorkerState, opened: OpenRequest, now_ns: int) -> int:
    """Code of the reason why a worker does not fit a request, 0: none. Column UNFIT."""
    return _CODE[_unfit(state, opened, now_ns)]


def _unfit(state: WorkerState, opened: OpenRequest, now_ns: int) -> Dropped:
    spec, health, request = state.spec, state.health, opened.request
    model, adapter, subset = opened.side.model, opened.side.adapter, request.subset
    if health.is_draining:
        return Dropped.DRAINING
    if subset is not None and spec.worker not in subset and spec.address not in subset:
        return Dropped.SUBSET
    if spec.models and model not in spec.models:
        return Dropped.MODEL
    if adapter and adapter not in state.adapters and adapter not in spec.adapters:
        return Dropped.ADAPTER  # neither runs, nor is listed
    if spec.worker in opened.failed:
        return Dropped.FAILED
    if health.is_down:
        return Dropped.DOWN
    if health.is_terminating:
        return Dropped.TERMINATING
    if not health.breaker.may_allow(now_ns):
        return Dropped.BREAKER
    if now_ns < health.rests_until_ns:
        return Dropped.RESTS
    if request.has_media and model in state.without_media:
        return Dropped.MEDIA
    is_long = request.prompt_tokens + (request.output_tokens_max or 0) > spec.context_of(model)
    return Dropped.CONTEXT if is_long else Dropped.NONE


def warmth(state: WorkerState, adapter: str) -> float:
    """1: the adapter is loaded, or none is needed; else 0. Column WARM."""
    return float(not adapter or adapter in state.adapters)


def dropped(columns: Floats, limits: PolicyLimits, *, need_tokens: int) -> npt.NDArray[np.intp]:
    """Code of the filter that drops each worker (place in DROPS), 0: it can take the request."""
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
            codes[(codes == 0) & mask] = _CODE[drop]
    return codes


def dropped_names(workers: list[str], codes: npt.NDArray[np.intp]) -> dict[str, str]:
    """Worker → word of the filter that drops it; workers that can take the request are left out."""
    if not np.count_nonzero(codes):
        return {}
    return {workers[place]: DROPS[codes[place]].value for place in np.flatnonzero(codes).tolist()}


def is_of_the_moment(codes: npt.NDArray[np.intp]) -> bool:
    """Whether waiting can help: some worker is dropped for its load only."""
    return bool((codes >= _OF_THE_MOMENT).any())

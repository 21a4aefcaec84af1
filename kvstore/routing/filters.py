"""Workers that cannot take a request, with the reason.

    health, breaker, subset, adapter (`unfit`)        queue, running, memory (`dropped`)

A request is held when `dropped` alone leaves nobody, and answered 503 when `unfit` does. Memory is
by need: what the prompt adds and what the answer may add. An idle worker passes always: a need
above the ceiling would be held for ever.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.routing.features import FeatureColumn
from kvstore.routing.fleet import Floats, WorkerState
from kvstore.routing.policy import PolicyLimits
from kvstore.routing.values import WorkerHealth


class Dropped(enum.StrEnum):
    """Reason of a filter, in receipts."""

    NONE = ""
    DOWN = "down"
    DRAINING = "draining"
    BREAKER = "breaker"
    """Also: full a moment ago, by its own word."""
    SUBSET = "subset"
    MODEL = "model"
    ADAPTER = "adapter"
    FAILED = "failed-before"
    """An earlier attempt of this request failed there."""
    QUEUE = "queue"
    RUNNING = "running"
    MEMORY = "memory"
    LANE = "lane"
    """A prefiller that is full, or kept for shorter prompts."""


DROPS: Final = tuple(Dropped)
_CODE: Final = {drop: code for code, drop in enumerate(DROPS)}
_OF_THE_MOMENT: Final = _CODE[Dropped.FAILED]
LANE: Final = _CODE[Dropped.LANE]
_UNHEALTHY: Final = {
    WorkerHealth.UP: 0,
    WorkerHealth.DRAINING: _CODE[Dropped.DRAINING],
    WorkerHealth.DOWN: _CODE[Dropped.DOWN],
}


def unfit(
    state: WorkerState,
    model: str,
    adapter: str,
    subset: Collection[str] | None,
    failed: Collection[str],
    now_ns: int,
) -> int:
    """Code of the reason, 0: none. Column UNFIT."""
    spec = state.spec
    if state.health is not WorkerHealth.UP:
        return _UNHEALTHY[state.health]
    if subset is not None and spec.worker not in subset and spec.address not in subset:
        return _CODE[Dropped.SUBSET]
    if spec.models and model not in spec.models:
        return _CODE[Dropped.MODEL]
    is_there = adapter in state.adapters or adapter in spec.adapters  # runs, or is listed
    if adapter and not is_there and not spec.adapters_max:
        return _CODE[Dropped.ADAPTER]
    if spec.worker in failed:
        return _CODE[Dropped.FAILED]
    if not state.breaker.may_allow(now_ns) or now_ns < state.busy_until_ns:
        return _CODE[Dropped.BREAKER]
    return 0


def warmth(state: WorkerState, adapter: str) -> float:
    """Column WARM."""
    if not adapter or adapter in state.adapters:
        return 1.0
    return 0.5 if len(state.adapters) < state.spec.adapters_max else 0.0


def dropped(columns: Floats, limits: PolicyLimits, *, need_tokens: int) -> npt.NDArray[np.intp]:
    """Code for each worker, 0: it can take the request."""
    queued, memory = columns[FeatureColumn.QUEUED], columns[FeatureColumn.MEMORY]
    capacity = columns[FeatureColumn.MEMORY_TOKENS]
    running = queued + columns[FeatureColumn.STREAMS]
    codes: npt.NDArray[np.intp] = columns[FeatureColumn.UNFIT].astype(np.intp)
    is_busy = running > 0
    if not np.count_nonzero(is_busy):
        return codes
    new = np.maximum(0.0, need_tokens - columns[FeatureColumn.HBM] * is_busy)
    filled = memory + new / np.maximum(capacity, 1.0)
    for drop, mask in (
        (Dropped.QUEUE, queued >= limits.queue_max),
        (Dropped.RUNNING, running >= limits.running_max),
        (Dropped.MEMORY, (capacity > 0) & (filled > limits.memory_ceiling) & is_busy),
    ):
        if np.count_nonzero(mask):
            codes[(codes == 0) & mask] = _CODE[drop]
    return codes


def dropped_names(workers: list[str], codes: npt.NDArray[np.intp]) -> dict[str, str]:
    """Worker → word of the filter."""
    if not np.count_nonzero(codes):
        return {}
    return {workers[place]: DROPS[codes[place]].value for place in np.flatnonzero(codes).tolist()}


def is_of_the_moment(codes: npt.NDArray[np.intp]) -> bool:
    """Whether waiting can help: some worker is dropped for its load or an open breaker only."""
    return bool(((codes > _OF_THE_MOMENT) | (codes == _CODE[Dropped.BREAKER])).any())

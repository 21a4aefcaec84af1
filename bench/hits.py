"""Requests for prompts that a cache beside the engine was given before: every one of them counts.

Covers: what one request took and found, and the figures over all of them. A request that found less
than was stored is as much a part of a median as one that found everything; what complete hits took
stands beside. Does not cover: sending them (`bench.peers.timing`, `bench.scenarios.files`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench import record
from kvstore.demo.engine import VllmServer

IDLE_TIMEOUT_S: Final = 5.0
_LOOK_S: Final = 0.05
_CALM_LOOKS: Final = 5


class Hit(msgspec.Struct, frozen=True):
    """One request with the engine's own cache emptied, and the same prompt once more."""

    ms: float
    """To the first token."""
    found_tokens: int
    """Of the prompt, in the cache beside the engine."""
    own_hit_ms: float
    """The second time, from the engine's own cache."""
    is_rested: bool
    """Whether the processors were idle before it. Older records do not say it."""


def ask(engine: VllmServer, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Milliseconds to the first token, and tokens that came from the cache beside the engine."""
    before = engine.hits().external_hits
    answer = engine.complete(prompt, max_tokens=1)
    return 1000 * answer.ttft_s, round(engine.hits().external_hits - before)


def hit(engine: VllmServer, prompt: tuple[int, ...]) -> Hit:
    """Ask with the engine's own cache empty, and once more."""
    engine.forget()
    is_rested = rest_until_idle()
    time_ms, found = ask(engine, prompt)
    own_ms, _ = ask(engine, prompt)
    return Hit(ms=time_ms, found_tokens=found, own_hit_ms=own_ms, is_rested=is_rested)


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def _busy_ticks() -> int:
    """Hundredths of a second, of all processors, that were not idle (proc_stat(5))."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = map(int, Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:])
    return sum(n for name, n in zip(names, ticks, strict=False) if name not in {"idle", "iowait"})


def rest_until_idle(
    *,
    busy_ticks: Callable[[], int] = _busy_ticks,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = _wait,
) -> bool:
    """Wait until the processors have nothing to do, at most IDLE_TIMEOUT_S. False: they still do.

    What an engine goes on with after an answer is in the way of the next request. On two cores, of
    two requests one after the other for engines beside each other, the second took twice as long,
    whichever cache it was for, and a median over both kinds was that of neither.
    """
    deadline, calm = clock() + IDLE_TIMEOUT_S, 0
    busy = busy_ticks()
    while calm < _CALM_LOOKS and clock() < deadline:
        wait(_LOOK_S)
        before, busy = busy, busy_ticks()
        calm = calm + 1 if busy - before <= 1 else 0
    return calm == _CALM_LOOKS


def figures(hits: Sequence[Hit], *, stored_tokens: int) -> dict[str, Any]:
    """Over all requests for prompts of which so many tokens were stored; complete hits beside."""
    all_ms = [one.ms for one in hits]
    whole_ms = [one.ms for one in hits if one.found_tokens >= stored_tokens]
    own_ms = [one.own_hit_ms for one in hits]
    middle, own = float(np.median(all_ms)), float(np.median(own_ms))
    return {
        "requests": len(hits),
        "complete": len(whole_ms),
        "not_rested": sum(not one.is_rested for one in hits),
        "found_over_stored_tokens": sum(one.found_tokens for one in hits)
        / (stored_tokens * len(hits)),
        "hit_ms": record.summary(all_ms),
        "complete_hit_ms": record.summary(whole_ms) if whole_ms else None,
        "own_hit_ms": record.summary(own_ms),
        "hit_over_own_hit": middle / own,
        "complete_hit_over_own_hit": float(np.median(whole_ms)) / own if whole_ms else None,
        "added_to_own_hit_ms": middle - own,
    }

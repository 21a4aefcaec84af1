"""What parts of `make bench-cluster` report: numbers beside their goals, or why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench import record

SEED = 1


class NotMeasured(Exception):
    """This machine lacks something; one clause that says what."""


def at_least(goal: float, value: float, **more: Any) -> dict[str, Any]:
    """A figure with its goal."""
    return {"value": _rounded(value), "at_least": goal, "met": bool(value >= goal), **more}


def at_most(goal: float, value: float, **more: Any) -> dict[str, Any]:
    """A figure with its goal."""
    return {"value": _rounded(value), "at_most": goal, "met": bool(value <= goal), **more}


def plain(value: float, **more: Any) -> dict[str, Any]:
    """A figure without a goal."""
    return {"value": _rounded(value), **more}


def ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, list[float]]:
    """median(over) / median(under), and its 95 % interval, resampling the pairs of each round."""
    pairs = np.asarray([over, under], dtype=float)
    picks = np.random.default_rng(SEED).integers(pairs.shape[1], size=(10_000, pairs.shape[1]))
    medians = np.median(pairs[:, picks], axis=2)
    middle = np.median(pairs, axis=1)
    interval = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return float(middle[0] / middle[1]), [_rounded(edge) for edge in interval.tolist()]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Count, mean, median, p95, least and greatest."""
    return {name: _rounded(value) for name, value in record.summary(values).items()}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")

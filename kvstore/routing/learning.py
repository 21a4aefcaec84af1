"""Weights of the terms, learned from predicted and achieved TTFT.

    terms at the worker that computed, achieved seconds ─▶ one bounded step ─▶ its weights

Normalised least mean squares: each step moves the weights of the terms that made up the prediction,
in proportion to their part in it. One step is bounded (an achieved time counts as at most twice
and at least half of the predicted one), and so are the weights. Workers learn apart; a new one
starts with the mean of its pool. Frozen: predicts with what it has.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstore.routing.costs import LEARNED
from kvstore.routing.fleet import Floats
from kvstore.routing.policy import PolicyLearning

_CLIP: Final = 2.0
_SMOOTH: Final = 0.05


class TermWeights:
    """Weights by worker name: arrays of as many as terms are learned, 1 at the start."""

    def __init__(self, settings: PolicyLearning) -> None:
        self.settings = settings
        self._of: dict[str, Floats] = {}
        self.steps = 0

    def of(self, workers: list[str]) -> Floats:
        """Shape (learned terms, workers)."""
        known = self._of
        return np.array([known[name] if name in known else self._new(name) for name in workers]).T

    def _new(self, worker: str) -> Floats:
        mean = np.mean(list(self._of.values()), axis=0) if self._of else np.ones(LEARNED)
        self._of[worker] = np.asarray(mean, dtype=np.float64)
        return self._of[worker]

    def learn(self, worker: str, raw: Floats, achieved_s: float) -> float:
        """One step. Args: `raw`: terms without weights at the worker. Returns the relative error of
        the prediction."""
        weights = self._of.get(worker)
        weights = self._new(worker) if weights is None else weights
        predicted = float(raw @ weights)
        if predicted <= 0:
            return 0.0
        error = (achieved_s - predicted) / predicted
        if not self.settings.is_frozen:
            target = min(max(achieved_s, predicted / _CLIP), predicted * _CLIP)
            step = self.settings.rate * (target - predicted) * raw / float(raw @ raw)
            moved = np.clip(weights + step, self.settings.least, self.settings.most)
            self._of[worker] = moved
            self.steps += 1
        return error

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        self._of.pop(worker, None)

    def snapshot(self) -> dict[str, list[float]]:
        """For a page and for the next process."""
        return {name: weights.tolist() for name, weights in self._of.items()}

    def restore(self, saved: dict[str, list[float]]) -> None:
        """Weights of an earlier process, cut to the bounds."""
        for name, values in saved.items():
            if len(values) == LEARNED:
                bounded = np.clip(np.array(values), self.settings.least, self.settings.most)
                self._of[name] = bounded

    def check(self) -> None:
        """Raises AssertionError if a weight is out of bounds."""
        for weights in self._of.values():
            assert weights.shape == (LEARNED,)
            assert (weights >= self.settings.least).all()
            assert (weights <= self.settings.most).all()


def smoothed_ratio(before: float, predicted: float, observed: float) -> float:
    """Cached tokens observed over predicted, smoothed; a prediction of nothing changes nothing."""
    if predicted < 1:
        return before
    return (1 - _SMOOTH) * before + _SMOOTH * min(1.0, observed / predicted)

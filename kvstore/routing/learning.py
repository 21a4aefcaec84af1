"""Learned values: weights of the terms, lengths of answers, tokens of text and media.

    terms at the worker that computed, achieved seconds ─▶ one bounded step ─▶ its weights
    output tokens ─▶ OutputLengths      prompt tokens ─▶ TokenEstimates, for prompts not rendered

Normalised least mean squares: each step moves the weights of the terms that made up the prediction,
in proportion to their part in it. One step is bounded (an achieved time counts as at most twice
and at least half of the predicted one), and so are the weights. Workers learn apart; a new one
starts with the mean of the others. Frozen: predicts with what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np

from kvstore.routing.rows import Floats
from kvstore.types import Latest

RATE: Final = 0.05
"""Weight of one observation."""
LEAST, MOST = 0.25, 4.0
"""Bounds of a weight."""
_CLIP: Final = 2.0
_SMOOTH: Final = 0.05
_WHOLE_TOKENS: Final = 1000
"""Observations with a prediction of fewer tokens count less, in proportion."""
_LEAST_S: Final = 1e-9
_OUTPUT_TOKENS: Final = 256.0
"""Expected tokens of an answer before any was seen."""
_OUTPUT_TOKENS_MAX: Final = 1 << 20
_MODELS_MAX: Final = 1000


def learn_weights(weights: Floats, raw: Floats, achieved_s: float) -> None:
    """Move the weights of a worker's terms, in place, by one step. `raw`: the terms without
    weights.
    """
    predicted = float(raw @ weights)
    if predicted > _LEAST_S:
        target = min(max(achieved_s, predicted / _CLIP), predicted * _CLIP)
        step = RATE * (target - predicted) * raw / float(raw @ raw)
        np.clip(weights + step, LEAST, MOST, out=weights)


class OutputLengths:
    """Tokens of answers, by model: what a request will probably need, whatever its limit."""

    def __init__(self) -> None:
        self._means = Latest[str, float](_MODELS_MAX)

    def expected(self, model: str, most: int | None) -> int:
        """Tokens that an answer will probably have. `most`: limit of the client; None: it gave
        none.
        """
        mean = self._means.get(model, _OUTPUT_TOKENS)
        return round(mean if most is None else min(mean, most))

    def learn(self, model: str, tokens: int) -> None:
        """Take the tokens of an answer into the mean of its model."""
        before = self._means.get(model, _OUTPUT_TOKENS)
        self._means[model] = before + _SMOOTH * (min(tokens, _OUTPUT_TOKENS_MAX) - before)


def smoothed_ratio(before: float, predicted: float, observed: float) -> float:
    """The smoothed ratio after one more observation: `before` moves towards observed ÷ predicted
    cached tokens. A prediction of less than a token changes nothing.
    """
    if predicted < 1:
        return before
    rate = _SMOOTH * min(1.0, predicted / _WHOLE_TOKENS)
    return (1 - rate) * before + rate * min(1.0, max(0.0, observed) / predicted)


# ── tokens of prompts ─────────────────────────────────────────────────────────────────────────────
# Of prompts that nobody has rendered: text by its bytes, media by their number. An image of a
# megabyte in base64 is some hundred tokens to its model, not 250,000: its cost is learned by model
# and kind from what engines report, as the bytes of a token of text are.

BYTES_PER_TOKEN: Final = 4.0
MEDIA_TOKENS: Final = {"image": 1000.0, "audio": 750.0, "video": 4000.0, "file": 2000.0}
"""Tokens of a medium by kind, before any was reported."""
BYTES_MIN, BYTES_MAX = 1.0, 16.0
TOKENS_MAX: Final = 1 << 20
_TEXT_BYTES_MIN: Final = 256
"""Prompts with less text are mostly template, and say little about tokens of text: not learned
from.
"""
_ESTIMATE_SMOOTH: Final = 0.1


class _ModelTokens(msgspec.Struct):
    bytes_per_token: float
    media: dict[str, float]


class TokenEstimates:
    """Learned tokens of text and media by model; see the module."""

    def __init__(self) -> None:
        self._models = Latest[str, _ModelTokens](_MODELS_MAX)

    def bytes_per_token(self, model: str) -> float:
        """Bytes of JSON text per token of a model."""
        found = self._models.get(model)
        return BYTES_PER_TOKEN if found is None else found.bytes_per_token

    def tokens(self, model: str, text_bytes: int, media: Mapping[str, int]) -> int:
        """Estimated tokens of a prompt, at least 1. `media`: number by kind."""
        costs = self._models[model].media if model in self._models else MEDIA_TOKENS
        text = text_bytes / self.bytes_per_token(model)
        return max(1, round(text + sum(costs[kind] * count for kind, count in media.items())))

    def learn(
        self, model: str, text_bytes: int, media: Mapping[str, int], prompt_tokens: int
    ) -> None:
        """Learn from a prompt's tokens as an engine reports them."""
        if not 0 < prompt_tokens <= TOKENS_MAX:
            return
        found = self._models.get(model) or _ModelTokens(BYTES_PER_TOKEN, dict(MEDIA_TOKENS))
        self._models[model] = found
        if not media and text_bytes >= _TEXT_BYTES_MIN:
            seen = min(max(text_bytes / prompt_tokens, BYTES_MIN), BYTES_MAX)
            found.bytes_per_token += _ESTIMATE_SMOOTH * (seen - found.bytes_per_token)
        elif len(media) == 1:  # several kinds: nobody says which of them cost what
            [(kind, count)] = media.items()
            rest = max(0.0, prompt_tokens - text_bytes / found.bytes_per_token)
            found.media[kind] += _ESTIMATE_SMOOTH * (rest / count - found.media[kind])

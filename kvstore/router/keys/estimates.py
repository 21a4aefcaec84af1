"""Tokens of prompts that nobody has rendered: text by its bytes, media by their number.

    JSON of a prompt ─▶ `without_media`: text with a digest for each medium, kinds of media
    text, kinds ─▶ TokenEstimates ─▶ tokens           `usage` of responses ─▶ `learn`

An image of a megabyte in base64 is some hundred tokens to its model, not 250,000: its cost is
learned by model and kind from what engines report, as the bytes of a token of text are. The digest
keeps its place in the text, so that equal beginnings of prompts stay equal.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import xxhash

BYTES_PER_TOKEN: Final = 4.0
MEDIA_TOKENS: Final = {"image": 1000.0, "audio": 750.0, "video": 4000.0, "file": 2000.0}
"""Tokens of a medium by kind, before any was reported."""
BYTES_MIN, BYTES_MAX = 1.0, 16.0
TOKENS_MAX: Final = 1 << 20
MODELS_MAX: Final = 1000
VALUE_BYTES_MIN: Final = 1024
"""Shorter values are text, even if they are base64."""
_SMOOTH: Final = 0.1
_TEXT_BYTES_MIN: Final = 256
"""Prompts with less text are mostly template, and say little about tokens of text: not learned
from.
"""
MEDIA_MAX: Final = 1024
"""Most media, and kinds of media, that are looked for in a prompt; further ones count as text."""
_KIND: Final = re.compile(rb'"type"\s*:\s*"(?:input_)?(image|audio|video|file|document)(?:_url)?"')
_NAMES: Final = {b"document": "file"}
_BASE64: Final = rb"([A-Za-z0-9+/\\=_-]{256}[^\"]*)"
_URI: Final = re.compile(rb";base64," + _BASE64)  # each begins with a word that is found fast
_OF_KEY: Final = re.compile(
    rb'"(?:url|(?:image|video|audio)_url|(?:file_)?data)"\s*:\s*"data:[^",]{0,128}\Z'
)
"""Key and beginning of a data URI; a URI without such a key before it is text."""
_VALUES: Final = (
    _URI,
    *(re.compile(key + rb'\s*:\s*"' + _BASE64) for key in (rb'"data"', rb'"file_data"')),
)


class PromptText(NamedTuple):
    """A prompt's JSON without its media, and their number by kind."""

    text: bytes
    media: Mapping[str, int]


def without_media(content: bytes) -> PromptText:
    """Replace media in base64 in a prompt's JSON by their digests, and count the media by kind."""
    kinds = [each[1] for each in islice(_KIND.finditer(content), MEDIA_MAX)]
    found = Counter(_NAMES.get(each, each.decode()) for each in kinds) if kinds else {}
    if len(content) <= VALUE_BYTES_MIN or not (kinds or b"base64" in content):
        return PromptText(content, found)
    spans = sorted(
        each.span(1)
        for value in _VALUES
        for each in islice(value.finditer(content), MEDIA_MAX)
        if each.end(1) - each.start(1) >= VALUE_BYTES_MIN
        and (value is not _URI or _OF_KEY.search(content, max(0, each.start() - 256), each.start()))
    )
    pieces, at = list[bytes](), 0
    for begin, end in spans:
        if begin >= at:  # not inside of another one
            pieces += content[at:begin], xxhash.xxh3_128_hexdigest(content[begin:end]).encode()
            at = end
    return PromptText(b"".join([*pieces, content[at:]]), found)


class _ModelTokens(msgspec.Struct):
    bytes_per_token: float
    media: dict[str, float]


class TokenEstimates:
    """Learned tokens of text and media by model; see the module."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, _ModelTokens] = OrderedDict()

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
        if model not in self._models:
            self._models[model] = _ModelTokens(BYTES_PER_TOKEN, dict(MEDIA_TOKENS))
        found = self._models[model]
        self._models.move_to_end(model)
        if len(self._models) > MODELS_MAX:
            self._models.popitem(last=False)
        if not media and text_bytes >= _TEXT_BYTES_MIN:
            seen = min(max(text_bytes / prompt_tokens, BYTES_MIN), BYTES_MAX)
            found.bytes_per_token += _SMOOTH * (seen - found.bytes_per_token)
        elif len(media) == 1:  # several kinds: nobody says which of them cost what
            [(kind, count)] = media.items()
            rest = max(0.0, prompt_tokens - text_bytes / found.bytes_per_token)
            found.media[kind] += _SMOOTH * (rest / count - found.media[kind])

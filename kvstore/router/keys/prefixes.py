"""Keys of a prompt, and the index's answer about them, within a few milliseconds.

    body ─▶ rendering: token ids ─▶ keys (`index.chain`) ─▶ index, in time ─▶ PrefixAnswer
         └▶ none in time: keys of the JSON's bytes, piece by piece ─▶ the core's own tree
    a list of prompts ─▶ each by itself: keys one behind the other, cached blocks added up

Keys of bytes say where an equal beginning was sent before; they equal no key of an engine, and are
never asked of the index. A prompt's text, its tokens and its keys stay in memory.

Covers: the order of sources, and what each is worth. Does not cover: tokens (`rendering`), calls of
the index (`index_calls`).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import xxhash

from kvstore.config.router import WorkerAddress
from kvstore.index.chain import adapter_keys
from kvstore.index.feed import Holder
from kvstore.index.index import Match
from kvstore.router.front.intake import CONTENT, Peek, edited, peek
from kvstore.router.keys.index_calls import PrefixScope, Spaces
from kvstore.router.keys.rendering import Rendering
from kvstore.routing.learning import BYTES_PER_TOKEN, TokenEstimates
from kvstore.routing.values import Prefix, PrefixAnswer
from kvstore.types import KEY_BYTES

PIECE_BYTES: Final = 512
"""Bytes of JSON per key: about 128 tokens."""
TOKENS_PER_PIECE: Final = round(PIECE_BYTES / BYTES_PER_TOKEN)
PIECES_MAX: Final = 4096
PROMPTS_MAX: Final = 16
"""Most prompts of a list that get keys; further ones are computed wherever the request goes."""


class Prefixes:
    """Source of prefixes: by keys of tokens, with the index's answer; else by keys of bytes."""

    def __init__(self, estimates: TokenEstimates, rendering: Rendering, spaces: Spaces) -> None:
        self.estimates, self._rendering, self._spaces = estimates, rendering, spaces

    async def of(
        self, path: str, body: bytes, read: Peek, request_salt: str, tenant: str = ""
    ) -> Prefix:
        """Facts about a request's prompt. Never raises for what a client sent."""
        scope, text = self._scope(read.model), _text_of(read)
        if scope is None:
            return self._of_bytes(read, text, request_salt)
        found = list[Prefix]()
        for each, its in _orders(body, read, scope.model):
            made = await self._rendering.keys_of(path, each, its, scope, request_salt, tenant)
            if made is None:  # its tokens are not known in time
                return self._of_bytes(read, text, request_salt)
            found.append(await self._found(scope, made.keys, made.token_count))
        all_of_it = found[0] if len(found) == 1 else _joined(found)
        return msgspec.structs.replace(all_of_it, media=text.media) if text.media else all_of_it

    async def of_ids(self, model: str, ids: list[int], tenant: str = "") -> Prefix:
        """Facts about a prompt by its token ids. Without keys, if nothing of the model is in the
        index, or they are not made in time.
        """
        if (scope := self._scope(model)) is not None:
            made = await self._rendering.keys_of_ids(ids, scope.plan, tenant)
            if made is not None:
                return await self._found(scope, made.keys, len(ids))
        return Prefix(max(1, len(ids)), block_tokens=TOKENS_PER_PIECE)

    async def of_keys(
        self, model: str, keys: bytes, prompt_tokens: int, block_tokens: int
    ) -> Prefix:
        """Facts about a prompt by its keys, each of `block_tokens`. Without an answer, if nothing
        of the model is in the index.
        """
        if (scope := self._scope(model)) is None:
            return Prefix(prompt_tokens, keys, block_tokens)
        if scope.plan.digest:  # keys are those of the engine
            found = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
            keys = b"".join(adapter_keys(found, scope.plan.digest))
        return await self._found(scope, keys, prompt_tokens)

    def _scope(self, model: str) -> PrefixScope | None:
        return self._spaces.scope(model) if self._spaces.index.endpoints else None

    def _of_bytes(self, read: Peek, found: PromptText, request_salt: str) -> Prefix:
        """Facts about a prompt that is not rendered."""
        text, media = found
        tokens = self.estimates.tokens(read.model, len(text), media)
        seed = f"{read.model}\0{request_salt}".encode(errors="replace")
        prompts = [bytes(each) for each in prompts_of(read)[:PROMPTS_MAX]]
        chains = [keys_of_bytes(each, seed) for each in prompts or [text]]
        per_token = self.estimates.bytes_per_token(read.model)
        return Prefix(
            tokens,
            b"".join(chains),
            max(1, round(PIECE_BYTES / per_token)),
            parts=tuple(len(each) // KEY_BYTES for each in chains) if prompts else (),
            text_bytes=len(text),
            media=media,
        )

    async def _found(self, scope: PrefixScope, keys: bytes, prompt_tokens: int) -> Prefix:
        answers = await asyncio.gather(
            *(self._spaces.index.match(tenant, space, keys) for tenant, space in scope.places)
        )
        found = [each for each in answers if each is not None]
        answer = None
        if found and len(found) == len(answers):
            answer = _one_of(found, (match for each in found for match in each.matches))
        return Prefix(prompt_tokens, keys, scope.plan.block_tokens, answer, scope.load_only)


def _orders(body: bytes, read: Peek, model: str) -> Sequence[tuple[bytes, Peek]]:
    """(body, its fields) for each prompt of a request, with the name of the served model."""
    prompts = prompts_of(read)[:PROMPTS_MAX]
    if not prompts and model == read.model:
        return [(body, read)]
    put = [{"model": model, "prompt": each} for each in prompts] or [{"model": model}]
    return [(each, peek(each)) for each in (edited(body, put=its) for its in put)]


def _text_of(read: Peek) -> PromptText:
    content = content_of(read)
    if len(content) == len(read.prompt):  # a text, or token ids: without media, however long
        return PromptText(content, {})
    return without_media(content)


def predicted_tokens(prefix: Prefix, worker: WorkerAddress) -> int:
    """Cached tokens that the index predicts at a worker: in its node's tiers, or its engine's
    memory.
    """
    if prefix.answer is None or worker.name in prefix.load_only:
        return 0
    blocks = (
        each.longest
        for each in prefix.answer.matches
        if each.holder.node == worker.node and each.holder.engine in ("", worker.engine)
    )
    return max(blocks, default=0) * prefix.block_tokens


def keys_of_bytes(content: bytes, seed: bytes) -> bytes:
    """Keys of a prompt that is not rendered, one per PIECE_BYTES; keys with other seeds differ."""
    key, keys = blake2b(seed, digest_size=KEY_BYTES).digest(), []
    end = min(len(content) // PIECE_BYTES, PIECES_MAX) * PIECE_BYTES
    for begin in range(0, end, PIECE_BYTES):
        key = blake2b(content[begin : begin + PIECE_BYTES], key=key, digest_size=KEY_BYTES).digest()
        keys.append(key)
    return b"".join(keys)


def _joined(found: list[Prefix]) -> Prefix:
    """Facts about a list of prompts as one: keys concatenated, matches of each location
    added up.
    """
    answers = [each.answer for each in found if each.answer is not None]
    sums: dict[Holder, Match] = {}
    for match in (match for answer in answers for match in answer.matches):
        other = sums.get(match.holder)
        sums[match.holder] = (
            match
            if other is None
            else msgspec.structs.replace(
                other,
                hbm_blocks=other.hbm_blocks + match.hbm_blocks,
                dram_blocks=other.dram_blocks + match.dram_blocks,
                file_blocks=other.file_blocks + match.file_blocks,
                trust=max(other.trust, match.trust),
            )
        )
    return msgspec.structs.replace(
        found[0],
        prompt_tokens=sum(each.prompt_tokens for each in found),
        keys=b"".join(each.keys for each in found),
        parts=tuple(len(each.keys) // KEY_BYTES for each in found),
        answer=None if len(answers) < len(found) else _one_of(answers, sums.values()),
    )


def _one_of(answers: Sequence[PrefixAnswer], matches: Iterable[Match]) -> PrefixAnswer:
    """One answer with these matches, and the worst trust of several."""
    trust = max(each.trust for each in answers)
    return msgspec.structs.replace(answers[0], trust=trust, matches=[*matches])


# ── prompts as bytes ──────────────────────────────────────────────────────────────────────────────
# JSON of a prompt ─▶ `without_media`: text with a digest for each medium, kinds of media
#
# The digest keeps the place of a medium in the text, so that equal beginnings of prompts stay
# equal.

PROMPTS_BYTES_MAX: Final = 4 << 20
"""A larger list of prompts is routed as one."""
VALUE_BYTES_MIN: Final = 1024
"""Shorter values are text, even if they are base64."""
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


def content_of(read: Peek) -> bytes:
    """JSON of the prompt, joined from all fields that it is made of. Equal prefixes of prompts are
    equal bytes.
    """
    return b"".join(getattr(read, name) for name in CONTENT)


def prompts_of(read: Peek) -> list[msgspec.Raw]:
    """JSON of each prompt of a list of several; empty: there is one."""
    prompt = bytes(read.prompt)[:64].lstrip()
    is_list = prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"[")
    if not is_list or len(read.prompt) > PROMPTS_BYTES_MAX:
        return []
    try:
        found = msgspec.json.decode(read.prompt, type=list[msgspec.Raw])
    except msgspec.MsgspecError:
        return []
    return found if len(found) > 1 else []


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

"""Keys of a prompt, and the index's answer about them, within a few milliseconds.

    body ─▶ rendering: token ids ─▶ keys (`index.chain`) ─▶ index, in time ─▶ PrefixAnswer
         └▶ none in time: keys of the JSON's bytes, piece by piece ─▶ the core's own tree

Keys of bytes say where an equal beginning was sent before; they equal no key of an engine, and are
never asked of the index. A prompt's text, its tokens and its keys stay in memory.

Covers: the order of sources, and what each is worth. Does not cover: tokens (`rendering`), calls of
the index (`index_calls`).
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import Final, Protocol

import msgspec

from kvstore.index.chain import adapter_keys
from kvstore.router.engines.workers import WorkerAddress
from kvstore.router.front.bodies import Peek, edited
from kvstore.router.keys.index_calls import IndexCalls, prefix_answer
from kvstore.router.keys.rendering import Rendering
from kvstore.router.keys.spaces import PrefixScope, Spaces
from kvstore.routing.values import PrefixAnswer, PrefixTrust

BYTES_PER_TOKEN: Final = 4
"""Estimate for prompts that are not rendered."""
PIECE_BYTES: Final = 512
"""Length of JSON that has a key: about 128 tokens."""
TOKENS_PER_PIECE: Final = PIECE_BYTES // BYTES_PER_TOKEN
PIECES_MAX: Final = 4096
KEY_BYTES: Final = 32
_ORDER: Final = (PrefixTrust.EXACT, PrefixTrust.CATCHING_UP, PrefixTrust.STALE)
"""An answer of several scopes is worth what its worst part is."""


class Prefix(msgspec.Struct, frozen=True):
    """Facts about a prompt."""

    prompt_tokens: int
    keys: bytes = b""
    block_tokens: int = TOKENS_PER_PIECE
    answer: PrefixAnswer | None = None
    """None: the index has none, or was not asked."""
    load_only: dict[str, str] = {}
    """Worker → why its prefixes are not known for this prompt's adapter."""


class Prefixes(Protocol):
    """A source of prefixes."""

    async def of(self, path: str, body: bytes, read: Peek, request_salt: str) -> Prefix:
        """Facts about a request's prompt. Never raises for what a client sent."""
        ...


class BytePrefixes:
    """Keys of the JSON's bytes alone."""

    async def of(self, path: str, body: bytes, read: Peek, request_salt: str) -> Prefix:
        return prefix_of_bytes(read.content, read.model, request_salt)


class KeyPrefixes:
    """Keys of tokens, and the index's answer about them; else keys of bytes."""

    def __init__(self, rendering: Rendering, index: IndexCalls, spaces: Spaces) -> None:
        self._rendering, self._index, self._spaces = rendering, index, spaces

    async def of(self, path: str, body: bytes, read: Peek, request_salt: str) -> Prefix:
        scope = self._spaces.scope(read.model)
        made = None
        if scope is not None:
            if scope.model != read.model:
                body = edited(body, put={"model": scope.model})
            made = await self._rendering.keys_of(
                path, body, read, scope.model, scope.plan, request_salt
            )
        if scope is None or made is None:
            return prefix_of_bytes(read.content, read.model, request_salt)
        return await self._found(scope, made.keys, made.token_count)

    async def of_ids(self, model: str, ids: list[int]) -> Prefix | None:
        """Facts about a prompt by its tokens; None: nothing of the model is in the index."""
        if (scope := self._spaces.scope(model)) is None:
            return None
        made = await self._rendering.keys_of_ids(ids, scope.plan)
        return await self._found(scope, made.keys, len(ids)) if made is not None else None

    async def of_keys(self, model: str, keys: bytes, prompt_tokens: int) -> Prefix | None:
        """Facts about a prompt by its keys, as `of_ids`."""
        if (scope := self._spaces.scope(model)) is None:
            return None
        if scope.plan.digest:  # keys are those of the engine
            found = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
            keys = b"".join(adapter_keys(found, scope.plan.digest))
        return await self._found(scope, keys, prompt_tokens)

    async def _found(self, scope: PrefixScope, keys: bytes, prompt_tokens: int) -> Prefix:
        answers = await asyncio.gather(
            *(self._index.match(tenant, space, keys) for tenant, space in scope.places)
        )
        epoch, peers = self._index.epoch, self._index.peers
        found = [prefix_answer(each, epoch, peers) for each in answers if each is not None]
        answer = None
        if found and len(found) == len(answers):
            answer = PrefixAnswer(
                trust=max((each.trust for each in found), key=_ORDER.index),
                matches=tuple(match for each in found for match in each.matches),
                peers=peers,
                epoch=epoch,
            )
        return Prefix(prompt_tokens, keys, scope.plan.block_tokens, answer, scope.load_only)


def predicted_tokens(prefix: Prefix, worker: WorkerAddress) -> int:
    """Cached tokens that the index lets expect at a worker: of its own node, or its own memory."""
    if prefix.answer is None or worker.name in prefix.load_only:
        return 0
    blocks = (
        max(each.hbm_blocks, each.dram_blocks, each.file_blocks)
        for each in prefix.answer.matches
        if each.node == worker.node and each.engine in ("", worker.engine)
    )
    return max(blocks, default=0) * prefix.block_tokens


def prefix_of_bytes(content: bytes, model: str, request_salt: str) -> Prefix:
    """Facts about a prompt that is not rendered. Keys of different models and salts differ."""
    parent = blake2b(f"{model}\0{request_salt}".encode(errors="replace"), digest_size=KEY_BYTES)
    key, keys = parent.digest(), []
    end = min(len(content) // PIECE_BYTES, PIECES_MAX) * PIECE_BYTES
    for begin in range(0, end, PIECE_BYTES):
        key = blake2b(content[begin : begin + PIECE_BYTES], key=key, digest_size=KEY_BYTES).digest()
        keys.append(key)
    return Prefix(max(1, len(content) // BYTES_PER_TOKEN), b"".join(keys))

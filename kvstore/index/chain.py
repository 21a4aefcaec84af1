"""Keys from token ids: the same that vLLM makes with `--prefix-caching-hash-algo sha256_cbor`.

    seed ─▶ root ─▶ key of block 0 ─▶ key of block 1 ─▶ …      each: parent, tokens, extra

Covers plain text, with or without a cache salt. Does not cover: prompts with images or adapters,
whose keys fold in what only the engine knows. A test holds this to the engine's own code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import cbor2

from kvstore.types import BlockKey

ALGORITHM: Final = "sha256_cbor"
"""The engine's name for this chain."""


def block_keys(
    tokens: Sequence[int], *, block_tokens: int, seed: str, cache_salt: str = ""
) -> list[BlockKey]:
    """Keys of the full blocks of a prompt, in chain order.

    Args:
        tokens: of the whole prompt; what fills no block at the end has no key.
        block_tokens: tokens of a block.
        seed: the engine's hash seed, as its space says it.
        cache_salt: of the request; empty: none.
    """
    return _chained(_digest(seed), tokens, block_tokens, _salted(cache_salt))


def root_key(seed: str) -> BlockKey:
    """Parent of a first block."""
    return BlockKey(_digest(seed))


def chained_keys(
    parent: BlockKey, tokens: Sequence[int], *, block_tokens: int, cache_salt: str = ""
) -> list[BlockKey]:
    """Keys of the full blocks that follow a block, in chain order. `cache_salt`: of a request whose
    first block is the first of these."""
    return _chained(parent, tokens, block_tokens, _salted(cache_salt))


def _salted(cache_salt: str) -> object:
    return (("cache_salt", cache_salt),) if cache_salt else None


def _chained(
    parent: bytes, tokens: Sequence[int], block_tokens: int, extra: object
) -> list[BlockKey]:
    keys = []
    for begin in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = _digest((parent, tuple(tokens[begin : begin + block_tokens]), extra))
        keys.append(BlockKey(parent))
        extra = None  # of the first block only: the chain carries it on
    return keys


def _digest(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

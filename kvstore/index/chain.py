"""Keys from token ids: the same that vLLM makes with `--prefix-caching-hash-algo sha256_cbor`.

    seed ─▶ root ─▶ key of block 0 ─▶ key of block 1 ─▶ …      each: parent, tokens, extra

Covers plain text, with or without a cache salt or a LoRA adapter; nodes hash keys of adapters again
(`adapter_keys`, ADR 2). Does not cover: prompts with images, whose keys fold in what only the
engine knows. A test holds this to the engine's own code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

import cbor2

from kvstore.types import BlockKey

_Extra = tuple[tuple[str, ...], ...]
ALGORITHM: Final = "sha256_cbor"
"""The engine's name for this chain."""


def block_keys(
    tokens: Sequence[int],
    *,
    block_tokens: int,
    seed: str,
    cache_salt: str = "",
    adapter: tuple[str, str] | None = None,
) -> list[BlockKey]:
    """Keys of the full blocks of a prompt, in chain order.

    Args:
        tokens: of the whole prompt; those after the last full block have no key.
        block_tokens: tokens of a block.
        seed: the engine's hash seed, as reported in its space.
        cache_salt: of the request; empty: none.
        adapter: (name, path) of the LoRA adapter, as the engine has them.
    """
    later = (("lora", *adapter),) if adapter is not None else ()
    return _chained(_digest(seed), tokens, block_tokens, (*later, *_salted(cache_salt)), later)


def adapter_keys(keys: Iterable[bytes], digest: bytes) -> list[BlockKey]:
    """Keys under which nodes hold the blocks of a LoRA adapter. `keys`: the engine's keys;
    `digest`: hash of the adapter's weights."""
    return [BlockKey(hashlib.sha256(digest + key).digest()) for key in keys]


def root_key(seed: str) -> BlockKey:
    """Key that the first block of a prompt has as its parent. `seed`: the engine's hash seed."""
    return BlockKey(_digest(seed))


def chained_keys(
    parent: BlockKey, tokens: Sequence[int], *, block_tokens: int, cache_salt: str = ""
) -> list[BlockKey]:
    """Keys of the full blocks that follow block `parent`, in chain order. `cache_salt`: of the
    request, if these begin its prompt."""
    return _chained(parent, tokens, block_tokens, _salted(cache_salt))


def _salted(cache_salt: str) -> _Extra:
    return (("cache_salt", cache_salt),) if cache_salt else ()


def _chained(
    parent: bytes, tokens: Sequence[int], block_tokens: int, first: _Extra, later: _Extra = ()
) -> list[BlockKey]:
    """Keys of the full blocks behind `parent`. `first`, `later`: extra keys hashed into the first
    block and into the others."""
    extra = first
    keys = []
    for begin in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = _digest((parent, tuple(tokens[begin : begin + block_tokens]), extra or None))
        keys.append(BlockKey(parent))
        extra = later
    return keys


def _digest(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

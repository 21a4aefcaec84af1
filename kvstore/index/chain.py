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

ALGORITHM: Final = "sha256_cbor"
"""The engine's name for this chain."""


def block_keys(
    tokens: Sequence[int],
    *,
    block_tokens: int,
    seed: str,
    cache_salt: str = "",
    adapter: tuple[str, str] | None = None,
    parent: BlockKey | None = None,
) -> list[BlockKey]:
    """Keys of the full blocks of a prompt, or of a piece of it, in chain order.

    Args:
        tokens: of all of it; those after the last full block have no key.
        block_tokens: tokens of a block.
        seed: the engine's hash seed, as reported in its space.
        cache_salt: of the request, hashed into the first block of its prompt; empty: none.
        adapter: (name, path) of the LoRA adapter, as the engine has them.
        parent: key of the block before the piece; None: the prompt begins here.
    """
    later = (("lora", *adapter),) if adapter is not None else ()
    extra = (*later, ("cache_salt", cache_salt)) if cache_salt else later
    above = _digest(seed) if parent is None else parent
    keys = []
    for begin in range(0, len(tokens) - block_tokens + 1, block_tokens):
        above = _digest((above, tuple(tokens[begin : begin + block_tokens]), extra or None))
        keys.append(above)
        extra = later
    return keys


def adapter_keys(keys: Iterable[bytes], digest: bytes) -> list[BlockKey]:
    """Keys under which nodes hold the blocks of a LoRA adapter. `keys`: the engine's keys;
    `digest`: hash of the adapter's weights."""
    return [BlockKey(hashlib.sha256(digest + key).digest()) for key in keys]


def _digest(value: object) -> BlockKey:
    return BlockKey(hashlib.sha256(cbor2.dumps(value, canonical=True)).digest())

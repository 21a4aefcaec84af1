"""What an engine's own memory holds, by keys: its events in, changes of the index out.

    parent, tokens ─stored──▶ keys of the chain            the engine's names of them are kept
    names ─────────removed──▶ the keys that they stood for

Engines may name blocks by other hashes than ours, or by a part of them. A block's tokens and its
parent's key give the key that everybody else uses (`chain`); the engine's name for it is remembered
until it is removed. What has a parent that is not known, an adapter or anything else beside its
tokens in its key is left out: it is not offered, which costs a miss.

Bounded: `block_count_max` names. Covers: keys and names. Does not cover: forms
(`wire.engine_events`), sockets, what to do when an event is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.index.chain import chained_keys, root_key
from kvstore.types import BlockKey

BLOCK_COUNT_MAX: Final = 1 << 20

Name = int | bytes
"""Of a block, by its engine."""


class EngineBlocks:
    """One data-parallel rank of one engine."""

    def __init__(self, *, seed: str, block_count_max: int = BLOCK_COUNT_MAX) -> None:
        """`seed`: the hash seed of the space, as its engines say it."""
        self._root = root_key(seed)
        self._block_count_max = block_count_max
        self._keys: dict[Name, BlockKey] = {}
        self.left_out = 0
        """Blocks that could not be named, since the start."""

    def __len__(self) -> int:
        return len(self._keys)

    def stored(
        self,
        names: Sequence[Name],
        *,
        parent: Name | None,
        tokens: Sequence[int],
        block_tokens: int,
        is_plain: bool,
    ) -> list[BlockKey]:
        """Blocks of one chain came; `is_plain`: nothing but tokens is in their keys. Returns the
        keys of those that can be named."""
        above = self._root if parent is None else self._keys.get(parent)
        if above is None or not is_plain or block_tokens * len(names) != len(tokens):
            self.left_out += len(names)
            return []
        keys = chained_keys(above, tokens, block_tokens=block_tokens)
        room = max(0, self._block_count_max - len(self._keys))
        self.left_out += max(0, len(names) - room)
        for name, key in zip(names[:room], keys[:room], strict=True):
            self._keys[name] = key
        return keys[:room]

    def removed(self, names: Sequence[Name]) -> list[BlockKey]:
        """Blocks went. Returns the keys of those that had been named."""
        return [key for name in names if (key := self._keys.pop(name, None)) is not None]

    def cleared(self) -> None:
        """All went."""
        self._keys.clear()

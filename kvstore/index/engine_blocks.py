"""Blocks in an engine's own memory, by keys: its events in, changes of the index out.

    parent, tokens ─stored──▶ keys of the chain            the engine's names of them are kept
    names ─────────removed──▶ the keys that they stood for

Engines may name blocks by other hashes than ours, or by a part of them. A block's tokens and its
parent's key give the key that everybody else uses (`chain`); the engine's name for it is remembered
until it is removed. A block with an unknown parent, an adapter or anything else but tokens and a
salt in its key is left out: it is not offered, which costs a miss. Where whole names are known to
be keys, nothing of that is needed.

Bounded: `block_count_max` names. Covers: keys and names. Does not cover: forms
(`wire.engine_events`), sockets, what to do when an event is missed (`engine_feed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvstore.index.chain import chained_keys, root_key
from kvstore.types import BlockKey

BLOCK_COUNT_MAX: Final = 1 << 20

Name = int | bytes
"""Name of a block in the engine's events: its hash."""


class EngineBlocks:
    """Blocks held by one data-parallel rank of one engine, by name and key."""

    def __init__(
        self,
        *,
        seed: str,
        block_tokens: int = 0,
        names_are_keys: bool = False,
        block_count_max: int = BLOCK_COUNT_MAX,
    ) -> None:
        """`seed`: hash seed of the space, as its engines report it. `block_tokens`: tokens per
        block of the space; blocks of another size are left out; 0: any size. `names_are_keys`:
        names of full length are keys already."""
        self._root = root_key(seed)
        self._block_tokens = block_tokens
        self._names_are_keys = names_are_keys
        self._block_count_max = block_count_max
        self._keys: dict[Name, BlockKey] = {}
        self._held: Counter[BlockKey] = Counter()
        """Held keys, with the number of names of each: a name may cover more than the block."""
        self.left_out = 0
        """Number of blocks since the start whose key could not be made."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        """Whether a block of this key is held. May be asked by any thread."""
        return key in self._held

    def keys(self) -> list[BlockKey]:
        """Keys of all held blocks, one per name."""
        return list(self._keys.values())

    def stored(
        self,
        names: Sequence[Name],
        *,
        parent: Name | None,
        tokens: Sequence[int],
        block_tokens: int,
        is_plain: bool,
        cache_salt: str = "",
    ) -> list[BlockKey]:
        """Add blocks of one chain. `is_plain`: nothing but tokens is hashed into their keys, and in
        the first block of a prompt this salt. Returns the keys of those blocks whose key can be
        made."""
        count = len(names)
        is_plain = is_plain and block_tokens * count == len(tokens)
        # Before any key is made: a full memory costs nothing.
        names = names[: max(0, self._block_count_max - len(self._keys))]
        if not names or block_tokens <= 0 or self._block_tokens not in (0, block_tokens):
            keys = []
        elif self._names_are_keys and all(isinstance(name, bytes) for name in names):
            keys = [BlockKey(name) for name in names if isinstance(name, bytes)]
        else:
            above = self._root if parent is None else self._keys.get(parent)
            its = tokens[: block_tokens * len(names)]
            keys = (
                chained_keys(above, its, block_tokens=block_tokens, cache_salt=cache_salt)
                if is_plain and above is not None
                else []
            )
        named = dict(zip(names, keys, strict=False))
        self.left_out += count - len(named)
        self.removed(list(named))  # a name that is given again may stand for another key now
        self._held.update(named.values())
        self._keys.update(named)
        return list(named.values())

    def removed(self, names: Sequence[Name]) -> list[BlockKey]:
        """Remove blocks by name. Returns the keys that no name is left for."""
        gone = []
        for name in names:
            if (key := self._keys.pop(name, None)) is not None:
                self._held[key] -= 1
                if not self._held[key]:
                    del self._held[key]
                    gone.append(key)
        return gone

    def cleared(self) -> None:
        """Remove all blocks."""
        self._keys.clear()
        self._held.clear()

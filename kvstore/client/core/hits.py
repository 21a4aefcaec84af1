"""Hits: how long one is, and the blocks of each KV cache group that it takes.

With one group a hit is the leading run of blocks that the node has. With several, each kind of
attention needs other blocks: full attention all of them, a window of 1,024 tokens only those that
end where the hit ends. The engine's own rules decide (`HitRules`), so that a hit is never longer
and never shorter than the engine would find in its own cache.

Values and a port. Does not cover: asking the node (`lookups.py`, `loads.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
"""[n] flags of a request's blocks of one group, in chain order."""


class Pending(msgspec.Struct, frozen=True):
    """Ask again in the next step."""


class Hit(msgspec.Struct, frozen=True):
    """`tokens` tokens beyond the prefix-cache hit can be loaded."""

    tokens: int


class Miss(msgspec.Struct, frozen=True):
    """Nothing to load; `reason` is one of a small fixed set of words for metrics and logs."""

    reason: str


Outcome = Pending | Hit | Miss
PENDING = Pending()


class HitPlan(msgspec.Struct, frozen=True):
    """The longest hit that all groups can serve."""

    tokens: int
    """From the start of the prompt."""
    first_blocks: tuple[int, ...]
    """By group: the first block that the hit needs; it needs all from there to its end."""
    lacking_group: int = 0
    """Group whose blocks ended the hit."""


class HitRules(Protocol):
    """The engine's rules for models with several KV cache groups."""

    def longest(self, present: Sequence[Mask], *, tokens_max: int) -> HitPlan:
        """The longest hit of at most `tokens_max` tokens, given the blocks of each group."""

    def are_needed(self, group: int, first_block: int, end_block: int) -> Sequence[bool] | None:
        """Flags of the blocks that a later hit can need; None: all."""


class DerivedKeys(Sequence[bytes]):
    """A sequence of keys that takes each from other keys when it is read."""

    @abstractmethod
    def _at(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._at(index % len(self))


class BlockKeys(DerivedKeys):
    """Keys of blocks that are `step` times as long as those that `keys` name: every `step`-th
    key, since each depends on all tokens before its end."""

    def __init__(self, keys: Sequence[bytes], step: int) -> None:
        self._keys, self._step = keys, step

    def __len__(self) -> int:
        return len(self._keys) // self._step

    def _at(self, at: int) -> bytes:
        return self._keys[(at + 1) * self._step - 1]


class PromptKeys(DerivedKeys):
    """Keys of the `whole` blocks of a prompt, and the key of its tail: of the tokens behind them,
    which fill a part of a block."""

    def __init__(self, keys: Sequence[bytes], whole: int, tail: bytes) -> None:
        self._keys, self._whole, self._tail = keys, whole, tail

    def __len__(self) -> int:
        return self._whole + 1

    def _at(self, at: int) -> bytes:
        return self._keys[at] if at < self._whole else self._tail


def block_keys(keys: Sequence[bytes], step: int) -> Sequence[bytes]:
    """Keys of blocks of `step` keys each."""
    return keys if step == 1 else BlockKeys(keys, step)


class Presence:
    """Blocks of one request that the node knows, by group, as of its last answers."""

    def __init__(self) -> None:
        self._masks: dict[int, Mask] = {}

    def update_from_answer(self, group: int, first_block: int, bits: bytes) -> None:
        """Take the node's flags of the blocks from `first_block` on, padded to whole bytes. An
        answer about block 0 replaces all earlier answers; one that leaves a gap is ignored."""
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").astype(np.bool_)
        before = self._masks.get(group)
        if not first_block:
            self._masks[group] = flags
        elif before is not None and first_block <= len(before):
            self._masks[group] = np.concatenate([before[:first_block], flags])

    def get(self, group: int) -> Mask | None:
        """Flags of the blocks of a group; None: the node has not answered."""
        return self._masks.get(group)

    def resized(self, group: int, count: int) -> Mask:
        """Flags of the first `count` blocks; unknown ones are absent."""
        mask = self._masks.get(group, np.zeros(0, np.bool_))
        sized: Mask = np.zeros(count, np.bool_)
        sized[: len(mask)] = mask[:count]
        return sized

    def mark_absent(self, group: int, first_block: int, end_block: int | None = None) -> None:
        """Clear the flags of blocks [first_block, end_block), which turned out to be absent;
        `end_block` None: to the end."""
        if group in self._masks:
            self._masks[group][first_block:end_block] = False

    def mark_present(self, group: int, blocks: range) -> None:
        """Set the flags of leased blocks, which came after the answer, from another node or from
        disk. Blocks beyond the end of the answer stay unknown."""
        if group in self._masks and blocks:
            self._masks[group][blocks.start : blocks.stop] = True

    def clear(self) -> None:
        """Forget all answers: the node may have lost everything."""
        self._masks.clear()

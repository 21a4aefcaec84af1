"""The port of eviction policies: order of one pool's slots. Words, masks, prints.

    insert, resume ──▶ held ──use, touch──▶ held ──pop──▶ gone (the policy chose)
                                      └──forget──▶ gone (another reason)

The contract of every policy, which `tests/contract/test_policy.py` checks:

- Order within a batch: the last of `words` counts as used last. Callers pass a chain from its end
  to its start, so that it loses its end before its start; a prefix without its start is worthless.
- The same between batches: where every use and touch of a block comes with all blocks before it in
  its chain, and stamps after its own, the block goes before them.
- A slot that may not go now (leased) is passed over and keeps its state.
- A block that comes in with a stamp older than others' goes before them.
- All wanted or all possible: `pop` returns fewer than `count` only when no more may go.

Cost: arrays in and out, no object per block, and no look at all slots in `insert`, `use`, `touch`
and `forget`. Does not cover: slots, leases and states (`engine.memory.slots`), disk
(`policy.disk`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]
"""Slot words: numbers of generation words, one per slot."""
NONE: Words = np.empty(0, dtype=np.int64)
Mask = NDArray[np.bool_]
Stamps = NDArray[np.int64]
"""One per word: grows with every use; 0 = the slot holds nothing; below 0: the block
with that stamp was popped, and its slot is not empty yet."""
Prints = NDArray[np.uint64]
"""One per block: a hash of its scope and key, which still identifies the block after its
eviction."""

MayGo = Callable[[Words | slice], Mask]
"""Mask of some words, or of all (a whole slice), that may be evicted now."""
Members = Callable[[], Mask]
"""Mask of words in the pool, one bool per word."""

_MIX, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


def prints(scope: int, keys: NDArray[np.uint64]) -> Prints:
    """Prints of keys, shape [n, 4], in a scope."""
    mixed: Prints = keys[:, 0] ^ np.uint64(scope * _MIX & _WORD)
    return mixed


@runtime_checkable
class Policy(Protocol):
    """Order of one pool's slots. Stamps come from the caller, one per word, each only once; those
    of `touch` are newer than all before. Words are distinct within a batch, but for `use` and
    `touch`, where a hint may name one twice."""

    def insert(self, words: Words, stamps: Stamps, prints: Prints) -> None:
        """Add blocks to the order: they were just put into these slots, which were empty."""

    def resume(self, words: Words, prints: Prints) -> None:
        """Add blocks that an earlier process put into these slots; their stamps are in place."""

    def use(self, words: Words, stamps: Stamps) -> None:
        """A request uses these blocks: once per request and block."""

    def touch(self, words: Words, stamps: Stamps) -> None:
        """Make blocks newer, because the same request asks again: this is no new use."""

    def forget(self, words: Words) -> None:
        """Remove these slots from the order, because they are emptied. Some may hold no block."""

    def pop(self, count: int, may_go: MayGo) -> Words:
        """Up to `count` victims, in order. They are held no more; their stamps are negative until
        `forget`."""

    def oldest_stamp(self) -> int | None:
        """Least stamp of all held slots, leased or not; None without any."""

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
and `forget`. Does not cover: slots, leases and states (`engine.slots`), disk (`policy.disk`).
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
"""One per block: a hash of its address, known beyond its eviction."""

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
        """Empty slots hold blocks now."""
        ...

    def resume(self, words: Words, prints: Prints) -> None:
        """Slots of another process hold blocks, with their stamps in place."""
        ...

    def use(self, words: Words, stamps: Stamps) -> None:
        """A request uses these blocks: once per request and block."""
        ...

    def touch(self, words: Words, stamps: Stamps) -> None:
        """The same request again: no new use, but a later one."""
        ...

    def forget(self, words: Words) -> None:
        """Empty these slots, whether they held blocks or not."""
        ...

    def pop(self, count: int, may_go: MayGo) -> Words:
        """Up to `count` victims, in order. They are held no more; their stamps are negative until
        `forget`."""
        ...

    def oldest_stamp(self) -> int | None:
        """Least stamp of all held slots, leased or not; None without any."""
        ...

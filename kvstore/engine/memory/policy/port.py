"""The port of eviction policies: which slots of one pool go next. Words, masks, prints.

    insert, resume ──▶ held ──use, touch──▶ held ──pop──▶ gone (the policy chose)
                                      └──forget──▶ gone (somebody else did)

What every policy keeps, and `tests/contract/test_policy.py` runs on each of them:

- Order within a batch: the last of `words` counts as used last. Callers pass a chain from its end
  to its start, so that it loses its end before its start; a prefix without its start is worthless.
- The same between batches: where every use and touch of a block comes with all blocks before it in
  its chain, and stamps after its own, the block goes before them.
- A slot that may not go now (leased) is passed over and nothing of it is forgotten.
- What comes in with a stamp older than others' goes before them.
- All that is wanted or all there is: `pop` returns fewer than `count` only when no more may go.

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
"""One per word: grows with every use; 0 = the slot holds nothing."""
Prints = NDArray[np.uint64]
"""One per block: a hash of its address, by which it is known after it went."""

MayGo = Callable[[Words | slice], Mask]
"""Which of some words, or of all of them (a whole slice), may be evicted now."""
Members = Callable[[], Mask]
"""Which words lie in the pool now, one bool per word."""

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
        """These slots, which held nothing, hold blocks now."""
        ...

    def resume(self, words: Words, prints: Prints) -> None:
        """These slots hold blocks, and their stamps are in place: another process used them."""
        ...

    def use(self, words: Words, stamps: Stamps) -> None:
        """A request came that these blocks serve: once per request and block."""
        ...

    def touch(self, words: Words, stamps: Stamps) -> None:
        """The same request again: they are wanted now, but by nobody new."""
        ...

    def forget(self, words: Words) -> None:
        """These slots hold nothing any more, whether they did or not."""
        ...

    def pop(self, count: int, may_go: MayGo) -> Words:
        """Up to `count` victims, the first to go first. They hold nothing any more."""
        ...

    def oldest_stamp(self) -> int | None:
        """Least stamp of what is held, leased or not; None when nothing is."""
        ...

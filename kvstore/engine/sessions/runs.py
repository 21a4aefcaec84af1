"""The longest run of a chain that is in dram, which a lease can pin.

Keys come in chain order; a block counts when every shard of it is there. Does not cover: pinning
(`leases`), answering (`lookups`, `files`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policy.port import NONE, Words
from kvstore.engine.memory.table import FEW_SCOPES, NO_ROWS, Keys, Rows
from kvstore.engine.state import State
from kvstore.wire.messages import ASKS_PER_LOOKUP_MAX, KEYS_PER_DATAGRAM_MAX

LOOKED_UP_MAX = ASKS_PER_LOOKUP_MAX * KEYS_PER_DATAGRAM_MAX
"""Blocks, times shards, that one message is answered about: as many as a lookup can lease with all
its asks. A message has room for so many keys and shards that a look at each would take 0.1 s."""


class Run(msgspec.Struct, frozen=True):
    """Leading keys of a chain that are in dram in every shard; there are `count`, and the arrays
    may be longer."""

    count: int
    rows_by_shard: list[Rows]
    words_by_shard: list[Words]

    def cut(self, count: int) -> Run:
        """This run, shortened to its first `count` keys."""
        return self if count == self.count else msgspec.structs.replace(self, count=count)

    def words(self) -> Words:
        """Slot words, [n][S], flat."""
        return _interleave(self.words_by_shard, self.count) if self.count else NONE

    def checksums(self, state: State, *, asked: bool) -> bytes:
        """Checksums of 16 bytes, [n][S]. Unless `asked`, those of blocks that need no verification
        are 0, and the result is empty if no block needs it."""
        if not self.count:
            return b""
        unverified = state.residency.unverified[self.words()]
        if not asked and not unverified.any():
            return b""
        sums = self.every_checksum(state)
        if not asked:
            sums[~unverified] = 0
        return sums.astype("<u8").tobytes()

    def every_checksum(self, state: State) -> NDArray[np.uint64]:
        """Checksums of all blocks, [n][S] of two words."""
        rows = _interleave(self.rows_by_shard, self.count)
        sums: NDArray[np.uint64] = state.residency.checksum[rows]
        return sums

    def repeats(self) -> bool:
        """Whether a key occurs twice; then its slot would, too."""
        return has_repeats(self.rows())

    def rows(self) -> Rows:
        """Rows of the first shard, which identify the keys in the others, too."""
        return self.rows_by_shard[0][: self.count] if self.count else NO_ROWS


def has_repeats(rows: Rows) -> bool:
    """Whether a row occurs twice. Rows of a chain mostly ascend; the costlier check is made only if
    they do not."""
    ascending = np.count_nonzero(rows[1:] > rows[:-1]) >= len(rows) - 1
    return not ascending and len(np.unique(rows)) != len(rows)


def leading_run(state: State, scopes: Sequence[int], keys: Keys) -> Run:
    """The longest run of leading keys that is in dram in all of `scopes`."""
    rows_by_shard, words_by_shard, count = [], [], len(keys)
    if len(scopes) > FEW_SCOPES:
        return run_of(state, state.residency.find_all(scopes, keys))
    for scope in scopes:
        rows = state.residency.find(scope, keys[:count])
        words = state.residency.words(rows)
        if len(words) and words.min() < 0:
            count = int((words < 0).argmax())
        rows_by_shard.append(rows)
        words_by_shard.append(words)
    return Run(count if scopes else 0, rows_by_shard, words_by_shard)


def run_of(state: State, rows: Rows) -> Run:
    """The longest run of leading keys that is in dram, for keys whose rows [S][n] are known."""
    words = state.residency.words(rows)
    return Run(leading(words >= 0), list(rows), list(words))


def leading(flags: NDArray[np.bool_]) -> int:
    """Number of leading columns of flags [S][n] that are set in every shard."""
    every: NDArray[np.bool_] = np.logical_and.reduce(flags, axis=0)
    return len(every) if bool(every.all()) else int(np.argmin(every))


def _interleave(columns: list[NDArray[np.int64]], count: int) -> NDArray[np.int64]:
    """Flat array [count][S] of the first `count` values of S columns."""
    if len(columns) == 1:
        return columns[0][:count]
    return np.stack([column[:count] for column in columns], axis=1).reshape(-1)

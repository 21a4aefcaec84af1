"""The journal's table of spaces: descriptions by engines, for the next process.

    entry of one page │ digest │ length │ msgpack: tenant, space, label, shards, Space │ zero │

With it that process offers, serves, scrubs and explains the kept blocks, before an engine has
attached again. An entry with a wrong digest, torn or damaged, is none: then that space waits for an
engine. When room runs out, the latest spaces are kept.

Does not cover: the blocks (`journal`), use of the table (`adoption`).
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.types import PAGE_BYTES, Shard, SpaceId
from kvstore.wire.space import Space

SPACE_COUNT_MAX: Final = 64
SPACE_WORDS: Final = PAGE_BYTES // 8
_HEAD_BYTES: Final = 16
Address = tuple[str, SpaceId]


class Remembered(msgspec.Struct, frozen=True, array_like=True):
    """A space as its latest session described it."""

    tenant: str
    space_id: bytes
    label: str
    shards: tuple[tuple[int, int, int, int], ...]
    """Layers and heads (begin and end of each) of the shard in each column."""
    space: Space

    @property
    def address(self) -> Address:
        return self.tenant, SpaceId(self.space_id)


class SpaceTable:
    """The table of spaces, in the journal's memory, [SPACE_COUNT_MAX * SPACE_WORDS] u64."""

    def __init__(self, memory: NDArray[np.uint64]) -> None:
        self._entries = memory.reshape(SPACE_COUNT_MAX, SPACE_WORDS)
        self._rows: dict[Address, int] = {}
        """Row of the entry of each space, least recently used first."""

    def remember(self, address: Address, label: str, shards: list[Shard], space: Space) -> None:
        """Write or refresh the entry of a space. A space too large for one page is left out; when
        the table is full, the least recently used space gives way."""
        fields = tuple(msgspec.structs.astuple(shard) for shard in shards)
        body = msgspec.msgpack.encode(Remembered(*address, label, fields, space))
        if len(body) > PAGE_BYTES - _HEAD_BYTES:  # of very many ranks: an engine will say it again
            return
        row = self._rows.pop(address, None)
        if row is None:
            row = self._free_row()
        self._rows[address] = row
        text = len(body).to_bytes(8, "little") + body
        words = np.frombuffer((_digest(row, text) + text).ljust(PAGE_BYTES, b"\0"), "<u8")
        if (self._entries[row] != words).any():
            self._entries[row] = words

    def _free_row(self) -> int:
        if len(self._rows) == SPACE_COUNT_MAX:
            return self._rows.pop(next(iter(self._rows)))
        return next(row for row in range(SPACE_COUNT_MAX) if row not in self._rows.values())

    def found(self) -> tuple[Remembered, ...]:
        """Valid entries that an earlier process wrote."""
        found: dict[Address, Remembered] = {}
        for row in range(SPACE_COUNT_MAX):
            entry = _entry(row, self._entries[row].tobytes())
            if entry is not None and entry.address not in found:
                found[entry.address] = entry
                self._rows[entry.address] = row
        return tuple(found.values())


def _digest(row: int, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=8, salt=row.to_bytes(8, "little")).digest()


def _entry(row: int, data: bytes) -> Remembered | None:
    """The space in an entry's page; None if the entry is invalid."""
    end = _HEAD_BYTES + int.from_bytes(data[8:_HEAD_BYTES], "little")
    if end > PAGE_BYTES or _digest(row, data[8:end]) != data[:8]:
        return None
    return msgspec.msgpack.decode(data[_HEAD_BYTES:end], type=Remembered)

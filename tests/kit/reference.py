"""Packing and unpacking a block, written to be obviously right: kernels are compared with this.

A layer is an array [block_count, page_bytes] u8, however it is strided. A slot is [block_bytes] u8.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from kvstore.kernels.port import Bytes
from kvstore.wire.record import PIECE_BYTES, Scope, Void
from kvstore.wire.segment import ROW, Table


def checksum(header: bytes, payload: bytes) -> bytes:
    """The 16 bytes of a block's checksum (`kvstore.wire.record`)."""
    pieces = [payload[at : at + PIECE_BYTES] for at in range(0, len(payload), PIECE_BYTES)]
    return xxhash.xxh3_128_digest(header + b"".join(map(xxhash.xxh3_128_digest, pieces)))


def pack(layers: Sequence[Bytes], block: int, slot: Bytes, header: bytes) -> bytes:
    """Copy one block, layer by layer, into its slot. Returns the checksum."""
    payload = b"".join(layer[block].tobytes() for layer in layers)
    slot[: len(payload)] = np.frombuffer(payload, np.uint8)
    return checksum(header, payload)


def unpack(slot: Bytes, layers: Sequence[Bytes], block: int, header: bytes) -> bytes:
    """Copy a slot into one block, layer by layer. Returns the checksum of the slot's payload."""
    begin = 0
    for layer in layers:
        page_bytes = layer.shape[1]
        layer[block] = slot[begin : begin + page_bytes]
        begin += page_bytes
    return checksum(header, slot[:begin].tobytes())


def table_of(
    scopes: Sequence[Scope],
    voids: Sequence[Void],
    *,
    pages: Sequence[int],
    scope_of: Sequence[int],
    keys: bytes,
    checksums: bytes,
) -> Table:
    """A table of a segment's records, a column each, whether they make sense or not."""
    rows = np.empty(len(pages), ROW)
    rows["page"], rows["scope"] = pages, scope_of
    rows["key"], rows["checksum"] = np.frombuffer(keys, "V32"), np.frombuffer(checksums, "V16")
    return Table(tuple(scopes), tuple(voids), rows)

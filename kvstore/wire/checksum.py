"""The checksum of a block: a tree of two levels over its address and its bytes.

    payload     │ piece 0 │ piece 1 │ … │ last │      PIECE_BYTES each, the last what is left
    checksum    xxh3-128( header ‖ xxh3-128(piece 0) ‖ xxh3-128(piece 1) ‖ … )

The header (`record.header`) is the address, and says how long the payload is and so how many pieces
there are. A piece needs nothing but its own bytes: threads, a device, or pieces that arrive in any
order can make their parts of it. Digests of pieces have all 128 bits: with 64 a changed piece would
pass one time in 2⁶⁴, however good the root, and they would be no cheaper.

512 KiB is the smallest power of two that costs about 5 % over one hash of everything, and on the
copy of a block less (bench/micro/checksum.py, ADR 7). The size is part of the form: changing it
takes a new `record.RECORD_VERSION`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash

PIECE_BYTES: Final = 512 << 10


def checksum_of(header: bytes, parts: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """The 16 bytes of a block's checksum.

    Args:
        header: its address.
        parts: its payload in order, cut anywhere, in bytes. Each is hashed before the next is asked
            for: they may be copied, or read into the same buffer, on the way. Large ones are hashed
            without the GIL.
    """
    pieces = []
    digest, room = xxhash.xxh3_128(), PIECE_BYTES
    for part in parts:
        rest = part
        while len(rest) >= room:
            digest.update(rest[:room])
            pieces.append(digest.digest())
            digest.reset()
            rest, room = rest[room:], PIECE_BYTES
        digest.update(rest)
        room -= len(rest)
    if room < PIECE_BYTES:
        pieces.append(digest.digest())
    return root_of(header, b"".join(pieces))


def piece_count(size_bytes: int) -> int:
    """How many pieces a payload of that size has."""
    return -(-size_bytes // PIECE_BYTES)


def root_of(header: bytes, digests: bytes | memoryview) -> bytes:
    """The checksum, of the digests of all pieces, in order."""
    return xxhash.xxh3_128_digest(header + digests)

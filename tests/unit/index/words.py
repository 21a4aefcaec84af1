"""Short forms for the tests of the index."""

from __future__ import annotations

import hashlib

from kvstore.types import SpaceId

SPACE = SpaceId(bytes(32))


def keys(*numbers: int) -> bytes:
    """A key of 32 bytes for each number. Four neighbours differ in their last byte only."""
    return b"".join(
        hashlib.sha256(b"%d" % (number // 4)).digest()[:-1] + bytes([number % 4])
        for number in numbers
    )

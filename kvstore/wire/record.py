"""What the checksum of a block covers.

    xxh3-128( header ‖ payload ),   header = magic ‖ version ‖ tenant ‖ space ‖ shard ‖ length ‖ key

The address is hashed before the bytes, so a block that is intact but belongs to another key,
tenant, model or shard fails just as a flipped bit does. The same header opens a record on disk.

Ways to be broken: other magic or version; tenant over 255 bytes; space or key of another length;
payload shorter or longer than `length`; checksum that differs.
"""

from __future__ import annotations

import struct

from kvstore.types import KEY_BYTES, BlockKey, Shard, SpaceId

MAGIC = b"KVSB"
RECORD_VERSION = 1
_PREFIX = struct.Struct("<4sHH32s4IQ")


def header_prefix(*, tenant: str, space: SpaceId, shard: Shard, block_bytes: int) -> bytes:
    """The part of the header that all blocks of one rank share; the tenant's name comes last."""
    name = tenant.encode()
    assert len(name) <= 255, "the attach protocol limits tenant names"
    assert len(space) == 32
    fixed = _PREFIX.pack(
        MAGIC,
        RECORD_VERSION,
        len(name),
        space,
        shard.layer_begin,
        shard.layer_end,
        shard.head_begin,
        shard.head_end,
        block_bytes,
    )
    return fixed + name


def header(prefix: bytes, key: BlockKey) -> bytes:
    """The bytes that go into the checksum before the payload."""
    assert len(key) == KEY_BYTES
    return prefix + key

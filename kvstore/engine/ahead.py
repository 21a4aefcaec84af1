"""Values about blocks that a router wants in dram before an engine asks for them."""

from __future__ import annotations

import msgspec

from kvstore.wire.peers import PrepareReply, PrepareRequest


class PrepareBlocks(msgspec.Struct, frozen=True):
    """Bring these blocks to dram, as far as there is room. BlocksPrepared answers at once."""

    ask: int
    """The shell's number; never used again."""
    its: PrepareRequest


class BlocksPrepared(msgspec.Struct, frozen=True):
    """Answer to PrepareBlocks."""

    ask: int
    its: PrepareReply
    cause: int

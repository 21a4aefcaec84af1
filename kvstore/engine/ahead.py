"""Values about blocks that a router wants in dram before an engine asks for them."""

from __future__ import annotations

import msgspec


class PrepareBlocks(msgspec.Struct, frozen=True):
    """Bring these blocks to dram, as far as there is room. BlocksPrepared answers at once."""

    ask: int
    """The shell's number; never used again."""
    tenant: str
    space: bytes
    engine: str
    """Engine that will ask for them; empty, or not attached: any of the space."""
    keys: bytes
    """In chain order."""


class BlocksPrepared(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to PrepareBlocks: leading blocks by their place when it came. The rest stays where it
    is."""

    ask: int
    dram: int = 0
    reading: int = 0
    """On their way from disk."""
    sought: int = 0
    """Asked of other nodes."""
    refused: str = ""
    """Why nothing was done, in one sentence."""
    cause: int = 0

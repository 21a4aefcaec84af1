"""Datagrams of engines for the operator of a node: nothing is decided by them, none is answered."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvstore.wire.bounds import U64, Message

UNSERVED_LENGTH_MAX: Final = 255


class Unserved(Message, frozen=True):
    """Scheduler: no session of this engine can open, or will again. Not answered; for operators."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=UNSERVED_LENGTH_MAX)]


class Pinned(Message, frozen=True):
    """Rank: bytes of the arena pinned for its device, and why not more, if so. For operators."""

    size_bytes: U64
    trouble: Annotated[str, msgspec.Meta(max_length=UNSERVED_LENGTH_MAX)] = ""

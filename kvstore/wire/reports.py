"""Datagrams of engines for the operator of a node: nothing is decided by them, none is answered."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvstore.wire.bounds import U64, Label, Message, Name

ASKS_PER_LOOKUP_MAX: Final = 8
"""Blocks behind the first 16,384 of a prompt are computed: asking would hold up the scheduler."""
UNSERVED_LENGTH_MAX: Final = 255


class Unserved(Message, frozen=True):
    """Scheduler: no session of this engine can open, or will again. Not answered; for operators."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=UNSERVED_LENGTH_MAX)]


class Pinned(Message, frozen=True):
    """Rank: bytes of the arena pinned for its device, and why not more, if so. For operators."""

    size_bytes: U64
    trouble: Annotated[str, msgspec.Meta(max_length=UNSERVED_LENGTH_MAX)] = ""


class Story(Message, frozen=True):
    """Scheduler: how a request ended, for `kvstore explain`. Not answered; may be lost.

    Counts and times only: neither text nor tokens nor keys. If a request was looked up several
    times (preempted, say), the story is about the last lookup.
    """

    request: Name
    """The engine's id of it, cut to REQUEST_BYTES_MAX."""
    age_ns: U64 = 0
    """Since it ended."""
    prompt_tokens: U64 = 0
    local_tokens: U64 = 0
    """Tokens of the prompt in the engine's own cache."""
    loaded_tokens: U64 = 0
    """Behind those, from the node."""
    file_tokens: U64 = 0
    """Loaded tokens that came from disk for this request."""
    peer_tokens: U64 = 0
    """Loaded tokens that came from another node for this request."""
    outcome: Annotated[str, msgspec.Meta(max_length=32)] = ""
    """Why nothing, or nothing more, was loaded: words of `client.core`; empty after a load."""
    detail: Label = ""
    """Error of a load that failed."""
    session: U64 = 0
    leases: Annotated[list[U64], msgspec.Meta(max_length=ASKS_PER_LOOKUP_MAX)] = []  # noqa: RUF012
    """LeaseAsks of the lookup, in chain order."""
    first_block: U64 = 0
    """Number in the prompt of the first block of these LeaseAsks."""
    queued_ns: U64 = 0
    """From its arrival to the first question."""
    lookup_ns: U64 = 0
    """From there to the node's answer."""
    promotion_ns: U64 = 0
    """From there on: waited for blocks from disk or another node."""
    load_ns: U64 = 0
    """Copying, on the slowest rank."""
    saved_ns: U64 = 0
    """Computing the loaded tokens, by the engine's measured pace; 0: none was measured."""
    stored_blocks: U64 = 0
    """Leading blocks that were stored, or known to be."""
    first_token_ns: U64 = 0
    """From its arrival; 0: none was sampled."""
    transfer: Label = ""
    """Name of its transfer (`pushes`), if it has one."""

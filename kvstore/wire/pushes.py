"""Datagrams about pushes, from a prefill node to a decode node (ADR 12); part of `messages`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvstore.wire.bounds import U64, KeyArray, Label, Message, Name, Sentence
from kvstore.wire.groups import GroupIndex

DeadlineMs = Annotated[int, Meta(ge=1, le=600_000)]


class PushOpen(Message, frozen=True):
    """Prefill scheduler: blocks of this transfer are being computed; decode nodes may be sent them,
    as they are sealed, until PushClose. Again: it goes on after a preemption."""

    transfer: Name
    """Both legs of a request have the same, by which they find each other (ADR 12)."""
    node: Label = ""
    """Decode node, if it is known: no other waits for this transfer."""


class PushClose(Message, frozen=True):
    """Prefill scheduler: no more blocks of this transfer will be sealed."""

    transfer: Name
    reason: Sentence = ""
    """Why it ended early: aborted, preempted, failed. Empty: its stores have ended, all ranks
    reported them."""


class PushExpect(Message, frozen=True):
    """Decode scheduler: a prefill node will send these blocks, keys in chain order. Before the Hint
    and the LeaseAsk that name them; PushEnd answers."""

    transfer: Name
    node: Name
    """Prefill node, by its name; its address comes from membership."""
    keys: KeyArray
    deadline_ms: DeadlineMs
    """From now on: nothing is waited for any longer."""
    group: GroupIndex = 0
    first_block: U64 = 0
    """Number in the prompt of the first of these blocks."""


class PushCancel(Message, frozen=True):
    """Decode scheduler: nobody waits for this transfer any more. PushEnd answers all the same."""

    transfer: Name


class PushEnd(Message, frozen=True):
    """Once for each PushExpect: its blocks are here, or no more will come."""

    transfer: Name
    group: GroupIndex = 0
    first_block: U64 = 0
    """As in the PushExpect."""
    blocks: U64 = 0
    """So many of its keys are here now, in any tier."""
    reason: Sentence = ""
    """Why not all of them."""

"""Carries out what the engine core decided.

Covers: the order that safety asks for (generations before every send), sending, admitting with
descriptors, hanging up. Failures come back as events for the next step, never as a call
into the engine. Does not cover: deciding (`kvstore.engine`), sockets (`kvstore.node.attach`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.engine import SPACE_DIGITS
from kvstore.engine.events import (
    Admit,
    Changed,
    Cleared,
    Command,
    Ended,
    Event,
    Follow,
    Hangup,
    OffersUntold,
    PeerCommand,
    Promote,
    RaiseGenerations,
    Release,
    Send,
    Shown,
    StoryTold,
    SwitchedOff,
    Unfollow,
)
from kvstore.node.attach import Attach, Sent
from kvstore.node.files import FileEnd
from kvstore.ports import Memory
from kvstore.types import ConnectionId, Tier
from kvstore.wire.feed import BlocksChanged, Removed, Stored
from kvstore.wire.messages import encode

if TYPE_CHECKING:
    from kvstore.peers.engine_memory import EngineMemory
    from kvstore.peers.member import Exchange
    from kvstore.tiers.hbm import HbmTier

_log = logging.getLogger(__name__)
_ABOUT_PLACES: Final = (RaiseGenerations, Shown)
"""Commands that publish generations and places: they are carried out first, in order."""


class Poisoned(Exception):
    """Slots may be reused without their readers noticing: the node must stop at once."""


class BatchOutcome(NamedTuple):
    """Outcome of one batch of commands."""

    events: list[Event]
    """Events that follow, such as failures, for the engine's next step."""
    cleared_blocks: int


class Executor:
    """Commands to effects. One thread."""

    def __init__(
        self,
        *,
        tier: Memory,
        attach: Attach,
        arena_fd: int,
        generation_fd: int,
        files: FileEnd | None = None,
        publish: Callable[[Changed], None] | None = None,
        offer: Callable[[BlocksChanged | OffersUntold], None] | None = None,
        exchange: Exchange | None = None,
        memory: EngineMemory | None = None,
        hbm: HbmTier | None = None,
        trace: Callable[[StoryTold], None] | None = None,
    ) -> None:
        self._trace = trace
        self._hbm = hbm
        self._memory = memory
        self._publish = publish
        self._offer = offer
        self._exchange = exchange
        self._tier = tier
        self._files = files
        self._attach = attach
        self._arena_fd = arena_fd
        self._generation_fd = generation_fd

    def carry_out(self, commands: Sequence[Command]) -> BatchOutcome:
        """Carry out all commands. Never raises for a peer that is slow or gone.

        Raises:
            Poisoned: the tier refused to raise a generation.
        """
        # Before anything else can tell somebody about these slots: see DESIGN.md, generation page.
        try:
            for command in commands:
                if isinstance(command, _ABOUT_PLACES):
                    self._publish_places(command)
        except AssertionError as error:
            raise Poisoned("generations could not be published") from error
        events: list[Event] = []
        cleared_blocks = 0
        for command in commands:
            match command:
                case RaiseGenerations() | Shown():
                    pass
                case Send(connection=number, message=message):
                    self._send(number, encode(message), (), events)
                case Admit(connection=number, welcome=welcome, with_arena=with_arena):
                    descriptors = [self._arena_fd] if with_arena else []
                    descriptors.append(self._generation_fd)
                    if welcome.hbm is not None and self._hbm is not None:
                        descriptors.append(self._hbm.page_fd)
                    self._send(number, encode(welcome), descriptors, events)
                case Hangup(connection=number, reason=reason):
                    _log.info("connection %d closed: %s", number, reason)
                    self._attach.hang_up(number, "engine")
                case Release(connection=number):
                    self._attach.release(number)
                case Cleared(blocks=blocks):
                    cleared_blocks += blocks
                case SwitchedOff():
                    _tell_what_is_off(command)
                case Changed():
                    assert self._publish is not None, "a change that nobody asked for"
                    self._publish(command)
                case Stored() | Removed() | OffersUntold():
                    assert self._offer is not None, "an offer that nobody asked for"
                    self._offer(command)
                case StoryTold():
                    assert self._trace is not None, "a story for traces that nobody asked for"
                    self._trace(command)
                case Promote():
                    assert self._hbm is not None, "an order for hbm, of which there is none"
                    self._hbm.submit(command)
                case Follow() | Unfollow():
                    assert self._memory is not None, "an engine that nobody wants to follow"
                    self._memory.carry_out(command)
                case _ if isinstance(command, PeerCommand):
                    assert self._exchange is not None, "a peer command without peers"
                    self._exchange.carry_out(command)
                case _:
                    assert self._files is not None, "a file command without a disk tier"
                    events += self._files.carry_out(command)
        return BatchOutcome(events, cleared_blocks)

    def _publish_places(self, command: RaiseGenerations | Shown) -> None:
        if isinstance(command, RaiseGenerations) and command.tier is Tier.DRAM:
            self._tier.raise_generations(command.slots, command.generations)
            return
        assert self._hbm is not None, "places in hbm, of which there is none"
        if isinstance(command, Shown):
            self._hbm.show(command.slots, command.targets)
        else:
            self._hbm.raise_generations(command.slots, command.generations)

    def _send(
        self, number: ConnectionId, datagram: bytes, descriptors: Sequence[int], events: list[Event]
    ) -> None:
        if self._attach.send(number, datagram, descriptors) is Sent.OVERFLOW:
            _log.warning("connection %d does not read: closed", number)
            self._attach.hang_up(number, "overflow")
            events.append(Ended(number))


def _tell_what_is_off(off: SwitchedOff) -> None:
    digits = off.space.hex()[:SPACE_DIGITS]
    _log.error(
        "space %s of tenant %s is switched off in %s: %s computed %d of its blocks again, and %d"
        " hold other values (error %.2f); look at its engines' models and settings, then"
        " 'kvstore clear --space %s' switches it on again",
        digits,
        off.tenant,
        off.tier.title if off.tier is not None else "all tiers",
        off.engine,
        off.blocks,
        off.diverged,
        off.error_ppm / 1e6,
        digits,
    )

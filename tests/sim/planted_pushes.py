"""Bugs of pushes that systems like this one shipped, planted one at a time: see `planted`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.engine.events import Land, Landed, LandingUp, PeerAsked, WritePush
from kvstore.engine.memory.slots import Slots
from kvstore.engine.moves.grants import Grants
from kvstore.engine.moves.pushes import Pushes
from kvstore.engine.sessions.leases import Lease
from kvstore.peers.peer_session import BlockServer, PeerSession
from kvstore.peers.pushes import PushCarrier
from kvstore.wire.peers import Pushed, PushGrant, PushOver, PushRevoke, PushWord
from tests.kit.planted import Patch, instead_of


@instead_of(Grants, "_give_up")
def late_write_into_an_extent_used_again(
    give_up: Any, self: Grants, granted: Any, *, is_quiet: bool
) -> None:
    """The extents of a write that failed are granted to the next one."""
    give_up(self, granted, is_quiet=True)


def epoch_ignored(patch: pytest.MonkeyPatch) -> None:
    """Grants outlive the transfer worker that they were given by."""

    def broken_up(self: Grants, event: LandingUp) -> None:
        for extents, pages in self._limbo:
            self._slab.free(extents, pages)
        self._limbo, self._limbo_ns = [], 0
        self._epoch = event.epoch
        self.give_room()

    @instead_of(Grants, "pushed")
    def broken_pushed(pushed: Any, self: Grants, event: Pushed) -> None:
        pushed(self, msgspec.structs.replace(event, epoch=self._epoch))

    patch.setattr(Grants, "transfer_worker_changed", broken_up)
    broken_pushed(patch)


@instead_of(PushCarrier, "_copy")
def sealed_before_it_is_verified(copy: Any, self: PushCarrier, command: Land) -> Any:
    """What a peer says that it pushed is believed."""
    landed = copy(self, command)
    return Landed(command.job, bytes([1] * len(landed.good)), command.checksums)


def grant_of_another_peer_used(patch: pytest.MonkeyPatch) -> None:
    """Grants of all peers are one heap."""
    post, move = BlockServer._post, PushCarrier._move

    def noted(self: BlockServer, session: Any, ask: Any) -> None:
        if isinstance(ask, PushGrant):
            vars(session).setdefault("taken", {})[ask.grant] = ask
        post(self, session, ask)

    async def mixed(self: PushCarrier, command: WritePush) -> Any:
        own = vars(self._sessions[command.peer]).setdefault("taken", {})
        own[command.its.grant] = command.its
        sessions: list[Any] = [its for peer, its in self._sessions.items() if peer != command.peer]
        for each in sessions:
            for grant, its in vars(each).get("taken", {}).items():
                if grant in each.grants:
                    other = msgspec.structs.replace(command, node=each.node, its=its, first=0)
                    return await move(self, other)
        return await move(self, command)

    patch.setattr(BlockServer, "_post", noted)
    patch.setattr(PushCarrier, "_move", mixed)


@instead_of(Pushes, "revoked")
def abort_not_told(_: Any, self: Pushes, event: PeerAsked[PushRevoke]) -> None:
    """The prefill node does not hear that nobody waits any more."""


@instead_of(Grants, "_revoke")
def extent_freed_by_a_timer(revoke: Any, self: Grants, expect: Any) -> None:
    """A request that is over needs its extents no more."""
    revoke(self, expect)
    for granted in [its for its in self._grants.values() if its.expect is expect]:
        self._give_up(granted, is_quiet=True)


@instead_of(Grants, "_land")
def block_of_the_wrong_group(
    begin: Any, self: Grants, event: Pushed, granted: Any, places: slice
) -> None:
    """The decode node takes the keys for those of its first group."""
    first = granted.expect.connection.owner.groups[0].asker
    granted.expect.asker, asker = first, granted.expect.asker
    begin(self, event, granted, places)
    granted.expect.asker = asker


@instead_of(PushCarrier, "_move")
async def half_a_chunk(move: Any, self: PushCarrier, command: WritePush) -> Any:
    """A write is reported when half of it has ended."""
    columns = len(command.block_bytes)
    half = command.slots[: max(1, len(command.slots) // columns // 2) * columns]
    return await move(self, msgspec.structs.replace(command, slots=half))


@instead_of(Lease, "intact")
def one_shard_of_several_looked_at(_: Any, self: Lease, slots: Slots) -> Any:
    """A block was not changed while a peer read it, or it was written, if its first shard was
    not."""
    same = [slots.generation[words] == generations for words, generations in self.pieces]
    return np.concatenate(same).reshape(-1, self.shards)[:, 0]


@instead_of(PushCarrier, "_hear")
def last_word_of_another_session(
    hear: Any, self: PushCarrier, session: PeerSession, word: PushWord | None
) -> None:
    """Any peer says that a grant is over."""
    if isinstance(word, PushOver):
        given = self._given.get(word.grant)
        session = session if given is None or given.session is None else given.session
    hear(self, session, word)


@instead_of(Grants, "grant_ended")
def last_word_of_an_older_epoch(over: Any, self: Grants, event: PushOver) -> None:
    """A grant is over by a word that a grant of that number got earlier."""
    over(self, msgspec.structs.replace(event, epoch=self._epoch))


@instead_of(Pushes, "_write")
def room_is_made_before_what_is_written_is_pinned(
    write: Any, self: Pushes, ask: Any, asker: Any, run: Any
) -> None:
    """Of a grant, what is on disk is read first: it may take the slots of what is in dram."""
    if ask.is_called:
        self._files.promote(asker, ask.keys[ask.next + run.count :], held=run.rows())
    write(self, ask, asker, run)


PUSHED: Sequence[Patch] = (
    late_write_into_an_extent_used_again,
    epoch_ignored,
    sealed_before_it_is_verified,
    grant_of_another_peer_used,
    abort_not_told,
    extent_freed_by_a_timer,
    block_of_the_wrong_group,
    half_a_chunk,
    one_shard_of_several_looked_at,
    last_word_of_another_session,
    last_word_of_an_older_epoch,
    room_is_made_before_what_is_written_is_pinned,
)
CALM: Sequence[Patch] = (abort_not_told, block_of_the_wrong_group, half_a_chunk)
"""Faults would excuse these, or hide them."""
FAULTS: dict[Patch, tuple[str, ...]] = {
    epoch_ignored: ("transfer worker dies",),
    room_is_made_before_what_is_written_is_pinned: ("node lies",),
    sealed_before_it_is_verified: ("read brings wrong bytes",),
    last_word_of_another_session: ("node lies",),
    last_word_of_an_older_epoch: ("feed says it twice", "transfer worker dies"),
}
"""Faults that it takes, where few seeds have them."""

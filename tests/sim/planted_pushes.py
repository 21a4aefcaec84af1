"""Bugs of pushes that systems like this one shipped, planted one at a time: see `planted`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from kvstore.engine.events import Land, Landed, LandingUp, WritePush
from kvstore.engine.memory.slots import Slots
from kvstore.engine.moves.grants import Grants
from kvstore.engine.moves.pushes import Pushes
from kvstore.engine.sessions.leases import Lease
from kvstore.peers.peer_session import PeerSession
from kvstore.peers.pushes import Lander, Pusher
from kvstore.wire.peers import Pushed, PushOver, PushWord
from tests.sim.planted import Planted, _both


def late_write_into_an_extent_used_again() -> contextlib.AbstractContextManager[Any]:
    """The extents of a write that failed are granted to the next one."""
    give_up = Grants._give_up

    def broken(self: Grants, granted: Any, *, is_quiet: bool) -> None:
        give_up(self, granted, is_quiet=True)

    return mock.patch.object(Grants, "_give_up", broken)


def epoch_ignored() -> contextlib.AbstractContextManager[Any]:
    """Grants outlive the transfer worker that they were given by."""

    def broken_up(self: Grants, event: LandingUp) -> None:
        for extents, pages in self._limbo:
            self._slab.free(extents, pages)
        self._limbo, self._limbo_ns = [], 0
        self._epoch = event.epoch
        self.give_room()

    pushed = Grants.pushed

    def broken_pushed(self: Grants, event: Pushed) -> None:
        pushed(self, msgspec.structs.replace(event, epoch=self._epoch))

    return _both(
        mock.patch.object(Grants, "transfer_worker_changed", broken_up),
        mock.patch.object(Grants, "pushed", broken_pushed),
    )


def sealed_before_it_is_verified() -> contextlib.AbstractContextManager[Any]:
    """What a peer says that it pushed is believed."""
    copy = Lander._copy

    def broken(self: Lander, command: Land) -> Landed:
        landed = copy(self, command)
        return Landed(command.job, bytes([1] * len(landed.good)), command.checksums)

    return mock.patch.object(Lander, "_copy", broken)


def grant_of_another_peer_used() -> contextlib.AbstractContextManager[Any]:
    """Grants of all peers are one heap."""
    move = Pusher._move

    async def broken(self: Pusher, command: WritePush, taken: Any) -> str:
        others = [each for (peer, _), each in self._taken.items() if peer != command.peer]
        return await move(self, command, others[0] if others else taken)

    return mock.patch.object(Pusher, "_move", broken)


def abort_not_told() -> contextlib.AbstractContextManager[Any]:
    """The prefill node does not hear that nobody waits any more."""

    def broken(self: Pusher, peer: int, grant: int) -> None:
        return

    return mock.patch.object(Pusher, "revoked", broken)


def extent_freed_by_a_timer() -> contextlib.AbstractContextManager[Any]:
    """A request that is over needs its extents no more."""
    revoke = Grants._revoke

    def broken(self: Grants, expect: Any) -> None:
        revoke(self, expect)
        for granted in [its for its in self._grants.values() if its.expect is expect]:
            self._give_up(granted, is_quiet=True)

    return mock.patch.object(Grants, "_revoke", broken)


def block_of_the_wrong_group() -> contextlib.AbstractContextManager[Any]:
    """The decode node takes the keys for those of its first group."""
    begin = Grants._land

    def broken(self: Grants, event: Pushed, granted: Any, places: slice) -> None:
        first = granted.expect.connection.owner.groups[0].asker
        granted.expect.asker, asker = first, granted.expect.asker
        begin(self, event, granted, places)
        granted.expect.asker = asker

    return mock.patch.object(Grants, "_land", broken)


def half_a_chunk() -> contextlib.AbstractContextManager[Any]:
    """A write is reported when half of it has ended."""
    move = Pusher._move

    async def broken(self: Pusher, command: WritePush, taken: Any) -> str:
        columns = len(command.block_bytes)
        half = command.slots[: max(1, len(command.slots) // columns // 2) * columns]
        return await move(self, msgspec.structs.replace(command, slots=half), taken)

    return mock.patch.object(Pusher, "_move", broken)


def one_shard_of_several_looked_at() -> contextlib.AbstractContextManager[Any]:
    """A block was not changed while a peer read it, or it was written, if its first shard was
    not."""

    def broken(self: Lease, slots: Slots) -> Any:
        same = [slots.generation[words] == generations for words, generations in self.pieces]
        return np.concatenate(same).reshape(-1, self.shards)[:, 0]

    return mock.patch.object(Lease, "intact", broken)


def last_word_of_another_session() -> contextlib.AbstractContextManager[Any]:
    """Any peer says that a grant is over."""
    hear = Lander._hear

    def broken(self: Lander, session: PeerSession, word: PushWord | None) -> None:
        if isinstance(word, PushOver):
            given = self._given.get(word.grant)
            session = session if given is None or given.session is None else given.session
        hear(self, session, word)

    return mock.patch.object(Lander, "_hear", broken)


def last_word_of_an_older_epoch() -> contextlib.AbstractContextManager[Any]:
    """A grant is over by a word that a grant of that number got earlier."""
    over = Grants.grant_ended

    def broken(self: Grants, event: PushOver) -> None:
        over(self, msgspec.structs.replace(event, epoch=self._epoch))

    return mock.patch.object(Grants, "grant_ended", broken)


def room_is_made_before_what_is_written_is_pinned() -> contextlib.AbstractContextManager[Any]:
    """Of a grant, what is on disk is read first: it may take the slots of what is in dram."""
    write = Pushes._write

    def broken(self: Pushes, ask: Any, asker: Any, run: Any) -> None:
        if ask.is_called:
            self._files.promote(asker, ask.keys[ask.next + run.count :], held=run.rows())
        write(self, ask, asker, run)

    return mock.patch.object(Pushes, "_write", broken)


PUSHED: Sequence[Planted] = (
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
CALM: Sequence[Planted] = (abort_not_told, block_of_the_wrong_group, half_a_chunk)
"""Faults would excuse these, or hide them."""
FAULTS: dict[Planted, tuple[str, ...]] = {
    epoch_ignored: ("transfer worker dies",),
    room_is_made_before_what_is_written_is_pinned: ("node lies",),
    sealed_before_it_is_verified: ("read brings wrong bytes",),
    last_word_of_another_session: ("node lies",),
    last_word_of_an_older_epoch: ("feed says it twice", "transfer worker dies"),
}
"""Faults that it takes, where few seeds have them."""

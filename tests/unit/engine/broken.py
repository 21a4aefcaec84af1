"""Engines that are broken on purpose, each in one way that would lose or mix up bytes.

The state machine and the seeded world must notice; otherwise they would notice nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.slots import Pool, Slots, SlotState
from kvstore.engine.moves.stores import Stores
from kvstore.engine.sessions.owners import Connection, Owner
from kvstore.engine.sessions.sessions import Sessions
from kvstore.engine.state import State
from kvstore.types import Shard
from kvstore.wire.messages import Drop, HelloRank, Message, Quiesce, Seal, slots_array
from kvstore.wire.space import ShardColumn

Patch = Callable[[pytest.MonkeyPatch], None]


def generation_stays(patch: pytest.MonkeyPatch) -> None:
    """A slot that is freed keeps its generation: late readers do not notice."""
    free = Slots.free

    def broken(self: Slots, words: Words) -> None:
        free(self, words)
        self.generation[words] -= np.uint64(1)

    patch.setattr(Slots, "free", broken)


def leases_do_not_hold(patch: pytest.MonkeyPatch) -> None:
    """Leased slots are evicted like others."""

    def broken(self: Slots, pool: Pool, count: int) -> Words:
        return pool.policy.pop(count, lambda w: self.state[w] == SlotState.SEALED)

    patch.setattr(Slots, "victims", broken)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """The end of a socket frees what its process may still write."""
    patch.setattr(Slots, "lose", Slots.free)


def any_process_frees(patch: pytest.MonkeyPatch) -> None:
    """Another process of the same rank frees what the first may still write."""

    def broken(self: Sessions, owner: Owner, hello: HelloRank) -> None:
        for old in list(self._state.connections.values()):
            old_hello = old.hello
            same_rank = isinstance(old_hello, HelloRank) and old_hello.rank == hello.rank
            if old.ended and old.owner.key == owner.key and same_rank:
                self._state.free(self._state.slots.of_writer(old.id))
                self._forget(old)

    patch.setattr(Sessions, "_rank_is_quiet_again", broken)


def any_generation_is_sealed(patch: pytest.MonkeyPatch) -> None:
    """A seal or drop counts whatever generation and session it names."""

    def broken(
        self: Stores, connection: Connection, message: Seal | Drop
    ) -> tuple[Words, NDArray[np.bool_]]:
        slots = self._state.slots
        words, known = slots.words_of(slots_array(message.slots))
        mine = slots.writer[words] == connection.id
        return words, known & mine & (slots.state[words] == SlotState.GRANTED)

    patch.setattr(Stores, "_valid", broken)


def any_writer_seals(patch: pytest.MonkeyPatch) -> None:
    """A seal counts whoever the slot was granted to, and whenever."""

    def broken(
        self: Stores, connection: Connection, message: Seal | Drop
    ) -> tuple[Words, NDArray[np.bool_]]:
        slots = self._state.slots
        words, known = slots.words_of(slots_array(message.slots))
        return words, known & (slots.state[words] == SlotState.GRANTED)

    patch.setattr(Stores, "_valid", broken)


def the_highest_rank_writes(patch: pytest.MonkeyPatch) -> None:
    """Of ranks with the same shard the last one is told to store it."""

    def broken(self: Owner, group: int) -> dict[Shard, HelloRank]:
        return {hello.groups[group].shard: hello for hello in self.rank_hellos()}

    patch.setattr(Owner, "columns", broken)


def every_replica_writes(patch: pytest.MonkeyPatch) -> None:
    """All ranks with the same shard are told to store it."""
    send = State.send

    def broken(self: State, connection: Connection, message: Message) -> None:
        if isinstance(message, Quiesce):
            columns = tuple(ShardColumn(column.number) for column in message.columns)
            message = msgspec.structs.replace(message, columns=columns)
        send(self, connection, message)

    patch.setattr(State, "send", broken)


ENGINES: tuple[Patch, ...] = (
    generation_stays,
    leases_do_not_hold,
    no_quarantine,
    any_process_frees,
    any_generation_is_sealed,
    any_writer_seals,
    the_highest_rank_writes,
    every_replica_writes,
)

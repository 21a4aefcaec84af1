"""Engines that are broken on purpose, each in one way that would lose or mix up bytes.

The state machine and the seeded world must notice; otherwise they would notice nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.shares import QuotaGroup
from kvstore.engine.memory.slots import Pool, Slots, SlotState
from kvstore.engine.moves.stores import Stores
from kvstore.engine.sessions.owners import Connection, Owner
from kvstore.engine.sessions.sessions import Sessions
from kvstore.engine.state import State
from kvstore.types import Shard
from kvstore.wire.messages import Drop, HelloRank, Message, Quiesce, Seal, slots_array
from kvstore.wire.space import ShardColumn
from tests.kit.planted import Patch, instead_of


@instead_of(Slots, "free")
def generation_stays(free: Any, self: Slots, words: Words) -> None:
    """A slot that is freed keeps its generation: late readers do not notice."""
    free(self, words)
    self.generation[words] -= np.uint64(1)


@instead_of(Slots, "victims")
def leases_do_not_hold(_: Any, self: Slots, asker: QuotaGroup, pool: Pool, count: int) -> Words:
    """Leased slots are evicted like others."""
    return pool.policy.pop(count, lambda w: self.state[w] == SlotState.SEALED)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """The end of a socket frees what its process may still write."""
    patch.setattr(Slots, "lose", Slots.free)


@instead_of(Sessions, "_rank_is_quiet_again")
def any_process_frees(_: Any, self: Sessions, owner: Owner, hello: HelloRank) -> None:
    """Another process of the same rank frees what the first may still write."""
    for old in list(self._state.connections.values()):
        old_hello = old.hello
        same_rank = isinstance(old_hello, HelloRank) and old_hello.rank == hello.rank
        if old.ended and old.owner.key == owner.key and same_rank:
            self._state.free(self._state.slots.of_writer(old.id))
            self._forget(old)


@instead_of(Stores, "_valid")
def any_generation_is_sealed(
    _: Any, self: Stores, connection: Connection, message: Seal | Drop
) -> tuple[Words, NDArray[np.bool_]]:
    """A seal or drop counts whatever generation and session it names."""
    slots = self._state.slots
    words, known = slots.words_of(slots_array(message.slots))
    mine = slots.writer[words] == connection.id
    return words, known & mine & (slots.state[words] == SlotState.GRANTED)


@instead_of(Stores, "_valid")
def any_writer_seals(
    _: Any, self: Stores, connection: Connection, message: Seal | Drop
) -> tuple[Words, NDArray[np.bool_]]:
    """A seal counts whoever the slot was granted to, and whenever."""
    slots = self._state.slots
    words, known = slots.words_of(slots_array(message.slots))
    return words, known & (slots.state[words] == SlotState.GRANTED)


@instead_of(Owner, "columns")
def the_highest_rank_writes(_: Any, self: Owner, group: int) -> dict[Shard, HelloRank]:
    """Of ranks with the same shard the last one is told to store it."""
    return {hello.groups[group].shard: hello for hello in self.rank_hellos()}


@instead_of(State, "send")
def every_replica_writes(send: Any, self: State, connection: Connection, message: Message) -> None:
    """All ranks with the same shard are told to store it."""
    if isinstance(message, Quiesce):
        columns = tuple(ShardColumn(column.number) for column in message.columns)
        message = msgspec.structs.replace(message, columns=columns)
    send(self, connection, message)


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

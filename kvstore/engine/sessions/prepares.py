"""Blocks that a router wants in dram before an engine asks for them, as by an engine's hint.

    PrepareBlocks ──▶ touched in dram, read from disk, asked of other nodes ──▶ BlocksPrepared

Rules. 1: nothing is pinned and nobody waits: what comes is a block like any other. 2: blocks come
in the shards of an engine of their space that is attached here; without one nothing is brought. 3:
what is brought ahead takes half of the room in motion at most (`Asker.is_ahead`) and, over time, a
share of the arena: a flood neither holds up engines nor turns the cache over.

Does not cover: callers and their limits (`kvstore.peers.preparer`).
"""

from __future__ import annotations

import msgspec

from kvstore.engine.events import BlocksPrepared, PrepareBlocks
from kvstore.engine.memory.residency import LOOKED_UP_MAX, leading
from kvstore.engine.memory.table import Keys
from kvstore.engine.moves.fetches import Fetches
from kvstore.engine.moves.files import REPEATED, Files
from kvstore.engine.sessions.askers import A_ROUTER, Asker
from kvstore.engine.sessions.awaited import Awaited
from kvstore.engine.state import State
from kvstore.types import SpaceId
from kvstore.units import NS_PER_S
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, keys_array
from kvstore.wire.peers import PrepareReply

AHEAD_SHARE = 2
"""At most one part in this many of the arena may be brought ahead at once …"""
AHEAD_NS = 30 * NS_PER_S
"""… and as much again in each such time."""


class Prepares:
    """Answers PrepareBlocks."""

    def __init__(self, state: State, files: Files, fetches: Fetches, awaited: Awaited) -> None:
        self._state = state
        self._files = files
        self._fetches = fetches
        self._awaited = awaited
        self._room_bytes = self._room_max = state.config.arena_bytes // AHEAD_SHARE
        """Bytes that could be brought ahead at the time `_room_ns`."""
        self._room_ns = 0
        """Time as of which `_room_bytes` counts."""

    def prepare(self, event: PrepareBlocks) -> None:
        """Begin to bring the blocks, and answer with what was begun."""
        state, its = self._state, event.its
        asker = self._asker((its.tenant, its.space), its.engine)
        if asker is None:
            refused = "no engine of this space is attached here, or the space is switched off"
            reply = PrepareReply(refused=refused)
        elif state.slots.any_starved:
            reply = PrepareReply(refused="memory is short here: blocks in use leave no room")
        else:
            keys = keys_array(its.keys)[:KEYS_PER_DATAGRAM_MAX]
            reply = self._bring(asker, keys[: LOOKED_UP_MAX // len(asker.scopes)])
        state.counters.prepares += 1
        state.counters.prepared_blocks += reply.reading + reply.sought
        state.say(BlocksPrepared(event.ask, reply, state.cause))

    def _asker(self, address: tuple[str, SpaceId], engine: str) -> Asker | None:
        """The asker for blocks of a (tenant, space): a group of an attached engine, `engine` if
        possible. None: no such engine is attached, or the space is off."""
        if self._state.is_off(*address):
            return None
        able = [
            (name != engine, group.asker)
            for (_, name, _), owner in self._state.owners.items()
            for group in (owner.groups if owner.open_session else ())
            if group.asker.address == address
        ]
        if not able:
            return None
        _, chosen = min(able, key=lambda each: each[0])
        # Its own parts of bounded resources stay the engine's.
        return msgspec.structs.replace(chosen, engine=A_ROUTER, title=A_ROUTER, is_ahead=True)

    def _bring(self, asker: Asker, keys: Keys) -> PrepareReply:
        state = self._state
        rows = state.residency.find_all(asker.scopes, keys)
        words = state.residency.words(rows)
        dram = leading(words >= 0)
        for size, column in zip(asker.slot_sizes, words, strict=True):
            state.slots.touch(state.slots.pool(size), column[:dram])
        held = leading(rows >= 0)  # in dram, or on disk
        block_bytes = sum(asker.slot_sizes)
        room = self._room(state.now_ns) // block_bytes
        there = self._files.promote(asker, keys[: min(held, dram + room)])
        if there == REPEATED:
            return PrepareReply(refused="a key is named twice")
        reading = max(0, there - dram)
        sought = 0
        if dram + reading == held:  # behind a block that stays on disk, nothing helps
            pushed = held + self._awaited.run(asker, keys[held:])
            sought = self._fetches.want(asker, keys[pushed : pushed + room - reading]).coming
        self._room_bytes -= (reading + sought) * block_bytes
        return PrepareReply(dram, reading, sought)

    def _room(self, now_ns: int) -> int:
        """Bytes that may be brought ahead now."""
        more = self._room_max * (now_ns - self._room_ns) // AHEAD_NS
        self._room_bytes, self._room_ns = min(self._room_max, self._room_bytes + more), now_ns
        return max(0, self._room_bytes)

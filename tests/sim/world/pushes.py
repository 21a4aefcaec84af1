"""Requests that one engine prefills for another: the legs as a connector would tell its node.

An engine gets the request, and says PushOpen; another one gets it too, of the same tenant and space
mostly, and says PushExpect. Sooner or later one leg ends: PushClose, in good order or not, or
PushCancel. A node that lies says last words about grants of others, too. Keys, bytes, leases are
looked at by the oracles of engines and of `peers`.

Does not cover: when real connectors say so (`kvstore.connector`).
"""

from __future__ import annotations

import hashlib
import random
from typing import Final, NamedTuple

from kvstore.wire.messages import Message, PushCancel, PushClose, PushExpect, PushOpen
from tests.sim.world.engine import SimEngine
from tests.sim.world.groups import BLOCK_TOKENS
from tests.sim.world.requests import SimRequest
from tests.sim.world.stage import Stage

NEW_SHARE: Final = 0.1
"""Of the events of a world."""
_END_SHARE: Final = 0.3
"""As often as one begins."""
_UNKNOWN_SHARE: Final = 0.7
"""Of chains that nobody holds yet."""
_DEADLINES_MS: Final = (20, 2000, 5000, 60_000)
UNDER_WAY_MAX: Final = 16
LIAR: Final = "node lies"
LIES: Final = "last words of others"
"""Of itself, where nodes lie."""
_LIES_SHARE: Final = 0.3
"""Of the events of a world."""


class _Leg(NamedTuple):
    transfer: str
    prefill: SimEngine
    decode: SimEngine


class SimPushes:
    """All transfers of a world."""

    def __init__(self, world: Stage, *, new_share: float) -> None:
        """`new_share`: of the world's events."""
        self._world, self._new_share = world, new_share
        # Chance of its own: other events of a world stay as they are.
        self._random = random.Random(f"pushes of {world.seed}")
        self._chance = random.Random(f"lies about pushes of {world.seed}")
        self._under_way: list[_Leg] = []
        self.count = 0

    def go_on(self) -> None:
        """Perhaps one begins, or one ends."""
        source = self._random
        roll = source.random()
        if roll < self._new_share and len(self._under_way) < UNDER_WAY_MAX:
            self._begin()
        elif roll < self._new_share * (1 + _END_SHARE) and self._under_way:
            self._end(self._under_way.pop(source.randrange(len(self._under_way))))
        if LIAR in self._world.enabled and self._chance.random() < _LIES_SHARE:
            self._lie()

    def _begin(self) -> None:
        world, source = self._world, self._random
        prefill, decode = source.choice(world.engines), source.choice(world.engines)
        if prefill is decode or not (prefill.runs and decode.runs):
            return
        self.count += 1
        leg = _Leg(f"x{self.count}", prefill, decode)
        self._under_way.append(leg)
        keys = source.choice(world.chains)
        if source.random() < _UNKNOWN_SHARE:
            names = (f"{leg.transfer}/{n}".encode() for n in range(len(keys)))
            keys = [hashlib.sha256(name).digest() for name in names]
        keys = keys[: source.randint(1, min(len(keys), prefill.blocks - 2, decode.blocks - 2))]
        world.note(f"{prefill.name} prefills {len(keys)} blocks for {decode.name}")
        expect = PushExpect(
            leg.transfer,
            prefill.machine.name,
            b"".join(keys),
            source.choice(_DEADLINES_MS),
            group=source.randrange(len(decode.kinds)),
        )
        words = [(prefill, PushOpen(leg.transfer)), (decode, expect)]
        if source.random() < 0.5:
            words.reverse()
        for engine, word in words:
            self._say(engine, word)
            if source.random() < 0.8:
                tokens = len(keys) * BLOCK_TOKENS
                name = f"{leg.transfer}-{engine.name}"
                engine.add(SimRequest(name, keys, tokens=tokens, decode_tokens=0))

    def _lie(self) -> None:
        """A node says last words about grants that others have."""
        machines = self._chance.sample(self._world.machines, len(self._world.machines))
        peers = [machine.peers for machine in machines if machine.peers is not None]
        if len(peers) > 1 and peers[0].tell_others_grants(peers[1]):
            self._world.faults[LIES] += 1
            self._world.note(f"{peers[0].name} says last words of others to {peers[1].name}")

    def _end(self, leg: _Leg) -> None:
        source = self._random
        if source.random() < 0.3:
            self._say(leg.decode, PushCancel(leg.transfer))
            if source.random() < 0.7:
                return  # its prefill goes on
        reason = source.choice(("", "", "", "aborted", "preempted"))
        self._say(leg.prefill, PushClose(leg.transfer, reason))

    def _say(self, engine: SimEngine, word: Message) -> None:
        if engine.scheduler_socket and engine in self._world.engines:
            engine.machine.sockets.send(engine.scheduler_socket, word)

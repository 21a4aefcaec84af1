"""Transports with an arena of their own, for tests: `TransferWorkerParty` is a real transfer worker
child over a real arena, which can be killed and stopped; `LocalParty` is the reference within this
process.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from typing import Final
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Arena
from kvstore.errors import TransportError
from kvstore.peers.transfer_worker import TransferWorkerChild
from kvstore.ports import Landing, Outcome, Pieces
from kvstore.testing.process import stop_process
from kvstore.transport.pieces import joined, make_pieces
from kvstore.types import Incarnation
from kvstore.wire import transfer_worker as wire
from kvstore.wire.transfer_worker import Direction
from tests.kit.loopback import Hub, Loopback
from tests.kit.transport_checks import ARENA_BYTES, LANDING

LIMIT_S: Final = 90.0
"""For anything to happen: a back end is loaded by a machine that is busy with other tests."""
CONNECT: Final = 1 << 62
"""Number of the transfer of nothing that follows a Connect: it is done when that was answered."""
BEATS: Final = 4
"""So long nothing happens when nothing is to happen: more than enough for 32 MiB."""


class LocalParty:
    """The reference transport."""

    def __init__(self, hub: Hub, name: str, *, has_landing: bool = True) -> None:
        self.arena: NDArray[np.uint8] = np.zeros(ARENA_BYTES, np.uint8)
        landing = Landing(LANDING.start, self.arena[LANDING]) if has_landing else None
        self._transport = Loopback(hub, name, self.arena, landing)
        self._refused: dict[int, type[Outcome]] = {}

    def descriptor(self) -> bytes:
        return self._transport.describe()

    def connect(self, peer: str, descriptor: bytes) -> None:
        self._transport.connect(peer, descriptor)

    def read(self, number: int, peer: str, pieces: Pieces) -> None:
        self._post(number, peer, pieces, Direction.READ)

    def write(self, number: int, peer: str, pieces: Pieces) -> None:
        self._post(number, peer, pieces, Direction.WRITE)

    def _post(self, number: int, peer: str, pieces: Pieces, direction: Direction) -> None:
        try:
            self._transport.post(number, peer, pieces, direction)
        except TransportError:
            self._refused[number] = wire.Failed

    def forget(self, peer: str) -> None:
        self._transport.forget(peer)

    def ends(self, count: int) -> dict[int, type[Outcome]]:
        found = self.ends_by_now()
        assert len(found) == count, found
        return found

    def ends_by_now(self) -> dict[int, type[Outcome]]:
        found, self._refused = self._refused, {}
        return found | {each.transfer: type(each) for each in self._transport.poll()}

    def pause(self) -> None:
        self._transport.stopped = True

    def resume(self) -> None:
        self._transport.stopped = False

    def kill(self) -> None:
        self._transport.close()

    def open_files(self) -> int:
        return 0

    def close(self) -> None:
        self._transport.close()


class TransferWorkerParty:
    """A transfer worker child. Its end of a transfer is what the transport's outcomes came to."""

    def __init__(
        self,
        name: str,
        backend: str,
        *,
        options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        arena_bytes: int = ARENA_BYTES,
        paced: bool = False,
        has_landing: bool = False,
        landing: tuple[int, int] = (LANDING.start, LANDING.stop - LANDING.start),
    ) -> None:
        """Started, and known to its back end."""
        self._arena = Arena(arena_bytes=arena_bytes, incarnation=Incarnation(1))
        offset, size_bytes = landing if has_landing else (0, 0)
        begin = wire.Begin(
            backend,
            name,
            arena_bytes,
            dict(options or {}),
            paced=paced,
            landing_begin=offset,
            landing_bytes=size_bytes,
        )
        with patch.dict(os.environ, environment or {}):
            self.child = TransferWorkerChild(self._arena.arena_fd, self._arena.hold_fd, begin)
        self._ends: dict[int, type[Outcome]] = {}
        self._beats = 0
        self._unreachable: dict[str, str] = {}
        self.registered: wire.Registered | None = None
        try:
            self._wait(lambda: self.registered is not None)
        except BaseException:
            self.close()
            raise

    @property
    def arena(self) -> NDArray[np.uint8]:
        return self._arena.array

    @property
    def has_huge_pages(self) -> bool:
        return self._arena.huge_pages

    def descriptor(self) -> bytes:
        assert self.registered is not None
        return self.registered.descriptor

    def connect(self, peer: str, descriptor: bytes) -> None:
        self._unreachable.pop(peer, None)
        self.child.say(wire.Connect(peer, descriptor))
        self.read(CONNECT, peer, make_pieces([], [], []))
        self._wait(lambda: CONNECT in self._ends)
        del self._ends[CONNECT]
        if reason := self._unreachable.get(peer):
            raise TransportError(reason)

    def read(self, number: int, peer: str, pieces: Pieces) -> None:
        self.child.say(*wire.parts_of(number, peer, joined(pieces), Direction.READ))

    def write(self, number: int, peer: str, pieces: Pieces) -> None:
        self.child.say(*wire.parts_of(number, peer, joined(pieces), Direction.WRITE))

    def forget(self, peer: str) -> None:
        self.child.say(wire.Forget(peer))

    def ends(self, count: int) -> dict[int, type[Outcome]]:
        self._wait(lambda: len(self._ends) >= count)
        assert len(self._ends) == count, self._ends
        found, self._ends = self._ends, {}
        return found

    def ends_by_now(self) -> dict[int, type[Outcome]]:
        until = self._beats + BEATS
        self._wait(lambda: self._beats >= until)
        found, self._ends = self._ends, {}
        return found

    def pause(self) -> None:
        stop_process(self.child.pid)

    def resume(self) -> None:
        self.child.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.child.signal(signal.SIGKILL)

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.child.pid}/fd"))

    def close(self) -> None:
        self.child.close()
        self._arena.close()

    def _wait(self, done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not done():
            left_s = end_s - time.monotonic()
            assert left_s > 0, "nothing happens"
            self.child.flush()
            select.select([self.child.socket.fileno(), self.child.pidfd], [], [], min(left_s, 0.1))
            for message in self.child.hear():
                self._take(message)
            assert done() or not self.child.has_ended, "the transfer worker has ended"

    def _take(self, message: wire.FromTransferWorker) -> None:
        match message:
            case wire.Registered():
                self.registered = message
            case wire.Unreachable(peer=peer, reason=reason):
                self._unreachable[peer] = reason
            case wire.Beat():
                self._beats += 1
            case wire.Unable(reason=reason):
                raise AssertionError(reason)
            case wire.Done(number) | wire.Failed(number) | wire.Limbo(number):
                assert number not in self._ends, f"transfer {number} ended twice"
                self._ends[number] = type(message)

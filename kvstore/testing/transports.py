"""The contract of every `ports.Transport`, for all back ends, in processes of their own.

    check = TransportChecks(make)      # make(name) → a Party: a transport with an arena
    check.bytes_are_equal()            # … one method for each guarantee

`MoverParty` is a real transfer worker over a real arena, which can be killed and stopped;
`LocalParty` is the reference. For another back end `make` returns a Party of its own.

Does not cover: windows (`transport.window`), the kill of a transfer worker (`transport.watch`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Arena
from kvstore.errors import TransportError
from kvstore.peers.mover import MoverChild, MoverSettings
from kvstore.ports import End, Pieces
from kvstore.transport.loopback import Hub, Loopback
from kvstore.transport.pieces import make_pieces
from kvstore.types import Incarnation
from kvstore.wire import mover as wire

ARENA_BYTES: Final = 32 << 20
LIMIT_S: Final = 90.0
"""Limit for everything: a back end is loaded by a machine that is busy with other tests."""
BEATS: Final = 4
"""Wait for events that must not come: more than enough for 32 MiB."""


class TransportParty(Protocol):
    """A transport with an arena of its own, whose process can be killed and stopped."""

    @property
    def arena(self) -> NDArray[np.uint8]:
        """Shape [ARENA_BYTES] u8."""
        ...

    def descriptor(self) -> bytes: ...

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Raises TransportError."""
        ...

    def read(self, number: int, peer: str, pieces: Pieces) -> None: ...

    def forget(self, peer: str) -> None: ...

    def ends(self, count: int) -> dict[int, End]:
        """Waits for that many reads to end; raises AssertionError when they do not."""
        ...

    def ends_by_now(self) -> dict[int, End]:
        """Ends during a few more beats of the transport."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def kill(self) -> None:
        """SIGKILL."""
        ...

    def open_files(self) -> int:
        """Number in its process."""
        ...

    def close(self) -> None: ...


class LocalParty:
    """The reference transport."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.arena: NDArray[np.uint8] = np.zeros(ARENA_BYTES, np.uint8)
        self._transport = Loopback(hub, name, self.arena)
        self._refused: dict[int, End] = {}

    def descriptor(self) -> bytes:
        return self._transport.describe()

    def connect(self, peer: str, descriptor: bytes) -> None:
        self._transport.connect(peer, descriptor)

    def read(self, number: int, peer: str, pieces: Pieces) -> None:
        try:
            self._transport.post_read(number, peer, pieces)
        except TransportError:
            self._refused[number] = End.FAILED

    def forget(self, peer: str) -> None:
        self._transport.forget(peer)

    def ends(self, count: int) -> dict[int, End]:
        found = self.ends_by_now()
        assert len(found) == count, found
        return found

    def ends_by_now(self) -> dict[int, End]:
        found, self._refused = self._refused, {}
        return found | {each.read: each.end for each in self._transport.poll()}

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


_ENDS: Final = {wire.Done: End.DONE, wire.Failed: End.FAILED, wire.Limbo: End.UNKNOWN}


class MoverParty:
    """A transfer worker. Ends of transfers come from the transport's outcomes."""

    def __init__(
        self,
        name: str,
        backend: str,
        *,
        options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        arena_bytes: int = ARENA_BYTES,
        paced: bool = False,
    ) -> None:
        """Start it and wait for its back end."""
        self._arena = Arena(arena_bytes=arena_bytes, incarnation=Incarnation(1))
        settings = MoverSettings(
            backend=backend,
            name=name,
            options=dict(options or {}),
            environment=dict(environment or {}),
            paced=paced,
        )
        self.child = MoverChild(self._arena.arena_fd, self._arena.hold_fd, arena_bytes, settings)
        self._ends: dict[int, End] = {}
        self._beats = 0
        self._connected: dict[str, str] = {}
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
        self._connected.pop(peer, None)
        self.child.say(wire.Connect(peer, descriptor))
        self._wait(lambda: peer in self._connected)
        if reason := self._connected[peer]:
            raise TransportError(reason)

    def read(self, number: int, peer: str, pieces: Pieces) -> None:
        self.child.say(*wire.parts_of(number, peer, pieces))

    def forget(self, peer: str) -> None:
        self.child.say(wire.Forget(peer))

    def ends(self, count: int) -> dict[int, End]:
        self._wait(lambda: len(self._ends) >= count)
        assert len(self._ends) == count, self._ends
        found, self._ends = self._ends, {}
        return found

    def ends_by_now(self) -> dict[int, End]:
        until = self._beats + BEATS
        self._wait(lambda: self._beats >= until)
        found, self._ends = self._ends, {}
        return found

    def pause(self) -> None:
        self.child.signal(signal.SIGSTOP)

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

    def _take(self, message: wire.FromMover) -> None:
        match message:
            case wire.Registered():
                self.registered = message
            case wire.Connected(peer=peer):
                self._connected[peer] = ""
            case wire.Unreachable(peer=peer, reason=reason):
                self._connected[peer] = reason
            case wire.Beat():
                self._beats += 1
            case wire.Unable(reason=reason):
                raise AssertionError(reason)
            case wire.Done() | wire.Failed() | wire.Limbo():
                number = message.transfer
                assert number not in self._ends, f"transfer {number} ended twice"
                self._ends[number] = _ENDS[type(message)]


ALL: Final = make_pieces([0], [0], [ARENA_BYTES])


class TransportChecks:
    """The guarantees. Every method makes parties of its own and leaves none."""

    def __init__(
        self, make: Callable[[str], TransportParty], *, seed: int = 1, serves_stopped: bool = False
    ) -> None:
        """`serves_stopped`: reads from a stopped peer may succeed, as from a device that needs no
        process for it."""
        self._make = make
        self._serves_stopped = serves_stopped
        self._random = np.random.default_rng(seed)

    @contextlib.contextmanager
    def _parties(self, *names: str) -> Iterator[list[TransportParty]]:
        """Parties with random bytes in each, and the first connected to the others."""
        with contextlib.ExitStack() as stack:
            parties = []
            for name in names:
                parties.append(self._fresh(name))
                stack.callback(parties[-1].close)
            for name, party in zip(names[1:], parties[1:], strict=True):
                parties[0].connect(name, party.descriptor())
            yield parties

    def _fresh(self, name: str) -> TransportParty:
        party = self._make(name)
        party.arena[:] = self._random.integers(0, 256, len(party.arena), np.uint8)
        return party

    def bytes_are_equal(self) -> None:
        with self._parties("a", "b") as (a, b):
            before = b.arena.copy()
            a.read(1, "b", ALL)
            assert a.ends(1) == {1: End.DONE}
            assert np.array_equal(a.arena, before)
            assert np.array_equal(b.arena, before)

    def scattered_pieces_go_to_their_places(self) -> None:
        with self._parties("a", "b") as (a, b):
            self._scattered(a, b, unit=64 << 10, count=100)
            self._scattered(a, b, unit=4096, count=100)
            self._scattered(a, b, unit=1, count=100)

    def ten_thousand_small_pieces(self) -> None:
        with self._parties("a", "b") as (a, b):
            self._scattered(a, b, unit=1024, count=10_000)

    def _scattered(self, a: TransportParty, b: TransportParty, *, unit: int, count: int) -> None:
        expected = a.arena.copy()
        slots = len(a.arena) // unit
        to, at = (self._random.permutation(slots)[:count] * unit for _ in range(2))
        length = np.full(count, unit)
        for place, source in zip(to, at, strict=True):
            expected[place : place + unit] = b.arena[source : source + unit]
        a.read(2, "b", make_pieces(to, at, length))
        assert a.ends(1) == {2: End.DONE}
        assert np.array_equal(a.arena, expected)

    def nothing_is_done_at_once(self) -> None:
        with self._parties("a", "b") as (a, _):
            before = a.arena.copy()
            a.read(1, "b", make_pieces([], [], []))
            a.read(2, "b", make_pieces([5], [7], [0]))
            assert a.ends(2) == {1: End.DONE, 2: End.DONE}
            assert np.array_equal(a.arena, before)

    def pieces_outside_are_refused(self) -> None:
        outside = [
            ([0], [ARENA_BYTES - 10], [11]),
            ([ARENA_BYTES - 10], [0], [11]),
            ([0], [ARENA_BYTES + 1], [1]),
            ([0, 0], [0, 2**63 - 1], [4096, 4096]),
            ([0], [8], [2**63 - 4]),
        ]
        with self._parties("a", "b") as (a, b):
            before = a.arena.copy()
            for number, arrays in enumerate(outside, start=1):
                a.read(number, "b", make_pieces(*arrays))
                assert a.ends(1) == {number: End.FAILED}, arrays
            assert np.array_equal(a.arena, before)
            self._still_works(a, b, "b")

    def two_peers(self) -> None:
        half = ARENA_BYTES // 2
        with self._parties("a", "b", "c") as (a, b, c):
            a.read(1, "b", make_pieces([0], [0], [half]))
            a.read(2, "c", make_pieces([half], [0], [half]))
            assert a.ends(2) == {1: End.DONE, 2: End.DONE}
            assert np.array_equal(a.arena[:half], b.arena[:half])
            assert np.array_equal(a.arena[half:], c.arena[:half])

    def both_ways(self) -> None:
        half = ARENA_BYTES // 2
        with self._parties("a", "b") as (a, b):
            b.connect("a", a.descriptor())
            of_a, of_b = a.arena.copy(), b.arena.copy()
            a.read(1, "b", make_pieces([0], [half], [half]))
            b.read(1, "a", make_pieces([0], [half], [half]))
            assert a.ends(1) == b.ends(1) == {1: End.DONE}
            assert np.array_equal(a.arena[:half], of_b[half:])
            assert np.array_equal(b.arena[:half], of_a[half:])

    def _holds(self, a: TransportParty, b: TransportParty) -> bool:
        """Whether a read of all of a stopped `b` waits for it. If not, it has ended well."""
        b.pause()
        a.read(1, "b", ALL)
        ended = a.ends_by_now()
        if not ended:
            return True
        assert self._serves_stopped, "who answered?"
        assert ended == {1: End.DONE}
        assert np.array_equal(a.arena, b.arena)
        return False

    def a_killed_peer_fails_its_reads_only(self) -> None:
        with self._parties("a", "b", "c") as (a, b, c):
            is_held = self._holds(a, b)  # so that it is killed in the midst of it
            b.kill()
            if not is_held:
                a.read(1, "b", ALL)
            end = a.ends(1)[1]
            assert end is not End.DONE
            if end is End.FAILED:
                self._stays_quiet(a)
            self._still_works(a, c, "c")

    def a_stopped_peer_has_no_end(self) -> None:
        with self._parties("a", "b", "c") as (a, b, c):
            is_held = self._holds(a, b)
            self._still_works(a, c, "c")
            assert a.ends_by_now() == {}
            b.resume()
            if is_held:
                assert a.ends(1) == {1: End.DONE}
            a.read(2, "b", ALL)
            assert a.ends(1) == {2: End.DONE}
            assert np.array_equal(a.arena, b.arena)

    def a_peer_comes_back_under_its_name(self) -> None:
        with self._parties("a", "b") as (a, b):
            self._still_works(a, b, "b")
            b.kill()
            a.forget("b")
            again = self._fresh("b")
            try:
                a.connect("b", again.descriptor())
                self._still_works(a, again, "b")
            finally:
                again.close()

    def what_is_forgotten_ends_or_is_unknown(self) -> None:
        with self._parties("a", "b", "c") as (a, b, c):
            is_held = self._holds(a, b)
            a.forget("b")
            if is_held:
                end = a.ends(1)[1]
                assert end is not End.DONE
                if end is End.FAILED:
                    b.resume()
                    self._stays_quiet(a)
            self._still_works(a, c, "c")
            a.read(5, "b", ALL)
            assert a.ends(1) == {5: End.FAILED}

    def a_descriptor_that_makes_no_sense(self) -> None:
        with self._parties("a") as (a,), self._parties("b") as (b,):
            good = b.descriptor()
            noise = self._random.integers(0, 256, 300, np.uint8).tobytes()
            cut = [b"", b"\x00", noise, good[:-1], good + b"x", good[: len(good) // 2]]
            for bad in (*cut, _changed(good, backend="x"), _changed(good, name="x")):
                self._refused(a, "b", bad)
            a.connect("b", good)
            self._still_works(a, b, "b")

    def details_that_make_no_sense(self) -> None:
        with self._parties("a") as (a,), self._parties("b") as (b,):
            good = b.descriptor()
            for bad in (b"", self._random.integers(0, 256, 300, np.uint8).tobytes()):
                try:
                    a.connect("b", _changed(good, details=bad))
                except TransportError:
                    continue
                a.read(1, "b", ALL)
                assert a.ends(1)[1] is not End.DONE
                a.forget("b")
            a.connect("b", good)
            self._still_works(a, b, "b")

    def the_descriptor_of_another(self) -> None:
        with self._parties("a", "b") as (a, b):
            self._refused(a, "c", b.descriptor())
            self._still_works(a, b, "b")

    def nothing_stays_open(self) -> None:
        with self._parties("a", "b") as (a, b):
            counts = []
            for _ in range(4):
                self._still_works(a, b, "b")
                a.forget("b")
                assert a.ends_by_now() == {}
                counts.append((a.open_files(), b.open_files()))
                a.connect("b", b.descriptor())
            assert counts[3] == counts[1], counts

    @staticmethod
    def _refused(a: TransportParty, peer: str, descriptor: bytes) -> None:
        try:
            a.connect(peer, descriptor)
        except TransportError:
            return
        raise AssertionError(f"{descriptor!r} was taken")

    @staticmethod
    def _still_works(a: TransportParty, peer: TransportParty, name: str) -> None:
        a.read(99, name, make_pieces([3], [5], [1000]))
        assert a.ends(1) == {99: End.DONE}
        assert np.array_equal(a.arena[3:1003], peer.arena[5:1005])

    @staticmethod
    def _stays_quiet(a: TransportParty) -> None:
        """Nothing writes to its arena any more."""
        a.arena[:] = 0xA5
        assert a.ends_by_now() == {}
        assert (a.arena == 0xA5).all()


def _changed(descriptor: bytes, **fields: str | bytes) -> bytes:
    found = wire.decode_descriptor(descriptor)
    return wire.encode(msgspec.structs.replace(found, **fields))


CHECKS: Final = tuple(name for name in vars(TransportChecks) if not name.startswith("_"))

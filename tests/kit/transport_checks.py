"""The contract of every `ports.Transport`, for all back ends, in processes of their own.

    with TransportChecks(make) as checks:      # make(name) → a Party: a transport with an arena
        checks.bytes_are_equal()               # … one method for each guarantee

A party that a check leaves as it was serves the next one: most of the time is their start.

A back end of one's own: give `make` a Party that speaks to it, such as those of
`tests/kit/transport_parties.py`. Does not cover: what windows do (`transport.reads`), when a
transfer worker is killed (`peers.transfer_worker`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TransportError
from kvstore.ports import Outcome, Pieces
from kvstore.transport.pieces import make_pieces
from kvstore.wire import transfer_worker as wire
from kvstore.wire.transfer_worker import Done, Failed

ARENA_BYTES: Final = 16 << 20
"""More than sockets of TCP take for a peer that is stopped."""
LANDING: Final = slice(4 << 20, 10 << 20)
"""The part of the arena that peers may write to."""
ALL: Final = make_pieces([0], [0], [ARENA_BYTES])


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

    def write(self, number: int, peer: str, pieces: Pieces) -> None: ...

    def forget(self, peer: str) -> None: ...

    def ends(self, count: int) -> dict[int, type[Outcome]]:
        """Waits for that many transfers to end; raises AssertionError when they do not."""
        ...

    def ends_by_now(self) -> dict[int, type[Outcome]]:
        """Those that come while the transport works for a while."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def kill(self) -> None:
        """As kill -9 does."""
        ...

    def open_files(self) -> int:
        """Number of its process."""
        ...

    def close(self) -> None: ...


class TransportChecks:
    """The guarantees. Use as a context: no party is left. After a check that failed all are new."""

    def __init__(
        self,
        make: Callable[[str], TransportParty],
        *,
        seed: int = 1,
        serves_stopped: bool = False,
        takes_writes: bool = True,
    ) -> None:
        """`serves_stopped`: a peer whose process is stopped may be read from all the same, as a
        device does that needs no process for it. `takes_writes`: parties have landing memory."""
        self._make = make
        self._takes_writes = takes_writes
        self._serves_stopped = serves_stopped
        self._random = np.random.default_rng(seed)
        self._living: dict[str, TransportParty] = {}
        """By name."""
        self._connected: set[str] = set()
        """Those that "a" reads from."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(*self._living)

    @contextlib.contextmanager
    def _parties(self, *names: str, spent: Sequence[str] = ()) -> Iterator[list[TransportParty]]:
        """Parties with random bytes in each, and the first, "a", connected to the others. `spent`:
        those that are of no use afterwards."""
        try:
            parties = [self._fresh(name) for name in names]
            for name, party in zip(names[1:], parties[1:], strict=True):
                if name not in self._connected:
                    parties[0].connect(name, party.descriptor())
                    self._connected.add(name)
            yield parties
            self._end(*spent)
        except BaseException:
            self._end(*self._living)
            raise

    def _fresh(self, name: str) -> TransportParty:
        """The party of this name, another one if that before has ended, with other bytes."""
        if name not in self._living:
            self._living[name] = self._make(name)
        party = self._living[name]
        words = party.arena.view(np.uint64)
        words[:] = self._random.integers(0, 1 << 64, len(words), np.uint64)
        return party

    def _end(self, *names: str) -> None:
        for name in names:
            self._living.pop(name).close()
            self._connected -= self._connected if name == "a" else {name}

    def bytes_are_equal(self) -> None:
        with self._parties("a", "b") as (a, b):
            before = b.arena.copy()
            a.read(1, "b", ALL)
            assert a.ends(1) == {1: Done}
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
        to, at = (self._random.choice(slots, count, replace=False) * unit for _ in range(2))
        length = np.full(count, unit)
        for place, source in zip(to, at, strict=True):
            expected[place : place + unit] = b.arena[source : source + unit]
        a.read(2, "b", make_pieces(to, at, length))
        assert a.ends(1) == {2: Done}
        assert np.array_equal(a.arena, expected)

    def nothing_is_done_at_once(self) -> None:
        with self._parties("a", "b") as (a, _):
            before = a.arena.copy()
            a.read(1, "b", make_pieces([], [], []))
            a.read(2, "b", make_pieces([5], [7], [0]))
            assert a.ends(2) == {1: Done, 2: Done}
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
                assert a.ends(1) == {number: Failed}, arrays
            assert np.array_equal(a.arena, before)
            self._still_works(a, b, "b")

    def two_peers(self) -> None:
        half = ARENA_BYTES // 2
        with self._parties("a", "b", "c") as (a, b, c):
            a.read(1, "b", make_pieces([0], [0], [half]))
            a.read(2, "c", make_pieces([half], [0], [half]))
            assert a.ends(2) == {1: Done, 2: Done}
            assert np.array_equal(a.arena[:half], b.arena[:half])
            assert np.array_equal(a.arena[half:], c.arena[:half])

    def both_ways(self) -> None:
        half = ARENA_BYTES // 2
        with self._parties("a", "b") as (a, b):
            b.connect("a", a.descriptor())
            of_a, of_b = a.arena.copy(), b.arena.copy()
            a.read(1, "b", make_pieces([0], [half], [half]))
            b.read(1, "a", make_pieces([0], [half], [half]))
            assert a.ends(1) == b.ends(1) == {1: Done}
            assert np.array_equal(a.arena[:half], of_b[half:])
            assert np.array_equal(b.arena[:half], of_a[half:])
            b.forget("a")

    def writes_arrive_in_the_landing_memory_only(self) -> None:
        with self._parties("a", "b") as (a, b):
            of_a, expected = a.arena.copy(), b.arena.copy()
            slots = (LANDING.stop - LANDING.start) // 4096
            at = self._random.choice(slots, 100, replace=False) * 4096
            to = LANDING.start + self._random.choice(slots, 100, replace=False) * 4096
            for source, place in zip(at, to, strict=True):
                expected[place : place + 4096] = of_a[source : source + 4096]
            a.write(1, "b", make_pieces(at, to, np.full(100, 4096)))
            if not self._takes_writes:
                assert a.ends(1) == {1: Failed}
                self._still_works(a, b, "b")
                return
            assert a.ends(1) == {1: Done}
            assert np.array_equal(b.arena, expected)
            assert np.array_equal(a.arena, of_a)
            size = LANDING.stop - LANDING.start
            a.write(2, "b", make_pieces([7], [LANDING.start], [size]))
            a.read(3, "b", make_pieces([0], [LANDING.stop], [5]))
            assert a.ends(2) == {2: Done, 3: Done}
            assert np.array_equal(b.arena[LANDING], of_a[7 : 7 + size])
            assert np.array_equal(a.arena[:5], expected[LANDING.stop : LANDING.stop + 5])

    def writes_elsewhere_are_refused(self) -> None:
        begin, end = LANDING.start, LANDING.stop
        outside = [(begin - 1, 1), (begin - 1, 2), (end, 1), (end - 1, 2), (0, 8), (2**63, 8)]
        with self._parties("a", "b") as (a, b):
            before = b.arena.copy()
            for number, (at, length) in enumerate(outside, start=1):
                a.write(number, "b", make_pieces([0], [at], [length]))
                assert a.ends(1) == {number: Failed}, (at, length)
            assert np.array_equal(b.arena, before)
            self._still_works(a, b, "b")

    def a_killed_peer_fails_its_writes_only(self) -> None:
        if not self._takes_writes:
            return  # `writes_arrive_in_the_landing_memory_only` says what becomes of them
        size = LANDING.stop - LANDING.start
        with self._parties("a", "b", "c", spent=("a", "b")) as (a, b, c):
            b.pause()
            a.write(1, "b", make_pieces([0], [LANDING.start], [size]))
            ended = a.ends_by_now()
            b.kill()
            assert (ended or a.ends(1))[1] is not Done or self._serves_stopped
            self._still_works(a, c, "c")

    def _holds(self, a: TransportParty, b: TransportParty) -> bool:
        """Whether a read of all of a stopped `b` waits for it. If not, it has ended well."""
        b.pause()
        a.read(1, "b", ALL)
        ended = a.ends_by_now()
        if not ended:
            return True
        assert self._serves_stopped, "who answered?"
        assert ended == {1: Done}
        assert np.array_equal(a.arena, b.arena)
        return False

    def a_killed_peer_fails_its_reads_only(self) -> None:
        with self._parties("a", "b", "c", spent=("a", "b")) as (a, b, c):
            is_held = self._holds(a, b)  # so that it is killed in the midst of it
            b.kill()
            if not is_held:
                a.read(1, "b", ALL)
            end = a.ends(1)[1]
            assert end is not Done
            if end is Failed:
                self._stays_quiet(a)
            self._still_works(a, c, "c")

    def a_stopped_peer_has_no_end(self) -> None:
        with self._parties("a", "b", "c") as (a, b, c):
            is_held = self._holds(a, b)
            self._still_works(a, c, "c")
            assert a.ends_by_now() == {}
            b.resume()
            if is_held:
                assert a.ends(1) == {1: Done}
            a.read(2, "b", ALL)
            assert a.ends(1) == {2: Done}
            assert np.array_equal(a.arena, b.arena)

    def a_peer_comes_back_under_its_name(self) -> None:
        with self._parties("a", "b") as (a, b):
            self._still_works(a, b, "b")
            b.kill()
            a.forget("b")
            self._end("b")
        with self._parties("a", "b") as (a, again):
            self._still_works(a, again, "b")

    def what_is_forgotten_ends_or_is_unknown(self) -> None:
        with self._parties("a", "b", "c", spent=("a", "b")) as (a, b, c):
            is_held = self._holds(a, b)
            a.forget("b")
            if is_held:
                end = a.ends(1)[1]
                assert end is not Done
                if end is Failed:
                    b.resume()
                    self._stays_quiet(a)
            self._still_works(a, c, "c")
            a.read(5, "b", ALL)
            assert a.ends(1) == {5: Failed}

    def a_descriptor_that_makes_no_sense(self) -> None:
        with self._parties("d", spent="d") as (d,), self._parties("b") as (b,):
            good = b.descriptor()
            noise = self._random.integers(0, 256, 300, np.uint8).tobytes()
            cut = [b"", b"\x00", noise, good[:-1], good + b"x", good[: len(good) // 2]]
            for bad in (*cut, _changed(good, backend="x"), _changed(good, name="x")):
                self._refused(d, "b", bad)
            d.connect("b", good)
            self._still_works(d, b, "b")

    def details_that_make_no_sense(self) -> None:
        with self._parties("d", spent="d") as (d,), self._parties("b") as (b,):
            good = b.descriptor()
            for bad in (b"", self._random.integers(0, 256, 300, np.uint8).tobytes()):
                try:
                    d.connect("b", _changed(good, details=bad))
                except TransportError:
                    continue
                d.read(1, "b", ALL)
                assert d.ends(1)[1] is not Done
                d.forget("b")
            d.connect("b", good)
            self._still_works(d, b, "b")

    def the_descriptor_of_another(self) -> None:
        with self._parties("a", "b") as (a, b):
            self._refused(a, "x", b.descriptor())
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
        assert a.ends(1) == {99: Done}
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

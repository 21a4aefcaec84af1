"""What every `FileStore` promises, run by each of them. Add an implementation to `RIGS`."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from kvstore.errors import ConfigError
from kvstore.node.files import LateTier
from kvstore.ports import FileStore
from kvstore.tier_events import (
    FileGone,
    FileKnown,
    FileLate,
    FileMoved,
    FileRead,
    FileReclaim,
    FileTierEvent,
    FileWritten,
    RecoveryDone,
    Resumed,
)
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.directory import segment_name
from kvstore.tiers.file.parts import Outbox
from kvstore.tiers.file.tier import FileTier
from kvstore.types import PAGE_BYTES
from kvstore.units import MIB
from kvstore.wire.record import Scope
from kvstore.wire.segment import PAGE_SHIFT
from tests.kit.memory_store import Kept, MemoryStore
from tests.kit.set_clock import SetClock
from tests.unit.tiers.file.kit import (
    BLOCK_BYTES,
    PATIENCE_S,
    SCOPE,
    SEGMENT_BYTES,
    FaultyDisk,
    StoreDriver,
    key,
    u64,
)

JOBS_MAX = 4
OTHER = Scope("another", SCOPE.space, SCOPE.shard, BLOCK_BYTES)
LONG = FileGone | FileKnown | FileMoved | FileReclaim


class MemoryRig(StoreDriver):
    """The reference."""

    tier: MemoryStore

    def __init__(self, directory: Path, kept: Kept | None = None) -> None:
        super().__init__()
        self.directory = directory
        self.kept = kept or Kept()
        self.tier = MemoryStore(
            self.arena, self.kept, segment_blocks=7, segments_max=4, jobs_max=JOBS_MAX
        )

    def hang(self) -> None:
        self.tier.hang()

    def begun(self) -> None:
        """Wait until a job that hangs has begun."""

    def go_on(self) -> None:
        self.tier.go_on()

    def expire(self) -> None:
        self.tier.expire()

    def damage(self, place: int) -> None:
        self.tier.damage(place)

    def close_then_go_on(self) -> None:
        self.tier.close()
        self.go_on()
        self.take()

    def opened_again(self) -> MemoryRig:
        self.tier.close()
        return MemoryRig(self.directory, self.kept)


class FileRig(StoreDriver):
    """The file tier on a disk that hangs when told to."""

    file: FileTier

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.disk, self.clock = FaultyDisk(), SetClock()
        self.config = FileConfig(
            directory,
            capacity_bytes=4 * MIB,
            segment_bytes=SEGMENT_BYTES,
            queued_jobs_max=JOBS_MAX,
            reader_count=1,
        )
        self.tier = self._open()

    def _open(self) -> FileStore:
        self.file = FileTier(self.config, self.arena, self.clock, disk=self.disk).start()
        return self.file

    def hang(self) -> None:
        self.recovered()
        self.disk.hang = {"preadv", "pwritev"}

    def begun(self) -> None:
        assert self.disk.hanging.acquire(timeout=PATIENCE_S)

    def go_on(self) -> None:
        self.disk.hang = set()
        self.disk.release.set()

    def expire(self) -> None:
        self.clock.advance_ms(1_000_000)
        self.file.expire()

    def damage(self, place: int) -> None:
        path = self.directory / segment_name(place >> PAGE_SHIFT)
        at = ((place & 0xFFFF_FFFF) + 1) * PAGE_BYTES
        with path.open("r+b") as segment:
            segment.seek(at)
            byte = segment.read(1)[0]
            segment.seek(at)
            segment.write(bytes([byte ^ 1]))

    def close_then_go_on(self) -> None:
        closing = threading.Thread(target=self.tier.close)
        closing.start()
        assert self.file._leaving.wait(PATIENCE_S)
        self.go_on()
        closing.join()
        self.take()

    def opened_again(self) -> FileRig:
        self.tier.close()
        return type(self)(self.directory)


class LateRig(FileRig):
    """The file tier of a directory that could not be had at first."""

    def _open(self) -> FileStore:
        failures = [ConfigError("not mounted")]

        def open_tier(outbox: Outbox) -> FileTier:
            if failures:
                raise failures.pop()
            self.file = FileTier(
                self.config, self.arena, self.clock, disk=self.disk, outbox=outbox
            ).start()
            return self.file

        self.tier = LateTier(self.directory, open_tier, "not mounted", retry_s=0.001)
        self.wait(Resumed)
        return self.tier


class Rig(Protocol):
    """A store, and what may happen to its disk."""

    def __call__(self, directory: Path) -> MemoryRig | FileRig: ...


RIGS: dict[str, Rig] = {"memory": MemoryRig, "file": FileRig, "late": LateRig}
AnyRig = MemoryRig | FileRig


@pytest.fixture
def rigs() -> Iterator[list[AnyRig]]:
    made: list[AnyRig] = []
    yield made
    for rig in made:
        rig.go_on()
        rig.tier.close()


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, tmp_path: Path, rigs: list[AnyRig]) -> AnyRig:
    rigs.append(RIGS[request.param](tmp_path / "store"))
    return rigs[0]


@pytest.fixture
def opened_again(rigs: list[AnyRig]) -> Callable[[AnyRig], AnyRig]:
    def again(rig: AnyRig) -> AnyRig:
        rigs.append(rig.opened_again())
        return rigs[-1]

    return again


def ends(rig: AnyRig) -> list[int]:
    return sorted(e.job for e in rig.seen if isinstance(e, FileRead | FileWritten))


def started(rig: AnyRig, kind: str) -> int:
    return rig.start_write([1]) if kind == "write" else rig.start_read([1])


def end_of(rig: AnyRig, kind: str, job: int) -> bytes:
    if kind == "write":
        return rig.wait(FileWritten, lambda e: e.job == job).locations
    return rig.wait(FileRead, lambda e: e.job == job).good


def numbers_known(rig: AnyRig) -> set[bytes]:
    rig.recovered()
    return {name for _, name in rig.known}


def test_what_was_stored_is_found_again(
    rig: AnyRig, opened_again: Callable[[AnyRig], AnyRig]
) -> None:
    assert all(rig.write([1, 2, 3]))
    assert rig.read([3, 1]) == [True, True]
    rig.tier.keep_note(bytes(PAGE_BYTES))
    again = opened_again(rig).recovered()
    assert again.tier.note == bytes(PAGE_BYTES)
    assert numbers_known(again) == {key(1), key(2), key(3)}
    sums = again.checksums[again.known[SCOPE, key(2)]]
    assert again.read([2], sums=sums) == [True]


def test_another_block_is_never_called_good(rig: AnyRig) -> None:
    one, two = rig.write([1, 2])
    rig.known |= {(SCOPE, key(1)): two, (OTHER, key(2)): two}
    assert rig.read([1]) == [False]
    assert rig.read([2], OTHER) == [False]
    assert rig.read([1], places=[one]) == [True]


def test_what_is_damaged_is_told_and_costs_no_neighbour(rig: AnyRig) -> None:
    rig.write([1, 2])
    rig.damage(rig.known[SCOPE, key(1)])
    assert rig.read([1, 2]) == [False, True]
    gone = rig.wait(FileGone)
    assert (gone.keys, u64(gone.locations), gone.damaged) == (
        *(key(1), [rig.known[SCOPE, key(1)]]),
        True,
    )


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_refused_job_leaves_no_trace(rig: AnyRig, kind: str) -> None:
    rig.write([1])
    rig.hang()
    accepted = []
    while job := started(rig, kind):
        accepted.append(job)
    assert 0 < len(accepted) <= JOBS_MAX
    before = ends(rig)
    rig.go_on()
    for job in accepted:
        end_of(rig, kind, job)
    assert ends(rig) == sorted([*before, *accepted])
    assert all(rig.write([1]))


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_late_job_keeps_its_slots_until_it_ends(rig: AnyRig, kind: str) -> None:
    rig.write([1])
    rig.hang()
    job = started(rig, kind)
    rig.begun()
    waiting = started(rig, kind)
    rig.expire()
    assert rig.wait(FileLate).job == job
    assert not any(end_of(rig, kind, waiting))
    assert job not in ends(rig)
    rig.go_on()
    end_of(rig, kind, job)
    assert ends(rig).count(job) == 1


def test_closing_answers_each_job_once_and_writes_what_was_taken(
    rig: AnyRig, opened_again: Callable[[AnyRig], AnyRig]
) -> None:
    rig.write([1])
    rig.hang()
    jobs = [rig.start_read([1])]
    rig.begun()
    jobs += [rig.start_write([2], first_slot=8), rig.start_write([3], first_slot=9)]
    before = ends(rig)
    rig.close_then_go_on()
    assert ends(rig) == sorted([*before, *jobs])
    assert not rig.start_write([4])
    assert not rig.start_read([1])
    rig.tier.close()
    again = opened_again(rig)
    assert numbers_known(again) == {key(1), key(2), key(3)}
    assert again.read([1, 2, 3]) == [True] * 3


def test_a_clear_covers_what_came_before_it_and_nothing_after(
    rig: AnyRig, opened_again: Callable[[AnyRig], AnyRig]
) -> None:
    rig.write([1])
    rig.write([1], OTHER)
    rig.hang()
    rig.start_write([2])
    rig.begun()
    rig.void(SCOPE.tenant, None)
    last = rig.start_write([3], first_slot=1)
    assert not rig.tier.wait_for_voids(0)
    rig.go_on()
    rig.wait(FileWritten, lambda e: e.job == last)
    assert rig.tier.wait_for_voids(PATIENCE_S)
    again = opened_again(rig).recovered()
    assert set(again.known) == {(OTHER, key(1)), (SCOPE, key(3))}


def test_what_is_cleared_before_it_is_told_is_not_told(
    rig: AnyRig, opened_again: Callable[[AnyRig], AnyRig]
) -> None:
    rig.write([1])
    rig.write([2], OTHER)
    again = opened_again(rig)
    again.void(SCOPE.tenant, None)
    assert numbers_known(again) - {key(1)} == {key(2)}
    third = opened_again(again).recovered()
    assert set(third.known) == {(OTHER, key(2))}


def test_a_reclaimed_segment_keeps_what_it_is_told_to(
    rig: AnyRig, opened_again: Callable[[AnyRig], AnyRig]
) -> None:
    rig.write([1000], OTHER)
    rig.void(OTHER.tenant, None)
    number = 0
    while not any(isinstance(event, FileReclaim) for event in rig.seen):
        assert all(rig.write([number])), "there is room until it asks"
        number += 1
        rig.take()
    asked = rig.wait(FileReclaim)
    (part,) = asked.parts
    assert part.scope == SCOPE, "what was cleared is not asked about"
    first, *rest = [part.keys[at : at + 32] for at in range(0, len(part.keys), 32)]
    place = rig.known[SCOPE, first]
    rig.reclaim(asked.segment, [place])
    moved = rig.wait(FileMoved)
    assert (moved.keys, u64(moved.locations)) == (first, [place])
    assert rig.known[SCOPE, first] != place
    assert rig.read([int.from_bytes(first[:4], "big")]) == [True]
    known = numbers_known(opened_again(rig))
    assert first in known
    assert not known & set(rest)
    assert len(known) == number - len(rest)


def test_a_segment_of_which_nothing_is_kept_makes_room(rig: AnyRig) -> None:
    rig.on_reclaim = lambda event: rig.reclaim(event.segment, [])
    for number in range(100):
        rig.write([number])
        rig.take()
    assert sum(isinstance(event, FileReclaim) for event in rig.seen) > 1
    assert rig.read([99]) == [True]


def test_events_come_up_to_one_that_is_long(
    rig: AnyRig, opened_again: Callable[[AnyRig], AnyRig]
) -> None:
    rig.write([1, 2])
    rig.write([3], OTHER)
    again = opened_again(rig)
    seen: list[FileTierEvent] = []
    while RecoveryDone() not in again.seen + seen:  # one that was late may have told of it already
        assert select.select([again.tier.fileno()], [], [], PATIENCE_S)[0]
        taken = list(again.tier.take_events())
        assert not any(isinstance(event, LONG) for event in taken[:-1])
        seen += taken
    seen += again.tier.take_events()
    assert sum(isinstance(event, FileKnown) for event in seen + again.seen) == 2
    assert list(again.tier.take_events()) == []
    assert not select.select([again.tier.fileno()], [], [], 0)[0]

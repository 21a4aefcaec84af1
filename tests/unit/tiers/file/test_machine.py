"""Random lives of a file tier against a dictionary: writes, reads, clears, reclaims, crashes.

Every read is the stored bytes or a miss (`Driver.read` compares). What was written is found after
an orderly end; after a crash that tears the newest segment, what lies in older ones is. What was
cleared stays so.
"""

from __future__ import annotations

import contextlib
import fnmatch
import random
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule

from kvstore.tier_events import FileGone, FileReclaim
from kvstore.units import MIB
from kvstore.wire.record import Scope
from tests.steps import CountedMachine
from tests.unit.tiers.file.kit import BLOCK_BYTES, SCOPE, Driver, key, u64

CAPACITY_BYTES = 8 * MIB
SCOPES = [SCOPE, Scope("other", SCOPE.space, SCOPE.shard, BLOCK_BYTES)]
numbers = st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True)
which = st.sampled_from(SCOPES)


class FileMachine(CountedMachine):
    """`model` is what an engine would believe: address → location."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.model: dict[tuple[Scope, bytes], int] = {}
        self.cleared: set[tuple[Scope, bytes]] = set()
        self.keep = 0.3
        self.rng = random.Random(0)
        self.driver: Driver | None = None

    @initialize()
    def begin(self) -> None:
        self._open()

    def _open(self) -> None:
        self.driver = Driver(self.folder / "store", capacity_bytes=CAPACITY_BYTES)
        self.driver.on_reclaim = self._answer
        self.driver.recovered()

    def _answer(self, event: FileReclaim) -> None:
        kept = []
        for records in event.parts:
            for row, place in enumerate(u64(records.locations)):
                name = (records.scope, records.keys[row * 32 : (row + 1) * 32])
                if self.model.get(name) != place:
                    continue
                if self.rng.random() < self.keep:
                    kept.append(place)
                else:
                    del self.model[name]
                    self.open.known.pop(name, None)
        self.open.reclaim(event.segment, kept)

    @property
    def open(self) -> Driver:
        assert self.driver is not None
        return self.driver

    def _learn(self) -> None:
        """Take what there is: kept records have moved."""
        self.open.take()
        for name in self.model:
            self.model[name] = max(self.model[name], self.open.known.get(name, 0))

    @rule(numbers=numbers, scope=which)
    def write(self, numbers: list[int], scope: Scope) -> None:
        for number, place in zip(numbers, self.open.write(numbers, scope), strict=True):
            if place:
                self.model[scope, key(number)] = place
                self.cleared.discard((scope, key(number)))

    @rule(numbers=numbers, scope=which)
    def read(self, numbers: list[int], scope: Scope) -> None:
        for number in numbers:
            name, tried = (scope, key(number)), 0
            while (place := self.model.get(name, 0)) > tried:
                if self.open.read([number], scope, places=[place]) == [True]:
                    break
                tried = place
                self._learn()
                assert self.model.get(name) != tried, "it is there and was not read"

    @rule(keep=st.floats(0, 0.7), seed=st.integers(0, 99))
    def change_of_mind(self, keep: float, seed: int) -> None:
        self.keep, self.rng = keep, random.Random(seed)

    @rule(numbers=numbers, scope=which, wrong=st.integers(1, 1 << 40))
    def read_elsewhere(self, numbers: list[int], scope: Scope, wrong: int) -> None:
        self.open.read(numbers, scope, places=[wrong] * len(numbers))

    @rule(tenant=st.sampled_from([None, "other"]))
    def clear(self, tenant: str | None) -> None:
        self.open.void(tenant, None)
        for name in [name for name in self.model if tenant in (None, name[0].tenant)]:
            del self.model[name]
            self.open.known.pop(name, None)
            self.cleared.add(name)

    @rule()
    def end_and_begin(self) -> None:
        self.open.close()
        self._learn()
        fits = self.open.tier.taken_bytes <= CAPACITY_BYTES - 2 * self.open.config.segment_size
        self._restart(set(self.model) if fits else set())
        assert not self.cleared & set(self.model)

    @rule(seed=st.integers(0, 1 << 16))
    def crash_and_begin(self, seed: int) -> None:
        """The process dies, and the newest segment loses a part of its end."""
        rng = random.Random(seed)
        self._learn()
        before, store, image = dict(self.model), self.folder / "store", self.folder / "image"
        shutil.copytree(store, image, ignore=lambda _, names: fnmatch.filter(names, "seg-*"))
        taken = self.open.tier.taken_bytes
        for path in sorted(store.glob("seg-*.kv")):
            with contextlib.suppress(FileNotFoundError):  # just reclaimed
                shutil.copy(path, image / path.name)
        self.open.close()
        shutil.rmtree(store)
        image.rename(store)
        segments = {int(path.name[4:12], 16): path for path in store.glob("seg-*.kv")}
        torn = max(segments, default=0)
        if segments:
            size = segments[torn].stat().st_size
            with segments[torn].open("r+b") as file:
                file.truncate(max(0, size - rng.randrange(4 * BLOCK_BYTES)))
                file.seek(0, 2)
                file.write(rng.randbytes(rng.randrange(9_000)))
        fits = taken <= CAPACITY_BYTES - 2 * self.open.config.segment_size
        safe = {name for name, place in before.items() if place >> 32 in segments.keys() - {torn}}
        self._restart(safe if fits else set())
        self.cleared.clear()  # a clear that was not on disk yet is forgotten with the rest

    def _restart(self, expected: set[tuple[Scope, bytes]]) -> None:
        self.model = {}
        self._open()
        missing = expected - set(self.open.known)
        assert not missing, f"{len(missing)} of {len(expected)} were not found again"
        self.model = dict(self.open.known)
        for scope, name in list(self.model):
            number = int.from_bytes(name[:4], "big")
            place = self.model[scope, name]
            if self.open.read([number], scope, places=[place]) != [True]:
                self._learn()
                if self.model[scope, name] == place:
                    assert (scope, name) not in expected
                    del self.model[scope, name]
                    del self.open.known[scope, name]

    @invariant()
    def capacity_holds(self) -> None:
        if self.driver is None:
            return
        assert self.driver.tier.taken_bytes <= CAPACITY_BYTES
        self._learn()
        for event in self.driver.seen:
            if isinstance(event, FileGone):
                for row, place in enumerate(u64(event.locations)):
                    name = (event.scope, event.keys[row * 32 : (row + 1) * 32])
                    assert self.model.get(name) != place, "a good record was called gone"
        self.driver.seen.clear()

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.close()
        shutil.rmtree(self.folder)


TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)

"""Every crash of each short life of the file tier (200,000 directories nightly): none of them lies.

For the mass the functions that recover and read are called as the tier calls them, on bytes in
memory; a sample is opened by the whole tier, with its threads, on real files.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

from kvstore.tier_events import FileKnown, ReadFile
from kvstore.tiers.file import disk, reader
from kvstore.tiers.file.catalog import Segment
from kvstore.tiers.file.contents import SegmentFile, record_sets
from kvstore.tiers.file.directory import segment_name
from kvstore.tiers.file.disk import Disk, Pages
from kvstore.tiers.file.reader import Reader, ReadVerdict
from kvstore.types import PAGE_BYTES
from kvstore.wire.load import Learned, encode_learned
from kvstore.wire.record import Void
from kvstore.wire.segment import (
    PAGE_SHIFT,
    SegmentHead,
    Table,
    parse_segment_page,
    place_of,
    store_page,
)
from tests.amounts import amount, covered
from tests.faults.crash_images import Image, Model, images
from tests.faults.crash_life import LETTERS, OTHERS, OURS, SLOT_PAGES, Address, Life, words
from tests.unit.tiers.file import kit
from tests.unit.tiers.file.kit import Driver, key, payload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REST = amount(1, nightly=2)
"""Letters of a life after its first."""
IMAGES_MIN = amount(15_000, nightly=200_000)
OPENED_MIN = amount(500, nightly=2_000)
PARTS = amount(2, nightly=8)
LIVES_SAMPLED = 15
OPENED_PER_LIFE = amount(17, nightly=40)
"""Images of each of these lives, opened by the whole tier, in each part."""
CUTS = (0, 1, 512, PAGE_BYTES // 2, PAGE_BYTES - 512, PAGE_BYTES)
"""Bytes of a page that a crash left of it: none, sectors, all; and no whole sector."""
_T = TypeVar("_T")
_PAGE_MASK = (1 << PAGE_SHIFT) - 1
_expected = functools.cache(payload)


class Bytes(Disk):
    """One file in memory, whatever the descriptor."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = 0
        for buffer in buffers:
            part = self._data[offset + done : offset + done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done


class OneSegment:
    """A catalog with nothing else in it."""

    def __init__(self, segment: Segment, medium: Disk) -> None:
        self._segment, self._medium = segment, medium

    def get(self, number: int) -> Segment | None:
        return self._segment if number == self._segment.number else None

    @contextlib.contextmanager
    def reading(self, segment: Segment) -> Iterator[SegmentFile]:
        yield SegmentFile(self._medium, -1, segment.head, segment.taken_bytes)


class Found(NamedTuple):
    """What recovery says of a segment, and the pages of the blocks that a read calls good."""

    head: SegmentHead
    table: Table
    good: frozenset[int]


def look(number: int, data: bytes, store_id: bytes) -> Found | None:
    """Recover and read one segment; fails if a block that is called good is not what was stored."""
    medium = Bytes(data)
    head = parse_segment_page(data[:PAGE_BYTES])
    if head is None or head.store_id != store_id or head.number != number:
        return None
    table = SegmentFile(medium, -1, head, len(data)).contents().table
    memory = _pages(SLOT_PAGES * PAGE_BYTES)
    catalog: Any = OneSegment(Segment(number, head, segment_name(number), -1, len(data)), medium)
    reading = Reader(catalog, memory.view, direct=True)
    good = []
    for row, page in enumerate(table.rows["page"].tolist()):
        record = table.block(row)
        scope, name = record.scope, record.key
        its = name, np.zeros(1, np.uint32), record.checksum
        order = ReadFile(0, scope, *its, np.uint64(place_of(number, page)).tobytes())
        memory.view[:] = b"\xee" * len(memory.view)
        if reading.read(number, order, [0]).verdicts == [ReadVerdict.GOOD]:
            block = int.from_bytes(name[:4], "big")
            assert scope in (OURS, OTHERS)
            assert name == key(block)
            expected = _expected(block, scope.block_bytes)
            assert memory.view[: scope.block_bytes] == expected, "a wrong byte"
            good.append(page)
    return Found(head, table, frozenset(good))


_pages = functools.cache(Pages)


@pytest.fixture
def few_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are used again: nobody keeps them, and making them takes longer than recovery."""
    for module in (disk, reader):
        monkeypatch.setattr(module, "Pages", _pages)


@functools.lru_cache(2048)
def told(
    number: int, data: bytes, store_id: bytes, voids: tuple[Void, ...]
) -> tuple[frozenset[Address], tuple[Void, ...]]:
    """What a segment adds to the blocks that are handed out, and to the voids of newer ones."""
    found = look(number, data, store_id)
    if found is None:
        return frozenset(), voids
    good = set()
    for records in record_sets(found.table, number, number, voids=voids):
        for row, place in enumerate(np.frombuffer(records.locations, np.uint64).tolist()):
            if place & _PAGE_MASK in found.good:
                block = int.from_bytes(records.keys[row * 32 : row * 32 + 4], "big")
                good.add((records.scope, block))
    return frozenset(good), voids + tuple(v for v in found.table.voids if v not in voids)


def served(files: dict[int, bytes], store_id: bytes) -> set[Address]:
    """Blocks that a tier which opens these files hands out."""
    voids: tuple[Void, ...] = ()
    handed_out: set[Address] = set()
    for number in sorted(files, reverse=True):
        good, voids = told(number, files[number], store_id, voids)
        handed_out |= good
    return handed_out


def verify(image: Image, handed_out: set[Address], word: str) -> None:
    """Each block was compared when it was read."""
    missing = image.owed - handed_out
    assert not missing, f"{word}: {len(missing)} of {len(image.owed)} that are owed were not found"
    back = image.never & handed_out
    assert not back, f"{word}: {len(back)} blocks that were cleared came back"


def every_image(directory: Path, lives: Iterable[str]) -> Iterator[tuple[str, bytes, Image]]:
    """(life so far, identity, image), each beginning of a life once."""
    begun = set()
    for number, word in enumerate(lives):
        model = Model()
        with Life(directory / str(number)) as life:
            taken = 0
            for end in range(1, len(word) + 1):
                life.live(word[end - 1])
                steps, taken = life.steps[taken:], len(life.steps)
                if word[:end] in begun:
                    for step in steps:
                        model.take(step)
                    continue
                begun.add(word[:end])
                for image in images(model, steps, random.Random(word[:end])):
                    yield word[:end], life.store_id, image


class Tally:
    """What all lives together came to."""

    def __init__(self) -> None:
        self.letters: set[str] = set()
        self.different: set[int] = set()
        self.owed = 0


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    """Counts over the tests of this module; fails when all of them ran and were too few."""
    made = Tally()
    yield made
    if len(made.letters) == len(LETTERS):
        assert len(made.different) >= IMAGES_MIN
        covered("different crash images", len(made.different))
        assert made.owed >= IMAGES_MIN


@pytest.mark.usefixtures("few_mappings")
@pytest.mark.parametrize("letter", LETTERS)
def test_no_crash_of_a_short_life_costs_a_byte(tmp_path: Path, letter: str, tally: Tally) -> None:
    for word, store_id, image in every_image(tmp_path, (letter + rest for rest in words(REST))):
        verify(image, served(image.files, store_id), word)
        tally.different.add(hash(frozenset(image.files.items())))
        tally.owed += len(image.owed)
    tally.letters.add(letter)


class Unsynced(Disk):
    """The real disk in a hurry: nobody cuts its power here."""

    def fsync(self, fd: int) -> None:
        return


def opened(directory: Path) -> tuple[set[Address], set[Address]]:
    """What the whole tier hands out, and blocks that it knows two copies of: the newer one counts,
    and if that is broken the block is stored anew. In the end it stores one block more."""
    driver = Driver(directory, disk=Unsynced(), reader_count=1).recovered()
    good = set()
    for scope in (OURS, OTHERS):
        numbers = [int.from_bytes(name[:4], "big") for its, name in driver.known if its == scope]
        verdicts = driver.read(numbers, scope)
        good |= {(scope, n) for n, is_good in zip(numbers, verdicts, strict=True) if is_good}
    (place,) = driver.write([1_000_000], OURS)
    assert place, "what a crash left keeps it from writing"
    driver.close()
    copies = Counter(
        (event.scope, event.keys[at : at + 32])
        for event in driver.seen
        if isinstance(event, FileKnown)
        for at in range(0, len(event.keys), 32)
    )
    double = {
        (scope, int.from_bytes(name[:4], "big")) for (scope, name), n in copies.items() if n > 1
    }
    return good, double


def sampled(every: Iterable[_T], count: int, source: random.Random) -> list[_T]:
    """So many of them, each with the same chance; of few, all."""
    kept: list[_T] = []
    for number, each in enumerate(every):
        if number < count:
            kept.append(each)
        elif (place := source.randrange(number + 1)) < count:
            kept[place] = each
    return kept


def make(directory: Path, store_id: bytes, files: dict[int, bytes]) -> None:
    directory.mkdir()
    (directory / "store").write_bytes(store_page(store_id))
    for number, data in files.items():
        (directory / segment_name(number)).write_bytes(data)


@pytest.mark.parametrize("part", range(PARTS))
def test_the_whole_tier_agrees_on_a_sample(
    tmp_path: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "ARENA_SLOTS", 32)
    source, count = random.Random(part), 0
    for word in source.sample(list(words(3)), LIVES_SAMPLED):
        life = tmp_path / word
        life.mkdir()
        for so_far, store_id, image in sampled(every_image(life, [word]), OPENED_PER_LIFE, source):
            store = tmp_path / str(count)
            make(store, store_id, image.files)
            handed_out, double = opened(store)
            verify(image._replace(owed=image.owed - double), handed_out, so_far)
            assert handed_out <= served(image.files, store_id), so_far
            count += 1
    assert count >= OPENED_MIN // PARTS
    covered("crash images opened by the whole tier", count)


@pytest.mark.parametrize("name", ["store.new", "learned.new", "learned"])
def test_a_crash_in_what_is_written_beside_the_segments(tmp_path: Path, name: str) -> None:
    with Life(tmp_path / "life") as life:
        life.live("T")
        files = {n: (life.directory / segment_name(n)).read_bytes() for n in (1, 2)}
        store_id = life.store_id
    page = store_page(bytes(16)) if name == "store.new" else encode_learned(Learned())
    image = Image(files, frozenset((OURS, n) for n in range(3)), frozenset())
    for cut in CUTS:
        store = tmp_path / str(cut)
        make(store, store_id, files)
        (store / name).write_bytes(page[:cut])
        verify(image, opened(store)[0], f"{name}: {cut}")


@pytest.mark.parametrize("cut", CUTS)
def test_a_crash_while_a_directory_is_made(tmp_path: Path, cut: int) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "lock").touch()
    (store / "store.new").write_bytes(store_page(bytes(16))[:cut])
    assert opened(store) == (set(), set())


def test_a_tier_that_believes_what_it_reads_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images would show a block that is handed out unverified."""
    monkeypatch.setattr(Reader, "_is_good", lambda *_: True)
    told.cache_clear()
    with pytest.raises(AssertionError, match="a wrong byte"):  # noqa: PT012 - one of many does
        for _, store_id, image in every_image(tmp_path, words(2)):
            served(image.files, store_id)
    told.cache_clear()

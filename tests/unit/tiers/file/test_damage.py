"""Broken, torn, swapped, spliced and foreign files: never a wrong byte, an exception or a hang.

`Driver.read` compares every block that is called good with what was stored.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.cli.fsck import fsck
from kvstore.errors import ConfigError
from kvstore.tiers.file.directory import Directory, segment_name
from kvstore.tiers.file.disk import Disk
from kvstore.types import PAGE_BYTES
from kvstore.units import KIB
from tests.unit.tiers.file.kit import SCOPE, Driver

COUNT = 16
"""Blocks stored: two closed segments and a third of two blocks."""


def stored(directory: Path, *, orderly: bool = True) -> dict[str, bytes]:
    """A directory with COUNT blocks; its files by name."""
    driver = Driver(directory).recovered()
    for number in range(COUNT):
        driver.write([number])
    if orderly:
        driver.close()
        return images(directory)
    files = images(directory)
    driver.close()
    return files


def images(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.glob("seg-*.kv"))}


def restore(directory: Path, files: dict[str, bytes]) -> None:
    for path in directory.glob("seg-*.kv"):
        path.unlink()
    for path in (directory / "quarantine").iterdir():
        path.unlink()
    for name, data in files.items():
        (directory / name).write_bytes(data)


def changed(data: bytes, at: int, new: bytes | None = None) -> bytes:
    """With other bytes there; without any a bit is flipped."""
    new = bytes([data[at] ^ 1]) if new is None else new
    return data[:at] + new + data[at + len(new) :]


def found(directory: Path, *, all_good: bool = False) -> list[int]:
    """Open, read all that is known and return what was good. A wrong byte fails in `read`."""
    driver = Driver(directory).recovered()
    numbers = sorted(int.from_bytes(name[:4], "big") for _, name in driver.known)
    good = driver.read(numbers)
    assert all(good) or not all_good, "a torn end is not announced"
    (place,) = driver.write([1_000])
    assert 0 < place < 1 << 63, "what is broken does not keep it from writing"
    assert driver.read([1_000]) == [True]
    driver.close()
    return [number for number, is_good in zip(numbers, good, strict=True) if is_good]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_the_images_are_what_these_tests_take_them_for(store: Path) -> None:
    files = stored(store)
    assert list(files) == [segment_name(number) for number in (1, 2, 3)]
    assert found(store) == list(range(COUNT))
    assert fsck(store).status == 0


def test_a_segment_cut_at_every_page(store: Path) -> None:
    files = stored(store)
    first = segment_name(1)
    last = 0
    for pages in range(0, len(files[first]) // PAGE_BYTES, 3):
        restore(store, files | {first: files[first][: pages * PAGE_BYTES]})
        good = found(store, all_good=True)
        assert good[-9:] == list(range(7, COUNT)), "the other segments are whole"
        whole = max(0, (pages - 1) // 17)
        assert good == [*range(min(7, whole)), *range(7, COUNT)]
        last = max(last, len(good))
    assert last == COUNT


def test_a_segment_cut_at_random_bytes(store: Path) -> None:
    rng = random.Random(1)
    files = stored(store)
    first = segment_name(1)
    for _ in range(20):
        length = rng.randrange(len(files[first]))
        restore(store, files | {first: files[first][:length]})
        whole = max(0, (length // PAGE_BYTES - 1) // 17)
        assert found(store) == [*range(min(7, whole)), *range(7, COUNT)]


@pytest.mark.parametrize("seed", range(30))
def test_flipped_bits_cost_at_most_what_they_hit(store: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = stored(store)
    name = rng.choice(list(files))
    data = bytearray(files[name])
    at = rng.randrange(len(data))
    if seed % 3 == 0:  # where it hurts: pages that describe
        at = rng.choice([0, 1, 18]) * PAGE_BYTES + rng.randrange(PAGE_BYTES)
    if seed % 3 == 1:
        at = len(data) - 1 - rng.randrange(2 * PAGE_BYTES)
    data[at] ^= 1 << rng.randrange(8)
    restore(store, files | {name: bytes(data)})
    good = found(store)
    if at < PAGE_BYTES:
        assert len(good) in (COUNT - 7, COUNT - 2)
    else:
        assert len(good) >= COUNT - 1


def test_a_clear_survives_a_crash(store: Path) -> None:
    stored(store)
    driver = Driver(store).recovered()
    driver.void(None, None)
    driver.write([50])
    files = images(store)
    driver.close()
    restore(store, files)
    assert found(store) == [50]


def test_swapped_names(store: Path) -> None:
    files = stored(store)
    one, two = segment_name(1), segment_name(2)
    restore(store, files | {one: files[two], two: files[one]})
    assert found(store) == [14, 15]
    assert list((store / "quarantine").iterdir())


def test_a_record_spliced_into_another_segment(store: Path) -> None:
    files = stored(store)
    one, two = segment_name(1), segment_name(2)
    for pages in (17, 1):  # all of it, or its header
        other = files[one][PAGE_BYTES : (1 + pages) * PAGE_BYTES]
        restore(store, files | {two: changed(files[two], PAGE_BYTES, other)})
        assert found(store) == [n for n in range(COUNT) if n != 7]


def test_a_payload_exchanged_within_a_segment(store: Path) -> None:
    files = stored(store)
    one = segment_name(1)
    other = files[one][19 * PAGE_BYTES : 35 * PAGE_BYTES]
    restore(store, files | {one: changed(files[one], 2 * PAGE_BYTES, other)})
    assert found(store) == list(range(1, COUNT))


def test_an_older_version_of_a_segment(store: Path) -> None:
    older = stored(store, orderly=False)
    files = images(store)
    assert len(older[segment_name(3)]) < len(files[segment_name(3)])
    restore(store, files | {segment_name(3): older[segment_name(3)]})
    assert found(store) == list(range(COUNT)), "a younger footer is no more than a short cut"


def test_another_store_and_another_version(store: Path, tmp_path: Path) -> None:
    files, two = stored(store), segment_name(2)
    others = stored(tmp_path / "other")
    for other in (others[two], changed(files[two], 4, bytes([9]))):
        restore(store, files | {two: other})
        assert found(store) == [*range(7), 14, 15]


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


PLANTS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
    "device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)),
    "sparse 2^42": _sparse,
    "empty": Path.touch,
    "garbage": lambda path: path.write_bytes(random.Random(3).randbytes(100_000)),
    "zeros": lambda path: path.write_bytes(bytes(100_000)),
}


@pytest.mark.parametrize("kind", PLANTS)
def test_things_that_are_no_files_of_ours(store: Path, kind: str) -> None:
    stored(store)
    for number in (2, 0x7FFFFFFF):
        path = store / segment_name(number)
        path.unlink(missing_ok=True)
        PLANTS[kind](path)
    assert found(store) == [*range(7), 14, 15]
    assert fsck(store).status in (0, 1)


def test_a_socket_and_foreign_names_are_left_alone(store: Path) -> None:
    stored(store)
    (store / "notes.txt").write_text("mine")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(store / "seg-0000ffff.kv"))
        assert found(store) == list(range(COUNT))
    assert (store / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    [
        *("lock", "store", "store.new", "probe", "learned", "learned.new", "quarantine"),
        *(segment_name(2), segment_name(4), "dead-0123456789abcdef.kv"),
    ],
)
def test_links_lead_no_write_outside(store: Path, tmp_path: Path, name: str) -> None:
    stored(store)
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_bytes(b"precious")
    entry = store / name
    if entry.is_dir():
        entry.rmdir()
    entry.unlink(missing_ok=True)
    entry.symlink_to(outside if name == "quarantine" else victim)
    with contextlib.suppress(ConfigError):
        driver = Driver(store)
        driver.tier.keep_note(bytes(PAGE_BYTES))
        driver.write([1_000])
        driver.close()
    assert list(outside.iterdir()) == [victim]
    assert victim.read_bytes() == b"precious"


def test_a_lock_that_is_held_passes_from_process_to_process(store: Path) -> None:
    first = Directory(store, Disk(), direct=False)
    held_fd = os.dup(first.lock_fd)
    first.close()
    with pytest.raises(ConfigError, match="in use by another node"):
        Directory(store, Disk(), direct=False)
    second = Directory(store, Disk(), direct=False, lock_fd=held_fd)
    os.close(held_fd)
    with pytest.raises(ConfigError, match="in use by another node"):
        Directory(store, Disk(), direct=False)
    second.close()
    Directory(store, Disk(), direct=False).close()


def test_a_held_lock_of_another_directory_is_no_lock_of_this(store: Path, tmp_path: Path) -> None:
    other = Directory(tmp_path / "other", Disk(), direct=False)
    mine = Directory(store, Disk(), direct=False, lock_fd=other.lock_fd)
    other.close()
    with pytest.raises(ConfigError, match="in use by another node"):
        Directory(store, Disk(), direct=False)
    mine.close()
    Directory(tmp_path / "other", Disk(), direct=False).close()


def test_a_directory_that_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="holds other files"):
        Driver(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


def test_no_directory_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot use"):
        Driver(tmp_path / "file")


@pytest.mark.parametrize("version", [True, False])
def test_a_store_page_of_another_version_or_damaged(store: Path, *, version: bool) -> None:
    stored(store)
    page = bytearray((store / "store").read_bytes())
    if version:
        from kvstore.wire.record import PAGE_COVERED, seal_page

        page[4] = 9
        page[PAGE_COVERED:] = seal_page(page)
        (store / "store").write_bytes(page)
        with pytest.raises(ConfigError, match="another version"):
            Driver(store)
    else:
        page[100] ^= 1
        (store / "store").write_bytes(page)
        assert found(store) == list(range(COUNT)), "its segments say whose they are"


@pytest.mark.parametrize("how", ["damaged", "empty", "missing"])
def test_a_store_page_that_is_lost_is_found_again_in_the_segments(store: Path, how: str) -> None:
    stored(store)
    if how == "missing":
        (store / "store").unlink()
    else:
        (store / "store").write_bytes(bytes(PAGE_BYTES) if how == "damaged" else b"")
    report = fsck(store)
    assert (report.status, report.records) == (1, COUNT)
    assert f"store: {how}; its 3 segments say whose they are" in report.text()
    assert f"the next start of the node repairs that, as does kvstore fsck {store} --quar" in (
        report.text()
    )
    if how == "empty":
        assert fsck(store, quarantine=True).status == 1
        assert fsck(store).status == 0
    assert found(store) == list(range(COUNT))
    assert fsck(store).status == 0


def test_segments_that_disagree_whose_they_are_are_nobodys(store: Path, tmp_path: Path) -> None:
    stored(store)
    others = stored(tmp_path / "other")
    (store / segment_name(9)).write_bytes(others[segment_name(1)])
    (store / "store").unlink()
    report = fsck(store)
    assert report.status == 1
    assert report.text() == (
        f"{store}: the store file is missing; 4 segments are there, and they do not say whose they"
        " are: a node does not use them; give --file another directory, or empty this one"
    )
    with pytest.raises(ConfigError, match="holds other files"):
        Driver(store)
    assert len(images(store)) == 4, "nothing is moved"


@pytest.mark.parametrize("pages", [1, 20, -1])
def test_a_closed_segment_that_is_cut_short_is_damage(store: Path, pages: int) -> None:
    """A crash leaves one without a footer too, but then the next one does not say it was closed."""
    files = stored(store)
    for number in (1, 2, 3):
        restore(store, files)
        path = store / segment_name(number)
        path.write_bytes(files[path.name][: pages * PAGE_BYTES])
        report = fsck(store)
        if number == 3:
            assert (report.status, report.torn) == (0, 1), "nobody knows of the newest"
        else:
            assert (report.status, report.torn) == (1, 0)
            assert f"{path.name}: 1 truncated closed segment" in report.text()
    restore(store, files)
    path = store / segment_name(1)
    path.write_bytes(files[path.name][: pages * PAGE_BYTES])
    left = fsck(store).records
    assert fsck(store, quarantine=True).moved == 1
    assert (fsck(store).status, fsck(store).records) == (0, left)


def test_what_kills_leave_is_no_damage(store: Path) -> None:
    files = stored(store, orderly=False)
    for life in (1, 2):
        restore(store, files)
        driver = Driver(store).recovered()
        driver.write([100 + life])
        files = images(store)
        driver.close()
    restore(store, files)
    report = fsck(store)
    assert (report.status, report.torn) == (0, 3), "one of each life"


def test_after_an_orderly_end_every_segment_is_closed_and_the_next_one_says_so(store: Path) -> None:
    files = stored(store)
    assert fsck(store).torn == 0
    driver = Driver(store).recovered()
    driver.write([100])
    driver.close()
    path = store / segment_name(3)
    path.write_bytes(files[path.name][: 20 * PAGE_BYTES])
    assert fsck(store).problems == {"truncated closed segments": 1}


def test_quarantine_is_bounded(store: Path) -> None:
    driver = Driver(store).recovered()
    for number in range(70):
        driver.write([number])
    driver.close()
    for name, data in images(store).items():
        (store / name).write_bytes(b"x" + data[1:])
    assert found(store) == []
    aside = sum(p.stat().st_blocks * 512 for p in (store / "quarantine").iterdir())
    assert 0 < aside <= driver.config.capacity_bytes // 16 + 4 * KIB


def test_fsck_counts_and_saves(store: Path) -> None:
    files, one = stored(store), segment_name(1)
    data = changed(changed(files[one], 3 * PAGE_BYTES), 40 * PAGE_BYTES)
    restore(store, files | {one: data})
    report = fsck(store)
    assert report.status == 1
    assert report.problems == {"damaged records": 2}
    assert (report.segments, report.records) == (3, COUNT - 2)
    assert len(report.files) == 1
    assert segment_name(1) in report.text()
    repaired = fsck(store, quarantine=True)
    assert repaired.moved == 1
    assert fsck(store).status == 0
    assert found(store) == [n for n in range(COUNT) if n not in (0, 2)]


def test_fsck_does_not_bring_back_what_was_cleared(store: Path) -> None:
    driver = Driver(store).recovered()
    for number in range(COUNT):
        driver.write([number])
    driver.void(SCOPE.tenant, None)
    driver.write([50])
    driver.close()
    for name in (segment_name(1), segment_name(3)):
        (store / name).write_bytes(changed((store / name).read_bytes(), 3 * PAGE_BYTES))
    assert fsck(store, quarantine=True).moved == 2
    assert found(store) == [50]


GOLDEN = Path(__file__).parents[3] / "golden"


def test_a_directory_of_version_1_is_refused_with_a_way_out(store: Path) -> None:
    shutil.copytree(GOLDEN / "file_v1", store)
    with pytest.raises(ConfigError, match="another version of kvstore: give --file an empty dir"):
        Driver(store)
    (store / "store").write_bytes((GOLDEN / "file_v2" / "store").read_bytes())
    driver = Driver(store).recovered()
    assert not driver.known, "segments of version 1"


def test_a_directory_of_version_2_is_still_served(store: Path) -> None:
    shutil.copytree(GOLDEN / "file_v2", store)
    driver = Driver(store).recovered()
    names = sorted(name[:1] for _, name in driver.known)
    assert names == [b"\1", b"\2"], "the first was cleared"
    driver.close()
    report = fsck(store)
    assert (report.status, report.segments, report.records, report.torn) == (0, 2, 3, 1)

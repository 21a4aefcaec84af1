"""The disk of the world: the real file tier on real files, with every system call at its mercy.

Real: all of `kvstore.tiers.file` and `kvstore.node.files`. Simulated: its threads, which take
turns (`threads`), time, and what becomes of a system call:

    read, write, sync error, no descriptors, disk full
                            the call fails, for a while; it may have read or written a part
    disk slow, disk hangs   the call takes its time; the world may end before it does
    misdirected read        bytes from a few pages further on or back, or of another record of the
                            key, which another space has
    torn write              a part is written, and the process dies
    disk bit flipped, power cut, older layout, directory emptied or swapped
                            what is found is not what was left

Does not cover: when what happens (`world`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from unittest import mock

import numpy as np

from kvstore.node.files import FileEnd
from kvstore.tier_events import FileCommand, FileEvent, FileRead, ReadFile
from kvstore.tiers.file import parts, tier
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.disk import Disk
from kvstore.tiers.file.tier import FileTier
from kvstore.types import PAGE_BYTES
from kvstore.units import NS_PER_MS
from kvstore.wire.record import BlockPage, parse_page, payload_pages
from tests.sim.world.clocks import SimClock
from tests.sim.world.copies import Violation
from tests.sim.world.ground import Machine
from tests.sim.world.parts import Knobs, SimMemory
from tests.sim.world.threads import Threads

_STRIKE_SHARE: Final = {
    "read error": 0.05,
    "write error": 0.1,
    "sync error": 0.1,
    "no descriptors": 0.1,
    "disk full": 0.1,
    "disk hangs": 0.03,
    "disk slow": 0.1,
    "misdirected read": 0.1,
    "torn write": 0.2,
}
"""Of the calls that an enabled fault could hit."""
_BLOCK_READ_FACTOR: Final = 5
"""Calls that read blocks are rare among the others, and the ones that matter."""
_TWIN_SHARE: Final = 0.9
_LASTING: Final = ("read error", "write error", "sync error", "no descriptors", "disk full")
_PAUSES_MS: Final = {"disk slow": (2, 10, 60), "disk hangs": (100, 1000, 10**6)}


def _twins(fd: int, offset: int) -> list[int]:
    """Places of other records in the file that have the key of the record at `offset`."""
    page = os.pread(fd, PAGE_BYTES, offset)
    if len(page) < PAGE_BYTES:
        return []
    found = parse_page(
        page, segment_id=bytes(page[8:24]), place=int.from_bytes(page[24:32], "little")
    )
    if not isinstance(found, BlockPage):
        return []
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    key_at = page.index(found.key)
    return [
        place
        for place in range(0, len(content), PAGE_BYTES)
        if place != offset and content.startswith(found.key, place + key_at)
    ]


class SimDisk(Disk):
    """The system calls of one node process. What was not synced is remembered."""

    def __init__(self, machine: Machine, threads: Threads, memory: SimMemory) -> None:
        self._machine = machine
        self._world = machine.world
        self._arena_begin = _address(memory.bytes)
        self._arena_pages = len(memory.bytes) // PAGE_BYTES
        self.owned_pages: set[int] = set()
        """Pages of the arena that reads may write to."""
        self._threads = threads
        self._random = machine.random
        self._lasts_until_ns: dict[str, int] = {}
        self._opened: dict[int, tuple[str, os.stat_result]] = {}
        """Path and file of every descriptor that was opened here; some are closed by now, and files
        may have another path."""
        self._unsynced = machine.unsynced
        self.is_torn = False
        """A write stopped half way: its process is about to die."""

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        self._begin()
        if flags & os.O_CREAT and self._strikes("disk full"):
            raise OSError(errno.ENOSPC, "no room, says the world")
        if self._strikes("no descriptors"):
            raise OSError(errno.EMFILE, "no descriptors, says the world")
        self._fail_at_random("read error")
        # The page cache is quicker than any disk, and goes with the folder.
        fd = super().open(name, flags & ~os.O_DIRECT, dir_fd)
        self._opened[fd] = _path(fd), os.fstat(fd)
        self._world.opened_by[fd] = self
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        # Page and payload of a block come together; what recovery reads comes alone.
        factor = _BLOCK_READ_FACTOR if len(buffers) > 1 else 1
        self._begin(factor)
        self._check_owned(buffers)
        if self._strikes("read error", factor):
            if self._random.random() < 0.5:
                super().preadv(fd, buffers[: len(buffers) // 2], offset)
            raise OSError(errno.EIO, "an error, says the world")
        if self._strikes("misdirected read", factor):
            twins = _twins(fd, offset)
            if twins and self._random.random() < _TWIN_SHARE:
                offset = self._random.choice(twins)
            else:
                offset = max(0, offset + self._random.choice((-33, -2, -1, 1, 2, 33)) * PAGE_BYTES)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._begin()
        total = sum(map(len, buffers))
        path = _path(fd)
        try:
            if self._strikes("disk full"):
                raise OSError(errno.ENOSPC, "no room, says the world")
            self._fail_at_random("write error")
        except OSError:
            self._write_part(fd, path, buffers, offset)
            raise
        if self._threads.current is not None and self._strikes("torn write"):
            self._write_part(fd, path, buffers, offset)
            self.is_torn = True
            self._threads.park(lambda: False)
        self._unsynced.setdefault(path, []).append((offset, total))
        count = super().pwritev(fd, buffers, offset)
        os.utime(fd, ns=(0, self._world.now_ns))
        return count

    def fsync(self, fd: int) -> None:
        self._begin()
        path = _path(fd)
        try:
            self._fail_at_random("sync error")
        except OSError:
            # The kernel drops what it could not write, and says so once.
            self._lose(path, self._unsynced.pop(path, []))
            raise
        self._unsynced.pop(path, None)

    def _check_owned(self, buffers: Sequence[memoryview]) -> None:
        """Nobody writes to a slot that was given back, however late a call is (I4)."""
        for buffer in buffers:
            page = (_address(buffer) - self._arena_begin) // PAGE_BYTES
            if 0 <= page < self._arena_pages and page not in self.owned_pages:
                raise Violation(f"the disk writes to page {page} of a slot that was given back")

    # ── faults ───────────────────────────────────────────────────────────────────────────────────

    def _begin(self, factor: int = 1) -> None:
        """A call begins: it may take its time."""
        world, pause_ms = self._world, 0
        for name, pauses in _PAUSES_MS.items():
            if self._strikes(name, factor):
                pause_ms = self._random.choice(pauses)
        due_ns = world.now_ns + pause_ms * NS_PER_MS
        self._threads.park(lambda: world.now_ns >= due_ns or not world.enabled)

    def _strikes(self, name: str, factor: int = 1) -> bool:
        world = self._world
        if name not in world.enabled:
            return False
        if world.now_ns < self._lasts_until_ns.get(name, 0):
            return True
        if self._random.random() >= _STRIKE_SHARE[name] * factor:
            return False
        if name in _LASTING:
            lasts_ns = self._random.choice((0, 5, 100)) * NS_PER_MS
            self._lasts_until_ns[name] = world.now_ns + lasts_ns
        world.strike(name, self._machine)
        return True

    def _fail_at_random(self, fault: str) -> None:
        if self._strikes(fault):
            raise OSError(errno.EIO, "an error, says the world")

    def _write_part(self, fd: int, path: str, buffers: Sequence[memoryview], offset: int) -> None:
        data = b"".join(buffers)
        part = self._random.randrange(len(data) // 512 + 1) * 512
        os.pwrite(fd, data[:part], offset)
        os.utime(fd, ns=(0, self._world.now_ns))
        self._unsynced.setdefault(path, []).append((offset, part))

    def _lose(self, path: str, writes: Sequence[tuple[int, int]]) -> None:
        """Pages of these writes read as zeros, some of them."""
        if not os.path.isfile(path):
            return
        with open(path, "r+b") as file:
            for offset, length in writes:
                for page in range(offset, offset + length, PAGE_BYTES):
                    if self._random.random() < 0.5:
                        file.seek(page)
                        file.write(bytes(min(PAGE_BYTES, offset + length - page)))

    def cut_power(self) -> None:
        """The machine dies: of what was not synced any part may be lost, a whole file too."""
        for path, writes in sorted(self._unsynced.items()):
            fate = self._random.choice(("kept", "torn", "short", "gone"))
            self._world.faults["lost unsynced"] += fate != "kept"
            if fate == "torn":
                self._lose(path, writes)
            elif os.path.isfile(path) and fate == "short":
                os.truncate(path, min(offset for offset, _ in writes))
            elif os.path.isfile(path) and fate == "gone" and path.endswith(".kv"):
                os.unlink(path)
        self._unsynced.clear()

    def close_all(self) -> list[str]:
        """Close what the process left open, as the kernel does at its end. Returns the paths."""
        left = []
        for fd, (path, file) in self._opened.items():
            with contextlib.suppress(OSError):
                if self._world.opened_by[fd] is self and os.path.samestat(os.fstat(fd), file):
                    os.close(fd)
                    left.append(path)
        self._opened.clear()
        return left


class SimFiles:
    """The file tier of one node process, with its driver's end."""

    def __init__(self, machine: Machine, directory: Path, memory: SimMemory) -> None:
        """Raises ConfigError: the directory cannot be used, the node does not start."""
        self._machine = machine
        world = machine.world
        self.threads = Threads(world.random, lambda: machine.now_ns, world.pass_time)
        self.disk = SimDisk(machine, self.threads, memory)
        config = _config(machine.knobs, directory)
        try:
            # Threads and locks are of the module `threading`: here they take turns.
            with (
                mock.patch.object(tier, "threading", self.threads),
                mock.patch.object(parts, "threading", self.threads),
            ):
                self._tier = FileTier(config, memory.bytes, SimClock(machine), disk=self.disk)
            world.opened_by[self._tier._directory.fd] = self.disk
        except BaseException:
            self.disk.close_all()
            raise
        self._end = FileEnd(self._tier)
        self._pages: dict[int, list[int]] = {}
        """Of the arena, that each read under way may write to."""
        self.threads.start()

    @property
    def used_bytes(self) -> int:
        return self._end.tier.taken_bytes

    def carry_out(self, command: FileCommand) -> list[FileEvent]:
        if isinstance(command, ReadFile):
            length = payload_pages(command.scope.block_bytes)
            pages = [slot + page for slot in command.slots.tolist() for page in range(length)]
            self._pages[command.job] = pages
            self.disk.owned_pages.update(pages)
        return self._let_go(self._end.carry_out(command))

    def read(self) -> list[FileEvent]:
        """What the tier says now."""
        return self._let_go(list(self._end.read(0)))

    def _let_go(self, events: list[FileEvent]) -> list[FileEvent]:
        """After a read's end its slots are the engine's again."""
        for event in events:
            if isinstance(event, FileRead):
                self.disk.owned_pages.difference_update(self._pages.pop(event.job))
        return events

    def run(self, turns: int) -> None:
        """Its threads go on."""
        for _ in range(turns):
            name = self.threads.run_one()
            if not name:
                return
            self._machine.world.note(f"{name} of {self._machine.name} goes on")

    def close(self) -> None:
        """An orderly end, as far as the disk lets it."""
        self._tier.close()

    def kill(self) -> list[str]:
        """The process is gone. Returns the files that were still open."""
        self.threads.kill()
        self._tier.close()
        self._tier._directory.close()
        left = self.disk.close_all()
        if self._tier.fileno() >= 0:
            os.close(self._tier.fileno())
        return left


def _config(knobs: Knobs, directory: Path) -> FileConfig:
    return FileConfig(
        directory.parent if knobs.is_shared else directory,
        shared=knobs.is_shared,
        node=directory.name if knobs.is_shared else "",
        poll_interval_ms=knobs.poll_interval_ms,
        grace_ms=knobs.grace_ms,
        capacity_bytes=knobs.disk_bytes,
        segment_bytes=knobs.segment_bytes,
        direct=False,
        read_deadline_ms=knobs.io_deadline_ms,
        write_deadline_ms=knobs.io_deadline_ms,
        close_deadline_ms=knobs.io_deadline_ms,
        cooldown_ms=knobs.io_cooldown_ms,
    )


def flip_bits(directory: Path, source: random.Random) -> bool:
    """Bits of some segment change, one in about sixteen pages; False: there is none."""
    # Those that are hidden have names that differ from run to run.
    files = sorted(path for path in directory.glob("seg-*.kv") if path.stat().st_size)
    if not files:
        return False
    data = bytearray((path := source.choice(files)).read_bytes())
    for _ in range(1 + len(data) // (16 * PAGE_BYTES)):
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    time_ns = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(0, time_ns))
    return True


def make_older(directory: Path) -> bool:
    """The directory is of another version from now on; False: it is nobody's yet."""
    path = directory / "store"
    if not path.is_file() or path.stat().st_size < PAGE_BYTES:
        return False
    page = bytearray(path.read_bytes())
    page[4] ^= 0x40
    path.write_bytes(page)
    return True


def empty(directory: Path, source: random.Random) -> bool:
    """Somebody tidied up: all of it, or all in it. False: there was nothing."""
    was_there = directory.exists()
    if was_there and source.random() < 0.5:
        for path in directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return was_there


def open_below(folder: str) -> list[str]:
    """Paths of this process's descriptors below a folder."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in paths if path.startswith(folder)]


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")

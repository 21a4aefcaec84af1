"""The shared memory: seals, what an engine refuses to map, what a fork keeps."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import arena as arena_module
from kvstore.arena import (
    ARENA_SEALS,
    F_SEAL_FUTURE_WRITE,
    Arena,
    ArenaView,
    GenerationView,
    generation_page_bytes,
    huge_page_pool,
    wait_for_holders,
)
from kvstore.errors import AttachError, ProtocolError
from kvstore.testing.process import stop_process
from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, Incarnation

INCARNATION = Incarnation(0x1234)
ARENA_BYTES = 16 * SLOT_BYTES_MIN
KEEP_SIZE_PUNCH_HOLE = 3
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(arena_bytes=ARENA_BYTES, incarnation=INCARNATION)
    yield made
    made.close()


def generation_view(arena: Arena, *, fd: int | None = None, **changes: int) -> GenerationView:
    announced = {
        "size_bytes": arena.generation_bytes,
        "arena_bytes": arena.arena_bytes,
        "incarnation": INCARNATION,
    }
    return GenerationView(arena.generation_fd if fd is None else fd, **(announced | changes))


def arena_view(arena: Arena) -> ArenaView:
    view = generation_view(arena)
    return ArenaView(arena.arena_fd, size_bytes=arena.arena_bytes, generations=view)


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(n, 16) for n in line.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return True
    return False


def in_child(check: Callable[[], bool]) -> bool:
    """The verdict of `check` in a forked child; False when it dies."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


# ── seals ────────────────────────────────────────────────────────────────────────────────────────


def test_neither_memory_can_be_resized_or_get_other_seals(arena: Arena) -> None:
    for fd in (arena.arena_fd, arena.generation_fd):
        for size_bytes in (0, ARENA_BYTES // 2, ARENA_BYTES * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size_bytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_nobody_maps_the_generation_page_writable_again(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(arena.generation_fd, arena.generation_bytes, mmap.MAP_SHARED)
    with pytest.raises(PermissionError):
        os.pwrite(arena.generation_fd, b"\xff", PAGE_BYTES)
    read_only = mmap.mmap(
        arena.generation_fd, arena.generation_bytes, mmap.MAP_SHARED, mmap.PROT_READ
    )
    assert read_only[:8] == b"KVSGEN01"
    read_only.close()


def test_a_read_only_view_cannot_be_turned_writable(arena: Arena) -> None:
    view = generation_view(arena)
    assert view._words is not None
    assert not view._words.flags.writeable
    address = view._words.ctypes.data
    assert arena_module._libc.mprotect(ctypes.c_void_p(address), PAGE_BYTES, 3) == -1


def test_no_page_is_taken_before_it_is_populated(arena: Arena) -> None:
    assert resident_bytes(arena.arena_fd) == 0
    arena.populate(0, 4 * SLOT_BYTES_MIN)
    assert resident_bytes(arena.arena_fd) == 4 * SLOT_BYTES_MIN


def test_populating_works_on_a_kernel_without_populate_write(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 250)  # EINVAL on every kernel
    arena.array[:3] = 7
    arena.populate(0, 4 * SLOT_BYTES_MIN)
    arena.set_ready(4 * SLOT_BYTES_MIN)
    assert resident_bytes(arena.arena_fd) == 4 * SLOT_BYTES_MIN
    view = arena_view(arena)
    assert view.populate(0, ARENA_BYTES) == 4 * SLOT_BYTES_MIN
    assert view.array[:4].tolist() == [7, 7, 7, 0], "contents are left alone"


# ── what engines see ─────────────────────────────────────────────────────────────────────────────


def test_generations_start_at_one_and_follow_the_node(arena: Arena) -> None:
    view = generation_view(arena)
    slots = np.array([0, 16, 240, 17], np.uint32)  # 17 lies in the slot that begins at 16
    before = view.generations(slots)
    arena.raise_generations([16, 240], [5, 2**63])
    assert before.tolist() == [1, 1, 1, 1], "it does not change afterwards"
    assert view.generations(slots).tolist() == [1, 5, 2**63, 5]
    assert view.generations(slots.reshape(2, 2)).shape == (2, 2)


def test_a_slot_outside_the_arena_is_the_nodes_fault(arena: Arena) -> None:
    view = generation_view(arena)
    last = ARENA_BYTES // PAGE_BYTES - 1
    assert view.generations(np.array([last], np.uint32)).tolist() == [1]
    with pytest.raises(ProtocolError):
        view.generations(np.array([last + 1], np.uint32))


def test_heartbeat_and_ready_bytes_are_seen_at_once(arena: Arena) -> None:
    view = generation_view(arena)
    assert (view.heartbeat_ns(), view.ready_bytes()) == (0, 0)
    arena.beat(123)
    arena.set_ready(SLOT_BYTES_MIN)
    assert (view.heartbeat_ns(), view.ready_bytes()) == (123, SLOT_BYTES_MIN)
    assert view.incarnation == INCARNATION


def test_bytes_are_shared_both_ways(arena: Arena) -> None:
    view = arena_view(arena)
    arena.array[5] = 1
    view.array[6] = 2
    assert view.array[:8].tolist() == arena.array[:8].tolist() == [0, 0, 0, 0, 0, 1, 2, 0]


def test_an_engine_populates_only_what_the_node_has_taken(arena: Arena) -> None:
    view = arena_view(arena)
    arena.populate(0, 3 * SLOT_BYTES_MIN)
    arena.set_ready(3 * SLOT_BYTES_MIN)
    assert view.populate(0, ARENA_BYTES) == 3 * SLOT_BYTES_MIN
    assert view.populate(5 * SLOT_BYTES_MIN, ARENA_BYTES) == 5 * SLOT_BYTES_MIN, "nothing mapped"
    assert resident_bytes(arena.arena_fd) == 3 * SLOT_BYTES_MIN


# ── what engines refuse ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL, F_SEAL_FUTURE_WRITE]
)
def test_a_page_that_lacks_a_seal_is_not_mapped(arena: Arena, missing: int) -> None:
    seals = (ARENA_SEALS | F_SEAL_FUTURE_WRITE) & ~missing
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, os.pread(arena.generation_fd, arena.generation_bytes, 0))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    try:
        with pytest.raises(AttachError, match="not sealed"):
            generation_view(arena, fd=fd)
        if missing != F_SEAL_FUTURE_WRITE:
            with pytest.raises(AttachError, match="not sealed"):
                ArenaView(fd, size_bytes=arena.generation_bytes, generations=generation_view(arena))
    finally:
        os.close(fd)


def test_a_file_is_not_mapped(arena: Arena, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(arena.generation_bytes)
        with pytest.raises(AttachError, match="sealable"):
            generation_view(arena, fd=file.fileno())


@pytest.mark.parametrize(
    "changes",
    [
        {"size_bytes": 2 * PAGE_BYTES + 1},
        {"size_bytes": 0},
        {"size_bytes": -1},
        {"arena_bytes": ARENA_BYTES * 1000},
        {"incarnation": 1},
    ],
)
def test_a_page_other_than_announced_is_not_mapped(arena: Arena, changes: dict[str, int]) -> None:
    with pytest.raises(AttachError):
        generation_view(arena, **changes)


@pytest.mark.parametrize(("word", "value"), [(0, 1), (1, 2)])
def test_another_magic_or_version_is_not_mapped(arena: Arena, word: int, value: int) -> None:
    arena._header[word] = value
    with pytest.raises(AttachError, match="magic"):
        generation_view(arena)


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_closed_view_is_never_right_by_accident(arena: Arena) -> None:
    view, memory = generation_view(arena), arena_view(arena)
    arena.beat(99)
    view.close()
    memory.close()
    assert view.generations(np.array([0, 16], np.uint32)).tolist() == [0, 0]
    assert (view.heartbeat_ns(), view.ready_bytes(), memory.array.size) == (0, 0, 0)
    assert memory.populate(0, PAGE_BYTES) == 0


def test_memory_stays_while_an_array_uses_it_and_no_longer(arena: Arena) -> None:
    view = arena_view(arena)
    address = view.array.ctypes.data
    piece = view.array[10:20]
    view.close()
    piece[:] = 3
    assert arena.array[10:20].tolist() == [3] * 10
    assert is_mapped(address)
    del piece
    assert not is_mapped(address)


def test_a_forked_child_has_neither_views_nor_pages(arena: Arena) -> None:
    arena.set_ready(ARENA_BYTES)
    view = arena_view(arena)
    generations = view._generations
    address = view.array.ctypes.data
    assert is_mapped(address)
    assert in_child(
        lambda: not (view.array.size or generations.ready_bytes() or is_mapped(address))
    )
    assert generations.ready_bytes(), "the parent goes on"
    view.array[0] = 1


def test_a_child_that_drops_the_arrays_unmaps_nothing(arena: Arena) -> None:
    view = arena_view(arena)
    kept = [view.array]
    address, size_bytes = view.array.ctypes.data, view.size_bytes

    def reuse_the_range() -> bool:
        libc = arena_module._libc
        fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
        taken = libc.mmap(address, size_bytes, mmap.PROT_READ, fixed, -1, 0)
        kept.clear()
        return bool(taken == address) and is_mapped(address)

    assert in_child(reuse_the_range)


def test_descriptors_are_closed_once_and_views_keep_none(arena: Arena) -> None:
    before = len(os.listdir("/proc/self/fd"))
    view = arena_view(arena)
    assert len(os.listdir("/proc/self/fd")) == before
    assert view.array.size
    fds = arena.arena_fd, arena.generation_fd
    arena.close()
    arena.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file") as caught:
            os.fstat(fd)
        assert caught.value.errno == errno.EBADF


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arena_bytes", "page_bytes"),
    [
        (SLOT_BYTES_MIN, 2 * PAGE_BYTES),
        (512 * SLOT_BYTES_MIN, 2 * PAGE_BYTES),
        (513 * SLOT_BYTES_MIN, 3 * PAGE_BYTES),
        (64 << 30, PAGE_BYTES + (8 << 20)),
    ],
)
def test_size_of_the_generation_page(arena_bytes: int, page_bytes: int) -> None:
    assert generation_page_bytes(arena_bytes) == page_bytes


def test_huge_pages_are_used_when_the_pool_has_room() -> None:
    free_bytes, page_bytes = huge_page_pool()
    if not page_bytes:
        pytest.skip("this kernel has no huge pages")
    arena = Arena(arena_bytes=page_bytes, incarnation=INCARNATION)
    on_huge_pages = os.fstat(arena.arena_fd).st_blksize == page_bytes
    arena.close()
    assert on_huge_pages == (free_bytes >= page_bytes)


def punch(arena: Arena, begin: int, length: int) -> None:
    """Give pages back to the kernel, as every engine can."""
    where = ctypes.c_long(begin), ctypes.c_long(length)
    assert _libc.fallocate(arena.arena_fd, KEEP_SIZE_PUNCH_HOLE, *where) == 0


def read(arena: Arena, begin: int, length: int) -> bytes:
    into = bytearray(b"x" * length)
    arena.read(begin, memoryview(into))
    return bytes(into)


def test_reading_takes_no_page_that_was_given_back(arena: Arena) -> None:
    arena.populate(0, ARENA_BYTES)
    arena.array[:] = 7
    punch(arena, SLOT_BYTES_MIN, SLOT_BYTES_MIN)
    assert read(arena, 0, 4) == b"\7" * 4
    left_bytes = arena.taken_bytes
    assert left_bytes == ARENA_BYTES - SLOT_BYTES_MIN
    assert read(arena, SLOT_BYTES_MIN - 2, 4) == b"\7\7\0\0"
    assert read(arena, SLOT_BYTES_MIN, SLOT_BYTES_MIN) == bytes(SLOT_BYTES_MIN)
    assert arena.taken_bytes == left_bytes, "there may be none: a touch would be SIGBUS then"


def test_what_cannot_be_read_is_zero_and_no_signal(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = os.memfd_create("empty")  # a touch beyond its end is SIGBUS
    with monkeypatch.context() as patch:
        for fd in (empty, arena.hold_fd):
            patch.setattr(arena, "arena_fd", fd)
            assert read(arena, 0, 8) == bytes(8)
    os.close(empty)


def test_a_seal_that_forbids_holes_forbids_engines_to_map_it_writable(arena: Arena) -> None:
    page = arena.generation_fd  # it has that seal
    assert _libc.fallocate(page, KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(4096)) < 0
    assert ctypes.get_errno() == errno.EPERM
    with pytest.raises(PermissionError):
        mmap.mmap(page, PAGE_BYTES)


HOLDER = """
import sys
print("held", flush=True)
sys.stdin.read()
"""


def ended(arena: Arena) -> bool:
    return wait_for_holders(arena.holders_fd, timeout_s=0)


def let_go(arena: Arena) -> None:
    """As the end of the node process does."""
    os.close(arena.hold_fd)
    arena.hold_fd = os.dup(arena.holders_fd)


def test_who_holds_an_arena_is_waited_for_until_it_has_ended(arena: Arena) -> None:
    assert not ended(arena), "this process may write to it"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        pass_fds=[arena.hold_fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            let_go(arena)
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            stop_process(holder.pid)
            assert not ended(arena), "it only stands still"
        finally:
            holder.kill()
    assert wait_for_holders(arena.holders_fd, timeout_s=30)


def test_several_may_hold_an_arena(arena: Arena) -> None:
    held = [os.dup(arena.hold_fd) for _ in range(2)]
    let_go(arena)
    os.close(held[0])
    assert not ended(arena), "one of them holds it still"
    os.close(held[1])
    assert ended(arena)


def test_a_lock_on_the_arena_says_nothing(arena: Arena) -> None:
    whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(arena.arena_fd, fcntl.F_OFD_SETLK, whole)
    let_go(arena)
    assert ended(arena)

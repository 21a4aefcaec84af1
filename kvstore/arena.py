"""The shared memory of a node: the arena that holds slots, and the generation page beside it.

    Arena            node side    makes both memfds, seals them, writes generations and heartbeat;
                                  and the pipe held by all processes that may write to the arena
    GenerationView   engine side  read-only: generations of slots, heartbeat of the node
    ArenaView        engine side  the arena, writable, as one array of bytes

Layout of the generation page (version 1, u64 each, native little-endian):

    offset 0  magic   8  layout version   16  incarnation   24  heartbeat ns   32  ready bytes
    offset 4096  generation[0], generation[1], …       one per SLOT_BYTES_MIN of arena

An engine maps nothing that it has not checked: size, seals, magic, version, incarnation. Without
the seals a peer could shrink the memory under a reader (SIGBUS) or write its own generations.

Covers, too: what a forked child must not use (`in_children`), of all packages. Does not cover:
owners of slots (`kvstore.engine`), how descriptors travel (`kvstore.descriptors`), pre-faulting in
the background (`kvstore.tiers.dram`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import select
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import AttachError, ProtocolError
from kvstore.types import (
    PAGE_BYTES,
    PAGES_PER_GENERATION,
    SLOT_BYTES_MIN,
    Generation,
    Incarnation,
    SlotId,
)

MAGIC: Final = int.from_bytes(b"KVSGEN01", "little")
LAYOUT_VERSION: Final = 1
F_SEAL_FUTURE_WRITE: Final = 0x0010
ARENA_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
GENERATION_SEALS: Final = ARENA_SEALS | F_SEAL_FUTURE_WRITE
POPULATE_CHUNK_BYTES: Final = 64 << 20

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; Python's mmap does not name them
_MFD_HUGETLB: Final = 0x0004
_MAGIC, _VERSION, _INCARNATION, _HEARTBEAT, _READY = range(5)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def generation_page_bytes(arena_bytes: int) -> int:
    """Size of the generation page of an arena: header page and words, in whole pages."""
    word_bytes = 8 * -(-arena_bytes // SLOT_BYTES_MIN)
    return PAGE_BYTES + -(-word_bytes // PAGE_BYTES) * PAGE_BYTES


class _Mapping:
    """Shared pages of a file, unmapped when the last array over them is gone.

    Not `mmap.mmap`: that keeps a duplicate of the descriptor open for its whole life, which a
    forked child would inherit. A child never has the pages (MADV_DONTFORK), so it must not unmap
    the range either: something else may live there by then.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        self.address = 0
        self.size_bytes = size_bytes
        self._writable = writable
        self._pid = os.getpid()
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            _raise_errno()
        self.address = address
        self.advise(mmap.MADV_DONTFORK)
        self.advise(mmap.MADV_DONTDUMP)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, not self._writable),
            "version": 3,
        }

    def advise(self, advice: int, begin: int = 0, end: int | None = None) -> None:
        """madvise on bytes [begin, end), page aligned. Runs without the GIL. Raises OSError."""
        length = (self.size_bytes if end is None else end) - begin
        if _libc.madvise(self.address + begin, length, advice):
            _raise_errno()

    def __del__(self, _munmap: Any = _libc.munmap, _getpid: Any = os.getpid) -> None:
        if self.address and _getpid() == self._pid:
            _munmap(self.address, self.size_bytes)


def _raise_errno() -> NoReturn:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))


class Arena:
    """Node side: makes, maps and seals both memories. Not thread safe, but for `set_ready`.

    `array` is the arena, shape [arena_bytes] u8; bytes not populated must not be touched.
    Engines can give pages back to the kernel (FALLOC_FL_PUNCH_HOLE): no seal forbids that and still
    lets them map the arena writable. A touch of such a page takes another, or is a SIGBUS where
    there is none, so this process looks at blocks by `read` alone.
    """

    def __init__(
        self,
        *,
        arena_bytes: int,
        incarnation: Incarnation,
        held_fd: int = -1,
        first_generation: int = 1,
        share_page: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Make both memories; no page of the arena is taken yet.

        Args:
            arena_bytes: size.
            incarnation: of this process; the generation page is new with each.
            held_fd: the arena of an earlier process, to go on with; this object's from now on.
            first_generation: of every slot; higher than any before.
            share_page: is shown the generation page before it is sealed, while it can still be
                mapped writable.

        Raises:
            OSError: the kernel has no room for them.
        """
        assert arena_bytes > 0
        assert arena_bytes % SLOT_BYTES_MIN == 0, arena_bytes
        assert incarnation, "an incarnation is not zero"
        self.arena_bytes = arena_bytes
        self.generation_bytes = generation_page_bytes(arena_bytes)
        self.arena_fd, arena, self.huge_pages = _arena_memory(arena_bytes, held_fd)
        self.holders_fd, self.hold_fd = os.pipe2(os.O_CLOEXEC)
        """A process that may write to the arena keeps `hold_fd` open, this one included; the next
        process of the node waits for all of them (`wait_for_holders`). No engine has either."""
        self.generation_fd, words = make_page(
            self.generation_bytes, incarnation, "kvstore-generations", share_page
        )
        self._mapping: _Mapping | None = arena
        self.array: NDArray[np.uint8] = np.asarray(arena)
        self._header = words[: PAGE_BYTES // 8]
        self._generations = words[PAGE_BYTES // 8 :]
        self._generations[:] = first_generation

    def raise_generations(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Publish `generations[i]` for `slots[i]`, which every mapping sees on return."""
        words = np.asarray(slots, np.int64) // PAGES_PER_GENERATION
        values = np.asarray(generations, np.uint64)
        assert words.shape == values.shape, "one generation per slot"
        is_inside = (words >= 0) & (words < self.arena_bytes // SLOT_BYTES_MIN)
        assert is_inside.all(), "outside the arena"
        assert (values >= self._generations[words]).all(), "a generation never goes back"
        self._generations[words] = values

    def generation(self, slot: SlotId) -> Generation:
        """The published generation of a slot."""
        assert 0 <= slot * PAGE_BYTES < self.arena_bytes, f"slot {slot} is outside the arena"
        return Generation(int(self._generations[slot // PAGES_PER_GENERATION]))

    def beat(self, now_ns: int) -> None:
        """Publish that the node was alive at `now_ns` of its monotonic clock."""
        self._header[_HEARTBEAT] = now_ns

    def set_ready(self, ready_bytes: int) -> None:
        """Publish how many bytes from the start are populated. One thread at a time."""
        self._header[_READY] = ready_bytes

    def populate(self, begin: int, end: int) -> None:
        """Take pages for bytes [begin, end), charged to this process's cgroup.

        Raises:
            OSError: no memory for them; nothing is signalled, the rest of the arena still works.
        """
        assert self._mapping is not None, "closed"
        try:
            self._mapping.advise(_MADV_POPULATE_WRITE, begin, end)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Kernels before 5.14. Like populate it reports want of memory instead of signalling.
            os.posix_fallocate(self.arena_fd, begin, end - begin)

    def read(self, begin: int, into: memoryview) -> None:
        """Copy bytes of the arena without taking a page and without a fault: bytes that are not
        there, or cannot be read, are 0."""
        try:
            done = os.preadv(self.arena_fd, [into], begin)
        except OSError:  # memory that failed
            done = 0
        if done < len(into):
            into[done:] = bytes(len(into) - done)

    @property
    def taken_bytes(self) -> int:
        """Bytes of the arena whose pages exist, swapped ones included."""
        return os.fstat(self.arena_fd).st_blocks * 512

    def close(self) -> None:
        """Close the descriptors. Engines that mapped the memory keep theirs."""
        if self._mapping is None:
            return
        self._mapping = None
        self.array = np.empty(0, np.uint8)
        for fd in (self.arena_fd, self.generation_fd, self.holders_fd, self.hold_fd):
            os.close(fd)


def _arena_memory(arena_bytes: int, held_fd: int) -> tuple[int, _Mapping, bool]:
    """(descriptor, mapping, whether it may have huge pages) of an earlier process's arena, or of a
    new sealed memfd of that size; this from the huge page pool if it has room."""
    if held_fd >= 0:
        status = os.fstat(held_fd)
        assert status.st_size == arena_bytes, "the arena that was held has another size"
        mapping = _Mapping(held_fd, arena_bytes, writable=True)
        return held_fd, mapping, status.st_blksize > PAGE_BYTES or _ask_for_huge_pages(mapping)
    free_bytes, page_bytes = huge_page_pool()
    if page_bytes and arena_bytes % page_bytes == 0 and free_bytes >= arena_bytes:
        try:
            return *_make_memfd(arena_bytes, _MFD_HUGETLB), True
        except OSError:  # the pool shrank, or a cgroup limit forbids it: ordinary pages then
            pass
    fd, mapping = _make_memfd(arena_bytes)
    return fd, mapping, _ask_for_huge_pages(mapping)


def _ask_for_huge_pages(mapping: _Mapping) -> bool:
    """Ask the kernel for transparent huge pages in this mapping. False: it will not use any."""
    try:
        mapping.advise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without transparent huge pages
        return False
    return "[never]" not in _read(_SHMEM_ENABLED) and "[deny]" not in _read(_SHMEM_ENABLED)


def journal_memory(size_bytes: int, *, held_fd: int = -1) -> tuple[int, NDArray[np.uint64]]:
    """(descriptor, words [size / 8] u64) of memory for a journal, of one node and its supervisor
    only: new memory, all 0, or with `held_fd`, which is the caller's no more, that of an earlier
    process. The mapping lasts as long as an array over it.

    Raises:
        OSError: the kernel has no room for it, or the held memory has another size.
    """
    if held_fd < 0:
        fd, mapping = _make_memfd(size_bytes, name="kvstore-journal")
    else:
        fd = held_fd
        if os.fstat(fd).st_size != size_bytes:
            os.close(fd)
            raise OSError(errno.EINVAL, "it has another size")
        mapping = _Mapping(fd, size_bytes, writable=True)
    _ask_for_huge_pages(mapping)
    return fd, np.asarray(mapping).view(np.uint64)


def make_page(
    size_bytes: int, incarnation: int, name: str, share: Callable[[int], None] = lambda _: None
) -> tuple[int, NDArray[np.uint64]]:
    """(descriptor, words) of a new page of generations or places, sealed after `share` has seen it:
    nobody ever gets another writable mapping of it. Raises OSError."""
    fd, mapping = _make_memfd(size_bytes, name=name, seals=GENERATION_SEALS, share=share)
    words = np.asarray(mapping).view(np.uint64)
    words[:3] = MAGIC, LAYOUT_VERSION, incarnation
    return fd, words


def _make_memfd(
    size_bytes: int,
    flags: int = 0,
    *,
    name: str = "kvstore-arena",
    seals: int = ARENA_SEALS,
    share: Callable[[int], None] = lambda _: None,
) -> tuple[int, _Mapping]:
    """(descriptor, writable mapping) of new memory of that size, sealed then. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size_bytes)
        share(fd)
        mapping = _Mapping(fd, size_bytes, writable=True)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd, mapping


_SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def huge_page_pool() -> tuple[int, int]:
    """(free bytes, page bytes) of the default huge page pool; zeros when there is none."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    page_kib = int(fields.get("Hugepagesize", "0 kB").split()[0])
    free_count = int(fields.get("HugePages_Free", "0")) - int(fields.get("HugePages_Rsvd", "0"))
    return free_count * page_kib * 1024, page_kib * 1024


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def map_arena(fd: int, *, size_bytes: int, writable: bool) -> NDArray[np.uint8]:
    """An arena that another process of the node holds, shape [size_bytes] u8, after a look at its
    size and seals. `fd` stays the caller's to close; the pages stay mapped as long as the array.

    Raises:
        AttachError: this is no such arena.
    """
    _verify(fd, size_bytes=size_bytes, seals=ARENA_SEALS, what="arena")
    return np.asarray(_map(fd, size_bytes, writable=writable))


def fill_page_tables(mapped: NDArray[np.uint8], begin: int, end: int) -> None:
    """Map bytes [begin, end) of an arena ahead of use, page aligned; its pages must be there.
    Runs without the GIL.

    Raises:
        OSError: the kernel has no memory for the tables.
    """
    how = _MADV_POPULATE_WRITE if mapped.flags.writeable else _MADV_POPULATE_READ
    if _libc.madvise(mapped.ctypes.data + begin, end - begin, how):
        if ctypes.get_errno() != errno.EINVAL:
            _raise_errno()
        # Before 5.14: reading a shared page maps it, and changes nothing in it.
        mapped[begin:end:PAGE_BYTES].max()


def wait_for_holders(holders_fd: int, *, timeout_s: float) -> bool:
    """Wait until every process that may write to an arena has ended; one that was killed may take
    a while to leave the kernel. False: it has not within this time.

    The kernel closes descriptors of a process after its mappings, however it ends. A lock on the
    arena itself would not do: every engine can lock it, and its lock outlives it.
    """
    poll = select.poll()
    poll.register(holders_fd, 0)  # only the end of all writers
    return bool(poll.poll(timeout_s * 1000))


# ── engine side ──────────────────────────────────────────────────────────────────────────────────


class GenerationView:
    """Read-only view of a node's generation page. Closed in a forked child.

    A closed view is never right by accident: generations read 0, which no slot has, and the
    heartbeat is as old as the clock.
    """

    def __init__(self, fd: int, *, size_bytes: int, arena_bytes: int, incarnation: int) -> None:
        """Map and check a received descriptor, which stays the caller's to close.

        Raises:
            AttachError: this is not the generation page that was announced.
        """
        _verify(fd, size_bytes=size_bytes, seals=GENERATION_SEALS, what="generation page")
        if size_bytes != generation_page_bytes(arena_bytes):
            raise AttachError(f"a generation page of {size_bytes} bytes does not fit the arena")
        words = np.asarray(_map(fd, size_bytes, writable=False)).view(np.uint64)
        if int(words[_MAGIC]) != MAGIC or int(words[_VERSION]) != LAYOUT_VERSION:
            raise AttachError("the generation page has another magic or layout version")
        if int(words[_INCARNATION]) != incarnation:
            raise AttachError("the generation page belongs to another start of the node")
        self.incarnation = Incarnation(incarnation)
        self._words: NDArray[np.uint64] | None = words
        self._slot_end = arena_bytes // PAGE_BYTES
        in_children[self] = GenerationView.close

    def generations(self, slots: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """A snapshot of the generations of `slots`, same shape.

        Raises:
            ProtocolError: a slot lies outside the arena.
        """
        if self._words is None:
            return np.zeros(slots.shape, np.uint64)
        if slots.size and int(slots.max()) >= self._slot_end:
            raise ProtocolError("a slot lies outside the arena")
        index = slots // np.uint32(PAGES_PER_GENERATION) + np.uint32(PAGE_BYTES // 8)
        found: NDArray[np.uint64] = self._words[index]
        return found

    def heartbeat_ns(self) -> int:
        """The node's monotonic time when its loop was last known to run."""
        return 0 if self._words is None else int(self._words[_HEARTBEAT])

    def ready_bytes(self) -> int:
        """Bytes from the start of the arena whose pages exist."""
        return 0 if self._words is None else int(self._words[_READY])

    def close(self) -> None:
        """Give the mapping back. Idempotent."""
        self._words = None


class ArenaView:
    """Writable view of a node's arena. Closed in a forked child, where the pages do not exist."""

    def __init__(self, fd: int, *, size_bytes: int, generations: GenerationView) -> None:
        """Map and check a received descriptor, which stays the caller's to close.

        Raises:
            AttachError: this is not the arena that was announced.
        """
        self.array = map_arena(fd, size_bytes=size_bytes, writable=True)
        """The whole arena, shape [size_bytes] u8; empty once closed. The mapping lives as long as
        any array made from it, so a copy in flight in another thread is safe across `close`."""
        self._generations = generations
        self.size_bytes = size_bytes
        in_children[self] = ArenaView.close

    def populate(self, begin: int, end: int) -> int:
        """Map bytes [begin, end) of the arena ahead of use, as far as the node has them ready.

        Pages the node has not taken yet are left alone: touching them would charge this process's
        cgroup instead of the node's. Runs without the GIL, chunk by chunk.

        Returns: the end of the mapped bytes, at most `end`.
        Raises:
            OSError: the kernel has no memory for the page tables.
        """
        array = self.array
        begin -= begin % PAGE_BYTES
        end = min(-(-end // PAGE_BYTES) * PAGE_BYTES, self._generations.ready_bytes())
        if not array.size:
            return begin
        for at in range(begin, end, POPULATE_CHUNK_BYTES):
            fill_page_tables(array, at, min(at + POPULATE_CHUNK_BYTES, end))
        return max(begin, end)

    def close(self) -> None:
        """Give the mapping back as soon as no array uses it. Idempotent."""
        self.array = np.empty(0, np.uint8)


# ── forks ────────────────────────────────────────────────────────────────────────────────────────

in_children: Final[weakref.WeakKeyDictionary[Any, Callable[[Any], None]]] = (
    weakref.WeakKeyDictionary()
)
"""Objects that a forked child must not use, such as a view of pages that it does not have, and what
is done to each of them in the child."""


def _forked() -> None:
    for held, close in list(in_children.items()):
        with contextlib.suppress(OSError):
            close(held)


os.register_at_fork(after_in_child=_forked)


def _verify(fd: int, *, size_bytes: int, seals: int, what: str) -> None:
    try:
        actual = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise AttachError(f"the {what} that the node sent is no sealable memory") from None
    if actual & seals != seals:
        raise AttachError(f"the {what} that the node sent is not sealed")
    if size_bytes <= 0 or os.fstat(fd).st_size != size_bytes:
        raise AttachError(f"the {what} that the node sent is not {size_bytes} bytes long")


def _map(fd: int, size_bytes: int, *, writable: bool) -> _Mapping:
    try:
        return _Mapping(fd, size_bytes, writable=writable)
    except OSError as error:
        raise AttachError(f"cannot map {size_bytes} bytes of the node: {error.strerror}") from None

"""What benchmarks do to files behind a cache's back: forget them in memory, damage them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path


def drop_page_cache(folder: Path) -> None:
    """Have the kernel write out and forget what it holds of the files in a folder."""
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # what is not written yet cannot be forgotten
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def flip_bits(folder: Path, *, every_bytes: int, seed: int) -> int:
    """Flip one bit, at a random place, in every `every_bytes` of each file; returns how many.

    A last stretch that is shorter stays as it is, and so do small files: one damaged page of
    metadata would have a store put aside as a whole, and no block would be put to the test.
    """
    rng = random.Random(seed)
    flipped = 0
    for path in _files(folder):
        with path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for start in range(0, size - every_bytes + 1, every_bytes):
                place = rng.randrange(start, start + every_bytes)
                byte = os.pread(file.fileno(), 1, place)[0] ^ (1 << rng.randrange(8))
                os.pwrite(file.fileno(), bytes([byte]), place)
                flipped += 1
    return flipped


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())

"""Checksums of what arrived from a slab, by the real kernels, which a host runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from kvstore.kernels import launches
from kvstore.kernels.caches import Addresses, DeviceCache, LayerPages
from kvstore.kernels.reference import checksum
from kvstore.kernels.slab import MappedSlab
from kvstore.kernels.strategy import BlockMoves, Thresholds
from kvstore.ports import BlockCopy, CopyWay
from kvstore.wire.checksum import PIECE_BYTES
from kvstore.wire.layout import Slab
from tests.amounts import amount
from tests.kit.host_kernels import HostKernels

BLOCKS, GAP, HEADER = 3, 24, b"the address of a block"


class OneStream:
    """A device whose kernels are the real ones, and which does everything at once."""

    def __init__(self, program: Path) -> None:
        self.kernels = HostKernels(program)

    def move_trouble(self) -> str:
        return ""

    digest_trouble = move_trouble

    def move(self, stream: int, *pieces: Addresses) -> None:
        launches.moved(self.kernels.launch, *pieces)

    def digest(self, stream: int, address: int, size: int, **places: int) -> None:
        launches.digests(self.kernels.launch, np.array([address], np.uint64), size, **places)

    def copy(self, stream: int, *pieces: Addresses) -> None:
        for target, source, size in zip(*(each.tolist() for each in pieces), strict=True):
            self.kernels.write(target, self.kernels.get(source, size))

    def allocate(self, size: int) -> int:
        return self.kernels.room(size)

    def open(self, handle: bytes) -> int:
        return self.kernels.put(handle)

    def leave(self, address: int) -> None:
        """`free` does it."""

    free = leave


@pytest.fixture(scope="module")
def device(program: Path) -> Iterator[OneStream]:
    device = OneStream(program)
    yield device
    device.kernels.close()


@settings(max_examples=amount(25, nightly=1000), deadline=None)
@given(
    pages=st.lists(st.integers(1, 900) | st.sampled_from([16, 1024]), min_size=1, max_size=12),
    block=st.integers(0, BLOCKS - 1),
    flipped=st.integers(0, 1 << 20),
    by_copies=st.booleans(),
)
@example([7, PIECE_BYTES, 3 * PIECE_BYTES // 2], 1, 9 * PIECE_BYTES // 4, False)
@example([16] * 161, 2, 0, False)
def test_the_checksum_is_that_of_the_bytes_in_the_pages(
    device: OneStream, pages: list[int], block: int, flipped: int, by_copies: bool
) -> None:
    """One bit of them differs afterwards, and so does the checksum."""
    begins = np.cumsum([0, *(BLOCKS * size + GAP for size in pages)]).tolist()
    memory = device.allocate(begins[-1])
    layers = [
        LayerPages(memory + begin, size, size) for begin, size in zip(begins, pages, strict=False)
    ]
    cache = DeviceCache(layers, BLOCKS)
    kind: Any = device
    moves = BlockMoves(kind, [], [cache.sizes], Thresholds(0 if by_copies else 1 << 62, 1 << 62))
    moves._staging[0] = 0
    slab = MappedSlab(kind, moves, [cache])
    data = np.random.default_rng(flipped).bytes(cache.block_bytes)
    slab.map(Slab("", GAP + len(data), bytes(GAP) + data))
    assert slab.makes_sums
    copy = BlockCopy(1, CopyWay.LOAD, 0, block, header=HEADER)
    into = device.allocate(16 * len(pages) + 64)

    def found() -> bytes:
        slab.sum(0, 0, cache.places(block), into)
        digests = device.kernels.get(into, 16 * -(-len(data) // PIECE_BYTES))
        return slab.root(copy, np.frombuffer(digests, np.uint8))

    slab.load(0, 0, cache.places(block)[None], np.array([GAP], np.uint64))
    assert found() == checksum(HEADER, data)
    at = flipped % len(data)
    layer = next(n for n, end in enumerate(np.cumsum(pages).tolist()) if at < end)
    place = layers[layer].address + block * pages[layer] + at - sum(pages[:layer])
    device.kernels.write(place, bytes([data[at] ^ 1]))
    other = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    assert found() == checksum(HEADER, other)
    device.kernels.free()

"""A cache in the GPU's memory, slots in the host's, and the product's copy engine between them."""

from __future__ import annotations

import itertools
import threading
import time
from typing import NamedTuple

import numpy as np

from bench.gpu.machine import Bytes, Gpu, noise, pages
from kvstore.kernels.device import DeviceCopies
from kvstore.kernels.port import DeviceCache, LayerPages
from kvstore.ports import BlockCopy, CopyEnd, CopyWay
from kvstore.wire.record import checksum_of

HEADER = b"bench"
END_S_MAX = 20.0
_PAUSE = threading.Event()
"""Never set."""


class Shape(NamedTuple):
    """A block of a KV cache: a page of each layer."""

    layers: int
    page_bytes: int
    is_block_major: bool = False
    """The pages of a block follow one another, so that it is one run of bytes."""

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes


class Rank:
    """See the module. Block numbers go through a shuffled table, as those of an engine do."""

    def __init__(
        self,
        gpu: Gpu,
        shape: Shape,
        blocks: int,
        *,
        seed: int,
        by_pieces: bool = False,
        slots: Bytes | None = None,
        slots_begin: int = 0,
    ) -> None:
        """`slots`: the host's memory, of a block each from `slots_begin` on; None: of its own.

        Raises:
            DeviceError: the device refuses.
        """
        self.gpu, self.shape, self.blocks = gpu, shape, blocks
        self.block_bytes = shape.block_bytes
        self._address = gpu.witness.allocate(blocks * self.block_bytes)
        stride = self.block_bytes if shape.is_block_major else shape.page_bytes
        step = shape.page_bytes if shape.is_block_major else shape.page_bytes * blocks
        self._layers = [
            LayerPages(self._address + layer * step, stride, shape.page_bytes)
            for layer in range(shape.layers)
        ]
        cache = DeviceCache(self._layers, blocks)
        self.copies = DeviceCopies(gpu.open_device(), [cache], by_pieces=by_pieces)
        assert by_pieces or not self.copies.moves.trouble, self.copies.moves.trouble
        self.slots_begin = slots_begin
        self.memory = pages(slots_begin + blocks * self.block_bytes) if slots is None else slots
        self.copies.attach(self.memory, lambda: self.memory.size)
        self.table: list[int] = np.random.default_rng(seed).permutation(blocks).tolist()
        self._numbers = itertools.count(1)
        for block in range(blocks):
            self.write(block, noise(self.block_bytes, seed + block))
        self._mark = self.copies.mark()
        for block in range(blocks):  # pins the memory
            assert not (end := self.do(CopyWay.STORE, block, block)).reason, end.reason

    # ── bytes, by the witness ────────────────────────────────────────────────────────────────────

    def write(self, block: int, data: Bytes) -> None:
        for layer, part in zip(self._runs(), np.split(data, len(self._runs())), strict=True):
            self.gpu.witness.write(layer.address + self.table[block] * layer.stride_bytes, part)

    def read(self, block: int) -> Bytes:
        return np.concatenate(
            [
                self.gpu.witness.read(
                    layer.address + self.table[block] * layer.stride_bytes, layer.size_bytes
                )
                for layer in self._runs()
            ]
        )

    def _runs(self) -> list[LayerPages]:
        """Parts of a block that are written in one go: of bytes that follow one another all."""
        if not self.shape.is_block_major:
            return self._layers
        return [self._layers[0]._replace(size_bytes=self.block_bytes)]

    def slot(self, number: int) -> Bytes:
        begin = self.slots_begin + number * self.block_bytes
        return self.memory[begin : begin + self.block_bytes]

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    def mark(self) -> None:
        """Copies from now on come after what the engine's stream was given. The engine's thread."""
        self._mark = self.copies.mark()

    def order(
        self, way: CopyWay, block: int, slot: int, *, slab_begin: int = -1, after: int | None = None
    ) -> int:
        number, begin = next(self._numbers), self.slots_begin + slot * self.block_bytes
        mark = self._mark if after is None else after
        self.copies.begin(
            BlockCopy(
                number,
                way,
                0,
                self.table[block],
                begin,
                HEADER,
                after=mark,
                slab_begin=slab_begin,
            )
        )
        return number

    def do(self, way: CopyWay, block: int, slot: int, *, slab_begin: int = -1) -> CopyEnd:
        """One copy, to its end."""
        self.order(way, block, slot, slab_begin=slab_begin)
        deadline = time.monotonic() + END_S_MAX
        while not (ends := self.copies.ended()):
            assert time.monotonic() < deadline, f"a {way.value} did not end"
        return ends[0]

    def rate(
        self,
        ways: tuple[CopyWay, ...],
        seconds: float,
        *,
        from_slab: bool = False,
        pause_s: float = 0.0,
    ) -> float:
        """GB/s, with as many copies under way as there may be. A slab has the blocks in order.
        `pause_s`: between two looks where nothing has ended."""
        under_way = done = 0
        turns, numbers = itertools.cycle(ways), itertools.count()
        begin = time.perf_counter()
        while (now := time.perf_counter()) - begin < seconds or under_way:
            while now - begin < seconds and under_way < self.copies.copies_max:
                at = next(numbers) % self.blocks
                place = at * self.block_bytes if from_slab else -1
                self.order(next(turns), at, at, slab_begin=place)
                under_way += 1
            ends = self.copies.ended()
            for end in ends:
                assert not end.reason, end.reason
            under_way, done = under_way - len(ends), done + len(ends)
            if pause_s and not ends:
                _PAUSE.wait(pause_s)
            assert now - begin < seconds + END_S_MAX, f"{under_way} copies did not end"
        return done * self.block_bytes / (time.perf_counter() - begin) / 1e9

    def wrong_cycles(self, count: int, seed: int, *, slots: tuple[int, ...] = ()) -> int:
        """Cycles of a random load and store whose bytes or checksums are not those expected, one
        end of each in these slots, if any."""
        draw, wrong = np.random.default_rng(seed), 0
        for _ in range(count):
            block = int(draw.integers(self.blocks))
            source, target = map(int, draw.choice(self.blocks, 2, replace=False))
            if slots and (chosen := int(draw.choice(slots))) not in (source, target):
                source, target = (chosen, target) if draw.integers(2) else (source, chosen)
            self.slot(source)[int(draw.integers(self.block_bytes))] ^= 0x5A
            self.slot(target)[:] = ~self.slot(target)
            loaded = self.do(CopyWay.LOAD, block, source)
            stored = self.do(CopyWay.STORE, block, target)
            expected = self.slot(source)
            is_right = np.array_equal(self.read(block), expected)
            is_right &= np.array_equal(self.slot(target), expected)
            is_right &= not (loaded.reason or stored.reason)
            sum_ = checksum_of(HEADER, [np.ascontiguousarray(expected).data])
            wrong += not (is_right and loaded.checksum == stored.checksum == sum_)
        return wrong

    def close(self) -> None:
        self.copies.close()
        self.gpu.witness.free(self._address)

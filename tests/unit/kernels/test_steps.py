"""What copies take of an engine's steps and of the link, on a device with virtual time.

The witness for the figures is `tests/kit/virtual_device.py`; `bench/gpu` measures the same on a
device. A budget is exact here: nothing depends on this machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from bench.gpu.rank import Shape
from kvstore.kernels.device import DeviceCopies
from kvstore.kernels.pinning import CHUNK_BYTES
from kvstore.kernels.port import DeviceCache, LayerPages
from kvstore.ports import BlockCopy, CopyWay
from kvstore.units import KIB, MIB
from tests.kit.copy_parties import HEADER, room
from tests.kit.virtual_device import LINK_BYTES_PER_US, VirtualDevice, link_share

BLOCKS, LOOK_US, STEP_US = 96, 100.0, 12_000.0
HOST_US = 5.0
"""Our own code for each block, beside calls of the device: 8 to 11 us on two shared cores
(`bench/micro/copy_calls.py`), of which a GPU machine is assumed to need half."""


LLAMA_8B, LLAMA_70B_TP8 = Shape(32, 64 * KIB), Shape(80, 8 * KIB)
"""16 tokens in bfloat16: all heads of a model, and those of one of eight ranks."""


class Engine:
    """A rank on a device with time: it launches steps, and copies like the copy thread."""

    def __init__(self, shape: Shape, *, by_pieces: bool = False) -> None:
        self.shape, size = shape, shape.block_bytes
        self.device = VirtualDevice(1, size * BLOCKS, moves_bytes=False)
        stride = size if shape.is_block_major else shape.page_bytes
        step = shape.page_bytes if shape.is_block_major else shape.page_bytes * BLOCKS
        pages = [
            LayerPages(self.device.address + n * step, stride, shape.page_bytes)
            for n in range(shape.layers)
        ]
        self.copies = DeviceCopies(
            self.device,
            [DeviceCache(pages, BLOCKS)],
            by_pieces=by_pieces,
            clock_ns=lambda: int(1000 * self.device.now_us),
        )
        self.served_us = 0.0
        """Time that copies say they were served."""
        self._slots = room(size * BLOCKS)
        self.copies.attach(self._slots, lambda: self._slots.size)
        assert self.copies._pins is not None
        while self.copies.pinned_bytes < self._slots.size:
            self.copies._pins.has(0, self._slots.size)
        self._numbers = itertools.count(1)
        self._waiting: list[BlockCopy] = []
        self._under_way: set[int] = set()

    def order(self, way: CopyWay, count: int, *, after: int) -> None:
        """Copies of so many blocks, to be begun as there is room."""
        for number in itertools.islice(self._numbers, count):
            block = number % BLOCKS
            begin = block * self.shape.block_bytes
            copy = BlockCopy(number, way, 0, block, begin, HEADER, is_verified=True, after=after)
            self._waiting.append(copy)

    def look(self) -> int:
        """One turn of the copy thread. Returns how many copies ended."""
        while self._waiting and len(self._under_way) < self.copies.copies_max:
            copy = self._waiting.pop(0)
            self._under_way.add(copy.number)
            self.copies.begin(copy)
        ends = self.copies.ended()
        self.device.wait_us(HOST_US * len(ends))
        assert not any(end.reason for end in ends)
        self._under_way -= {end.number for end in ends}
        self.served_us += sum(end.duration_ns for end in ends) / 1000
        if not ends:
            self.device.wait_us(LOOK_US)
        return len(ends)

    def step(self, mark: Callable[[int], None] = lambda mark: None) -> int:
        """One step of the engine, whose copies are ordered behind its mark. Returns how many
        copies ended meanwhile."""
        end_us, ended = self.device.now_us + STEP_US, 0
        self.device.forward(STEP_US)
        mark(self.copies.mark())
        while self.device.now_us < end_us:
            ended += self.look()
        return ended

    @property
    def backlog(self) -> int:
        """Copies that have not ended."""
        return len(self._waiting) + len(self._under_way)

    def share(self, *ways: CopyWay) -> float:
        """Share of one direction of the link that copies move, ten ms each way."""
        count = 512 * MIB // self.shape.block_bytes
        begin_us = self.device.now_us
        for _, way in itertools.product(range(count), ways):  # in turns, as they come
            self.order(way, 1, after=0)
        while self.backlog:
            self.look()
        moved = len(ways) * count * self.shape.block_bytes
        return link_share(moved, self.device.now_us - begin_us)

    def close(self) -> None:
        self.device.finish()
        while self.backlog:
            self.look()
        self.copies.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(LLAMA_70B_TP8)
    yield engine
    engine.close()


# ── steps ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", [CopyWay.LOAD, CopyWay.STORE])
def test_a_whole_prompt_moves_within_two_steps_that_take_marks(
    engine: Engine, way: CopyWay
) -> None:
    """96 blocks, 1 ms of the link: they wait for the forward that may still use their memory, and
    for no later one."""
    engine.device.forward(STEP_US)
    engine.order(way, BLOCKS, after=engine.copies.mark())
    ended = [engine.step() for _ in range(2)]
    assert sum(ended) == BLOCKS, ended


def test_stores_of_a_long_prefill_do_not_fall_behind(engine: Engine) -> None:
    """64 blocks a step, 1,024 tokens: what a step computed is stored in the next one."""
    backlogs = []
    for _ in range(8):
        engine.step(lambda mark: engine.order(CopyWay.STORE, 64, after=mark))
        backlogs.append(engine.backlog)
    assert max(backlogs) <= 64, backlogs


def test_a_mark_that_never_passes_does_not_hold_what_came_before_it(engine: Engine) -> None:
    first = engine.copies.mark()
    engine.device.wait_us(1000)
    engine.device.forward(1e12)
    never = engine.copies.mark()
    engine.order(CopyWay.LOAD, 4, after=first)
    ended = sum(engine.look() for _ in range(20))
    assert ended == 4
    engine.order(CopyWay.LOAD, 1, after=never)
    assert sum(engine.look() for _ in range(20)) == 0, "one that names it waits"


@pytest.mark.parametrize("way", [CopyWay.LOAD, CopyWay.STORE])
@pytest.mark.parametrize("forward_us", [0.0, STEP_US, 200_000.0])
def test_the_engines_forward_is_no_time_of_a_copy(
    engine: Engine, forward_us: float, way: CopyWay
) -> None:
    """Loads that wait for a long forward would look slower than computing, and end the cache."""
    engine.device.forward(forward_us)
    engine.order(way, 32, after=engine.copies.mark())
    while engine.backlog:
        engine.look()
    link_us = 32 * engine.shape.block_bytes / LINK_BYTES_PER_US
    assert link_us < engine.served_us < link_us + 5 * LOOK_US


# ── the link ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shape", "each", "both"),
    [
        (LLAMA_8B, 0.90, 0.75),  # pages of 64 KiB
        (LLAMA_8B._replace(is_block_major=True), 0.90, 0.75),  # a run of 2 MiB
        (LLAMA_70B_TP8, 0.80, 0.70),
        (Shape(12, 32 * KIB), 0.75, 0.50),  # gpt-oss, a group of 12 layers: bound by the host
        (Shape(12, 2176 * KIB), 0.90, 0.75),  # Qwen3-Next, 1,088 tokens
        (Shape(61, 18 * KIB), 0.80, 0.75),  # DeepSeek's MLA
    ],
)
def test_blocks_use_the_link(shape: Shape, each: float, both: float) -> None:
    """The goals of `bench/gpu`, hashed on the device: a hash takes the link's time only if nothing
    else has something to copy."""
    shares = []
    for ways in ((CopyWay.STORE,), (CopyWay.LOAD,), (CopyWay.STORE, CopyWay.LOAD)):
        engine = Engine(shape)
        shares.append(engine.share(*ways) / len(ways))
        engine.close()
    store, load, together = (round(share, 3) for share in shares)
    assert store >= each, shares
    assert load >= each, shares
    assert together >= both, shares


def test_by_pieces_small_pages_leave_most_of_the_link_unused() -> None:
    """Why there are kernels."""
    engine = Engine(LLAMA_70B_TP8, by_pieces=True)
    assert engine.share(CopyWay.STORE) < 0.25
    engine.close()


# ── the device itself ────────────────────────────────────────────────────────────────────────────


def test_copy_engines_work_beside_one_another_and_streams_of_one_in_turn() -> None:
    device = VirtualDevice(1, 8 * MIB, moves_bytes=False)
    host = room(8 * MIB)
    device.pin(host.ctypes.data, 8 * MIB)
    streams = [device.stream(is_urgent=bool(n)) for n in range(2)]
    here, there = host.ctypes.data, device.address

    def took(*orders: tuple[int, int, int]) -> float:
        device.finish()
        begin_us = device.now_us
        for stream, target, source in orders:
            device.copy(stream, *(np.array([n], np.uint64) for n in (target, source, 4 * MIB)))
        device.finish()
        return device.now_us - begin_us

    one_us = 4 * MIB / LINK_BYTES_PER_US
    store, load = (streams[0], here, there), (streams[1], there + 4 * MIB, here + 4 * MIB)
    assert one_us <= took(store) <= 1.2 * one_us
    assert one_us <= took(store, load) <= 1.3 * one_us
    other = (streams[1], here + 4 * MIB, there)
    assert 2 * one_us <= took(store, other) <= 2.3 * one_us
    assert CHUNK_BYTES > 8 * MIB
    device.unpin(host.ctypes.data)

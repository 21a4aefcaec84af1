"""Copy engines with a cache and slots, for the suite that each of them has to pass."""

from __future__ import annotations

import abc
import mmap
import random
import time

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.device import DeviceCopies
from kvstore.kernels.host import HostCopies, PagedCache
from kvstore.kernels.port import Bytes, Device, DeviceCache, LayerPages
from kvstore.ports import BlockCopy, CopyEnd, CopyEngine, CopyWay
from tests.kit.fake_cuda import FakeCuda, FakeKernels
from tests.kit.simulated_device import SimulatedDevice, simulated_copies
from tests.kit.virtual_device import VirtualDevice

BLOCKS, SLOTS = 6, 5
WAIT_S = 60.0
HEADER = b"the address of a block"


class Party(abc.ABC):
    """A copy engine, with a cache of layers of the sizes given and room for slots."""

    def __init__(self, page_bytes: tuple[int, ...], *, block_major: bool) -> None:
        self.page_bytes = page_bytes
        self.block_bytes = sum(page_bytes)
        self.block_major = block_major
        # One allocation; block by block, or layer by layer with a gap behind each.
        begins, at = [], 0
        for size in page_bytes:
            begins.append(at)
            at += size if block_major else size * BLOCKS + 64
        self.begins = begins
        self.cache_bytes = at * BLOCKS if block_major else at
        self.slots: Bytes = room(self.block_bytes * SLOTS)
        self.copies: CopyEngine
        self._number = 0

    def pages(self, address: int) -> list[LayerPages]:
        strides = [self.block_bytes if self.block_major else size for size in self.page_bytes]
        pairs = zip(self.begins, strides, self.page_bytes, strict=True)
        return [LayerPages(address + begin, stride, size) for begin, stride, size in pairs]

    def block_of(self, memory: Bytes, block: int) -> bytes:
        pages = (
            memory[p.address + block * p.stride_bytes :][: p.size_bytes] for p in self.pages(0)
        )
        return b"".join(page.tobytes() for page in pages)

    def put(self, memory: Bytes, block: int, data: bytes) -> None:
        at = 0
        for page in self.pages(0):
            begin = page.address + block * page.stride_bytes
            part = data[at : at + page.size_bytes]
            memory[begin : begin + page.size_bytes] = np.frombuffer(part, np.uint8)
            at += page.size_bytes

    @abc.abstractmethod
    def write(self, block: int, data: bytes) -> None:
        """The engine computes a block, soon."""

    @abc.abstractmethod
    def read(self, block: int) -> bytes:
        """The block, as the engine would see it in what it launches now."""

    def order(self, way: CopyWay, block: int, slot: int = 0, **more: object) -> int:
        self._number += 1
        begin = slot * self.block_bytes
        order = BlockCopy(self._number, way, 0, block, begin, HEADER, **more)  # type: ignore[arg-type]
        self.copies.begin(order)
        return self._number

    def ended(self, count: int) -> dict[int, CopyEnd]:
        ends: dict[int, CopyEnd] = {}
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for end in self.copies.ended():
                assert end.number not in ends, "it ended twice"
                ends[end.number] = end
            if len(ends) == count:
                return ends
        raise AssertionError(f"{len(ends)} of {count} copies ended")

    def do(self, way: CopyWay, block: int, slot: int = 0, **more: object) -> CopyEnd:
        number = self.order(way, block, slot, after=self.copies.mark(), **more)
        return self.ended(1)[number]

    def slot(self, number: int) -> Bytes:
        return self.slots[number * self.block_bytes : (number + 1) * self.block_bytes]

    def attach(self) -> None:
        self.copies.attach(self.slots, lambda: self.slots.size)

    def close(self) -> None:
        self.copies.close()


class HostParty(Party):
    def __init__(self, page_bytes: tuple[int, ...], *, block_major: bool, values: str) -> None:
        super().__init__(page_bytes, block_major=block_major)
        self.memory = np.zeros(self.cache_bytes, np.uint8)
        layers = [
            as_strided(
                self.memory[page.address :], (BLOCKS, page.size_bytes), (page.stride_bytes, 1)
            )
            for page in self.pages(0)
        ]
        self.copies = HostCopies([PagedCache(layers, values=values)])
        self.attach()

    def write(self, block: int, data: bytes) -> None:
        self.put(self.memory, block, data)

    def read(self, block: int) -> bytes:
        return self.block_of(self.memory, block)


class DeviceParty(Party):
    """Blocks by pieces, hashed by the host."""

    by_pieces = True

    def __init__(
        self, page_bytes: tuple[int, ...], *, block_major: bool, values: str, seed: int = 1
    ) -> None:
        super().__init__(page_bytes, block_major=block_major)
        self.device = self.new_device(seed)
        cache = DeviceCache(self.pages(self.device.address), BLOCKS, values=values)
        self.copies: DeviceCopies = DeviceCopies(
            self.device_of_copies(),
            [cache],
            by_pieces=self.by_pieces,
        )
        self.attach()

    def new_device(self, seed: int) -> SimulatedDevice:
        return SimulatedDevice(seed, self.cache_bytes)

    def device_of_copies(self) -> Device:
        """The device, as the copies know it."""
        return self.device

    def write(self, block: int, data: bytes) -> None:
        self.device.launch(lambda memory: self.put(memory, block, data))

    def read(self, block: int) -> bytes:
        seen: list[bytes] = []
        self.device.launch(lambda memory: seen.append(self.block_of(memory, block)))
        self.device.finish()
        return seen[0]

    def close(self) -> None:
        self.device.finish()
        super().close()
        assert self.device.pinned_bytes == 0, "memory stays pinned"
        assert self.device.allocation_count == 1, "memory of the device stays allocated"


class StagedParty(DeviceParty):
    """By kernels, which hash the engine's pages, and one copy a block."""

    by_pieces = False


class CudaParty(DeviceParty):
    """The same through the calls of CUDA."""

    def device_of_copies(self) -> Device:
        self.runtime = FakeCuda(self.device)
        return CudaDevice(
            0,
            engine_stream=lambda: self.runtime.engine_stream,
            runtime=self.runtime,
            driver=self.runtime,
            kernels=FakeKernels(self.device),
        )

    def close(self) -> None:
        super().close()
        assert not self.runtime.failures, self.runtime.failures
        (last,) = self.runtime.cudaGetLastError()
        assert last == 0, "the engine finds an error that is not its own"


class StagedCudaParty(CudaParty):
    by_pieces = False


class TimedParty(StagedParty):
    """On a device with time."""

    def new_device(self, seed: int) -> SimulatedDevice:
        return VirtualDevice(seed, self.cache_bytes)


class TimedCudaParty(StagedCudaParty):
    """And through the calls of CUDA."""

    def new_device(self, seed: int) -> SimulatedDevice:
        return VirtualDevice(seed, self.cache_bytes)


DEVICE_PARTIES = (
    *(DeviceParty, StagedParty, CudaParty, StagedCudaParty),
    *(TimedParty, TimedCudaParty),
)


def room(size: int) -> Bytes:
    """Memory of whole pages, as slots have it."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def noise(size: int, seed: int) -> bytes:
    """Bytes unlike others."""
    return random.Random(seed).randbytes(size)


def device_copies(layers: list[Bytes], *, values: str = "") -> DeviceCopies:
    """Copies on a simulated device, whose memory the arrays [block_count, page_bytes] are."""
    return simulated_copies([PagedCache(layers, values=values)])


def host_copies(layers: list[Bytes], *, values: str = "") -> HostCopies:
    """The same copies on the host."""
    return HostCopies([PagedCache(layers, values=values)])


BOTH_KINDS = (host_copies, device_copies)

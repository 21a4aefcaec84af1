"""What CUDA refuses, through its calls, on a device that does: and what becomes of copies.

Sources of the rules: NVIDIA's documentation of the calls, and where it is silent what others saw on
hardware (named in `tests/kit/simulated_device.py`). `bench/gpu/edges.py` asks a real device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.port import DeviceError
from kvstore.ports import CopyWay
from kvstore.units import MIB
from tests.kit.copy_parties import TimedCudaParty, noise, room
from tests.kit.fake_cuda import FakeCuda, FakeKernels
from tests.kit.virtual_device import VirtualDevice

HALF = MIB


class Machine:
    """A device through CUDA's calls, with memory of its own and of the host's in two pins."""

    def __init__(self) -> None:
        self.virtual = VirtualDevice(1, 2 * MIB)
        self.cuda = FakeCuda(self.virtual)
        self.device = CudaDevice(
            0,
            engine_stream=lambda: self.cuda.engine_stream,
            runtime=self.cuda,
            driver=self.cuda,
            kernels=FakeKernels(self.virtual),
        )
        self.host = room(2 * MIB)
        self.here, self.there = int(self.host.ctypes.data), self.virtual.address
        self.device.pin(self.here, HALF)
        self.device.pin(self.here + HALF, HALF)
        self.stream = self.device.stream(is_urgent=False)

    def store(self, begins: list[int], size: int) -> None:
        """Pieces of that size, from the device to the same places here."""
        sizes = np.full(len(begins), size, np.uint64)
        offsets = np.array(begins, np.uint64)
        sides = (np.uint64(self.here) + offsets, np.uint64(self.there) + offsets)
        self.device.copy(self.stream, *sides, sizes)


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    assert not machine.cuda.failures
    assert machine.cuda.cudaGetLastError() == (0,), "the engine finds an error of another"


@pytest.mark.parametrize("at", [0, 4096, HALF - 4096, 2 * HALF - 1])
def test_a_page_is_registered_once(machine: Machine, at: int) -> None:
    with pytest.raises(DeviceError, match="cudaErrorHostMemoryAlreadyRegistered"):
        machine.device.pin(machine.here + at, 1)


def test_memory_that_is_not_pinned_is_not_copied(machine: Machine) -> None:
    machine.device.unpin(machine.here)
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        machine.store([0], 4096)


def test_a_device_that_has_failed_leaves_no_copy_without_an_end() -> None:
    """Nor a close that fails: an engine ends with its own error, not with ours."""
    party = TimedCudaParty((96, 40), block_major=False, values="")
    party.write(1, noise(party.block_bytes, 1))
    party.do(CopyWay.STORE, 1, 1)
    orders = [party.order(CopyWay.LOAD, at, 1, after=party.copies.mark()) for at in range(4)]
    party.copies._give()
    party.device.failure = "an illegal memory access was encountered"
    orders.append(party.order(CopyWay.STORE, 4, 2))
    ends = party.ended(len(orders))
    assert sorted(ends) == orders
    assert all(end.reason for end in ends.values())
    party.copies.close()


def test_copies_of_another_thread_have_no_part_in_a_capture() -> None:
    """Every call of a thread that has not said so would end the engine's capture: the stand-in of
    the runtime takes none, whatever is called."""
    party = TimedCudaParty((96, 40), block_major=False, values="")
    party.write(1, noise(party.block_bytes, 1))
    mark, found = party.copies.mark(), list[str]()

    def copies() -> None:
        for way in (CopyWay.STORE, CopyWay.LOAD, CopyWay.CLEAR):
            number = party.order(way, 1, 1, after=mark)
            found.append(party.ended(1)[number].reason)

    thread = threading.Thread(target=copies)
    thread.start()
    thread.join()
    assert found == ["", "", ""]
    party.close()

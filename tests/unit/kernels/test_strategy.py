"""Ways of a block by its size, and without what they need."""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings import runtime as real

from kvstore.kernels.caches import DeviceCache, LayerPages
from kvstore.kernels.cuda import _OTHER_ADDRESSES
from kvstore.kernels.device import Device, DeviceCopies, DeviceError
from kvstore.kernels.reference import checksum
from kvstore.kernels.strategy import Strategy, Thresholds
from kvstore.ports import CopyWay
from tests.kit.copy_parties import HEADER, DeviceParty, StagedCudaParty, StagedParty, noise
from tests.kit.simulated_device import SimulatedDevice

KIB = 1 << 10


@pytest.mark.parametrize(
    ("pieces", "size", "expected"),
    [
        (1, 16, Strategy.COPY),  # nothing to gather
        (1, 4096 * KIB, Strategy.COPY),
        (80, 64 * KIB, Strategy.COPY),  # 16 tokens of 8 heads of 128, K and V
        (80, 8 * KIB, Strategy.STAGED),  # of one head
        (16, 8 * KIB, Strategy.MOVE),
        (80, 64 * KIB - 1, Strategy.STAGED),
        (32, 8 * KIB, Strategy.STAGED),
        (31, 8 * KIB, Strategy.MOVE),
    ],
)
def test_sizes_choose_the_way(pieces: int, size: int, expected: Strategy) -> None:
    assert Thresholds().chosen(np.full(pieces, size, np.uint64)) is expected


def _moves_a_block(party: DeviceParty) -> None:
    data = noise(party.block_bytes, 1)
    party.write(1, data)
    assert party.do(CopyWay.STORE, 1, slot=0).checksum == checksum(HEADER, data)
    assert party.do(CopyWay.LOAD, 2, slot=0).checksum == checksum(HEADER, data)
    assert party.read(2) == data
    party.close()


class _WithoutKernels(StagedParty):
    def device_of_copies(self) -> Device:
        self.device.no_kernels = "CUDA's runtime compiler is missing"
        return self.device


class _WithOtherAddresses(StagedCudaParty):
    def device_of_copies(self) -> Device:
        device = super().device_of_copies()
        setattr(self.runtime, "cudaDeviceGetAttribute", lambda *_: (real.cudaError_t(0), 0))  # noqa: B010
        return device


class _WithoutRoom(StagedParty):
    def device_of_copies(self) -> Device:
        self.device.allocations_max = 1
        return self.device


@pytest.mark.parametrize(
    ("party_class", "expected", "trouble"),
    [
        (StagedParty, Strategy.STAGED, ""),
        (_WithoutKernels, Strategy.COPY, "CUDA's runtime compiler is missing"),
        (_WithOtherAddresses, Strategy.COPY, _OTHER_ADDRESSES),
        (_WithoutRoom, Strategy.MOVE, ""),
    ],
)
def test_without_what_a_way_needs_another_one_serves(
    party_class: type[DeviceParty],
    expected: Strategy,
    trouble: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    party = party_class((96, 96, 40), block_major=False, values="")
    assert [record.args for record in caplog.records] == ([(trouble,)] if trouble else [])
    moves = party.copies.moves
    assert {moves.way(stream, 0) for stream in party.copies._flights} == {expected}
    assert moves.trouble == trouble
    _moves_a_block(party)


def test_a_device_that_fails_at_the_start_keeps_nothing_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimulatedDevice(1, 4096)

    def fails(size_bytes: int) -> int:
        raise DeviceError("cudaMalloc: cudaErrorIllegalAddress")

    monkeypatch.setattr(device, "allocate", fails)
    pages = [LayerPages(device.address + at, 64, 32) for at in (0, 512)]
    thresholds = Thresholds.that_choose(Strategy.STAGED)
    with pytest.raises(DeviceError):
        DeviceCopies(device, [DeviceCache(pages, 4)], thresholds=thresholds)
    assert device.pinned_bytes == 0


def test_what_copy_engines_do_as_well_asks_for_no_kernel() -> None:
    """Nothing is compiled or allocated at an engine's start."""
    party = _WithoutKernels((256 * KIB,), block_major=False, values="")
    assert party.copies.moves.trouble == ""
    assert party.device.allocation_count == 1
    _moves_a_block(party)

"""Loads from the node's slab on the same GPU: bytes, checksums, what crosses the bus."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pytest

from kvstore.kernels.port import Addresses
from kvstore.ports import CopyWay
from kvstore.tiers.hbm import HbmTier
from kvstore.types import PAGES_PER_GENERATION, SLOT_BYTES_MIN, Incarnation, SlotId
from kvstore.wire.record import PIECE_BYTES
from tests.kit.copy_parties import DEVICE_PARTIES, HEADER, DeviceParty, noise
from tests.kit.fake_cuda import FIRST_HANDLE
from tests.kit.memory_tier import MemoryTier
from tests.kit.reference import checksum
from tests.kit.simulated_device import Cost, Kind, SimulatedDevice
from tests.kit.slab import ended, order_of


def slab_with(data: bytes) -> HbmTier:
    """A slab with these bytes behind its first SLOT_BYTES_MIN."""
    capacity_bytes = (2 + len(data) // SLOT_BYTES_MIN) * SLOT_BYTES_MIN
    dram = MemoryTier(capacity_bytes=capacity_bytes)
    node = SimulatedDevice(9, 4096)
    tier = HbmTier(node, dram, capacity_bytes=capacity_bytes, incarnation=Incarnation(1))
    dram.view(SlotId(0), len(data))[:] = data
    tier.submit(order_of([(0, PAGES_PER_GENERATION, data)]))
    assert ended(tier).good == b"\1"
    return tier


@pytest.mark.parametrize("page_bytes", [(96, 40), (1, PIECE_BYTES + 1), (PIECE_BYTES,) * 3])
@pytest.mark.parametrize("party_class", DEVICE_PARTIES)
def test_a_verified_load_from_a_slab_costs_the_bus_its_digests(
    party_class: type[DeviceParty], page_bytes: tuple[int, ...]
) -> None:
    """16 bytes for each 512 KiB. Where there are no kernels, as many as the block has."""
    party = party_class(page_bytes, block_major=False, values="")
    data = noise(party.block_bytes, 3)
    tier = slab_with(data)
    for _ in range(2):
        assert party.copies.map_slab(tier.slab) == ""
    before = party.device.bus_bytes
    end = party.do(CopyWay.LOAD, 3, slab_begin=SLOT_BYTES_MIN)
    assert (end.reason, end.checksum) == ("", checksum(HEADER, data))
    pieces = -(-len(data) // PIECE_BYTES)
    assert party.device.bus_bytes - before == (len(data) if party.by_pieces else 16 * pieces)
    party.close()
    tier.close()


def flips_a_bit(device: SimulatedDevice, stream: int, address: int) -> None:
    """Something writes to memory of the device, in the order of a stream."""

    def work() -> None:
        ctypes.c_ubyte.from_address(address).value ^= 1

    device._give(stream % FIRST_HANDLE, work, Cost(Kind.MOVE, 1, 1))


@pytest.mark.parametrize("damaged", ["slab", "pages"])
def test_other_bytes_in_a_slab_or_in_the_pages_have_another_checksum(
    damaged: str, party: DeviceParty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is hashed is what the request would read, and not what was to be copied."""
    data = noise(party.block_bytes, 3)
    tier = slab_with(data)
    assert party.copies.map_slab(tier.slab) == ""
    copies = {"move": party.device.move, "copy": party.device.copy}
    page = party.pages(party.device.address)[-1]

    def loads(verb: str, stream: int, targets: Addresses, *pieces: Any) -> None:
        copies[verb](stream, targets, *pieces)
        if int(targets[-1]) != page.address + 3 * page.stride_bytes:
            return
        end = page.address + 3 * page.stride_bytes + page.size_bytes
        flips_a_bit(party.device, stream, end - 1)

    if damaged == "slab":
        assert isinstance(tier._device, SimulatedDevice)
        end = tier._address + SLOT_BYTES_MIN + len(data)
        flips_a_bit(tier._device, tier._stream, end - 1)
        tier._finish()
    else:
        for verb in copies:
            monkeypatch.setattr(party.device, verb, partial(loads, verb))
    found = party.do(CopyWay.LOAD, 3, slab_begin=SLOT_BYTES_MIN)
    other = data[:-1] + bytes([data[-1] ^ 1])
    assert (found.reason, found.checksum) == ("", checksum(HEADER, other))
    assert party.read(3) == other
    tier.close()


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_load_from_a_slab_is_hashed_as_it_arrived(
    party: DeviceParty, *, is_verified: bool
) -> None:
    assert party.copies.gpu == party.device_of_copies().name
    before = party.device.allocation_count
    data = noise(party.block_bytes, 3)
    tier = slab_with(data)
    assert party.copies.map_slab(tier.slab) == ""
    end = party.do(CopyWay.LOAD, 3, slot=1, is_verified=is_verified, slab_begin=SLOT_BYTES_MIN)
    assert (end.reason, end.checksum) == ("", checksum(HEADER, data) if is_verified else b"")
    assert party.read(3) == data
    assert party.copies.map_slab(None) == ""
    assert party.device.allocation_count == before
    tier.close()
    assert party.copies.map_slab(tier.slab), "the handle ended with its memory"

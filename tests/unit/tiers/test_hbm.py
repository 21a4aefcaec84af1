"""The slab in device memory: what is shown of it, and when; devices that fail."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from kvstore.arena import GenerationView
from kvstore.errors import ConfigError
from kvstore.installation import pip_install
from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.port import Addresses, DeviceError
from kvstore.tiers import hbm
from kvstore.tiers.hbm import NO_ROOM, HbmTier, device_for_hbm
from kvstore.types import PAGE_BYTES, PAGES_PER_GENERATION, SLOT_BYTES_MIN, Incarnation, SlotId
from kvstore.wire.space import begin_of
from tests.kit.copy_parties import noise
from tests.kit.fake_cuda import FakeCuda
from tests.kit.memory_tier import MemoryTier
from tests.kit.simulated_device import SimulatedDevice
from tests.kit.slab import ended, order_of, read

DRAM_SLOTS, SLOTS, BLOCK = 8, 4, 3 * PAGE_BYTES + 5
P = PAGES_PER_GENERATION


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(3, PAGE_BYTES)


@pytest.fixture
def dram() -> MemoryTier:
    return MemoryTier(capacity_bytes=DRAM_SLOTS * SLOT_BYTES_MIN)


@pytest.fixture
def tier(device: SimulatedDevice, dram: MemoryTier) -> Iterator[HbmTier]:
    made = HbmTier(device, dram, capacity_bytes=SLOTS * SLOT_BYTES_MIN, incarnation=Incarnation(9))
    yield made
    made.close()
    if not device.failure:
        assert (device.allocation_count, device.pinned_bytes) == (1, 0), "memory is not given back"


def put(dram: MemoryTier, slot: int, seed: int) -> bytes:
    data = noise(BLOCK, seed)
    dram.view(SlotId(slot), BLOCK)[:] = data
    return data


def place(tier: HbmTier, slot: int) -> int:
    """Where a rank finds a copy of what this slot of dram holds."""
    view = GenerationView(
        tier.page_fd,
        size_bytes=tier.page_bytes,
        arena_bytes=DRAM_SLOTS * SLOT_BYTES_MIN,
        incarnation=9,
    )
    return begin_of(int(view.generations(np.array([slot], np.uint32))[0]))


def test_blocks_are_copied_and_shown_when_they_are_there(tier: HbmTier, dram: MemoryTier) -> None:
    first, second = put(dram, 5 * P, 1), put(dram, 2 * P, 2)
    tier.submit(order_of([(5 * P, 3 * P, first), (2 * P, P, second)], job=7))
    end = ended(tier)
    assert (end.job, end.good, end.trouble) == (7, b"\1\1", "")
    assert [read(tier, slot, BLOCK) for slot in (3 * P, P)] == [first, second]
    assert place(tier, 5 * P) == -1, "nobody decided yet that they still count"
    tier.show([5 * P, 2 * P], [3 * P, P])
    assert [place(tier, slot * P) for slot in range(6)] == [
        *(-1, -1, P * PAGE_BYTES, -1, -1, 3 * P * PAGE_BYTES)
    ]


def test_blocks_are_copied_through_cuda(dram: MemoryTier) -> None:
    runtime = FakeCuda(SimulatedDevice(2, PAGE_BYTES))
    device = CudaDevice(0, engine_stream=lambda: 0, runtime=runtime, driver=runtime)
    tier = HbmTier(device, dram, capacity_bytes=SLOTS * SLOT_BYTES_MIN, incarnation=Incarnation(1))
    data = put(dram, P, 1)
    tier.submit(order_of([(P, 2 * P, data)]))
    assert ended(tier).good == b"\1"
    assert read(tier, 2 * P, BLOCK) == data
    tier.close()
    tier.close()


def test_a_generation_that_goes_back_and_a_slot_outside_are_our_own_bugs(tier: HbmTier) -> None:
    tier.raise_generations([], [])
    tier.raise_generations([P, P], [5, 5])
    for slot, generation in ((P, 4), (SLOTS * P, 2)):
        with pytest.raises(AssertionError):
            tier.raise_generations([slot], [generation])


@pytest.mark.parametrize(("at", "slot"), [(0, P), (5 * P, 0), (0, 0)])
def test_the_first_slot_is_one_as_any_other(tier: HbmTier, at: int, slot: int) -> None:
    """Of dram, of hbm, and of both: its place is shown, and is taken back."""
    tier.show([at, 2 * P], [slot, 3 * P])
    assert place(tier, at) == slot * PAGE_BYTES
    tier.raise_generations([slot], [2])
    assert (place(tier, at), place(tier, 2 * P)) == (-1, 3 * P * PAGE_BYTES)
    tier.show([at], [slot])
    assert place(tier, at) == slot * PAGE_BYTES


def test_no_word_of_the_page_has_two_meanings(tier: HbmTier) -> None:
    """The same slot for the same block, again: a reader of the first copy sees that it left."""
    seen = set()
    for generation in range(2, 6):
        tier.show([5 * P], [3 * P])
        seen.add(int(tier._places[5]))
        tier.raise_generations([3 * P], [generation])
    assert len(seen) == 4


def test_bytes_that_never_arrive_are_not_good(
    tier: HbmTier, dram: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read back from the slab, not from where they were staged."""
    data, copy = put(dram, 0, 1), HbmTier._copy

    def lost(self: HbmTier, targets: Addresses, sources: Addresses, size: int) -> None:
        if not self._address <= int(targets[0]) < self._address + self.capacity_bytes:
            copy(self, targets, sources, size)

    monkeypatch.setattr(HbmTier, "_copy", lost)
    tier.submit(order_of([(0, P, data)]))
    assert ended(tier).good == b"\0"


def test_memory_of_others_is_not_shown(
    device: SimulatedDevice, dram: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[tuple[int, int]] = []
    clear = device.clear

    def seen(stream: int, targets: Addresses, sizes: Addresses) -> None:
        cleared.append((int(targets[0]), int(sizes[0])))
        clear(stream, targets, sizes)

    monkeypatch.setattr(device, "clear", seen)
    tier = HbmTier(device, dram, capacity_bytes=SLOT_BYTES_MIN, incarnation=Incarnation(9))
    assert cleared == [(tier._address, SLOT_BYTES_MIN)]
    tier.close()


def test_a_device_that_fails_takes_all_places_with_it(
    tier: HbmTier, device: SimulatedDevice, dram: MemoryTier
) -> None:
    tier.show([5 * P], [3 * P])
    device.failure = "an illegal memory access was encountered"
    tier.submit(order_of([(0, P, put(dram, 0, 1))]))
    end = ended(tier)
    assert (end.good, end.trouble) == (b"\0", device.failure)
    assert place(tier, 5 * P) == -1
    tier.show([2 * P], [2 * P])
    assert place(tier, 2 * P) == -1


def test_a_device_that_hangs_is_given_up(
    tier: HbmTier, device: SimulatedDevice, dram: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hbm, "DEVICE_S_MAX", 0.02)
    monkeypatch.setattr(device, "turn", lambda: False)
    tier.submit(order_of([(0, P, put(dram, 0, 1))]))
    assert "did not end" in ended(tier).trouble
    device.failure = "hangs"


def test_large_blocks_take_more_staging_memory(device: SimulatedDevice) -> None:
    large = hbm.STAGING_BYTES + PAGE_BYTES
    dram = MemoryTier(capacity_bytes=2 * large - 2 * large % SLOT_BYTES_MIN)
    tier = HbmTier(device, dram, capacity_bytes=dram.capacity_bytes, incarnation=Incarnation(9))
    data = noise(large, 4)
    dram.view(SlotId(0), large)[:] = data
    tier.submit(order_of([(0, P, data)]))
    assert ended(tier).good == b"\1"
    tier.close()
    assert (device.allocation_count, device.pinned_bytes) == (1, 0)


def test_memory_that_is_not_there_is_refused_with_the_way_to_mend_it(
    device: SimulatedDevice, dram: MemoryTier
) -> None:
    device.allocations_max = 1
    with pytest.raises(DeviceError, match="no room"):
        HbmTier(device, dram, capacity_bytes=2 * SLOT_BYTES_MIN, incarnation=Incarnation(9))
    with pytest.raises(ConfigError, match=r"GPU 3: no NVIDIA driver .*; or leave --hbm out$"):
        open_hbm(3, dram)


def open_hbm(ordinal: int, dram: MemoryTier) -> None:
    with device_for_hbm(ordinal, SLOT_BYTES_MIN) as device:
        HbmTier(device, dram, capacity_bytes=SLOT_BYTES_MIN, incarnation=Incarnation(9))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("cudaSetDevice: cudaErrorNoDevice", "no GPU is visible: start the container with the"),
        ("cudaSetDevice: cudaErrorInvalidDevice", "choose another with --hbm SIZE,gpu=N (cudaSet"),
        (NO_ROOM, "choose a smaller --hbm or --gpu-memory-utilization; or leave --hbm out"),
        (
            "no CUDA: pip install 'x.whl[cuda]'",
            " no CUDA: pip install 'x.whl[cuda]'; or leave --hbm out",
        ),
    ],
)
def test_each_cause_has_its_own_way_to_mend_it(
    dram: MemoryTier, monkeypatch: pytest.MonkeyPatch, error: str, advice: str
) -> None:
    monkeypatch.setattr("kvstore.tiers.hbm.CudaDevice", mock.Mock(side_effect=DeviceError(error)))
    with pytest.raises(ConfigError, match=rf"GPU 1:.*{re.escape(advice)}") as raised:
        open_hbm(1, dram)
    assert "smaller --hbm" not in str(raised.value) or error is NO_ROOM


def test_without_the_extra_it_names_what_to_install(
    dram: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("cuda.bindings", "cuda.bindings.runtime", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, module, None)
    end = re.escape(f"{pip_install('cuda')}; or leave --hbm out")
    with pytest.raises(ConfigError, match=f"GPU 0: NVIDIA's bindings are missing .*: {end}$"):
        open_hbm(0, dram)


def test_memory_that_engines_still_hold_is_waited_for(
    device: SimulatedDevice, dram: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash they let go of the slab of the process before once they see its end."""
    allocate, asked = device.allocate, []

    def held(size_bytes: int) -> int:
        asked.append(size_bytes)
        return allocate(size_bytes) if len(asked) > 2 else 0

    monkeypatch.setattr(device, "allocate", held)
    monkeypatch.setattr(hbm, "ROOM_LOOK_S", 0.001)
    tier = HbmTier(
        device,
        dram,
        capacity_bytes=SLOT_BYTES_MIN,
        incarnation=Incarnation(9),
        room_s_max=60.0,
    )
    assert len(asked) == 3
    tier.close()


@pytest.mark.parametrize("verb", ["share", "pin", "clear"])
def test_a_start_that_fails_gives_everything_back(
    verb: str, device: SimulatedDevice, dram: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, verb, mock.Mock(side_effect=DeviceError("an error")))
    with pytest.raises(DeviceError, match="an error"):
        HbmTier(device, dram, capacity_bytes=SLOT_BYTES_MIN, incarnation=Incarnation(9))
    assert (device.allocation_count, device.pinned_bytes, device.is_closed) == (1, 0, True)


def test_blocks_are_promoted_in_batches(
    tier: HbmTier, device: SimulatedDevice, dram: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls for all of them; which of them are good is said one by one."""
    copy, counts = device.copy, []

    def seen(stream: int, targets: Addresses, *pieces: Addresses) -> None:
        counts.append(len(targets))
        copy(stream, targets, *pieces)

    monkeypatch.setattr(device, "copy", seen)
    blocks = [(slot * P, slot * P, put(dram, slot * P, slot)) for slot in range(SLOTS)]
    blocks[2] = (2 * P, 2 * P, noise(BLOCK, 99))
    tier.submit(order_of(blocks))
    assert ended(tier).good == b"\1\1\0\1"
    assert counts == [SLOTS, SLOTS]
    found = [read(tier, slot * P, BLOCK) for slot in (0, 1, 3)]
    assert found == [noise(BLOCK, n) for n in (0, 1, 3)]

"""The caches of a rank as pages of a device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.connector import devices
from kvstore.connector.checks import NotServed
from kvstore.connector.devices import (
    cache_pages,
    device_of,
    host_caches,
    prove,
)
from kvstore.connector.mapping import GroupLayers
from kvstore.kernels import device
from kvstore.kernels.host import HostCopies, PagedCache
from kvstore.ports import BlockCopy, CopyEnd, CopyWay
from tests.kit.simulated_device import SimulatedDevice, simulated_copies
from tests.unit.connector.test_worker_side import (
    BLOCKS,
    CONTENT,
    HEADS,
    TOKENS,
    kv_caches,
)

pytestmark = pytest.mark.engine


def test_padded_pages_in_blocks_are_seen_without_their_padding() -> None:
    import torch

    memory = torch.rand(BLOCKS, 2, HEADS * TOKENS * CONTENT + 16)
    caches = {
        f"layers.{n}": memory[:, n, : HEADS * TOKENS * CONTENT].unflatten(
            1, (HEADS, TOKENS, CONTENT)
        )
        for n in range(2)
    }
    (cache,) = host_caches([GroupLayers(caches, frozenset())], BLOCKS)
    for n in range(2):
        expected = caches[f"layers.{n}"][4].contiguous().numpy().tobytes()
        assert cache.layers[n][4].tobytes() == expected


def test_caches_whose_blocks_are_not_one_run_are_not_served() -> None:
    caches = kv_caches()
    apart = {  # heads outside of the blocks
        name: cache.transpose(0, 1).contiguous().transpose(0, 1) for name, cache in caches.items()
    }
    gaps = {name: cache[..., :-1] for name, cache in caches.items()}
    padded = {  # split, with a gap behind each part
        name: cache.new_zeros(BLOCKS * 2, HEADS, TOKENS // 2 + 1, CONTENT)[:, :, 1:]
        for name, cache in caches.items()
    }
    for bad in (apart, gaps, padded):
        with pytest.raises(NotServed):
            cache_pages(bad, block_count=BLOCKS)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["cpu", "cpu"], "cpu"),
        (["cuda", "cuda"], "cuda"),
        (["cpu", "cuda"], "the KV cache is on cpu and cuda: cpu and cuda are served"),
        (["xpu"], "the KV cache is on xpu: cpu and cuda are served"),
    ],
)
def test_caches_on_other_devices_are_not_served(kinds: list[str], said: str) -> None:
    caches: Any = {
        f"layers.{number}": SimpleNamespace(device=SimpleNamespace(type=name))
        for number, name in enumerate(kinds)
    }
    is_served = kinds[0] == kinds[-1] != "xpu"
    with contextlib.nullcontext() if is_served else pytest.raises(NotServed, match=said):
        assert device_of(caches) == said


def test_what_pytorch_for_amd_calls_cuda_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", "7.1")
    caches: Any = {"layers.0": SimpleNamespace(device=SimpleNamespace(type="cuda"))}
    with pytest.raises(NotServed, match=r"AMD GPU \(ROCm\)"):
        device_of(caches)


# ── the proof ────────────────────────────────────────────────────────────────────────────────────


class Broken(HostCopies):
    """Copies with a fault in one way."""

    def __init__(
        self, cache: PagedCache, way: CopyWay, fault: Callable[[CopyEnd], CopyEnd]
    ) -> None:
        super().__init__([cache])
        self._way, self._fault = way, fault

    def begin(self, copy: BlockCopy) -> None:
        super().begin(copy)
        if copy.way is self._way:
            self._ends[-1] = self._fault(self._ends[-1])


@pytest.mark.parametrize(
    ("way", "fault", "said"),
    [
        (CopyWay.STORE, {"checksum": bytes(16)}, "a stored block has other bytes"),
        (CopyWay.LOAD, {"checksum": bytes(16)}, "a loaded block has other bytes"),
        (CopyWay.STORE, {"reason": "device gone"}, "device gone"),
        (CopyWay.LOAD, {"reason": "device gone"}, "device gone"),
        (CopyWay.CLEAR, {"reason": "device gone"}, "device gone"),
    ],
)
def test_a_copy_that_fails_is_said(way: CopyWay, fault: dict[str, Any], said: str) -> None:
    caches = kv_caches()
    (cache,) = host_caches([GroupLayers(caches, frozenset())], BLOCKS)
    copies = Broken(cache, way, lambda end: end._replace(**fault))
    assert said in prove(copies, [GroupLayers(caches, frozenset())], BLOCKS)


@pytest.mark.parametrize("way", [CopyWay.LOAD, CopyWay.CLEAR])
def test_a_copy_that_does_nothing_or_reaches_another_block_is_found(way: CopyWay) -> None:
    caches = kv_caches()
    (cache,) = host_caches([GroupLayers(caches, frozenset())], BLOCKS)

    class Misses(HostCopies):
        def begin(self, copy: BlockCopy) -> None:
            wrong = msgspec.structs.replace(copy, block_id=(copy.block_id + 1) % BLOCKS)
            super().begin(wrong if copy.way is way else copy)

    assert prove(Misses([cache]), [GroupLayers(caches, frozenset())], BLOCKS)


def test_a_copy_that_never_ends_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = kv_caches()
    (cache,) = host_caches([GroupLayers(caches, frozenset())], BLOCKS)
    monkeypatch.setattr(devices, "PROOF_S_MAX", 0.01)
    copies = HostCopies([cache])
    monkeypatch.setattr(copies, "ended", list)
    said = prove(copies, [GroupLayers(caches, frozenset())], BLOCKS)
    assert said == "a copy did not end within 0 s"


def test_a_machine_that_pins_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that start together register their memory one after the other."""
    caches = {name: cache.zero_() for name, cache in kv_caches().items()}
    groups = [GroupLayers(caches, frozenset())]
    simulated = SimulatedDevice(1)
    copies = simulated_copies(host_caches(groups, BLOCKS), on=simulated)
    monkeypatch.setattr(device, "PIN_NS_MAX", 1_000_000)
    pin = simulated.pin

    def slowly(*arguments: int) -> None:
        threading.Event().wait(0.05)
        pin(*arguments)

    monkeypatch.setattr(simulated, "pin", slowly)
    assert prove(copies, groups, BLOCKS) == ""
    assert copies.pinned_bytes == 0, "what it tried with is given back"
    assert not any(cache.any() for cache in caches.values())
    copies.close()

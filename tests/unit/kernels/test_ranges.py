"""Copies as ranges in NVIDIA's tools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.kernels import device
from kvstore.ports import CopyWay
from tests.kit.copy_parties import DeviceParty


def test_each_copy_is_a_range_that_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def start(*, message: str, domain: str) -> str:
        seen.append((domain, message))
        return message

    tool = SimpleNamespace(start_range=start, end_range=seen.append)
    monkeypatch.setattr(device, "_nvtx", tool)
    party = DeviceParty((96,), block_major=False, values="")
    party.do(CopyWay.STORE, 0)
    assert seen == [("kvstore", "store"), "store"]
    party.device.failure = "an illegal memory access was encountered"
    load = party.order(CopyWay.LOAD, 1)
    assert party.ended(1)[load].reason
    assert seen[2:] == [("kvstore", "load"), "load"]
    party.device.failure = ""
    party.close()


def test_without_the_package_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_nvtx", None)
    assert device.begin_range("store")() is None

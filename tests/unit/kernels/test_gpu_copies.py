"""The measurement of copies on a GPU, as far as it goes without one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bench.micro import gpu_copies
from bench.micro.gpu_copies import BLOCKS, Rank, missed
from kvstore.kernels.hashes import HashesAtOnce, HashThreads
from kvstore.ports import CopyWay
from tests.kit.simulated_device import SimulatedDevice

LAYERS, PAGE_BYTES = 3, 512
NAMES = [f"{name}_{kind}" for name in ("tp8", "tp1", "pieces") for kind in ("at_once", "threads")]


@pytest.fixture
def rank() -> Iterator[Rank]:
    memory = np.zeros(LAYERS * PAGE_BYTES * BLOCKS, np.uint8)
    address = int(memory.ctypes.data)
    rank = Rank(SimulatedDevice(1), address, PAGE_BYTES, LAYERS, HashesAtOnce())
    yield rank
    rank.copies.close()


def test_cycles_are_compared(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank.wrong_cycles(20) == 0
    monkeypatch.setattr(gpu_copies, "checksum_of", lambda header, parts: b"another")
    assert rank.wrong_cycles(5) == 5


def test_a_rate_leaves_no_copy_under_way(rank: Rank) -> None:
    assert rank.rate((CopyWay.STORE, CopyWay.LOAD), 0.05) > 0
    assert rank.do(CopyWay.STORE, 1, 2)


def test_a_goal_that_one_way_of_hashing_meets_is_met() -> None:
    rows = {
        name: dict.fromkeys(("store_ratio", "load_ratio", "both_ratio"), 0.95) for name in NAMES
    }
    found = {"wrong_cycles": 0, **rows}
    assert missed(found) == []
    rows["tp8_at_once"]["store_ratio"] = 0.2
    assert missed(found) == []
    rows["tp8_threads"]["store_ratio"] = 0.89
    rows["tp1_at_once"]["load_loss"] = 0.11
    assert missed(found | {"wrong_cycles": 1}) == ["wrong_cycles", "tp8 store", "load_loss"]


def test_threads_make_the_same_checksums() -> None:
    block = np.random.default_rng(1).integers(0, 256, 2_000_000, np.uint8)
    expected = HashesAtOnce().begin(b"h", block)()
    hashes = HashThreads()
    hashings = [hashes.begin(b"h", block) for _ in range(20)]
    hashes.close()
    assert [hashing() for hashing in hashings] == [expected] * 20

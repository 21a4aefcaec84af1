"""The copy thread compares a block of its cache with a slot: what differs, what is only damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client.core.plan import CompareResult
from kvstore.ports import BlockCopy, CopyEngine
from kvstore.types import PAGE_BYTES
from kvstore.wire.messages import Distrust, Seal
from tests.kit.copy_parties import BOTH_KINDS
from tests.kit.scripted_node import WAIT_S, ScriptedNode
from tests.unit.connector.test_copier import BLOCKS, LAYERS, PAGE, SLOT_PAGES, Rank, key


class NumbersRank(Rank):
    """A copy thread with a cache of numbers."""

    def __init__(self, path: Path, values: str, make: Callable[..., CopyEngine]) -> None:
        rng = np.random.default_rng(3)
        self.numbers = rng.standard_normal((LAYERS, BLOCKS, PAGE // 4), np.float32)
        memory = self.numbers.view(np.uint8)
        super().__init__(path, partial(make, values=values), memory, heartbeat_timeout_ms=2000)

    def submit(
        self, blocks: list[int], slots: list[int], *, compare: bool, checksums: bytes = b""
    ) -> None:
        keys = b"".join(key(n) for n in range(len(blocks)))
        more: Any = {"keys": keys, "compare": compare, "checksums": checksums}
        self.store(tuple(blocks), slots, session=5, **more)

    def compared(self) -> CompareResult:
        """Wait for the end of the comparison."""
        assert self.handoff.keep_off(range(BLOCKS), timeout_s=WAIT_S)
        with self.handoff.core() as core:
            report = core.take_report()
        assert (report.blocks_sealed, report.blocks_dropped) == (0, 0)
        (result,) = report.compared
        assert report.store_jobs_done == (1,)
        return result


@pytest.fixture(params=BOTH_KINDS, ids=["host", "device"])
def make(request: pytest.FixtureRequest) -> Callable[..., CopyEngine]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=["float32"])
def rank(
    node: ScriptedNode, make: Callable[..., CopyEngine], request: pytest.FixtureRequest
) -> Iterator[NumbersRank]:
    rank = NumbersRank(node.path, request.param, make)
    node.open_session(5)
    yield rank
    rank.stop()


SLOTS = [0, SLOT_PAGES, 2 * SLOT_PAGES]


def stored(node: ScriptedNode, rank: NumbersRank) -> bytes:
    """Blocks 1, 2, 3 lie in SLOTS; their checksums."""
    rank.submit([1, 2, 3], SLOTS, compare=False)
    seal = node.receive(Seal)
    with rank.handoff.core() as core:
        core.take_report()
    return seal.checksums


def test_what_was_stored_is_what_is_computed(node: ScriptedNode, rank: NumbersRank) -> None:
    sums = stored(node, rank)
    noise = np.random.default_rng(4).standard_normal(rank.numbers.shape, np.float32)
    rank.numbers += noise * np.float32(1e-6)
    before = node.arena.array.copy()
    rank.submit([1, 2, 3], SLOTS, compare=True, checksums=sums)
    result = rank.compared()
    assert (result.compared, result.diverged) == (3, ())
    assert 0 < result.worst < 1e-5
    assert np.array_equal(node.arena.array, before), "nothing is written"


def test_another_block_diverges(node: ScriptedNode, rank: NumbersRank) -> None:
    sums = stored(node, rank)
    rank.submit([1, 7, 3], SLOTS, compare=True, checksums=sums)
    result = rank.compared()
    assert (result.compared, result.diverged) == (3, (1,))
    assert result.worst > 1


def test_what_is_damaged_is_distrusted_and_no_word_against_the_space(
    node: ScriptedNode, rank: NumbersRank
) -> None:
    sums = stored(node, rank)
    node.arena.array[SLOTS[1] * PAGE_BYTES + 3] ^= 0x7F  # the exponent of a number
    rank.submit([1, 2, 3], SLOTS, compare=True, checksums=sums)
    result = rank.compared()
    assert (result.compared, result.diverged) == (2, ())
    assert node.receive(Distrust).slots == SLOTS[1].to_bytes(4, "little")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_slot_that_is_reused_says_nothing(
    node: ScriptedNode, rank: NumbersRank, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = stored(node, rank)
    begin = rank.copies.begin

    def reuse() -> None:
        node.arena.raise_generations([SLOTS[2]], [2])

    def begin_and_reuse(copy: BlockCopy) -> None:
        begin(copy)
        if copy.block_id == 7:
            reuse()

    monkeypatch.setattr(rank.copies, "begin", begin_and_reuse)
    if when == "before":
        reuse()
    rank.submit([1, 2, 7], SLOTS, compare=True, checksums=sums)
    result = rank.compared()
    assert (result.compared, result.diverged) == (2, ())


@pytest.mark.parametrize("rank", [""], indirect=True)
def test_values_of_another_type_are_not_compared(node: ScriptedNode, rank: NumbersRank) -> None:
    sums = stored(node, rank)
    rank.submit([7], SLOTS[:1], compare=True, checksums=sums[:16])
    assert rank.compared() == CompareResult(1, 0, (), 0.0)

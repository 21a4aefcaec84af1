"""The copy thread compares a block of its cache with a slot: what differs, what is only damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.client.core.plan import CompareResult, StepPlan, StoreJob
from kvstore.client.core.rank import RankCore
from kvstore.connector.copier import Copier
from kvstore.connector.devices import value_type
from kvstore.connector.handoff import Handoff
from kvstore.ports import BlockCopy, CopyEngine
from kvstore.types import PAGE_BYTES
from kvstore.wire.messages import Distrust, Seal
from tests.kit.copy_parties import BOTH_KINDS
from tests.unit.connector.scripted_node import WAIT_S, ScriptedNode, node_at
from tests.unit.connector.test_copier import BLOCKS, CONFIG, LAYERS, PAGE, SLOT_PAGES, key


class Rank:
    """A copy thread with a cache of numbers."""

    def __init__(self, path: Path, values: str, make: Callable[..., CopyEngine]) -> None:
        rng = np.random.default_rng(3)
        self.numbers = rng.standard_normal((LAYERS, BLOCKS, PAGE // 4), np.float32)
        layers = [layer.view(np.uint8) for layer in self.numbers]
        self.copies = copies = make(layers, values=values)
        self.handoff = Handoff(RankCore(CONFIG, copies_max=copies.copies_max))
        self.copier = Copier(self.handoff, copies, socket=str(path), heartbeat_timeout_ms=2000)
        self.copier.start()

    def submit(
        self, blocks: list[int], slots: list[int], *, compare: bool, checksums: bytes = b""
    ) -> None:
        job = StoreJob(
            job=1,
            session=5,
            block_ids=tuple(blocks),
            keys=b"".join(key(n) for n in range(len(blocks))),
            slots=np.array(slots, "<u4").tobytes(),
            generations=np.ones(len(slots), "<u8").tobytes(),
            compare=compare,
            checksums=checksums,
        )
        self.handoff.submit(StepPlan(stores=(job,)))

    def compared(self) -> CompareResult:
        """Wait for the end of the comparison."""
        assert self.handoff.keep_off(range(BLOCKS), timeout_s=WAIT_S)
        report = self.handoff.take_report()
        assert (report.blocks_sealed, report.blocks_dropped) == (0, 0)
        (result,) = report.compared
        assert report.store_jobs_done == (1,)
        return result

    def stop(self) -> None:
        self.handoff.stop()
        assert self.copier.join(WAIT_S)
        self.handoff.wake.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ScriptedNode]:
    with node_at(tmp_path / "node.sock") as node:
        yield node


@pytest.fixture(params=BOTH_KINDS, ids=["host", "device"])
def make(request: pytest.FixtureRequest) -> Callable[..., CopyEngine]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=["float32"])
def rank(
    node: ScriptedNode, make: Callable[..., CopyEngine], request: pytest.FixtureRequest
) -> Iterator[Rank]:
    rank = Rank(node.path, request.param, make)
    node.open_session(5)
    yield rank
    rank.stop()


SLOTS = [0, SLOT_PAGES, 2 * SLOT_PAGES]


def stored(node: ScriptedNode, rank: Rank) -> bytes:
    """Blocks 1, 2, 3 lie in SLOTS; their checksums."""
    rank.submit([1, 2, 3], SLOTS, compare=False)
    seal = node.receive(Seal)
    rank.handoff.take_report()
    return seal.checksums


def test_what_was_stored_is_what_is_computed(node: ScriptedNode, rank: Rank) -> None:
    sums = stored(node, rank)
    noise = np.random.default_rng(4).standard_normal(rank.numbers.shape, np.float32)
    rank.numbers += noise * np.float32(1e-6)
    before = node.arena.array.copy()
    rank.submit([1, 2, 3], SLOTS, compare=True, checksums=sums)
    result = rank.compared()
    assert (result.compared, result.diverged) == (3, ())
    assert 0 < result.worst < 1e-5
    assert np.array_equal(node.arena.array, before), "nothing is written"


def test_another_block_diverges(node: ScriptedNode, rank: Rank) -> None:
    sums = stored(node, rank)
    rank.submit([1, 7, 3], SLOTS, compare=True, checksums=sums)
    result = rank.compared()
    assert (result.compared, result.diverged) == (3, (1,))
    assert result.worst > 1


def test_what_is_damaged_is_distrusted_and_no_word_against_the_space(
    node: ScriptedNode, rank: Rank
) -> None:
    sums = stored(node, rank)
    node.arena.array[SLOTS[1] * PAGE_BYTES + 3] ^= 0x7F  # the exponent of a number
    rank.submit([1, 2, 3], SLOTS, compare=True, checksums=sums)
    result = rank.compared()
    assert (result.compared, result.diverged) == (2, ())
    assert node.receive(Distrust).slots == SLOTS[1].to_bytes(4, "little")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_slot_that_is_reused_says_nothing(
    node: ScriptedNode, rank: Rank, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = stored(node, rank)
    begin = rank.copies.begin

    def reuse() -> None:
        node.arena.raise_generations(np.array([SLOTS[2]], np.uint32), np.array([2], np.uint64))

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
def test_values_of_another_type_are_not_compared(node: ScriptedNode, rank: Rank) -> None:
    sums = stored(node, rank)
    rank.submit([7], SLOTS[:1], compare=True, checksums=sums[:16])
    assert rank.compared() == CompareResult(1, 0, (), 0.0)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (["torch.float32"] * 2, "float32"),
        (["torch.bfloat16"], "bfloat16"),
        (["torch.uint8"], ""),
        (["torch.float8_e4m3fn"], ""),
        (["torch.float16", "torch.float32"], ""),
        ([], ""),
    ],
)
def test_the_type_of_a_cache(types: list[str], expected: str) -> None:
    caches: Any = {str(i): SimpleNamespace(dtype=name) for i, name in enumerate(types)}
    assert value_type(caches) == expected

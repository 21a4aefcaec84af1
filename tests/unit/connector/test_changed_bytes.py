"""With the configuration as it comes, no block whose bytes in the arena changed is handed over.

Scheduler core, copy thread, socket and shared memory are real; the node is scripted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvstore.client.core.plan import LoadJob, SchedulerConfig, StepPlan
from kvstore.connector.config import ConnectorConfig
from kvstore.kernels.host import PagedCache
from kvstore.types import PAGE_BYTES
from kvstore.wire import messages as m
from tests.kit.reference import checksum
from tests.kit.scripted_node import ScriptedNode
from tests.unit.client.conftest import AnsweredCore
from tests.unit.connector.test_copier import BLOCK, BLOCKS, SLOT_PAGES, Rank, key

DEFAULT = ConnectorConfig(socket="/run/node.sock").verify_every
SLOTS = [block * SLOT_PAGES for block in range(BLOCKS)]
KEYS = [key(block) for block in range(BLOCKS)]


@pytest.fixture
def rank(node: ScriptedNode) -> Iterator[Rank]:
    rank = Rank(node.path)
    yield rank
    rank.stop()


class Scheduler(AnsweredCore):
    """The core of a scheduler whose node holds all blocks, and tells what it is asked for."""

    def __init__(self, sums: bytes) -> None:
        super().__init__(verify_every=DEFAULT)
        self._sums = sums
        self.keys = set(KEYS)
        self.attach()

    def lease_reply(self, ask: m.LeaseAsk) -> m.LeaseReply:
        return msgspec.structs.replace(
            super().lease_reply(ask),
            slots=np.array(SLOTS, "<u4").tobytes(),
            generations=np.ones(BLOCKS, "<u8").tobytes(),
            checksums=self._sums if ask.with_checksums else b"",
        )

    def load_all(self, request: str) -> LoadJob:
        """The job of a request that hits all blocks."""
        self.look_up(request, KEYS)
        self.match(request)
        job = self.load(request, list(range(BLOCKS)), BLOCKS)
        self.core.finished(request)
        return job


def test_by_default_no_block_is_handed_over_whose_bytes_changed(
    node: ScriptedNode, rank: Rank
) -> None:
    """One byte of each block in turn: what came before it is right, it and the rest is computed."""
    node.open_session(1)
    stored = [rank.block(block) for block in range(BLOCKS)]
    rank.store(tuple(range(BLOCKS)), SLOTS, session=1)
    scheduler = Scheduler(node.receive(m.Seal).checksums)
    for block in range(BLOCKS):
        at = SLOTS[block] * PAGE_BYTES + (block * 40_009 + BLOCK - 1) % BLOCK
        node.arena.array[at] ^= 1 << block
        rank.memory[:] = 0
        rank.handoff.submit(StepPlan(loads=(scheduler.load_all(f"r{block}"),)))
        (result,) = rank.loaded().loads
        assert result.failed_block_ids == tuple(range(block, BLOCKS))
        assert [rank.block(good) for good in range(block)] == stored[:block]
        node.arena.array[at] ^= 1 << block
    rank.handoff.submit(StepPlan(loads=(scheduler.load_all("intact"),)))
    assert rank.loaded().loads[0].failed_block_ids == ()


def test_one_default_for_engine_and_core() -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(SchedulerConfig)}
    assert defaults["verify_every"] == DEFAULT == 1
    settings = Path(__file__).parents[3] / "kvstore" / "docs" / "reference" / "settings.md"
    assert re.search(r"^\| `verify_every` \| 1 \|", settings.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page_bytes", [48, 8192, 300_000])
def test_the_checksum_is_of_what_was_copied_not_of_what_the_slot_holds_later(
    page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may change a slot between the copy and the hash."""
    cache = PagedCache([np.full((1, page_bytes), layer, np.uint8) for layer in range(3)])
    before = cache.store(0, np.zeros(cache.block_bytes, np.uint8), b"h")
    slot = np.zeros(cache.block_bytes, np.uint8)
    copyto = np.copyto

    def then_change(to: np.ndarray, of: np.ndarray) -> None:
        copyto(to, of)
        slot[:] ^= 1

    monkeypatch.setattr("kvstore.kernels.host.np.copyto", then_change)
    assert cache.store(0, slot, b"h") == before
    slot[:] = 5
    loaded = cache.load_checked(slot, 0, b"h")
    own = b"".join(layer[0].tobytes() for layer in cache.layers)
    assert loaded == checksum(b"h", own)

"""The queue for the disk: its order, who leaves it, and what an estimate adds up."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.engine.memory.shares import OTHERS
from kvstore.engine.moves.files import READS_COUNTED, STALE_MAX, ReadQueue
from kvstore.engine.sessions.owners import Asker
from kvstore.types import SLOT_BYTES_MIN, Shard, SpaceId
from tests.kit.parts_check import check_queue
from tests.steps import verify_machine

SIZE = SLOT_BYTES_MIN
ASKER = Asker(
    tenant="t",
    space=SpaceId(b"s" * 32),
    shards=(Shard(0, 1, 0, 1),),
    scopes=(0,),
    slot_sizes=(SIZE,),
    block_bytes=(SIZE,),
    head_bytes=(SIZE,),
    block_tokens=16,
    quota=OTHERS,
    engine="e",
    title="e",
)
ROWS = 64
NAMES = st.integers(1, 6).map(lambda number: (1, number))
BLOCKS = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=12, unique=True)


def enter(queue: ReadQueue, number: int, *blocks: int) -> None:
    keys = np.array([block.to_bytes(32, "little") for block in blocks], dtype="V32")
    queue.enter((1, number), ASKER, keys, np.array([blocks]))


class QueueMachine(RuleBasedStateMachine):
    """Beside lists of what each name waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ReadQueue(ROWS)
        self.blocks: dict[tuple[int, int], list[int]] = {}

    @rule(name=NAMES, blocks=BLOCKS)
    def is_asked_for(self, name: tuple[int, int], blocks: list[int]) -> None:
        enter(self.queue, name[1], *blocks)
        self.blocks[name] = blocks

    @rule(name=NAMES)
    def leaves(self, name: tuple[int, int]) -> None:
        self.queue.leave(name)
        self.blocks.pop(name, None)

    @rule(count=st.integers(1, 12))
    def first_is_read(self, count: int) -> None:
        first = self.queue.first
        if first is None:
            assert not self.blocks
            return
        assert first.rows[0].tolist() == self.blocks[first.name]
        self.queue.drop(first, count)
        self.blocks[first.name] = self.blocks[first.name][count:]
        if not self.blocks[first.name]:
            del self.blocks[first.name]

    @invariant()
    def what_is_queued_is_known(self) -> None:
        check_queue(self.queue)
        assert len(self.queue) == len(self.blocks)
        for number in range(1, 7):
            has = self.queue.has((1, number), np.arange(-1, ROWS))
            assert set(np.flatnonzero(has) - 1) == set(self.blocks.get((1, number), ()))

    @invariant()
    def an_estimate_is_of_its_own_blocks_at_least_and_of_all_at_most(self) -> None:
        total = sum(len(blocks) for blocks in self.blocks.values())
        for name, blocks in self.blocks.items():
            bytes_until = self.queue.bytes_until(name)
            assert len(blocks) * SIZE <= bytes_until <= total * SIZE


def test_any_order_of_asks_reads_and_ends() -> None:
    verify_machine(QueueMachine, examples=150, steps=40)


def test_the_shortest_rest_is_first_and_of_equals_the_one_that_came_first() -> None:
    queue = ReadQueue(ROWS)
    enter(queue, 1, *range(8))
    enter(queue, 2, *range(10, 13))
    enter(queue, 3, *range(20, 23))
    order = []
    while (first := queue.first) is not None:
        order.append(first.name[1])
        queue.drop(first, 2)
    assert order == [2, 2, 3, 3, 1, 1, 1, 1]


def test_shared_blocks_count_once_in_an_estimate() -> None:
    queue = ReadQueue(ROWS)
    shared = range(10)
    for number in range(1, 5):
        enter(queue, number, *shared, 10 + number)
    assert [queue.bytes_until((1, n)) // SIZE for n in range(1, 5)] == [11, 12, 13, 14]
    enter(queue, 2, *shared, 12)  # asked for again, as when a lease grew
    assert queue.bytes_until((1, 4)) // SIZE == 14


def test_a_flood_of_reads_takes_no_more_than_there_are() -> None:
    queue = ReadQueue(ROWS)
    for number in range(3 * READS_COUNTED):
        enter(queue, number % 50, number % ROWS, (number + 1) % ROWS)
    assert len(queue._order) <= 2 * len(queue) + STALE_MAX + 1
    assert len(queue) == 50

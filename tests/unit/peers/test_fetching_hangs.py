"""What becomes of blocks and of questions while the index hangs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Self

from kvstore.engine.events import Locate, Located, PeerEvent
from kvstore.index.index import Answer
from kvstore.peers.fetcher import ASK_THREADS, LOCATE_TIMEOUT_S
from kvstore.units import NS_PER_S
from tests.kit.coroutines import driven
from tests.kit.set_clock import SetClock
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import keys
from tests.unit.peers.two_nodes import Stored, Two, Whereabouts, run


class Hanging:
    """An index that answers nothing until it is let go, and what it was asked."""

    def __init__(self, index: Whereabouts) -> None:
        self.asked: list[bytes] = []
        self._let_go = threading.Event()
        self._index, self._match = index, index.match

    def match(self, tenant: str, space: bytes, prompt: bytes, **options: Any) -> Answer:
        self.asked.append(prompt)
        self._let_go.wait()
        return self._match(tenant, space, prompt, **options)

    def __enter__(self) -> Self:
        self._index.match = self.match  # type: ignore[method-assign]
        return self

    def __exit__(self, *raised: object) -> None:
        self._let_go.set()


def ask(two: Two, count: int) -> list[Located]:
    """Questions that node a's engine knows nothing of; returns where their answers will be."""
    located: list[Located] = []
    fetcher, first = two.a.fetcher, 1 << 40
    post = fetcher._post

    def posted(event: PeerEvent) -> None:
        if isinstance(event, Located) and event.locate >= first:
            located.append(event)
        else:
            post(event)

    fetcher._post = posted
    for number in range(count):
        fetcher.carry_out(Locate(first + number, "t", SPACE, keys(100 + number)))
    return located


@driven(run)
async def test_questions_behind_an_index_that_hangs_are_answered_without_asking_it(
    two: Two,
) -> None:
    clock = two.a.fetcher._clock = SetClock()
    two.index.is_away = True
    with Hanging(two.index) as index:
        located = ask(two, 256)
        await two.until(lambda: len(index.asked) == ASK_THREADS, "the first are asked")
        clock.ns += int(LOCATE_TIMEOUT_S * NS_PER_S) + 1
    await two.until(lambda: len(located) == 256, "all are answered")
    assert len({answer.locate for answer in located}) == 256
    assert not any(answer.is_known for answer in located)
    assert len(index.asked) == ASK_THREADS


@driven(run)
async def test_what_has_come_is_verified_while_the_index_hangs(two: Two) -> None:
    two.holds(1)
    gate = two.a.transfer_worker.gate = asyncio.Event()
    engine = Stored(two.a, "ea")
    engine.hint(1)
    await two.until(lambda: bool(two.a.transfer_worker.descriptors), "its bytes are moved")
    with Hanging(two.index) as index:
        ask(two, ASK_THREADS + 1)
        await two.until(lambda: len(index.asked) == ASK_THREADS, "all who ask hang")
        gate.set()
        await two.until(lambda: bool(two.a.blocks()), "the block is here")
    assert len(two.a.blocks()) == 1

"""Room for bodies: which of them give way where it is used up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpVersion11
from multidict import CIMultiDict

from kvstore.router.front.intake import BODIES_SHARE, STALLED_S, STEP_BYTES, Bodies, BodyRefused
from tests.kit.coroutines import driven
from tests.kit.virtual_loop import VirtualLoop

BYTES_MAX = 8 * STEP_BYTES
ROOM = BYTES_MAX * BODIES_SHARE


class Coming:
    """A body that comes as the test says."""

    def __init__(
        self,
        bodies: Bodies,
        piece: bytes = b"",
        *,
        is_whole: bool = False,
        announced: int | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        protocol = BaseProtocol(loop)
        protocol.connection_made(asyncio.Transport())
        self.content = StreamReader(protocol, BYTES_MAX, loop=loop)
        request = SimpleNamespace(
            headers=CIMultiDict[str](),
            content_length=announced,
            content=self.content,
            version=HttpVersion11,
            transport=None,
        )
        if piece:
            self.content.feed_data(piece)
        if is_whole:
            self.content.feed_eof()
        whole = self.content.read_nowait() if is_whole else None
        self.read = asyncio.create_task(bodies.read(cast("Any", request), whole))

    async def status(self) -> int:
        """Of its refusal."""
        with pytest.raises(BodyRefused) as refused:
            await self.read
        return refused.value.status


class Door:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.bodies = loop, Bodies(bytes_max=BYTES_MAX)

    @property
    def left(self) -> int:
        found: int = vars(self.bodies)["left"]
        return found

    async def filled(self) -> list[Coming]:
        """Bodies that lack a byte each."""
        found = [Coming(self.bodies, bytes(BYTES_MAX - 1)) for _ in range(BODIES_SHARE)]
        await turns()
        assert self.left == BODIES_SHARE
        return found


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def with_door(test: Callable[[Door], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop()

    async def running() -> None:
        async with asyncio.timeout(100):
            await test(Door(loop))

    loop.run(running())


@pytest.mark.parametrize("is_whole", [True, False], ids=["with its head", "after its head"])
@driven(with_door)
async def test_the_body_that_is_stalled_for_longest_gives_way(door: Door, is_whole: bool) -> None:
    first, *others = await door.filled()
    door.loop.now_s += STALLED_S - 0.1
    if not is_whole:
        assert await Coming(door.bodies, bytes(5000)).status() == 503
    door.loop.now_s += 0.1
    new = Coming(door.bodies, bytes(5000), is_whole=is_whole)
    assert await first.status() == 408
    new.content.feed_eof()
    assert await new.read == bytes(5000)
    assert not any(each.read.done() for each in others), "one makes room enough"
    for each in others:
        each.content.feed_eof()
        size = len(await each.read)
        door.bodies.left += size
    door.bodies.left += 5000
    assert door.left == ROOM


@driven(with_door)
async def test_bodies_of_a_known_length_wait_for_room_in_turn_and_small_ones_do_not(
    door: Door,
) -> None:
    """What an engine could take is not refused for the router's memory."""
    whole = bytes(BYTES_MAX)
    first = [Coming(door.bodies, whole, announced=BYTES_MAX) for _ in range(BODIES_SHARE)]
    await turns()
    assert door.left == 0
    waiting = [Coming(door.bodies, whole, announced=BYTES_MAX) for _ in range(3)]
    small = Coming(door.bodies, bytes(100), announced=100)
    small.content.feed_eof()
    assert await small.read == bytes(100)
    door.bodies.left += 100
    for each in (*first, *waiting):
        each.content.feed_eof()
    for each in first:
        assert await each.read == whole
    await asyncio.sleep(60)
    assert not any(each.read.done() for each in waiting)
    waiting[1].read.cancel()  # its client has left
    for each in (waiting[0], waiting[2]):
        door.bodies.left += BYTES_MAX
        assert await each.read == whole
    for _ in range(BODIES_SHARE):
        door.bodies.left += BYTES_MAX
    assert door.left == ROOM


@driven(with_door)
async def test_a_body_that_comes_byte_by_byte_is_stalled_and_one_that_comes_on_is_not(
    door: Door,
) -> None:
    fast = Coming(door.bodies, bytes(STEP_BYTES))
    slow = Coming(door.bodies, bytes(STEP_BYTES))
    rest = [Coming(door.bodies, bytes(BYTES_MAX - 1)) for _ in range(BODIES_SHARE - 1)]
    await turns()
    door.loop.now_s += STALLED_S
    fast.content.feed_data(bytes(STEP_BYTES))
    slow.content.feed_data(b"x")
    await turns()
    new = Coming(door.bodies, bytes(BYTES_MAX - STEP_BYTES))
    assert await slow.status() == 408
    await turns()
    assert not fast.read.done()
    for each in (fast, new, *rest):
        each.read.cancel()
    await asyncio.gather(*(each.read for each in (fast, new, *rest)), return_exceptions=True)
    assert door.left == ROOM


@driven(with_door)
async def test_a_body_that_ends_in_the_turn_in_which_it_gives_way_is_counted_once(
    door: Door,
) -> None:
    first, *others = await door.filled()
    door.loop.now_s += STALLED_S
    new = Coming(door.bodies, bytes(5000), is_whole=True)
    first.content.feed_data(b"x")
    first.content.feed_eof()
    assert await first.status() == 408
    size = len(await new.read)
    door.bodies.left += size
    for each in others:
        each.read.cancel()
    await asyncio.gather(*(each.read for each in others), return_exceptions=True)
    assert door.left == ROOM


@driven(with_door)
async def test_a_body_that_trickles_in_gives_way_whatever_it_has_announced(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is kept for all of it, which must not cost a client less than sending it."""
    monkeypatch.setattr("kvstore.router.front.intake.WHOLE_S", 5.0)

    slow = [Coming(door.bodies, b"x", announced=BYTES_MAX) for _ in range(BODIES_SHARE)]
    await turns()
    new = Coming(door.bodies, bytes(BYTES_MAX), announced=BYTES_MAX)
    await turns()
    new.content.feed_eof()
    for _ in range(3):  # each a step in time, and eight of them take too long
        await asyncio.sleep(STALLED_S * 0.9)
        for each in slow:
            each.content.feed_data(bytes(STEP_BYTES))
    await turns()
    assert new.read.done()
    assert sum(each.read.done() for each in slow) == 1, "one makes room enough"
    for each in slow:
        each.read.cancel()
    await asyncio.gather(*(each.read for each in slow), return_exceptions=True)

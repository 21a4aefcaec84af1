"""The door for routers' preparations: callers, their calls and keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import grpc
import pytest

from kvstore.engine.events import BlocksPrepared, PeerEvent, PrepareBlocks
from kvstore.peers import preparer as preparer_module
from kvstore.peers.peer_session import PeerContext
from kvstore.peers.preparer import CALLERS_MAX, CALLS_MAX, KEYS_PER_S, Preparer
from kvstore.types import SpaceId
from kvstore.units import NS_PER_S
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX
from kvstore.wire.peers import PrepareReply, PrepareRequest, encode
from tests.kit.coroutines import on_loop


class Refused(Exception):
    """What a caller is told."""


class Caller:
    """A call as gRPC hands it over; without a message it is silent."""

    def __init__(self, *names: str, message: bytes | None = None) -> None:
        self._names, self._message = names, message

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {"peer_dns": [name.encode() for name in self._names]}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    async def read(self) -> Any:
        if self._message is None:
            await asyncio.Event().wait()
        return self._message

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Refused(code.name, text)


class Door:
    """A preparer whose engine answers at once, or never."""

    def __init__(self, *, answers: bool = True) -> None:
        self.at_ns, self.asked, self._answers = NS_PER_S, list[PrepareBlocks](), answers
        nothing: Any = None
        its = nothing, nothing, nothing, self, grpc.ssl_channel_credentials(), nothing
        self.preparer = Preparer(PeerContext(self._post, *its))

    def now_ns(self) -> int:
        return self.at_ns

    def _post(self, event: PeerEvent) -> None:
        assert isinstance(event, PrepareBlocks)
        self.asked.append(event)
        if self._answers:
            self.preparer.prepared(BlocksPrepared(event.ask, PrepareReply(dram=3)))

    async def call(self, *names: str, keys: int = 1) -> PrepareReply:
        request = PrepareRequest("t", SpaceId(bytes(32)), "", bytes(32 * keys))
        call: Any = Caller(*names, message=encode(request))
        return await self.preparer.prepare(call, call)

    def silent(self, name: str) -> asyncio.Task[PrepareReply]:
        call: Any = Caller(name)
        return asyncio.create_task(self.preparer.prepare(call, call))


R1, R2 = "r1.client.kvstore", "r2.client.kvstore"


def test_a_client_is_answered_also_one_that_is_a_node_too() -> None:
    door = Door()
    assert asyncio.run(door.call(R1)).dram == 3
    assert asyncio.run(door.call("n1.node.kvstore", R1)).dram == 3
    assert asyncio.run(door.call("n1.node.kvstore")).dram == 3, "a node that leaves"
    assert [event.ask for event in door.asked] == [1, 2, 3]


@pytest.mark.parametrize("names", [(), ("i.index.kvstore", "index.kvstore")])
def test_nobody_else_is(names: tuple[str, ...]) -> None:
    door = Door()
    with pytest.raises(Refused, match="PERMISSION_DENIED"):
        asyncio.run(door.call(*names))
    assert not door.asked
    assert door.preparer.refused_count == 1


@on_loop
async def test_calls_of_one_caller_are_bounded_and_others_are_served() -> None:
    door = Door()
    silent = [door.silent(R1) for _ in range(CALLS_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(Refused, match=f"{R1} has {CALLS_MAX} calls open here already"):
        await door.call(R1)
    assert (await door.call(R2)).dram == 3
    for each in silent:
        each.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
    assert (await door.call(R1)).dram == 3


@on_loop
async def test_callers_are_bounded_and_idle_ones_give_way() -> None:
    door = Door()
    for number in range(2 * CALLERS_MAX):
        await door.call(f"r{number}.client.kvstore")
    silent = [door.silent(f"s{number}.client.kvstore") for number in range(CALLERS_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="too many callers"):
        await door.call(R1)
    for each in silent:
        each.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
    await door.call(R1)


def test_keys_of_one_caller_are_bounded_in_time() -> None:
    async def has_room_for(door: Door, name: str, calls: int) -> None:
        for _ in range(calls):
            await door.call(name, keys=KEYS_PER_DATAGRAM_MAX)
        with pytest.raises(Refused, match="blocks a second"):
            await door.call(name, keys=KEYS_PER_DATAGRAM_MAX)

    door = Door()
    full = KEYS_PER_S // KEYS_PER_DATAGRAM_MAX
    asyncio.run(has_room_for(door, R1, full))
    asyncio.run(has_room_for(door, R2, full))
    door.at_ns += NS_PER_S // 4
    asyncio.run(has_room_for(door, R1, full // 4))
    door.at_ns += 100 * NS_PER_S
    asyncio.run(has_room_for(door, R1, full))


def test_a_busy_engine_and_its_late_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer_module, "ANSWER_TIMEOUT_S", 0.01)
    door = Door(answers=False)
    with pytest.raises(Refused, match="the node is busy"):
        asyncio.run(door.call(R1))
    door.preparer.prepared(BlocksPrepared(door.asked[0].ask, PrepareReply()))
    assert not door.preparer._waiting

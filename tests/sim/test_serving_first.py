"""Never worse than round robin: with defaults, what engines would serve in turn is served.

Each case runs twice in virtual time: clients of the router, and clients that ask the same engines
in turn. All that the latter get is served by the router, and no later by more than its own latency.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from tests.kit.virtual_fleet import MODEL, Result, VirtualFleet, fleet, run

Ask = Callable[..., Awaitable[Result]]
LATER_SHARE, LATER_S = 1.02, 0.05
"""A router's own latency is not seen in virtual time: what is later is held or sent wrongly."""
PROMPT = "once more " * 1000
IMAGE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 3072).decode()


def body(number: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"{number} {PROMPT}", **more}


async def together(ask: Ask, count: int, **more: Any) -> list[Result]:
    return list(await asyncio.gather(*(ask(body(number, **more)) for number in range(count))))


async def streams(ask: Ask, _: VirtualFleet) -> list[Result]:
    return await together(ask, 48, stream=True)


async def whole(ask: Ask, _: VirtualFleet) -> list[Result]:
    return await together(ask, 600, max_tokens=64)


async def short_answers(ask: Ask, _: VirtualFleet) -> list[Result]:
    return await together(ask, 200, max_tokens=8192)


async def images(ask: Ask, _: VirtualFleet) -> list[Result]:
    def chat(number: int) -> dict[str, Any]:
        parts = [
            {"type": "text", "text": f"{number}: what is this?"},
            {"type": "image_url", "image_url": {"url": IMAGE}},
        ]
        return {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": parts}]}

    asks = (ask(chat(number), path="/v1/chat/completions") for number in range(16))
    return list(await asyncio.gather(*asks))


async def poisoned(ask: Ask, its: VirtualFleet) -> list[Result]:
    """Requests at which every engine fails, then good ones: those count."""
    for number in range(5):
        await ask(body(number, poison=True))
    return await together(ask, 20 * len(its.engines))


async def steady(ask: Ask, its: VirtualFleet) -> list[Result]:
    """The first engine is down for 20 s; requests come when others are there to serve them."""
    found = []
    for second in range(60):
        if second == 20:
            its.engines[0].port.kill()
        if second == 40:
            its.engines[0].port.listen()
        if len(its.engines) > 1 or not 20 <= second < 40:
            found += await together(ask, 4, stream=True)
        await asyncio.sleep(1)
    return found


def cut(asked: dict[str, Any]) -> int:
    return -1 if "poison" in asked else 0


def error(asked: dict[str, Any]) -> int:
    return 500 if "poison" in asked else 0


class Case(NamedTuple):
    behaviour: dict[str, Any]
    play: Callable[[Ask, VirtualFleet], Awaitable[list[Result]]]
    is_round_robin_whole: bool = True


CASES = {
    "ttft of 12 s": Case({"ttft_s": 12.0}, streams),
    "ttft of 60 s": Case({"ttft_s": 60.0}, streams),
    "ttft of 12 s, probes of 1.3 s": Case({"ttft_s": 12.0, "probe_s": 1.3}, streams),
    "ttft of 20 s, probes of 5 s": Case({"ttft_s": 20.0, "probe_s": 5.0}, streams),
    "ttft of 40 s in a queue": Case({"ttft_s": 10.0, "slots": 6}, streams),
    "600 unstreamed requests of 10 s": Case({"whole_s": 10.0}, whole),
    "600 in queues of 64": Case({"whole_s": 10.0, "slots": 64}, whole),
    "max_tokens of 8192": Case(
        {"whole_s": 1.0, "pieces": 20, "memory_blocks": 1000}, short_answers
    ),
    "images of 1 MB": Case({"ttft_s": 2.0}, images),
    "requests that kill their connection": Case({"fails": cut}, poisoned),
    "five 500s": Case({"fails": error}, poisoned),
    "an engine down for 20 s": Case({"ttft_s": 0.2}, steady, is_round_robin_whole=False),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_what_round_robin_serves_is_served(name: str, count: int) -> None:
    case = CASES[name]

    async def played(*, is_routed: bool) -> list[Result]:
        async with fleet(count, behaviour=case.behaviour) as its:
            return await case.play(its.through_router if is_routed else its.in_turn, its)

    ours, theirs = run(lambda: played(is_routed=True)), run(lambda: played(is_routed=False))
    if case.is_round_robin_whole:
        assert {each.status for each in theirs} == {200}, "the case itself"
    assert {each.status for each in ours} == {200}
    served = [each for each in theirs if each.status == 200]
    for field in ("ttft_s", "whole_s"):
        our_s = sum(getattr(each, field) for each in ours) / len(ours)
        their_s = sum(getattr(each, field) for each in served) / len(served)
        assert our_s <= LATER_SHARE * their_s + LATER_S, field


def test_requests_at_a_silent_engine_move_when_another_answers() -> None:
    async def played() -> tuple[list[Result], list[str]]:
        async with fleet(2, behaviour={"ttft_s": 60.0}) as its:
            asks = asyncio.gather(*(its.through_router(body(n, stream=True)) for n in range(8)))
            await asyncio.sleep(5)
            its.engines[0].freeze()
            its.engines[1].ttft_s = 1.0
            found = await asks
            return found, [worker.state for worker in its.router.workers]

    found, words = run(played)
    assert {each.status for each in found} == {200}
    assert words == ["down", "up"]
    moved = [each.whole_s for each in found if each.whole_s < 50]
    assert moved, "four waited at the silent one"
    assert all(5 + 12 <= each <= 5 + 15 + 2 for each in moved), moved


def test_requests_at_a_silent_engine_wait_where_there_is_no_other() -> None:
    async def played() -> list[Result]:
        async with fleet(1, behaviour={"ttft_s": 60.0}) as its:
            asks = asyncio.gather(*(its.through_router(body(n, stream=True)) for n in range(4)))
            await asyncio.sleep(5)
            its.engines[0].freeze()
            await asyncio.sleep(30)
            its.engines[0].thaw()
            return list(await asks)

    assert {each.status for each in run(played)} == {200}


def test_an_engine_that_always_fails_costs_no_request() -> None:
    async def played() -> tuple[list[Result], int]:
        async with fleet(2) as its:
            its.engines[1].fails = lambda _: 500
            found = []
            for number in range(200):
                found.append(await its.through_router(body(number, stream=True)))
                await asyncio.sleep(0.05)
            return found, its.engines[1].seen

    found, seen = run(played)
    assert {each.status for each in found} == {200}
    assert seen < 20, "its breaker is open, but for a try after each cool-down"


def test_a_restarted_engine_is_used_within_a_probe() -> None:
    async def played() -> float:
        async with fleet(2, behaviour={"ttft_s": 0.05}) as its:
            first = its.engines[0]
            first.port.kill()
            for number in range(100):  # half of them would fail, one breaker for ever
                await its.through_router(body(number, stream=True))
                await asyncio.sleep(0.3)
            first.port.listen()
            back_s = its.loop.time()
            while its.router.workers["a"].state != "up":  # noqa: ASYNC110 -- in virtual time
                await asyncio.sleep(0.05)
            return its.loop.time() - back_s

    assert run(played) <= 1.2


def test_a_hung_engine_whose_probes_answer_loses_its_streams_to_a_race() -> None:
    """Its front answers, its forward does not go on: nobody is aborted, a second worker wins."""

    async def played() -> list[Result]:
        async with fleet(2) as its:
            for number in range(8):
                await its.through_router(body(number, stream=True))
            its.engines[0].ttft_s = 1e6
            asks = (its.through_router(body(100 + n, stream=True)) for n in range(4))
            return list(await asyncio.gather(*asks))

    found = run(played)
    assert {each.status for each in found} == {200}
    assert all(each.whole_s < 35 for each in found), [each.whole_s for each in found]

"""Stored responses with several engines and two routers: each follow-up goes where it has to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from kvstore.router.front.answers import PREFIX, tag
from kvstore.routing.core import RouterCore
from kvstore.routing.policy import parse
from tests.kit.router_thread import STEADY
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

PATH = "/v1/responses"


@contextmanager
def routers(engines: list[VirtualWorker]) -> Iterator[list[VirtualRouter]]:
    """Two of them, which name and order the engines otherwise."""
    flags = [each.flag for each in engines]
    others = [f"other-{flag}" for flag in reversed(flags)]
    with ExitStack() as stack:
        found = [
            VirtualRouter(each, core=RouterCore(parse(STEADY), seed=1)) for each in (flags, others)
        ]
        for router in found:
            stack.enter_context(router)
        until(lambda: all(each.models for router in found for each in router.router.workers))
        yield found


def counts(engines: list[VirtualWorker]) -> list[int]:
    return [each.seen()["requests"] for each in engines]


def about(engines: list[VirtualWorker]) -> list[str]:
    """Questions about stored responses that engines got."""
    return [asked for each in engines for asked in each.seen().get("about", [])]


class Conversation:
    """Turns that go on from each other. `session`: given in a header; empty: none."""

    def __init__(self, number: int, session: str) -> None:
        self.number, self.headers = number, {"X-Session-Id": session} if session else {}
        self.before, self.keeper, self.turn = "", "", 0

    def go_on(self, router: VirtualRouter) -> int:
        """The status of its next turn; every third one is streamed."""
        self.turn += 1
        body: dict[str, Any] = {"model": "m", "input": f"{self.number}: turn {self.turn}"}
        if self.before:
            body["previous_response_id"] = self.before
        is_streamed = self.turn % 3 == 0
        status, headers, answer = router.ask(
            body | {"stream": is_streamed}, PATH, headers=self.headers
        )
        if status == 200:
            last = answer.rpartition(b"data: ")[2] if is_streamed else answer
            made = json.loads(last)
            self.before = made["response"]["id"] if is_streamed else made["id"]
            self.keeper = headers["x-kvstore-worker"].removeprefix("other-")
        return status


@pytest.mark.parametrize("session", ["", "conversation"])
def test_follow_ups_at_either_router_are_served_by_the_engine_that_has_the_response(
    engines: list[VirtualWorker], session: str
) -> None:
    del engines[3:]
    with routers(engines) as pair:
        talks = [Conversation(n, session and f"{session}-{n}") for n in range(12)]
        assert [talk.go_on(pair[talk.number % 2]) for talk in talks] == [200] * 12
        homes = [talk.keeper for talk in talks]
        assert set(homes) == {"a", "b", "c"}, "cold ones spread"
        found = [talk.go_on(pair[(talk.number + turn) % 2]) for turn in range(3) for talk in talks]
        assert found == [200] * 36
        assert [talk.keeper for talk in talks] == homes
        assert sum(counts(engines)) == 12 + 36, "each at the first try"
        asked = len(about(engines))
        for number, talk in enumerate(talks):
            for router in pair:
                status, headers, body = router.ask(path=f"{PATH}/{talk.before}", method="GET")
                assert (status, json.loads(body)["id"]) == (200, talk.before)
                assert headers["x-kvstore-worker"].removeprefix("other-") == talk.keeper
                path = f"{PATH}/{talk.before}/cancel"
                status, _, body = router.ask(path=path)
                assert (status, b"Cannot cancel a synchronous response" in body) == (400, True)
                status, headers, _ = router.ask(path=f"{PATH}/{talk.before}", method="DELETE")
                assert status == 405, "the engine's own word: vLLM deletes none"
                assert headers["x-kvstore-worker"].removeprefix("other-") == talk.keeper
            assert len(about(engines)) == asked + 4 * (number + 1), "nobody else was asked"


HOSTILE: list[Any] = [
    *("resp_unknown", "resp_", "x", "../../models", "a\x00b", "é\ud83d\ude00", "%2e%2e"),
    *("resp_" + "0" * 200, "x" * 20_000, "resp_\r\nX-Injected: 1"),
    *(7, -1, True, 1e300, [], ["resp_x"], {}, {"id": "resp_x"}),
]


def test_an_id_that_no_engine_has_gets_the_word_of_the_engines_and_harms_nobody(
    engines: list[VirtualWorker],
) -> None:
    del engines[4:]
    with routers(engines) as (router, _):
        tagged = [PREFIX + tag(worker) for worker in router.router.workers]
        for given in [*HOSTILE, *tagged]:
            before = sum(counts(engines))
            body = {"model": "m", "input": "x", "previous_response_id": given}
            status, headers, answer = router.ask(body, PATH)
            tried = sum(counts(engines)) - before
            if isinstance(given, str):
                assert (status, b"not found" in answer) == (404, True), given
                assert tried == (1 if given in tagged else 4), given
            else:
                assert (status, tried) == (400, 1), given
            assert "x-injected" not in headers
        for name in ("resp_unknown", tagged[0], "x" * 256):
            status, _, answer = router.ask(path=f"{PATH}/{name}", method="GET")
            assert (status, b"not found" in answer) == (404, True)
        asked = about(engines)
        for name in ("..%2f..%2fmetrics", "a%00b", "a%0d%0aX:1", "x" * 257, "a/b", "%ff", ""):
            status, _, answer = router.ask(path=f"{PATH}/{name}", method="GET")
            assert (status, "error" in json.loads(answer)) == (404, True), name
        assert about(engines) == asked
        assert router.ask()[0] == 200
        assert router.words() == dict.fromkeys("abcd", "up")

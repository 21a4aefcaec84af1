"""Requests that begin alike meet at one engine, whichever field of their body begins alike."""

from __future__ import annotations

import base64
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import Arrived, RouteCommand, RouteEvent
from kvstore.routing.policy import parse
from kvstore.routing.values import RouteRequest
from tests.kit.router_thread import STEADY
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

SUBJECTS = tuple(f"The subject of conversation {n} is long. " * 100 for n in range(3))
ROUNDS = 4
IMAGE_BYTES = 750_000
"""A megabyte in base64."""


class ListeningCore(RouterCore):
    """The decision core; `arrived`: requests in order."""

    def __init__(self) -> None:
        super().__init__(parse(STEADY), seed=1)
        self.arrived: list[RouteRequest] = []

    def step(self, event: RouteEvent, now_ns: int) -> list[RouteCommand]:
        if isinstance(event, Arrived):
            self.arrived.append(event.request)
        return super().step(event, now_ns)


@pytest.fixture
def router(engines: list[VirtualWorker]) -> Iterator[VirtualRouter]:
    with VirtualRouter([each.flag for each in engines[:3]], core=ListeningCore()) as started:
        until(lambda: all(worker.models for worker in started.router.workers))
        yield started


def home(router: VirtualRouter, path: str, body: dict[str, Any]) -> str:
    """The engine that served a request."""
    status, headers, answer = router.ask({"model": "m", **body}, path)
    assert status == 200, answer
    return headers["x-kvstore-worker"]


# ── fields ───────────────────────────────────────────────────────────────────────────────────────

Body = Callable[[str, str], dict[str, Any]]
BODIES: dict[str, tuple[str, Body]] = {
    "prompt": ("/v1/completions", lambda begin, rest: {"prompt": begin + rest}),
    "system of messages": (
        "/v1/messages",
        lambda begin, rest: {"messages": [{"role": "user", "content": rest}], "system": begin},
    ),
    "text_2 of score": ("/score", lambda begin, rest: {"text_1": "a", "text_2": [begin, rest]}),
}


@pytest.mark.parametrize("name", BODIES)
def test_each_field_of_a_prompt_takes_part_in_affinity(router: VirtualRouter, name: str) -> None:
    path, body = BODIES[name]
    rest = (f"rest {n} " * 30 for n in itertools.count())
    homes = [home(router, path, body(subject, next(rest))) for subject in SUBJECTS]
    assert sorted(homes) == ["a", "b", "c"], "cold ones spread"
    for number in range(ROUNDS):
        order = SUBJECTS[:: 1 if number % 2 else -1]
        found = [home(router, path, body(subject, next(rest))) for subject in order]
        assert found == homes[:: 1 if number % 2 else -1]


# ── media ────────────────────────────────────────────────────────────────────────────────────────


def image(seed: int) -> str:
    """A data URL of a megabyte; all begin and end alike."""
    content = random.Random(seed).randbytes(IMAGE_BYTES - 6000)
    whole = bytes(3000) + content + bytes(3000)
    return "data:image/png;base64," + base64.b64encode(whole).decode()


def chat(url: str, text: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}]}


def test_images_count_as_engines_report_and_equal_ones_have_equal_keys(
    router: VirtualRouter, engines: list[VirtualWorker]
) -> None:
    for each in engines:
        each.script("ok", prompt_tokens=2600)
    arrived: list[RouteRequest] = router.core.arrived
    question = "What is in this image? " * 60
    first, other = image(1), image(2)
    homes = [home(router, "/v1/chat/completions", chat(url, question)) for url in (first, other)]
    assert [each.prompt_tokens < 2000 for each in arrived] == [True, True], "not 250,000"
    assert homes[0] != homes[1]
    for number in range(ROUNDS):
        url, its = ((first, homes[0]), (other, homes[1]))[number % 2]
        assert home(router, "/v1/chat/completions", chat(url, f"{question} {number}")) == its
    for number in range(10):
        home(router, "/v1/chat/completions", chat(first, f"{question} {number}"))
    assert arrived[-1].prompt_tokens == pytest.approx(2600, rel=0.15), "as it was reported"
    ours, theirs = arrived[0].keys, arrived[1].keys
    assert ours[:32]
    assert ours[:32] != theirs[:32]
    again = [each.keys for each in arrived[2:]]
    assert {keys[:32] for keys in again} == {ours[:32], theirs[:32]}
    home(router, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert arrived[-1].prompt_tokens < 100, "text is counted by itself"

"""Tokens of prompts that nobody has rendered: learned within bounds, whatever engines report."""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvstore.router.keys.prefixes import VALUE_BYTES_MIN, without_media
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Arrived, RouteCommand, RouteEvent
from kvstore.routing.learning import (
    _MODELS_MAX,
    BYTES_MAX,
    BYTES_MIN,
    BYTES_PER_TOKEN,
    MEDIA_TOKENS,
    TOKENS_MAX,
    TokenEstimates,
)
from kvstore.routing.policy import parse
from kvstore.routing.values import RouteRequest
from tests.kit.router_thread import STEADY
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

IMAGE = base64.b64encode(bytes(range(256)) * 16).decode()
URL = "data:image/png;base64," + IMAGE
KINDS = st.dictionaries(st.sampled_from(sorted(MEDIA_TOKENS)), st.integers(1, 1000), max_size=3)
REPORTS = st.lists(
    st.tuples(
        st.integers(0, 1 << 26), KINDS, st.integers(-10, 10**9) | st.integers(-10, 2 * TOKENS_MAX)
    ),
    max_size=50,
)


def chat(*parts: dict[str, Any]) -> bytes:
    return json.dumps([{"role": "user", "content": list(parts)}]).encode()


MEDIA: list[tuple[dict[str, Any], str]] = [
    ({"type": "image_url", "image_url": {"url": URL}}, "image"),
    ({"type": "input_image", "image_url": URL, "detail": "low"}, "image"),
    ({"type": "video_url", "video_url": {"url": URL}}, "video"),
    ({"type": "audio_url", "audio_url": {"url": URL}}, "audio"),
    ({"type": "input_audio", "input_audio": {"data": IMAGE, "format": "wav"}}, "audio"),
    ({"type": "input_file", "filename": "a.pdf", "file_data": URL}, "file"),
    (
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": IMAGE},
        },
        "image",
    ),
    ({"type": "document", "source": {"type": "base64", "data": IMAGE}}, "file"),
]


@pytest.mark.parametrize(("part", "kind"), MEDIA)
@pytest.mark.parametrize("written", ["plain", "spaces", "slashes"])
def test_media_are_counted_and_leave_the_text(
    part: dict[str, Any], kind: str, written: str
) -> None:
    content = chat({"type": "text", "text": "what is this?"}, part)
    if written == "spaces":
        content = content.replace(b'": "', b'" :\n "')
    if written == "slashes":  # as PHP's encoder writes it
        content = content.replace(b"/", b"\\/")
    found = without_media(content)
    assert dict(found.media) == {kind: 1}
    assert len(found.text) < 300
    assert b"what is this?" in found.text


def test_equal_beginnings_stay_equal_and_other_media_differ() -> None:
    first = {"type": "image_url", "image_url": {"url": URL}}
    other = {"type": "image_url", "image_url": {"url": URL[:-8] + "AAAAAAAA"}}
    ours, theirs, its = (
        without_media(chat(first, {"type": "text", "text": "a"})).text,
        without_media(chat(first, {"type": "text", "text": "b"})).text,
        without_media(chat(other, {"type": "text", "text": "a"})).text,
    )
    begin = without_media(chat(first)).text[:-3]
    assert ours.startswith(begin)
    assert theirs.startswith(begin)
    assert not its.startswith(begin)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "base64 " + "x" * 5000},
        {"type": "text", "text": f'a "url": "{IMAGE}" of base64'},
        {"type": "text", "text": IMAGE, "title": "base64"},
        {"type": "image_url", "image_url": {"url": "https://h/base64/" + "path/." * 900}},
        {
            "type": "image_url",
            "image_url": {"url": "data:;base64," + IMAGE[: VALUE_BYTES_MIN // 2]},
        },
    ],
)
def test_what_is_no_long_medium_stays_as_it_came(part: dict[str, Any]) -> None:
    content = chat(part, {"type": "text", "text": "more " * VALUE_BYTES_MIN})
    assert without_media(content).text == content


def test_a_picture_inside_of_a_text_is_text() -> None:
    """Its engine makes tokens of it."""
    page = "<img src=data:image/png;base64," + "A" * 4000 + ">"
    said = json.dumps([{"role": "user", "content": page}]).encode()
    assert without_media(said) == (said, {})


@given(st.binary(max_size=3000) | st.text().map(str.encode))
def test_no_bytes_fail_and_nothing_grows(content: bytes) -> None:
    for each in (content, b'{"type":"image","url" : "base64 ' + content * 3):
        found = without_media(each)
        assert len(found.text) <= len(each)
        assert set(found.media) <= MEDIA_TOKENS.keys()


@given(REPORTS, st.integers(0, 1 << 26), KINDS)
def test_whatever_engines_report_estimates_stay_within_bounds(
    reports: list[tuple[int, dict[str, int], int]], text_bytes: int, media: dict[str, int]
) -> None:
    estimates = TokenEstimates()
    for each in reports:
        estimates.learn("m", *each)
    assert BYTES_MIN <= estimates.bytes_per_token("m") <= BYTES_MAX
    found = estimates.tokens("m", text_bytes, media)
    assert 1 <= found <= text_bytes / BYTES_MIN + TOKENS_MAX * sum(media.values()) + 1
    assert math.isfinite(found)


@pytest.mark.parametrize(
    ("text_bytes", "media", "tokens"),
    [
        *(
            each
            for tokens in (0, -1, TOKENS_MAX + 1, 10**9)
            for each in ((1 << 20, {}, tokens), (100, {"image": 1}, tokens))
        ),
        (1000, {"image": 1, "audio": 1}, 100_000),  # which of both?
        (255, {}, 255),  # too short
    ],
)
def test_a_report_that_says_nothing_about_text_or_one_kind_teaches_nothing(
    text_bytes: int, media: dict[str, int], tokens: int
) -> None:
    estimates = TokenEstimates()
    estimates.learn("m", text_bytes, media, tokens)
    assert estimates.bytes_per_token("m") == BYTES_PER_TOKEN
    assert estimates.tokens("m", 0, {"image": 1}) == MEDIA_TOKENS["image"]
    both = {"image": 1, "audio": 1}
    assert estimates.tokens("m", 0, both) == sum(MEDIA_TOKENS[kind] for kind in both)


def test_text_and_media_are_learned_by_model() -> None:
    estimates = TokenEstimates()
    for _ in range(200):
        estimates.learn("m", 8000, {}, 1000)
        estimates.learn("m", 800, {"image": 2}, 100 + 2 * 256)
    assert estimates.bytes_per_token("m") == pytest.approx(8, rel=0.01)
    assert estimates.tokens("m", 800, {"image": 3}) == pytest.approx(100 + 3 * 256, rel=0.02)
    assert estimates.tokens("m", 0, {"video": 1}) == MEDIA_TOKENS["video"], "not learned"
    assert estimates.tokens("other", 400, {"image": 1}) == 100 + MEDIA_TOKENS["image"]


def test_one_report_moves_an_estimate_by_a_tenth_at_most() -> None:
    estimates = TokenEstimates()
    estimates.learn("m", 1 << 26, {}, 1)
    assert estimates.bytes_per_token("m") == pytest.approx(
        BYTES_PER_TOKEN + 0.1 * (BYTES_MAX - BYTES_PER_TOKEN)
    )
    estimates.learn("n", 1 << 26, {"image": 1}, 1)
    assert estimates.tokens("n", 0, {"image": 1000}) >= 900 * 1000


def test_names_of_models_are_bounded_and_the_least_used_goes() -> None:
    estimates = TokenEstimates()
    for number in range(2 * _MODELS_MAX + 5):
        estimates.learn(str(number), 8000, {}, 1000)
        estimates.learn("used", 8000, {}, 1000)
    assert len(estimates._models) == _MODELS_MAX
    assert estimates.bytes_per_token("used") == pytest.approx(8, rel=0.01)
    assert estimates.bytes_per_token("0") == BYTES_PER_TOKEN


# ── images, through a router ─────────────────────────────────────────────────────────────────────


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


def image(seed: int) -> str:
    """A data URL of a megabyte; all begin and end alike."""
    content = random.Random(seed).randbytes(IMAGE_BYTES - 6000)
    whole = bytes(3000) + content + bytes(3000)
    return "data:image/png;base64," + base64.b64encode(whole).decode()


def about_image(url: str, text: str) -> dict[str, Any]:
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
    homes = [
        home(router, "/v1/chat/completions", about_image(url, question)) for url in (first, other)
    ]
    assert [each.prompt_tokens < 2000 for each in arrived] == [True, True], "not 250,000"
    assert homes[0] != homes[1]
    for number in range(ROUNDS):
        url, its = ((first, homes[0]), (other, homes[1]))[number % 2]
        assert home(router, "/v1/chat/completions", about_image(url, f"{question} {number}")) == its
    for number in range(10):
        home(router, "/v1/chat/completions", about_image(first, f"{question} {number}"))
    assert arrived[-1].prompt_tokens == pytest.approx(2600, rel=0.15), "as it was reported"
    ours, theirs = arrived[0].keys, arrived[1].keys
    assert ours[:32]
    assert ours[:32] != theirs[:32]
    again = [each.keys for each in arrived[2:]]
    assert {keys[:32] for keys in again} == {ours[:32], theirs[:32]}
    home(router, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert arrived[-1].prompt_tokens < 100, "text is counted by itself"

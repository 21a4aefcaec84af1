"""Tokens of prompts that nobody has rendered: learned within bounds, whatever engines report."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvstore.router.keys.prefixes import VALUE_BYTES_MIN, without_media
from kvstore.routing.learning import (
    _MODELS_MAX,
    BYTES_MAX,
    BYTES_MIN,
    BYTES_PER_TOKEN,
    MEDIA_TOKENS,
    TOKENS_MAX,
    TokenEstimates,
)

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


@pytest.mark.parametrize("tokens", [0, -1, TOKENS_MAX + 1, 10**9])
def test_a_number_that_no_prompt_has_teaches_nothing(tokens: int) -> None:
    estimates = TokenEstimates()
    estimates.learn("m", 1 << 20, {}, tokens)
    estimates.learn("m", 100, {"image": 1}, tokens)
    assert estimates.bytes_per_token("m") == BYTES_PER_TOKEN
    assert estimates.tokens("m", 0, {"image": 1}) == MEDIA_TOKENS["image"]


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


def test_several_kinds_and_short_prompts_teach_nothing() -> None:
    estimates = TokenEstimates()
    estimates.learn("m", 1000, {"image": 1, "audio": 1}, 100_000)
    estimates.learn("m", 255, {}, 255)
    assert estimates.bytes_per_token("m") == BYTES_PER_TOKEN
    assert estimates.tokens("m", 0, {"image": 1, "audio": 1}) == 1750


def test_names_of_models_are_bounded_and_the_least_used_goes() -> None:
    estimates = TokenEstimates()
    for number in range(2 * _MODELS_MAX + 5):
        estimates.learn(str(number), 8000, {}, 1000)
        estimates.learn("used", 8000, {}, 1000)
    assert len(estimates._models) == _MODELS_MAX
    assert estimates.bytes_per_token("used") == pytest.approx(8, rel=0.01)
    assert estimates.bytes_per_token("0") == BYTES_PER_TOKEN


def test_a_picture_inside_of_a_text_is_text() -> None:
    """Its engine makes tokens of it."""
    page = "<img src=data:image/png;base64," + "A" * 4000 + ">"
    said = json.dumps([{"role": "user", "content": page}]).encode()
    assert without_media(said) == (said, {})
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
    text, kinds = without_media(json.dumps([{"role": "user", "content": [part]}]).encode())
    assert (len(text) < 300, kinds) == (True, {"image": 1})

"""The API of clients as it reaches an engine: paths, forms, models, ends of streams, browsers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.routing.events import Ending
from tests.kit.router_thread import ASK
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until

PAGE = "https://chat.example"
KEY = "key-of-sixteen-characters"
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def router(workers: list[VirtualWorker]) -> Iterator[VirtualRouter]:
    with VirtualRouter([each.flag for each in workers]) as started:
        until(lambda: all(worker.models for worker in started.router.workers))
        yield started


def served_by(headers: dict[str, str], workers: list[VirtualWorker]) -> dict[str, Any]:
    """What the engine of an answer saw last."""
    [found] = [each for each in workers if each.name == headers["x-kvstore-worker"]]
    return found.seen()


# ── paths ────────────────────────────────────────────────────────────────────────────────────────

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "m", "messages": CHAT}),
    ("/v1/messages", {"model": "m", "max_tokens": 3, "messages": CHAT}),
    ("/v1/messages?beta=true", {"model": "m", "max_tokens": 3, "messages": CHAT}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": CHAT}),
    ("/v1/responses", {"model": "m", "input": "Hello", "request_id": "resp_mine"}),
    ("/v1/embeddings", {"model": "m", "input": ["Hello", "Bye"]}),
    ("/v2/embed", {"model": "m", "texts": ["Hello"]}),
    ("/tokenize", {"model": "m", "prompt": "Hello"}),
    ("/detokenize", {"model": "m", "tokens": [1, 2, 3]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/pooling", {"model": "m", "input": "Hello", "data": {"a": [1.5]}}),
    ("/classify", {"model": "m", "input": ["Hello", "Bye"]}),
    ("/score", {"model": "m", "text_1": "Hello", "text_2": ["a", "b"]}),
    ("/v1/score", {"model": "m", "queries": "Hello", "documents": ["a"]}),
    ("/rerank", {"model": "m", "query": "Hello", "documents": ["a", "b"]}),
    ("/v2/rerank", {"model": "m", "query": "Hello", "documents": ["a", "b"]}),
    ("/generative_scoring", {"model": "m", "query": "Hello", "items": ["a", "b"]}),
]


def test_requests_reach_an_engine_as_they_came(
    router: VirtualRouter, workers: list[VirtualWorker]
) -> None:
    for path, body in BODIES:
        content = json.dumps(body, indent=1).encode()
        status, headers, answer = router.ask(content, path)
        assert status == 200, (path, answer)
        seen = served_by(headers, workers)
        assert (seen["target"], seen["body"]) == (path, content.decode())


ODD = [
    b'\xef\xbb\xbf{"model": "m", "prompt": "x"}',
    b'{"model": "m", "prompt": "x", "user": "\\ud83d"}',
    b'{"model": "m", "prompt": "x", "logit_bias": {"5": -Infinity}}',
]


def test_json_that_only_engines_read_reaches_one_as_it_came(
    router: VirtualRouter, workers: list[VirtualWorker]
) -> None:
    """A byte order mark, half a surrogate pair, an infinite number: vLLM reads them."""
    for content in ODD:
        status, headers, answer = router.ask(content)
        assert status == 200, answer
        assert served_by(headers, workers)["body"].encode() == content
        steering = content[:-1] + b', "kv_transfer_params": {"remote_host": "10.0.0.1"}}'
        status, _, answer = router.ask(steering)
        assert (status, b"a field that no client may set" in answer) == (400, True)


def test_a_path_with_a_slash_behind_it_is_said_without_it(router: VirtualRouter) -> None:
    status, headers, _ = router.ask(path="/v1/completions/?a=%20b")
    assert (status, headers["location"]) == (307, "/v1/completions?a=%20b")
    status, headers, _ = router.ask(path="/v1/models/", method="GET")
    assert (status, headers["location"]) == (307, "/v1/models")
    assert router.ask(path="/v1/none/")[0] == router.ask(path="//v1/completions/")[0] == 404


def test_a_character_set_in_content_encoding_is_no_compression(router: VirtualRouter) -> None:
    for value, status in (
        ("utf-8", 200),
        ("", 200),
        ("identity", 200),
        ("x-gzip", 415),
        ("br", 415),
    ):
        assert router.ask(headers={"Content-Encoding": value})[0] == status


def form(*fields: bytes) -> tuple[bytes, dict[str, str]]:
    """A form with a file of all bytes; its boundary is one that the file nearly has."""
    audio = bytes(range(256)) * 1024 + b"\r\n--boun\r\n"
    rows = [
        b'name="model"\r\n\r\nm',
        b'name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n' + audio,
        *fields,
    ]
    parts = [b"--bound\r\nContent-Disposition: form-data; " + row + b"\r\n" for row in rows]
    kind = {"Content-Type": "multipart/form-data; boundary=bound"}
    return b"".join(parts) + b"--bound--\r\n", kind


def test_a_form_reaches_an_engine_byte_for_byte(
    router: VirtualRouter, workers: list[VirtualWorker]
) -> None:
    content, kind = form(b'name="language"\r\n\r\nen')
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        status, headers, answer = router.ask(content, path, headers=kind)
        assert (status, json.loads(answer)) == (200, {"text": "abc"})
        seen = served_by(headers, workers)
        assert (seen["path"], seen["digest"]) == (path, hashlib.sha256(content).hexdigest())


# ── ends of streams ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/completions", ASK, rb"data: \[DONE\]\n\n"),
        ("/v1/responses", {"model": "m", "input": "x"}, rb"event: response\.completed.*\n\n"),
    ],
)
@pytest.mark.parametrize("text_bytes", [3, 50_000])
def test_a_client_that_leaves_at_the_last_word_is_done(
    router: VirtualRouter,
    workers: list[VirtualWorker],
    path: str,
    body: dict[str, Any],
    last: bytes,
    text_bytes: int,
) -> None:
    """The engine would end its response after that: the client leaves before."""
    for each in workers:
        each.script("ok", lingers=True, text="x" * text_bytes)
    asked, heard = router.begin(body | {"stream": True}, path), b""
    answer = asked.response()
    while not re.search(last, heard, re.DOTALL):
        piece = answer.read1(1 << 16)
        assert piece, heard[-200:]
        heard += piece
    asked.leave()
    until(lambda: len(router.core.ended) == 1)
    [ended] = router.core.ended.values()
    assert (ended.end, ended.output_tokens) == (Ending.DONE, 3)
    assert router.router.proxy.counts == {"done": 1}

"""The API of clients as it reaches an engine: paths, forms, models, ends of streams, browsers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
from aiohttp import web

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.workers import Worker, WorkerAdapter
from kvstore.router.front.answers import models_answer
from kvstore.router.front.paths import STORED, is_passed_on
from kvstore.router.front.proxy import takes_prompts
from kvstore.routing.events import Ending
from kvstore.routing.policy import RoutingPolicy, parse
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


# ── paths that reach an engine, and those that never do ──────────────────────────────────────────


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/v1", "/v1/completions/", "//v1/completions", "/v1/completions/render"),
        *("/v1/../v1/completions", "/v1/audio", "/v1/audio/", "/v1/audio/../models", "/v1/audio/A"),
        *("/v1/audio/speech/x", "/v1/audio/speech\n", "/v1/completions\n", "/V1/completions"),
        *("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/update_weights"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/flush_cache", "/pause", "/metrics"),
        *("/server_info", "/start_profile", "/get_world_size", "/is_sleeping", "/v1/models"),
    ],
)
def test_administration_and_odd_spellings_are_not(path: str) -> None:
    assert not takes_prompts(path)
    assert not is_passed_on(path, "GET", has_tenants=True)
    assert STORED.fullmatch(path) is None


@pytest.mark.parametrize("rest", ["", "/cancel", "/input_items"])
def test_a_stored_response_is_known_by_its_id(rest: str) -> None:
    found = STORED.fullmatch(f"/v1/responses/resp_0a-Z{rest}")
    assert found is not None
    assert found[1] == "resp_0a-Z"


@pytest.mark.parametrize(
    "rest",
    [
        *("", "a/", "a/other", "a/cancel/", "a/cancel\n", "a\n", "a%2Fb", "..", "../models", "a b"),
        *("é", "a" * 257, "a/input_items/b"),
    ],
)
def test_other_paths_below_responses_are_none(rest: str) -> None:
    assert STORED.fullmatch(f"/v1/responses/{rest}") is None


MANAGEMENT = [
    *("/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/reset_prefix_cache", "/pause"),
    *("/reset_mm_cache", "/update_weights", "/update_weight_version", "/get_world_size", "/resume"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile", "/stop_profile"),
    *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply", "/abort_requests"),
    *("/inference/v1/abort_requests", "/server_info", "/release_kv_cache_memory", "/is_paused"),
    *("/flush_cache", "/release_memory_occupation", "/set_internal_state", "/open_session"),
    *("/freeze_gc", "/pause_generation", "/continue_generation", "/slots/1", "/props", "/api/pull"),
    *("/models/load", "/lora-adapters", "/v2/repository/models/m/load", "/v2/trace/setting"),
    *("/SLEEP", "//sleep", "/x/../sleep", "/sleep/", "/a%2Fsleep"),
    *("/metrics", "/metrics/", "/kvstore/", "/kvstore/explain", "/kvstore/a\nb"),
    *("/v1/responses/", "/v1/responses/a/b", "/v1/responses/.."),
]


@pytest.mark.parametrize("path", MANAGEMENT)
def test_management_of_engines_is_for_nobody(path: str) -> None:
    assert not is_passed_on(path, "POST", has_tenants=False)


# ── names that clients may use, with the longest context of their engines ────────────────────────


def worker(*models: str, adapters: str = "", **contexts: Any) -> Worker:
    made = Worker(WorkerAddress(name="w", url="http://h", models=models))
    made.contexts = contexts
    made.adapters = {name: WorkerAdapter(models[0], "/path") for name in adapters}
    return made


def asked(path: str, *workers: Worker, policy: dict[str, Any] | None = None) -> tuple[int, Any]:
    rules = parse(policy) if policy else RoutingPolicy()
    answer: web.Response = models_answer(path, rules, workers, 7)
    assert answer.headers["Server"] == "kvstore"
    return answer.status, json.loads(cast("bytes", answer.body))


def lengths(page: Any) -> dict[str, int | None]:
    assert page["object"] == "list"
    for row in page["data"]:
        assert (row["object"], row["created"], row["owned_by"]) == ("model", 7, "kvstore")
    return {row["id"]: row.get("max_model_len") for row in page["data"]}


def test_without_a_policy_what_engines_list_counts_and_the_longest_context() -> None:
    crew = [worker("m", "n", adapters="z", m=65536, z=65536), worker("m", m=4096), worker()]
    status, page = asked("/v1/models", *crew)
    assert (status, lengths(page)) == (200, {"m": 65536, "n": None, "z": 65536})
    assert asked("/v1/models") == (200, {"object": "list", "data": []})


def test_names_of_the_policy_hide_those_of_engines_and_have_their_contexts() -> None:
    rule = {
        "aliases": ["alias"],
        "adapters": ["lora"],
        "pools": [{"pool": "a", "served": "m"}, {"pool": "b", "served": "n"}],
    }
    policy = {"models": {"public": rule, "other": {}}}
    _, page = asked("/v1/models", worker("m", "secret", m=100, n=300, secret=9), policy=policy)
    assert lengths(page) == {"alias": 300, "lora": 300, "public": 300, "other": None}


def test_one_model_by_its_path() -> None:
    contexts: dict[str, Any] = {"org/model": 10}
    crew = [worker("org/model", **contexts)]
    status, row = asked("/v1/models/org/model", *crew)
    assert (status, row["id"], row["max_model_len"]) == (200, "org/model", 10)
    for path in ("/v1/models/", "/v1/models/org", "/v1/models/org/model/", "/v1/modelsorg/model"):
        status, page = asked(path, *crew)
        assert (status, page["error"]["code"]) == (404, "model_not_found")


def test_a_hostile_name_is_a_name_in_json() -> None:
    name = '"}\r\nX: 1</script>\x00é'
    status, page = asked(f"/v1/models/{name}")
    assert status == 404
    assert repr(name) in page["error"]["message"]
    assert asked(f"/v1/models/{name}", worker(name))[1]["id"] == name

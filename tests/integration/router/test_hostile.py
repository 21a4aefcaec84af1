"""Engines that mean harm, or are broken: requests of others are answered all the same."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from kvstore.router.keys.index_calls import Listed
from kvstore.wire.load import EngineEntry
from tests.integration.router.test_prefill import (
    ROLES,
    Engines,
    body,
    engines as engines,
    routed,
    started as started,
)
from tests.integration.router.test_proxy import until
from tests.kit.router_thread import RouterThread

WITH_INDEX: dict[str, Any] = {"index": ["127.0.0.1:1"], "insecure": True}
"""Nobody is there: engines are listed by the test."""


def listed(engine: str, address: str, **more: Any) -> Listed:
    space = cast("Any", bytes(32))
    return Listed("n", EngineEntry(engine=engine, tenant="t", space=space, address=address, **more))


def _deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


PARAMETERS = [
    *(f'{{"do_remote_prefill":true,"x":{_deep(depth)}}}' for depth in (20, 900, 970, 978, 983)),
    f'{{"do_remote_prefill":true,"x":{2**64}}}',
    '{"do_remote_prefill":true,"kvstore":5}',
    '{"do_remote_prefill":"yes"}',
    '{"do_remote_prefill":true,"do_remote_decode":true}',
    "{}",
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=range(len(PARAMETERS)))
def test_parameters_that_a_decoder_would_fail_on_are_none(
    engines: Engines, parameters: str
) -> None:
    engines["p"].script("raw", text=f'{{"kv_transfer_params":{parameters}}}')
    with routed(engines, "pd", together=False) as router:
        status, headers, answer = router.ask(body())
        assert (status, headers["x-kvstore-worker"]) == (200, "d"), answer
        assert "kv_transfer_params" not in json.loads(engines["d"].seen()["body"])
        assert router.router.proxy.prefills == {"useless": 1}


@pytest.mark.parametrize("name", ["a\r\nSet-Cookie: x", "a\0", "a/\N{LINE SEPARATOR}b"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_name_of_an_engine_breaks_no_answer(engines: Engines, name: str, role: str) -> None:
    names = {each: name if its == role else each for each, its in ROLES.items() if each in "pd"}
    with routed(engines, "", together=False, **WITH_INDEX) as router:
        found = [listed(names[e], engines[e].url, role=ROLES[e]) for e in "pd"]
        router.on_loop(lambda: router.router.discovery.listed(found))
        for number in range(3):
            status, headers, _ = router.ask(body(number))
            assert (status, headers.get("set-cookie")) == (200, None)
            assert headers["x-kvstore-prefill-worker"].startswith("n/")


@pytest.mark.parametrize(
    "address", [r"http://a\b", "http://\N{ZERO WIDTH SPACE}", "http://" + "a" * 64, "http://a..b"]
)
def test_an_address_that_is_no_host_takes_no_request(engines: Engines, address: str) -> None:
    with RouterThread([engines["e"].flag], **WITH_INDEX) as router:
        found = [listed("bad", address), listed("good", engines["d"].url)]
        router.on_loop(lambda: router.router.discovery.listed(found))
        assert [router.ask(body(number))[0] for number in range(4)] == [200] * 4
        assert sorted(worker.name for worker in router.router.workers) == ["e", "n/good/0"]


@pytest.mark.parametrize("role", ["both", "prefill"])
def test_an_engine_whose_address_is_the_router_takes_no_request(
    engines: Engines, role: str
) -> None:
    with routed(engines, "d", together=False, **WITH_INDEX) as router:
        itself = listed("itself", f"http://127.0.0.1:{router.port}", role=role)
        router.on_loop(lambda: router.router.discovery.listed([itself]))
        for number in range(4):
            assert router.ask(body(number))[0] == 200
        until(lambda: router.words()["n/itself/0"] == "down")
        until(lambda: router.router.proxy.counts == {"done": 4})


def test_two_routers_that_list_each_other_end_a_request(engines: Engines) -> None:
    with RouterThread([], **WITH_INDEX) as one, RouterThread([], **WITH_INDEX) as other:
        for router, to in ((one, other.port), (other, one.port)):
            found = [listed("r", f"http://127.0.0.1:{to}")]
            router.on_loop(partial(router.router.discovery.listed, found))
        assert one.ask()[0] in (502, 503, 508)
        assert sum(each.core.fleet.state("n/r/0").request_count for each in (one, other)) < 20


STEERING = [
    *("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port"),
    *("bootstrap_room", "data_parallel_rank"),
]


@pytest.mark.parametrize("field", STEERING)
def test_fields_of_clients_that_steer_an_engine_go_nowhere(engines: Engines, field: str) -> None:
    with routed(engines, "pd", together=False) as router:
        for prompt in ("short", body()["prompt"]):
            more = {"vllm_xargs": {field: "x", "kept": 1}, "prompt": prompt, field: "y"}
            assert router.ask(body() | more)[0] == 200
            for name in "d" if prompt == "short" else "pd":
                sent = json.loads(engines[name].seen()["body"])
                assert sent["vllm_xargs"] == {"kept": 1}
                assert sent.get(field) != "y"
        assert router.ask(body() | {"prompt": "short", field: "y"})[0] == 200
        assert field not in json.loads(engines["d"].seen()["body"])


@pytest.mark.parametrize("has_tenants", [False, True])
def test_a_tenant_is_not_served_before_others(
    engines: Engines, tmp_path: Path, has_tenants: bool
) -> None:
    (keys := tmp_path / "keys.yaml").write_text("team-a: key-of-team-a-0001\n")
    more: dict[str, Any] = {"api_keys": str(keys)} if has_tenants else {}
    with routed(engines, "d", together=False, **more) as router:
        asked = body() | {"priority": -9, "vllm_xargs": {"priority": -9, "kept": 1}}
        auth = {"Authorization": "Bearer key-of-team-a-0001"}
        assert router.ask(asked, headers=auth)[0] == 200
        sent = json.loads(engines["d"].seen()["body"])
        assert ("priority" in sent, "priority" in sent["vllm_xargs"]) == (not has_tenants,) * 2


HARMFUL: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {"X-Session-Id": "\xff"}),
    ({"max_tokens": 10**400}, {}),
    ({"max_tokens": -(10**400)}, {}),
    ({"user": "u" * 100_000}, {}),
]


@pytest.mark.parametrize(("more", "headers"), HARMFUL, ids=range(len(HARMFUL)))
def test_numbers_and_names_of_a_client_fail_no_request(
    engines: Engines, more: dict[str, Any], headers: dict[str, str]
) -> None:
    """One is at the engine, which takes one at a time; of those that wait, one means harm."""
    engines["d"].script("ok", delays_s=[1.0])
    with routed(engines, "d", together=False) as router, ThreadPoolExecutor() as threads:
        one = structs.replace(router.core.policy.limits, running_max=1)
        policy = structs.replace(router.core.policy, limits=one)
        router.on_loop(lambda: router.router.dispatcher.adopt(policy))
        answers = []
        for count, head in enumerate(({}, {}, headers, {})):
            asked = body(count, **(more if head is headers else {}))
            answers.append(threads.submit(router.ask, asked, headers=head))
            until(partial(lambda many: len(router.core.open) == many, count + 1))
        assert len(router.core.room) == 3
        assert [each.result()[0] for each in answers] == [200] * 4
        assert router.ask(body(4, **more), headers=headers)[0] == 200
        assert all(draft.plain.output_tokens > 0 for draft in router.core.take_drafts())


def test_an_error_of_the_router_at_a_request_is_its_answer_and_logged_once(
    engines: Engines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with routed(engines, "d", together=False) as router:
        with monkeypatch.context() as patched:
            patched.setattr(router.core.placer, "place", lambda *_: 1 // 0)
            status, headers, _ = router.ask(body())
        assert (status, headers["x-kvstore-dropped-reason"]) == (500, "rejected-fault")
        assert router.router.proxy.counts == {"rejected-fault": 1}
        [said] = [text for text in caplog.messages if "ZeroDivisionError" in text]
        assert said.startswith("rejected req-")
        assert router.ask(body())[0] == 200


USAGE = '{"prompt_tokens":5,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":%s}}'


@pytest.mark.parametrize("tokens", ["9" * 400, "9" * 10])
def test_an_engine_that_reports_absurd_numbers_ends_its_requests(
    engines: Engines, tokens: str
) -> None:
    engines["d"].script("raw", text=f'{{"usage":{USAGE % tokens}}}')
    with routed(engines, "d", together=False) as router:
        for number in range(3):
            assert router.ask(body(number))[0] == 200
        until(lambda: not router.core.open)
        outcomes = [draft.plain.outcome for draft in router.core.take_drafts()]
        assert [(each.cached_tokens, each.end) for each in outcomes] == [(None, "done")] * 3
        assert router.core.fleet.in_flight("d") == 0


def test_a_request_has_ended_whatever_fails_when_its_answer_is_accounted_for(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with routed(engines, "d", together=False) as router:
        monkeypatch.setattr(router.router.proxy, "_observed", lambda *_: 1 // 0)
        assert router.ask(body())[0] == 200
        until(lambda: not router.core.open)

"""Engines that mean harm, or are broken: requests of others are answered all the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, cast

import pytest

from kvstore.router.keys.index_calls import Listed
from kvstore.wire.load import EngineEntry
from tests.kit.virtual_router import VirtualRouter, until
from tests.unit.router.test_prefill import (
    ROLES,
    Engines,
    body,
    engines as engines,
    routed,
)

WITH_INDEX: dict[str, Any] = {"index": ["127.0.0.1:1"], "insecure": True}
"""Nobody is there: engines are listed by the test."""


class NoIndex:
    """In place of its channel: it never answers."""

    def unary_unary(self, *_: object, **__: object) -> Any:
        return lambda *_, **__: self

    unary_stream = unary_unary

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield await asyncio.Event().wait()

    def cancel(self) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.router.keys.index_calls.aio_channel", lambda *_: NoIndex())


def listed(engine: str, address: str, **more: Any) -> Listed:
    space = cast("Any", bytes(32))
    return "n", EngineEntry(engine=engine, tenant="t", space=space, address=address, **more)


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
    with VirtualRouter([], **WITH_INDEX) as one, VirtualRouter([], **WITH_INDEX) as other:
        for router, to in ((one, other.port), (other, one.port)):
            found = [listed("r", f"http://127.0.0.1:{to}")]
            router.on_loop(partial(router.router.discovery.listed, found))
        assert one.ask()[0] in (502, 503, 508)
        assert sum(each.core.fleet.state("n/r/0").request_count for each in (one, other)) < 20


STEERING = [
    *("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port"),
    *("bootstrap_room", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
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


def test_a_request_has_ended_whatever_fails_when_its_answer_is_accounted_for(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with routed(engines, "d", together=False) as router:
        monkeypatch.setattr(router.router.proxy, "_learn", lambda *_: 1 // 0)
        assert router.ask(body())[0] == 200
        until(lambda: not router.core.open)

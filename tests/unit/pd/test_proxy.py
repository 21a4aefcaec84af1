"""Legs, failures and aborts of the proxy, between engines that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvstore.pd import proxy as pd_proxy
from tests.unit.pd.fake_engine import PARAMETERS, FakeEngine, stage

ASK = {"prompt": "x", "max_tokens": 8, "stream": True}
NOBODY = "http://127.0.0.1:9"
"""No server is at the port `discard`."""


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_the_decode_engine_gets_the_parameters_of_the_prefill_engine_and_none_of_the_client() -> (
    None
):
    async def case() -> None:
        async with stage() as on:
            forged = {**ASK, "kv_transfer_params": {"remote_host": "10.0.0.66"}}
            async with on.post(forged) as answer:
                assert await answer.text() == "data: one\n\ndata: [DONE]\n\n"
                assert answer.headers["Content-Type"] == "text/event-stream"
                assert "X-Own" not in answer.headers
            (first,), (second,) = on.p.bodies, on.d.bodies
            sent = first["kv_transfer_params"]
            assert sent["do_remote_decode"] is True
            assert sent["remote_host"] is None
            assert (first["max_tokens"], first["stream"]) == (1, False)
            assert second == {**ASK, "kv_transfer_params": PARAMETERS}

    asyncio.run(case())


def test_both_legs_have_one_id_of_the_proxys_own_and_few_headers() -> None:
    async def case() -> None:
        async with stage() as on:
            more = {"X-Request-Id": "mine", "Cookie": "a=b", "Authorization": "Bearer k"}
            async with on.post(ASK, **more) as answer:
                await answer.read()
            p, d = on.p.headers[0], on.d.headers[0]
            assert p["X-Request-Id"] == d["X-Request-Id"] != "mine"
            assert p["Authorization"] == d["Authorization"] == "Bearer k"
            assert "Cookie" not in {*p, *d}

    asyncio.run(case())


def test_bytes_are_passed_on_before_the_answer_ends() -> None:
    async def case() -> None:
        async with stage() as on:
            on.d.may_go_on.clear()
            async with on.post(ASK) as answer:
                assert await answer.content.readany() == b"data: one\n\n"
                on.d.may_go_on.set()
                assert await answer.content.read() == b"data: [DONE]\n\n"

    asyncio.run(case())


@pytest.mark.parametrize("fault", ["status", "silence", "gone"])
def test_after_a_prefill_leg_that_failed_the_decode_engine_answers_alone(fault: str) -> None:
    async def case() -> None:
        async with stage(prefill_timeout_s=0.1) as on:
            if fault == "status":
                on.p.status = 500
            elif fault == "silence":
                on.p.may_answer.clear()
            else:
                await on.p.server.close()
            forged = {**ASK, "kv_transfer_params": PARAMETERS}
            for _ in range(3):
                async with on.post(forged) as answer:
                    assert answer.status == 200
                    assert b"[DONE]" in await answer.read()
            assert on.d.bodies == [ASK] * 3
            # Left out after two failures: the third request did not wait for it.
            assert fault == "gone" or len(on.p.bodies) == 2

    asyncio.run(case())


def test_a_prefill_engine_without_the_connector_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def case() -> None:
        async with stage(legs="together") as on:
            parameters = on.p.parameters
            for on.p.parameters in (None, None, parameters, None):
                async with on.post(ASK) as answer:
                    assert b"[DONE]" in await answer.read()
            assert (on.proxy.counts["prefilled"], on.proxy.counts["decode_alone"]) == (1, 3)
            assert "kv_transfer_params" not in on.d.bodies[1]

    asyncio.run(case())
    said = [line for line in caplog.messages if "without kv_transfer_params" in line]
    assert len(said) == 2, "again after it had answered well"


def test_a_refusal_of_the_prefill_engine_goes_back_as_it_is() -> None:
    async def case() -> None:
        async with stage() as on:
            on.p.status = 422
            async with on.post(ASK) as answer:
                assert (answer.status, await answer.json()) == (422, {"error": "of the engine"})
            assert on.d.bodies == []

    asyncio.run(case())


def test_a_decode_engine_that_is_gone_is_replaced_by_the_next() -> None:
    async def case() -> None:
        async with stage(more_decode=(NOBODY,)) as on:
            for _ in range(4):
                async with on.post(ASK) as answer:
                    assert b"[DONE]" in await answer.read()
            assert len(on.d.bodies) == 4
            on.d.status = 500
            async with on.post(ASK) as answer:
                assert answer.status == 502
                assert (await answer.json())["error"]["code"] == 502

    asyncio.run(case())


@pytest.mark.parametrize("leg", ["prefill", "decode", "both"])
def test_a_client_that_hangs_up_takes_its_legs_along(leg: str) -> None:
    async def case() -> None:
        async with stage(legs="together" if leg == "both" else "in-turn") as on:
            if leg == "both":
                async with on.post(ASK) as answer:
                    await answer.read()
            waiting: list[FakeEngine] = [on.p] if leg != "decode" else []
            waiting += [on.d] if leg != "prefill" else []
            for engine in waiting:
                engine.begun.clear()
                engine.may_answer.clear()
            asking = asyncio.ensure_future(_read(on.post(ASK)))
            for engine in waiting:
                async with asyncio.timeout(5):
                    await engine.begun.wait()
            asking.cancel()
            await _until(lambda: all(engine.aborted == 1 for engine in waiting))
            await _until(lambda: on.proxy.counts["aborted"] == 1)
            assert on.proxy._under_way == 0

    asyncio.run(case())


async def _read(post: object) -> bytes:
    async with post as answer:  # type: ignore[attr-defined]
        return bytes(await answer.read())


def test_legs_together_once_the_prefill_engine_has_named_its_node() -> None:
    async def case() -> None:
        async with stage(legs="together") as on:
            async with on.post(ASK) as answer:
                await answer.read()
            on.p.may_answer.clear()
            async with on.post(ASK) as answer:
                assert b"[DONE]" in await answer.read()
            await _until(lambda: on.p.aborted == 1)  # nobody needs its answer any more
            early = on.d.bodies[1]["kv_transfer_params"]
            transfer = on.p.bodies[1]["kv_transfer_params"]["kvstore"]["transfer"]
            assert early["kvstore"] == {"node": "p1", "transfer": transfer}
            assert early["remote_engine_id"] == "engine-p"

    asyncio.run(case())


@pytest.mark.parametrize("status", [500, 400])
def test_a_prefill_leg_that_fails_beside_the_decode_leg_makes_it_begin_anew(status: int) -> None:
    async def case() -> None:
        async with stage(legs="together") as on:
            async with on.post(ASK) as answer:
                await answer.read()
            on.p.status = status
            on.d.may_answer.clear()
            asking = asyncio.ensure_future(_read(on.post(ASK)))
            await _until(lambda: len(on.d.bodies) == 3)
            on.d.may_answer.set()
            assert b"[DONE]" in await asking
            assert on.d.aborted == 1
            assert on.d.bodies[2] == ASK

    asyncio.run(case())


def test_half_an_answer_is_seen_to_be_half() -> None:
    async def case() -> None:
        async with stage() as on:
            on.d.may_go_on.clear()
            async with on.post(ASK) as answer:
                await answer.content.readany()
                for connection in on.d.server.handler.connections:
                    assert connection.transport is not None
                    connection.transport.abort()
                with pytest.raises(Exception, match=r"(?i)not enough data|closed|reset|payload"):
                    await answer.content.read()

    asyncio.run(case())


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"prompt": NaN}', b"[" * 100_000])
def test_a_body_that_is_none_is_refused(body: bytes) -> None:
    async def case() -> None:
        async with stage() as on, on.post(body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
            assert on.p.bodies == on.d.bodies == []

    asyncio.run(case())


def test_pages() -> None:
    async def case() -> None:
        async with stage() as on:
            async with on.client.get(on.url + "/v1/models") as answer:
                assert (await answer.json())["data"][0]["id"] == "model"
            async with on.client.get(on.url + "/health") as answer:
                assert (answer.status, (await answer.json())["prefill"]) == (200, {on.p.url: True})
            await on.p.server.close()
            async with on.client.get(on.url + "/health") as answer:
                assert answer.status == 200  # the decode engine answers alone
            await on.d.server.close()
            async with on.client.get(on.url + "/health") as answer:
                assert answer.status == 503

    asyncio.run(case())


def test_bodies_have_a_bound_each_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_proxy, "BODY_BYTES_MAX", 1000)
    monkeypatch.setattr(pd_proxy, "BODIES_BYTES_MAX", 1500)

    async def case() -> None:
        async with stage() as on:
            async with on.post({**ASK, "prompt": "x" * 2000}) as answer:
                assert answer.status == 413
            on.d.may_go_on.clear()
            large = {**ASK, "prompt": "x" * 800}
            async with on.post(large) as first:
                assert await first.content.readany() == b"data: one\n\n"
                async with on.post(large) as second:
                    assert (second.status, second.headers["Retry-After"]) == (503, "1")
                on.d.may_go_on.set()
                assert await first.content.read() == b"data: [DONE]\n\n"
            async with on.post(large) as third:
                assert third.status == 200
                await third.read()
            assert on.proxy._body_bytes == 0

    asyncio.run(case())

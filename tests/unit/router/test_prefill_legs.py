"""Both legs of a remote prefill: what each engine gets, and which leg ends the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.router.engines.probes import Probes
from kvstore.routing.rows import FAULTS_MAX
from kvstore.wire.requests import PrefillPart, answer_of, read_transfer
from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_router import VirtualRouter, until
from tests.unit.router.test_prefill import (
    BOTH_WAYS,
    Engines,
    body,
    engines as engines,
    routed,
)

FORGED: dict[str, Any] = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.6.6.6"}
}

PROMPT_TOKENS = 1000
"""As an engine counts them: with few, the router soon takes all prompts for short ones."""


def sent(engine: VirtualWorker) -> list[dict[str, Any]]:
    """Bodies that came since this was asked last."""
    return [json.loads(each) for each in engine.bodies()]


def words(engine: VirtualWorker) -> dict[str, str]:
    """Headers of its last request."""
    return {name.lower(): value for name, value in engine.seen()["headers"]}


def transfer(engine: VirtualWorker) -> str:
    """Of its last request; empty: it had none."""
    params = json.loads(engine.seen().get("body", "{}")).get("kv_transfer_params", {})
    return str(params.get("kvstore", {}).get("transfer", ""))


def answered(
    router: VirtualRouter, p: VirtualWorker, d: VirtualWorker, *asked: Any, **more: Any
) -> tuple[int, dict[str, str], bytes]:
    """An answer that d gives when both engines have their leg."""
    before = transfer(d)
    d.script("held")
    asking = router.begin(*asked, **more)
    until(lambda: transfer(p) == transfer(d) not in (before, ""))
    d.script("ok", prompt_tokens=PROMPT_TOKENS)
    return asking.result()


def test_legs_are_together_as_long_as_the_last_answer_of_a_prefiller_names_its_node(
    engines: Engines,
) -> None:
    p, d = engines["p"], engines["d"]
    with routed(engines, "pd", together=False) as router:
        assert router.ask(body(1) | FORGED)[0] == 200
        ([to_p], [to_d]) = sent(p), sent(d)
        part = read_transfer(to_p["kv_transfer_params"], "")
        assert isinstance(part, PrefillPart)
        answered = answer_of(part, node="p", engine="e", request_id="r", tokens=100)
        assert to_d == body(1) | {"kv_transfer_params": answered}

        p.script("held")
        d.script("ok", push_s=60)
        asked = router.begin(body(2))
        until(lambda: d.seen()["decodes"] == 2)
        p.script("ok", params=False)
        assert asked.result()[0] == 200
        [to_p], [early, alone] = sent(p), sent(d)
        assert early.pop("kv_transfer_params") == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "e",
            "kvstore": {"node": "p", **to_p["kv_transfer_params"]["kvstore"]},
        }
        assert early == alone == body(2)

        assert router.ask(body(3))[0] == 200
        assert sent(d) == [body(3)], "it is waited for, and the decoder gets nothing before"
        assert router.router.proxy.prefills == {"done": 1, "useless": 2}


def test_a_decoder_that_answers_before_its_prefiller_is_heard_at_once(engines: Engines) -> None:
    """It had the blocks itself. Nobody needs the other leg any more when its answer is over."""
    p, d = engines["p"], engines["d"]
    p.script("ok", delay_s=60)
    d.script("held")
    with routed(engines, "pd", together=True) as router:
        asked = router.begin(body(stream=True))
        until(lambda: (p.seen()["running"], d.seen()["running"]) == (1, 1))
        d.script("ok", pieces=2, pause_s=1.0)
        answer = asked.response()
        first = answer.read1(1 << 16)
        assert p.seen()["running"] == 1
        assert first == b'data: {"n": 0}\n\n'
        assert answer.read().endswith(b"data: [DONE]\n\n")
        until(lambda: p.seen()["aborted"] == 1)
        asked.leave()
        until(lambda: router.router.proxy.prefills == {"aborted": 1})
        assert router.words() == {"p": "up", "d": "up"}


@BOTH_WAYS
def test_a_prefiller_that_is_gone_costs_no_request(engines: Engines, together: bool) -> None:
    engines["p"].port.kill()
    engines["d"].script("ok", push_s=60 * together)  # or it might answer before the prefill fails
    with routed(engines, "pd", together=together) as router:
        assert [router.ask(body(number) | FORGED)[0] for number in range(3)] == [200] * 3
        # One that had begun beside the prefill began anew.
        assert [each for each in sent(engines["d"]) if "kv_transfer_params" not in each] == [
            body(number) for number in range(3)
        ]
        assert router.router.proxy.prefills["failed"] <= 1, "it is not asked again"
        assert router.words() == {"p": "down", "d": "up"}
        assert router.ask(method="GET", path="/health")[0] == 200
        until(lambda: router.router.workers["d"].models == ("m",))
        models = json.loads(router.ask(method="GET", path="/v1/models")[2])
        assert [each["id"] for each in models["data"]] == ["m"]


@BOTH_WAYS
def test_a_decoder_that_is_gone_is_replaced_with_blocks_for_the_next_one(
    engines: Engines, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unprobed(*_: object) -> None:
        """Only a request finds out."""

    monkeypatch.setattr(Probes, "_probe", unprobed)
    engines["d"].port.kill()
    with routed(engines, "pde", together=together) as router:
        for number in range(5):
            status, headers, _ = answered(router, engines["p"], engines["e"], body(number))
            assert (status, headers["x-kvstore-worker"]) == (200, "e")
            assert headers["x-kvstore-prefill-worker"] == "p"
        assert router.failure_count("d") == 1
        assert router.words() == {"p": "up", "d": "down", "e": "up"}


@pytest.mark.parametrize("status", [400, 500])
def test_a_prefill_that_fails_beside_its_decode_leg_makes_that_begin_anew(
    engines: Engines, status: int
) -> None:
    p, d = engines["p"], engines["d"]
    p.script("held")
    d.script("ok", push_s=60)
    with routed(engines, "pd", together=True) as router:
        asked = router.begin(body(stream=True))
        until(lambda: d.seen()["decodes"] == 1)
        p.script("fail", status=status)
        assert asked.result()[0] == 200
        early, alone = sent(d)
        assert early.pop("kv_transfer_params")["kvstore"]["node"] == "n-p"
        assert early == alone == body(stream=True)
        until(lambda: d.seen()["aborted"] == 1)


KEYS: list[tuple[dict[str, str], str | None]] = [
    ({}, "Bearer key-of-team-a-0001"),
    ({"worker_key_file": "key-of-the-engines"}, "Bearer key-of-the-engines"),
    ({"api_keys": "team-a: key-of-team-a-0001"}, None),
]


@pytest.mark.parametrize(("files", "key"), KEYS, ids=["client", "router", "tenants"])
def test_both_legs_have_the_headers_of_a_request_and_none_that_steers(
    engines: Engines, tmp_path: Path, files: dict[str, str], key: str | None
) -> None:
    settings: dict[str, Any] = {name: str(tmp_path / name) for name in files}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    given = {
        "Authorization": "Bearer key-of-team-a-0001",
        "X-Trace": "kept",
        "X-Request-Id": "mine",
        "X-Prefiller-Host-Port": "10.6.6.6:1",
        "X-Data-Parallel-Rank": "3",
        "X-Kvstore-Worker": "e",
    }
    with routed(engines, "pd", together=True, **settings) as router:
        status, headers, _ = answered(router, engines["p"], engines["d"], body(), headers=given)
        assert (status, headers["x-kvstore-worker"]) == (200, "d")
        for name in "pd":
            seen = words(engines[name])
            assert seen["x-request-id"] == headers["x-request-id"]
            assert seen["x-request-id"].startswith("mine-")
            assert (seen.get("authorization"), seen["x-trace"]) == (key, "kept")
            assert not {each.lower() for each in [*given][3:]} & seen.keys()


@BOTH_WAYS
def test_nothing_of_a_request_is_in_the_log(
    engines: Engines, caplog: pytest.LogCaptureFixture, together: bool
) -> None:
    caplog.set_level("DEBUG")
    engines["p"].script("ok", params=False)
    engines["d"].script("cut")
    secret = {"Authorization": "Bearer secret-key", "X-Request-Id": "secret-id"}
    with routed(engines, "pd", together=together) as router:
        for number in range(2 * FAULTS_MAX):
            asked = body(number) | {"prompt": f"secret words {number} " * 500, "user": "secret"}
            assert router.ask(asked, headers=secret)[0] in (500, 502)
    assert "worker p" in caplog.text
    assert "secret" not in caplog.text

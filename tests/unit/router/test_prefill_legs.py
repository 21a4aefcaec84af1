"""Both legs of a remote prefill: what each engine gets, and which leg ends the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.probes import Probes
from kvstore.router.engines.workers import Worker
from kvstore.router.front.intake import can_split, peek
from kvstore.router.front.legs import PARAMETERS, ahead, parameters_of, prefill_order, source_of
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
@pytest.mark.parametrize("names", ["pd", "pqde"])
@pytest.mark.parametrize("mode", ["gone", "fail"])
def test_prefillers_that_always_fail_cost_no_request(
    engines: Engines, together: bool, mode: str, names: str
) -> None:
    for name in names:
        if name in "de":  # or it might answer before the prefill fails
            engines[name].script("ok", push_s=60 * together)
        elif mode == "fail":
            engines[name].script("fail")
        else:
            engines[name].port.kill()
    with routed(engines, names, together=together) as router:
        answers = [router.ask(body(number) | FORGED) for number in range(3)]
        assert [status for status, *_ in answers] == [200] * 3
        assert all("x-kvstore-prefill-worker" not in headers for _, headers, _ in answers)
        # One that had begun beside the prefill began anew.
        alone = [
            each
            for decoder in set(names) & {"d", "e"}
            for each in sent(engines[decoder])
            if "kv_transfer_params" not in each
        ]
        assert sorted(alone, key=str) == [body(number) for number in range(3)]
        if mode == "gone":
            assert router.router.proxy.prefills["failed"] <= 2, "it is not asked again"
            assert router.words() == {n: "down" if n in "pq" else "up" for n in names}
        assert router.ask(method="GET", path="/health")[0] == 200


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


# ── bodies of both legs, and what is taken from a prefiller's answer ─────────────────────────────


ANSWERED = answer_of(PrefillPart("t", "t"), node="p1", engine="e", request_id="r", tokens=9)


def worker(node: str = "", engine: str = "") -> Worker:
    return Worker(WorkerAddress(name="w", url="http://127.0.0.1:1", node=node, engine=engine))


def test_a_prefiller_samples_one_token_whatever_the_client_wants() -> None:
    body = (
        b'{"messages":[], "max_completion_tokens":99, "min_tokens":5, "n":4, "best_of":4,'
        b' "stream":true, "stream_options":{"include_usage":true}, "logprobs":true,'
        b' "top_logprobs":3, "seed":1e2, "tools":[1],'
        b' "kv_transfer_params":{"do_remote_prefill":true,"remote_host":"10.6.6.6"}}'
    )
    order = prefill_order(body, "t")
    assert b'"seed":1e2' in order, "values keep their bytes"
    sent = json.loads(order)
    params = sent.pop(PARAMETERS)
    assert read_transfer(params, "") == PrefillPart("t", "t")
    assert {params[name] for name in params if name.startswith("remote_")} == {None}
    assert sent == {
        "messages": [],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "n": 1,
        "best_of": 1,
        "stream": False,
        "seed": 100,
        "tools": [1],
    }


@pytest.mark.parametrize(
    ("path", "more", "can"),
    [
        ("/v1/completions", "", True),
        ("/v1/chat/completions", ', "echo": false, "prompt_logprobs": null', True),
        ("/v1/completions", ', "echo": true', False),
        ("/v1/completions", ', "prompt_logprobs": 0', False),
        ("/v1/completions", ', "use_beam_search": true', False),
        ("/v1/responses", "", False),
        ("/v1/embeddings", "", False),
    ],
)
def test_what_a_remote_prefill_is_of_no_use_for_is_not_prefilled_elsewhere(
    path: str, more: str, can: bool
) -> None:
    assert can_split(path, peek(b'{"prompt": "x"%b}' % more.encode())) == can


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b'{"kv_transfer_params": [1]}', b'{"kv_transfer_params": null}', b"\xff"],
)
def test_answers_without_parameters(answer: bytes) -> None:
    assert parameters_of(answer) is None


def test_the_parameters_of_an_answer_are_handed_on_whole() -> None:
    more = {**ANSWERED, "of_another_connector": [1, {"a": None}]}
    assert parameters_of(json.dumps({"id": "x", PARAMETERS: more}).encode()) == more


def test_only_kvstores_parameters_name_a_node_for_later_requests() -> None:
    others: list[dict[str, Any] | None] = [
        None,
        {"remote_engine_id": "e"},
        {"kvstore": {"node": 7}},
        {"kvstore": []},
    ]
    assert [source_of(each) for each in others] == [None] * 4
    assert source_of(ANSWERED) == ("p1", "e")


def test_a_decoder_begins_ahead_if_the_node_of_its_prefiller_is_known() -> None:
    prefiller, decoder = worker(), worker()
    assert ahead(prefiller, decoder, "t") is None
    prefiller.source = source_of(ANSWERED)
    early = ahead(prefiller, decoder, "new")
    assert early is not None
    assert (early["remote_engine_id"], early["do_remote_prefill"]) == ("e", True)
    assert early["kvstore"] == {"node": "p1", "transfer": "new"}
    assert prefiller.source == source_of(ANSWERED), "nothing of a request stays"


def test_names_of_nodes_go_before_what_an_answer_said() -> None:
    prefiller = worker(node="n1")
    prefiller.source = source_of(ANSWERED)
    early = ahead(prefiller, worker(node="n2"), "t")
    assert early is not None
    assert (early["remote_engine_id"], early["kvstore"]["node"]) == (None, "n1")
    early = ahead(prefiller, worker(), "t")
    assert early is not None
    assert early["kvstore"]["node"] == "p1", "a decoder without a node is not known to the others"
    named = ahead(worker(node="n1", engine="e1"), worker(node="n2"), "t")
    assert named is not None
    assert named["remote_engine_id"] == "e1"

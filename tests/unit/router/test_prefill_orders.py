"""Bodies of both legs of a remote prefill, and what is taken from a prefiller's answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.workers import Worker
from kvstore.router.front.intake import can_split, edited, peek
from kvstore.router.front.legs import PARAMETERS, ahead, parameters_of, prefill_order, source_of
from kvstore.wire.requests import PrefillPart, answer_of, read_transfer

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


def test_a_decoder_gets_the_body_as_it_came_and_the_parameters() -> None:
    body = b'{ "prompt" : "x",  "min_tokens":5, "seed":1e2 }'
    sent = edited(body, put={PARAMETERS: ANSWERED})
    assert json.loads(sent) == json.loads(body) | {PARAMETERS: ANSWERED}
    assert b'"seed":1e2' in sent


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

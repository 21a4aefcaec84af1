"""Parameters of requests: what both legs take from them, and what clients can do with them; and the
header `traceparent`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvstore.errors import ProtocolError
from kvstore.wire.bounds import NAME_BYTES_MAX
from kvstore.wire.requests import (
    TRACEPARENT_LENGTH,
    DecodePart,
    PrefillPart,
    TraceParent,
    answer_of,
    names_of,
    parse_traceparent,
    read_transfer,
    traceparent_of,
)

P_ID = "cmpl-3f2a-0-0123abcd"
D_ID = "cmpl-3f2a-0-fedc4567"
TO_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
EARLY: dict[str, Any] = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "engine-p",
    "remote_host": "10.9.9.9",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_request_id": "3f2a",
}
"""As vLLM's own proxies send them."""


def produced(params: dict[str, Any], request: str = P_ID) -> PrefillPart:
    read = read_transfer(params, request)
    assert isinstance(read, PrefillPart)
    return read


def expected(params: dict[str, Any], request: str = D_ID) -> DecodePart:
    read = read_transfer(params, request)
    assert isinstance(read, DecodePart)
    return read


def test_most_requests_have_no_part_in_a_transfer() -> None:
    for params in (None, {}, {"do_remote_decode": None}, {"kvstore": {"transfer": "t"}}):
        assert read_transfer(params, P_ID) is None


def test_both_legs_of_vllms_push_proxy_have_one_name() -> None:
    p, d = produced(TO_PREFILL), expected(EARLY)
    assert p.transfer == d.transfer
    assert d.node == ""


@pytest.mark.parametrize("given_name", [None, "t1"])
@pytest.mark.parametrize("d_id", [D_ID, "cmpl-another-0-fedc4567"])
def test_the_answer_of_prefill_names_the_transfer_for_decode(
    given_name: str | None, d_id: str
) -> None:
    ours = {"kvstore": {"transfer": given_name}} if given_name else {}
    p = produced(TO_PREFILL | ours)
    answer = answer_of(p, node="node-p", engine="e", request_id=P_ID, tokens=300)
    assert expected(answer, d_id) == DecodePart(p.transfer, "node-p")
    assert answer["remote_host"] is None


def test_prompts_of_a_list_are_transfers_of_their_own_with_one_answer() -> None:
    ours = TO_PREFILL | {"kvstore": {"transfer": "t"}}
    first, second = produced(ours, "cmpl-x-0-0123abcd"), produced(ours, "cmpl-x-1-0123abcd")
    assert first.transfer != second.transfer
    answer = answer_of(first, node="n", engine="e", request_id="x", tokens=1)
    assert expected(answer, "cmpl-y-1-fedc4567").transfer == second.transfer


def test_answers_to_one_prompt_are_one_transfer() -> None:
    ids = ("0_cmpl-x-0-0123abcd", "1_cmpl-x-0-0123abcd", "cmpl-x-0-fedc4567")
    assert len({names_of(i) for i in ids}) == 1
    assert names_of("chatcmpl-x-0123abcd") == ("chatcmpl-x", "chatcmpl-x")


@pytest.mark.parametrize(
    "broken",
    [
        "text",
        [1],
        {"do_remote_decode": "yes"},
        {"do_remote_decode": True, "do_remote_prefill": True},
        {"do_remote_prefill": True, "kvstore": "n1"},
        {"do_remote_prefill": True, "kvstore": {"node": ""}},
        {"do_remote_prefill": True, "kvstore": {"node": "a b"}},
        {"do_remote_prefill": True, "kvstore": {"node": "n\n"}},
        {"do_remote_prefill": True, "kvstore": {"transfer": "x" * 201}},
    ],
)
def test_broken_parameters_are_an_error_of_ours(broken: object) -> None:
    with pytest.raises(ProtocolError, match="kv_transfer_params"):
        read_transfer(broken, P_ID)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.just("x" * 300),
        lambda inner: st.lists(inner) | st.dictionaries(
            st.sampled_from(["do_remote_decode", "do_remote_prefill", "kvstore", "node",
                             "transfer", "remote_engine_id", "other"]), inner),
    ),
    st.text(),
)  # fmt: skip
def test_whatever_a_client_sends_is_read_or_refused(params: object, request_id: str) -> None:
    try:
        read = read_transfer(params, request_id)
    except ProtocolError:
        return
    if read is not None:
        assert 1 <= len(read.transfer.encode("utf-8", "replace")) <= NAME_BYTES_MAX
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(read)))


# ── traceparent ──────────────────────────────────────────────────────────────────────────────────


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WHOLE = TraceParent(int(TRACE, 16), int(SPAN, 16), is_sampled=True)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_header_is_read_as_it_was_written(trace_id: int, span_id: int, is_sampled: bool) -> None:
    parent = TraceParent(trace_id, span_id, is_sampled)
    assert len(parent.header) == TRACEPARENT_LENGTH
    assert parse_traceparent(parent.header) == parent


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", WHOLE),
        (f"00-{TRACE}-{SPAN}-00", WHOLE._replace(is_sampled=False)),
        (f"00-{TRACE}-{SPAN}-03", WHOLE),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", WHOLE),
        (f"cc-{TRACE}-{SPAN}-01.what", None),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-1", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        (f"00-{TRACE[:-1]}٣-{SPAN}-01", None),
        ("", None),
    ],
)
def test_by_the_rules_of_the_standard(text: str, expected: TraceParent | None) -> None:
    assert parse_traceparent(text) == expected
    passed_on = traceparent_of({"traceparent": text})
    assert passed_on == (expected.header if expected else "")
    assert len(passed_on) <= TRACEPARENT_LENGTH


def test_no_headers_are_no_trace() -> None:
    assert traceparent_of(None) == traceparent_of({}) == ""

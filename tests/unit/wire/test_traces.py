"""The header `traceparent`: what is read of it, and what is passed on."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvstore.wire.requests import (
    TRACEPARENT_LENGTH,
    TraceParent,
    parse_traceparent,
    traceparent_of,
)

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

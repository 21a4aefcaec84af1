"""The header `traceparent`, by which services join spans of one request (W3C Trace Context).

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
    version, trace, span of the caller, flags: bit 0 says that the caller records the trace

Ways to be broken, all of them None: another form; version ff; more than version 00 has; a trace or
span of zeros only. Later versions are read by the rules of 00, as the standard asks. Does not
cover: spans (`kvstore.obs.traces`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

TRACEPARENT: Final = "traceparent"
TRACEPARENT_LENGTH: Final = 55
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

TraceText = Annotated[str, msgspec.Meta(max_length=TRACEPARENT_LENGTH)]
"""A header; empty: none."""


class TraceParent(NamedTuple):
    """A trace, and a span in it."""

    trace_id: int
    span_id: int
    """0: none, the trace begins."""
    is_sampled: bool

    @property
    def header(self) -> str:
        """The header for services below the span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def parse_traceparent(text: str) -> TraceParent | None:
    """The trace and span in a header's text; None: it is broken."""
    found = _FORM.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id, flags = (int(found[place], 16) for place in (2, 3, 4))
    return TraceParent(trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None


def traceparent_of(headers: Mapping[str, str] | None) -> str:
    """The header among these, in the one form that is passed on; empty: none, or a broken one."""
    parent = parse_traceparent((headers or {}).get(TRACEPARENT, ""))
    return parent.header if parent is not None else ""

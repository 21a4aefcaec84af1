"""Parameters of a request beside its tokens: its part in a transfer, and its trace.

**`kv_transfer_params`** of requests and answers: fields of vLLM, and ours below `kvstore` (ADR 12).

    proxy → prefill engine            do_remote_decode, kvstore {transfer}
    prefill engine → proxy → decode   do_remote_prefill, remote_engine_id, kvstore {transfer, node}
    router → engine → router          kvstore {adapter: true} → kvstore {adapter, why} (ADR 2)

Both legs of a request need one name for the transfer. The proxy may give it; otherwise the id of
the request is the name, without the suffix that each engine adds: proxies of vLLM send the same
X-Request-Id to both. Each of a list of prompts is a request, and its number is a part of the name.
Addresses are ignored: a node is found by its name, in the membership. Ways to be broken: a field of
another type; both directions at once; a name that is empty, too long or not printable. All of them
raise `ProtocolError` from `read_transfer`.

**The header `traceparent`**, by which services join spans of one request (W3C Trace Context).

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
    version, trace, span of the caller, flags: bit 0 says that the caller records the trace

Ways to be broken, all of them None: another form; version ff; more than version 00 has; a trace or
span of zeros only. Later versions are read by the rules of 00, as the standard asks. Does not
cover: spans (`kvstore.obs.traces`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from kvstore.errors import ProtocolError
from kvstore.wire.bounds import NAME_BYTES_MAX, Label, Name

# ── its transfer, and its adapter ─────────────────────────────────────────────────────────────────

NAME_CHARS_MAX: Final = 200
"""Longest name that a proxy may give, in ASCII; a prompt's number goes behind it."""
_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")
_CHILD: Final = re.compile(r"^\d+_")
"""Prefix of one of several answers to a prompt."""
_NUMBERED: Final = re.compile(r"(cmpl-.+)-(\d+)", re.DOTALL)
"""Form of the id of one of a list of prompts."""

ADAPTER_QUESTION: Final = {"kvstore": {"adapter": True}}

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX, pattern=r"^[!-~]+\Z")]


class _Ours(msgspec.Struct, frozen=True):
    transfer: _Text | None = None
    node: _Text | None = None


class _Params(msgspec.Struct, frozen=True):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    kvstore: _Ours | None = None


class PrefillPart(msgspec.Struct, frozen=True):
    """A request whose blocks another engine goes on with."""

    transfer: Name
    name: Name
    """Name of all requests of its list of prompts."""


class DecodePart(msgspec.Struct, frozen=True):
    """A request whose blocks another engine computes."""

    transfer: Name
    node: Label
    """Node of that engine; empty: not named, so that its blocks are found by the index."""


def names_of(request_id: str, name: str | None = None) -> tuple[str, str]:
    """(transfer, name common to a list of prompts) of a request, which may have been given one."""
    base = _CHILD.sub("", _SUFFIX.sub("", request_id))
    if numbered := _NUMBERED.fullmatch(base):
        name = name or numbered[1]
        return f"{name}/{numbered[2]}", name
    return name or base, name or base


def read_transfer(params: object, request_id: str) -> PrefillPart | DecodePart | None:
    """The part in a transfer of a request, by its parameters; None: it has none.

    Raises:
        ProtocolError: the parameters are broken.
    """
    if not params:
        return None
    try:
        read = msgspec.convert(params, _Params)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"kv_transfer_params: {error}") from None
    if not (read.do_remote_decode or read.do_remote_prefill):
        return None
    if read.do_remote_decode and read.do_remote_prefill:
        raise ProtocolError("kv_transfer_params: do_remote_decode and do_remote_prefill at once")
    ours = read.kvstore or _Ours()
    transfer, name = names_of(request_id, ours.transfer)
    if not 1 <= len(transfer.encode("utf-8", "replace")) <= NAME_BYTES_MAX:
        raise ProtocolError("kv_transfer_params: the request's id is too long for a transfer")
    if read.do_remote_decode:
        return PrefillPart(transfer, name)
    return DecodePart(transfer, ours.node or "")


class _AdapterQuestion(msgspec.Struct, frozen=True):
    adapter: bool


class _Asked(msgspec.Struct, frozen=True):
    kvstore: _AdapterQuestion


class _AdapterAnswer(msgspec.Struct, frozen=True):
    adapter: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^(?:[0-9a-f]{64})?\Z")]
    why: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""


class _Answered(msgspec.Struct, frozen=True):
    kvstore: _AdapterAnswer


def asks_for_adapter(params: object) -> bool:
    """Whether a request wants the digest of its adapter in its answer."""
    try:
        return msgspec.convert(params, _Asked).kvstore.adapter
    except msgspec.ValidationError:
        return False


def adapter_answer(found: bytes | str) -> dict[str, Any]:
    """Parameters in the answer: the digest of the request's adapter, or why there is none."""
    if isinstance(found, str):
        return {"kvstore": {"adapter": "", "why": found[:NAME_CHARS_MAX]}}
    return {"kvstore": {"adapter": found.hex()}}


def adapter_digest(params: object) -> bytes | str:
    """Digest in the parameters of an answer; or the reason in them why there is none, if any."""
    try:
        found = msgspec.convert(params, _Answered).kvstore
    except msgspec.ValidationError:
        return ""
    return bytes.fromhex(found.adapter) or found.why


def answer_of(
    produced: PrefillPart, *, node: str, engine: str, request_id: str, tokens: int
) -> dict[str, Any]:
    """Parameters in the answer of a prefill engine, for the decode engine's request."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_request_id": request_id,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "remote_num_tokens": tokens,
        "kvstore": {"transfer": produced.name, "node": node},
    }


# ── its trace ─────────────────────────────────────────────────────────────────────────────────────

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

"""Headers between a client and an engine, in both directions.

    client ─▶ onward: without hop-by-hop, without names that steer engines or gateways ─▶ engine
    engine ─▶ back: without hop-by-hop ─▶ client

A header of a client never chooses a worker, a prefiller, a rank or an identity: such names are
dropped, also where the Connection header would hide them. Framing is never copied: each side has
its own. Requests whose framing two parsers could read differently are refused before (`proxy`).
"""

from __future__ import annotations

import functools
import re
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy, istr

from kvstore.router.engines.connections import ROUTERS, whole_head
from kvstore.routing.events import HintAnswer

HOP_BY_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "upgrade"),
        *("proxy-authorization", "te", "trailer", "trailers", "transfer-encoding"),
        *("content-length", "host", "expect"),
    }
)
_STEERING: Final = (
    *("x-kvstore-", "x-forwarded-", "x-real-ip", "forwarded", "x-gateway-", "x-llm-d-"),
    *("x-prefiller-", "x-encoder-", "x-data-parallel", "x-kv-cache-", "x-envoy-", "x-slo-"),
    *("epp-", "x-session-token", "x-dynamo-"),
)
"""Prefixes of header names by which engines, side-cars and gateways are steered."""
_OWN: Final = ("x-kvstore-", "access-control-")
"""Prefixes of header names that only the router sets for clients."""
_REQUEST_ID: Final = re.compile(r"(?!.*___)[A-Za-z0-9._:-]{1,128}", re.ASCII)
"""Ids that are passed on: runs of underscores are refused, since some engines read addresses
between them.
"""
GIVEN_ID_CHARACTERS_MAX: Final = 96
NO_ID: Final = "req"
SERVER: Final = istr("Server")
API_KEY: Final = istr("X-Api-Key")
AUTHORIZATION: Final = istr("Authorization")
CONNECTION: Final = istr("Connection")
CONTENT_ENCODING: Final = istr("Content-Encoding")
CONTENT_LENGTH: Final = istr("Content-Length")
EXPECT: Final = istr("Expect")
TRANSFER_ENCODING: Final = istr("Transfer-Encoding")
ORIGIN: Final = istr("Origin")
REQUEST_ID: Final = istr("X-Request-Id")
WORKER: Final = istr("X-Kvstore-Worker")
ROUTERS_MAX: Final = 4


def onward(
    headers: CIMultiDictProxy[str], *, request_id: str, authorization: str | None, way: str
) -> list[tuple[str, str]]:
    """Headers for an engine. `authorization`: replaces the client's, empty for none; None: the
    client's own stays. `way`: value of `ROUTERS`.
    """
    kept = [pair for pair in headers.items() if _goes_on(pair[0])]
    if CONNECTION in headers:
        values = ",".join(headers.getall(CONNECTION))
        named = {name.strip().lower() for name in values.split(",")}
        kept = [pair for pair in kept if pair[0].lower() not in named]
    if authorization is not None:
        kept = [pair for pair in kept if pair[0].lower() not in ("authorization", "x-api-key")]
    if authorization:
        kept.append((AUTHORIZATION, authorization))
    kept += [(REQUEST_ID, request_id), (ROUTERS, way)]
    return kept


def back(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers of an engine's answer that go to the client. The name and version of its server are
    replaced.
    """
    kept, named = [], set[bytes]()
    for pair in headers:
        if _comes_back(pair[0]):
            kept.append(pair)
        elif pair[0].lower() == b"connection":
            named.update(name.strip() for name in pair[1].lower().split(b","))
    if named:
        kept = [pair for pair in kept if pair[0].lower() not in named]
    kept.append((b"Server", b"kvstore"))
    return kept


def readable(headers: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """Headers of an engine as text, undecodable bytes escaped."""
    return CIMultiDict(
        (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
        for name, value in headers
    )


def answer_head(status: int, headers: list[tuple[bytes, bytes]], more: Mapping[str, str]) -> bytes:
    """The whole head for a client. `more`: headers that are added, or replace the engine's."""
    replaced, has_date = _lows(tuple(more)), False
    lines = [_status_line(status)]
    for name, value in headers:
        low = _low(name)
        if low not in replaced:
            has_date = has_date or low == b"date"
            lines.append(b"%b: %b\r\n" % (name, value))
    if not has_date:
        lines.append(_date_line(int(time.time())))
    for key, text in more.items():
        lines.append(f"{key}: {text}\r\n".encode("utf-8", "surrogateescape"))
    return whole_head(b"".join(lines), len(lines))


@functools.lru_cache(maxsize=512)
def _low(name: bytes) -> bytes:
    return name.lower()


@functools.lru_cache(maxsize=64)
def _lows(names: tuple[str, ...]) -> frozenset[bytes]:
    return frozenset(name.lower().encode("ascii") for name in names)


@functools.lru_cache(maxsize=1)
def _date_line(now_s: int) -> bytes:
    return f"Date: {formatdate(now_s, usegmt=True)}\r\n".encode("ascii")


@functools.lru_cache(maxsize=64)
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode("ascii")


@functools.lru_cache(maxsize=512)
def _goes_on(name: str) -> bool:
    low = name.lower()
    is_ours = low in HOP_BY_HOP or low == "x-request-id"
    return not (is_ours or low.startswith(_STEERING) or "_" in low)


@functools.lru_cache(maxsize=512)
def _comes_back(name: bytes) -> bool:
    low = name.decode("latin-1").lower()
    return not (low in HOP_BY_HOP or low == "server" or low.startswith(_OWN))


def hints(answer: HintAnswer | None) -> dict[str, str]:
    """Headers that acknowledge a client's hints; empty if it gave none."""
    found = dict[str, str]()
    if answer is None:
        return found
    if answer.pinned_s:
        found["X-Kvstore-Pin"] = f"{answer.pinned_s:.0f}; tokens={answer.pinned_tokens}"
    elif answer.refused:
        found["X-Kvstore-Pin"] = f"0; reason={answer.refused}"
    if answer.ends_session:
        found["X-Kvstore-Session"] = "ends"
    return found


def new_id(headers: CIMultiDictProxy[str]) -> str:
    """A unique id for a request: the client's own, where it is harmless, with random digits behind
    it, since another request under way may have the same.
    """
    given = headers.get(REQUEST_ID, "")
    beginning = given if _REQUEST_ID.fullmatch(given) else ""
    return f"{beginning[:GIVEN_ID_CHARACTERS_MAX] or NO_ID}-{secrets.token_hex(8)}"


def way(headers: CIMultiDictProxy[str], name: str) -> str | None:
    """Value of `ROUTERS` for an engine; None: the request has passed the router of this name, or
    too many routers.
    """
    passed = headers[ROUTERS].split(",") if ROUTERS in headers else []
    return None if name in passed or len(passed) >= ROUTERS_MAX else ",".join([*passed, name])


class Origins:
    """Origins of web pages whose scripts may read answers (CORS), as vLLM's `--allowed-origins`.

    Keys are sent in headers, never in cookies, so pages of any origin have only the keys that a
    user gave them.
    """

    def __init__(self, origins: Collection[str]) -> None:
        """`origins`: `*` for all; empty: none is allowed."""
        self._origins = frozenset(origins)

    def allowed(self, headers: CIMultiDictProxy[str]) -> dict[str, str]:
        """Headers of an answer that let the page read it; empty: no page asks, or its origin is not
        allowed.
        """
        origin = headers.get(ORIGIN)
        if origin is None or not {origin, "*"} & self._origins:
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in self._origins else origin,
            "Access-Control-Expose-Headers": "*",
            "Vary": "Origin",
        }

    def preflight(self, headers: CIMultiDictProxy[str]) -> dict[str, str] | None:
        """Headers that answer a browser's CORS preflight; empty: the origin is not allowed. None:
        the request is no preflight.
        """
        if "Access-Control-Request-Method" not in headers or ORIGIN not in headers:
            return None
        if not (more := self.allowed(headers)):
            return {}
        return more | {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": headers.get("Access-Control-Request-Headers", "*"),
            "Access-Control-Max-Age": "600",
        }


def bearer(headers: CIMultiDictProxy[str]) -> str:
    """The API key of a request, as clients of OpenAI or of Anthropic send it; empty: none."""
    kind, _, key = headers.get(AUTHORIZATION, "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get(API_KEY, "")

"""Headers between a client and an engine, in both directions.

    client ─▶ onward: without hop-by-hop, without names that steer engines or gateways ─▶ engine
    engine ─▶ back: without hop-by-hop ─▶ client

A header of a client never chooses a worker, a prefiller, a rank or an identity: such names are
dropped, also where the Connection header would hide them. Framing is never copied: each side has
its own. Requests whose framing two parsers could read differently are refused before (`proxy`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy, istr

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
"""Beginnings of names by which engines, side-cars and gateways are steered."""
_REQUEST_ID: Final = re.compile(r"(?!.*___)[A-Za-z0-9._:-]{1,128}", re.ASCII)
"""Some engines read addresses between runs of underscores out of an id."""
_KEPT_BACK: Final = HOP_BY_HOP | {"server"}
SERVER: Final = istr("Server")
AUTHORIZATION: Final = istr("Authorization")
REQUEST_ID: Final = istr("X-Request-Id")
ROUTERS: Final = istr("X-Kvstore-Routers")
"""Names of the routers on the way of a request, its sender's last."""
ROUTERS_MAX: Final = 4


def onward(
    headers: CIMultiDictProxy[str], *, request_id: str, authorization: str | None
) -> CIMultiDict[str]:
    """Headers for an engine. `authorization`: in place of the client's; None: the client's own."""
    named = _named_by_connection(headers)
    kept = CIMultiDict[str]()
    for name, value in headers.items():
        low = name.lower()
        if low in HOP_BY_HOP or low in named or low.startswith(_STEERING) or "_" in low:
            continue
        if low == "x-request-id" or (low == "authorization" and authorization is not None):
            continue
        kept.add(name, value)
    kept[REQUEST_ID] = request_id
    if authorization:
        kept[AUTHORIZATION] = authorization
    return kept


def back(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Headers for a client. Versions of servers are nobody's business."""
    named = _named_by_connection(headers)
    kept = CIMultiDict[str]()
    for name, value in headers.items():
        low = name.lower()
        if low not in _KEPT_BACK and low not in named and not low.startswith("x-kvstore-"):
            kept.add(name, value)
    kept[SERVER] = "kvstore"
    return kept


def given_id(headers: CIMultiDictProxy[str]) -> str:
    """The client's request id, where it is a harmless one; else empty."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else ""


def way(headers: CIMultiDictProxy[str], name: str) -> str | None:
    """`ROUTERS` for an engine; None: the request has been at the router of this name before."""
    passed = headers[ROUTERS].split(",") if ROUTERS in headers else []
    return None if name in passed or len(passed) >= ROUTERS_MAX else ",".join([*passed, name])


def bearer(headers: CIMultiDictProxy[str]) -> str:
    """The API key of a request; empty: none."""
    kind, _, key = headers.get(AUTHORIZATION, "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _named_by_connection(headers: CIMultiDictProxy[str]) -> frozenset[str]:
    values: Iterable[str] = headers.getall("Connection", ())
    return frozenset(name.strip().lower() for value in values for name in value.split(","))

"""The page for people: the same files for nodes, index replicas and routers.

    index.html ─▶ app.js ─ every 2 s, while it is visible ─▶ /state.json   what there is, by role
                         ─ at a click ─────────────────────▶ /request.json?id=N   one request

A state is a mapping of sections, made at most once a second for all viewers and at most
STATE_BYTES_MAX long: the first ROWS_MAX rows of each list, so that lists have the important ones
first, and `totals` with the length of each. No library, no build; HEADERS of `net.http` forbid
the browser all but these files. Does not cover: contents of states (`pages` of each role).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstore import __version__
from kvstore.errors import NodeBusy
from kvstore.net.http import Page, PageMaker, text_page

PERIOD_S: Final = 1.0
STATE_BYTES_MAX: Final = 64_000
ROWS_MAX: Final = 100
REQUESTS_SHOWN: Final = 50
HEALTH_LENGTH_MAX: Final = 2000
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
}
_NUMBER: Final = re.compile(r"id=([0-9]{1,15})")


def encode_state(state: Mapping[str, Any]) -> bytes:
    """JSON of a state; while it is too long, the longest of its lists loses the second half."""
    lists = {name: rows for name, rows in state.items() if isinstance(rows, list)}
    found = {**state, "totals": {k: len(v) for k, v in lists.items()} | state.get("totals", {})}
    found |= {name: rows[:ROWS_MAX] for name, rows in lists.items()}
    while len(text := msgspec.json.encode(found)) > STATE_BYTES_MAX and any(map(found.get, lists)):
        longest = max(lists, key=lambda name: len(msgspec.json.encode(found[name])))
        found[longest] = found[longest][: len(found[longest]) // 2]
    return text


def picked(row: object, names: Iterable[str]) -> dict[str, Any]:
    """Attributes of a row by name; None for those that it lacks."""
    return {name: getattr(row, name, None) for name in names}


def make_site(
    healthz: Callable[[], Page],
    read_state: Callable[[], Mapping[str, Any]],
    read_request: Callable[[int], Mapping[str, Any] | None] = lambda _: None,
    *,
    clock_s: Callable[[], float] = time.monotonic,
) -> dict[str, PageMaker]:
    """Path → function that makes the page, for the page for people and its files.

    Args:
        healthz: the page of that path.
        read_state: sections of the state. Raises NodeBusy, TimeoutError.
        read_request: a request of its list by number; None: there is none. Raises as above.
        clock_s: for the age of a state.
    """
    kept = [(-PERIOD_S, text_page(503, ""))]

    def state() -> Page:
        # One thread at a time makes it.
        now_s, (made_s, page) = clock_s(), kept[0]
        if now_s - made_s >= PERIOD_S:
            page = _page_of(lambda: encode_state({**_head(healthz(), now_s), **read_state()}))
            kept[0] = now_s, page
        return page

    def request(query: str) -> Page:
        if number := _NUMBER.fullmatch(query):
            return _page_of(lambda: msgspec.json.encode(read_request(int(number[1]))))
        return text_page(400, "name a request by its number: /request.json?id=1")

    files = {
        path: partial(Page, 200, kind, Path(__file__).with_name(name).read_bytes())
        for path, (name, kind) in _FILES.items()
    }
    return {**files, "/state.json": state, "/request.json?": request}


def _head(health: Page, now_s: float) -> dict[str, Any]:
    text = health.body.decode().strip()
    text = text[:HEALTH_LENGTH_MAX] + " …" * (len(text) > HEALTH_LENGTH_MAX)
    its = {"is_ok": health.status == 200, "text": text}
    return {"version": __version__, "at_ms": int(now_s * 1000), "health": its}


def _page_of(encode: Callable[[], bytes]) -> Page:
    try:
        text = encode()
    except (NodeBusy, TimeoutError) as error:
        return text_page(503, str(error) or "no answer in time: the process is overloaded")
    if text == b"null":
        return text_page(404, "that request is no longer kept")
    return Page(200, "application/json", text)

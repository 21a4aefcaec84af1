"""The page for people: its files, how often and how long its state is, and single requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import __version__
from kvstore.errors import NodeBusy
from kvstore.net import site
from kvstore.net.http import text_page
from kvstore.net.site import PERIOD_S, ROWS_MAX, STATE_BYTES_MAX, encode_state, make_site

FOLDER = Path(site.__file__).parent
LINES_MAX = 450


def healthy() -> Any:
    return text_page(200, "ok")


def site_of(read: Callable[[], dict[str, Any]], **more: Any) -> dict[str, Any]:
    return make_site(healthy, read, **more)


def test_it_is_three_small_files_that_name_nothing_outside() -> None:
    files = [path for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css")]
    texts = {path.name: path.read_text() for path in files}
    assert sorted(texts) == ["app.css", "app.js", "index.html"]
    assert sum(text.count("\n") for text in texts.values()) <= LINES_MAX
    addresses = re.findall(r"(?:https?:)?//\w[^\s\"']*", "".join(texts.values()))
    assert addresses == ["http://www.w3.org/2000/svg"]  # a name of XML, which nobody fetches
    wanted = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(|\bon\w+="
    assert re.findall(wanted, texts["app.js"] + texts["index.html"]) == []
    assert not re.search(r"<style|style=|<script>", texts["index.html"])


def test_each_file_has_its_type() -> None:
    pages = site_of(dict)
    types = {
        path: pages[path]().content_type.split(";")[0] for path in ("/", "/app.js", "/app.css")
    }
    assert types == {"/": "text/html", "/app.js": "text/javascript", "/app.css": "text/css"}
    assert pages["/app.js"]().body == (FOLDER / "app.js").read_bytes()


def test_five_viewers_cost_one_state_a_second() -> None:
    made, now_s = 0, 1000.0

    def read() -> dict[str, Any]:
        nonlocal made
        made += 1
        return {"made": made}

    page = site_of(read, clock_s=lambda: now_s)["/state.json"]
    for _ in range(5):
        assert json.loads(page().body) == {
            "version": __version__,
            "at_ms": 1_000_000,
            "health": {"is_ok": True, "text": "ok"},
            "made": 1,
            "totals": {},
        }
    now_s += PERIOD_S - 0.001
    assert json.loads(page().body)["made"] == 1
    now_s += 0.001
    assert json.loads(page().body)["made"] == 2


@pytest.mark.parametrize(("length", "shown"), [(10, ROWS_MAX), (3000, None)])
def test_a_state_is_bounded_and_says_how_many_rows_there_are(
    length: int, shown: int | None
) -> None:
    rows = [{"number": number, "name": "x" * length} for number in range(1000)]
    text = encode_state({"nodes": rows, "few": [1, 2], "word": "w", "totals": {"more": 7}})
    assert len(text) <= STATE_BYTES_MAX
    state = json.loads(text)
    assert state["totals"] == {"nodes": 1000, "few": 2, "more": 7}
    kept = state["nodes"]
    assert kept == rows[: len(kept)]
    assert len(kept) == shown if shown else 0 < len(kept) < ROWS_MAX
    assert (state["few"], state["word"]) == ([1, 2], "w")
    assert json.loads(encode_state({"text": "x" * STATE_BYTES_MAX, "rows": []}))["rows"] == []


def test_a_long_sentence_about_health_is_cut() -> None:
    pages = make_site(lambda: text_page(503, "w is down, and " * 9999), dict)
    health = json.loads(pages["/state.json"]().body)["health"]
    assert health["is_ok"] is False
    assert health["text"] == ("w is down, and " * 200)[: site.HEALTH_LENGTH_MAX] + " …"


@pytest.mark.parametrize(
    ("error", "text"),
    [(NodeBusy("the node is busy"), b"the node is busy\n"), (TimeoutError(), b"no answer in time")],
)
def test_a_busy_process_says_so_for_a_second(error: Exception, text: bytes) -> None:
    asked = 0

    def read() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        raise error

    page = site_of(read, clock_s=lambda: 5.0)["/state.json"]
    assert {page().status for _ in range(5)} == {503}
    assert page().body.startswith(text)
    assert asked == 1


def test_one_request_is_found_by_its_number_only() -> None:
    pages = site_of(dict, read_request=lambda number: {"number": number} if number < 9 else None)
    page = pages["/request.json?"]
    assert json.loads(page("id=7").body) == {"number": 7}
    assert page("id=9").status == 404
    for query in ("", "id=", "id=x", "id=-1", "id=7&x=1", "id=" + "9" * 16, "id=٣"):
        assert (page(query).status, b"/request.json?id=1" in page(query).body) == (400, True)

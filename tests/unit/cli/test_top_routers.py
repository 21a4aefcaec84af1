"""`kvstore top --router`: figures from a router's pages, and one sentence where there are none."""

from __future__ import annotations

import io
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from kvstore.cli import top_routers
from kvstore.cli.main import main
from kvstore.cli.pages import LATE
from kvstore.cli.top import SILENT, UP, Figures, Tally
from kvstore.cli.top_routers import (
    NO_ROUTER,
    UNREADY,
    RouterFigures,
    RouterPage,
    RouterPages,
    router_figures,
    series_of,
)
from kvstore.cli.top_view import ROUTERS, Seen, page as page_of
from kvstore.config.values import HostPort
from kvstore.net.http import HttpServer, Page, text_page
from kvstore.testing.process import Lab

NO_URL = "this is no URL, such as http://127.0.0.1:9472"
WIDE_COLUMNS = ROUTERS.wide_columns
FIRST = """# TYPE kvstore_router_requests_total counter
kvstore_router_requests_total{outcome="done"} 100.0
kvstore_router_requests_total{outcome="rejected-saturated"} 10.0
# TYPE kvstore_router_splits_total counter
kvstore_router_splits_total{reason="long"} 4.0
kvstore_router_splits_total{reason="short"} 7.0
# TYPE kvstore_router_worker_prompt_tokens_total counter
kvstore_router_worker_prompt_tokens_total{worker="a"} 1000.0
kvstore_router_worker_prompt_tokens_total{worker="gone"} 9000.0
# TYPE kvstore_router_worker_predicted_tokens_total counter
kvstore_router_worker_predicted_tokens_total{worker="a"} 0.0
# TYPE kvstore_router_worker_cached_tokens_total counter
kvstore_router_worker_cached_tokens_total{worker="a"} 0.0
# TYPE kvstore_router_ttft_seconds histogram
kvstore_router_ttft_seconds_bucket{kind="predicted",le="+Inf"} 5.0
kvstore_router_ttft_seconds_count{kind="predicted"} 5.0
kvstore_router_ttft_seconds_sum{kind="predicted"} 1.0
kvstore_router_ttft_seconds_count{kind="achieved"} 5.0
kvstore_router_ttft_seconds_sum{kind="achieved"} 1.0
# TYPE kvstore_router_info gauge
kvstore_router_info{version="1"} 1.0
kvstore_router_in_flight 3.0
kvstore_router_held 2.0
kvstore_router_peers 1.0
kvstore_router_index_used 1.0
kvstore_router_workers{state="up"} 2.0
kvstore_router_workers{state="load-only"} 1.0
kvstore_router_workers{state="down"} 1.0
kvstore_router_saturation{cause="queue",pool="p"} 0.25
kvstore_router_saturation{cause="memory",pool="q"} 0.75
"""
LATER = """# TYPE kvstore_router_requests_total counter
kvstore_router_requests_total{outcome="done"} 120.0
kvstore_router_requests_total{outcome="rejected-saturated"} 11.0
kvstore_router_requests_total{outcome="evicted-priority"} 3.0
# TYPE kvstore_router_splits_total counter
kvstore_router_splits_total{reason="long"} 5.0
kvstore_router_splits_total{reason="busy-decode"} 1.0
kvstore_router_splits_total{reason="short"} 70.0
# TYPE kvstore_router_worker_prompt_tokens_total counter
kvstore_router_worker_prompt_tokens_total{worker="a"} 1400.0
# TYPE kvstore_router_worker_predicted_tokens_total counter
kvstore_router_worker_predicted_tokens_total{worker="a"} 300.0
# TYPE kvstore_router_worker_cached_tokens_total counter
kvstore_router_worker_cached_tokens_total{worker="a"} 200.0
# TYPE kvstore_router_ttft_seconds histogram
kvstore_router_ttft_seconds_count{kind="predicted"} 9.0
kvstore_router_ttft_seconds_sum{kind="predicted"} 1.2
kvstore_router_ttft_seconds_count{kind="achieved"} 9.0
kvstore_router_ttft_seconds_sum{kind="achieved"} 1.8
kvstore_router_index_used 0.0
"""


def page(text: str, at_s: float = 0.0, state: str = UP) -> RouterPage:
    return RouterPage(at_s, state, "", series_of(text))


def test_gauges_are_of_the_last_page_and_rates_of_what_came_since() -> None:
    tally = Tally(router_figures)
    (first,) = tally.take({"http://r:1": page(FIRST)})
    assert (first.router, first.state, first.parity) == ("r:1", UP, "1 load-only")
    assert (first.in_flight, first.held, first.other_routers) == (3, 2, 1)
    assert (first.workers_serving, first.workers) == (3, 4)
    assert (first.saturation, first.saturation_cause, first.saturation_pool) == (
        0.75,
        "memory",
        "q",
    )
    assert (first.requests_per_s, first.ttft_s, first.hit_percent) == (None, None, None)
    (later,) = tally.take({"http://r:1": page(LATER, 2.0)})
    assert (later.requests_per_s, later.rejected_per_s) == (12.0, 2.0)
    assert later.remote_prefills_per_s == 1.0
    assert later.ttft_predicted_s == pytest.approx(0.05)
    assert later.ttft_s == pytest.approx(0.2)
    assert (later.hit_predicted_percent, later.hit_percent) == (75.0, 50.0)
    assert later.parity == "index-lost"


def test_a_router_that_began_anew_has_no_negative_rates() -> None:
    tally = Tally(router_figures)
    tally.take({"u": page(LATER)})
    (figures,) = tally.take({"u": page(FIRST, 1.0)})
    assert (figures.requests_per_s, figures.ttft_s) == (0.0, None)
    assert figures.hit_percent == 0.0, "a worker that is new has tokens"
    tally.take({"u": RouterPage(1.5, SILENT, LATE)})
    (figures,) = tally.take({"u": page(LATER, 2.0)})
    assert figures.requests_per_s is None, "it was silent in between"


def test_without_an_index_nothing_was_predicted() -> None:
    tally = Tally(router_figures)
    for at_s, text in enumerate((FIRST, LATER)):
        lines = [line for line in text.splitlines(keepends=True) if "index_used" not in line]
        (figures,) = tally.take({"u": page("".join(lines), at_s)})
    assert (figures.parity, figures.hit_predicted_percent) == ("no-index", None)
    assert figures.hit_percent == 50.0


Serve = Callable[[Mapping[str, Page]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves pages; their URL."""
    servers: list[HttpServer] = []

    def serving(pages: Mapping[str, Page]) -> str:
        made = {path: (lambda content=content: content) for path, content in pages.items()}
        server = HttpServer(HostPort(host="127.0.0.1", port=0), made)
        servers.append(server)
        server.start()
        return server.url

    yield serving
    for each in servers:
        each.close()


def sampled(*urls: str, ca: Path | None = None) -> list[RouterFigures]:
    pages = RouterPages(urls, ca)
    try:
        return Tally(router_figures).take(pages.sample())
    finally:
        pages.close()


def test_states_are_those_of_healthz(serve: Serve) -> None:
    metrics = {"/metrics": text_page(200, FIRST)}
    cases = {
        "ok": (200, UP, ""),
        "ok, but worker a is down": (200, UP, "worker a is down"),
        "ok; planned roles: a both": (200, UP, "planned roles: a both"),
        "it drains, to end": (503, "draining", "it drains, to end"),
        "no worker takes requests": (503, UNREADY, "no worker takes requests"),
    }
    for text, (status, state, notes) in cases.items():
        url = serve(metrics | {"/healthz": text_page(status, text)})
        for form in (url, f"{url}/", f"{url}/metrics"):
            (found,) = sampled(form)
            assert (found.state, found.trouble, found.held) == (state, notes, 2)


@pytest.mark.parametrize(
    "url",
    [
        *("", "nonsense", "127.0.0.1:9472", "ftp://127.0.0.1", "http://", "http://[::1"),
        *("http://a b/", "http://127.0.0.1:99999", "http://" + "é" * 70, "http://.:1"),
    ],
)
def test_what_is_no_url_is_a_sentence_in_its_row(url: str) -> None:
    (found,) = sampled(url)
    assert (found.state, found.trouble) == (SILENT, NO_URL)


def test_what_is_no_router_is_a_sentence_in_its_row(serve: Serve) -> None:
    healthz = {"/healthz": text_page(200, "ok")}
    for text in ("kvstore_info 1\n", "", "<html>{{{", 'kvstore_router_info{version="1"\n'):
        (found,) = sampled(serve(healthz | {"/metrics": text_page(200, text)}))
        assert (found.state, found.trouble) == (SILENT, NO_ROUTER)
    (found,) = sampled(serve(healthz))
    assert found.trouble == "it answers 404 to /metrics: give the URL of --metrics"


def test_the_dead_and_the_silent_delay_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_routers, "ANSWER_S", 0.3)
    good = serve({"/metrics": text_page(200, FIRST), "/healthz": text_page(200, "ok")})
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = f"http://127.0.0.1:{gone.getsockname()[1]}"
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        silent = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        found = sampled(dead, silent, good)
    assert [each.state for each in found] == [SILENT, SILENT, UP]
    assert found[0].trouble.startswith("connection refused: is it running")
    assert found[1].trouble == LATE


def test_tls_with_an_unknown_ca_is_a_sentence(tmp_path: Path) -> None:
    files = Lab(tmp_path).files("client", "router")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            raw, _ = listening.accept()
            with raw, pytest.raises(OSError, match=r"(?i)alert|eof|reset"):
                context.wrap_socket(raw, server_side=True)

        thread = threading.Thread(target=answer)
        thread.start()
        (found,) = sampled(f"https://user:secret@127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
    assert found.trouble.startswith("its certificate is refused (")
    assert found.trouble.endswith("): give its CA with --router-ca")
    assert "secret" not in found.router


# ── the command ─────────────────────────────────────────────────────────────────────────────────

Typed = Callable[..., tuple[object, str, str]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Runs `kvstore top` over one short interval: exit status, what it printed, complained of."""

    def run(*arguments: str) -> tuple[object, str, str]:
        command = ["kvstore", "top", "--interval", "0.5", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def test_the_command_asks_no_node_that_was_not_named(serve: Serve, typed: Typed) -> None:
    notes = text_page(200, "ok, but worker a is down (/health: no answer in time)")
    url = serve({"/metrics": text_page(200, FIRST), "/healthz": notes})
    code, out, err = typed("--once", "--router", url, "--router", "nonsense")
    assert (code, err) == (0, "")
    assert "kvstore top 2 routers" in out
    name = url.removeprefix("http://")
    assert f"{name}: worker a is down (/health: no answer in time)" in out.splitlines()
    assert "node" not in out
    code, out, err = typed("--json", "--router", url)
    found = json.loads(out)
    assert (code, err, list(found)) == (0, "", ["routers"])
    assert set(found["routers"][0]) == set(RouterFigures.__struct_fields__)
    code, _, err = typed("--once", "--router", url, "--socket", "/none/node.sock")
    assert code == 1
    assert "/none/node.sock" in err


def test_the_command_fails_when_no_router_answered(typed: Typed, tmp_path: Path) -> None:
    code, out, err = typed("--once", "--router", "nonsense")
    assert (code, err) == (1, "")
    assert NO_URL in out
    (tmp_path / "ca").write_text("x")
    for ca in ("ca", "none"):
        code, out, err = typed("--once", "--router", "u", "--router-ca", str(tmp_path / ca))
        assert (code, out) == (2, "")
        assert "--router-ca" in err
        assert len(err.splitlines()) == 1


# ── the layout ──────────────────────────────────────────────────────────────────────────────────


LARGEST = RouterFigures(
    "a-router-with-a-long-name.example.com:9472",
    "draining",
    "worker a is down: " + "why " * 99,
    *(99_999.0, 99_999.0, 99_999, 99_999, 123.4, 123.4, 100.0, 100.0),
    *(999, 999, "99 load-only", 1.0, "no-workers", "p", 9999.0, 99),
)


def drawn(
    *figures: RouterFigures, width: int, height: int | None = None, nodes: int | None = None
) -> list[str]:
    """Each line; `nodes`: as many above the routers."""
    out = io.StringIO()
    above = None if nodes is None else [Figures(f"n{n}", UP, "exact") for n in range(nodes)]
    drawn = page_of(Seen(above, figures), "kvstore top", width=width, height=height)
    Console(file=out, width=width, highlight=False).print(drawn)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def test_everything_fits_eighty_columns_in_two_tables() -> None:
    lines = drawn(LARGEST, RouterFigures("b", SILENT, LATE), width=80)
    rows = [line.split() for line in lines if line.startswith("a-router-with-a-long…")]
    assert [len(row) for row in rows] == [12, 8], "its times have units"
    assert all("…" not in word for row in rows for word in row[1:])
    assert [line.split() for line in lines if line.startswith("b ")] == [
        ["b", SILENT, *"--------"],
        ["b", *"-----"],
    ]
    assert sum("why why" in line for line in lines) == 3, "of /healthz"
    assert lines[-1] == f"b: {LATE}"


@pytest.mark.parametrize("width", [WIDE_COLUMNS, 160, 240])
def test_a_wide_terminal_has_one_table(width: int) -> None:
    lines = drawn(LARGEST, width=width)
    assert sum(line.startswith("a-router-with-a-long…") for line in lines) == 1
    assert "…" not in lines[3][22:]


def test_more_routers_than_lines_say_so_and_terminals_obey_no_router() -> None:
    lines = drawn(*[LARGEST] * 30, width=80, height=16)
    assert 12 < len(lines) <= 16
    assert lines[-1] == "and 28 more: --json has all of them"
    text = "".join(drawn(RouterFigures("r\x1b[2J", SILENT, "a\x1bb"), width=80))
    assert "\x1b" not in text


def test_nodes_are_above_routers_and_neither_takes_all_lines() -> None:
    lines = drawn(LARGEST, width=80, height=24, nodes=30)
    assert len(lines) <= 24
    assert (lines[2].split()[0], lines[3].split()[0]) == ("node", "n0")
    assert "more: --json has all of them" in "".join(lines)
    assert "why why" in lines[-1]

"""`kvstore top`: states of processes, whoever is silent or lies, and what fits a terminal."""

from __future__ import annotations

import io
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvstore.cli import top
from kvstore.cli.ask import LATE, NO_STATE, tls_context
from kvstore.cli.main import main
from kvstore.cli.top import (
    COLUMNS,
    PAGES_MAX,
    Sampler,
    Seen,
    State,
    of_index,
    of_page,
    place_of,
    screen,
)
from kvstore.client.index import Members
from kvstore.config.values import HostPort
from kvstore.errors import AttachError, KVStoreError
from kvstore.index.feed import Trust
from kvstore.index.index import Member
from kvstore.net.http import HttpServer, Page, text_page
from kvstore.testing.process import Lab
from kvstore.types import Incarnation
from kvstore.wire.load import Load

NO_URL = "this is no URL, such as http://127.0.0.1:9472"
GIB = 1 << 30
TIER = {"tier": "dram", "used_bytes": 63 * GIB, "capacity_bytes": 64 * GIB, "blocks": 12345}
REQUEST = {"ended_ms_ago": 4000, "label": "m", "prompt_tokens": 200, "text": "not stored"}
WORKER = {"name": "a", "state": "up", "in_flight": 3, "cached_tokens": 5, "prompt_tokens": 10}
DECISION = {"ms_ago": 2000, "chosen": "a", "ttft_s": 0.25, "expected_tokens": 1000.0, "held_s": 0.0}
PREDICTION = {
    "prompt_tokens_total": 200,
    "cached_tokens_total": 150,
    "predicted_tokens_total": 100,
    "ttft_p50_ms": {"achieved": 12.5, "predicted": 10.0},
}


def state_of(**sections: Any) -> State:
    """A node's, but for these."""
    head = {"role": "node", "name": "n1", "at_ms": 1000, "facts": {"engines": 1}, "totals": {}}
    return {**head, "health": {"is_ok": True, "text": "ok"}, "flows": {}, **sections}


NODE = state_of(
    tiers=[TIER | {"slots_quarantined": 3}, TIER | {"tier": "file", "capacity_bytes": 0}],
    hits={"dram": 75, "file": 0},
    misses={"other": 5, "evicted": 20},
    flows={"stored_bytes": 2 * GIB, "evictions": 0},
    requests=[REQUEST] * 50,
    transfers=[{"kind": "fetch", "p50_us": 12_300, "bytes_per_s": 1 << 20}],
)
ROUTER = state_of(
    role="router",
    name="",
    prediction=PREDICTION,
    pools=[{"pool": "p", "saturation": 0.75, "cause": "memory"}],
    workers=[WORKER, WORKER | {"name": "b", "state": "down", "prompt_tokens": 0}],
    decisions=[DECISION],
    totals={"workers": 1000, "decisions": 1},
)


def sampler(*answers: State | KVStoreError) -> Sampler:
    """Of one process, with these answers one after the other."""
    left = list(answers)

    def ask() -> State:
        answer = left.pop(0)
        if isinstance(answer, KVStoreError):
            raise answer
        return answer

    return Sampler({"here": ask})


def drawn(*seen: Seen, width: int, height: int | None = None) -> list[str]:
    """Each line, without gaps between words."""
    out = io.StringIO()
    made = screen(seen, "kvstore top", width=width, height=height)
    Console(file=out, width=width, highlight=False).print(made)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return [" ".join(line.split()) for line in lines]


# ── samples ──────────────────────────────────────────────────────────────────────────────────────


def test_rates_are_of_what_was_counted_between_two_states() -> None:
    first, later = state_of(flows={"x": 5}), state_of(at_ms=3000, flows={"x": 9, "new": 7})
    again = state_of(at_ms=4000, flows={"x": 2, "new": 8})
    tops = sampler(first, later, later, again, first)
    rates = [dict(seen.rates) for _ in range(5) for seen in tops.take()]
    same = {"x": 2.0, "new": 0.0}
    assert rates == [{}, same, same, {"x": 0.0, "new": 1.0}, {}], "the last is another machine"
    tops.close()


def test_without_an_answer_the_last_state_stays_and_says_so() -> None:
    tops = sampler(AttachError("nobody"), NODE, AttachError("nobody"), NODE | {"at_ms": 2000})
    nothing, good, old, back = (seen for _ in range(4) for seen in tops.take())
    assert nothing == Seen("here", None, {}, "nobody")
    assert (good.state, good.trouble) == (NODE, "")
    assert old == good._replace(trouble="nobody")
    assert (back.trouble, back.rates["stored_bytes"]) == ("", 0.0)
    assert drawn(nothing, width=80)[1:] == ["here: nobody"]
    assert drawn(old, width=80)[1:4] == [
        "kvstore node n1 at here",
        "shown as it was: nobody",
        "ok",
    ]
    tops.close()


HEADS = ("at_ms", "role", "health", "facts", "flows", "totals")
WRONG: list[Any] = ["text", [7], [[]], 5]
LIES: list[dict[str, Any]] = [
    {},
    *({name: list[int]()} for name in HEADS),
    *({name: lie} for name in COLUMNS for lie in WRONG),
    {"flows": {"x": "y"}},
    {"flows": {"x": 10**999}},
    {"workers": [WORKER | {"prompt_tokens": "many"}]},
    {"requests": [REQUEST | {"ended_ms_ago": [1]}]},
    {"decisions": [DECISION | {"ttft_s": 1e308}]},
    {"hits": {"dram": "many"}, "misses": {}},
    {"prediction": {"prompt_tokens_total": 1}},
]


@pytest.mark.parametrize("lie", LIES)
def test_a_state_that_is_none_is_a_sentence(lie: dict[str, Any]) -> None:
    tops = sampler(NODE | ROUTER | lie if lie else lie)
    (seen,) = tops.take()
    if seen.trouble:
        assert (seen.state, seen.trouble) == (None, NO_STATE)
    assert drawn(seen, width=80)
    tops.close()


def test_nodes_of_an_index_have_sums_and_its_trust() -> None:
    def nodes(trust: Trust) -> State:
        loads = [Load(stored_bytes=5, blocks_hit=2), None, Load(stored_bytes=7)]
        members = [
            Member(f"n{at}", Incarnation(1), "h:1", None if at else Trust.EXACT, 5, load)
            for at, load in enumerate(loads)
        ]
        client: Any = SimpleNamespace(nodes=lambda **_: Members(trust, members))
        return of_index(client)

    state = nodes(Trust.EXACT)
    assert (state["flows"]["stored_bytes"], state["flows"]["blocks_hit"]) == (12, 2)
    assert [(row["node"], row["trust"]) for row in state["nodes"]] == [
        *(("n1", "out"), ("n2", "out"), ("n0", "exact")),
    ]
    assert nodes(Trust.STALE)["health"] == {"is_ok": False, "text": "the index is stale"}
    assert nodes(Trust.CATCHING_UP)["health"]["text"].startswith("ok, but catching-up")


def test_an_estimate_of_prompt_tokens_is_marked() -> None:
    estimated = DECISION | {"prompt_tokens": 619, "cached_tokens": 2176}
    rows = [estimated | {"prompt_is_estimated": is_so} for is_so in (True, False)]
    text = " ".join(drawn(Seen("here", ROUTER | {"decisions": rows}, {}, ""), width=160))
    assert "a ≈ 619 2176" in text
    assert "a 619 2176" in text


# ── pages ────────────────────────────────────────────────────────────────────────────────────────

Serve = Callable[[Page], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a /state.json; its URL."""
    servers: list[HttpServer] = []

    def serving(page: Page) -> str:
        servers.append(
            HttpServer(HostPort(host="127.0.0.1", port=0), {"/state.json": lambda: page})
        )
        servers[-1].start()
        return servers[-1].url

    yield serving
    for each in servers:
        each.close()


def json_page(state: object) -> Page:
    return Page(200, "application/json", json.dumps(state).encode())


CONTEXT = tls_context({"--page-ca": None})


def asked(url: str) -> State:
    return of_page(url, CONTEXT)


def why(url: str) -> str:
    with pytest.raises(AttachError) as caught:
        asked(url)
    return str(caught.value)


def test_a_page_is_read_by_any_of_its_urls(serve: Serve) -> None:
    url = serve(json_page(ROUTER))
    for form in (url, f"{url}/", f"{url}/metrics"):
        assert asked(form) == ROUTER


@pytest.mark.parametrize(
    "url",
    [
        *("", "nonsense", "127.0.0.1:9472", "ftp://127.0.0.1", "http://", "http://[::1"),
        *("http://a b/", "http://127.0.0.1:99999", "http://" + "é" * 70, "http://.:1"),
    ],
)
def test_what_is_no_url_is_a_sentence(url: str) -> None:
    assert why(url) == NO_URL


def test_what_is_no_page_of_kvstore_is_a_sentence(serve: Serve) -> None:
    for text in ("", "7", "[]", "<html>{{{", '{"role"', "[" * 99_999):
        assert why(serve(Page(200, "", text.encode()))) == NO_STATE
    busy = "the node is busy: ask again later"
    assert why(serve(text_page(503, busy))) == busy
    found = why(serve(text_page(404, "no")))
    assert found == "it answers 404 to /state.json: give the URL of --metrics"


def test_the_dead_and_the_silent_delay_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "ANSWER_S", 1.5)
    good = serve(json_page(NODE))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = f"http://127.0.0.1:{gone.getsockname()[1]}"
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        silent = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        waits = threading.Event()
        sources: dict[str, Any] = {url: lambda url=url: asked(url) for url in (dead, silent, good)}
        tops = Sampler(sources | {"for ever": lambda: waits.wait(60) and NODE})
        found = tops.take()
    assert [each.state for each in found] == [None, None, NODE, None]
    assert found[0].trouble.startswith("connection refused: is it running")
    assert [found[1].trouble, found[3].trouble] == [LATE, LATE]
    waits.set()
    tops.close()


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
        url = f"https://user:secret@127.0.0.1:{listening.getsockname()[1]}"
        found = why(url)
        thread.join()
    assert found.startswith("its certificate is refused (")
    assert found.endswith("): give its CA with --page-ca")
    assert "secret" not in place_of(url)


# ── the command ──────────────────────────────────────────────────────────────────────────────────

Typed = Callable[..., tuple[object, str, str]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Runs `kvstore top` over one short interval: exit status, what it printed, complained of."""
    monkeypatch.setattr(top, "PERIOD_S", 0.5)

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
    url = serve(json_page(ROUTER))
    place = url.removeprefix("http://")
    code, out, err = typed("--once", "--router", url, "--page", "nonsense")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"kvstore router at {place}"
    assert out.splitlines()[-1] == f"nonsense: {NO_URL}"
    code, out, err = typed("--json", "--page", url)
    (found,) = json.loads(out)["processes"]
    assert (code, err) == (0, "")
    assert found == {"place": place, "state": ROUTER, "rates": {}, "trouble": ""}
    code, _, err = typed("--once", "--page", url, "--socket", "/none/node.sock")
    assert code == 1
    assert "/none/node.sock" in err


def test_the_command_fails_when_nobody_answered(typed: Typed, tmp_path: Path) -> None:
    code, out, err = typed("--once", "--page", "nonsense")
    assert (code, err) == (1, "")
    assert NO_URL in out
    (tmp_path / "ca").write_text("x")
    for ca in ("ca", "none"):
        code, out, err = typed("--once", "--page", "u", "--page-ca", str(tmp_path / ca))
        assert (code, out) == (2, "")
        assert "--page-ca" in err
        assert len(err.splitlines()) == 1
    many = [text for at in range(PAGES_MAX + 1) for text in ("--page", str(at))]
    code, _, err = typed("--once", *many)
    assert (code, "65 times: 64 at most" in err) == (2, True)


# ── the layout ───────────────────────────────────────────────────────────────────────────────────


def test_a_wide_terminal_has_all_sections_and_fields() -> None:
    lines = drawn(Seen("s", NODE, {"stored_bytes": float(GIB)}), width=240)
    assert lines[1:4] == ["kvstore node n1 at s", "ok", "engines 1"]
    assert "dram 63 GiB 64 GiB 98.4 % 12345 3 - - -" in lines
    assert not any(line.startswith("file ") for line in lines), "this node has none"
    at = lines.index("source blocks share")
    assert lines[at + 1 : at + 4] == [
        "hit: dram 75 75.0 %",
        *("missed: evicted 20 20.0 %", "missed: other 5 5.0 %"),
    ]
    at = lines.index("flow now total")
    assert lines[at + 1] == "stored 1 GiB/s 2 GiB"
    assert lines[at + 2].startswith("part "), "no evictions: no line"
    assert "fetch - - 12.3 ms - 1 MiB" in lines
    header = "ended ago (20 of 50) model prompt tokens loaded tokens lookup promotion load outcome"
    assert f"{header} tenant engine" in lines
    lines = drawn(Seen("r", ROUTER), width=240)
    assert lines[1] == "kvstore router at r"
    assert "200 75.0 % 50.0 % 12.5 ms 10.0 ms" in lines
    assert "p 75.0 % memory" in lines
    assert "worker (2 of 1000) state in flight" in " ".join(lines)
    assert "b down 3 - - - - - - -" in lines
    assert any(line.startswith("2.0 s a - - 1,000 250 ms - 0.0 ms") for line in lines)


def test_what_was_not_measured_yet_is_no_time() -> None:
    none = PREDICTION | {"ttft_p50_ms": {"achieved": None, "predicted": None}}
    lines = drawn(Seen("r", ROUTER | {"prediction": none}), width=240)
    at = lines.index("prompt tokens cached predicted TTFT predicted TTFT")
    assert lines[at + 1] == "200 75.0 % 50.0 % - -"


def test_a_breaker_is_named_and_is_of_a_disk_only() -> None:
    dram = TIER | {"reads": "closed", "writes": "closed", "policy": "lru"}
    file = dram | {"tier": "file", "writes": "open"}
    lines = drawn(Seen("s", NODE | {"tiers": [dram, file]}), width=240)
    assert "dram 63 GiB 64 GiB 98.4 % 12345 - - - lru" in lines
    assert "file 63 GiB 64 GiB 98.4 % 12345 - breaker ok breaker off: errors lru" in lines


def test_columns_that_do_not_fit_are_left_out() -> None:
    rows = {line for line in drawn(Seen("s", NODE), width=60) if line.startswith("4.0 s")}
    assert rows == {"4.0 s m 200 -"}
    long = NODE | {"tiers": [TIER | {"tier": "x" * 99}]}
    assert "…" in "".join(drawn(Seen("s", long), width=30))


@pytest.mark.parametrize("height", [8, 16, 24, 60])
def test_rows_are_as_many_as_fit_the_lines(height: int) -> None:
    lines = drawn(Seen("s", NODE), Seen("r", ROUTER), width=80, height=height)
    assert len(lines) <= height
    heads = [line for line in lines if line.startswith("kvstore ")]
    assert heads == ["kvstore top", "kvstore node n1 at s", "kvstore router at r"]
    assert any(line.startswith("ended ago") for line in lines) == (height > 24)
    assert sum(line.startswith("4.0 s") for line in lines) == (20 if height == 60 else 0)


def test_terminals_obey_no_other_process() -> None:
    evil = "a\x1b[2Jb\r\n"
    texts = {"name": evil, "health": {"is_ok": False, "text": evil}, "facts": {evil: evil}}
    rows = {"requests": [REQUEST | {"label": evil, "text": evil}], "flows": {evil: 1}}
    workers = [WORKER | {"state": evil, "name": evil}]
    seen = Seen(evil, NODE | texts | rows | {"workers": workers}, {}, evil)
    out = io.StringIO()
    Console(file=out, width=200).print(screen([seen, Seen(evil, None, {}, evil)], evil, width=200))
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert "a?[2Jb" in out.getvalue()

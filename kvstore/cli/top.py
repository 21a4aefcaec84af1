"""`kvstore top`: states of processes, the same that their pages show, sampled again and again.

    a node's socket ── gRPC ─┐
    the index ──────── gRPC ─┼▶ Sampler (the state before) ─▶ Seen per process, with rates ─▶ screen
    /state.json ────── HTTP ─┘

All processes are asked at once, each for ANSWER_S at most: one that is silent, or has no such page,
is one sentence, below which its last state stays. Nodes publish their loads to the index, so its
state has a row for each node and the sums of all. The terminal is drawn again and again, and left
as it was: every end (q, ctrl-C, SIGTERM, SIGHUP, an error) restores the previous screen and the
settings of the keyboard.

For each process are shown its health, its facts, and a table a section. Sections and figures are
those of the page (`kvstore/net/site/app.js`), of which a terminal has less room: the last columns
that do not fit are left out, and rows beyond the lines.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import ssl
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvstore.cli.ask import (
    LATE,
    NO_STATE,
    STATE_TIMEOUT_S,
    Site,
    decode_state,
    index_client,
    node_client,
    tls_context,
)
from kvstore.cli.commands import as_json
from kvstore.cli.look_commands import TopSettings
from kvstore.cli.tables import (
    NOT_OF,
    WIDE_COLUMNS,
    TableColumn,
    cell,
    console,
    number,
    table,
    title_of,
)
from kvstore.config.defaults import DEFAULT_ROUTER_METRICS
from kvstore.errors import AttachError, ConfigError, KVStoreError
from kvstore.index.feed import Trust
from kvstore.net.site import PERIOD_S
from kvstore.proto.rows import INDEX_IS_STALE, member_rows
from kvstore.units import MS_PER_S, short
from kvstore.wording import printable

if TYPE_CHECKING:
    from kvstore.client.index import IndexClient

ROWS_PRINTED: Final = 20
"""Most rows of a table where lines are not limited."""
TEXT_MAX: Final = 60
COLUMNS: Final = {
    "unserved": "engine, reason",
    "tiers": "tier, used_bytes, capacity_bytes, share=used_bytes/capacity_bytes, blocks,"
    " slots_quarantined, reads, writes, policy",
    "hits": "source, blocks, share=blocks/whole",
    "flows": "flow, now, total",
    "savings": "model, tier, saved_ms, waited=spent_ms, net_gpu_ms, tenant",
    "prediction": "prompt tokens=prompt_tokens_total,"
    " cached=cached_tokens_total/prompt_tokens_total,"
    " predicted=predicted_tokens_total/prompt_tokens_total, TTFT=achieved_ms,"
    " predicted TTFT=predicted_ms",
    "pools": "pool, saturation=saturation/1, cause",
    "transfers": "part=kind, backend, count, p50_us, p99_us, bytes_per_s",
    "workers": "worker=name, state, in_flight, request_count, failure_count,"
    " cached=cached_tokens/prompt_tokens, predicted=predicted_tokens/prompt_tokens, pool, role,"
    " why",
    "nodes": "node, trust, dram_used_bytes, dram_bytes, file_used_bytes, file_bytes,"
    " hits=blocks_hit/blocks_hit+blocks_missed, engines, saved_ms, waited_ms, models, address",
    "requests": "ended_ms_ago, model=label, prompt_tokens, loaded_tokens, lookup_us, promotion_us,"
    " load_us, outcome=text, tenant, engine=engine_id",
    "decisions": "decided=ms_ago, worker=chosen, prompt_tokens, cached_tokens, expected_tokens,"
    " ttft_s, predicted_s, held_s, end, model, tenant",
}
"""Section → fields, the most important first. `title=field` gives a title; `a/b` is a share of
field b, or of a sum `b+c`.
"""
_GOOD: Final = {"state": "up", "trust": "exact"}
ANSWER_S: Final = 2.0
_SUMMED: Final = (
    *("stored_bytes", "leased_bytes", "fetched_bytes", "served_bytes"),
    *("blocks_hit", "blocks_missed", "saved_ms", "waited_ms"),
)
"""Fields of the nodes' loads that are summed for the index."""
_HEALTH: Final = {Trust.EXACT: "ok", Trust.STALE: INDEX_IS_STALE}
PAGES_MAX: Final = 64
"""Most pages that can be shown: each is asked by a thread of its own."""
KEYS_MAX: Final = 64
QUITS: Final = frozenset(b"qQ")
_CA: Final = "give its CA with --page-ca"

State = dict[str, Any]
"""Sections of a /state.json (`kvstore.net.site`)."""
Rows = list[dict[str, Any]]
Source = Callable[[], State]
"""Returns the state of a process now. Raises KVStoreError."""


class Seen(NamedTuple):
    """A process, with its last state."""

    place: str
    """Its socket or address."""
    state: State | None = None
    """Last state; None: it has not answered yet."""
    rates: Mapping[str, float] = {}
    """Flow → change per second between the last two states."""
    trouble: str = ""
    """Reason for no answer now; empty: it has answered."""


def of_socket(socket: Path) -> State:
    """State of the node at a socket. Raises AttachError."""
    with node_client(socket) as client:
        return client.state()


def of_index(client: IndexClient) -> State:
    """State of an index: the nodes that it knows, and the sums of their loads. Raises
    IndexUnavailable.
    """
    trust, nodes = client.nodes(engines=True, timeout_s=STATE_TIMEOUT_S)
    text = _HEALTH.get(trust, f"ok, but {trust.word}: there may be more nodes")
    loads = [node.load for node in nodes if node.load is not None]
    return {
        "role": "index",
        "at_ms": int(time.monotonic() * MS_PER_S),
        "health": {"is_ok": trust is not Trust.STALE, "text": text},
        "facts": {"nodes": len(nodes)},
        "flows": {name: sum(getattr(load, name) for load in loads) for name in _SUMMED},
        "nodes": member_rows(nodes, trust),
        "totals": {"nodes": len(nodes)},
    }


def of_page(url: str, context: ssl.SSLContext) -> State:
    """State of the process whose page is at this URL. Raises AttachError."""
    site = Site(url, context, DEFAULT_ROUTER_METRICS, "--metrics", _CA, _CA)
    status, content = site.ask("/state.json", timeout_s=ANSWER_S)
    if status == http.client.SERVICE_UNAVAILABLE:
        raise AttachError(content.decode("utf-8", "replace").strip())
    if status != http.client.OK:
        raise AttachError(f"it answers {status} to /state.json: give the URL of --metrics")
    return decode_state(content)


class Sampler:
    """Takes samples of several processes, by place. Close it."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._threads = ThreadPoolExecutor(max(1, len(sources)), thread_name_prefix="top")
        self._asked: dict[str, Future[State]] = {}
        """Place → its call under way. A call may outlast several samples: a name server may be
        slow.
        """
        self.seen = {place: Seen(place) for place in sources}

    def take(self) -> list[Seen]:
        """Ask all processes. Returns the state of each, or its last one if it did not answer in
        ANSWER_S.
        """
        for place, source in self._sources.items():
            if place not in self._asked:
                self._asked[place] = self._threads.submit(source)
        wait(self._asked.values(), timeout=ANSWER_S)
        for place, before in self.seen.items():
            ended = self._asked[place].done()
            self.seen[place] = _after(before, self._asked.pop(place) if ended else None)
        return list(self.seen.values())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _after(before: Seen, answer: Future[State] | None) -> Seen:
    if answer is None:
        return before._replace(rates={}, trouble=LATE)
    try:
        state = answer.result()
        now = Seen(before.place, state, _rates(before, state))
        screen([now], width=WIDE_COLUMNS)
    except KVStoreError as error:
        return before._replace(rates={}, trouble=str(error))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return before._replace(rates={}, trouble=NO_STATE)
    return now


def _rates(before: Seen, state: State) -> Mapping[str, float]:
    """Changes of the flows per second, between two states; empty after a restart or a
    first answer.
    """
    last = before.state or state
    elapsed_s = (state["at_ms"] - last["at_ms"]) / MS_PER_S
    if elapsed_s <= 0:  # pages are made once a second at most
        return before.rates if elapsed_s == 0 else {}
    olds = ((name, total, last["flows"].get(name, total)) for name, total in state["flows"].items())
    return {name: max(0, total - old) / elapsed_s for name, total, old in olds}


def place_of(url: str) -> str:
    """HOST:PORT of a URL, without user and password; else the whole text."""
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2] or url


def watch(asked: TopSettings, *, has_node: bool) -> None:
    """Print the states of processes, once or until `q`. `has_node`: whether the node at the
    socket is one of them; with --index the index is asked instead.
    """
    if len(urls := dict.fromkeys(asked.page)) > PAGES_MAX:
        raise ConfigError(f"--page was given {len(urls)} times: {PAGES_MAX} at most")
    context, sources = tls_context({"--page-ca": asked.page_ca}), dict[str, Source]()
    is_once, interval = asked.once or asked.json, asked.interval
    with contextlib.ExitStack() as stack:
        if asked.index:
            client = stack.enter_context(index_client(asked))
            sources[", ".join(asked.index)] = partial(of_index, client)
        elif has_node:
            sources[str(asked.socket)] = partial(of_socket, asked.socket)
        if is_once or not asked.index:  # what was never there is not silent, it is a wrong flag
            for ask in sources.values():
                ask()
        sources |= {place_of(url): partial(of_page, url, context) for url in urls}
        sampler = stack.enter_context(contextlib.closing(Sampler(sources)))
        if not is_once:
            _draw(sampler, interval_s=interval)
            return
        sampler.take()
        threading.Event().wait(max(interval, PERIOD_S))
        seen = sampler.take()
    if asked.json:
        click.echo(as_json(processes=[each._asdict() for each in seen]))
    else:
        out = console()
        out.print(screen(seen, width=out.width))
    if all(each.state is None for each in seen):
        sys.exit(1)


def _draw(sampler: Sampler, *, interval_s: float) -> None:
    """Draw samples until a key or a signal ends it."""
    out, head = console(), f"kvstore top, every {interval_s:g} s, q leaves"
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _leave)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keyboard(sys.stdin.fileno()) as quits,
        Live(console=out, screen=True, auto_refresh=False) as live,
    ):
        while True:
            seen = sampler.take()
            live.update(screen(seen, head, width=out.width, height=out.height), refresh=True)
            if quits(interval_s):
                return


def _leave(number: int, _: object) -> None:
    """Handler of SIGTERM and SIGHUP: SystemExit, so that the terminal is restored."""
    sys.exit(128 + number)


@contextlib.contextmanager
def _keyboard(fd: int) -> Iterator[Callable[[float], bool]]:
    """Context with a function that waits for up to so many seconds, and returns whether a quit key
    was pressed. Keys are not shown.
    """
    is_terminal = os.isatty(fd)

    def has_quit(seconds: float) -> bool:
        ready, _, _ = select.select([fd] if is_terminal else [], [], [], seconds)
        keys = os.read(fd, KEYS_MAX) if ready else b"-"
        return not keys or bool(QUITS & set(keys))

    with contextlib.ExitStack() as restored:
        if is_terminal:
            restored.callback(termios.tcsetattr, fd, termios.TCSADRAIN, termios.tcgetattr(fd))
            tty.setcbreak(fd)
        yield has_quit


# ── layout ────────────────────────────────────────────────────────────────────────────────────────
# Pure: states in, something to print out.


def screen(
    seen: Sequence[Seen], head: str = "", *, width: int, height: int | None = None
) -> RenderableType:
    """Output for all processes, with as many rows as fit `height` lines; None: ROWS_PRINTED per
    table.

    Raises LookupError, TypeError, ValueError, AttributeError, ArithmeticError: a state is invalid.
    """
    sections = [_sections(each) for each in seen]
    lengths = [len(rows) for its in sections for rows in its.values()]
    heads = [[_line(text, width, style) for text, style in _head(each)] for each in seen]
    parts: list[RenderableType] = [_line(head, width, "bold")] if head else []
    most, free = ROWS_PRINTED, (height or 0) - len(parts) - sum(map(len, heads))
    while height and most and sum(1 + min(most, length) for length in lengths) > free:
        most -= 1
    for each, its, found in zip(seen, heads, sections, strict=True):
        parts += its
        for name, rows in found.items() if most else ():
            total = max(len(rows), (each.state or {})["totals"].get(name, 0))
            parts.append(_table(COLUMNS[name], rows[:most], total, width))
    return Group(*parts)


def _head(seen: Seen) -> list[tuple[str, str]]:
    """(text, style) of the lines above a process's tables: role, reason for an old state, health,
    facts.
    """
    state = seen.state
    if state is None:
        return [(f"{seen.place}: {seen.trouble}", "yellow")]
    health, role = state["health"], f"kvstore {state['role']} {state.get('name', '')}".rstrip()
    style = "green" if health["text"] == "ok" else "yellow" if health["is_ok"] else "red"
    facts = " · ".join(f"{name} {value}" for name, value in state["facts"].items())
    late = [(f"shown as it was: {seen.trouble}", "yellow")] if seen.trouble else []
    return [(f"{role} at {seen.place}", "bold"), *late, (health["text"], style), (facts, "")]


def _sections(seen: Seen) -> dict[str, Rows]:
    """Section → rows, for each section that has some."""
    made = dict(seen.state or {})
    made["tiers"] = [
        {name: value for name, value in row.items() if name not in NOT_OF.get(row["tier"], ())}
        for row in made.get("tiers", ())
        if row["capacity_bytes"]
    ]
    if "hits" in made:
        counts = {f"hit: {tier}": count for tier, count in made["hits"].items()}
        often = sorted(made["misses"].items(), key=lambda each: -each[1])
        counts |= {f"missed: {why}": count for why, count in often}
        row = {"whole": sum(counts.values())}
        made["hits"] = [
            row | {"source": k, "blocks": count} for k, count in counts.items() if count
        ]
    if its := made.get("prediction"):
        ttfts = {f"{kind}_ms": value for kind, value in its["ttft_p50_ms"].items()}
        made["prediction"] = [its | ttfts] if its["prompt_tokens_total"] else []
    flows, rates = made.get("flows", {}), seen.rates
    made["flows"] = [
        {
            "flow": title_of(name),
            "now": f"{cell(name, rates)}/s" if name in rates else "…",
            "total": cell(name, flows),
        }
        for name, total in flows.items()
        if total
    ]
    return {name: rows for name in COLUMNS if (rows := made.get(name))}


def _table(fields: str, rows: Rows, total: int, width: int) -> Table:
    """Table of rows, with as many of the columns as fit `width`. `total`: number of rows
    there are.
    """
    columns = list[TableColumn]()
    for each in fields.split(", "):
        title, _, field = each.rpartition("=")
        kind = TableColumn if any(isinstance(row.get(field), str) for row in rows) else number
        columns.append(kind(title or title_of(field), partial(_cell, field)))
    if total > len(rows):
        columns[0] = columns[0]._replace(title=f"{columns[0].title} ({len(rows)} of {total})")
    out = Console(width=10 * width)
    while True:
        made = table(columns, rows, is_cut=True)
        if len(columns) == 1 or Measurement.get(out, out.options, made).maximum <= width:
            return made
        columns.pop()


def _cell(field: str, row: dict[str, Any]) -> Text | str | None:
    part, _, whole = field.partition("/")
    value = row.get(part)
    if part == "prompt_tokens" and row.get("prompt_is_estimated") and not whole:
        return f"≈ {cell(part, row)}"
    if whole:
        sums = [1 if name == "1" else row[name] or 0 for name in whole.split("+")]
        return f"{short(100 * value / sum(sums))} %" if value is not None and any(sums) else None
    if part in _GOOD and value:
        return Text(printable(value), "green" if value == _GOOD[part] else "yellow")
    shown = cell(part, row)
    return shown[:TEXT_MAX] if isinstance(shown, str) else shown


def _line(text: str, width: int, style: str = "") -> Text:
    """The text as one line, cut to `width`."""
    line = Text(printable(text), style)
    line.truncate(width, overflow="ellipsis")
    return line

"""The work of `kvstore top` after its flags are read: one sample printed, or a terminal.

The terminal is drawn again and again, and left as it was.
Every end (q, ctrl-C, SIGTERM, SIGHUP, an error) restores the previous screen and the settings of
the keyboard. Does not cover: figures (`top`, `top_routers`), layout (`top_view`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click
from rich.live import Live

from kvstore.cli.ask import index_client
from kvstore.cli.commands import as_json
from kvstore.cli.tables import console
from kvstore.cli.top import SILENT, Source, Tally, node_figures, of_index, of_socket
from kvstore.cli.top_routers import RouterPages, router_figures
from kvstore.cli.top_view import Seen, page
from kvstore.config.settings import AskSettings
from kvstore.errors import KVStoreError

KEYS_MAX: Final = 64
QUITS: Final = frozenset(b"qQ")
WAITS: Final = 3
"""Nodes publish their load every two seconds; the interval between samples may be shorter."""


class Sampler:
    """Samples of nodes, if there is a source of them, and of routers."""

    def __init__(self, source: Source | None, pages: RouterPages) -> None:
        self._source, self._pages = source, pages
        self._nodes, self._routers = Tally(node_figures), Tally(router_figures)

    def take(self, *, keeps: bool = False) -> Seen:
        """Figures now. `keeps`: without an answer the nodes are the last ones, as silent, instead
        of a KVStoreError."""
        nodes, trouble = None, ""
        if self._source is not None:
            try:
                samples, trouble = self._source()
            except KVStoreError as error:
                if not keeps:
                    raise
                last, trouble = self._nodes.last, str(error)
                samples = {name: last[name][0]._replace(state=SILENT) for name in last}
            nodes = self._nodes.take(samples)
        return Seen(nodes, self._routers.take(self._pages.sample()), trouble)

    def take_rates(self, wait: Callable[[float], object], *, interval_s: float) -> Seen:
        """Figures with rates, as soon as there are some: two samples, at most WAITS intervals
        apart. Raises KVStoreError."""
        seen = self.take()
        for _ in range(WAITS):
            wait(interval_s)
            seen = self.take()
            if all(each.has_rates for each in seen.nodes or ()):
                break
        return seen


def watch_load(
    socket: Path | None,
    *,
    asked: AskSettings | None,
    routers: Sequence[str],
    router_ca: Path | None,
    interval: float,
    once: bool,
    json_: bool,
) -> None:
    """Load of nodes and of routers, once or until q. `asked` None: the node at `socket`, if any."""
    source: Source | None = functools.partial(of_socket, socket) if socket is not None else None
    names = [f"at {socket}"] if socket is not None else []
    with contextlib.ExitStack() as stack:
        if asked is not None:
            source = functools.partial(of_index, stack.enter_context(index_client(asked)))
            names = [f"by the index {', '.join(asked.index or [])}"]
        pages = stack.enter_context(contextlib.closing(RouterPages(routers, router_ca)))
        if count := len(pages.urls):
            names.append(f"{count} router{'s' if count > 1 else ''}")
        sampler, head = Sampler(source, pages), f"kvstore top {' and '.join(names)}"
        if not once:
            if source is not None and asked is None:
                source()  # what was never there is not silent, it is a wrong flag
            _watch(sampler, f"{head}, every {interval:g} s, q leaves", interval_s=interval)
            return
        seen = sampler.take_rates(threading.Event().wait, interval_s=interval)
    if json_:
        found = {"nodes": seen.nodes, "trouble": seen.trouble} if source is not None else {}
        click.echo(as_json(**found, **({"routers": seen.routers} if routers else {})))
    else:
        out = console()
        out.print(page(seen, head, width=out.width))
    if source is None and all(each.state == SILENT for each in seen.routers):
        sys.exit(1)


def _watch(sampler: Sampler, head: str, *, interval_s: float) -> None:
    """Draw until a key or a signal ends it."""
    out = console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _ends_in_order(),
        _keyboard(sys.stdin.fileno()) as quits,
        Live(console=out, screen=True, auto_refresh=False) as live,
    ):
        while True:
            seen = sampler.take(keeps=True)
            live.update(page(seen, head, width=out.width, height=out.height), refresh=True)
            if quits(interval_s):
                return


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """Signals that would end the program at once end it by an exception."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _keyboard(fd: int) -> Iterator[Callable[[float], bool]]:
    """Waits so many seconds for a key that quits: True, there was one. Keys are not shown."""
    if not os.isatty(fd):
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])
        return
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda seconds: _has_quit(fd, seconds)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _has_quit(fd: int, seconds: float) -> bool:
    ready, _, _ = select.select([fd], [], [], seconds)
    keys = os.read(fd, KEYS_MAX) if ready else b"-"
    return not keys or bool(QUITS & set(keys))

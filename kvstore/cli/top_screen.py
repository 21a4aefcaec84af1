"""The terminal of `kvstore top`: drawn again and again, and left as it was.

Every end (q, ctrl-C, SIGTERM, SIGHUP, an error) restores the previous screen and the settings of
the keyboard. Does not cover: contents (`top_view`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live

KEYS_MAX: Final = 64
QUITS: Final = frozenset(b"qQ")

Draw = Callable[[int, int], RenderableType]
"""Samples, and makes the contents of a terminal of this width and height."""


def watch(draw: Draw, console: Console, *, interval_s: float) -> None:
    """Draw until a key or a signal ends it."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        _ends_in_order(),
        _keyboard(sys.stdin.fileno()) as quits,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(draw(console.width, console.height), refresh=True)
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

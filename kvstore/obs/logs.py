"""Logging of the node: one line a record, on stderr, and never a flood; `say` is for stdout.

No prompt text, no tokens, and of a key at most 8 hex digits (`short`).
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

PERIOD_S: Final = 10.0
RECORDS_PER_PERIOD_MAX: Final = 20
TEMPLATE_COUNT_MAX: Final = 1000
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MESSAGE_CHARACTERS_MAX: Final = 500


class RateLimit(logging.Filter):
    """Lets through RECORDS_PER_PERIOD_MAX records of one message template per PERIOD_S.

    The first record of the next period says how many were dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record."""
        template = str(record.msg)
        now_s = time.monotonic()
        begin_s, count = self._seen.get(template, (now_s, 0))
        if now_s - begin_s >= PERIOD_S:
            if count > RECORDS_PER_PERIOD_MAX:
                dropped = count - RECORDS_PER_PERIOD_MAX
                record.msg = f"{template} ({dropped} like this were left out)"
            begin_s, count = now_s, 0
        if len(self._seen) >= TEMPLATE_COUNT_MAX:
            self._seen.clear()
        self._seen[template] = (begin_s, count + 1)
        return count < RECORDS_PER_PERIOD_MAX


class OneLine(logging.Formatter):
    """A record's message as one printable line: parts of it may come from a peer."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with everything but plain ASCII escaped."""
        text = record.message[:MESSAGE_CHARACTERS_MAX]
        record.message = text.encode("unicode_escape").decode("ascii")
        return super().formatMessage(record)


class Troubles(dict[str, str]):
    """Failures by name, with their reasons; as a text one sentence, empty if nothing fails."""

    def __init__(self, log: logging.Logger, sentence: str) -> None:
        """`sentence`: with `%s` for the name and for the reason."""
        super().__init__()
        self._log, self._sentence = log, sentence

    def note(self, name: str, why: str) -> None:
        """Keep why something fails, and log it if that is news; empty: it does not fail."""
        if not why:
            self.pop(name, None)
        elif self.get(name) != why:
            self[name] = why
            self._log.warning(self._sentence, name, why)

    def __str__(self) -> str:
        return "; ".join(self._sentence % each for each in sorted(self.items()))


def setup(level: str) -> None:
    """Send the log of kvstore to stderr at `level` and above."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(_FORMAT))
    handler.addFilter(RateLimit())
    root = logging.getLogger("kvstore")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def say(name: str, text: str) -> None:
    """Print a line of the log's form to stdout, whatever the level: that a program is ready.
    Scripts wait for it there, and containers merge both into one log.
    """
    record = logging.LogRecord(name, logging.INFO, "", 0, text, None, None)
    sys.stdout.write(logging.Formatter(_FORMAT).format(record) + "\n")
    sys.stdout.flush()


def short(key: bytes) -> str:
    """First 8 hex digits of a key or space: more is never shown."""
    return key[:4].hex()

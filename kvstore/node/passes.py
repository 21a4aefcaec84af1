"""Log lines of a scrub: bad blocks that it found, and now and then that all is well."""

from __future__ import annotations

import logging
import math
import time
from typing import Final

from kvstore.obs.logs import short
from kvstore.units import format_size

QUIET_S: Final = 3600
"""Passes that find nothing are logged once in that time."""

_log = logging.getLogger(__name__)


class PassLog:
    """One line a pass that found something, one an hour if none did. One thread."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._begun_s = time.monotonic()
        self._told_s = -math.inf
        self._blocks = self._bytes = self._bad = 0
        self._first_bad = b""

    def add(self, blocks: int, size_bytes: int, *, bad: int, bad_key: bytes, ended: bool) -> None:
        """Count verified blocks, of which `bad` were damaged, the first one `bad_key`; `ended`: the
        pass is over."""
        self._blocks += blocks
        self._bytes += size_bytes
        if bad and not self._bad:
            self._first_bad = bad_key
            _log.warning(
                "scrub of %s: block %s failed its checksum and is dropped; the pass continues",
                self._tier,
                short(bad_key),
            )
        self._bad += bad
        if ended:
            self._end()

    def _end(self) -> None:
        now_s = time.monotonic()
        took_s = now_s - self._begun_s
        what = (self._tier, self._blocks, format_size(self._bytes), took_s)
        if self._bad:
            _log.warning(
                "scrub of %s: a pass over %d blocks, %s, took %.0f s and dropped %d (first: %s);"
                " the kernel's log may report failing memory or a failing disk",
                *what,
                self._bad,
                short(self._first_bad),
            )
        elif self._blocks and now_s - self._told_s >= QUIET_S:
            _log.info("scrub of %s: a pass over %d blocks, %s, took %.0f s; no damage", *what)
            self._told_s = now_s
        self._begun_s = now_s
        self._blocks = self._bytes = self._bad = 0

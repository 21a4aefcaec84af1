"""The background scrub of this node's own segments: every record is verified, over and over.

    segments in order, from a random one on ─▶ records in order ─▶ pieces of PIECE_BYTES
                     before each piece: its share of the bandwidth has passed, nobody else wants the
                     disk, and the breaker is closed

The first pass begins when recovery knows all that is there, so that it is a pass over all of it. A
pass is not remembered across a restart; beginning anywhere serves as well, and a node that is
restarted often still reads everything in the long run. A bad record is reported as `FileGone` and
counted once; it stays on disk until its segment is reclaimed or fsck puts that aside, and the first
read after a restart reports it again. Each node scrubs its own records only.

Does not cover: how a record is verified (`contents.py`), how fast (`kvstore.tiers.file.config`).
"""

from __future__ import annotations

import errno
import secrets
from typing import Final

from kvstore.tier_events import FileGone, ReadFile, Scrubbed
from kvstore.tiers.file.catalog import Segment
from kvstore.tiers.file.config import PASS_PAUSE_S, ScrubRate
from kvstore.tiers.file.contents import SegmentFile, walk
from kvstore.tiers.file.disk import Pages, forget_cached
from kvstore.tiers.file.log_thread import LogThread
from kvstore.tiers.file.parts import FileJobs, Leaving, Parts
from kvstore.types import PAGE_BYTES, Tier
from kvstore.units import MIB
from kvstore.wire.record import BlockPage, record_pages
from kvstore.wire.segment import Table, place_of

PIECE_BYTES: Final = MIB
"""A load waits for no more than this of the scrub: half a millisecond of an NVMe disk."""
TELL_BYTES: Final = 64 * MIB
"""Bytes verified between two reports of progress."""
KNOWN_BAD_MAX: Final = 65_536
YIELD_S: Final = 0.2
"""How often a scrub that waits for others looks whether the breaker has closed."""


class Scrub:
    """Body of the scrubbing thread."""

    def __init__(
        self, rate: ScrubRate, parts: Parts, log: LogThread, reads: FileJobs[ReadFile]
    ) -> None:
        """Args:
        rate: how fast.
        parts: of the tier.
        log: knows the voids, the writes that wait or run, and whether recovery is over.
        reads: those that wait or run.
        """
        self._rate, self._log, self._leaving, self._reads = rate, log, parts.leaving, reads
        self._clock, self._catalog = parts.clock, parts.catalog
        self._outbox, self._health, self._lock = parts.outbox, parts.health, parts.lock
        self._direct = parts.directory.direct
        self._buffer = Pages(PIECE_BYTES).view
        self._known_bad: set[int] = set()
        self._blocks = 0
        self._bytes = 0

    def run(self) -> None:
        """Pass after pass until the tier is closed."""
        try:
            with self._lock:
                self._lock.wait_for(lambda: self._log.is_recovered or self._leaving.is_set())
            while True:
                self.run_pass()
                self._wait(PASS_PAUSE_S)
        except Leaving:
            return

    def run_pass(self) -> None:
        """Verify all records that are there now. Raises Leaving."""
        own = self._catalog.own()
        first = secrets.randbelow(len(own)) if own else 0
        for segment in own[first:] + own[:first]:
            if self._catalog.get(segment.number) is segment:
                self._scrub(segment)
        self._tell(pass_ended=True)

    def _scrub(self, segment: Segment) -> None:
        try:
            with self._catalog.reading(segment) as file:
                table = self._table(segment, file)
                alive = table.living(segment.number, self._log.writer.voids)
                rows = alive.nonzero()[0].tolist()
                walked = walk(file, table, self._buffer, rows=rows, before_read=self._take_turn)
                for page, block, good, error in walked:
                    if error is not None and not self._failed(error):
                        continue
                    self._verified(segment, file.fd, page, block, good=good)
                    if self._catalog.get(segment.number) is not segment:
                        return  # reclaimed meanwhile
        except FileNotFoundError:
            return
        except OSError as error:
            self._failed(error)

    def _table(self, segment: Segment, file: SegmentFile) -> Table:
        if (found := segment.found) is not None:
            return found.table()
        self._take_turn(PIECE_BYTES)
        return file.contents().table

    def _verified(
        self, segment: Segment, fd: int, page: int, block: BlockPage, *, good: bool
    ) -> None:
        size = record_pages(block.scope) * PAGE_BYTES
        if not self._direct:
            forget_cached(fd, page * PAGE_BYTES, size)
        self._blocks += 1
        self._bytes += size
        place = place_of(segment.number, page)
        is_news = not good and place not in self._known_bad
        if is_news and self._catalog.get(segment.number) is segment:
            if len(self._known_bad) < KNOWN_BAD_MAX:
                self._known_bad.add(place)
            packed = place.to_bytes(8, "little")
            self._outbox.put(FileGone(block.scope, block.key, packed, damaged=True))
            self._tell(bad_key=block.key)
        elif self._bytes >= TELL_BYTES:
            self._tell()

    def _tell(self, *, bad_key: bytes = b"", pass_ended: bool = False) -> None:
        done = Tier.FILE, self._blocks, self._bytes
        self._outbox.put(Scrubbed(*done, bad_key, pass_ended=pass_ended))
        self._blocks = self._bytes = 0

    def _failed(self, error: OSError) -> bool:
        """Count an error of the disk. Returns whether it is the record's fault (EIO)."""
        with self._lock:
            self._outbox.put(*self._health.failed_reading(self._clock.now_ns(), error))
        return error.errno == errno.EIO

    # ── turns ────────────────────────────────────────────────────────────────────────────────────

    def _take_turn(self, size_bytes: int) -> None:
        """Wait until `size_bytes` may be read, and nobody else wants the disk. Raises Leaving."""
        self._wait(self._rate.seconds(size_bytes, held_bytes=self._catalog.taken_bytes))
        with self._lock:
            while not self._leaving.is_set() and (
                self._reads or self._log.jobs or not self._health.is_well
            ):
                self._lock.wait(YIELD_S)
        if self._leaving.is_set():
            raise Leaving

    def _wait(self, seconds: float) -> None:
        if self._leaving.wait(seconds):
            raise Leaving

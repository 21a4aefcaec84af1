"""The disk tier at the loop: commands one way, events the other, and reports for an operator.

Both ends speak `kvstore.tier_events`; the operator's view of the tier is made from what passes.

A directory may be impossible to open when a later process of a node starts. The first start refuses
such a directory. A later process has memory that engines want, so it serves that: `LateTier`
refuses reads and writes as a disk that fails does, and tries the directory again until it opens.
Then the tier goes on where it is, and blocks cleared meanwhile are void in it.

Does not cover: what moves bytes (`kvstore.tiers.file`), what is decided
(`kvstore.engine.moves.files`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.breaker import BreakerState
from kvstore.errors import ConfigError
from kvstore.obs.logs import short
from kvstore.ports import FileStore
from kvstore.tier_events import (
    FileCommand,
    FileEvent,
    FileKnown,
    FileLate,
    FileRead,
    FileWritten,
    ReadFile,
    RecoveryDone,
    Resumed,
    Scrubbed,
    Suspended,
    VoidFile,
    WriteFile,
)
from kvstore.tiers.file.parts import Outbox
from kvstore.types import KEY_BYTES
from kvstore.units import KIB, NS_PER_S, format_size
from kvstore.wire.load import (
    Learned,
    NotLearned,
    Spent,
    decode_learned,
    encode_learned,
    still_spent,
)

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine
    from kvstore.tiers.file.tier import FileTier

QUIET_S: Final = 3600
"""Passes that find nothing are logged once in that time."""
LOCATION_BYTES = 8
FILE_ROW_BYTES = 256 * KIB
"""Bytes of the disk tier for each row of metadata. Blocks of models that serve are larger; with
smaller ones a part of the tier stays unused."""
REMEMBER_NS: Final = 60 * NS_PER_S
"""Interval at which measurements are kept for the next start, the first of an engine at once; a
killed node loses no more than that."""
SPENT_SHARE = 64
"""Bytes written are kept after each 1 / SPENT_SHARE of a day's budget: a kill loses no more."""
TOLD_NS = 86_400 * NS_PER_S
"""Interval between two reports that the budget is used up."""
_log = logging.getLogger(__name__)


class FileEnd:
    """The driver's end of one disk tier. One thread.

    Args:
        tier: the disk tier.
        day_bytes: what may be written to it in a day; 0: any amount.
        wall_s: seconds of the wall clock: the only one that goes on while no node runs.
        on_hang: called when jobs have become late and have not ended, and when all have.
    """

    def __init__(
        self,
        tier: FileStore,
        *,
        day_bytes: int = 0,
        wall_s: Callable[[], float] = time.time,
        on_hang: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.tier = tier
        """The disk tier; what it is and holds is asked of it."""
        self._day_bytes = day_bytes
        self._wall_s = wall_s
        self._on_hang = on_hang
        self._late_jobs: set[int] = set()
        """Jobs that were reported as late and have not ended: nobody waits for them any more."""
        self._over_budget_blocks = 0
        self._told_ns: int | None = None
        self._remember_ns = 0
        """When measurements are kept next; 0: after the first look."""
        self.learned = _learned(tier.note)
        """Measurements and spent budget, as they are kept for the next start now."""
        self._trouble: dict[bool, str] = {}
        """Reasons why orders are refused, by whether only writes are."""
        self._scrub_log = PassLog("disk")
        self._found_blocks = 0
        """Blocks that the tier reported until recovery was complete."""
        self._is_recovered = self._is_recovery_told = self._is_crowd_told = False

    def spent_bytes(self) -> int:
        """Bytes of the day's budget used up by earlier starts."""
        now_s = int(self._wall_s())
        return still_spent(self.learned.spent, day_bytes=self._day_bytes, now_s=now_s)

    def remember(self, learned: Learned, spent_bytes: int) -> None:
        """Keep measurements and the spent part of the budget for the next start, if they are
        new."""
        spent = self.learned.spent
        if spent_bytes != spent.size_bytes:
            spent = Spent(spent_bytes, int(self._wall_s()))
        learned = msgspec.structs.replace(learned, spent=spent)
        if learned != self.learned:
            self.learned = learned
            self.tier.keep_note(encode_learned(learned))

    def should_remember(self, learned: Learned, spent_bytes: int) -> bool:
        """Whether a node killed now would forget an engine, or much of what it wrote today."""
        news_bytes = spent_bytes - self.learned.spent.size_bytes
        is_new = len(learned.spaces) > len(self.learned.spaces)
        return is_new or news_bytes * SPENT_SHARE > self._day_bytes

    def look_after(self, engine: Engine, now_ns: int) -> None:
        """Log news of budget and table, and keep what a kill would forget. Once a tick."""
        self.tell_budget(engine.counters.file_blocks_over_budget, now_ns)
        self.tell_table(
            left_out_blocks=engine.files.left_out_count,
            crowded_blocks=engine.counters.file_blocks_crowded,
        )
        self._remember_ns = self._remember_ns or now_ns + REMEMBER_NS
        learned, spent_bytes = engine.learned(), engine.spent_bytes()
        if now_ns >= self._remember_ns or self.should_remember(learned, spent_bytes):
            self._remember_ns = now_ns + REMEMBER_NS
            self.remember(learned, spent_bytes)

    def tell_budget(self, over_budget_blocks: int, now_ns: int) -> None:
        """Say, once a day, that blocks were not written because the budget is used up.

        Args:
            over_budget_blocks: how many, since the start.
            now_ns: of the loop's clock.
        """
        is_news = over_budget_blocks > self._over_budget_blocks
        self._over_budget_blocks = over_budget_blocks
        if is_news and (self._told_ns is None or now_ns - self._told_ns >= TOLD_NS):
            self._told_ns = now_ns
            _log.warning(
                "--file-writes-per-day %s is used up: writes to %s continue as the budget"
                " refills, reads are not affected; logged once a day",
                format_size(self._day_bytes),
                self.tier.path,
            )

    def tell_table(self, *, left_out_blocks: int, crowded_blocks: int) -> None:
        """Say, once each, what was found again, and that the table of blocks is full.

        Args:
            left_out_blocks: that the tier reported and that found no row, since the start.
            crowded_blocks: those, and those on disk that gave their row to dram.
        """
        if crowded_blocks and not self._is_crowd_told:
            self._is_crowd_told = True
            _log.warning(
                "blocks in %s are forgotten, or not found again: the node's table has a row for"
                " each %s of --file, and it is full, because blocks are smaller or because there"
                " are those of other nodes; a larger --file has more rows, a larger --block-size of"
                " the engines needs fewer; this is said once, kvstore_file_blocks_crowded_total"
                " counts on",
                self.tier.path,
                format_size(FILE_ROW_BYTES),
            )
        if self._is_recovered and not self._is_recovery_told:
            self._is_recovery_told = True
            if left_out_blocks:
                _log.warning(
                    "%d of the %d records of the disk tier are indexed: the table is full",
                    max(0, self._found_blocks - left_out_blocks),
                    self._found_blocks,
                )
            else:
                _log.info("all records of the disk tier are indexed")

    @property
    def trouble(self) -> str:
        """Work that the tier does not do at present, and why; empty while all is well."""
        trouble = self._trouble.get(False) or self._trouble.get(True, "")
        if trouble or self._is_recovered:
            return trouble
        return (
            f"the disk tier in {self.tier.path} is still looked through: {self._found_blocks}"
            " blocks are found so far"
        )

    def carry_out(self, command: FileCommand) -> list[FileEvent]:
        """Give the tier its order. Returns the end of a command that the tier refuses."""
        if self.tier.submit(command):
            return []
        assert isinstance(command, WriteFile | ReadFile)
        count = len(command.keys) // KEY_BYTES
        if isinstance(command, WriteFile):
            return [FileWritten(command.job, bytes(LOCATION_BYTES * count))]
        return [FileRead(command.job, bytes(count))]

    def read(self, _mask: int) -> Iterator[FileEvent]:
        """Events of the tier for the engine."""
        for event in self.tier.take_events():
            match event:
                case Suspended(reason=reason, writes_only=writes_only):
                    what = "writes" if writes_only else "reads and writes"
                    trouble = f"the disk tier in {self.tier.path} takes no {what}: {reason}"
                    self._trouble[writes_only] = trouble
                    _log.warning("%s", trouble)
                case Resumed(writes_only=writes_only):
                    self._trouble.pop(writes_only, None)
                    if not self._trouble:
                        _log.info("the disk tier in %s works again", self.tier.path)
                case RecoveryDone():
                    self._is_recovered = True
                case _:
                    self._notice(event)
                    yield event

    def _notice(self, event: FileEvent) -> None:
        match event:
            case FileKnown(keys=keys):
                self._found_blocks += 0 if self._is_recovered else len(keys) // KEY_BYTES
            case Scrubbed(bad_key=key):
                self._scrub_log.add(event, bool(key), key)
            case FileWritten(job=job) | FileRead(job=job):
                self._are_late(self._late_jobs - {job})
            case FileLate(job=job):
                self._are_late(self._late_jobs | {job})

    def _are_late(self, jobs: set[int]) -> None:
        if bool(jobs) != bool(self._late_jobs):
            self._on_hang(bool(jobs))
        self._late_jobs = jobs


def _learned(note: bytes) -> Learned:
    try:
        return decode_learned(note) if note else Learned()
    except NotLearned as error:
        _log.warning("measurements of an earlier start are discarded: %s", error)
        return Learned()


# ── log lines of a scrub ──────────────────────────────────────────────────────────────────────────


class PassLog:
    """One line a pass that found something, one an hour if none did. One thread."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._begun_s = time.monotonic()
        self._told_s = -math.inf
        self._blocks = self._bytes = self._bad = 0
        self._first_bad = b""

    def add(self, scrubbed: Scrubbed, bad: int, bad_key: bytes) -> None:
        """Count verified blocks, of which `bad` were damaged, the first one `bad_key`."""
        self._blocks += scrubbed.blocks
        self._bytes += scrubbed.size_bytes
        if bad and not self._bad:
            self._first_bad = bad_key
            _log.warning(
                "scrub of %s: block %s failed its checksum and is dropped; the pass continues",
                self._tier,
                short(bad_key),
            )
        self._bad += bad
        if scrubbed.pass_ended:
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


# ── a directory that cannot be opened yet ─────────────────────────────────────────────────────────

RETRY_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 5.0
VOIDS_MAX: Final = 1024
"""Most voids kept until the tier opens; more become one that covers everything: a cache may
forget."""


class LateTier:
    """A `FileStore` that refuses jobs until it has a `FileTier`."""

    def __init__(
        self,
        path: Path,
        open_tier: Callable[[Outbox], FileTier],
        why: str,
        *,
        retry_s: float = RETRY_S,
    ) -> None:
        """`open_tier` raises ConfigError while the directory cannot be had. `why`: the reason at
        the first attempt."""
        self.path = path
        self._open, self._retry_s = open_tier, retry_s
        self._tier: FileTier | None = None
        self._outbox = Outbox()
        self.fileno, self.take_events = self._outbox.fileno, self._outbox.take
        self._outbox.put(Suspended(f"{why}; it is tried again by itself", writes_only=False))
        self._voids: dict[tuple[str | None, bytes | None], VoidFile] = {}
        self._lock = threading.Lock()
        """Guards the tier and voids: none is lost between its opening and its use."""
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._try_again, name="file-late", daemon=True)
        self._thread.start()

    def _try_again(self) -> None:
        while not self._leaving.wait(self._retry_s):
            try:
                tier = self._open(self._outbox)  # may hang with its disk: nobody waits for that
            except (ConfigError, OSError):
                continue
            with self._lock:
                for void in self._voids.values():
                    tier.submit(void)
                self._tier = tier
            self._outbox.put(Resumed(writes_only=False))
            return

    @property
    def note(self) -> bytes:
        return self._tier.note if self._tier else b""

    @property
    def taken_bytes(self) -> int:
        return self._tier.taken_bytes if self._tier else 0

    @property
    def breakers(self) -> tuple[BreakerState, BreakerState]:
        return self._tier.breakers if self._tier else (BreakerState.OPEN, BreakerState.OPEN)

    def submit(self, command: FileCommand) -> bool:
        with self._lock:
            if self._tier is not None:
                return self._tier.submit(command)
            if isinstance(command, VoidFile):
                if len(self._voids) >= VOIDS_MAX:
                    self._voids.clear()
                    command = VoidFile(None, None)
                self._voids[command.tenant, command.space] = command
                self._outbox.void(command.tenant, command.space)
        return not isinstance(command, WriteFile | ReadFile)

    def wait_for_voids(self, timeout_s: float) -> bool:
        return bool(self._tier and self._tier.wait_for_voids(timeout_s))

    def keep_note(self, note: bytes) -> None:
        if self._tier is not None:
            self._tier.keep_note(note)

    def close(self) -> None:
        self._leaving.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._tier is not None:
            self._tier.close()
        elif not self._thread.is_alive():  # one that hangs in an open ends with the process
            self._outbox.close()

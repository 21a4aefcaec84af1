"""The reference of `ports.FileStore`: a store without a disk, as obvious as can be.

It runs the contract suite of the disk tier. What a test would do to a disk it does by methods:
`hang` and `go_on`, `expire`, `damage`. Does not cover: speed, deadlines, capacity in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.breaker import BreakerState
from kvstore.tier_events import (
    FileCommand,
    FileGone,
    FileKnown,
    FileLate,
    FileMoved,
    FileRead,
    FileReclaim,
    FileTierEvent,
    FileWritten,
    ReadFile,
    ReclaimFile,
    RecoveryDone,
    VoidFile,
    WriteFile,
)
from kvstore.tiers.file.parts import Outbox
from kvstore.types import PAGE_BYTES
from kvstore.wire.record import Scope, Void


@dataclass
class Block:
    scope: Scope
    key: bytes
    checksum: bytes
    payload: bytes
    is_whole: bool = True


@dataclass
class Kept:
    """What a restart finds: blocks by location in each segment, and the note."""

    segments: list[dict[int, Block]] = field(default_factory=list)
    note: bytes = b""
    first: int = 0
    """Number of the oldest segment."""
    location: int = 0
    """The last one given."""

    def find(self, location: int) -> Block | None:
        return next((s[location] for s in self.segments if location in s), None)


class MemoryStore:
    """A `FileStore` whose jobs run at once, but while it hangs."""

    path = Path("/memory")
    breakers = BreakerState.CLOSED, BreakerState.CLOSED

    def __init__(
        self, arena: Any, kept: Kept, *, segment_blocks: int, segments_max: int, jobs_max: int
    ) -> None:
        self._memory = memoryview(arena).cast("B")
        self._kept = kept
        self._segment_blocks, self._segments_max = segment_blocks, segments_max
        self._jobs_max = jobs_max
        self._outbox = Outbox()
        self._queue: list[FileCommand] = []
        self._hangs = self._is_closed = False
        self._late: set[int] = set()
        self._asked: int | None = None
        self.note = kept.note
        for segment in reversed(kept.segments):
            self._outbox.put(*_parts(segment))
        self._outbox.put(RecoveryDone())

    @property
    def taken_bytes(self) -> int:
        return sum(len(b.payload) for segment in self._kept.segments for b in segment.values())

    def fileno(self) -> int:
        return self._outbox.fileno()

    def take_events(self) -> Iterator[FileTierEvent]:
        return self._outbox.take()

    def submit(self, command: FileCommand) -> bool:
        is_job = isinstance(command, WriteFile | ReadFile)
        if is_job and (self._is_closed or len(self._queue) >= self._jobs_max):
            return False
        if isinstance(command, VoidFile):
            self._outbox.void(command.tenant, command.space)
        self._queue.append(command)
        self._run()
        return True

    def wait_for_voids(self, timeout_s: float) -> bool:
        return not any(isinstance(command, VoidFile) for command in self._queue)

    def keep_note(self, note: bytes) -> None:
        self._kept.note = note

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        begun, waiting = self._queue[:1], self._queue[1:]
        for command in waiting:
            if isinstance(command, ReadFile):
                self._outbox.put(FileRead(command.job, bytes(len(command.slots))))
        self._queue = begun + [c for c in waiting if not isinstance(c, ReadFile)]
        self._outbox.stop()
        self._run()

    # ── what happens to a disk ───────────────────────────────────────────────────────────────────

    def hang(self) -> None:
        self._hangs = True

    def go_on(self) -> None:
        self._hangs = False
        self._run()

    def expire(self) -> None:
        """All deadlines pass: the first job is in the kernel, the rest has not begun."""
        for index, command in enumerate(list(self._queue)):
            if index == 0 and isinstance(command, WriteFile | ReadFile):
                self._late.add(command.job)
                self._outbox.put(FileLate(command.job))
            elif isinstance(command, WriteFile):
                self._queue.remove(command)
                self._outbox.put(FileWritten(command.job, bytes(8 * len(command.slots))))
            elif isinstance(command, ReadFile):
                self._queue.remove(command)
                self._outbox.put(FileRead(command.job, bytes(len(command.slots))))

    def damage(self, location: int) -> None:
        block = self._kept.find(location)
        assert block is not None
        block.is_whole = False

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while self._queue and not self._hangs:
            match self._queue.pop(0):
                case WriteFile() as order:
                    self._outbox.put(FileWritten(order.job, self._append(self._blocks(order))))
                case ReadFile() as order:
                    self._read(order)
                case VoidFile(tenant=tenant, space=space):
                    for segment in self._kept.segments:
                        for place in [p for p, b in segment.items() if _covers(tenant, space, b)]:
                            del segment[place]
                case ReclaimFile(segment=number, keep=keep):
                    self._reclaim(number, keep)
            self._ask()
        if self._is_closed and not self._queue:
            self._outbox.close()

    def _blocks(self, order: WriteFile) -> Iterator[Block]:
        for row, slot in enumerate(order.slots.tolist()):
            key, checksum = order.key(row), order.checksum(row)
            begin = slot * PAGE_BYTES
            payload = bytes(self._memory[begin : begin + order.scope.block_bytes])
            yield Block(order.scope, key, checksum, payload)

    def _append(self, blocks: Iterator[Block]) -> bytes:
        kept, places = self._kept, []
        for block in blocks:
            if not kept.segments or len(kept.segments[-1]) >= self._segment_blocks:
                kept.segments.append({})
            kept.location += 1
            kept.segments[-1][kept.location] = block
            places.append(kept.location)
        return np.array(places, np.uint64).tobytes()

    def _read(self, order: ReadFile) -> None:
        good = bytearray(len(order.slots))
        for row, place in enumerate(np.frombuffer(order.locations, np.uint64).tolist()):
            key = order.key(row)
            block = self._kept.find(place)
            address = None if block is None else (block.scope, block.key, block.is_whole)
            if block is not None and address == (order.scope, key, True):
                begin = int(order.slots[row]) * PAGE_BYTES
                self._memory[begin : begin + len(block.payload)] = block.payload
                good[row] = 1
            else:
                where = np.uint64(place).tobytes()
                self._outbox.put(FileGone(order.scope, key, where, damaged=block is not None))
        self._outbox.put(FileRead(order.job, bytes(good)))

    def _ask(self) -> None:
        kept = self._kept
        if self._asked is None and len(kept.segments) > self._segments_max:
            self._asked = kept.first
            self._outbox.put(FileReclaim(kept.first, _parts(kept.segments[0])))

    def _reclaim(self, number: int, keep: bytes) -> None:
        if number != self._asked:
            return
        segment = self._kept.segments.pop(0)
        self._kept.first += 1
        self._asked = None
        for place in np.frombuffer(keep, np.uint64).tolist():
            if (block := segment.get(place)) is not None:
                new, old = self._append(iter([block])), np.uint64(place).tobytes()
                self._outbox.put(FileMoved(block.scope, block.key, old, new))


def _covers(tenant: str | None, space: bytes | None, block: Block) -> bool:
    return Void(tenant, space, 0).covers(block.scope)


def _parts(segment: dict[int, Block]) -> tuple[FileKnown, ...]:
    parts = []
    for scope in dict.fromkeys(block.scope for block in segment.values()):
        mine = {place: block for place, block in segment.items() if block.scope == scope}
        keys = b"".join(block.key for block in mine.values())
        sums = b"".join(block.checksum for block in mine.values())
        parts.append(FileKnown(scope, keys, np.array(list(mine), np.uint64).tobytes(), sums))
    return tuple(parts)

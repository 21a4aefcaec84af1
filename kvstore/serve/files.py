"""Between the engine and the file tier: commands one way, events the other.

The tier's words become the engine's, a little at a time: after a start millions of records may be
known at once, and the loop must serve engines in between. Does not cover: what moves bytes
(`kvstore.tiers.file`), what is decided (`kvstore.engine.files`).
"""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path

from kvstore.engine.events import (
    Event,
    FileCommand,
    FileGone,
    FileKnown,
    FileLate,
    FileMoved,
    FilePart,
    FileRead,
    FileReclaim,
    FileWritten,
    ReadFile,
    ReclaimFile,
    VoidFile,
    WriteFile,
)
from kvstore.engine.events import Scrubbed as TierScrubbed
from kvstore.serve.passes import PassLog
from kvstore.tiers.file import (
    FileEvent,
    FileTier,
    Gone,
    Known,
    Late,
    Moved,
    Read,
    Reclaim,
    RecoveryDone,
    Resumed,
    Scrubbed,
    Suspended,
    Written,
)
from kvstore.types import KEY_BYTES, Tier
from kvstore.wire.learned import Learned, NotLearned, decode_learned, encode_learned
from kvstore.wire.record import Scope

LOCATION_BYTES = 8
_log = logging.getLogger(__name__)


class FileEnd:
    """The driver's end of one file tier. One thread."""

    def __init__(self, tier: FileTier) -> None:
        self._tier = tier
        self._waiting: deque[FileEvent] = deque()
        self.learned = _learned(tier.note)
        """By an earlier start, as it is kept now."""
        self._trouble: dict[bool, str] = {}
        """By whether it is about writes only."""
        self._scrub_log = PassLog("file")

    def remember(self, learned: Learned) -> None:
        """Keep this for the next start, if it is news."""
        if learned != self.learned:
            self.learned = learned
            self._tier.keep_note(encode_learned(learned))

    @property
    def used_bytes(self) -> int:
        """What the tier takes of its capacity."""
        return self._tier.taken_bytes

    @property
    def trouble(self) -> str:
        """What the tier does not do at present, and why; empty while all is well."""
        return self._trouble.get(False) or self._trouble.get(True, "")

    @property
    def breakers(self) -> tuple[str, str]:
        """State of those of reads and of writes."""
        reads, writes = self._tier.breakers
        return reads.value, writes.value

    def wait_for_voids(self, timeout_s: float) -> bool:
        """Whether what was cleared stays away after a restart; from any thread."""
        return self._tier.wait_for_voids(timeout_s)

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self._tier.path

    def fileno(self) -> int:
        """Readable while `read` has something."""
        return self._tier.fileno()

    def carry_out(self, command: FileCommand) -> list[Event]:
        """Give the tier its order. What it does not take ends here and now."""
        match command:
            case WriteFile():
                scope = _scope(command)
                if not self._tier.write(
                    command.job, scope, command.keys, command.slots, command.checksums
                ):
                    count = len(command.keys) // KEY_BYTES
                    return [FileWritten(command.job, bytes(LOCATION_BYTES * count))]
            case ReadFile():
                scope = _scope(command)
                if not self._tier.read(
                    *(command.job, scope, command.keys, command.locations, command.slots),
                    command.checksums,
                ):
                    return [FileRead(command.job, bytes(len(command.keys) // KEY_BYTES))]
            case VoidFile(tenant=tenant, space=space):
                # What was found at the start and not told yet would come back.
                self._waiting = deque(e for e in self._waiting if not _covers(command, e))
                self._tier.void(tenant, space)
            case ReclaimFile(segment=segment, keep=keep):
                self._tier.reclaim(segment, keep)
        return []

    def read(self, _mask: int) -> list[Event]:
        """What the tier says: one event at a time of those that are long."""
        self._waiting.extend(self._tier.take_events())
        events: list[Event] = []
        while self._waiting:
            event = self._waiting.popleft()
            events += self._translate(event)
            if isinstance(event, Known | Moved | Gone | Reclaim):
                break
        if self._waiting:
            os.eventfd_write(self._tier.fileno(), 1)
        return events

    def _translate(self, event: FileEvent) -> list[Event]:
        match event:
            case Known(scope=s, keys=keys, locations=locations, checksums=checksums):
                return [FileKnown(s.tenant, s.space, s.shard, keys, locations, checksums)]
            case Moved(scope=s, keys=keys, old_locations=old, locations=locations):
                return [FileMoved(s.tenant, s.space, s.shard, keys, old, locations)]
            case Gone(scope=s, keys=keys, locations=locations, damaged=damaged):
                return [FileGone(s.tenant, s.space, s.shard, keys, locations, damaged)]
            case Scrubbed(blocks=blocks, size_bytes=size, bad_key=key, pass_ended=ended):
                bad = int(key != b"")
                self._scrub_log.add(blocks, size, bad=bad, bad_key=key, ended=ended)
                return [TierScrubbed(Tier.FILE, blocks, size, bad, pass_ended=ended)]
            case Written(job=job, locations=locations):
                return [FileWritten(job, locations)]
            case Read(job=job, good=good):
                return [FileRead(job, good)]
            case Late(job=job):
                return [FileLate(job)]
            case Reclaim(segment=segment, records=records):
                parts = tuple(
                    FilePart(
                        r.scope.tenant,
                        r.scope.space,
                        r.scope.shard,
                        r.scope.block_bytes,
                        r.keys,
                        r.locations,
                    )
                    for r in records
                )
                return [FileReclaim(segment, parts)]
            case Suspended(reason=reason, writes_only=writes_only):
                what = "writes" if writes_only else "reads and writes"
                trouble = f"the file tier in {self.path} takes no {what}: {reason}"
                self._trouble[writes_only] = trouble
                _log.warning("%s", trouble)
            case Resumed(writes_only=writes_only):
                self._trouble.pop(writes_only, None)
                if not self._trouble:
                    _log.info("the file tier in %s works again", self.path)
            case RecoveryDone():
                _log.info("all records of the file tier are known")
        return []


def _learned(note: bytes) -> Learned:
    try:
        return decode_learned(note) if note else Learned()
    except NotLearned as error:
        _log.warning("what an earlier start learned is not used, it is learned anew: %s", error)
        return Learned()


def _scope(command: WriteFile | ReadFile) -> Scope:
    return Scope(command.tenant, command.space, command.shard, command.block_bytes)


def _covers(void: VoidFile, event: FileEvent) -> bool:
    """Whether a Known tells of what is cleared."""
    if not isinstance(event, Known):
        return False
    scope = event.scope
    return void.tenant in (None, scope.tenant) and void.space in (None, scope.space)

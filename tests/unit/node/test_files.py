"""Between engine and file tier: what is refused ends at once, what is long comes bit by bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from kvstore.node.files import FileEnd
from kvstore.ports import FileStore
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
    Resumed,
    Scrubbed,
    Suspended,
    VoidFile,
    WriteFile,
)
from kvstore.tiers.file.parts import KNOWN_MAX, Outbox
from kvstore.types import Shard, Tier
from kvstore.wire.load import Learned, SpacePace, encode_learned
from kvstore.wire.record import Scope

SHARD = Shard(0, 2, 0, 4)
SCOPE = Scope("t", b"s" * 32, SHARD, 8192)
OTHER = Scope("u", b"s" * 32, SHARD, 8192)
KEYS, PLACES, SUMS = b"k" * 64, b"p" * 16, b"c" * 32
SLOTS = np.array([0, 16], dtype=np.uint32)


class ScriptedTier:
    """Takes everything or nothing, and says what a test wants said."""

    def __init__(self) -> None:
        self.takes = True
        self.note = b""
        self.path = Path("/var/lib/kvstore")
        self.calls: list[object] = []
        self.outbox = Outbox()

    def say(self, *events: FileTierEvent) -> None:
        self.outbox.put(*events)

    def fileno(self) -> int:
        return self.outbox.fileno()

    def take_events(self) -> Iterator[FileTierEvent]:
        return self.outbox.take()

    def keep_note(self, note: bytes) -> None:
        self.calls.append("keep_note")
        self.note = note

    def submit(self, command: FileCommand) -> bool:
        self.calls.append(command)
        return self.takes


@pytest.fixture
def tier() -> Iterator[ScriptedTier]:
    made = ScriptedTier()
    yield made
    made.outbox.close()


@pytest.fixture
def end(tier: ScriptedTier) -> FileEnd:
    return FileEnd(cast("FileStore", tier))


def known(scope: Scope) -> FileKnown:
    return FileKnown(scope, KEYS, PLACES, SUMS)


def test_orders_reach_the_tier_and_those_that_are_not_taken_end_at_once(
    tier: ScriptedTier, end: FileEnd
) -> None:
    write = WriteFile(7, SCOPE, KEYS, SLOTS, SUMS)
    read = ReadFile(8, SCOPE, KEYS, SLOTS, SUMS, PLACES)
    commands: list[FileCommand] = [write, read, VoidFile("t", None), ReclaimFile(3, PLACES)]
    for command in commands:
        assert end.carry_out(command) == []
    assert tier.calls == commands
    tier.takes = False
    assert end.carry_out(write) == [FileWritten(7, bytes(16))]
    assert end.carry_out(read) == [FileRead(8, bytes(2))]


def test_the_engine_hears_what_the_tier_says_to_it(tier: ScriptedTier, end: FileEnd) -> None:
    short: list[FileTierEvent] = [FileWritten(1, PLACES), FileRead(2, b"\x01\x00"), FileLate(3)]
    moved = FileMoved(SCOPE, KEYS, PLACES, b"q" * 16)
    gone = FileGone(SCOPE, KEYS, PLACES)
    reclaim = FileReclaim(4, (FileKnown(SCOPE, KEYS, PLACES, b""),))
    tier.say(*short, RecoveryDone(), known(SCOPE), moved, gone, reclaim)
    said = [list(end.read(0)) for _ in range(5)]
    assert said == [[*short, known(SCOPE)], [moved], [gone], [reclaim], []]


def test_what_is_found_is_taken_no_faster_than_it_is_told_and_no_read_waits_behind_it(
    tier: ScriptedTier, end: FileEnd
) -> None:
    for _ in range(KNOWN_MAX):
        tier.outbox.known(known(SCOPE), own=True)
    recovering = threading.Thread(
        target=tier.outbox.known, args=(known(SCOPE),), kwargs={"own": True}
    )
    recovering.start()
    tier.say(FileRead(2, b""))
    said = [list(end.read(0))]
    recovering.join()
    said += [list(end.read(0)) for _ in range(KNOWN_MAX)]
    assert said == [[known(SCOPE)]] * KNOWN_MAX + [[FileRead(2, b""), known(SCOPE)]]


def test_trouble_is_told_with_the_place_until_it_is_over(
    tier: ScriptedTier, end: FileEnd, caplog: pytest.LogCaptureFixture
) -> None:
    tier.say(RecoveryDone(), Suspended("the disk fails", writes_only=False))
    list(end.read(0))
    sentence = "the disk tier in /var/lib/kvstore takes no reads and writes: the disk fails"
    assert end.trouble == sentence
    assert caplog.messages == [sentence]
    tier.say(Suspended("no room", writes_only=True), Resumed(writes_only=False))
    list(end.read(0))
    assert end.trouble == "the disk tier in /var/lib/kvstore takes no writes: no room"
    tier.say(Resumed(writes_only=True))
    list(end.read(0))
    assert end.trouble == ""


FULL = "blocks in /var/lib/kvstore are forgotten, or not found again: the node's table has"


def test_a_full_table_is_told_once(end: FileEnd, caplog: pytest.LogCaptureFixture) -> None:
    end.tell_table(left_out_blocks=0, crowded_blocks=0)
    assert caplog.messages == []
    for crowded in (1, 2, 3):
        end.tell_table(left_out_blocks=0, crowded_blocks=crowded)
    (line,) = caplog.messages
    assert line.startswith(FULL)
    assert "each 256 KiB of --file" in line


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        (0, "all records of the disk tier are indexed"),
        (3, "1 of the 4 records of the disk tier are indexed: the table is full"),
    ],
)
def test_the_end_of_recovery_tells_how_much_is_known(
    tier: ScriptedTier,
    end: FileEnd,
    caplog: pytest.LogCaptureFixture,
    left_out: int,
    expected: str,
) -> None:
    caplog.set_level("INFO")
    tier.say(known(SCOPE), known(SCOPE))
    list(end.read(0))
    list(end.read(0))
    end.tell_table(left_out_blocks=0, crowded_blocks=0)
    assert caplog.messages == []
    assert end.trouble == (
        "the disk tier in /var/lib/kvstore is still looked through: 4 blocks are found so far"
    )
    tier.say(RecoveryDone(), known(OTHER))
    list(end.read(0))
    assert end.trouble == ""
    for _ in range(2):
        end.tell_table(left_out_blocks=left_out, crowded_blocks=left_out)
    assert caplog.messages[-1] == expected
    assert len(caplog.messages) == 1 + bool(left_out)


def test_what_the_scrub_found_is_told_to_the_engine_and_the_log(
    tier: ScriptedTier, end: FileEnd, caplog: pytest.LogCaptureFixture
) -> None:
    gone = FileGone(SCOPE, KEYS[:32], PLACES[:8], damaged=True)
    bad = Scrubbed(Tier.FILE, 3, 300, KEYS[:32])
    ended = Scrubbed(Tier.FILE, 2, 200, pass_ended=True)
    tier.say(gone, bad, ended)
    assert list(end.read(0)) == [gone]
    assert list(end.read(0)) == [bad, ended]
    assert "a pass over 5 blocks" in caplog.text
    assert "dropped 1 (first: 6b6b6b6b)" in caplog.text


def test_the_first_measurement_of_an_engine_is_kept_at_once(tier: ScriptedTier) -> None:
    """A node that is killed in its first minute would have the next engines guess."""
    end = FileEnd(cast("FileStore", tier))
    assert end.should_remember(LEARNED, 0)
    end.remember(LEARNED, 0)
    assert not end.should_remember(msgspec.structs.replace(LEARNED, disk_ns_per_mib=9), 0)


# ── what was learned ─────────────────────────────────────────────────────────────────────────────

LEARNED = Learned(500_000, (SpacePace("t", "ab" * 32, 50_000, 900),))


def test_what_is_damaged_is_not_learned_and_one_line_says_so(
    tier: ScriptedTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier.note = encode_learned(LEARNED).replace(b"900", b"901")
    assert FileEnd(cast("FileStore", tier)).learned == Learned()
    (line,) = caplog.messages
    assert line == "measurements of an earlier start are discarded: it is damaged"


# ── the budget of writes ─────────────────────────────────────────────────────────────────────────

DAY_S, DAY_BYTES = 86_400, 64_000


class Wall:
    """A wall clock that an operator sets."""

    def __init__(self) -> None:
        self.s = 10**9 + 0.5


def budgeted(tier: ScriptedTier, wall: Wall) -> FileEnd:
    return FileEnd(cast("FileStore", tier), day_bytes=DAY_BYTES, wall_s=lambda: wall.s)


@pytest.mark.parametrize(
    ("passed_s", "spent"),
    [
        (0, 48_000),
        (DAY_S // 2, 16_000),
        (DAY_S, 0),
        (100 * DAY_S, 0),
        (-(10**8), 48_000),
    ],
    ids=["at once", "half a day", "a day", "clock set forward", "clock set back"],
)
def test_a_start_begins_with_what_was_written_before(
    tier: ScriptedTier, passed_s: int, spent: int
) -> None:
    wall = Wall()
    budgeted(tier, wall).remember(LEARNED, 48_000)
    wall.s += passed_s
    again = budgeted(tier, wall)
    assert again.spent_bytes() == spent
    again.remember(LEARNED, spent)
    assert budgeted(tier, wall).spent_bytes() == spent, "and so does the one after it"


def test_a_budget_that_was_changed_counts_what_was_written(tier: ScriptedTier) -> None:
    wall = Wall()
    budgeted(tier, wall).remember(LEARNED, 48_000)
    assert FileEnd(
        cast("FileStore", tier), day_bytes=10_000, wall_s=lambda: wall.s
    ).spent_bytes() == (10_000), "no more than there is"
    assert FileEnd(cast("FileStore", tier)).spent_bytes() == 0, "without a budget nothing is spent"


def test_what_a_kill_would_forget_is_a_small_part_of_a_day(tier: ScriptedTier) -> None:
    wall = Wall()
    end = budgeted(tier, wall)
    assert not end.should_remember(Learned(), 1000)
    assert end.should_remember(Learned(), 1001)
    end.remember(LEARNED, 1001)
    assert not end.should_remember(Learned(), 2001)
    assert not end.should_remember(Learned(), 0)
    without = FileEnd(cast("FileStore", tier))
    assert not without.should_remember(Learned(), 0), "without a budget never"
    end.remember(LEARNED, 1001)
    assert tier.calls == ["keep_note"], "only what is news"


def test_a_budget_that_is_used_up_is_told_once_a_day(
    tier: ScriptedTier, caplog: pytest.LogCaptureFixture
) -> None:
    end, day_ns = budgeted(tier, Wall()), DAY_S * 10**9
    for over_budget, now_ns in ((0, 5), (3, 6), (9, 7), (9, 6 + day_ns), (12, 5 + day_ns)):
        end.tell_budget(over_budget, now_ns)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("--file-writes-per-day 62.5 KiB is used up: writes")
    end.tell_budget(13, 6 + day_ns)
    assert len(caplog.messages) == 2

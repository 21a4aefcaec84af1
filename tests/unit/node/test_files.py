"""Between engine and file tier: what is refused ends at once, what is long comes bit by bit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvstore.engine.events import (
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
    Scrubbed as TierScrubbed,
    VoidFile,
    WriteFile,
)
from kvstore.node.files import FileEnd
from kvstore.tiers.file import (
    FileEvent,
    FileScrubbed,
    FileTier,
    Gone,
    Known,
    Late,
    Moved,
    Read,
    Reclaim,
    RecordSet,
    RecoveryDone,
    Resumed,
    Suspended,
    Written,
)
from kvstore.tiers.file.outbox import KNOWN_MAX
from kvstore.types import Shard, Tier
from kvstore.wire.learned import Learned, SpacePace, encode_learned
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
        self.calls: list[tuple[Any, ...]] = []
        self.events: list[FileEvent] = []
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self.fd

    def take_events(self) -> list[FileEvent]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        events, self.events = self.events, []
        return events

    def keep_note(self, note: bytes) -> None:
        self.calls.append(("keep_note",))
        self.note = note

    def write(self, *call: Any) -> bool:
        self.calls.append(("write", *call))
        return self.takes

    def read(self, *call: Any) -> bool:
        self.calls.append(("read", *call))
        return self.takes

    def void(self, *call: Any) -> None:
        self.calls.append(("void", *call))

    def reclaim(self, *call: Any) -> None:
        self.calls.append(("reclaim", *call))


@pytest.fixture
def tier() -> Iterator[ScriptedTier]:
    made = ScriptedTier()
    yield made
    os.close(made.fd)


@pytest.fixture
def end(tier: ScriptedTier) -> FileEnd:
    return FileEnd(cast("FileTier", tier))


def known(scope: Scope) -> Known:
    return Known(scope, KEYS, PLACES, SUMS)


def test_jobs_that_are_late_and_do_not_end_are_told_of(tier: ScriptedTier) -> None:
    told: list[bool] = []
    end = FileEnd(cast("FileTier", tier), on_hang=told.append)
    for events in ([Late(1), Late(2)], [Written(1, b"")], [Read(2, b"")], [Read(3, b"")]):
        tier.events += events
        list(end.read(0))
    assert told == [True, False]
    tier.events.append(Late(4))
    list(end.read(0))
    assert told == [True, False, True]


def test_orders_reach_the_tier(tier: ScriptedTier, end: FileEnd) -> None:
    write = WriteFile(7, "t", b"s" * 32, SHARD, 8192, KEYS, SLOTS, SUMS, 1)
    read = ReadFile(8, "t", b"s" * 32, SHARD, 8192, KEYS, PLACES, SLOTS, SUMS, 1)
    for command in (write, read, VoidFile("t", None, 1), ReclaimFile(3, PLACES, 1)):
        assert end.carry_out(command) == []
    assert tier.calls == [
        ("write", 7, SCOPE, KEYS, SLOTS, SUMS),
        ("read", 8, SCOPE, KEYS, PLACES, SLOTS, SUMS),
        ("void", "t", None),
        ("reclaim", 3, PLACES),
    ]


def test_what_is_not_taken_ends_at_once(tier: ScriptedTier, end: FileEnd) -> None:
    tier.takes = False
    write = WriteFile(7, "t", b"s" * 32, SHARD, 8192, KEYS, SLOTS, SUMS, 1)
    read = ReadFile(8, "t", b"s" * 32, SHARD, 8192, KEYS, PLACES, SLOTS, SUMS, 1)
    assert end.carry_out(write) == [FileWritten(7, bytes(16))]
    assert end.carry_out(read) == [FileRead(8, bytes(2))]


def test_every_word_of_the_tier_becomes_the_engines(tier: ScriptedTier, end: FileEnd) -> None:
    tier.events = [
        Written(1, PLACES),
        Read(2, b"\x01\x00"),
        Late(3),
        RecoveryDone(),
        known(SCOPE),
        Moved(SCOPE, KEYS, PLACES, b"q" * 16),
        Gone(SCOPE, KEYS, PLACES),
        Reclaim(4, (RecordSet(SCOPE, KEYS, PLACES),)),
    ]
    address = ("t", b"s" * 32, SHARD)
    said = [list(end.read(0)) for _ in range(5)]
    assert said == [
        [
            FileWritten(1, PLACES),
            FileRead(2, b"\x01\x00"),
            FileLate(3),
            FileKnown(*address, KEYS, PLACES, SUMS),
        ],
        [FileMoved(*address, KEYS, PLACES, b"q" * 16)],
        [FileGone(*address, KEYS, PLACES)],
        [FileReclaim(4, (FilePart(*address, SCOPE.block_bytes, KEYS, PLACES),))],
        [],
    ]


def test_the_loop_is_woken_for_what_is_left(tier: ScriptedTier, end: FileEnd) -> None:
    tier.events = [known(SCOPE), known(SCOPE)]
    list(end.read(0))
    assert os.eventfd_read(tier.fd) == 1, "there is more"
    list(end.read(0))
    with pytest.raises(BlockingIOError):
        os.eventfd_read(tier.fd)


class Recovering(ScriptedTier):
    """Tells as much as its outbox lets it, whenever it is asked."""

    def take_events(self) -> list[FileEvent]:
        return [*super().take_events(), *[known(SCOPE)] * KNOWN_MAX]


def test_what_is_found_is_taken_no_faster_than_it_is_told_and_no_read_waits_behind_it() -> None:
    tier = Recovering()
    end = FileEnd(cast("FileTier", tier))
    for _ in range(100):
        list(end.read(0))
        assert len(end._waiting) <= KNOWN_MAX
    tier.events = [Read(2, b"")]
    said = [list(end.read(0)) for _ in range(1 + KNOWN_MAX)]
    assert [FileRead(2, b"") in events for events in said].count(True) == 1
    os.close(tier.fd)


def test_what_is_cleared_before_it_was_told_is_not_told(tier: ScriptedTier, end: FileEnd) -> None:
    tier.events = [known(OTHER), known(SCOPE), Written(1, PLACES), known(OTHER)]
    assert len(list(end.read(0))) == 1
    end.carry_out(VoidFile("t", None, 1))
    said = list(end.read(0))
    assert [type(event) for event in said] == [FileWritten, FileKnown]
    assert said[1] == FileKnown("u", b"s" * 32, SHARD, KEYS, PLACES, SUMS)


def test_trouble_is_told_with_the_place_until_it_is_over(
    tier: ScriptedTier, end: FileEnd, caplog: pytest.LogCaptureFixture
) -> None:
    tier.events = [RecoveryDone(), Suspended("the disk fails", writes_only=False)]
    list(end.read(0))
    sentence = "the disk tier in /var/lib/kvstore takes no reads and writes: the disk fails"
    assert end.trouble == sentence
    assert caplog.messages == [sentence]
    tier.events = [Suspended("no room", writes_only=True), Resumed(writes_only=False)]
    list(end.read(0))
    assert end.trouble == "the disk tier in /var/lib/kvstore takes no writes: no room"
    tier.events = [Resumed(writes_only=True)]
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
        (0, "all records of the disk tier are known"),
        (3, "1 of the 4 records of the disk tier are known: there is no row for more"),
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
    tier.events = [known(SCOPE), known(SCOPE)]
    list(end.read(0))
    list(end.read(0))
    end.tell_table(left_out_blocks=0, crowded_blocks=0)
    assert caplog.messages == []
    assert end.trouble == (
        "the disk tier in /var/lib/kvstore is still looked through: 4 blocks are found so far"
    )
    tier.events = [RecoveryDone(), known(OTHER)]
    list(end.read(0))
    assert end.trouble == ""
    for _ in range(2):
        end.tell_table(left_out_blocks=left_out, crowded_blocks=left_out)
    assert caplog.messages[-1] == expected
    assert len(caplog.messages) == 1 + bool(left_out)


def test_what_the_scrub_found_is_told_to_the_engine_and_the_log(
    tier: ScriptedTier, end: FileEnd, caplog: pytest.LogCaptureFixture
) -> None:
    tier.events = [
        Gone(SCOPE, KEYS[:32], PLACES[:8], damaged=True),
        FileScrubbed(3, 300, KEYS[:32], pass_ended=False),
        FileScrubbed(2, 200, b"", pass_ended=True),
    ]
    assert list(end.read(0)) == [
        FileGone("t", b"s" * 32, SHARD, KEYS[:32], PLACES[:8], damaged=True)
    ]
    assert list(end.read(0)) == [
        TierScrubbed(Tier.FILE, 3, 300, bad_blocks=1),
        TierScrubbed(Tier.FILE, 2, 200, pass_ended=True),
    ]
    assert "a pass over 5 blocks" in caplog.text
    assert "dropped 1 (first: 6b6b6b6b)" in caplog.text


# ── what was learned ─────────────────────────────────────────────────────────────────────────────

LEARNED = Learned(500_000, (SpacePace("t", "ab" * 32, 50_000, 900),))


def test_what_was_learned_is_kept_once_and_found_at_the_next_start(tier: ScriptedTier) -> None:
    end = FileEnd(cast("FileTier", tier))
    assert end.learned == Learned()
    for _ in range(2):
        end.remember(LEARNED, 0)
    assert tier.calls == [("keep_note",)]
    assert FileEnd(cast("FileTier", tier)).learned == LEARNED


def test_what_is_damaged_is_not_learned_and_one_line_says_so(
    tier: ScriptedTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier.note = encode_learned(LEARNED).replace(b"900", b"901")
    assert FileEnd(cast("FileTier", tier)).learned == Learned()
    (line,) = caplog.messages
    assert line == "what an earlier start learned is not used, it is learned anew: it is damaged"


# ── the budget of writes ─────────────────────────────────────────────────────────────────────────

DAY_S, DAY_BYTES = 86_400, 64_000


class Wall:
    """A wall clock that an operator sets."""

    def __init__(self) -> None:
        self.s = 10**9 + 0.5


def budgeted(tier: ScriptedTier, wall: Wall) -> FileEnd:
    return FileEnd(cast("FileTier", tier), day_bytes=DAY_BYTES, wall_s=lambda: wall.s)


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
        cast("FileTier", tier), day_bytes=10_000, wall_s=lambda: wall.s
    ).spent_bytes() == (10_000), "no more than there is"
    assert FileEnd(cast("FileTier", tier)).spent_bytes() == 0, "without a budget nothing is spent"


def test_what_a_kill_would_forget_is_a_small_part_of_a_day(tier: ScriptedTier) -> None:
    wall = Wall()
    end = budgeted(tier, wall)
    assert not end.should_remember(1000)
    assert end.should_remember(1001)
    end.remember(LEARNED, 1001)
    assert not end.should_remember(2001)
    assert not end.should_remember(0)
    assert not FileEnd(cast("FileTier", tier)).should_remember(0), "without a budget never"
    end.remember(LEARNED, 1001)
    assert tier.calls == [("keep_note",)], "only what is news"


def test_a_budget_that_is_used_up_is_told_once_a_day(
    tier: ScriptedTier, caplog: pytest.LogCaptureFixture
) -> None:
    end, day_ns = budgeted(tier, Wall()), DAY_S * 10**9
    for over_budget, now_ns in ((0, 5), (3, 6), (9, 7), (9, 6 + day_ns), (12, 5 + day_ns)):
        end.tell_budget(over_budget, now_ns)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("--file-writes-per-day 62.5 KiB is used up: blocks are")
    end.tell_budget(13, 6 + day_ns)
    assert len(caplog.messages) == 2

"""The change log by itself: bounded for all readers together, and a loss is noticed exactly."""

from __future__ import annotations

import random
import sys
import threading

import pytest

from kvstore.engine.events import OffersUntold
from kvstore.peers import changes
from kvstore.peers.changes import ChangeLog, ChangeReader, Row, key_count
from kvstore.types import KEY_BYTES, SpaceId, Tier
from kvstore.wire.feed import Left, Stored

ONE_KEY_BYTES = changes.ROW_BYTES + KEY_BYTES


def offer(first: int, count: int = 1) -> Stored:
    keys = b"".join(n.to_bytes(KEY_BYTES, "big") for n in range(first, first + count))
    return Stored("t", SpaceId(bytes(32)), Tier.DRAM, keys)


def reader(log: ChangeLog[Row]) -> ChangeReader[Row]:
    return log.reader(lambda: None)


def keys_of(rows: list[Row]) -> list[int]:
    keys = b"".join(row.keys for row in rows if isinstance(row, Stored))
    return [int.from_bytes(keys[at : at + KEY_BYTES], "big") for at in range(0, len(keys), 32)]


def test_every_reader_has_all_rows_in_order() -> None:
    log: ChangeLog[Row] = ChangeLog()
    readers = [reader(log), reader(log)]
    told: list[Row] = [offer(1), Left("e"), OffersUntold(), offer(2)]
    for row in told[:3]:
        log.append(row)
    assert list(readers[0].new()) == told[:3]
    log.append(told[3])
    assert list(readers[0].new()) == told[3:]
    assert list(readers[1].new()) == told
    assert [each.take_lost() for each in readers] == [0, 0]
    late = reader(log)
    assert list(late.new()) == []


def test_what_all_readers_have_had_is_not_kept() -> None:
    log: ChangeLog[Row] = ChangeLog()
    log.append(offer(0))
    assert not log.rows, "nobody reads"
    fast, slow = reader(log), reader(log)
    for number in range(10):
        log.append(offer(number))
        assert len(list(fast.new())) == 1
    assert len(log.rows) == 10
    assert len(list(slow.new())) == 10
    log.append(offer(10))
    assert len(log.rows) == 1


def test_no_append_pays_for_a_long_backlog() -> None:
    log: ChangeLog[Row] = ChangeLog()
    slow = reader(log)
    for number in range(1000):
        log.append(offer(number))
    assert len(list(slow.new())) == 1000
    left = [1000]
    while left[-1] > 1:
        log.append(offer(0))
        list(slow.new())
        left.append(len(log.rows))
        assert left[-2] - changes.LEAVE_ROWS_MAX <= left[-1] <= max(1, left[-2] - 60)


@pytest.mark.parametrize("row", [offer(0), offer(0, 700), Left("e"), OffersUntold()])
def test_a_reader_that_stands_still_takes_a_bounded_part_of_memory(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "LOG_BYTES_MAX", 1 << 16)
    log: ChangeLog[Row] = ChangeLog()
    slow, away = reader(log), reader(log)
    for _ in range(1000):
        log.append(row)
        assert log.size_bytes <= 1 << 16
    assert log.size_bytes == sum(changes.ROW_BYTES + 32 * key_count(r) for r in log.rows.values())
    kept = len(log.rows)
    assert slow.take_lost() == away.take_lost() == (1000 - kept) * key_count(row)
    assert len(list(slow.new())) == kept
    assert slow.waiting_keys == 0


def test_an_append_wakes_a_reader_that_looks_for_losses_once() -> None:
    log: ChangeLog[Row] = ChangeLog()
    woken: list[int] = []
    one = log.reader(lambda: woken.append(log.end))
    log.append(offer(0))
    assert woken == [], "it has not begun"
    assert one.take_lost() == 0
    for number in (1, 2):
        log.append(offer(number))
    assert woken == [2]
    assert keys_of(list(one.new())) == [0, 1, 2]
    log.append(offer(3))
    assert woken == [2]
    one.take_lost()
    log.append(offer(4))
    assert woken == [2, 5]


def test_rows_that_leave_while_they_are_read_are_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LOG_BYTES_MAX", 3 * ONE_KEY_BYTES)
    log: ChangeLog[Row] = ChangeLog()
    one = reader(log)
    for number in range(3):
        log.append(offer(number))
    assert one.take_lost() == 0
    rows = one.new()
    assert keys_of([next(rows)]) == [0]
    for number in range(3, 6):
        log.append(offer(number))
    assert list(rows) == []
    assert one.take_lost() == 2
    assert keys_of(list(one.new())) == [3, 4, 5]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_had_and_what_is_lost_is_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LOG_BYTES_MAX", 12 * ONE_KEY_BYTES)
    monkeypatch.setattr(changes, "ROW_KEYS_MAX", 5)
    rng, log = random.Random(seed), ChangeLog[Row]()
    readers = {reader(log): (list[int](), [0]) for _ in range(3)}
    appended = 0
    for _ in range(300):
        count = rng.randint(1, 12)
        log.append(offer(appended, count))
        appended += count
        for one, (had, lost) in readers.items():
            if rng.random() < 0.3:
                missed = one.take_lost()
                lost[0] += missed
                rows = one.new()
                some = [next(rows, None) for _ in range(rng.randint(0, 8))]
                assert all(row is None or key_count(row) <= 5 for row in some), "fits a message"
                new = keys_of([row for row in some if row is not None])
                begin = len(had) + lost[0]
                assert new == list(range(begin, begin + len(new)))
                had += new
            assert one.waiting_keys == appended - len(had) - lost[0]
    for one, (had, lost) in readers.items():
        lost[0] += one.take_lost()
        had += keys_of(list(one.new()))
        assert len(had) + lost[0] == appended
        assert lost[0] > 0


def test_threads_that_append_do_not_disturb_one_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LOG_BYTES_MAX", 40 * ONE_KEY_BYTES)
    log: ChangeLog[Row] = ChangeLog()
    is_new, count, interval_s = threading.Event(), 2000, sys.getswitchinterval()
    one = log.reader(is_new.set)

    def append() -> None:
        for number in range(count):
            log.append(offer(number))

    appending = [threading.Thread(target=append) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    for thread in appending:
        thread.start()
    had = lost = 0
    try:
        while had + lost < 2 * count:
            is_new.clear()
            lost += one.take_lost()
            had += len(list(one.new()))
            if not one.waiting_keys:
                assert had + lost == 2 * count or is_new.wait(60)
    finally:
        sys.setswitchinterval(interval_s)
        for thread in appending:
            thread.join()
    assert (had + lost, one.waiting_keys, log.end) == (2 * count, 0, 2 * count)

"""Receipts on disk: none is lost at a stop, a full file makes room, failures are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kvstore.errors import ConfigError
from kvstore.router.receipt_log import TURN_COUNT, ReceiptFile, older, read_receipts
from kvstore.routing.receipts import Receipt
from tests.kit.coroutines import on_loop
from tests.kit.turns_core import RECEIPT

ROUNDS_OF_THE_LOOP = 4
"""Cancelled before the first and after each of these: where a write waits for its thread."""


def numbered(*numbers: int) -> list[Receipt]:
    return [msgspec.structs.replace(RECEIPT, number=number) for number in numbers]


def numbers_in(path: Path) -> list[int]:
    return [receipt.number for receipt in read_receipts(path)]


@pytest.mark.parametrize("rounds", range(ROUNDS_OF_THE_LOOP + 1))
@on_loop
async def test_a_write_that_is_cancelled_loses_no_receipt(tmp_path: Path, rounds: int) -> None:
    file = ReceiptFile(tmp_path / "receipts", bytes_max=1 << 20)
    writing = asyncio.ensure_future(file.write(numbered(1, 2)))
    await asyncio.sleep(0)  # it has begun: the core has given its receipts away
    for _ in range(rounds):
        await asyncio.sleep(0)
    writing.cancel()
    await file.write(numbered(3))
    assert file.written_count == 3
    assert numbers_in(tmp_path / "receipts") == [1, 2, 3]


def written(path: Path, *batches: Sequence[Receipt], bytes_max: int = 1 << 20) -> ReceiptFile:
    async def write_all() -> ReceiptFile:
        file = ReceiptFile(path, bytes_max=bytes_max)
        for batch in batches:
            await file.write(batch)
        return file

    return asyncio.run(write_all())


def test_half_of_the_size_moves_on_and_the_oldest_half_goes(tmp_path: Path) -> None:
    path = tmp_path / "receipts"
    one_line = len(msgspec.json.encode(RECEIPT)) + 1
    written(path, *([each] for each in numbered(1, 2, 3, 4, 5)), bytes_max=4 * one_line)
    assert numbers_in(path) == [3, 4, 5]
    assert path.stat().st_size + older(path).stat().st_size <= 4 * one_line
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_disk_that_fails_costs_receipts_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path / "absent" / "receipts", numbered(1, 2))
    assert (file.written_count, file.failed_count) == (0, 2)
    assert "cannot be written" in caplog.text


def test_a_last_line_that_is_not_whole_is_left_out_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "receipts"
    written(path, numbered(1))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-20])
    assert numbers_in(path) == [1]
    path.write_bytes(whole + b"{}\n")
    with pytest.raises(ConfigError, match="line 2 is no receipt"):
        numbers_in(path)


def test_without_a_file_no_receipt_is_made() -> None:
    read = list[Receipt]()
    asyncio.run(ReceiptFile(None, bytes_max=1 << 20).write(map(read.append, numbered(1))))  # type: ignore[arg-type]
    assert not read


@on_loop
async def test_requests_go_on_while_many_receipts_are_made(tmp_path: Path) -> None:
    turns = 0
    at = list[int]()

    async def others() -> None:
        nonlocal turns
        while len(at) < 3 * TURN_COUNT:
            turns += 1
            await asyncio.sleep(0)

    def made() -> Iterator[Receipt]:
        for each in numbered(*range(3 * TURN_COUNT)):
            at.append(turns)
            yield each

    file = ReceiptFile(tmp_path / "receipts", bytes_max=1 << 20)
    await asyncio.gather(file.write(made()), others())
    assert at[0] < at[TURN_COUNT] < at[2 * TURN_COUNT]

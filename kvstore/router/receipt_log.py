"""Receipts on disk: one JSON line for each decision, written behind the loop, bounded.

    core ─▶ take_drafts ─▶ FILE (appended) ─ half of the size ─▶ FILE.1, in place of the last

Lines hold names, lengths and numbers: no text, token or key. A disk that fails or lags costs
receipts, never requests: the core keeps a bounded number and drops the oldest.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvstore.errors import ConfigError
from kvstore.routing.receipts import Receipt

TURN_COUNT: Final = 8
"""Receipts that are made in one turn of the loop: a millisecond with 64 workers."""

_log = logging.getLogger(__name__)


class ReceiptFile:
    """Appends receipts to a file. `written_count`, `failed_count`: receipts."""

    pause_s: Final = 0.2

    def __init__(self, path: Path | None, *, bytes_max: int) -> None:
        """`path`: None: receipts are dropped. `bytes_max`: of the file and the older one
        together.
        """
        self._path, self._half_bytes = path, bytes_max // 2
        self._appending = asyncio.Lock()
        self.written_count = 0
        self.failed_count = 0

    async def write(self, receipts: Iterable[Receipt]) -> None:
        """Append all of them, in one write, after those of earlier calls. Without a path they are
        not even made.

        A caller that is cancelled loses none: the write goes on, and the next call waits for it.
        """
        await asyncio.shield(self._append(receipts))

    async def _append(self, receipts: Iterable[Receipt]) -> None:
        if self._path is None:
            return
        async with self._appending:
            lines = list[bytes]()
            for receipt in receipts:
                lines.append(msgspec.json.encode(receipt) + b"\n")
                if len(lines) % TURN_COUNT == 0:
                    await asyncio.sleep(0)
            if not lines:
                return
            import aiofiles.os  # not above: `kvstore route` reads receipts without the extra router

            try:
                async with aiofiles.open(self._path, "ab", opener=_private) as file:
                    await file.write(b"".join(lines))
                    size = await file.tell()
                if size >= self._half_bytes:
                    await aiofiles.os.replace(self._path, older(self._path))
            except OSError as error:
                self.failed_count += len(lines)
                _log.warning("receipts cannot be written to %s: %s", self._path, error.strerror)
            else:
                self.written_count += len(lines)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o640)


def older(path: Path) -> Path:
    """Path of the older half of a log."""
    return path.with_name(path.name + ".1")


def read_receipts(path: Path) -> Iterator[Receipt]:
    """All receipts of a log, oldest first; a last line that is not whole is left out.

    Raises:
        ConfigError: the file cannot be read, or a line is no receipt of this version.
    """
    for each in (older(path), path):
        if each == path or os.path.lexists(each):
            try:
                text = each.read_bytes()
            except OSError as error:
                raise ConfigError(f"{each} cannot be read: {error.strerror}") from None
            for number, line in enumerate(text.splitlines(keepends=True), start=1):
                if line.endswith(b"\n"):
                    yield _receipt(each, number, line)


def _receipt(path: Path, number: int, line: bytes) -> Receipt:
    try:
        return msgspec.json.decode(line, type=Receipt)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} line {number} is no receipt: {error}") from None

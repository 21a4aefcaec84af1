"""A file tier that comes later: what is refused until then, and what is not lost."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.node import files
from kvstore.node.files import LateTier
from kvstore.tier_events import (
    FileKnown,
    FileTierEvent,
    ReadFile,
    RecoveryDone,
    Resumed,
    Suspended,
    VoidFile,
    WriteFile,
)
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.parts import Outbox
from kvstore.tiers.file.tier import FileTier
from kvstore.units import MIB
from tests.kit.set_clock import SetClock
from tests.unit.tiers.file.kit import SCOPE, SEGMENT_BYTES, Driver

WHY = "a file lies there"
WRITE = WriteFile(1, SCOPE, b"", np.zeros(0, "<u4"), b"")
READ = ReadFile(1, SCOPE, b"", np.zeros(0, "<u4"), b"", b"")
CLEAR = VoidFile(SCOPE.tenant, SCOPE.space)


class Opening:
    """Opens a directory from the moment a test allows it."""

    def __init__(self, path: Path) -> None:
        self.config = FileConfig(path, capacity_bytes=8 * MIB, segment_bytes=SEGMENT_BYTES)
        self.arena = np.zeros(MIB, np.uint8)
        self.may = threading.Event()
        self.hangs: threading.Event | None = None
        """Until it is set."""
        self.is_hanging = threading.Event()
        self.fails: list[OSError] = []
        self.tried = threading.Semaphore(0)

    def __call__(self, outbox: Outbox) -> FileTier:
        self.tried.release()
        if self.fails:
            raise self.fails.pop()
        if self.hangs is not None:
            self.is_hanging.set()
            assert self.hangs.wait(60)
        if not self.may.is_set():
            raise ConfigError(WHY)
        return FileTier(self.config, self.arena, SetClock(), outbox=outbox).start()


@pytest.fixture
def opening(tmp_path: Path) -> Opening:
    return Opening(tmp_path / "store")


@pytest.fixture
def tier(opening: Opening) -> Iterator[LateTier]:
    made = LateTier(opening.config.directory, opening, WHY, retry_s=0.01)
    yield made
    made.close()


def events_until(
    tier: LateTier, is_last: Callable[[list[FileTierEvent]], bool]
) -> list[FileTierEvent]:
    seen: list[FileTierEvent] = []
    while not is_last(seen):
        assert select.select([tier.fileno()], [], [], 60)[0]
        seen += tier.take_events()
    return seen


def is_open(seen: list[FileTierEvent]) -> bool:
    return Resumed(writes_only=False) in seen and RecoveryDone() in seen


def test_until_then_all_is_refused_and_it_is_tried_again(opening: Opening, tier: LateTier) -> None:
    for _ in range(3):
        opening.tried.acquire()
    assert list(tier.take_events()) == [Suspended(f"{WHY}; it is tried again by itself", False)]
    assert not tier.submit(WRITE)
    assert not tier.submit(READ)
    assert not tier.wait_for_voids(0)
    opening.may.set()
    events_until(tier, is_open)
    assert tier.wait_for_voids(60)
    assert tier.submit(READ)


def test_what_is_there_is_told_when_it_opens(opening: Opening, tier: LateTier) -> None:
    written(opening.config.directory)
    opening.may.set()
    assert any(isinstance(event, FileKnown) for event in events_until(tier, is_open))


@pytest.mark.parametrize("voids_max", [files.VOIDS_MAX, 1])
def test_what_is_cleared_before_it_opens_stays_so(
    opening: Opening, tier: LateTier, voids_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "VOIDS_MAX", voids_max)
    written(opening.config.directory)
    tier.submit(CLEAR)
    tier.submit(VoidFile("another", None))
    opening.may.set()
    assert not any(isinstance(event, FileKnown) for event in events_until(tier, is_open))
    assert tier.wait_for_voids(60)
    tier.close()
    again = Driver(opening.config.directory).recovered()
    assert again.known == {}
    again.close()


def test_a_disk_that_hangs_while_it_opens_delays_no_clear(opening: Opening, tier: LateTier) -> None:
    opening.hangs = threading.Event()
    written(opening.config.directory)
    opening.may.set()
    assert opening.is_hanging.wait(60)
    clearing = threading.Thread(target=tier.submit, args=(CLEAR,))
    clearing.start()
    clearing.join(30)
    is_waiting = clearing.is_alive()
    opening.hangs.set()
    assert not is_waiting
    assert not any(isinstance(event, FileKnown) for event in events_until(tier, is_open))


def test_what_passes_while_it_opens_is_tried_again(opening: Opening, tier: LateTier) -> None:
    opening.fails = [OSError("too many open files")]
    opening.may.set()
    assert is_open(events_until(tier, is_open))
    assert not opening.fails


def written(directory: Path) -> None:
    driver = Driver(directory).recovered()
    assert 0 not in driver.write([1, 2])
    driver.close()

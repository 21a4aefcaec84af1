"""Stores that a test opens and need not close; a disk that fails as it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tiers.file.kit import OPENED, Driver, FaultyDisk

Start = Callable[..., Driver]


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    for driver in OPENED:
        if isinstance(driver.disk, FaultyDisk):
            driver.disk.fail.clear()
            driver.disk.go_on()
        driver.close()
    OPENED.clear()


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def start(tmp_path: Path, disk: FaultyDisk) -> Start:
    def make(**settings: Any) -> Driver:
        return Driver(tmp_path / "store", **{"disk": disk, **settings}).recovered()

    return make

"""Models and answers that one process of a run makes for all (`made_once`)."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.integration.engine.fixtures import made_once

WORKERS = ("gw0", "gw1", "gw2")


class Factory:
    """Of one process: its folder is beside those of the others."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def getbasetemp(self) -> Path:
        return self._base


def test_the_first_process_makes_it_and_the_others_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    makers = tmp_path / "makers"
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(len(WORKERS))

    def make(path: Path) -> None:
        with makers.open("a") as log:
            log.write("one ")
        threading.Event().wait(0.2)  # as long as others could come in between
        path.write_text("it")

    def ask(worker: str) -> None:
        factory: Any = Factory(tmp_path / worker)
        barrier.wait(60)
        assert made_once(factory, "thing", make).read_text() == "it"

    processes = [fork.Process(target=ask, args=(worker,)) for worker in WORKERS]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(WORKERS)
    assert makers.read_text() == "one "


def test_what_could_not_be_made_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    factory: Any = Factory(tmp_path / "gw0")
    with pytest.raises(OSError, match="no room"):
        made_once(factory, "thing", mock.Mock(side_effect=OSError("no room")))
    assert made_once(factory, "thing", Path.touch).exists()

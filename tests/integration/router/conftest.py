"""Engines that all tests of the router share: scripted processes, back at `ok` before each test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kit.scripted_worker import ScriptedWorker


@pytest.fixture(scope="package")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ScriptedWorker]]:
    """By name. What they have counted is of earlier tests, too."""
    directory = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        yield {n: stack.enter_context(ScriptedWorker.start(directory, n)) for n in "ab"}


@pytest.fixture
def workers(crew: dict[str, ScriptedWorker]) -> list[ScriptedWorker]:
    """a and b."""
    for each in crew.values():
        each.script("ok")
    return [*crew.values()]


@pytest.fixture
def worker(workers: list[ScriptedWorker]) -> ScriptedWorker:
    """a."""
    return workers[0]

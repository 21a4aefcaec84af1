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
        yield {n: stack.enter_context(ScriptedWorker.start(directory, n)) for n in "abcdepq"}


@pytest.fixture
def engines(crew: dict[str, ScriptedWorker]) -> list[ScriptedWorker]:
    """a, b … e."""
    found = [crew[name] for name in "abcde"]
    for each in found:
        each.script("ok")
    return found


@pytest.fixture
def workers(engines: list[ScriptedWorker]) -> list[ScriptedWorker]:
    """a and b."""
    return engines[:2]


@pytest.fixture
def worker(engines: list[ScriptedWorker]) -> ScriptedWorker:
    """a."""
    return engines[0]

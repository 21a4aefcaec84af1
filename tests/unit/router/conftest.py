"""Engines that tests of a whole router share, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.kit.scripted_worker import VirtualWorker
from tests.kit.virtual_loop import VirtualLoop


@pytest.fixture
def virtual() -> Iterator[VirtualLoop]:
    """The loop that is set."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.end()


@pytest.fixture
def crew(virtual: VirtualLoop) -> Iterator[dict[str, VirtualWorker]]:
    """By name."""
    found = {name: VirtualWorker(virtual, name) for name in "abcdepq"}
    yield found
    for each in found.values():
        virtual.run_until_complete(each.close())


@pytest.fixture
def engines(crew: dict[str, VirtualWorker]) -> list[VirtualWorker]:
    """a, b … e."""
    return [crew[name] for name in "abcde"]


@pytest.fixture
def workers(engines: list[VirtualWorker]) -> list[VirtualWorker]:
    """a and b."""
    return engines[:2]


@pytest.fixture
def worker(engines: list[VirtualWorker]) -> VirtualWorker:
    """a."""
    return engines[0]

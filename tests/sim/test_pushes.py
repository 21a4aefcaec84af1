"""Worlds that push: as many pushes as come in a day, with late writes, words twice and in another
order, and epochs from before a restart. All that the world promises holds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.amounts import IS_NIGHTLY, amount, covered
from tests.sim.world.peers import STRAY
from tests.sim.world.play import World
from tests.sim.world.transfer_worker import LINGERS, STOPS_HALF_WAY

PUSHES = amount(150, nightly=10_000)
STEPS = 1000
SHARE = 0.4
"""Of the events of these worlds: four times as many begin and end as in others."""
SEEDS = range(20_004, 40_000, 8)
"""Worlds with landing memory."""
FOUND = (20_100,)
"""A look at a shared directory that was held up was followed by none for ten times as long."""
HAPPEN = (
    LINGERS,
    STOPS_HALF_WAY,
    STRAY,
    "transfer worker dies",
    "node killed",
    "warm kill",
    "partition",
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The story says what happens."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


def of_many_pushes(seed: int) -> World:
    """A world."""
    world = World(seed)
    world.push_share = SHARE
    return world


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_stays_mended(seed: int) -> None:
    assert of_many_pushes(seed).run(STEPS).finished


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_pushes_hold() -> None:
    pushes = blocks = 0
    faults = Counter[str]()
    for seed in SEEDS:
        result = of_many_pushes(seed).run(STEPS)
        pushes, blocks = pushes + result.pushes, blocks + result.pushed_blocks
        faults.update(result.faults)
        if pushes >= PUSHES:
            break
    assert pushes >= PUSHES
    assert blocks
    if IS_NIGHTLY:
        assert not [name for name in HAPPEN if faults[name] < 10], faults
    covered("pushes of the world", pushes)
    covered("blocks pushed in the world", blocks)

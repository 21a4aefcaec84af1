"""The seeded world sees: every bug that is planted is noticed within 200 seeds."""

from __future__ import annotations

import pytest

from kvstore.engine.engine import Engine
from kvstore.testing.sim_rank import Violation
from kvstore.testing.world import World
from tests.sim import planted

STEPS = 600
SEEDS = range(1, 201)
SOONER = {
    planted.free_on_abort: 12,
    planted.lease_checked_before_the_copy_only: 31,
    planted.batch_path_without_check: 90,
    planted.verdict_not_invalidated: 19,
    planted.size_only_validation: 15,
    planted.first_of_several_errors_frees: 21,
    planted.hit_without_load: 2,
    planted.truncated_hash: 2,
}
"""Seeds at which it was noticed once, tried first: whatever changes in the product moves them."""


def notices(seed: int) -> bool:
    try:
        World(seed).run(STEPS)
    except Violation:
        return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("plant", planted.PLANTED, ids=lambda plant: plant.__name__)
def test_each_is_noticed_within_200_seeds(
    plant: planted.Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The accounts of a broken engine may be in order; it is the promises that must notice.
    monkeypatch.setattr(Engine, "check", lambda _: None)
    with plant():
        seed = next(filter(notices, [SOONER.get(plant, 1), *SEEDS]), None)
    assert seed is not None, f"{len(SEEDS)} seeds held"
    assert not notices(seed), "and nothing else did it"


def test_all_twelve_are_accounted_for() -> None:
    names = {plant.__name__ for plant in planted.PLANTED}
    assert len(names | set(planted.NOT_YET)) == 12

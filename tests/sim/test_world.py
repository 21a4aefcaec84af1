"""The seeded world holds, repeats itself, and notices when something is broken on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from kvstore.client.core.lookups import Stage
from kvstore.client.core.rank import RankCore
from kvstore.client.core.scheduler import SchedulerCore
from kvstore.engine.engine import Engine
from kvstore.testing.sim_engine import SimEngine, SimRequest, Violation
from kvstore.testing.sim_parts import FAULTS
from kvstore.testing.world import World, WorldResult
from tests.unit.engine import broken

STEPS = 600
FEW, MANY = range(1, 21), range(21, 171)
SEEDS_TO_NOTICE = 100


def run(seeds: range) -> list[WorldResult]:
    return [World(seed).run(STEPS) for seed in seeds]


def check(results: list[WorldResult], *, times: int) -> None:
    totals: Counter[str] = Counter()
    for result in results:
        totals.update(result.faults)
    assert set(totals) == set(FAULTS)
    assert min(totals.values()) >= times, f"a fault hardly happens: {totals}"
    assert sum(result.finished for result in results) > 20 * len(results)
    assert sum(result.loaded_blocks for result in results) > 10 * len(results)


def test_few_seeds_hold() -> None:
    check(run(FEW), times=10)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_seeds_hold() -> None:
    check(run(MANY), times=100)


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_seed_repeats_itself(seed: int) -> None:
    assert World(seed).run(STEPS) == World(seed).run(STEPS)


def test_seeds_differ() -> None:
    assert len({result.trace for result in run(range(1, 6))}) == 5


# ── broken on purpose ────────────────────────────────────────────────────────────────────────────


def fence_ignored(patch: pytest.MonkeyPatch) -> None:
    """Blocks are overwritten while a store has yet to read them."""
    patch.setattr(RankCore, "fence", lambda *_: False)


def stores_while_loading(patch: pytest.MonkeyPatch) -> None:
    """A request's blocks are bound to stores while its load still writes them."""
    full_blocks = SchedulerCore.full_blocks

    def changed(self: SchedulerCore, request: str, **tokens: int) -> int:
        entry = self._requests.get(request)
        if entry is None or entry.lookup.stage is not Stage.LOADING:
            return full_blocks(self, request, **tokens)
        entry.lookup.stage = Stage.NONE
        full = full_blocks(self, request, **tokens)
        entry.lookup.stage = Stage.LOADING
        return full

    patch.setattr(SchedulerCore, "full_blocks", changed)


def freed_while_loading(patch: pytest.MonkeyPatch) -> None:
    """An aborted request's blocks are handed out while its load still writes them."""

    def changed(self: SimEngine, request: SimRequest) -> None:
        self.core.finished(request.name)
        (self.running if request in self.running else self.waiting).remove(request)
        self._free(request)

    patch.setattr(SimEngine, "abort", changed)


Patch = Callable[[pytest.MonkeyPatch], None]
# The other engines of `broken` need a rank that seals what it no longer has, or a second process
# of a rank beside the first: no client here does that. The state machine notices those.
NOTICED: list[Patch] = [
    broken.generation_stays,
    broken.leases_do_not_hold,
    broken.no_quarantine,
    fence_ignored,
    stores_while_loading,
    freed_while_loading,
]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("change", NOTICED, ids=lambda change: change.__name__)
def test_what_is_broken_is_noticed(change: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    # The accounts of a broken engine may be in order; it is the promises that must notice.
    monkeypatch.setattr(Engine, "check", lambda _: None)
    for seed in range(1, SEEDS_TO_NOTICE + 1):
        try:
            World(seed).run(STEPS)
        except Violation:
            return
    pytest.fail(f"{SEEDS_TO_NOTICE} seeds held")

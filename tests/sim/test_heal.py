"""What must come back after the faults is really asked for: products that heal in all but one way.

Each is noticed by the very check that is there for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from kvstore.breaker import Breaker
from kvstore.client.core import lookups
from kvstore.engine.memory.journal import Journal
from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.slots import Slots, SlotState
from kvstore.engine.moves.stores import Stores
from kvstore.engine.sessions.owners import Owner
from kvstore.engine.sessions.sessions import Sessions
from kvstore.tiers.file import parts
from kvstore.tiers.file.catalog import Catalog
from kvstore.tiers.file.discovery import Peers
from tests.kit.planted import Patch, instead_of
from tests.sim.world import heal as sim_heal
from tests.sim.world.copies import Violation
from tests.sim.world.machine import Machine
from tests.sim.world.parts import DISK_CALL_FAULTS, Knobs
from tests.sim.world.play import World

STEPS = 1000
SEEDS = range(1, 101)


def the_engine_never_tries_again(patch: pytest.MonkeyPatch) -> None:
    class Deaf(Breaker):
        def succeeded(self) -> bool:
            return False

    patch.setattr(lookups, "Breaker", Deaf)


def the_disk_is_never_tried_again(patch: pytest.MonkeyPatch) -> None:
    class Stubborn(Breaker):
        def allows(self, now_ns: int) -> bool:
            return not self.is_open

    patch.setattr(parts, "Breaker", Stubborn)


@instead_of(Stores, "grant_all")
def after_a_quarantine_nothing_is_granted(grant_all: Any, self: Stores) -> None:
    if not self._state.counters.slots_quarantined:
        grant_all(self)


def quarantine_never_ends(patch: pytest.MonkeyPatch) -> None:
    # Of one more engine, at the end: before, a process that takes the memory over would see it.
    end, of_writer = sim_heal.end, Slots.of_writer

    def forgotten(self: Slots, writer: int) -> Words:
        words = of_writer(self, writer)
        left: Words = words[self.state[words] != SlotState.QUARANTINED]
        return left

    def changed(world: World) -> None:
        sim_heal.probe(world, world.machines[0])
        with pytest.MonkeyPatch.context() as at_the_end:
            at_the_end.setattr(Slots, "of_writer", forgotten)
            end(world)

    patch.setattr(sim_heal, "end", changed)


def who_is_gone_stays_attached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Owner, "is_empty", False)


def descriptors_stay_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalog, "close", lambda _: None)


@instead_of(Journal, "examine")
def nothing_is_taken_over(
    examine: Any, self: Journal, *, quotas: Sequence[str], writers: set[int]
) -> Any:
    found = examine(self, quotas=quotas, writers=writers)
    return msgspec.structs.replace(found, words=found.words[:0], scopes=found.scopes[:0])


def nobody_looks_at_the_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Peers, "_look_at", lambda *_: True)


def an_engine_is_never_complete(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sessions, "_open", lambda *_: None)


ROOMY = Knobs(arena_slots=512, ttl_ms=500)
"""Where a leak is no want of room: only the check for leaks can see it."""


class Unhealed(NamedTuple):
    """What is told of it, and the worlds that show it."""

    told: str
    knobs: Knobs | None = None
    faults: tuple[str, ...] = ()


UNHEALED: dict[Patch, Unhealed] = {
    the_engine_never_tries_again: Unhealed("does not use its node again"),
    the_disk_is_never_tried_again: Unhealed("never written to disk", faults=DISK_CALL_FAULTS[:6]),
    after_a_quarantine_nothing_is_granted: Unhealed("blocks again"),
    quarantine_never_ends: Unhealed("slots left granted, quarantined or leased", ROOMY),
    who_is_gone_stays_attached: Unhealed("still attached to", ROOMY),
    descriptors_stay_open: Unhealed("leaves files open"),
    nothing_is_taken_over: Unhealed("blocks are found by the next process"),
    nobody_looks_at_the_others: Unhealed("blocks of another one"),
    an_engine_is_never_complete: Unhealed("is not attached after the faults"),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("change", UNHEALED, ids=lambda change: change.__name__)
def test_what_does_not_heal_is_noticed(change: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    monkeypatch.setattr("tests.kit.engine_check.check_engine", lambda _: None)
    told, case = "", UNHEALED[change]
    for seed in SEEDS:
        try:
            World(seed, knobs=case.knobs, always=case.faults).run(STEPS)
        except Violation as violation:
            told = str(violation).split("\n")[0]
            if case.told in told:
                return  # another check may be the first to see it
    pytest.fail(f"{len(SEEDS)} seeds held, or broke another promise: {told}")


@pytest.mark.parametrize("slots", [4, 8, 24, 4096])
@pytest.mark.parametrize("credit_share", [0.125, 0.5])
def test_undisturbed_the_workload_finds_all_that_it_stored(slots: int, credit_share: float) -> None:
    knobs = Knobs(arena_slots=slots, credit_share=credit_share)
    world = World(1, knobs=knobs, faults=(), engine_count=1)
    engine = sim_heal.probe(world, world.machines[0])
    assert sim_heal.hits(engine, "undisturbed") == sim_heal.WORKLOAD_BLOCKS


def test_what_is_called_written_is_not_what_was_on_its_way_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Blocks that are offered while as many as may be are on their way are dropped: here the second
    # prompt's, as the disk begins when they are stored.
    knobs = Knobs(arena_slots=8, has_disk=True, io_deadline_ms=60_000)
    world = World(1, knobs=knobs, faults=(), engine_count=1)
    engine = sim_heal.probe(world, world.machines[0])
    counters, files_go_on = engine.machine.node.counters, Machine.files_go_on

    def late(self: Machine, turns: int) -> None:
        if counters.stores_sealed > 2:
            files_go_on(self, turns)

    monkeypatch.setattr(Machine, "files_go_on", late)
    keys = sim_heal.write(engine)
    sim_heal.restart(engine)
    assert sim_heal.ask(engine, keys) == len(keys)
    world.close()

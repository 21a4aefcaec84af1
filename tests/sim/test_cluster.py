"""Worlds that are clusters: nodes find each other's blocks, and everybody knows what there is."""

from __future__ import annotations

from tests.sim.world.play import World, run_case
from tests.sim.world.shrink import Case

STEPS = 400
CLUSTERS = (4, 8)


def test_every_fourth_world_is_a_cluster() -> None:
    worlds = [World(seed, faults=()) for seed in range(8, 13)]
    for world in worlds:
        world.close()
    assert [bool(world.cluster) for world in worlds] == [True, False, False, False, True]
    assert len(worlds[0].machines) > 1


def test_without_faults_nodes_fetch_what_others_hold() -> None:
    results = [run_case(Case(seed, STEPS, faults=())) for seed in CLUSTERS]
    assert all(result.fetched_blocks for result in results)
    assert not any(sum(result.faults.values()) for result in results)

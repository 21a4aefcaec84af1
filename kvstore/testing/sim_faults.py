"""What the world's faults do, each to somebody; those of single system calls are `sim_disk`'s.

Does not cover: which fault may happen, and when (`world`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.engine.events import Clear
from kvstore.testing import sim_disk
from kvstore.testing.sim_engine import SimEngine
from kvstore.testing.sim_rank import SimRank
from kvstore.units import NS_PER_MS
from kvstore.wire.space import fingerprint

if TYPE_CHECKING:
    from kvstore.testing.world import World


def happen(world: World, name: str) -> None:
    """Do it."""
    if name in _TO_THE_NODE:
        _TO_THE_NODE[name](world)
    elif name in _TO_AN_ENGINE:
        engine, rank = _somebody(world)
        world.note(f"it hits {rank.name}")
        _TO_AN_ENGINE[name](world, engine, rank)


def _somebody(world: World) -> tuple[SimEngine, SimRank]:
    """Rather one in the middle of a copy: there it hurts most."""
    source = world.random
    copying = [(e, r) for e in world.engines for r in e.ranks if r.copying]
    if copying and source.random() < 0.5:
        return source.choice(copying)
    engine = source.choice(world.engines)
    return engine, source.choice(engine.ranks)


# ── engines ──────────────────────────────────────────────────────────────────────────────────────


def _engine_killed(world: World, engine: SimEngine, _: SimRank) -> None:
    world.kill_engine(engine)
    world.start_engine()


def _rank_killed(world: World, engine: SimEngine, rank: SimRank) -> None:
    if engine.dead_rank is None:
        world.kill_rank(engine, rank)


def _scheduler_hangs_up(_: World, engine: SimEngine, __: SimRank) -> None:
    if engine.scheduler_socket:
        engine.drop_scheduler("fault")


def _rank_hangs_up(_: World, engine: SimEngine, rank: SimRank) -> None:
    if rank.socket and rank is not engine.dead_rank:
        rank.drop()
        rank.stall()


def _abort(world: World, engine: SimEngine, _: SimRank) -> None:
    candidates = [r for r in (*engine.waiting, *engine.running) if not r.aborted]
    loading = [r for r in candidates if r.loading]
    if loading and world.random.random() < 0.5:
        engine.abort(loading[0])
    elif candidates:
        engine.abort(world.random.choice(candidates))


def _preempt(world: World, engine: SimEngine, _: SimRank) -> None:
    if engine.running:
        engine.preempt(world.random.choice(engine.running))


def _copy_stalls(_: World, __: SimEngine, rank: SimRank) -> None:
    rank.stall()


def _reset(_: World, engine: SimEngine, __: SimRank) -> None:
    engine.reset()


# ── the node and its machine ─────────────────────────────────────────────────────────────────────


def _node_killed(world: World) -> None:
    world.kill_node()


def _node_upgraded(world: World) -> None:
    world.upgrade_node()


def _node_stopped(world: World) -> None:
    world.stopped_until_ns = world.now_ns + world.random.randint(10, 2000) * NS_PER_MS


def _clear(world: World) -> None:
    space = fingerprint(world.random.choice(world.spaces), weights_epoch="")
    filters = ((None, None), (None, "u"), (space, None))
    if world.node_runs:
        world.feed([Clear(*world.random.choice(filters))])


def _byte_flipped(world: World) -> None:
    world.memory.flip(world.random)


def _disk_bit_flipped(world: World) -> None:
    sim_disk.flip_bits(world.directory, world.random)


def _power_cut(world: World) -> None:
    """The machine dies, with all engines."""
    disk = world.disk
    world.kill_node()
    if disk is not None:
        disk.cut_power()
    for engine in list(world.engines):
        world.kill_engine(engine)
        world.start_engine()


def _directory_emptied(world: World) -> None:
    world.kill_node()
    sim_disk.empty(world.directory)


def _directory_swapped(world: World) -> None:
    """The node comes back with the directory that another one left."""
    world.kill_node()
    world.swap_directories()


_TO_AN_ENGINE: dict[str, Callable[[World, SimEngine, SimRank], None]] = {
    "engine killed": _engine_killed,
    "rank killed": _rank_killed,
    "scheduler hangs up": _scheduler_hangs_up,
    "rank hangs up": _rank_hangs_up,
    "abort": _abort,
    "preempt": _preempt,
    "copy stalls": _copy_stalls,
    "reset": _reset,
}
_TO_THE_NODE: dict[str, Callable[[World], None]] = {
    "node killed": _node_killed,
    "node upgraded": _node_upgraded,
    "node stopped": _node_stopped,
    "clear": _clear,
    "byte flipped": _byte_flipped,
    "disk bit flipped": _disk_bit_flipped,
    "power cut": _power_cut,
    "directory emptied": _directory_emptied,
    "directory swapped": _directory_swapped,
}

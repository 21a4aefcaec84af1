"""What the world's faults do, each to somebody.

Those of single system calls are `disk`'s, those of single copies `copies`', those of a
cluster `cluster_faults`'. Each function here says whether there was somebody to do it to: only
then the fault counts.

Does not cover: which fault may happen, and when (`world`).
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.units import NS_PER_MS
from kvstore.wire.space import fingerprint
from tests.sim.world import disk as sim_disk
from tests.sim.world.cluster_faults import TO_A_CLUSTER
from tests.sim.world.copies import Violation
from tests.sim.world.engine import SimEngine
from tests.sim.world.machine import Machine
from tests.sim.world.parts import WARM_KILL, WARM_UPGRADE
from tests.sim.world.rank import SimRank
from tests.sim.world.stage import Stage


def happen(world: Stage, name: str) -> Machine | None:
    """Do it. Returns where it happened; None: there was nobody to do it to."""
    if name in _TO_A_MACHINE:
        machine = world.random.choice(world.machines)
        world.note(f"fault {name} on {machine.name}")
        return machine if _TO_A_MACHINE[name](world, machine) else None
    engine, rank = _somebody(world)
    world.note(f"fault {name}, of {rank.name}")
    return engine.machine if _TO_AN_ENGINE[name](world, engine, rank) else None


def _somebody(world: Stage) -> tuple[SimEngine, SimRank]:
    """Rather one in the middle of a copy: there it hurts most."""
    source = world.random
    copying = [(e, r) for e in world.engines for r in e.ranks if r.copies.running]
    if copying and source.random() < 0.5:
        return source.choice(copying)
    engine = source.choice(world.engines)
    return engine, source.choice(engine.ranks)


# ── engines ──────────────────────────────────────────────────────────────────────────────────────


def _engine_killed(world: Stage, engine: SimEngine, _: SimRank) -> bool:
    world.kill_engine(engine)
    world.start_engine(engine.machine)
    return True


def _engine_stopped(world: Stage, engine: SimEngine, _: SimRank) -> bool:
    """A SIGSTOP of all its processes, in the middle of whatever they do."""
    engine.stop(world.random.choice((10, 300, 3000)) * NS_PER_MS)
    return True


def _rank_killed(world: Stage, engine: SimEngine, rank: SimRank) -> bool:
    if engine.dead_rank is not None:
        return False
    world.kill_rank(engine, rank)
    return True


def _scheduler_hangs_up(_: Stage, engine: SimEngine, __: SimRank) -> bool:
    if engine.scheduler_socket:
        engine.drop_scheduler("fault")
        return True
    return False


def _rank_hangs_up(_: Stage, engine: SimEngine, rank: SimRank) -> bool:
    if rank.socket and rank is not engine.dead_rank:
        rank.drop()
        rank.copies.stall()
        return True
    return False


def _late_write(world: Stage, engine: SimEngine, rank: SimRank) -> bool:
    """Its socket ends in the middle of a copy, which ends much later."""
    copying = [(e, r) for e in world.engines for r in e.ranks if r.copies.running]
    engine, rank = world.random.choice(copying or [(engine, rank)])
    return rank.copies.running is not None and _rank_hangs_up(world, engine, rank)


def _abort(world: Stage, engine: SimEngine, _: SimRank) -> bool:
    candidates = [r for r in (*engine.waiting, *engine.running) if not r.aborted]
    loading = [r for r in candidates if r.loading]
    if loading and world.random.random() < 0.5:
        engine.abort(loading[0])
    elif candidates:
        engine.abort(world.random.choice(candidates))
    return bool(candidates)


def _preempt(world: Stage, engine: SimEngine, _: SimRank) -> bool:
    if engine.running:
        engine.preempt(world.random.choice(engine.running))
        return True
    return False


def _copy_stalls(_: Stage, __: SimEngine, rank: SimRank) -> bool:
    rank.copies.stall()
    return rank.copies.running is not None


def _reset(_: Stage, engine: SimEngine, __: SimRank) -> bool:
    engine.reset()
    return True


# ── a machine and its node ───────────────────────────────────────────────────────────────────────


def _node_killed(_: Stage, machine: Machine) -> bool:
    was_up = machine.node_up
    machine.kill_node()
    return was_up


def _node_upgraded(_: Stage, machine: Machine) -> bool:
    return machine.upgrade_node()


def _warm_kill(_: Stage, machine: Machine) -> bool:
    return machine.kill_node_warm()


def _warm_upgrade(_: Stage, machine: Machine) -> bool:
    return machine.upgrade_node(warm=True)


def _node_stopped(world: Stage, machine: Machine) -> bool:
    machine.stopped_until_ns = world.now_ns + world.random.randint(10, 2000) * NS_PER_MS
    return machine.node_up


def _machine_suspended(world: Stage, machine: Machine) -> bool:
    """Clocks stand still, or jump when it wakes."""
    if not machine.runs:
        return False
    duration_ns = world.random.choice((50, 1000, 20_000)) * NS_PER_MS
    machine.suspend(duration_ns, clock_stands_still=world.random.random() < 0.5)
    return True


def _clear(world: Stage, machine: Machine) -> bool:
    space = fingerprint(world.random.choice(world.spaces), weights_epoch="")
    filters = ((None, None), (None, "u"), (space, None))
    return machine.clear(*world.random.choice(filters))


def _byte_flipped(world: Stage, machine: Machine) -> bool:
    was_flipped = machine.memory.flip(world.random)
    machine.was_damaged |= was_flipped
    return was_flipped


def _arena_scribbled(world: Stage, machine: Machine) -> bool:
    machine.memory.scribble(world.random)
    machine.was_damaged = True
    return True


def _disk_bit_flipped(world: Stage, machine: Machine) -> bool:
    return machine.directory is not None and sim_disk.flip_bits(machine.directory, world.random)


def _power_cut(world: Stage, machine: Machine) -> bool:
    """The machine dies, with all engines."""
    disk = machine.disk
    machine.kill_node()
    if disk is not None:
        disk.cut_power()
    for engine in [engine for engine in world.engines if engine.machine is machine]:
        world.kill_engine(engine)
        world.start_engine(machine)
    return disk is not None


def _directory_emptied(_: Stage, machine: Machine) -> bool:
    machine.kill_node()
    return machine.empty_directory()


def _directory_swapped(world: Stage, machine: Machine) -> bool:
    """The node comes back with the directory that another one left."""
    machine.kill_node()
    others = [other for other in world.machines if other is not machine]
    if others and world.random.random() < 0.5:
        other = world.random.choice(others)
        other.kill_node()
        machine.swap_directory(other)
    else:
        machine.swap_directory()
    return True


def _older_layout(world: Stage, machine: Machine) -> bool:
    """The directory of another version: the node says so and does not start; it is given another
    one then."""
    machine.kill_node()
    if machine.directory is None or not sim_disk.make_older(machine.directory):
        return False
    machine.start_node()
    if machine.node_up and "misdirected read" not in world.enabled:
        raise Violation(f"{machine.name} starts with a directory of another version")
    machine.kill_node()
    world.note("somebody empties it")
    return machine.empty_directory()


_TO_AN_ENGINE: dict[str, Callable[[Stage, SimEngine, SimRank], bool]] = {
    "engine killed": _engine_killed,
    "engine stopped": _engine_stopped,
    "rank killed": _rank_killed,
    "scheduler hangs up": _scheduler_hangs_up,
    "rank hangs up": _rank_hangs_up,
    "late write": _late_write,
    "abort": _abort,
    "preempt": _preempt,
    "copy stalls": _copy_stalls,
    "reset": _reset,
}
_TO_A_MACHINE: dict[str, Callable[[Stage, Machine], bool]] = {
    "node killed": _node_killed,
    "node upgraded": _node_upgraded,
    WARM_KILL: _warm_kill,
    WARM_UPGRADE: _warm_upgrade,
    "node stopped": _node_stopped,
    "machine suspended": _machine_suspended,
    "clear": _clear,
    "byte flipped": _byte_flipped,
    "arena scribbled": _arena_scribbled,
    "disk bit flipped": _disk_bit_flipped,
    "power cut": _power_cut,
    "directory emptied": _directory_emptied,
    "directory swapped": _directory_swapped,
    "older layout": _older_layout,
    **TO_A_CLUSTER,
}

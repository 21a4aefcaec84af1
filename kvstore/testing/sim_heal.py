"""After the faults: everything converges, the cache works again, and nothing is left over.

Does not cover: what went wrong before (`sim_faults`).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvstore.testing.sim_engine import BLOCK_TOKENS, SimEngine, SimRequest
from kvstore.testing.sim_parts import Knobs
from kvstore.testing.sim_rank import Violation
from kvstore.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from kvstore.testing.world import World

_PROBE_BLOCKS = 2
_ROUNDS = 20
_COOLDOWN_NS = 10 * NS_PER_S
"""Between two rounds: breakers that opened meanwhile allow another probe."""


def heal(world: World) -> None:
    """All faults end; all requests finish, all engines attach."""
    world.enabled = set()
    world.stopped_until_ns = 0
    world.disturbed_ns = world.now_ns
    if not world.node_up:
        world.restart_node()
    for _ in range(20_000):
        world.event(faulty=False)
        if all(engine.idle for engine in world.engines):
            break
    for engine in world.engines:
        if not engine.idle:
            raise Violation(f"{engine.name} did not finish its requests after the faults")
        if engine.core.leases_open:
            raise Violation(f"{engine.name} holds {engine.core.leases_open} leases, idle")
    for engine in world.engines:
        _attach(world, engine)


def _attach(world: World, engine: SimEngine) -> None:
    for _ in range(400):
        engine.poll_scheduler()
        for rank in engine.ranks:
            rank.poll()
        world.now_ns += 5 * NS_PER_MS
        world.node_step()
        if engine.core.attachment.is_open:
            return
    raise Violation(f"{engine.name} is not attached after the faults")


# ── hits ─────────────────────────────────────────────────────────────────────────────────────────


def find_again(world: World) -> None:
    """A new engine, alone, finds what it stored: in dram, and with a disk after a restart."""
    _kill_engines(world)
    engine = SimEngine(world, "probe", space=world.spaces[0], blocks=16, knobs=Knobs())
    world.engines.append(engine)
    _attach(world, engine)
    for number in range(_ROUNDS):
        keys = _keys(f"dram/{number}")
        _ask(world, engine, keys)
        if _ask(world, engine, keys) == _PROBE_BLOCKS:
            break
    else:
        raise Violation("what was just stored is never found in dram")
    # Into small arenas nothing is promoted: a quarter of them is in motion at most.
    if world.disk is not None and world.knobs.arena_slots >= 4 * _PROBE_BLOCKS:
        _find_on_disk(world, engine)


def _find_on_disk(world: World, engine: SimEngine) -> None:
    _restart(world, engine)  # a segment that was begun amid faults may have lost its first page
    for number in range(_ROUNDS):
        keys, before = _keys(f"disk/{number}"), world.node.counters.file_blocks_written
        _ask(world, engine, keys)
        if world.node.counters.file_blocks_written >= before + _PROBE_BLOCKS:
            break
        world.now_ns += _COOLDOWN_NS
    else:
        raise Violation("what is stored is never written to disk")
    _restart(world, engine)
    found = _ask(world, engine, keys)
    if found != _PROBE_BLOCKS:
        raise Violation(f"{found} of {_PROBE_BLOCKS} blocks are found after an orderly restart")


def _restart(world: World, engine: SimEngine) -> None:
    """In order, until all is known again."""
    world.upgrade_node()
    world.restart_node()
    _attach(world, engine)
    for _ in range(30):
        _turn(world, engine)


def _keys(name: str) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(_PROBE_BLOCKS)]


def _ask(world: World, engine: SimEngine, keys: list[bytes]) -> int:
    """One request, undisturbed; how many blocks it loaded."""
    before, finished = engine.loaded_blocks, engine.finished_count
    request = SimRequest("probe", keys, tokens=len(keys) * BLOCK_TOKENS + 2, decode_tokens=8)
    world.node_step()
    engine.add(request)
    for _ in range(400):
        _turn(world, engine)
        if engine.finished_count > finished:
            break
    else:
        raise Violation("a request does not finish, undisturbed")
    for _ in range(10):
        _turn(world, engine)
    return engine.loaded_blocks - before


def _turn(world: World, engine: SimEngine) -> None:
    """Everybody goes on a little."""
    world.now_ns += NS_PER_MS
    world.node_step()
    engine.step()
    for _ in range(8):
        engine.copy_step()
    for rank in engine.ranks:
        rank.poll()
    world.files_go_on(20)


# ── the end ──────────────────────────────────────────────────────────────────────────────────────


def end(world: World) -> None:
    """All engines die; the node must be at baseline."""
    _kill_engines(world)
    for _ in range(5):
        world.now_ns += world.knobs.ttl_ms * NS_PER_MS
        world.files_go_on(100)
        world.node_step()
    leases = list(world.node.leases())
    if leases:
        raise Violation(f"leases left on the node: {leases[:3]}")
    for tier in world.node.tiers():
        if tier.slots_granted + tier.slots_quarantined + tier.slots_leased:
            raise Violation(f"slots left granted, quarantined or leased: {tier}")


def _kill_engines(world: World) -> None:
    for engine in list(world.engines):
        world.kill_engine(engine)
    world.end_late_exits()

"""After the faults: everything converges, the cache works again, and nothing is left over.

Each machine must find at least 95 % of what one finds that never had a fault, which is all (I13): a
workload of its own, asked by a new engine, before 10 s of virtual time are over. What is in memory
is found by the next process that takes it over, what is on disk after an orderly restart; in a
shared directory by another machine too, when the node that wrote it was killed.

Does not cover: what went wrong before (`faults`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from kvstore.types import KEY_BYTES, Tier
from kvstore.units import NS_PER_MS, NS_PER_S
from tests.kit import engine_check
from tests.kit.cores import is_serving
from tests.sim.world.copies import Violation
from tests.sim.world.engine import SimEngine
from tests.sim.world.groups import BLOCK_TOKENS
from tests.sim.world.machine import Machine
from tests.sim.world.parts import Knobs
from tests.sim.world.requests import SimRequest
from tests.sim.world.stage import Stage

_PROBE_BLOCKS: Final = 2
_PROBES: Final = 3
"""Prompts of the workload, each asked for twice: small enough for most arenas."""
WORKLOAD_BLOCKS: Final = _PROBES * _PROBE_BLOCKS
"""All of it can be found, and is where nothing ever went wrong: a test holds that."""
SHARE_MIN: Final = 0.95
_CONVERGED_NS_MAX: Final = 10 * NS_PER_S
_FETCHED_NS_MAX: Final = 40 * NS_PER_S
"""A peer that failed often is left alone for up to 30 s."""
_TOLD_NS: Final = NS_PER_S // 5
"""Until the index knows."""
_ROUNDS: Final = 20
_COOLDOWN_NS: Final = 10 * NS_PER_S
"""Between two rounds: breakers that opened meanwhile allow another probe."""
_TURNS_TO_DISK: Final = 30
"""For the threads of a file tier, of which one may recover what it can."""


def heal(world: Stage, go_on: Callable[[], None]) -> None:
    """All faults end; all requests finish, all engines attach, and are served."""
    _end_faults(world)
    for _ in range(20_000):
        go_on()
        if all(engine.idle for engine in world.engines):
            break
    for engine in world.engines:
        if not engine.idle:
            raise Violation(f"{engine.name} did not finish its requests after the faults")
        if engine.core.lookups.leases_open:
            raise Violation(f"{engine.name} holds {engine.core.lookups.leases_open} leases, idle")
    for engine in world.engines:
        _attach(engine)
        _serve_again(engine)
    if world.cluster is not None:
        world.cluster.converge()


def _end_faults(world: Stage) -> None:
    world.enabled = set()
    if world.cluster is not None:
        world.cluster.heal()
    # A clock that stands still is behind until its machine wakes.
    world.now_ns = max([world.now_ns, *(m.suspended_until_ns for m in world.machines)])
    for machine in world.machines:
        machine.stopped_until_ns = 0
        machine.disturbed_ns = world.now_ns
        if not machine.node_up:
            machine.restart_node()
    for engine in world.engines:
        engine.go_on()


def _attach(engine: SimEngine) -> None:
    machine = engine.machine
    for _ in range(400):
        engine.poll_scheduler()
        for rank in engine.ranks:
            rank.poll()
        machine.world.pass_time()
        machine.node_step()
        if engine.core.attachment.is_open:
            return
    raise Violation(f"{engine.name} is not attached after the faults")


def _serve_again(engine: SimEngine) -> None:
    """None of its questions is refused. The breaker of loads closes with the first that succeeds,
    which a pool too small for a prompt never has."""
    machine = engine.machine
    for number in range(_ROUNDS):
        keys = _keys(f"{machine.name}/{engine.name}/{number}")
        ask(engine, keys)
        ask(engine, keys)
        engine.core.stats.take()
        found = ask(engine, keys)
        if "misses:breaker open" not in engine.core.stats.take() and (
            is_serving(engine.core) or not found
        ):
            return
        machine.world.now_ns += _COOLDOWN_NS
    raise Violation(f"{engine.name} does not use its node again")


# ── hits ─────────────────────────────────────────────────────────────────────────────────────────


def find_again(world: Stage) -> None:
    """New engines find what they store: in dram, after a restart, on another machine."""
    _kill_engines(world)
    world.hit_share = min(_hit_share(world, machine) for machine in world.machines)
    if world.cluster is not None:
        _find_at_another(world)
        _kill_engines(world)
    _find_warm(probe(world, world.random.choice(world.machines)))
    _kill_engines(world)
    # Into small arenas nothing is promoted: a quarter of them is in motion at most.
    if world.knobs.has_disk and world.knobs.arena_slots >= 4 * _PROBE_BLOCKS:
        _find_on_disk(world)


_PATIENT = Knobs(prefill_ns_per_token=400_000_000)
"""Computing takes so long that a read is waited for, however many turns its thread takes."""


def probe(world: Stage, machine: Machine) -> SimEngine:
    """A new engine, alone on its machine."""
    name, space = world.next_engine_name(), world.spaces[0]
    engine = SimEngine(machine, name, space=space, blocks=16, knobs=_PATIENT, kinds=("full",))
    world.engines.append(engine)
    _attach(engine)
    return engine


def _hit_share(world: Stage, machine: Machine) -> float:
    """Of the workload: what this machine finds, as soon as it has converged."""
    engine = probe(world, machine)
    found, rounds, end_ns = 0, 0, world.now_ns + _CONVERGED_NS_MAX
    while found < SHARE_MIN * WORKLOAD_BLOCKS:
        if world.now_ns > end_ns:
            raise Violation(f"{machine.name} finds {found} of {WORKLOAD_BLOCKS} blocks again")
        found = hits(engine, f"{machine.name}/dram/{rounds}")
        rounds += 1
    _kill_engines(world)
    return found / WORKLOAD_BLOCKS


def hits(engine: SimEngine, name: str) -> int:
    """The workload: each prompt twice. How many blocks were loaded."""
    found = 0
    for number in range(_PROBES):
        keys = _keys(f"{name}/{number}")
        found += ask(engine, keys) + ask(engine, keys)
    return found


def _find_warm(engine: SimEngine) -> None:
    """What is in memory is found by the next process of the node."""
    machine = engine.machine
    for number in range(_ROUNDS):
        keys = _keys(f"warm/{number}")
        ask(engine, keys)
        if ask(engine, keys) == _PROBE_BLOCKS:
            break
        machine.world.now_ns += _COOLDOWN_NS
    else:
        raise Violation("what is stored is never found again")
    machine.upgrade_node(warm=True)
    machine.restart_node()
    _attach(engine)
    found = ask(engine, keys)
    if found != _PROBE_BLOCKS:
        raise Violation(f"{found} of {_PROBE_BLOCKS} blocks are found by the next process")


def _find_at_another(world: Stage) -> None:
    """What each machine has in memory is fetched by the next one, wherever it stands in a ring."""
    machines = world.machines
    finders = [probe(world, machine) for machine in machines]
    for owner, finder in zip(finders, [*finders[1:], finders[0]], strict=True):
        end_ns = world.now_ns + _FETCHED_NS_MAX
        number = found = 0
        while found < _PROBE_BLOCKS:
            if world.now_ns > end_ns:
                pair = f"{finder.machine.name} does not fetch from {owner.machine.name}"
                raise Violation(f"{pair} again")
            keys = _keys(f"{owner.machine.name}/peer/{number}")
            number += 1
            ask(owner, keys)
            assert world.cluster is not None
            world.cluster.be_quiet(_TOLD_NS)
            found = ask(finder, keys)


def _find_on_disk(world: Stage) -> None:
    machine = world.random.choice(world.machines)
    engine = probe(world, machine)
    write(engine)
    restart(engine)  # a segment that was begun amid faults may have lost its first page
    keys = write(engine)
    restart(engine)
    found = ask(engine, keys)
    if found != _PROBE_BLOCKS:
        raise Violation(f"{found} of {_PROBE_BLOCKS} blocks are found after an orderly restart")
    others = [other for other in world.machines if other is not machine]
    if others and world.knobs.is_shared:
        _find_elsewhere(engine, probe(world, world.random.choice(others)))


def write(engine: SimEngine) -> list[bytes]:
    """Keys of blocks that are on disk now: these, and not others that were on their way there."""
    world = engine.world
    for number in range(_ROUNDS):
        keys = _keys(f"disk/{world.now_ns}/{number}")
        ask(engine, keys)
        for _ in range(_TURNS_TO_DISK):
            if _on_disk(engine.machine).issuperset(keys):
                return keys
            _turn(engine)
        world.now_ns += _COOLDOWN_NS
    raise Violation("what is stored is never written to disk")


def _on_disk(machine: Machine) -> set[bytes]:
    """Keys of what the file tier holds, as the node knows it."""
    changes, _ = machine.node.held(0)  # no node of the world has more rows than one slice
    keys = b"".join(change.keys for change in changes if change.tier is Tier.FILE)
    return {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}


def _find_elsewhere(owner: SimEngine, finder: SimEngine) -> None:
    """What a machine wrote, whose node is dead now, is found through the shared directory."""
    found, machine = 0, finder.machine
    for _ in range(_ROUNDS):
        if not _has_rows(machine):
            return
        keys = write(owner)
        owner.machine.kill_node()
        machine.world.now_ns += machine.knobs.poll_interval_ms * NS_PER_MS
        for _ in range(_TURNS_TO_DISK):
            _turn(finder)
        found = ask(finder, keys)
        owner.machine.restart_node()
        if found == _PROBE_BLOCKS:
            return
        machine.world.now_ns += _COOLDOWN_NS
        _attach(owner)
    raise Violation(f"{machine.name} finds {found} of {_PROBE_BLOCKS} blocks of another one")


def _has_rows(machine: Machine) -> bool:
    """Whether its node may know of more blocks that are only on disk: others' are the last to get
    a row of its table."""
    (node,), dram = machine.node.nodes(), machine.node.tiers()[0]
    return node.blocks - dram.blocks + 4 * _PROBE_BLOCKS <= machine.knobs.disk_rows


def restart(engine: SimEngine) -> None:
    """In order, until all is known again."""
    engine.machine.upgrade_node()
    engine.machine.restart_node()
    _attach(engine)
    for _ in range(_TURNS_TO_DISK):
        _turn(engine)


_TURNS_TO_ANSWER = 2_500
"""Of a millisecond: an engine waits for a disk for two seconds at most."""


def _keys(name: str) -> list[bytes]:
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(_PROBE_BLOCKS)]


def ask(engine: SimEngine, keys: list[bytes]) -> int:
    """One request, undisturbed; how many blocks it loaded."""
    before, finished = engine.loaded_blocks, engine.finished_count
    request = SimRequest("probe", keys, tokens=len(keys) * BLOCK_TOKENS + 2, decode_tokens=8)
    engine.machine.node_step()
    engine.add(request)
    for _ in range(_TURNS_TO_ANSWER):
        _turn(engine)
        if engine.finished_count > finished:
            break
    else:
        raise Violation("a request does not finish, undisturbed")
    for _ in range(5):
        _turn(engine)
    return engine.loaded_blocks - before


def _turn(engine: SimEngine) -> None:
    """Everybody on its machine goes on a little."""
    machine = engine.machine
    machine.world.now_ns += NS_PER_MS
    machine.node_step()
    engine.step()
    for _ in range(8):
        if not engine.copy_step():
            break
    for rank in engine.ranks:
        rank.poll()
    machine.files_go_on(20)


# ── the end ──────────────────────────────────────────────────────────────────────────────────────


_READ_MS_MAX: Final = 10_000
_TURNS_TO_END: Final = 100
"""Whose turn it is is the seed's choice: a recovery under way may take many before a write's."""


def end(world: Stage) -> None:
    """All engines die; the nodes must be at baseline once every time limit is over: a write that
    waits for room holds its slots as long as it may."""
    _kill_engines(world)
    turn_ms = max(world.knobs.ttl_ms, world.knobs.io_deadline_ms)
    if world.cluster is not None:  # a read that never ends has its own time, of seconds
        turn_ms = max(turn_ms, _READ_MS_MAX // _TURNS_TO_END)
    for turn in range(_TURNS_TO_END):
        world.now_ns += turn_ms * NS_PER_MS
        for machine in world.machines:
            machine.files_go_on(100)
            machine.node_step()
        nodes = [machine.node for machine in world.machines]
        held = sum(t.slots_leased + t.slots_granted for node in nodes for t in node.tiers())
        # Landing memory of a write that failed is nobody's for some seconds.
        held += sum(node.grants.landing_bytes()["limbo",] for node in nodes)
        if turn >= 4 and not held:
            break
    for machine in world.machines:
        _check_baseline(machine)


def _check_baseline(machine: Machine) -> None:
    leases = machine.node.leases()
    if leases:
        raise Violation(f"leases left on {machine.name}: {leases[:3]}")
    landing = machine.node.grants.landing_bytes()
    if landing[("granted",)] + landing[("limbo",)]:
        raise Violation(f"landing memory left on {machine.name}: {landing}")
    if any(machine.node.push_counts().values()):
        raise Violation(f"pushes left on {machine.name}: {machine.node.push_counts()}")
    jobs = machine.node.jobs()
    if jobs:
        raise Violation(f"ranks that are gone may still write on {machine.name}: {jobs[:3]}")
    for tier in machine.node.tiers():
        if tier.slots_granted + tier.slots_quarantined + tier.slots_leased:
            raise Violation(f"slots left granted, quarantined or leased: {tier}")
    (node,) = machine.node.nodes()
    if node.connections + node.owners + node.sessions:
        raise Violation(f"engines that are gone are still attached to {machine.name}: {node}")
    engine_check.check_engine(machine.node)


def _kill_engines(world: Stage) -> None:
    for engine in list(world.engines):
        world.kill_engine(engine)
    for machine in world.machines:
        machine.end_late_exits()

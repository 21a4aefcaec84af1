"""What the faults of a cluster do: to the network, to replicas of the index, to one node in it.

Each function says whether there was somebody to do it to. Those that strike by themselves, with
each read, word or question, are `transfer_worker`'s, `net`'s and `index`'s.

Does not cover: which fault may happen, and when (`world`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstore.types import Tier
from kvstore.units import NS_PER_MS
from kvstore.wire.space import fingerprint
from tests.sim.world.cluster import SimCluster
from tests.sim.world.index import SimReplica
from tests.sim.world.machine import Machine
from tests.sim.world.net import SimNet
from tests.sim.world.stage import Stage

_DURATIONS_MS: Final = (20, 300, 2000, 6000)
_LAGS_MS: Final = (50, 500, 2500)


def _partition(world: Stage, machine: Machine) -> bool:
    """Between a machine and another host, or all of them."""
    net, duration_ns = _net(world), _duration_ns(world)
    for other in _others(world, machine):
        net.cut(machine.name, other, duration_ns)
        net.cut(other, machine.name, duration_ns)
        world.note(f"nothing passes between {machine.name} and {other}")
    return True


def _partition_one_way(world: Stage, machine: Machine) -> bool:
    net, duration_ns, leaves = _net(world), _duration_ns(world), world.random.random() < 0.5
    for other in _others(world, machine):
        source, target = (machine.name, other) if leaves else (other, machine.name)
        net.cut(source, target, duration_ns)
        world.note(f"nothing passes from {source} to {target}")
    return True


def _others(world: Stage, machine: Machine) -> list[str]:
    names = [m.name for m in world.machines if m is not machine]
    names += [replica.name for replica in _cluster(world).replicas]
    return names if world.random.random() < 0.3 else [world.random.choice(names)]


def _connection_lost(world: Stage, _: Machine) -> bool:
    return _net(world).break_one()


def _index_restarts(world: Stage, _: Machine) -> bool:
    """It has forgotten everything."""
    replica = _replica(world)
    replica.end()
    replica.start()
    return True


def _index_stopped(world: Stage, _: Machine) -> bool:
    """It answers nobody for a while, and then goes on with what it knew."""
    _replica(world).stopped_until_ns = world.now_ns + _duration_ns(world)
    return True


def _index_lags(world: Stage, _: Machine) -> bool:
    """What nodes tell it comes late from now on."""
    _net(world).lag_ns[_replica(world).name] = world.random.choice(_LAGS_MS) * NS_PER_MS
    return True


def _transfer_worker_dies(_: Stage, machine: Machine) -> bool:
    if machine.peers is None:
        return False
    machine.peers.transfer_worker.die("it was killed")
    return True


def _node_lies(world: Stage, machine: Machine) -> bool:
    """It says that it holds what it does not."""
    if machine.peers is None:
        return False
    engine = world.random.choice(world.engines)
    space = fingerprint(engine.space, weights_epoch="")
    keys = b"".join(world.random.choice(world.chains))
    tier = world.random.choice((Tier.DRAM, Tier.FILE))
    machine.peers.lie(tier, engine.tenant, space, keys)
    return True


def _addresses_swapped(world: Stage, machine: Machine) -> bool:
    """Two nodes die and come back, each where the other one was."""
    others = [other for other in world.machines if other is not machine]
    if not others:
        return False
    other = world.random.choice(others)
    for each in (machine, other):
        each.kill_node()
    machine.address, other.address = other.address, machine.address
    world.note(f"{machine.name} is at {machine.address} now, {other.name} at {other.address}")
    return True


def _cluster(world: Stage) -> SimCluster:
    assert world.cluster is not None
    return world.cluster


def _net(world: Stage) -> SimNet:
    return _cluster(world).net


def _replica(world: Stage) -> SimReplica:
    replica = world.random.choice(_cluster(world).replicas)
    world.note(f"it is {replica.name}")
    return replica


def _duration_ns(world: Stage) -> int:
    return world.random.choice(_DURATIONS_MS) * NS_PER_MS


TO_A_CLUSTER: dict[str, Callable[[Stage, Machine], bool]] = {
    "partition": _partition,
    "partition one way": _partition_one_way,
    "connection lost": _connection_lost,
    "index restarts": _index_restarts,
    "index stopped": _index_stopped,
    "index lags": _index_lags,
    "transfer worker dies": _transfer_worker_dies,
    "node lies": _node_lies,
    "addresses swapped": _addresses_swapped,
}

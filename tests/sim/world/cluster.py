"""What makes the machines of a world a cluster: a network, replicas of the index, their faults.

A world has one by its seed (`Knobs.index_replicas`). Its nodes are `peers`; here is what is
between them, and what must hold of all together when the faults are over (I8, I13): each replica
answers exactly what each node holds, and a block that one node stored is fetched by another.

Does not cover: the network itself (`net`), what single reads do wrong (`transfer_worker`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Final

from kvstore.index.feed import Trust
from kvstore.types import KEY_BYTES, Tier
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.peers import Pushed, PushOver
from tests.sim.world.copies import Violation
from tests.sim.world.ground import Ground, Machine
from tests.sim.world.index import SimReplica
from tests.sim.world.net import SimNet
from tests.sim.world.transfer_worker import SimTransferWorker

CONVERGED_NS_MAX: Final = 10 * NS_PER_S
_SLICE_NS: Final = 20 * NS_PER_MS
_SAID_MAX: Final = 32
_ROUNDS_MAX: Final = 100
"""Of one moment: words that take no time follow each other."""

Held = dict[tuple[str, bytes], dict[bytes, set[Tier]]]
"""(tenant, space) → key → tiers."""


class SimCluster:
    """Made before the machines of its world."""

    def __init__(self, world: Ground) -> None:
        self.world = world
        self.net = SimNet(world)
        self.transfer_workers: dict[bytes, SimTransferWorker] = {}
        """By descriptor."""
        self.said_of_pushes = defaultdict[str, deque[Pushed | PushOver]](
            lambda: deque(maxlen=_SAID_MAX)
        )
        """To each node, whoever lived there."""
        numbers = range(1, world.knobs.index_replicas + 1)
        self.replicas = [SimReplica(world, self.net, self.knock, number) for number in numbers]

    def go_on(self) -> None:
        """Everything that is due between nodes."""
        for _ in range(_ROUNDS_MAX):
            moved = self.net.go_on()
            for replica in self.replicas:
                if replica.runs:
                    moved = replica.loop.go_on() or moved
            for machine in self.world.machines:
                moved = machine.peers_go_on() or moved
            if not moved:
                return
        raise AssertionError("nodes talk without end")

    def be_quiet(self, duration_ns: int) -> None:
        """Time passes, and engines ask for nothing."""
        end_ns = self.world.now_ns + duration_ns
        while self.world.now_ns < end_ns:
            self.world.now_ns += _SLICE_NS
            for machine in self.world.machines:
                machine.node_step()

    def end(self) -> None:
        """Nothing of it is left."""
        for replica in self.replicas:
            replica.end()

    def knock(self, source: str, address: str) -> bool | None:
        """Whether somebody listens there; None: nobody can say."""
        name = next((m.name for m in self.world.machines if m.address == address), "")
        if not name or self.net.is_cut(source, name) or self.net.is_cut(name, source):
            return None
        return bool(self.net.at(address))

    # ── after the faults ─────────────────────────────────────────────────────────────────────────

    def heal(self) -> None:
        """Nothing stands between them any more."""
        self.net.heal()
        for replica in self.replicas:
            replica.stopped_until_ns = 0
        for machine in self.world.machines:
            if machine.peers is not None and machine.peers.has_lied:
                machine.peers.lose()  # and says what there is

    def converge(self) -> None:
        """Every replica knows exactly what there is (I8, I13)."""
        world = self.world
        end_ns, what = world.now_ns + CONVERGED_NS_MAX, "all is well"
        while what:
            if world.now_ns > end_ns:
                raise Violation(f"after {CONVERGED_NS_MAX // NS_PER_S} s {what}")
            self.be_quiet(10 * _SLICE_NS)
            what = next(filter(None, map(self._lacks, self.replicas)), "")

    def _lacks(self, replica: SimReplica) -> str:
        """What is not yet as it should be."""
        machines = self.world.machines
        members = {m.node: m for m in replica.members().nodes}
        for machine in machines:
            member = members.get(machine.name)
            if member is None or member.trust is not Trust.EXACT:
                return f"{replica.name} does not know {machine.name} exactly"
            if member.address != machine.address:
                return f"{replica.name} believes {machine.name} at {member.address}"
        held = {machine.name: _held(machine) for machine in machines}
        scopes = {scope for its in held.values() for scope in its}
        for tenant, space in sorted(scopes):
            for chain in self.world.chains:
                told = self._told(replica, tenant, space, chain)
                true = {n: _leading(its.get((tenant, space), {}), chain) for n, its in held.items()}
                true = {name: counts for name, counts in true.items() if counts[1]}
                if told != true:
                    return f"{replica.name} answers {told}, where nodes hold {true}"
        return ""

    def _told(
        self, replica: SimReplica, tenant: str, space: bytes, chain: list[bytes]
    ) -> dict[str, tuple[int, int]]:
        answer = replica.match(tenant, space, b"".join(chain))
        if answer.trust is not Trust.EXACT:
            return {"nobody, exactly": (0, 0)}
        return {m.holder.node: (m.dram_blocks, m.file_blocks) for m in answer.matches}


def _held(machine: Machine) -> Held:
    """What its node offers, as its engine knows it."""
    held: Held = {}
    offers, _ = machine.node.offered(0)  # no node of the world has more rows than one slice
    for offer in offers:
        keys = held.setdefault((offer.tenant, offer.space), {})
        for at in range(0, len(offer.keys), KEY_BYTES):
            keys.setdefault(offer.keys[at : at + KEY_BYTES], set()).add(offer.tier)
    return held


def _leading(held: dict[bytes, set[Tier]], chain: list[bytes]) -> tuple[int, int]:
    """(leading keys in dram, leading keys in dram or on disk)."""
    return (
        _count(chain, lambda key: Tier.DRAM in held.get(key, ())),
        _count(chain, lambda key: key in held),
    )


def _count(chain: Iterable[bytes], holds: Callable[[bytes], bool]) -> int:
    count = 0
    for key in chain:
        if not holds(key):
            break
        count += 1
    return count

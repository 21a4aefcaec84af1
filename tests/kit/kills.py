"""kill -9 at named moments: a real node with a disk, two engines of real processes.

    python -m tests.kit.kills --seed 1 --cycles 60

A cycle brings its engines to a point, kills somebody there (sometimes somebody else right after),
mends what was broken, and then demands promise P3, that all is as it was before, and P1, that what
can be read has the bytes that were stored. What is lost is a miss and no violation.

    storing      a rank has written half of a block           sealing   all written, not yet sealed
    loading      a rank has copied half of the blocks         promoting blocks are on their way
    starting     a node opens its store or takes its memory; an engine is attached in part
    recovering   a node reads its segments; an engine attaches to a node that has just begun to

Does not cover: the processes (`tests.kit.troupe`), what a node holds
(`tests.kit.gauges`), machines that lose power (`tests.sim.world.play`).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Final, Self

import msgspec

from kvstore.testing.raw_engine import make_keys
from tests.kit.actor import Halt, Leased, Look, State
from tests.kit.gauges import descriptor_kinds, look, processes
from tests.kit.host import Host
from tests.kit.troupe import SplitEngine, Troupe

P3_S: Final = 10.0
LOOKING: Final = "the disk is still being looked through"
LOOKING_S: Final = 120.0
"""Promise P3: back to baseline within 10 s."""
LEARNING_S: Final = 120.0
"""For a node to show what it has open with a standby and without one; on a busy machine as well."""
STEADY_LOOKS: Final = 100
"""As often in a row it is the same, before it is believed."""
POINTS: Final = ("storing", "sealing", "loading", "promoting", "starting", "recovering")
MEMBERS: Final = ("rank", "scheduler", "engine")
BATCH: Final = 12
"""Keys that a cycle stores at each of two places; dram holds 64 blocks."""
PRESSURE: Final = 6
"""Batches: more than dram holds."""
NEWEST: Final = PRESSURE + 3
"""Batches that are read back at the end of a cycle: its own and some before."""
OLD_BATCHES: Final = 10
"""Stored before the first cycle: dram does not hold them all."""
NESTED_PART: Final = 4
"""In one cycle of so many a second one dies before anybody noticed the first."""
_POLL_S: Final = 0.005
_HALTS: Final[dict[str, Halt]] = {"storing": "filling", "sealing": "sealing", "loading": "copying"}


class Plan(msgspec.Struct, frozen=True):
    """One cycle."""

    point: str
    victim: str
    again: str
    """Who dies next, at once; empty: nobody."""


class Tally(msgspec.Struct):
    """What was done so far."""

    cycles: int = 0
    kills: Counter[str] = msgspec.field(default_factory=Counter)
    """By "POINT VICTIM"; the second one of a cycle as "nested VICTIM"."""
    stored_blocks: int = 0
    verified_blocks: int = 0
    asked_blocks: int = 0
    slowest_s: float = 0.0
    """Longest time from the last repair until all was as before."""

    @property
    def kill_count(self) -> int:
        return sum(self.kills.values())

    def at(self, point: str) -> int:
        return sum(count for name, count in self.kills.items() if name.startswith(point))


class KillCycles:
    """One node and two engines that share their blocks. Made for a seed; the same does the same, as
    far as the machine's own timing allows."""

    def __init__(self, directory: Path, *, seed: int) -> None:
        self.tally = Tally()
        self.seed = seed
        self._stack = ExitStack()
        self._keys: list[list[bytes]] = []
        """Of all batches, stored or not: whatever is read must be right."""
        with ExitStack() as stack:
            self.host = Host(directory)
            stack.callback(lambda: self.host.close())
            troupe = stack.enter_context(Troupe())
            self.engines = [SplitEngine(troupe, name) for name in ("a", "b")]
            for engine in self.engines:
                engine.attach(self.host.node.socket)
            self._baseline = self._learn_descriptors()
            for number in range(-OLD_BATCHES, 0):
                self._store(self.engines[0], self._batch(number, "a"))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def plan(self, number: int) -> Plan:
        """All points with all victims in turn, in an order that the seed says."""
        victims = (*Host.PARTS, *MEMBERS)
        turns, index = divmod(number, len(POINTS) * len(victims))
        pairs = list(product(POINTS, victims))
        random.Random(f"{self.seed} {turns}").shuffle(pairs)
        point, victim = pairs[index]
        rng = random.Random(f"{self.seed} plan {number}")
        others = [name for name in victims if name != victim]
        return Plan(point, victim, "" if rng.randrange(NESTED_PART) else rng.choice(others))

    def cycle(self) -> Plan:
        """Kill, mend, and look.

        Raises:
            AssertionError: a promise was broken; says which, and how to see it again.
        """
        number = self.tally.cycles
        plan = self.plan(number)
        self.tally.cycles += 1
        rng = random.Random(f"{self.seed} {number}")
        engine, other = rng.sample(self.engines, 2)
        try:
            self._store(other, self._batch(number, "b"))
            match plan.point:
                case "storing" | "sealing":
                    self._while_storing(plan, engine, rng, self._batch(number, "a"))
                case "loading":
                    self._while_loading(plan, engine, rng)
                case "promoting":
                    self._while_promoting(plan, engine, rng)
                case "starting":
                    self._while_starting(plan, engine, rng)
                case _:
                    self._while_recovering(plan, engine, rng)
            self._mend(rng)
            self.wait_for_baseline()
            self._read_back(rng)
        except (AssertionError, TimeoutError) as error:
            raise type(error)(
                f"{error}\n  in cycle {number} of seed {self.seed}: {plan}\n  again: python -m"
                f" tests.kit.kills --seed {self.seed} --cycles {number + 1}\n  the node's log:"
                f" {self.host.node.log[-2000:]}"
            ) from error
        return plan

    # ── points ───────────────────────────────────────────────────────────────────────────────────

    def _while_storing(
        self, plan: Plan, engine: SplitEngine, rng: random.Random, keys: list[bytes]
    ) -> None:
        halts = self._halts(plan, engine, rng)
        count = engine.begin_store(keys, halts)
        assert count, "no session where there was one"
        halted = engine.wait_for_halts(halts)
        self._strike(plan, engine, rng)
        self._press(engine)
        engine.end(halted, [True] * engine.rank_count)

    def _while_loading(self, plan: Plan, engine: SplitEngine, rng: random.Random) -> None:
        keys = self._keys[-1]
        leased = engine.lease(keys)
        assert isinstance(leased, Leased), leased
        halts = self._halts(plan, engine, rng)
        engine.begin_load(leased, halts)
        halted = engine.wait_for_halts(halts)
        self._strike(plan, engine, rng)
        self._press(engine)
        answers = engine.end(halted, [True] * engine.rank_count)
        count = len(leased.slots) // 4 // engine.rank_count
        self.tally.verified_blocks += engine.judge(keys[:count], answers)
        engine.release(leased)

    def _while_promoting(self, plan: Plan, engine: SplitEngine, rng: random.Random) -> None:
        old = self._keys[:-NEWEST]
        for keys in rng.sample(old, min(8, len(old))):
            leased = engine.lease(keys, while_promoting=True)
            assert isinstance(leased, Leased), leased
            if leased.promoting:
                self._strike(plan, engine, rng)
                engine.release(leased)
                return
            engine.release(leased)
        self._strike(Plan("idle", plan.victim, plan.again), engine, rng)

    def _while_starting(self, plan: Plan, engine: SplitEngine, rng: random.Random) -> None:
        if plan.victim in MEMBERS:
            # In part attached: its session is about to be made.
            engine.start_anew()
            engine.introduce(self.host.node.socket, members=(0, rng.randint(1, engine.rank_count)))
            self._strike(plan, engine, rng)
            return
        self._kill_twice(plan, rng.choice(("/store", "kvstore-arena")))

    def _while_recovering(self, plan: Plan, engine: SplitEngine, rng: random.Random) -> None:
        if plan.victim in MEMBERS:
            first = rng.choice(Host.PARTS)
            self._kill(first, engine, rng)
            self.tally.kills[f"recovering first {first}"] += 1
            self.host.restore()
            engine.introduce(self.host.node.socket)
            self._strike(plan, engine, rng)
            return
        self._kill_twice(plan, "/seg-")

    def _kill_twice(self, plan: Plan, mark: str) -> None:
        """So that there is a start, which is then killed."""
        self.host.kill_while_starting(plan.victim, mark)
        self.tally.kills[f"{plan.point} first {plan.victim}"] += 1
        self.tally.kills[f"{plan.point} {plan.victim}"] += 1

    def _halts(self, plan: Plan, engine: SplitEngine, rng: random.Random) -> list[Halt]:
        """One rank halts, or all do."""
        halt = _HALTS[plan.point]
        chosen = rng.randrange(engine.rank_count)
        every = rng.random() < 0.5
        return [halt if every or rank == chosen else "" for rank in range(engine.rank_count)]

    # ── killing and mending ──────────────────────────────────────────────────────────────────────

    def _strike(self, plan: Plan, engine: SplitEngine, rng: random.Random) -> None:
        self._kill(plan.victim, engine, rng)
        self.tally.kills[f"{plan.point} {plan.victim}"] += 1
        if plan.again:
            self._kill(plan.again, engine, rng)
            self.tally.kills[f"nested {plan.again}"] += 1

    def _kill(self, victim: str, engine: SplitEngine, rng: random.Random) -> None:
        match victim:
            case "scheduler":
                engine.scheduler.kill()
            case "rank":
                rng.choice(engine.ranks).kill()
            case "engine":
                for member in engine.members:
                    member.kill()
            case _:
                self.host.kill(victim)

    def _press(self, engine: SplitEngine) -> None:
        """The others store more than dram holds while this one's ranks are halted in a copy; under
        the next node process, if this one was killed and its memory was not."""
        if not self.host.running:
            return
        self.host.restore()
        for other in self.engines:
            if other is not engine:
                other.attach(self.host.node.socket)
                for name in range(PRESSURE):
                    other.store(self._batch(self.tally.cycles, f"pressure {name}"))

    def _mend(self, rng: random.Random) -> None:
        """Everybody is there again: what died alone is replaced, or its whole engine is."""
        self.host.restore()
        for engine in self.engines:
            if len(engine.alive) < len(engine.members):
                if engine.alive and rng.random() < 0.5:
                    engine.replace_the_dead()
                else:
                    engine.start_anew()
            engine.attach(self.host.node.socket)

    # ── promises ─────────────────────────────────────────────────────────────────────────────────

    def wait_for_baseline(self) -> None:
        begin = looked = time.monotonic()
        while found := self._leaks():
            now = time.monotonic()
            if found == [LOOKING] and now - begin < LOOKING_S:
                looked = now  # all is given back; how long a disk takes is no promise
            if now - looked > P3_S:
                raise AssertionError(f"not as before within {P3_S} s: " + "; ".join(found))
            threading.Event().wait(_POLL_S)
        self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - begin)

    def _leaks(self) -> list[str]:
        """What differs from a node with two idle engines."""
        known = [(engine, engine.scheduler.ask(Look())) for engine in self.engines]
        credits_ = sum(s.credits * e.rank_count for e, s in known if isinstance(s, State))
        try:
            gauges = look(self.host.node)
        except OSError as error:
            return [f"it does not answer: {error}"]
        wanted = {
            "connections": sum(len(engine.members) for engine in self.engines),
            "sessions": len(self.engines),
            "leases": 0,
            "slots_granted": credits_,
            "slots_quarantined": 0,
            "slots_leased": 0,
            "failures": 0,
        }
        found = [
            f"{name} is {getattr(gauges, name)}, not {value}"
            for name, value in wanted.items()
            if getattr(gauges, name) != value
        ]
        if not self.host.knows_its_disk:
            found.append(LOOKING)
        count, open_now = self._descriptors()
        if open_now != self._baseline.get(count):
            found.append(f"descriptors are {open_now}, not {self._baseline.get(count)}")
        for engine in self.engines:
            found += [
                f"process {member.pid} maps {count} memories of nodes"
                for member in engine.members
                if (count := _mapped_memories(member.pid)) > 2
            ]
        return found

    def _learn_descriptors(self) -> dict[int, list[Counter[str]]]:
        """What is open when all is well, without a standby beside the node process and with one."""
        found: dict[int, list[Counter[str]]] = {}
        deadline_s, same = time.monotonic() + LEARNING_S, 0
        while len(found) < 2 or same < STEADY_LOOKS:  # a process being started has more open
            assert time.monotonic() < deadline_s, f"not seen with and without a standby: {found}"
            count, kinds = self._descriptors()
            same = same + 1 if kinds == found.get(count) else 0
            found[count] = kinds
            if same >= STEADY_LOOKS and list(found) == [3]:
                self.host.kill("node")  # it stood by before anybody looked; the next is to come
                self._mend(random.Random(self.seed))
                found, same = {}, 0
            threading.Event().wait(_POLL_S)
        return found

    def _descriptors(self) -> tuple[int, list[Counter[str]]]:
        """How many processes there are, and what two of them have open."""
        kinds = descriptor_kinds(self.host.node, without=self.host.store)
        return len(processes(self.host.node)), kinds

    def _read_back(self, rng: random.Random) -> None:
        """The batches of this cycle, and an old one, by both engines."""
        old = self._keys[:-NEWEST]
        batches = self._keys[-NEWEST:] + rng.sample(old, min(1, len(old)))
        for keys in batches:
            engine = rng.choice(self.engines)
            self.tally.asked_blocks += len(keys)
            self.tally.verified_blocks += engine.verify(keys)

    def _batch(self, number: int, name: str) -> list[bytes]:
        keys = make_keys(BATCH, seed=f"{self.seed} {number} {name}")
        self._keys.append(keys)
        return keys

    def _store(self, engine: SplitEngine, keys: list[bytes]) -> None:
        stored = engine.store(keys)
        assert stored == len(keys), f"{stored} of {len(keys)} blocks stored with nobody dead"
        self.tally.stored_blocks += stored


def _mapped_memories(pid: int) -> int:
    """Distinct memories of nodes, of old ones too, that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "/memfd:kvstore-" in line})


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when all held."""
    parser = argparse.ArgumentParser(description="kill -9 at named moments.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=60)
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-kills-") as folder,
        KillCycles(Path(folder), seed=options.seed) as cycles,
    ):
        try:
            for _ in range(options.cycles):
                cycles.cycle()
        except (AssertionError, TimeoutError) as error:
            sys.stdout.write(f"{error}\n")
            return 1
        sys.stdout.write(msgspec.json.encode(cycles.tally).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

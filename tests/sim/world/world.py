"""One seeded world: machines with a node each, their engines, and what happens to them.

`tests.sim.world.play` says what it is for, and runs it. Does not cover: who lives in it
(`stage`), what faults do (`faults`), how it ends (`heal`).
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvstore.units import NS_PER_MS, NS_PER_S
from tests.sim.world import faults as sim_faults, heal as sim_heal
from tests.sim.world.copies import Violation
from tests.sim.world.doubts import SimDoubts
from tests.sim.world.engine import SimEngine
from tests.sim.world.parts import WorldResult
from tests.sim.world.pushes import NEW_SHARE, SimPushes
from tests.sim.world.requests import new_random_request
from tests.sim.world.shrink import Case
from tests.sim.world.stage import Stage

_ACQUAINTED_NS = 3 * NS_PER_S // 2
"""In a cluster nodes know each other's addresses by then."""
_QUIET_SHARE = 0.005
_QUIET_MS = (100, 500, 3500)
"""In a cluster engines ask for nothing now and then: silence is noticed, connections are given up,
peers that failed are tried again."""


class World(Stage):
    """Deterministic in its arguments and `steps`."""

    _next_request = 1
    steps_done = 0
    push_share = NEW_SHARE

    def fault(self, name: str) -> None:
        """Do it to somebody."""
        machine = sim_faults.happen(self, name)
        if machine is not None:
            self._count(name, machine)

    def run(self, steps: int) -> WorldResult:
        """Faults for `steps` events, then healing, then the end of all engines.

        Raises:
            Violation: a promise was broken; its text is the story.
        """
        try:
            result = self._run(steps)
            left = self.close()
            if left:
                raise Violation(f"files are still open when all nodes are gone: {left[:3]}")
        except Exception as error:  # whatever it is, it is a bug, and has a story
            where = "" if isinstance(error, Violation) else f" ({_where(error)})"
            story = "\n  ".join([f"seed {self.seed}: {error!s:.500}{where}", *folded(self.story)])
            raise Violation(story, self.steps_done) from error
        finally:
            self.close()
        return result

    def _run(self, steps: int) -> WorldResult:
        self._pushes = SimPushes(self, new_share=self.push_share)
        self._doubts = SimDoubts(self)
        if self.cluster is not None:
            self.cluster.be_quiet(_ACQUAINTED_NS)
        for step in range(steps):
            self.steps_done = step
            self.event(faulty=True)
        self.steps_done = steps
        sim_heal.heal(self, lambda: self.event(faulty=False))
        sim_heal.find_again(self)
        sim_heal.end(self)
        return self._result()

    def _result(self) -> WorldResult:
        return WorldResult(
            seed=self.seed,
            events=self._events,
            finished=self.finished,
            loaded_blocks=self.loaded,
            promoted_blocks=sum(
                machine.promoted + machine.node.counters.file_blocks_read
                for machine in self.machines
            ),
            foreign_blocks=self.foreign_blocks,
            slab_blocks=self.slab_blocks,
            kept_blocks=sum(machine.kept for machine in self.machines),
            fetched_blocks=self.fetched_blocks,
            pushes=self._pushes.count,
            pushed_blocks=self.pushed_blocks,
            trace=self._trace.hexdigest()[:16],
            hit_share=self.hit_share,
            faults=dict(self.faults),
        )

    def event(self, *, faulty: bool) -> None:
        """Time passes and one thing happens."""
        engine = self.random.choice(self.engines)
        machine = engine.machine
        machine.files_go_on(self.random.randrange(4))
        self.now_ns += self.random.choice((0, 1, 1, 2, 7)) * NS_PER_MS
        if self.cluster is not None and self.random.random() < _QUIET_SHARE:
            self.cluster.be_quiet(self.random.choice(_QUIET_MS) * NS_PER_MS)
        if self.knobs.has_landing and faulty:
            self._pushes.go_on()
        if self.knobs.has_doubts and faulty:
            self._doubts.go_on()
        roll = self.random.random()
        if faulty and roll < self.fault_rate and self._faults_to_do:
            self.fault(self.random.choice(self._faults_to_do))
        elif faulty and roll < 0.1:
            self.add_request()
        elif roll < 0.68:
            if engine.runs:
                self._engine_goes_on(engine, roll)
        elif not machine.node_up and machine.runs and roll < 0.78:
            self.note(f"the node of {machine.name} restarts")
            machine.restart_node()
        else:
            self.note(f"the node of {machine.name} reads")
            machine.node_step()
            machine.end_late_exit()

    def add_request(self) -> None:
        engine = self.random.choice(self.engines)
        if not engine.runs:
            return
        request = new_random_request(self.random, self.chains, self._next_request, engine.blocks)
        self._next_request += 1
        self.note(f"{engine.name} gets {request.name}: {request.tokens} tokens")
        engine.add(request)

    def _engine_goes_on(self, engine: SimEngine, roll: float) -> None:
        if self._ends_now(engine, roll):
            self.note(f"{engine.name} ends, a rank of it is dead or hangs")
            self.kill_engine(engine)
            self.start_engine(engine.machine)
        elif roll < 0.36 and engine.dead_rank is None:
            self.note(f"{engine.name} steps")
            engine.step()
        elif roll < 0.56:
            self.note(f"{engine.name} copies")
            for _ in range(self.random.choice((1, 1, 1, 8))):
                engine.copy_step()
        else:
            self.note(f"ranks of {engine.name} poll")
            engine.poll_ranks()

    def _ends_now(self, engine: SimEngine, roll: float) -> bool:
        """An engine without one of its ranks ends soon, one that hangs when somebody notices."""
        if engine.dead_rank is not None:
            return roll < 0.24
        return roll < 0.11 and engine.hangs


def _where(error: Exception) -> str:
    """Kind and place of an error that is no Violation: an assertion of the product, or worse."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"


def folded(story: Iterable[str]) -> Iterator[str]:
    """Lines of a story; those that differ in nothing but the time are one, with their count."""
    for _, same in itertools.groupby(story, key=lambda line: line.partition(" ms  ")[2]):
        first, *more = same
        yield f"{first}  (and {len(more)} more like it)" if more else first


def run_case(case: Case) -> WorldResult:
    """Run a world.

    Raises:
        Violation: a promise was broken.
    """
    world = World(
        case.seed, faults=case.faults, engine_count=case.engines, machine_count=case.nodes
    )
    return world.run(case.steps)

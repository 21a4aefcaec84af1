"""One seeded world: the node's real core and file tier, engines with real connector cores.

    python -m kvstore.testing.world --seed 1 --seeds 200 --steps 1000
    python -m kvstore.testing.world --seed 17 --nodes 3 --shrink
    python -m kvstore.testing.world --seed 1000 --minutes 60 --steps 0 --json --stories FOLDER

Real: `engine.Engine`, `client.core`, `tiers.file`. Simulated: clocks, sockets, shared memory, disks
(`sim_disk`), copies (`sim_copies`), the engine's own scheduler (`sim_engine`). One to three
machines, each with a node and engines of its own; several share a directory. Engines have one rank
or several: shards of heads, of layers, replicas. Faults, each with p = 25 % by the seed
(`sim_parts.FAULTS`): processes that vanish, stop, hang up or hang, node processes that die between
two stores to memory and are gone on with from what was kept of it, machines that are suspended,
clocks that drift, copies that fail, come late or never end, bytes that change in dram, slow
delivery, aborts, preemptions, a disk that fails, is full, slow, hangs, tears, loses, mixes up,
flips bits, is another one after a restart. Sizes and time limits are the seed's, too. After the
faults everything heals and must converge (`sim_heal`). Exit status 1 and a story when a promise
breaks.

Checked all the time: every block that an engine reads holds the bytes of its tenant, model,
weights, shard and key (P1), whichever machine stored it; every load ends exactly once, and well
when nothing was disturbed (a lease holds); nothing is stored that still loads; nobody writes to a
slot that was given back; what is known to be bad is not asked for again; `Engine.check()`. At the
end: all requests finished (P2), no lease, grant, pin, quarantined slot, connection or descriptor is
left (P3), what is stored is found again: in dram, after a restart, on another machine (P6). The
same seed gives the same trace hash.

Does not cover: the network, index and router; wall clocks, which nothing here asks; the kernel
(`tests/faults`).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvstore.testing.shrink import Case, shrink
from kvstore.testing.sim_copies import Violation
from kvstore.testing.sim_parts import WorldResult
from kvstore.testing.sim_world import World, run_case

__all__ = ["World", "draw_steps", "main", "run_case"]

LIVES = {60: 70, 250: 20, 1000: 8, 4000: 2}
"""Steps with faults of a life → how many of a hundred. Sizes, limits and faults are drawn once for
each life: many short ones see more of their combinations; what takes long to come about (a full
disk, its segments reclaimed, a fault on top of a fault) only long ones see. Each kind has about a
quarter of all steps."""


def draw_steps(seed: int) -> int:
    """How long the life of this seed is, where nobody says."""
    return random.Random(f"steps of {seed}").choices(tuple(LIVES), tuple(LIVES.values()))[0]


class Totals(msgspec.Struct):
    """Of all seeds that were run; `--json` prints it."""

    first_seed: int
    seeds: int = 0
    lives: dict[int, int] = msgspec.field(default_factory=dict)
    """Steps with faults → seeds that had so many."""
    events: int = 0
    finished: int = 0
    loaded_blocks: int = 0
    promoted_blocks: int = 0
    foreign_blocks: int = 0
    """That a machine read of what another one wrote."""
    kept_blocks: int = 0
    """In memory, that a node process took over from the one before."""
    least_hit_share: float = 1.0
    """After healing, beside a machine that never had a fault."""
    seconds: float = 0.0
    trace: str = ""
    """Hash of all that happened: the same for the same seeds."""
    faults: dict[str, int] = msgspec.field(default_factory=dict)
    violations: list[str] = msgspec.field(default_factory=list)
    """How to run each again."""

    def add(self, result: WorldResult) -> None:
        """A seed that held."""
        self.events += result.events
        self.finished += result.finished
        self.loaded_blocks += result.loaded_blocks
        self.promoted_blocks += result.promoted_blocks
        self.foreign_blocks += result.foreign_blocks
        self.kept_blocks += result.kept_blocks
        self.least_hit_share = min(self.least_hit_share, result.hit_share)
        self.faults = dict(Counter(self.faults) + Counter(result.faults))
        self.trace = hashlib.sha256(f"{self.trace} {result.trace}".encode()).hexdigest()[:16]


def run_seeds(
    cases: Iterable[Case],
    *,
    minutes: float = 0.0,
    stories: Path | None = None,
    shrinks: bool = False,
) -> Totals:
    """Run worlds one after the other.

    Args:
        cases: what to run.
        minutes: begin no other after that; 0: run all.
        stories: a folder that each violation's story is written to, and then it goes on; None: the
            first violation ends it, its story goes to stderr.
        shrinks: make violations small first.
    """
    logging_before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the story says what happens
    try:
        return _run_seeds(cases, minutes=minutes, stories=stories, shrinks=shrinks)
    finally:
        logging.disable(logging_before)


def _run_seeds(
    cases: Iterable[Case], *, minutes: float, stories: Path | None, shrinks: bool
) -> Totals:
    totals = Totals(first_seed=0)
    begin = time.monotonic()
    for case in cases:
        if minutes and time.monotonic() - begin > minutes * 60:
            break
        totals.first_seed = totals.first_seed or case.seed
        totals.seeds += 1
        totals.lives[case.steps] = totals.lives.get(case.steps, 0) + 1
        try:
            totals.add(run_case(case))
        except Violation as error:
            violation = error
            if shrinks:
                case, violation = shrink(case, violation, run_case)
            totals.violations.append(case.command())
            told = f"{violation}\nseed {case.seed} broke a promise; again: {case.command()}\n"
            if stories is None:
                sys.stderr.write(told)
                break
            stories.mkdir(parents=True, exist_ok=True)
            (stories / f"seed-{case.seed}.txt").write_text(told)
    totals.seconds = round(time.monotonic() - begin, 1)
    return totals


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds; 0 when all held."""
    parser = argparse.ArgumentParser(description="Run the seeded world.")
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds from the first on")
    parser.add_argument("--minutes", type=float, default=0.0, help="instead: for so long")
    parser.add_argument(
        "--steps", type=int, default=1000, help="events with faults per seed; 0: as the seed says"
    )
    parser.add_argument(
        "--engines", type=int, default=0, help="engines at most; 0: as the seed says"
    )
    parser.add_argument("--nodes", type=int, default=0, help="machines; 0: as the seed says")
    parser.add_argument("--faults", default=None, help="only these, with commas between them")
    parser.add_argument(
        "--shrink", action="store_true", help="make a failure small before telling it"
    )
    parser.add_argument(
        "--stories", type=Path, help="write the story of a failure to this folder, and go on"
    )
    parser.add_argument("--json", action="store_true", help="the totals as one line of JSON")
    arguments = parser.parse_args(argv)
    faults = None if arguments.faults is None else tuple(filter(None, arguments.faults.split(",")))
    seeds: Iterator[int] = itertools.count(arguments.seed)
    if not arguments.minutes:
        seeds = itertools.islice(seeds, arguments.seeds)
    totals = run_seeds(
        (
            Case(s, arguments.steps or draw_steps(s), arguments.engines, arguments.nodes, faults)
            for s in seeds
        ),
        minutes=arguments.minutes,
        stories=arguments.stories,
        shrinks=arguments.shrink,
    )
    if arguments.json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(totals)) + "\n")
    elif not totals.violations:
        sys.stdout.write(f"{totals.seeds} seeds held: {msgspec.to_builtins(totals)}\n")
    else:
        sys.stdout.write(f"{len(totals.violations)} of {totals.seeds} seeds broke a promise\n")
    return 1 if totals.violations else 0


if __name__ == "__main__":
    sys.exit(main())

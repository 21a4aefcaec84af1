"""One seeded world: the node's real core and file tier, engines with real connector cores.

    python -m tests.sim.world --seed 1 --seeds 200 --steps 1000
    python -m tests.sim.world --seed 17 --nodes 3 --shrink
    python -m tests.sim.world --seed 1000 --minutes 60 --steps 0 --json --stories FOLDER

Real: `engine.Engine`, `client.core`, `tiers.file`. Simulated: clocks, sockets, shared memory, disks
(`disk`), copies (`copies`), the engine's own scheduler (`engine`). One to three
machines, each with a node and engines of its own; several share a directory. Engines have one rank
or several: shards of heads, of layers, replicas. Faults, each with p = 25 % by the seed
(`parts.FAULTS`): processes that vanish, stop, hang up or hang, node processes that die between
two stores to memory and are gone on with from what was kept of it, machines that are suspended,
clocks that drift, copies that fail, come late or never end, bytes that change in dram, slow
delivery, aborts, preemptions, a disk that fails, is full, slow, hangs, tears, loses, mixes up,
flips bits, is another one after a restart. Sizes and time limits are the seed's, too. After the
faults everything heals and must converge (`heal`). Exit status 1 and a story when a promise
breaks.

Checked all the time: every block that an engine reads holds the bytes of its tenant, model,
weights, shard and key (P1), whichever machine stored it; every load ends exactly once, and well
when nothing was disturbed (a lease holds); nothing is stored that still loads; nobody writes to a
slot that was given back; what is known to be bad is not asked for again; `kit.engine_check`. At the
end: all requests finished (P2), no lease, grant, pin, quarantined slot, connection or descriptor is
left (P3), what is stored is found again: in dram, after a restart, on another machine (P6). The
same seed gives the same trace hash.

Every fourth world is a cluster (`cluster`): its nodes feed replicas of the index, ask them, and
fetch blocks from each other. There the product's own code runs unchanged on loops of virtual time:
feeds, index service, fetching node, serving node, their sessions. Checked, too: a fetch that has
ended writes no more; what counts was served until it had been read, and is the block byte by byte;
a peer that failed is left alone; no answer names a node that is silent; at the end the answers are
what nodes hold, and each node fetches from the next.

Every eighth world has GPUs, with a slab of each node (`slab`), whose copies end late and out of
order; loads come from there where a place is shown. In every second cluster engines prefill for one
another (`pushes`); of these every second one has GPUs, too, and engines of several shards. Where
there are GPUs, ranks distrust single shards of what is being copied (`doubts`).

Does not cover: blocks that are cut anew for other shards on their way; the router; wall clocks,
which nothing here asks; the kernel (`tests/faults`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import logging
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from tests.sim.world.copies import Violation
from tests.sim.world.parts import FAULTS, WorldResult
from tests.sim.world.shrink import Case, shrink
from tests.sim.world.world import World, run_case

__all__ = ["World", "draw_steps", "main", "run_case"]

LIVES = {60: 70, 250: 20, 1000: 8, 4000: 2}
"""Steps with faults of a life → how many of a hundred. Sizes, limits and faults are drawn once for
each life: many short ones see more of their combinations; what takes long to come about (a full
disk, its segments reclaimed, a fault on top of a fault) only long ones see. Each kind has about a
quarter of all steps."""


def draw_steps(seed: int) -> int:
    """How long the life of this seed is, where nobody says."""
    return random.Random(f"steps of {seed}").choices(tuple(LIVES), tuple(LIVES.values()))[0]


NODES_MAX = 16
"""Machines of a life. More of them converge more slowly than the end of a life waits for."""


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
    slab_blocks: int = 0
    """Loaded from the memory of a GPU."""
    fetched_blocks: int = 0
    """That a node read in another one's memory."""
    pushes: int = 0
    pushed_blocks: int = 0
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
        self.slab_blocks += result.slab_blocks
        self.fetched_blocks += result.fetched_blocks
        self.pushes += result.pushes
        self.pushed_blocks += result.pushed_blocks
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
            (stories / f"seed-{case.seed}.txt").write_text(told)
    totals.seconds = round(time.monotonic() - begin, 1)
    return totals


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Run the seeded world: lives of a few machines, with faults, in virtual time.",
        epilog="The exit status is 0 when every seed held, 1 when a promise was broken, 2 when an"
        " argument is wrong. The same arguments give the same trace hash, on any machine. Faults:"
        f" {', '.join(FAULTS)}.",
    )
    count, none = _number(at_least=1), _number(at_least=0)
    parser.add_argument("--seed", type=none, default=1, help="first seed; default %(default)s")
    parser.add_argument(
        "--seeds", type=count, default=1, help="how many, from the first on; default %(default)s"
    )
    parser.add_argument("--minutes", type=_minutes, default=0.0, help="instead: for so long")
    parser.add_argument(
        "--steps",
        type=none,
        default=1000,
        help="events with faults per seed; 0: as the seed says; default %(default)s",
    )
    parser.add_argument(
        "--engines", type=none, default=0, help="engines at most; default: as the seed says"
    )
    parser.add_argument(
        "--nodes",
        type=_number(at_least=0, at_most=NODES_MAX),
        default=0,
        help=f"machines, {NODES_MAX} at most; default: as the seed says",
    )
    parser.add_argument(
        "--faults",
        type=_faults,
        help='only these, with commas between them, such as "node killed,slow"; default: as the'
        " seed says",
    )
    parser.add_argument(
        "--shrink", action="store_true", help="make a failure small before telling it"
    )
    parser.add_argument(
        "--stories",
        type=_folder,
        help="write the story of a failure to this folder, and go on; default: to stderr, and end",
    )
    parser.add_argument("--json", action="store_true", help="the totals as one line of JSON")
    return parser


def _number(*, at_least: int, at_most: int | None = None) -> Callable[[str], int]:
    limits = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"

    def read(text: str) -> int:
        number = int(text) if text.isdecimal() else -1
        if number < at_least or (at_most is not None and number > at_most):
            raise argparse.ArgumentTypeError(f"'{text}' is not a number {limits}")
        return number

    return read


def _minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (minutes := float(text)) < math.inf:
            return minutes
    raise argparse.ArgumentTypeError(f"'{text}' is not a time of more than 0 minutes")


def _faults(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"there is no fault {unknown[0]!r}: there are {', '.join(FAULTS)}"
        )
    return names


def _folder(text: str) -> Path:
    """Before hours are spent: stories can be written there."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"no story can be written to {text}: {error.strerror}; name another folder"
        ) from None


def _held(totals: Totals) -> str:
    """One sentence."""
    if not totals.seeds:
        return "no seed was begun within that time"
    seeds = "1 seed" if totals.seeds == 1 else f"{totals.seeds:,} seeds"
    return (
        f"{seeds} from {totals.first_seed} on held: {totals.events:,} events with"
        f" {sum(totals.faults.values()):,} faults, {totals.finished:,} requests, and"
        f" {totals.loaded_blocks:,} blocks loaded and compared, in {totals.seconds} s;"
        f" trace {totals.trace}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds; 0 when all held."""
    arguments = _parser().parse_args(argv)
    faults = arguments.faults
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
        sys.stdout.write(f"{_held(totals)}\n")
    else:
        sys.stdout.write(f"{len(totals.violations)} of {totals.seeds} seeds broke a promise\n")
    return 1 if totals.violations else 0

"""`make soak SOAK_MINUTES=60`: what the tests try for seconds, for as long as you like.

At the same time, one core each as far as there are two:

    the seeded world (tests.sim.world.play)              seeds, short and long lives
    kill -9 at named moments (tests.kit.kills)      a node and engines of its own
    round trips (…trips) and broken datagrams (…garbage)  one node that lives all the time

Of the node that lives all the time memory, descriptors, pins and slots are sampled. The first
broken promise of each kind is told with its seed and how to see it again; then that kind starts
anew with another seed.

Writes bench/results/NAME.json, .md and .png, also when it is stopped early (SIGTERM,
Ctrl-C). Exit status 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import Progress, TaskID

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from kvstore.testing.process import NodeProcess
from tests.kit import trips
from tests.kit.garbage import Garbage
from tests.kit.gauges import Gauges, descriptors, look, processes, resident_bytes
from tests.kit.kills import P3_S, KillCycles, Tally
from tests.kit.trips import RoundTrips, Trips
from tests.kit.troupe import Troupe

SEED: Final = 20261124
NAME: Final = "soak"
WORLD_SEEDS: Final = 50
"""Of one process of the world; its result is lost when the soak is stopped."""
CYCLES: Final = 72
"""Of one node that is killed; the next begins with another seed and an empty disk."""
SAMPLES_MAX: Final = 720
SHARES: Final = {"kills": 0.65, "trips": 0.25, "garbage": 0.1}
"""Of the time that is not the world's."""
STRANGERS: Final = 100
"""In a turn."""
"""Memory is compared between the end and this part of the whole time."""
VIOLATIONS_MAX: Final = 20


class Stopped(Exception):
    """SIGTERM or SIGINT."""


class World:
    """The seeded world in a process of its own, a batch of seeds at a time."""

    def __init__(self, seed: int) -> None:
        self.seeds = self.events = 0
        self.faults: Counter[str] = Counter()
        self.lives: Counter[int] = Counter()
        """Steps with faults → seeds that had so many."""
        self.violations: list[str] = []
        self._next = seed
        self._process: subprocess.Popen[str] | None = None

    def go_on(self) -> None:
        """Take the result of a batch that has ended, and begin the next."""
        if self._process is not None and self._process.poll() is None:
            return
        if len(self.violations) >= VIOLATIONS_MAX:
            return
        if self._process is not None:
            self.take(*self._process.communicate(), self._process.returncode)
        command = [sys.executable, "-m", "tests.sim.world", "--json", "--steps", "0"]
        command += ["--seed", str(self._next), "--seeds", str(WORLD_SEEDS)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, cwd=record.ROOT
        )
        self._next += WORLD_SEEDS

    def take(self, out: str, errors: str, status: int) -> None:
        first = self._next - WORLD_SEEDS
        again = f"python -m tests.sim.world --steps 0 --seed {first} --seeds {WORLD_SEEDS}"
        try:
            told = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            self.violations.append(
                f"the world ended with {status}; again: {again}; {errors[-500:]}"
            )
            return
        self.seeds += told["seeds"]
        self.events += told["events"]
        self.faults.update(told["faults"])
        self.lives.update({int(steps): seeds for steps, seeds in told["lives"].items()})
        if status:
            self.violations.append(f"{told['violations']}; again: {again}")

    def close(self) -> None:
        """What it is at is not waited for."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


class Killing:
    """Kill cycles, one node after the other."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.total = Tally()
        self.violations: list[str] = []
        self._directory = directory
        self.seed = seed
        self._stack = ExitStack()
        self.cycles: KillCycles | None = None

    @property
    def kills(self) -> int:
        """So far, those of the node that is being killed included."""
        now = self.cycles.tally.kill_count if self.cycles is not None else 0
        return self.total.kill_count + now

    def turn(self) -> None:
        if self.cycles is None:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(dir=self._directory))
            cycles = KillCycles(Path(folder), seed=self.seed)
            self.cycles = self._stack.enter_context(cycles)
        try:
            self.cycles.cycle()
        except (AssertionError, TimeoutError, OSError) as error:
            self.violations.append(str(error))
            self.close()
        else:
            if self.cycles.tally.cycles == CYCLES:
                self.close()

    def close(self) -> None:
        """Add what was done; the next turn starts another node."""
        if self.cycles is None:
            return
        done = self.cycles.tally
        self.cycles = None
        self.seed += 1
        self._stack.close()
        self.total.cycles += done.cycles
        self.total.kills += done.kills
        self.total.stored_blocks += done.stored_blocks
        self.total.asked_blocks += done.asked_blocks
        self.total.verified_blocks += done.verified_blocks
        self.total.slowest_s = max(self.total.slowest_s, done.slowest_s)


class Living:
    """The node that lives all the time, what it is asked, and what it holds."""

    def __init__(self, directory: Path, seed: int, stack: ExitStack) -> None:
        self.violations: list[str] = []
        self.inputs = 0
        self.samples: list[dict[str, float]] = []
        flags = ("--file", f"{directory / 'store'}:{trips.FILE}")
        self.node = stack.enter_context(NodeProcess.start(directory, dram=trips.DRAM, flags=flags))
        self._trips = RoundTrips(self.node, stack.enter_context(Troupe()), seed=seed)
        self._garbage = Garbage(self.node.socket, seed=seed)
        self._begin = time.monotonic()

    @property
    def trips(self) -> Trips:
        return self._trips.trips

    def trip(self) -> None:
        self._guarded(self._trips.step)

    def strangers(self) -> None:
        def throw() -> None:
            self.inputs += sum(self._garbage.throw() for _ in range(STRANGERS))

        self._guarded(throw)

    def sample(self) -> None:
        """Between two turns, when nobody reads or writes: what is held then is kept."""

        def take() -> None:
            gauges = self._at_rest()
            self.samples.append(
                {
                    "minute": (time.monotonic() - self._begin) / 60,
                    "rss_mib": resident_bytes(self.node) / 2**20,
                    "descriptors": sum(len(descriptors(pid)) for pid in processes(self.node)),
                    "pins": gauges.slots_leased + gauges.leases,
                    "slots_granted": gauges.slots_granted,
                    "slots_quarantined": gauges.slots_quarantined,
                    "blocks_dram": gauges.blocks_dram,
                    "blocks_file": gauges.blocks_file,
                }
            )
            assert not gauges.failures, "the node's loop met a bug: see its log"

        self._guarded(take)

    def _at_rest(self) -> Gauges:
        """Strangers are forgotten and leases given back; that may take as long as P3 says."""
        deadline_s = time.monotonic() + P3_S
        while True:
            gauges = look(self.node)
            held = (gauges.leases, gauges.slots_leased, gauges.slots_quarantined)
            if gauges.sessions == gauges.connections // 2 == len(trips.SIZES) and not any(held):
                return gauges
            assert time.monotonic() < deadline_s, f"not at rest within {P3_S} s: {gauges}"
            threading.Event().wait(0.02)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (AssertionError, TimeoutError, OSError) as error:
            if self.node.process.poll() is not None:
                raise SystemExit(f"the node has ended: {self.node.log[-2000:]}") from error
            told = str(error) or type(error).__name__
            if told not in self.violations and len(self.violations) < VIOLATIONS_MAX:
                self.violations.append(told)


def soak(minutes: float, seed: int, directory: Path, progress: Progress) -> dict[str, Any]:
    """All of it, for so long or until it is stopped."""
    task = progress.add_task("soak", total=minutes * 60)
    begin = time.monotonic()
    used = dict.fromkeys(SHARES, 0.0)
    early = False
    with ExitStack() as stack:
        world = World(seed)
        stack.callback(world.close)
        (directory / "killed").mkdir()
        killing = Killing(directory / "killed", seed)
        stack.callback(killing.close)
        living = Living(directory, seed, stack)
        turns = {"kills": killing.turn, "trips": living.trip, "garbage": living.strangers}
        due_s = 0.0
        try:
            while (now_s := time.monotonic() - begin) < minutes * 60:
                world.go_on()
                if now_s >= due_s:
                    living.sample()
                    due_s += max(1.0, minutes * 60 / SAMPLES_MAX)
                name = min(used, key=lambda each: used[each] / SHARES[each])
                turn_begin = time.monotonic()
                turns[name]()
                used[name] += time.monotonic() - turn_begin
                _show(progress, task, now_s, world, killing, living)
        except Stopped:
            early = True
        killing.close()
        return _result(begin, early, world, killing, living)


def _show(
    progress: Progress, task: TaskID, now_s: float, world: World, killing: Killing, living: Living
) -> None:
    wrong = len(world.violations) + len(killing.violations) + len(living.violations)
    text = f"soak: {world.seeds:,} seeds, {killing.kills:,} kills, {wrong} violations"
    progress.update(task, completed=now_s, description=text)


def _result(
    begin: float, early: bool, world: World, killing: Killing, living: Living
) -> dict[str, Any]:
    done = living.trips
    violations = {
        "world": world.violations,
        "kills": killing.violations,
        "the node that lives": living.violations,
    }
    return {
        "what": "the tests of faults at length; the node of `samples` lived all the time",
        "minutes": (time.monotonic() - begin) / 60,
        "stopped_early": early,
        "seeds": world.seeds,
        "lives": dict(sorted(world.lives.items())),
        "events": world.events,
        "faults": dict(sorted(world.faults.items())),
        "kills": killing.total.kill_count,
        "kills_by_point": dict(sorted(killing.total.kills.items())),
        "baseline_slowest_s": killing.total.slowest_s,
        "inputs": living.inputs,
        "round_trips": msgspec.to_builtins(done),
        "verified_blocks": done.verified_blocks + killing.total.verified_blocks,
        "verified_bytes": done.verified_bytes + killing.total.verified_blocks * (64 << 10),
        "violations": sum(map(len, violations.values())),
        "violations_told": {name: told for name, told in violations.items() if told},
        "samples": living.samples,
    }


def command(minutes: float, seed: int, name: str) -> str:
    """How to see it again."""
    said = f"python bench/scenarios/soak.py --minutes {minutes:g} --seed {seed}"
    return said if name == NAME else f"{said} --name {name}"


def verdict(result: dict[str, Any]) -> str:
    """How many promises were broken; that the world had no time is no proof that it holds."""
    if not result["violations"] and not result["seeds"]:
        return "none was seen, but no seed was finished"
    return f"{result['violations']:,}"


def page(result: dict[str, Any]) -> str:
    """bench/results/soak.md."""
    lives = ", ".join(f"{steps}: {seeds:,}" for steps, seeds in result["lives"].items())
    rows = (
        ("minutes", f"{result['minutes']:.1f}"),
        ("seeds of the world", f"{result['seeds']:,}"),
        ("seeds a second", f"{result['seeds'] / result['minutes'] / 60:.1f}"),
        ("steps with faults: seeds", lives),
        ("events in them", f"{result['events']:,}"),
        ("faults in them", f"{sum(result['faults'].values()):,}"),
        ("kill -9 of real processes", f"{result['kills']:,}"),
        ("slowest return to baseline after one", f"{result['baseline_slowest_s']:.2f} s"),
        ("broken datagrams to a real node", f"{result['inputs']:,}"),
        ("blocks stored and read back", f"{result['round_trips']['verified_blocks']:,}"),
        ("bytes verified", f"{result['verified_bytes'] / 2**30:,.1f} GiB"),
        ("**violations**", f"**{verdict(result)}**"),
    )
    more = record.growth(result["samples"])
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    told = [
        f"Violation, {name}: {text}"
        for name, texts in result["violations_told"].items()
        for text in texts
    ]
    machine = result["environment"]
    made = (
        f"Made by `{command(result['asked_minutes'], result['seed'], result['name'])}`\non"
        f" {machine['date'][:10]}, commit {machine['commit'][:12]}, {machine['cpu']},"
        f" {machine['cores']} cores.{' It was stopped early.' if result['stopped_early'] else ''}"
    )
    held = (
        "The node that lived all the time has at the end, compared with when it was warm: memory\n"
        f"{more['rss_mib']:+.1f} MiB, descriptors {more['descriptors']:+.1f}, pins"
        f" {more['pins']:+.1f}, slots in quarantine {more['slots_quarantined']:+.1f}."
    )
    kills = "\n".join(f"| {name} | {n:,} |" for name, n in result["kills_by_point"].items())
    return "\n\n".join(
        (
            "# Soak",
            made,
            f"| | |\n|---|---|\n{table}",
            *told,
            held,
            f"![memory, descriptors, pins and slots over time]({result['name']}.png)",
            "Kills by the moment and the process:",
            f"| moment and victim | kills |\n|---|---|\n{kills}\n",
        )
    )


def stop(_number: int, _frame: object) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # once is enough: the end takes a moment
    raise Stopped


def _minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (minutes := float(text)) < math.inf:
            return minutes
    raise argparse.ArgumentTypeError(f"'{text}' is not a time of more than 0 minutes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Faults, at length.")
    parser.add_argument("--minutes", type=_minutes, default=60.0, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=SEED, help="default %(default)s")
    parser.add_argument("--name", default=NAME, help="of the result; default %(default)s")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    console = Console()
    console.print(f"seed {options.seed}", highlight=False)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-soak-") as folder,
        Progress(console=console) as progress,
    ):
        result = soak(options.minutes, options.seed, Path(folder), progress)
    result |= {"name": options.name, "asked_minutes": options.minutes}
    path = record.write(options.name, result, seed=options.seed)
    result = json.loads(path.read_text())
    path.with_suffix(".md").write_text(page(result))
    plot.draw(path, NAME)
    for name, told in result["violations_told"].items():
        for text in told:
            console.print(f"[red]✗[/] {name}: {text}", highlight=False)
    console.print(
        f"{result['seeds']:,} seeds, {result['events']:,} events, {result['kills']:,} kills,"
        f" {result['inputs']:,} inputs, {result['verified_bytes'] / 2**30:,.1f} GiB verified,"
        f" violations: {verdict(result)}\nwrote {path.relative_to(record.ROOT)}, .md and .png",
        highlight=False,
    )
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""The seeded world holds, repeats itself, knows every fault of the catalogue, and runs for long."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from kvstore.types import Shard
from tests.amounts import amount, covered
from tests.sim.catalogue import CATALOGUE
from tests.sim.world.copies import Violation
from tests.sim.world.engine import SimEngine
from tests.sim.world.parts import CLUSTER_FAULTS, FAULTS, LAYOUTS, Knobs, WorldResult
from tests.sim.world.play import LIVES, Totals, World, draw_steps, main, run_case, run_seeds
from tests.sim.world.requests import SimRequest
from tests.sim.world.shrink import Case, shrink
from tests.sim.world.world import folded

STEPS = 1000
FEW = range(1, amount(9, nightly=16))
MANY_FROM = 1009
MANY_EACH = amount(12, nightly=260)
EVENTS_MIN = amount(30_000, nightly=400_000)
TIMES_MIN = amount(3, nightly=30)
BETWEEN_NODES_MIN = amount(1, nightly=2)
MANY_STEPS = 700
"""Two processes run so many seeds each."""
REPEATED = FEW[4:]


def cases(seeds: Iterable[int]) -> list[Case]:
    return [Case(seed, STEPS) for seed in seeds]


def total(results: Iterable[WorldResult]) -> Totals:
    totals = Totals(first_seed=0)
    for result in results:
        totals.seeds += 1
        totals.add(result)
    return totals


def check(totals: Totals, *, seeds: int) -> None:
    assert totals.seeds == seeds
    assert not totals.violations
    assert totals.finished > 20 * seeds
    assert totals.loaded_blocks > 10 * seeds
    assert totals.promoted_blocks > seeds
    assert totals.foreign_blocks > seeds
    assert totals.kept_blocks > seeds
    assert totals.fetched_blocks > seeds
    assert totals.slab_blocks > 0
    assert totals.least_hit_share >= 0.95


def test_few_seeds_hold_and_differ_and_repeat_themselves_in_another_process(
    tmp_path: Path,
) -> None:
    # The other one has another seed of Python's own hashes, and begins with another world.
    results = {case.seed: run_case(case) for case in cases(FEW)}
    check(total(results.values()), seeds=len(FEW))
    assert len({result.trace for result in results.values()}) == len(FEW)
    with run_elsewhere(REPEATED[0], len(REPEATED), tmp_path) as run:
        there = msgspec.json.decode(run.communicate()[0], type=Totals)
    assert there.trace == total(results[seed] for seed in REPEATED).trace


def run_elsewhere(
    first_seed: int, count: int, stories: Path, *, steps: int = STEPS
) -> subprocess.Popen[str]:
    """In a process of its own."""
    words = f"--seed {first_seed} --seeds {count} --steps {steps} --json --stories {stories}"
    command = [sys.executable, "-m", "tests.sim.world", *words.split()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_seeds_hold_and_every_fault_happens(tmp_path: Path) -> None:
    runs = [
        run_elsewhere(MANY_FROM + part * MANY_EACH, MANY_EACH, tmp_path, steps=MANY_STEPS)
        for part in range(2)
    ]
    with runs[0], runs[1]:
        try:
            told = [run.communicate()[0] for run in runs]
        finally:
            for run in runs:
                run.kill()
    parts = [msgspec.json.decode(line, type=Totals) for line in told]
    assert not list(tmp_path.iterdir()), min(tmp_path.iterdir()).read_text()
    for part in parts:
        check(part, seeds=MANY_EACH)
    events = sum(part.events for part in parts)
    assert events >= EVENTS_MIN
    covered("seeds of the world", 2 * MANY_EACH)
    covered("events of the world", events)
    faults = sum((Counter(part.faults) for part in parts), Counter[str]())
    names = {name for row in CATALOGUE.values() for name in row}
    rare = {name for name in names if faults[name] < _times_min(name)}
    assert not _never(rare), f"they do not happen: {dict(sorted(faults.items()))}"


def _never(faults: set[str]) -> set[str]:
    """Those that do not happen where they are always possible, which few seeds draw. Every fourth
    seed is a cluster."""
    seeds = iter(range(4, 84, 4))
    while faults and (seed := next(seeds, 0)):
        faults = faults - World(seed, always=faults & {*FAULTS}).run(MANY_STEPS).faults.keys()
    return faults


def _times_min(name: str) -> int:
    """A quarter of the seeds are clusters."""
    return BETWEEN_NODES_MIN if name in CLUSTER_FAULTS else TIMES_MIN


def test_the_catalogue_names_every_fault() -> None:
    names = {name for row in CATALOGUE.values() for name in row}
    assert names == {*FAULTS, "lost unsynced"}


def test_where_nobody_says_seeds_say_how_long_they_live(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn = Counter(map(draw_steps, range(1000)))
    assert set(drawn) == set(LIVES)
    assert max(drawn.values()) == drawn[min(LIVES)]
    seeds = [seed for seed in range(100) if draw_steps(seed) == min(LIVES)][:2]
    for seed in seeds:
        assert main(["--seed", str(seed), "--steps", "0", "--json"]) == 0
        told = msgspec.json.decode(capsys.readouterr().out, type=Totals)
        assert told.lives == {min(LIVES): 1}
        assert told.trace == run_seeds([Case(seed, min(LIVES))]).trace


def test_a_failure_is_written_down_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = World.close

    def end_badly(self: World) -> list[str]:
        return ended(self) + (["a file"] if self.seed == 2 else [])

    monkeypatch.setattr(World, "close", end_badly)
    words = f"--seed 1 --seeds 3 --steps 10 --json --stories {tmp_path}"
    assert main(words.split()) == 1
    totals = msgspec.json.decode(capsys.readouterr().out, type=Totals)
    assert (totals.first_seed, totals.seeds, len(totals.violations)) == (1, 3, 1)
    (story,) = tmp_path.iterdir()
    assert story.name == "seed-2.txt"
    assert totals.violations[0] in story.read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--faults", "slow,node kiled"],
            "there is no fault 'node kiled': there are engine",
        ),
        (["--nodes", "17"], "'17' is not a number from 0 to 16"),
        (["--nodes", "-1"], "'-1' is not a number from 0 to 16"),
        (["--seeds", "0"], "'0' is not a number of at least 1"),
        (["--steps", "-5"], "'-5' is not a number of at least 0"),
        (["--minutes", "0"], "'0' is not a time of more than 0 minutes"),
        (["--stories", "/dev/null/x"], "no story can be written to /dev/null/x: Not a directory"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([f"{words[0]}={words[1]}"])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("exit status is 0", "same trace hash", ", addresses swapped.", "default 1000"):
        assert words in text


def test_that_all_held_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "5", "--steps", "10"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("1 seed from 5 on held: ")
    assert "{" not in told


def test_a_story_repeats_no_line() -> None:
    story = ["      1.0 ms  a beat", "      2.0 ms  a beat", "      3.0 ms  an end"]
    assert list(folded(story)) == [
        "      1.0 ms  a beat  (and 1 more like it)",
        "      3.0 ms  an end",
    ]


def test_time_ends_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "5", "--steps", "10", "--minutes", "0.0000001", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Totals).seeds <= 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda shards: f"{len(shards)} ranks")
def test_every_layout_stores_each_shard_once_and_hits(layout: tuple[Shard, ...]) -> None:
    world = World(1, knobs=Knobs(), faults=())
    engines = [
        SimEngine(world.machines[0], name, space=world.spaces[0], blocks=64, shards=layout)
        for name in "ab"
    ]
    world.engines = list(engines)
    keys = world.chains[0][:8]
    blocks = len(keys)
    for engine in engines:
        for _ in range(4000):
            world.event(faulty=False)
            if all(e.core.attachment.is_open for e in engines):
                break
        engine.add(SimRequest(engine.name, keys, tokens=blocks * 16 + 5, decode_tokens=0))
        for _ in range(4000):
            world.event(faulty=False)
            if engine.finished_count and engine.idle:
                break
        assert engine.finished_count == 1
        for _ in range(50):
            world.event(faulty=False)
    first, second = engines
    # The first stored everything once, the second found it.
    assert sum(rank.stored_blocks for rank in first.ranks) == blocks * len(set(layout))
    assert (first.loaded_blocks, second.loaded_blocks) == (0, blocks)
    (dram,) = [tier for tier in world.machines[0].node.tiers() if tier.tier == "dram"]
    assert dram.slots_sealed == blocks * len(set(layout))


def test_shrinking_leaves_out_what_is_not_needed() -> None:
    def run(case: Case) -> None:
        faults = FAULTS if case.faults is None else case.faults
        if case.steps >= 40 and "clear" in faults and case.engines != 1:
            raise Violation("it fails", steps=300)

    small, _ = shrink(Case(seed=1, steps=600), Violation("it fails", steps=300), run)
    assert (small.faults, small.engines) == (("clear",), 2)
    assert 40 <= small.steps < 50
    with pytest.raises(Violation):
        run(small)

"""What a run on a GPU has to find: all goals in one place, and how findings are judged.

A goal names a part and a path in its findings; `*` stands for every name there. What it names has
to be there: a goal that nothing was found for is missed. `HEADLINES` are the goals by which GPUs
are supported or not; several goals belong to one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

RUNS, PAGES = "Llama-3-8B BLHNC", "Llama-3-8B LBHNC"
"""Shapes whose blocks are one run of 2 MiB, and pages of 64 KiB."""
CAPTURES = 10
STEPS_BLOCKS = 96
"""Blocks that are loaded while the engine takes a mark a step: 60 MiB, which the bus moves in a
tenth of one."""
STEPS_MAX = 3
SHAPES_COUNT = 9
"""Caches whose copies are measured."""
COPIED_GB_PER_S = 10.0
"""Less beside the engine's work is as good as none."""
HEADLINES = (
    *("copies in runs of 2 MiB, of pinned peak", "copies of pages of 64 KiB, of pinned peak"),
    *("both directions at once, of both peaks", "matrix products beside copies, share left"),
    *("CUDA graphs captured beside copies", "verified loads from hbm, times dram's"),
    "wrong bytes, blocks or cycles",
)
_RUNS, _PAGES, _BOTH, _PRODUCTS, _CAPTURES, _HBM, _WRONG = HEADLINES


class Goal(NamedTuple):
    """A bound of one finding, or of several."""

    part: str
    path: tuple[str, ...]
    least: float | None = None
    most: float | None = None
    is_rate: bool = False
    """Only a GPU can meet it: a rehearsal is not judged by it."""
    headline: str = ""

    @property
    def bound(self) -> str:
        if self.most == 0:
            return "none"
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"


class Verdict(NamedTuple):
    """Of a goal, for one of the values that it bounds."""

    name: str
    found: Any
    """None: nothing was found."""
    goal: Goal
    is_met: bool

    def __str__(self) -> str:
        value = "not found" if self.found is None else _short(self.found)
        return f"{self.name}: {value}, goal {self.goal.bound}"


def at_least(part: str, *path: str, value: float, headline: str = "") -> Goal:
    """Of a rate."""
    return Goal(part, path, least=value, is_rate=True, headline=headline)


def none_of(part: str, *path: str, headline: str = "") -> Goal:
    """A number that is 0, or a list that is empty."""
    return Goal(part, path, most=0, headline=headline)


GOALS = (
    none_of("contract", "failed"),
    Goal("contract", ("passed",), least=10),
    Goal("contract", ("skipped",), most=0, is_rate=True),
    none_of("kernels", "moves", "*", "wrong_bytes", headline=_WRONG),
    none_of("kernels", "digests", "wrong_sizes", headline=_WRONG),
    none_of("kernels", "cycles", "*", "wrong_bytes", headline=_WRONG),
    Goal("copies", ("shapes",), least=SHAPES_COUNT, is_rate=True),
    none_of("copies", "shapes", "*", "*", "wrong_cycles", headline=_WRONG),
    none_of("copies", "crossing", "*", "wrong_cycles", headline=_WRONG),
    *(
        at_least("copies", "shapes", shape, "staged", f"{way}_ratio", value=value, headline=line)
        for shape, value, line in ((RUNS, 0.9, _RUNS), (PAGES, 0.8, _PAGES))
        for way in ("store", "load")
    ),
    *(
        at_least("copies", "shapes", shape, "staged", "both_ratio", value=0.75, headline=_BOTH)
        for shape in (RUNS, PAGES)
    ),
    none_of("node", "wrong", headline=_WRONG),
    none_of("node", "failed"),
    none_of("hbm", "failed"),
    none_of("hbm", "loads", "wrong_blocks", headline=_WRONG),
    at_least("hbm", "loads", "hbm_of_dram", value=2.0, headline=_HBM),
    none_of("beside", "products", "*", "*", "*", "errors"),
    at_least("beside", "products", "*", "*", "*", "copied_gb_per_s", value=COPIED_GB_PER_S),
    at_least("beside", "products", "*", "*", "matmul", "left", value=0.97, headline=_PRODUCTS),
    at_least("beside", "captures", "made", value=CAPTURES, headline=_CAPTURES),
    Goal("beside", ("captures", "wrong_replays"), most=0, is_rate=True),
    none_of("beside", "steps", "errors"),
    Goal("beside", ("steps", "steps"), most=STEPS_MAX, is_rate=True),
    none_of("arena", "failed"),
    none_of("memcheck", "findings"),
    none_of("memcheck", "program"),
)


def values_of(found: Any, path: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Name and value of each finding on a path."""
    if not path:
        yield "", found
        return
    if not isinstance(found, Mapping):
        return
    for name in found if path[0] == "*" else [path[0]]:
        if name in found:
            for rest, value in values_of(found[name], path[1:]):
                yield f"{name} {rest}".strip(), value


def judged(part: str, found: Mapping[str, Any], *, is_rehearsal: bool = False) -> list[Verdict]:
    """All goals of a part, each for every value that it bounds."""
    verdicts = []
    for goal in GOALS:
        if goal.part != part or (is_rehearsal and goal.is_rate):
            continue
        values = [*values_of(found, goal.path)] or [(" ".join(goal.path), None)]
        verdicts += [Verdict(name, value, goal, _meets(goal, value)) for name, value in values]
    return verdicts


def missed(part: str, found: Mapping[str, Any], *, is_rehearsal: bool = False) -> list[str]:
    """Goals of a part that its findings do not meet, each with what was found."""
    verdicts = judged(part, found, is_rehearsal=is_rehearsal)
    return [str(verdict) for verdict in verdicts if not verdict.is_met]


class Headline(NamedTuple):
    """The worst value of all that one headline bounds."""

    text: str
    found: Any
    """None: nothing was found."""
    bound: str
    state: str
    """`met`, `MISSED`, or `not measured` by all of its parts."""


def headlines(verdicts: Sequence[Verdict]) -> list[Headline]:
    """Each one over all parts that were judged."""
    rows = []
    for text in HEADLINES:
        goals = [goal for goal in GOALS if goal.headline == text]
        some = [each for each in verdicts if each.goal.headline == text]
        there = [each for each in some if each.found is not None]
        is_whole = {each.goal for each in there} == {*goals}
        state = "met" if is_whole else "not measured"
        state = state if all(each.is_met for each in there) else "MISSED"
        worst = max if goals[0].least is None else min
        numbers = [number for each in there if (number := _number(each.found)) is not None]
        rows.append(Headline(text, worst(numbers, default=None), goals[0].bound, state))
    return rows


def _number(value: Any) -> float | None:
    number = len(value) if isinstance(value, (list, tuple, Mapping)) else value
    return number if isinstance(number, (int, float)) else None


def _meets(goal: Goal, value: Any) -> bool:
    number = _number(value)
    if number is None:
        return False
    # A comparison with NaN is false.
    is_enough = goal.least is None or number >= goal.least
    return is_enough and (goal.most is None or number <= goal.most)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(len(value))
    text = ", ".join(map(str, value)) if isinstance(value, list) else f"{value}"
    return text if len(text) <= 120 else text[:120] + "…"

"""What a run on a GPU has to find: all goals in one place, and how findings are judged.

A goal names a part and a path in its findings; `*` stands for every name there. What it names has
to be there: a goal that nothing was found for is missed.
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


class Goal(NamedTuple):
    """A bound of one finding, or of several."""

    part: str
    path: tuple[str, ...]
    least: float | None = None
    most: float | None = None
    is_rate: bool = False
    """Only a GPU can meet it: a rehearsal is not judged by it."""


def at_least(part: str, *path: str, value: float) -> Goal:
    """Of a rate."""
    return Goal(part, path, least=value, is_rate=True)


def none_of(part: str, *path: str) -> Goal:
    """A number that is 0, or a list that is empty."""
    return Goal(part, path, most=0)


GOALS = (
    none_of("contract", "failed"),
    Goal("contract", ("passed",), least=10),
    none_of("kernels", "moves", "*", "wrong_bytes"),
    none_of("kernels", "digests", "wrong_sizes"),
    none_of("kernels", "cycles", "*", "wrong_bytes"),
    none_of("copies", "shapes", "*", "*", "wrong_cycles"),
    none_of("copies", "crossing", "*", "wrong_cycles"),
    *(
        at_least("copies", "shapes", shape, "staged", f"{way}_ratio", value=value)
        for shape, value in ((RUNS, 0.9), (PAGES, 0.8))
        for way in ("store", "load")
    ),
    *(
        at_least("copies", "shapes", shape, "staged", "both_ratio", value=0.75)
        for shape in (RUNS, PAGES)
    ),
    none_of("node", "wrong"),
    none_of("node", "failed"),
    none_of("hbm", "failed"),
    at_least("hbm", "loads", "hbm_of_dram", value=2.0),
    at_least("beside", "products", "*", "*", "matmul", "left", value=0.97),
    at_least("beside", "captures", "made", value=CAPTURES),
    Goal("beside", ("captures", "wrong_replays"), most=0, is_rate=True),
    Goal("beside", ("steps", "steps"), most=STEPS_MAX, is_rate=True),
    none_of("arena", "failed"),
    none_of("memcheck", "findings"),
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


def missed(part: str, found: Mapping[str, Any], *, is_rehearsal: bool = False) -> list[str]:
    """Goals of a part that its findings do not meet, each with what was found."""
    lacking = []
    for goal in GOALS:
        if goal.part != part or (is_rehearsal and goal.is_rate):
            continue
        values = list(values_of(found, goal.path))
        if not values:
            lacking.append(f"{' '.join(goal.path)}: not found")
        lacking += [f"{name}: {_short(value)}" for name, value in values if not _meets(goal, value)]
    return lacking


def _meets(goal: Goal, value: Any) -> bool:
    number = len(value) if isinstance(value, (list, tuple)) else value
    if not isinstance(number, (int, float)):
        return False
    # A comparison with NaN is false.
    is_enough = goal.least is None or number >= goal.least
    return is_enough and (goal.most is None or number <= goal.most)


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else f"{value}"
    return text if len(text) <= 120 else text[:120] + "…"

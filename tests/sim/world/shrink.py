"""A failing run of the world made smaller: fewer steps, fewer engines, fewer kinds of faults.

Whatever is left out changes what chance does in the rest, so a smaller run is another run: it is
kept if it breaks a promise too, which need not be the same one. Does not cover: the world.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tests.sim.world.copies import Violation
from tests.sim.world.parts import FAULTS

RUNS_MAX = 150


class Case(msgspec.Struct, frozen=True):
    """A run, as the command line says it."""

    seed: int
    steps: int
    engines: int = 0
    nodes: int = 0
    faults: tuple[str, ...] | None = None

    def command(self) -> str:
        """How to run it again."""
        words = [f"python -m tests.sim.world --seed {self.seed} --steps {self.steps}"]
        if self.engines:
            words.append(f"--engines {self.engines}")
        if self.nodes:
            words.append(f"--nodes {self.nodes}")
        if self.faults is not None:
            words.append(f'--faults "{",".join(self.faults)}"')
        return " ".join(words)


def shrink(
    case: Case, violation: Violation, run: Callable[[Case], object]
) -> tuple[Case, Violation]:
    """The smallest case that was found to fail, and how it fails."""
    runs = 0

    def fails(smaller: Case) -> bool:
        nonlocal case, violation, runs
        if runs >= RUNS_MAX:
            return False
        runs += 1
        try:
            run(smaller)
        except Violation as found:
            steps = min(smaller.steps, found.steps + 1)
            case, violation = msgspec.structs.replace(smaller, steps=steps), found
            return True
        return False

    if violation.steps + 1 < case.steps:
        fails(msgspec.structs.replace(case, steps=violation.steps + 1))
    fails(msgspec.structs.replace(case, nodes=1)) or fails(msgspec.structs.replace(case, nodes=2))
    fails(msgspec.structs.replace(case, engines=1)) or fails(
        msgspec.structs.replace(case, engines=2)
    )
    faults = FAULTS if case.faults is None else case.faults
    _drop_faults(faults, lambda left: fails(_with_faults(case, left)))
    steps = case.steps // 2
    while steps > 0 and fails(msgspec.structs.replace(case, steps=steps)):
        steps = case.steps // 2
    while case.steps > 1 and fails(msgspec.structs.replace(case, steps=case.steps * 7 // 8)):
        pass
    return case, violation


def _with_faults(case: Case, faults: tuple[str, ...]) -> Case:
    return msgspec.structs.replace(case, faults=faults)


def _drop_faults(faults: tuple[str, ...], fails: Callable[[tuple[str, ...]], bool]) -> None:
    """Half of them at once first, then fewer."""
    size = len(faults) // 2
    while size:
        for begin in range(0, len(faults), size):
            left = faults[:begin] + faults[begin + size :]
            if fails(left):
                faults = left
                break
        else:
            size //= 2

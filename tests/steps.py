"""State machines whose steps are counted, so that `make test` can say how many it took.

    class MyMachine(CountedMachine): …

`pytest --steps-min N` fails a run that took fewer (`tests/conftest.py`).
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from hypothesis.stateful import RuleBasedStateMachine, invariant

TAKEN: Counter[str] = Counter()
"""Steps by machine, of all examples of this run."""


class CountedMachine(RuleBasedStateMachine):
    """A machine of rules that counts its steps."""

    is_counted: ClassVar[bool] = True
    """False while something is broken on purpose: those steps prove nothing."""

    _has_begun = False

    @invariant()
    def is_one_step_further(self) -> None:
        """Called after initialisation and after every rule."""
        if self._has_begun and self.is_counted:
            kind = type(self)
            TAKEN[f"{kind.__module__.removeprefix('tests.')}.{kind.__name__}"] += 1
        self._has_begun = True


def summary() -> list[str]:
    """A line per machine, and their sum."""
    if not TAKEN:
        return []
    lines = [f"{count:8,} {name}" for name, count in sorted(TAKEN.items())]
    return [*lines, f"{TAKEN.total():8,} property steps"]

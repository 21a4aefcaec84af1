"""State machines whose steps are counted, so that a run can say how many it took.

    class MyMachine(CountedMachine): …

`pytest --steps-min N` fails a run that took fewer (`tests/conftest.py`).
"""

from __future__ import annotations

from typing import ClassVar

from hypothesis.stateful import RuleBasedStateMachine, invariant

from tests.amounts import covered

STEPS = "property steps"


class CountedMachine(RuleBasedStateMachine):
    """A machine of rules that counts its steps."""

    is_counted: ClassVar[bool] = True
    """False while something is broken on purpose: those steps prove nothing."""

    _has_begun = False

    @invariant()
    def is_one_step_further(self) -> None:
        """Called after initialisation and after every rule."""
        if self._has_begun and self.is_counted:
            covered(STEPS, 1)
        self._has_begun = True

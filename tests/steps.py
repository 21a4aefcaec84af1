"""State machines whose steps are counted, so that a run can say how many it took.

    class MyMachine(CountedMachine): …
    verify_machine(MyMachine, examples=50, steps=40)

`pytest --steps-min N` fails a run that took fewer (`tests/conftest.py`).
"""

from __future__ import annotations

from typing import ClassVar

import hypothesis
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

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


def verify_machine(
    machine: type[RuleBasedStateMachine],
    *,
    examples: int,
    steps: int = 40,
    broken_seed: int | None = None,
) -> None:
    """Run this many examples of so many steps.

    Args:
        machine: its rules and invariants.
        examples: at most; it ends with the first that fails.
        steps: of an example.
        broken_seed: something is broken on purpose, and from this seed it is noticed soon; where
            the code has changed since, perhaps later.
    """
    phases = set(hypothesis.Phase)
    if broken_seed is not None:
        machine = type(machine.__name__, (machine,), {"is_counted": False})
        machine = hypothesis.seed(broken_seed)(machine)
        phases = {hypothesis.Phase.generate}
    run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )

"""Time of a machine, and of an engine without a model on it, which need not be the same."""

from __future__ import annotations

from tests.sim.world.ground import Machine


class SimClock:
    """A machine's time, for those who ask a clock."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def now_ns(self) -> int:
        return self._machine.now_ns


class SimEngineClock:
    """Time as one engine sees it: of a namespace of its own, perhaps, and not at the same pace."""

    def __init__(self, machine: Machine) -> None:
        world = machine.world
        self._machine = machine
        self._shift_ns = world.random.choice((0, 10**13, -(5 * 10**11)))
        self._drift_ppm = 0
        self._born_ns = machine.now_ns
        if "clock drifts" in world.enabled:
            world.strike("clock drifts", machine)
            self._drift_ppm = world.random.choice((-50_000, -200, 200, 50_000))

    @property
    def now_ns(self) -> int:
        machine_ns = self._machine.now_ns
        drift_ns = (machine_ns - self._born_ns) * self._drift_ppm // 1_000_000
        return machine_ns + self._shift_ns + drift_ns

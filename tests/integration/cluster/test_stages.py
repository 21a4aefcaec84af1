"""Whatever dies or stops at a stage of a fetch: each request is right and in time, and both nodes
hold afterwards what they held before.

Every victim is killed or stopped at every stage, over tcp. Over nixl, with UCX over tcp (over
shared memory a read ends although its peer has died), only from the stage on at which something
moves, and with the other of both signals: no transport has a part in what comes before, nor any
with the index, which is no victim there. Every night both signals go over both. Who is stopped goes
on a moment later, as after a hiccup; who stays stopped is another test.

`held` says how a fetch is brought to a stage. Partitions are `test_partition`'s.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from kvstore.testing.raw_engine import EngineGone
from tests.amounts import IS_NIGHTLY
from tests.integration.cluster.held import VICTIMS, Scene
from tests.integration.node.conftest import eventually
from tests.kit.gauges import look
from tests.kit.peers import P3_S
from tests.leaks import Baseline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MOVING = ("moving", "giving back")
STAGES = ("locating", "asking", *MOVING)
OWN = [victim for victim in VICTIMS if victim != "index"]
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
Case = tuple[str, str, signal.Signals]


def cases(stages: tuple[str, ...], victims: Sequence[str], first: int) -> list[Case]:
    """Each victim at each stage, with signals in turns beginning with this one; with both every
    night."""
    return [
        (stage, victim, number)
        for (s, stage), (v, victim), (n, number) in product(
            enumerate(stages), enumerate(victims), enumerate(SIGNALS)
        )
        if IS_NIGHTLY or (s + v + n + first) % 2 == 0
    ]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """What is started in another's place lives on for the next test; `scene` looks in the end."""


@pytest.fixture(scope="class")
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    transport: str = request.cls.TRANSPORT
    baseline = Baseline()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        with Scene.open(tmp_path_factory.mktemp(transport), transport=transport) as scene:
            yield scene
            scene.check_supervisors()
    assert not baseline.wait()


class TestOverTcp:
    TRANSPORT = "tcp"

    @pytest.mark.parametrize(("stage", "victim", "number"), cases(STAGES, VICTIMS, 0))
    def test_what_dies_or_stops_costs_a_miss_at_most(
        self, scene: Scene, stage: str, victim: str, number: signal.Signals
    ) -> None:
        check_struck(scene, stage, victim, number)

    @pytest.mark.parametrize("victim", OWN)
    def test_who_stays_stopped_is_not_waited_for(self, scene: Scene, victim: str) -> None:
        check_stays_stopped(scene, victim)


class TestOverNixl:
    TRANSPORT = "nixl"

    @pytest.mark.parametrize(("stage", "victim", "number"), cases(MOVING, OWN, 1))
    def test_what_dies_or_stops_costs_a_miss_at_most(
        self, scene: Scene, stage: str, victim: str, number: signal.Signals
    ) -> None:
        check_struck(scene, stage, victim, number)

    @pytest.mark.parametrize("victim", ["transfer worker here", "transfer worker there"])
    def test_who_stays_stopped_is_not_waited_for(self, scene: Scene, victim: str) -> None:
        check_stays_stopped(scene, victim)


def check_struck(scene: Scene, stage: str, victim: str, number: signal.Signals) -> None:
    killed = victim if number is signal.SIGKILL else ""
    with scene.held(stage, by_process=victim == "engine") as (keys, request):
        scene.strike(victim, number)
        joined = scene.join(keys) if victim != "node here" else None
        scene.let_go()
        if joined is not None:
            joined.end()
        if killed == "node here":
            with pytest.raises(EngineGone):
                request.end()
        elif killed != "engine":
            request.end()
    if killed == "node there":  # what it kept is served before any engine attaches
        scene.heal(keys)
        assert "were kept in memory" in scene.pair.b.log
    if killed:
        scene.mend(victim)
    scene.heal(keys)
    scene.check_baseline()


def check_stays_stopped(scene: Scene, victim: str) -> None:
    with scene.held("moving", by_process=victim == "engine") as (keys, request):
        scene.stop(victim)
        if victim != "transfer worker there":
            scene.go("transfer worker there")
        if victim == "node here":
            leased = scene.pair.b
        else:
            leased = scene.pair.a
            scene.join(keys).end()
            if victim != "engine":
                request.end()
        assert eventually(lambda: look(leased).leases == 0, timeout_s=P3_S)
    scene.mend(victim)
    scene.heal(keys)
    scene.check_baseline()

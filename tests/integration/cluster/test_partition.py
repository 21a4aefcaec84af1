"""A network that swallows everything at a stage of a fetch, or while four pushes are under way, one
at each stage: nobody who asks waits for it, what came is right, nothing is kept, all heals by
itself.

Stages of fetches are those of `held` at which the nodes speak with each other. Each is held in the
same way, cut, and let go. Does not cover: processes that die or stop (`test_stages`,
`test_pushes`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import psutil
import pytest

from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.wire.messages import LeaseReply, PushEnd
from tests.integration.cluster import pushing
from tests.integration.cluster.held import ANSWER_S, BLOCKS, ENDS_S
from tests.integration.cluster.pushing import FLAGS, Push, at_baseline, heals
from tests.integration.node.conftest import eventually
from tests.kit.lan import Lan, LanError
from tests.kit.peers import PeerPair, at_rest, attached, machinery, metrics, transfer_worker_of
from tests.leaks import Baseline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STAGES: Final = ("asking", "moving")
TOLD_S: Final = pushing.DEADLINE_MS / 1000 + 2
"""Until a request for a push is told: its own deadline, and a busy machine's word for that."""
CONVERGES_S: Final = 120.0
CUT_S: Final = 30.0
"""So long that TCP waits for as long again before it tries once more."""
HEALS_S: Final = 15.0
ENTRIES: Final = "kvstore_index_entries"
BELIEVED: Final = 'kvstore_index_nodes{trust="exact"}'
GRANTED: Final = 'kvstore_slots{state="granted"}'
LENT: Final = 'kvstore_transfer_seconds_count{{backend="{}",kind="ask"}}'


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Transfer workers that were killed are followed by others; `cable` looks in the end."""


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def cable(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cable]:
    baseline, folder = Baseline(), tmp_path_factory.mktemp(request.param)
    with contextlib.ExitStack() as stack:
        # By itself it would take shared memory, which no cable is part of.
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("UCX_TLS", "tcp")
        try:
            lan = stack.enter_context(Lan("a", "b"))
        except LanError as error:
            pytest.skip(f"no network namespaces here: {error}")
        started = PeerPair.start(
            folder, transport=request.param, dram="256MiB", flags=FLAGS, lan=lan
        )
        cable = Cable(lan, stack.enter_context(started))
        yield cable
        cable.rests(there=[])
        for name, node in (("a", cable.pair.a), ("b", cable.pair.b)):
            with lan.inside(name):
                assert metrics(node, "kvstore_loop_failures_total") == [0]
    assert not baseline.wait()


class Cable:
    """Between two nodes, the first of which has the index."""

    def __init__(self, lan: Lan, pair: PeerPair) -> None:
        self.lan, self.pair = lan, pair

    def here(self, *names: str) -> list[float]:
        """Numbers of the first node."""
        with self.lan.inside("a"):
            return metrics(self.pair.a, *names)

    def becomes(self, expected: dict[str, float], timeout_s: float = CONVERGES_S) -> bool:
        names, values = tuple(expected), list(expected.values())
        return eventually(lambda: self.here(*names) == values, timeout_s=timeout_s)

    def rests(self, *here: RawEngine, there: Sequence[RawEngine]) -> None:
        """Both nodes come to hold what these engines have, and nothing else."""
        with self.lan.inside("a"):
            at_rest(self.pair.a, *here)
        with self.lan.inside("b"):
            at_rest(self.pair.b, *there)

    def store(self, holder: RawEngine, keys: Sequence[bytes]) -> float:
        """At the second node, and the first one knows. Returns what it knew before."""
        (known,) = self.here(ENTRIES)
        holder.store(keys)
        assert self.becomes({ENTRIES: known + len(keys)})
        return known

    def cut_at(self, stage: str, asker: RawEngine, keys: Sequence[bytes]) -> LeaseReply:
        """Ask for these, and cut the cable when their fetch is at this stage."""
        served = LENT.format(self.pair.transport)
        slots, servings = self.here(GRANTED, served)
        is_moving = stage == "moving"
        held = transfer_worker_of(self.pair.b) if is_moving else psutil.Process(self.pair.b.pid)
        held.suspend()
        try:
            asker.timeout_s = ANSWER_S
            reply = asker.ask(keys)
            assert self.becomes({GRANTED: slots + len(keys), served: servings + is_moving})
            self.lan.cut("b")
        finally:
            held.resume()
        return reply

    def opened(self) -> Counter[str]:
        """Descriptors and children of both nodes and their transfer workers, by kind."""
        return sum((*machinery(self.pair.a), *machinery(self.pair.b)), Counter[str]())


def test_a_black_hole_at_a_stage_of_a_fetch_costs_misses_and_heals(cable: Cable) -> None:
    with (
        attached(cable.pair.b.socket, engine_id="b", timeout_s=ENDS_S) as holder,
        attached(cable.pair.a.socket, engine_id="a", timeout_s=ENDS_S) as asker,
        attached(cable.pair.a.socket, engine_id="c", timeout_s=ENDS_S) as other,
    ):
        for stage in STAGES:
            keys, more = (make_keys(BLOCKS, seed=f"{stage} {n}") for n in range(2))
            known = cable.store(holder, keys)
            reply = cable.cut_at(stage, asker, keys)
            other.timeout_s = ANSWER_S
            joined = other.ask(keys)
            # Nothing is heard of this, and who asks for it is told so at once.
            holder.store(more)
            nothing = other.lease(more)
            assert nothing.slots == b""
            other.release(nothing)
            # They compute it. What was on its way ends on both sides before anything heals.
            for engine, answer in ((asker, reply), (other, joined)):
                engine.release(answer)
                engine.timeout_s = ENDS_S
            cable.rests(asker, other, there=[holder])
            assert cable.becomes({BELIEVED: 1})
            cable.lan.heal("b")
            assert cable.becomes({BELIEVED: 2})
            for wanted in (keys, more):
                whole = cable.pair.fetch(asker, wanted)
                assert asker.is_right(whole, wanted)
                asker.release(whole)
            # The next stage counts from here: both nodes have told of both prompts.
            assert cable.becomes({ENTRIES: known + 2 * 2 * BLOCKS})


def test_a_long_black_hole_at_every_stage_of_a_push_costs_misses_and_heals(cable: Cable) -> None:
    pair = cable.pair
    assert heals(pair)
    before, transfer_worker = cable.opened(), transfer_worker_of(pair.a).pid
    ends, came, cut_s = cut_at_every_stage(cable)
    # What was under way ends on both sides, and nobody heals anything yet: bytes in its sockets
    # ended with the transfer worker alone.
    at_baseline(pair)
    assert transfer_worker_of(pair.a).pid != transfer_worker
    half, whole = pushing.HALF, pushing.BLOCKS
    assert came == dict(zip(pushing.STAGES, (0, half, whole, whole), strict=True))
    assert {stage: end.blocks for stage, end in ends.items()} == came
    assert [bool(ends[stage].reason) for stage in pushing.STAGES] == [True, True, False, False]
    threading.Event().wait(cut_s + CUT_S - time.monotonic())
    assert cable.here(BELIEVED) == [1]
    cable.lan.heal("b")
    assert cable.becomes({BELIEVED: 2}, HEALS_S), "a feed without news, too"
    assert heals(pair)
    assert eventually(lambda: not cable.opened() - before, timeout_s=15), cable.opened() - before


def cut_at_every_stage(cable: Cable) -> tuple[dict[str, PushEnd], dict[str, int], float]:
    """Ends of four pushes, and how many blocks came, by the stage at which their cable was cut; and
    when it was."""
    pair = cable.pair
    with (
        attached(pair.b.socket) as prefill,
        attached(pair.a.socket) as decode,
        contextlib.ExitStack() as stack,
    ):
        pushes = {
            stage: stack.enter_context(Push(pair, prefill, decode))
            for stage in reversed(pushing.STAGES)
        }
        # Who is stopped for one of them must not be needed by the next.
        pushes["after the seal"].reach("after the seal")
        for stage in ("after the last chunk", "mid push"):
            pushes[stage].begin()
        for stage in ("after the last chunk", "mid push"):
            pushes[stage].hold(stage)
        cable.lan.cut("b")
        cut_s = time.monotonic()
        for push in pushes.values():
            push.go_on()
        pushes["before the grant"].expect()
        told_by_s = time.monotonic() + TOLD_S
        ends = {end.transfer: end for end in (decode.push_end() for _ in pushes)}
        assert time.monotonic() < told_by_s, "who asked was told in time"
        came = {stage: pushes[stage].finish() for stage in pushing.STAGES}
        return {stage: ends[push.name] for stage, push in pushes.items()}, came, cut_s

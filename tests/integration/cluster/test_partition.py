"""A network that swallows everything at a stage of a fetch: nobody who asks waits for it, nothing
is kept, all heals by itself.

The stages are those of `held` at which the nodes speak with each other. Each is held in the same
way, cut, and let go.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.wire.messages import LeaseReply
from tests.integration.cluster.held import ANSWER_S, BLOCKS, ENDS_S
from tests.integration.node.conftest import eventually
from tests.kit.lan import Lan
from tests.kit.peers import PeerPair, at_rest, attached, metric, metrics, transfer_worker_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STAGES = ("asking", "moving")
CONVERGES_S = 120.0
CUT_S = 30.0
"""So long that TCP waits for as long again before it tries once more."""
HEALS_S = 15.0
ENTRIES = "kvstore_index_entries"
BELIEVED = 'kvstore_index_nodes{trust="exact"}'
GRANTED = 'kvstore_slots{state="granted"}'
LENT = 'kvstore_transfer_seconds_count{{backend="{}",kind="ask"}}'


class Cable:
    """Between two nodes, the first of which has the index."""

    def __init__(self, lan: Lan, pair: PeerPair) -> None:
        self.lan, self.pair = lan, pair

    def here(self, *names: str) -> list[float]:
        """Numbers of the first node."""
        with self.lan.inside("a"):
            return metrics(self.pair.a, *names)

    def becomes(self, expected: dict[str, float]) -> bool:
        names, values = tuple(expected), list(expected.values())
        return eventually(lambda: self.here(*names) == values, timeout_s=CONVERGES_S)

    def rests(self, *here: RawEngine, there: Sequence[RawEngine]) -> None:
        """Both nodes come to hold what these engines have, and nothing else."""
        with self.lan.inside("a"):
            at_rest(self.pair.a, *here)
        with self.lan.inside("b"):
            at_rest(self.pair.b, *there)

    def store(self, holder: RawEngine, keys: Sequence[bytes]) -> None:
        """At the second node, and the first one knows."""
        (known,) = self.here(ENTRIES)
        holder.store(keys)
        assert self.becomes({ENTRIES: known + len(keys)})

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


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_a_black_hole_costs_misses_and_heals(
    lan: Lan, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By itself it would take shared memory, which no cable is part of.
    monkeypatch.setenv("UCX_TLS", "tcp")
    with PeerPair.start(tmp_path, transport=transport, dram="256MiB", lan=lan) as pair:
        cable = Cable(lan, pair)
        with (
            attached(pair.b.socket, engine_id="b", timeout_s=ENDS_S) as holder,
            attached(pair.a.socket, engine_id="a", timeout_s=ENDS_S) as asker,
            attached(pair.a.socket, engine_id="c", timeout_s=ENDS_S) as other,
        ):
            for done, stage in enumerate(STAGES, start=1):
                keys, more = (make_keys(BLOCKS, seed=f"{stage} {n}") for n in range(2))
                cable.store(holder, keys)
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
                lan.heal("b")
                assert cable.becomes({BELIEVED: 2})
                for wanted in (keys, more):
                    whole = pair.fetch(asker, wanted)
                    assert asker.is_right(whole, wanted)
                    asker.release(whole)
                # The next stage counts from here: both nodes have told of both prompts.
                assert cable.becomes({ENTRIES: done * 2 * 2 * BLOCKS})
        cable.rests(there=[])
        for name, node in (("a", pair.a), ("b", pair.b)):
            with lan.inside(name):
                assert metric(node, "kvstore_loop_failures_total") == 0


def test_an_idle_feed_heals_soon_after_a_long_cut(lan: Lan, tmp_path: Path) -> None:
    with PeerPair.start(tmp_path, transport="tcp", lan=lan) as pair:

        def members() -> float:
            """Nodes that the index in a believes."""
            with lan.inside("a"):
                return metric(pair.a, "kvstore_index_nodes", '{trust="exact"}')

        assert eventually(lambda: members() == 2, timeout_s=CONVERGES_S)
        lan.cut("b")
        threading.Event().wait(CUT_S)
        assert members() == 1
        lan.heal("b")
        assert eventually(lambda: members() == 2, timeout_s=HEALS_S)

"""A network that swallows everything: nobody waits long, nothing is kept, all heals by itself."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.lan import Lan, LanError
from kvstore.testing.peers import PeerPair, at_rest, metric
from kvstore.testing.raw_engine import RawEngine, make_keys
from tests.integration.node.conftest import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 20261122
TURNS = 3
BLOCKS = 300
PATIENCE_S = 5.0
"""An engine computes what has not come by then."""
ANSWER_S = 60.0
CONVERGES_S = 120.0
CUT_S = 30.0
"""So long that TCP waits for as long again before it tries once more."""
HEALS_S = 15.0


@pytest.fixture
def lan() -> Iterator[Lan]:
    try:
        made = Lan("a", "b").__enter__()
    except LanError as error:
        pytest.skip(f"no network namespaces here: {error}")
    with contextlib.closing(made):
        yield made


def right(engine: RawEngine, keys: list[bytes], blocks: list[bytes]) -> bool:
    return all(
        block == key * (engine.block_bytes // len(key))
        for block, key in zip(blocks, keys, strict=False)
    )


def lease(engine: RawEngine, keys: list[bytes]) -> int:
    """How many of these come before an engine computes, every byte of them right."""
    try:
        reply = engine.lease(keys)
    except TimeoutError:
        return 0
    blocks = engine.read(reply)
    assert right(engine, keys, blocks)
    engine.release(reply)
    return len(blocks)


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_a_black_hole_costs_misses_and_heals(
    lan: Lan, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By itself it would take shared memory, which no cable is part of.
    monkeypatch.setenv("UCX_TLS", "tcp")
    chance = random.Random(f"{SEED}-{transport}")
    with PeerPair.start(tmp_path, transport=transport, dram="1GiB", lan=lan) as pair:

        def members() -> float:
            """Nodes that the index in a believes."""
            with lan.inside("a"):
                return metric(pair.a, "kvstore_index_nodes", '{trust="exact"}')

        with RawEngine(pair.b.socket, engine_id="b", timeout_s=ANSWER_S) as holder:
            holder.open()
            for turn in range(TURNS):
                keys = make_keys(BLOCKS, seed=f"{turn}")
                holder.store(keys)
                with (
                    RawEngine(pair.a.socket, engine_id="a", timeout_s=ANSWER_S) as asker,
                    RawEngine(pair.a.socket, engine_id="c", timeout_s=ANSWER_S) as patient,
                ):
                    asker.open()
                    asker.timeout_s = PATIENCE_S
                    patient.open()
                    cut = threading.Timer(chance.uniform(0.0, 0.1), lan.cut, ("b",))
                    cut.start()
                    lease(asker, keys)
                    cut.join()
                    # Now nothing comes from there.
                    more = make_keys(BLOCKS, seed=f"{turn}-more")
                    holder.store(more)
                    assert lease(asker, more) == 0
                    assert eventually(lambda: members() == 1, timeout_s=CONVERGES_S)
                    lan.heal("b")
                    assert eventually(lambda: members() == 2, timeout_s=CONVERGES_S)
                    for wanted in (keys, more):
                        reply = pair.borrow(patient, wanted)
                        assert right(patient, wanted, patient.read(reply))
                        patient.release(reply)
        for name, node in (("a", pair.a), ("b", pair.b)):
            with lan.inside(name):
                at_rest(node)
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

"""A network that swallows everything while four pushes are under way, one at each stage: each
request ends in time, what came is right, and both nodes are back at their baseline before it heals.

Covers: two real nodes and a cut between them, over both transports. Does not cover: processes that
die or stop (`test_pushes`), fetches (`test_partition`).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from kvstore.wire.messages import PushEnd
from tests.integration.cluster.pushing import (
    BLOCKS,
    DEADLINE_MS,
    FLAGS,
    HALF,
    STAGES,
    Push,
    at_baseline,
    heals,
)
from tests.integration.node.conftest import eventually
from tests.kit.lan import Lan
from tests.kit.peers import PeerPair, attached, machinery, metrics, transfer_worker_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ANSWER_S: Final = DEADLINE_MS / 1000 + 2
"""Until a request is told: its own deadline, and a busy machine's word for that."""


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_a_black_hole_at_every_stage_costs_misses_and_heals(
    lan: Lan, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By itself it would take shared memory, which no cable is part of.
    monkeypatch.setenv("UCX_TLS", "tcp")
    with PeerPair.start(tmp_path, transport=transport, flags=FLAGS, lan=lan) as pair:
        assert heals(pair)
        before, transfer_worker = opened(pair), transfer_worker_of(pair.a).pid
        ends, came = cut_at_every_stage(lan, pair)
        # What was under way ends on both sides, and nobody heals anything yet: bytes in its sockets
        # ended with the transfer worker alone.
        at_baseline(pair)
        assert transfer_worker_of(pair.a).pid != transfer_worker
        assert came == dict(zip(STAGES, (0, HALF, BLOCKS, BLOCKS), strict=True))
        assert {stage: end.blocks for stage, end in ends.items()} == came
        assert [bool(ends[stage].reason) for stage in STAGES] == [True, True, False, False]
        lan.heal("b")
        assert heals(pair)
        assert eventually(lambda: not opened(pair) - before, timeout_s=15), opened(pair) - before
        for name, node in (("a", pair.a), ("b", pair.b)):
            with pair.inside(name):
                assert metrics(node, "kvstore_loop_failures_total") == [0]


def cut_at_every_stage(lan: Lan, pair: PeerPair) -> tuple[dict[str, PushEnd], dict[str, int]]:
    """Ends of four pushes, and how many blocks came, by the stage at which their cable was cut."""
    with (
        attached(pair.b.socket) as prefill,
        attached(pair.a.socket) as decode,
        contextlib.ExitStack() as stack,
    ):
        pushes = {
            stage: stack.enter_context(Push(pair, prefill, decode)) for stage in reversed(STAGES)
        }
        # Who is stopped for one of them must not be needed by the next.
        pushes["after the seal"].reach("after the seal")
        for stage in ("after the last chunk", "mid push"):
            pushes[stage].begin()
        for stage in ("after the last chunk", "mid push"):
            pushes[stage].hold(stage)
        lan.cut("b")
        for push in pushes.values():
            push.go_on()
        pushes["before the grant"].expect()
        told_by_s = time.monotonic() + ANSWER_S
        ends = {end.transfer: end for end in (decode.push_end() for _ in pushes)}
        assert time.monotonic() < told_by_s, "who asked was told in time"
        came = {stage: pushes[stage].finish() for stage in STAGES}
        return {stage: ends[push.name] for stage, push in pushes.items()}, came


def opened(pair: PeerPair) -> Counter[str]:
    """Descriptors and children of both nodes and their transfer workers, by kind."""
    return sum((*machinery(pair.a), *machinery(pair.b)), Counter[str]())

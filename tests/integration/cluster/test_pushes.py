"""Pushes between two real nodes: blocks follow a prefill, whatever the parallel sizes; whoever dies
or stops meanwhile costs misses at most, and both nodes hold afterwards what they held before.

Node b prefills, node a decodes. Over nixl, UCX goes over tcp: over shared memory a write ends
although its peer has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from kvstore.cli.ask import node_client
from kvstore.engine.why.explain import RequestReport
from kvstore.engine.why.findings import RangeReport
from kvstore.engine.why.reasons import Reason
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.rows import TransferReport
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_TOKENS, EngineGone, RawEngine, make_keys
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import PushClose, PushOpen, Story
from tests.amounts import IS_NIGHTLY
from tests.integration.cluster.other_engine import OtherEngine
from tests.integration.cluster.pushing import (
    BLOCKS,
    FLAGS,
    LANDING,
    QUARANTINED,
    STAGES,
    Push,
    at_baseline,
    fresh,
    heals,
)
from tests.integration.node.conftest import eventually
from tests.kit.peers import PeerPair, attached, metric, transfer_worker_of
from tests.leaks import Baseline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES: Final = [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)]
VICTIMS: Final = (
    "prefill transfer worker",
    "decode transfer worker",
    "prefill node",
    "decode node",
)
ENGINES: Final = ("prefill engine", "decode engine")
SIGNALS: Final = (signal.SIGKILL, signal.SIGSTOP)
TRANSPORTS: Final = ("tcp", "nixl")
CASES: Final = [
    (victim, number, stage)
    for (v, victim), (n, number), stage in product(
        enumerate(VICTIMS), enumerate(SIGNALS), range(len(STAGES))
    )
    if IS_NIGHTLY or stage == (v + 2 * n) % len(STAGES)
]
"""Stages of the first transport; the second one takes the next. Both together take each victim to
each stage, and every night with both signals."""
OF_ENGINES: Final = (
    list(product(ENGINES, SIGNALS, range(len(STAGES))))
    if IS_NIGHTLY
    else [("prefill engine", signal.SIGKILL, STAGES.index("mid push"))]
)
DECODE: Final = '{side="decode"}'


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Transfer workers that were killed are followed by others; `pair` looks in the end."""


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PeerPair]:
    baseline = Baseline()
    directory: Path = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        with PeerPair.start(directory, transport=request.param, flags=FLAGS) as pair:
            assert heals(pair)
            yield pair
    assert not baseline.wait()


@pytest.fixture
def healed(pair: PeerPair) -> Iterator[None]:
    """The next test begins with transfer workers that serve: UCX may end one (SIGSEGV, seen once) a
    moment after its peer's was killed, when the test that killed it has passed."""
    yield
    assert heals(pair)


@pytest.mark.parametrize(("there", "here"), SIZES)
def test_blocks_follow_the_prefill_whatever_the_parallel_sizes(
    pair: PeerPair, there: int, here: int
) -> None:
    name, keys = fresh()
    model = f"{there}-{here}"
    with (
        attached(pair.b.socket, rank_count=there, model=model) as prefill,
        attached(pair.a.socket, rank_count=here, model=model) as decode,
    ):
        decode.timeout_s = prefill.timeout_s = 60
        assert prefill.scheduler.send(PushOpen(name))
        decode.expect(name, "b", keys)
        reply = decode.ask(keys)
        assert reply.promoting == BLOCKS
        prefill.store(keys[: BLOCKS // 2])
        decode.wait(lambda: decode.coming(reply) <= BLOCKS // 2)
        prefill.store(keys[BLOCKS // 2 :])
        assert prefill.scheduler.send(PushClose(name))
        full = decode.finish(reply)
        end = decode.push_end()  # first: it says why
        assert (end.blocks, end.reason) == (BLOCKS, "")
        assert len(full.slots) == 4 * BLOCKS * here
        assert decode.is_right(full, keys)
        decode.release(full)
    at_baseline(pair)


def test_a_push_is_seen_by_stage(pair: PeerPair) -> None:
    name, keys = fresh()
    with attached(pair.b.socket) as prefill, attached(pair.a.socket) as decode:
        decode.timeout_s = prefill.timeout_s = 60
        assert prefill.scheduler.send(PushOpen(name))
        prefill.store(keys[:4])
        decode.expect(name, "b", keys)
        waiting = decode.ask(keys)
        decode.wait(lambda: decode.coming(waiting) <= BLOCKS - 4)
        assert prefill.scheduler.send(PushClose(name, "aborted"))
        assert decode.push_end().reason == "aborted"
        reply = decode.lease(keys)
        its = {"session": decode.session, "leases": [reply.lease], "first_token_ns": 9 * NS_PER_MS}
        count = BLOCKS * BLOCK_TOKENS
        story = Story(request="r-seen", prompt_tokens=count, transfer=name, **its)  # type: ignore[arg-type]
        assert decode.scheduler.send(story)
        for each in (decode.finish(waiting), reply):
            decode.release(each)
        with node_client(pair.a.socket) as client:
            asked = pb.Filter(request="r-seen", limit=1)
            assert eventually(lambda: bool(client.rows("requests", RequestReport, asked)))
            (row,) = client.rows("requests", RequestReport, asked)
            ranges = client.rows("ranges", RangeReport, pb.Filter(number=row.number))
            seen = {each.kind for each in client.rows("transfers", TransferReport)}
        with node_client(pair.b.socket) as client:
            assert "write" in {each.kind for each in client.rows("transfers", TransferReport)}
    (push,) = row.pushes
    assert push.pushed == 4
    assert (push.node, push.blocks, push.reason) == ("b", BLOCKS, "aborted")
    assert 0 < push.granted_us <= push.first_us <= push.last_us <= push.sealed_us <= push.ended_us
    assert [(each.blocks, each.reason) for each in ranges][-1] == (
        BLOCKS - push.pushed,
        Reason.NOT_PUSHED,
    )
    stages = {"push_grant", "push_first", "land_copy", "land_verify", "push_seal", "push_token"}
    assert stages <= seen
    at_baseline(pair)


def test_more_than_the_landing_slab_holds_comes_piece_by_piece(pair: PeerPair) -> None:
    name, _ = fresh()
    keys = make_keys(2 * LANDING // (64 << 10) // 2 + 40, seed=name)
    with attached(pair.b.socket) as prefill, attached(pair.a.socket) as decode:
        decode.timeout_s = prefill.timeout_s = 60
        assert prefill.scheduler.send(PushOpen(name))
        prefill.store(keys)
        decode.expect(name, "b", keys)
        assert prefill.scheduler.send(PushClose(name))
        assert decode.push_end().blocks == len(keys)
        full = decode.lease(keys)
        assert decode.is_right(full, keys)
        assert len(full.slots) == 4 * len(keys)
        decode.release(full)
    at_baseline(pair)


def test_engines_of_other_spaces_are_told_at_once(pair: PeerPair) -> None:
    name, keys = fresh()
    with (
        attached(pair.b.socket, model="this") as prefill,
        attached(pair.a.socket, model="that") as decode,
    ):
        assert prefill.scheduler.send(PushOpen(name))
        prefill.store(keys)
        decode.expect(name, "b", keys)
        end = decode.push_end()
        assert (end.blocks, "another space" in end.reason) == (0, True)
    for node in (pair.a, pair.b):
        assert node.log.count(end.reason) <= 1  # 0 where lines of other tests used up their rate
    at_baseline(pair)


def test_a_node_that_is_no_member_is_told_at_once(pair: PeerPair) -> None:
    name, keys = fresh()
    with attached(pair.a.socket) as decode:
        decode.expect(name, "203.0.113.9:80", keys)
        assert "no member" in decode.push_end().reason
    at_baseline(pair)


@pytest.mark.usefixtures("healed")
@pytest.mark.parametrize(("victim", "number", "stage"), CASES)
def test_what_dies_or_stops_costs_misses_at_most(
    pair: PeerPair, victim: str, number: signal.Signals, stage: int
) -> None:
    node = pair.b if victim.startswith("prefill") else pair.a
    with (
        leaving(pair.b) as prefill,
        leaving(pair.a) as decode,
        Push(pair, prefill, decode) as push,
    ):
        push.reach(stage_of(pair, stage))
        with struck(node, victim, number) as pid:
            if not (number is signal.SIGSTOP and push.held and push.held.pid == pid):
                push.go_on()
            if (victim, number) == ("decode node", signal.SIGSTOP):
                threading.Event().wait(1)
            elif victim == "decode node":
                with contextlib.suppress(EngineGone):  # all may have been heard before
                    push.finish()
            else:
                push.close()
                push.finish()
                assert decode.push_end().transfer == push.name
        if (victim, number) == ("decode node", signal.SIGSTOP):
            push.close()
            push.finish()
    at_baseline(pair)


@pytest.mark.usefixtures("healed")
@pytest.mark.parametrize(("victim", "number", "stage"), OF_ENGINES)
def test_an_engine_that_dies_or_stops_leaves_nothing(
    pair: PeerPair, victim: str, number: signal.Signals, stage: int
) -> None:
    with (
        attached(pair.b.socket) as prefill,
        attached(pair.a.socket) as decode,
        OtherEngine((pair.b if victim == "prefill engine" else pair.a).socket) as other,
    ):
        ours = (other, decode) if victim == "prefill engine" else (prefill, other)
        with Push(pair, *ours) as push:
            push.reach(stage_of(pair, stage))
            other.process.send_signal(number)
            push.go_on()
            if victim == "prefill engine":
                push.finish()
                decode.push_end()
            elif number is signal.SIGSTOP:
                assert eventually(lambda: not metric(pair.a, "kvstore_pushes", DECODE))
    at_baseline(pair)


def stage_of(pair: PeerPair, number: int) -> str:
    """See CASES."""
    return STAGES[(number + TRANSPORTS.index(pair.transport)) % len(STAGES)]


@contextlib.contextmanager
def struck(node: NodeProcess, victim: str, number: signal.Signals) -> Iterator[int]:
    """The process that was killed, or is stopped until the context ends."""
    pid = transfer_worker_of(node).pid if victim.endswith("transfer worker") else node.pid
    os.kill(pid, number)
    try:
        yield pid
    finally:
        if number is signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):  # it was killed for its silence
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def leaving(node: NodeProcess) -> Iterator[RawEngine]:
    """An engine with a session, until the context ends: whatever happened, it leaves, for what it
    was granted is in quarantine as long as this process lives, and the next tests would find it."""
    with RawEngine(node.socket) as engine:
        engine.open()
        try:
            yield engine
        finally:
            leave(engine, node)


def leave(engine: RawEngine, node: NodeProcess) -> None:
    """Give credits back, to another process of the node if need be: more than once where the node
    asks for quiet because of the restart while the engine leaves."""
    with contextlib.suppress(EngineGone, TimeoutError):
        engine.timeout_s = 5
        engine.hear()
        if not any(link.closed for link in (engine.scheduler, *engine.ranks)):
            engine.leave()
            if eventually(lambda: metric(node, QUARANTINED) == 0, timeout_s=2):
                return
    engine.close()
    for _ in range(5):
        with RawEngine(node.socket, nonce=engine.nonce) as again:
            again.open()
            again.leave()
        if eventually(lambda: metric(node, QUARANTINED) == 0, timeout_s=2):
            return

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
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count, product
from pathlib import Path
from typing import Final

import pytest

from kvstore.cli.ask import NodeClient
from kvstore.engine import RangeReport, Reason, RequestReport
from kvstore.proto import inspect_pb2 as pb
from kvstore.proto.rows import TransferReport
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import BLOCK_TOKENS, EngineGone, RawEngine, make_keys
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import LeaseRelease, LeaseReply, Story
from kvstore.wire.pushes import PushClose, PushExpect, PushOpen
from tests.amounts import IS_NIGHTLY
from tests.integration.node.conftest import eventually
from tests.kit.peers import PeerPair, attached, metrics, mover_of
from tests.leaks import Baseline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCKS: Final = 64
SIZES: Final = [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)]
VICTIMS: Final = ("prefill mover", "decode mover", "prefill node", "decode node")
MOMENTS: Final = (
    ("before the grant", "half-way", "after the last block") if IS_NIGHTLY else ("half-way",)
)
"""The world takes all of them in every run."""
LANDING: Final = 16 << 20
_numbers = count()


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Transfer workers that were killed are followed by others; `pair` looks in the end."""


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PeerPair]:
    baseline = Baseline()
    flags = ("--landing", str(LANDING), "--slab", "4MiB")
    directory: Path = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        with PeerPair.start(directory, transport=request.param, flags=flags) as pair:
            wait_until_known(pair)
            yield pair
    assert not baseline.wait()


def wait_until_known(pair: PeerPair) -> None:
    """Until both can name each other."""
    with attached(pair.b.socket) as prefill, attached(pair.a.socket) as decode:

        def pushes() -> bool:
            name, keys = fresh()
            prefill.scheduler.send(PushOpen(name))
            prefill.store(keys[:1])
            decode.expect(name, "b", keys[:1], deadline_ms=20_000)
            prefill.scheduler.send(PushClose(name))
            return not decode.push_end().reason

        prefill.timeout_s = decode.timeout_s = 60
        assert eventually(pushes, timeout_s=120)
    at_baseline(pair)


def fresh() -> tuple[str, list[bytes]]:
    """Name of a transfer, and the keys of its blocks."""
    name = f"cmpl-{next(_numbers)}"
    return name, make_keys(BLOCKS, seed=name)


def at_baseline(pair: PeerPair) -> None:
    """Nothing is expected, granted or in limbo on either node."""

    def free() -> bool:
        return all(
            metrics(
                node,
                'kvstore_landing_bytes{state="free"}',
                'kvstore_pushes{side="decode"}',
                'kvstore_pushes{side="prefill"}',
                "kvstore_leases",
                'kvstore_slots{state="granted"}',
            )
            == [LANDING, 0, 0, 0, 0]
            for node in (pair.a, pair.b)
        )

    assert eventually(free, timeout_s=25)


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
        assert len(full.slots) == 4 * BLOCKS * here
        assert decode.is_right(full, keys)
        end = decode.push_end()
        assert (end.blocks, end.reason) == (BLOCKS, "")
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
        with closing(NodeClient(pair.a.socket)) as client:
            asked = pb.Filter(request="r-seen", limit=1)
            assert eventually(lambda: bool(client.rows("requests", RequestReport, asked)))
            (row,) = client.rows("requests", RequestReport, asked)
            ranges = client.rows("ranges", RangeReport, pb.Filter(number=row.number))
            seen = {each.kind for each in client.rows("transfers", TransferReport)}
        with closing(NodeClient(pair.b.socket)) as client:
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
    name = f"cmpl-{next(_numbers)}"
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
    at_baseline(pair)


def test_a_node_that_is_no_member_is_told_at_once(pair: PeerPair) -> None:
    name, keys = fresh()
    with attached(pair.a.socket) as decode:
        decode.expect(name, "203.0.113.9:80", keys)
        assert "no member" in decode.push_end().reason
    at_baseline(pair)


def test_half_of_all_requests_are_aborted(pair: PeerPair) -> None:
    with attached(pair.b.socket) as prefill, attached(pair.a.socket) as decode:
        decode.timeout_s = prefill.timeout_s = 60
        transfers = [fresh() for _ in range(20)]
        for number, (name, keys) in enumerate(transfers):
            assert prefill.scheduler.send(PushOpen(name))
            decode.expect(name, "b", keys[:8])
            prefill.store(keys[: 8 if number % 2 else 4])
            if not number % 4:
                assert prefill.scheduler.send(PushClose(name, "aborted"))
            elif not number % 2:
                decode.cancel(name)
            else:
                assert prefill.scheduler.send(PushClose(name))
        ends = {end.transfer: end for end in (decode.push_end() for _ in transfers)}
        for number, (name, _) in enumerate(transfers):
            if number % 2:
                assert (ends[name].blocks, ends[name].reason) == (8, "")
            else:
                assert ends[name].reason in ("aborted", "it was cancelled")
    at_baseline(pair)


class Push:
    """One push, brought to a moment; `finish` ends it, as far as there is anybody to do so."""

    def __init__(self, prefill: RawEngine, decode: RawEngine, moment: str) -> None:
        self._prefill, self._decode, self._moment = prefill, decode, moment
        self.name, self.keys = fresh()
        prefill.timeout_s = decode.timeout_s = 60
        assert prefill.scheduler.send(PushOpen(self.name))
        self.reply: LeaseReply | None = None
        if moment == "before the grant":
            prefill.store(self.keys)
            return
        self.expect()
        assert self.reply is not None
        reply = self.reply
        half = self.keys[: BLOCKS // 2] if moment == "half-way" else self.keys
        prefill.store(half)
        decode.wait(lambda: decode.coming(reply) <= BLOCKS - len(half))

    def expect(self) -> None:
        self._decode.scheduler.send(PushExpect(self.name, "b", b"".join(self.keys), 5_000))
        self.reply = self._decode.ask(self.keys)

    def finish(self) -> None:
        """Every block that came is right, and the request ends."""
        if self.reply is None:
            self.expect()
        if self._moment == "half-way":
            with contextlib.suppress(EngineGone):
                self._prefill.store(self.keys[BLOCKS // 2 :])
        self._prefill.scheduler.send(PushClose(self.name))
        assert self.reply is not None
        reply = self._decode.finish(self.reply)
        assert self._decode.is_right(reply, self.keys)
        self._decode.push_end()
        self._decode.scheduler.send(LeaseRelease([reply.lease]))


@pytest.mark.parametrize(
    ("victim", "moment", "number"),
    list(product(VICTIMS, MOMENTS, (signal.SIGKILL, signal.SIGSTOP))),
)
def test_what_dies_or_stops_costs_misses_at_most(
    pair: PeerPair, victim: str, moment: str, number: signal.Signals
) -> None:
    node = pair.b if victim.startswith("prefill") else pair.a
    with RawEngine(pair.b.socket) as prefill, RawEngine(pair.a.socket) as decode:
        prefill.open()
        decode.open()
        push = Push(prefill, decode, moment)
        pid = strike(node, victim, number)
        try:
            if victim != "decode node":
                push.finish()
            elif number is signal.SIGKILL:
                with contextlib.suppress(EngineGone):  # all may have been heard before
                    push.finish()
            else:
                threading.Event().wait(1)
        finally:
            if number is signal.SIGSTOP:
                with contextlib.suppress(ProcessLookupError):  # it was killed for its silence
                    os.kill(pid, signal.SIGCONT)
        if (victim, number) == ("decode node", signal.SIGSTOP):
            push.finish()
        leave(prefill, pair.b)
        leave(decode, pair.a)
    at_baseline(pair)
    assert heals(pair)


def leave(engine: RawEngine, node: NodeProcess) -> None:
    """Give credits back, to another process of the node if need be."""
    with contextlib.suppress(EngineGone, TimeoutError):
        engine.timeout_s = 5
        engine.leave()
        return
    engine.close()
    with RawEngine(node.socket, nonce=engine.nonce) as again:
        again.open()
        again.leave()


def strike(node: NodeProcess, victim: str, number: signal.Signals) -> int:
    pid = mover_of(node).pid if victim.endswith("mover") else node.pid
    os.kill(pid, number)
    return pid


def heals(pair: PeerPair) -> bool:
    """Whether another push goes well."""
    with attached(pair.b.socket) as prefill, attached(pair.a.socket) as decode:

        def is_well() -> bool:
            push = Push(prefill, decode, "before the grant")
            push.finish()
            return push_is_whole(decode, push.keys)

        healed = eventually(is_well, timeout_s=60)
    at_baseline(pair)
    return healed


def push_is_whole(decode: RawEngine, keys: Sequence[bytes]) -> bool:
    reply = decode.lease(keys)
    decode.release(reply)
    return len(reply.slots) == 4 * len(keys)

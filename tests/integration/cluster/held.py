"""A fetch between two real nodes, held at a stage while something happens to somebody.

    stage          who is stopped, so that it lasts     how it is seen
    locating       the index                            asked of the index, no slots taken
    asking         the other node's process             slots taken, nothing served
    moving         the other transfer worker, half-way  served, and some of the bytes are here
    giving back    the other node's process, after its  moved, and not taken into the cache
                   transfer worker has moved all

Each is seen, not timed: counters of the node that fetches, bytes in its arena, and its engine,
which is promised all blocks and has none. A hold ends by itself when the node that fetches waits no
longer; where a machine is so slow that a stage is over before it is seen, other blocks are tried.

Covers: two nodes, an index and engines, and what can be done to them. Does not cover: what must
hold then (`test_stages`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import psutil

from kvstore.client.index import IndexClient
from kvstore.testing.process import Lab, NodeProcess, stop_process
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.types import PAGE_BYTES
from kvstore.wire.messages import LeaseRenew, LeaseReply
from tests.integration.cluster.kit import CONVERGES_S, matches
from tests.integration.cluster.other_engine import OtherEngine
from tests.integration.node.conftest import eventually
from tests.kit.gauges import open_now
from tests.kit.peers import P3_S, PeerPair, at_rest, machinery, metrics, transfer_worker_of
from tests.kit.processes import IndexProcess

BLOCKS: Final = 256
"""16 MiB: one fetch."""
DRAM: Final = "128MiB"
SLICE_S: Final = 200e-6
"""How long a transfer worker is let go that is to be stopped while it moves."""
ANSWER_S: Final = 2.5
"""Promise P2: recompute is decided on within 250 ms; a busy machine is given ten times that."""
ENDS_S: Final = 60.0
UNKNOWN: Final = make_keys(8, seed="nobody has them")
STAGE_S: Final = 5.0
"""Longer than any hold lasts."""
VICTIMS: Final = (
    "transfer worker here",
    "transfer worker there",
    "node here",
    "node there",
    "engine",
    "index",
)


class Progress(NamedTuple):
    """Of fetches, as the node that fetches counts them."""

    located: float
    """Questions to the index."""
    granted: float
    """Slots that may be written, by engines and by fetches."""
    served: float
    moved: float


class Request:
    """For all blocks of a case, by an engine of the node that fetches."""

    def __init__(self, engine: RawEngine | OtherEngine, keys: Sequence[bytes]) -> None:
        self._engine, self._keys = engine, keys
        self._reply: LeaseReply | None = None

    def ask(self) -> None:
        """Be answered, in time."""
        self._engine.timeout_s = ANSWER_S
        self._reply = self._engine.ask(self._keys)

    def coming(self) -> int:
        """How many are promised and have not come."""
        assert self._reply is not None
        self._engine.hear()
        return self._engine.coming(self._reply)

    def end(self) -> None:
        """Wait for the end of it; what came is right, and is given back."""
        assert self._reply is not None
        self._engine.timeout_s = ENDS_S
        # `finish` tells whether there is anybody to hear it.
        self._engine.scheduler.send(LeaseRenew(leases=[self._reply.lease]))
        reply = self._engine.finish(self._reply)
        assert self._engine.is_right(reply, self._keys)
        self._engine.release(reply)


class Scene:
    """Two nodes, an index by itself, and an engine of node b that stores; engines of node a ask."""

    def __init__(
        self, directory: Path, pair: PeerPair, index: IndexProcess, stack: contextlib.ExitStack
    ) -> None:
        lab = Lab(directory)
        self._directory, self._flags = directory, lab.flags("index", "i1")
        self.pair, self.index = pair, index
        self.stopped: dict[str, psutil.Process] = {}
        """Of VICTIMS, those that do nothing just now."""
        self._seeds = map(str, itertools.count())
        self._engines: dict[str, RawEngine] = {}
        stack.callback(lambda: self.index.kill())
        stack.callback(self._hang_up)
        for name, node in (("holder", pair.b), ("asker", pair.a), ("other", pair.a)):
            self._attach(name, node)
        self._client = stack.enter_context(
            IndexClient([index.address], tls=lab.files("client", "tests"), timeout_s=ANSWER_S)
        )
        self._victim: OtherEngine | None = None
        stack.callback(self.let_go)
        self.heal(self.stored(next(self._seeds)))
        self._rest()
        self._machinery = [*machinery(pair.a), *machinery(pair.b)]
        # Two pipes more while a child is on its way to its program; a pidfd less while a rank is on
        # its way to the supervisor.
        due = [(2, 2, 2 + ranks) for ranks in (2, 1)]
        at_rest_now = itemgetter("children", "pipe", "anon_inode:[pidfd]")
        assert eventually(
            lambda: [at_rest_now(found) for found in self._supervisors_open()] == due,
            timeout_s=P3_S,
        )
        self._supervisors = self._supervisors_open()

    @classmethod
    @contextlib.contextmanager
    def open(cls, directory: Path, *, transport: str) -> Iterator[Scene]:
        """All of it, until the context ends."""
        flags = Lab(directory).flags("index", "i1")
        with contextlib.ExitStack() as stack:
            index = IndexProcess.start(directory, flags)
            stack.callback(index.kill)
            pair = stack.enter_context(
                PeerPair.start(directory, transport=transport, dram=DRAM, index=index.address)
            )
            yield cls(directory, pair, index, stack)

    def _attach(self, name: str, node: NodeProcess) -> None:
        """The same engine as before, if there was one: its process lives on."""
        before = self._engines.get(name)
        nonce = before.nonce if before else ""
        if before:
            before.close()
        engine = RawEngine(node.socket, engine_id=name, nonce=nonce, timeout_s=ENDS_S)
        self._engines[name] = engine
        engine.open()

    def _hang_up(self) -> None:
        for engine in self._engines.values():
            engine.close()

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────

    def stored(self, seed: str) -> list[bytes]:
        """Keys of blocks that node b holds, and the index knows it."""
        keys = make_keys(BLOCKS, seed=seed)
        self._engines["holder"].store(keys)

        def is_known() -> bool:
            found = matches(self._client, keys)
            return "b" in found and found["b"].dram_blocks == BLOCKS

        assert eventually(is_known, timeout_s=CONVERGES_S)
        return keys

    def arrivals(self, keys: Sequence[bytes]) -> Callable[[], int]:
        """Counts those of these blocks that have begun to be in the memory of node a."""
        engine = self._engines["asker"]
        memory = engine.ranks[0].arena
        assert memory is not None
        firsts = memory.array.view(np.uint64).reshape(-1, PAGE_BYTES // 8)[:, 0]
        wanted = np.frombuffer(b"".join(engine.contents(key)[:8] for key in keys), np.uint64)
        return lambda: int(np.isin(firsts, wanted).sum())

    def progress(self) -> Progress:
        """Of node a."""
        transport = self.pair.transport
        done = 'kvstore_transfer_seconds_count{{backend="{}",kind="{}"}}'
        return Progress(
            *metrics(
                self.pair.a,
                "kvstore_locates_total",
                'kvstore_slots{state="granted"}',
                done.format(transport, "ask"),
                done.format(transport, "move"),
            )
        )

    # ── what is done to them ─────────────────────────────────────────────────────────────────────

    def process(self, name: str) -> psutil.Process:
        """One of VICTIMS."""
        match name:
            case "transfer worker here":
                return transfer_worker_of(self.pair.a)
            case "transfer worker there":
                return transfer_worker_of(self.pair.b)
            case "node here":
                return psutil.Process(self.pair.a.pid)
            case "node there":
                return psutil.Process(self.pair.b.pid)
            case "index":
                return psutil.Process(self.index.process.pid)
            case _:
                assert self._victim is not None
                return psutil.Process(self._victim.process.pid)

    def stop(self, name: str) -> None:
        """It does nothing from now on."""
        if name in self.stopped:
            return
        process = self.stopped[name] = self.process(name)
        stop_process(process.pid)

    def go(self, name: str) -> None:
        """It goes on, if it is there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.stopped.pop(name).resume()

    def let_go(self) -> None:
        """All that were stopped go on."""
        for name in list(self.stopped):
            self.go(name)

    def strike(self, name: str, number: signal.Signals) -> None:
        """Kill or stop it; returns when it is done."""
        if number is signal.SIGSTOP:
            self.stop(name)
            return
        pidfd = os.pidfd_open((self.stopped.get(name) or self.process(name)).pid)
        signal.pidfd_send_signal(pidfd, number)
        assert select.select([pidfd], [], [], ENDS_S)[0]
        os.close(pidfd)

    def mend(self, name: str) -> None:
        """What was killed and is started by nobody is there again, so are engines that lost their
        node, and transfer workers are that move."""
        match name:
            case "transfer worker here" | "transfer worker there":
                self.heal(self.stored(next(self._seeds)))
            case "index":
                address = self.index.address
                self.index.kill()
                self.index = IndexProcess.start(self._directory, self._flags, listen=address)
            case "node here":
                self._attach("asker", self.pair.a)
                self._attach("other", self.pair.a)
            case "node there":
                self._attach("holder", self.pair.b)

    # ── stages ───────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def held(self, stage: str, *, by_process: bool) -> Iterator[tuple[list[bytes], Request]]:
        """Keys of blocks whose fetch is at this stage, and the request for them."""
        for seed in itertools.islice(self._seeds, 15):
            keys = self.stored(seed)
            with contextlib.ExitStack() as stack:
                engine: RawEngine | OtherEngine = self._engines["asker"]
                if by_process:
                    engine = self._victim = stack.enter_context(OtherEngine(self.pair.a.socket))
                request = Request(engine, keys)
                stack.callback(self.let_go)
                if self._reach(stage, keys, request):
                    yield keys, request
                    return
                self.let_go()
                request.end()
            self.heal(keys)
        raise AssertionError(f"a fetch was never seen {stage}")

    def join(self, keys: Sequence[bytes]) -> Request:
        """Another request for what is held. It is answered at once, by a promise or a miss, and so
        is one for what nobody has: by a miss, although the fetch that is held has not ended."""
        other = self._engines["other"]
        joined = Request(other, keys)
        joined.ask()
        nothing = other.lease(UNKNOWN)
        assert nothing.slots == b""
        other.release(nothing)
        return joined

    def _reach(self, stage: str, keys: list[bytes], request: Request) -> bool:
        """Whether this request is there, and stays there."""
        before = self.progress()

        def comes(holds: Callable[[Progress], bool]) -> bool:
            return eventually(lambda: holds(self.progress()), timeout_s=STAGE_S)

        match stage:
            case "locating":
                self.stop("index")
                request.ask()
                there = comes(lambda now: now.located > before.located)
                there &= self.progress().granted == before.granted
            case "asking":
                self.stop("node there")
                request.ask()
                there = comes(lambda now: now.granted == before.granted + BLOCKS)
                there &= self.progress().served == before.served
            case "moving":
                self.stop("transfer worker there")
                request.ask()
                there = comes(lambda now: now.served > before.served)
                arrived, deadline_s = self.arrivals(keys), time.monotonic() + STAGE_S
                sender = self.stopped["transfer worker there"].pid
                with contextlib.suppress(ProcessLookupError):  # stopped for too long, it was killed
                    while not arrived() and time.monotonic() < deadline_s:
                        _let_go_for_a_moment(sender)
                there &= 0 < arrived() < BLOCKS
            case _:
                self.stop("transfer worker there")
                request.ask()
                there = comes(lambda now: now.served > before.served)
                self.stop("node there")
                self.go("transfer worker there")
                there &= comes(lambda now: now.moved > before.moved)
        return there and request.coming() == BLOCKS

    # ── as it was ────────────────────────────────────────────────────────────────────────────────

    def heal(self, keys: Sequence[bytes]) -> None:
        """Nodes serve to each other again: these blocks come, and are right."""
        asker = self._engines["asker"]
        asker.timeout_s = ENDS_S
        reply = self.pair.fetch(asker, keys)
        assert asker.is_right(reply, keys)
        asker.release(reply)

    def _rest(self) -> None:
        at_rest(self.pair.a, self._engines["asker"], self._engines["other"])
        at_rest(self.pair.b, self._engines["holder"])

    def check_baseline(self) -> None:
        """Both sides hold what they did at first, and have no more open than then."""
        self._rest()
        more: list[Counter[str]] = []

        def is_as_it_was() -> bool:
            seen = [*machinery(self.pair.a), *machinery(self.pair.b)]
            more[:] = [now - then for now, then in zip(seen, self._machinery, strict=True)]
            return not any(more)

        assert eventually(is_as_it_was, timeout_s=P3_S), f"open, beside what was: {more}"
        for node in (self.pair.a, self.pair.b):
            assert metrics(node, "kvstore_loop_failures_total") == [0]

    def check_supervisors(self) -> None:
        """So do those who started the nodes, when a process stands by again."""
        seen: list[Counter[str]] = []

        def is_as_it_was() -> bool:
            seen[:] = self._supervisors_open()
            return seen == self._supervisors

        assert eventually(is_as_it_was, timeout_s=P3_S), (seen, self._supervisors)

    def _supervisors_open(self) -> list[Counter[str]]:
        return [open_now(node.supervisor_pid) for node in (self.pair.a, self.pair.b)]


def _let_go_for_a_moment(pid: int) -> None:
    """All of a fetch would have come before it is seen to begin. Raises ProcessLookupError."""
    os.kill(pid, signal.SIGCONT)
    until_s = time.monotonic() + SLICE_S
    while time.monotonic() < until_s:
        pass  # a pause would take longer
    stop_process(pid)

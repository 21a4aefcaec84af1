"""A fetch from end to end, beside raw NIXL READs of the same bytes.

The fetch: an engine without vLLM asks its node for a lease of blocks that another node holds, and
has it when they have been found, served, read, given back and verified. Raw: two processes that do
nothing else, with memory like an arena, the same offsets and lengths in reads of the same size,
posted at once; with progress threads that rest and that do not, looked after without a pause and
with one: the quickest of the four ways is what counts. UCX over tcp in all, as between machines.
All take turns; the first round warms them. Who waits is stopped, or rests.

Once with blocks of 2 MiB, as of the model that other benchmarks use, and once with the smallest.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.cluster.figures import NotMeasured, at_least, ratio, spread
from bench.raw_nixl import RawNixl, is_installed
from kvstore.engine.moves.fetches import FETCH_BYTES
from kvstore.ports import Pieces
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.transport.pieces import joined, make_pieces
from kvstore.types import PAGE_BYTES
from kvstore.units import GIB, KIB, MIB
from kvstore.wire.messages import LeaseReply, slots_array
from tests.kit.peers import PeerPair, metric

UCX: Final = {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "FATAL"}
BLOCKS: Final = (("2MiB", 2 * MIB), ("64KiB", 64 * KIB))
GOAL: Final = 0.9
GOAL_CAME: Final = 0.95
"""Of rounds: what did not come at the first asking is in no median."""
ATTEMPTS: Final = 20
PAUSE_S: Final = 0.5
"""Where the index knew nobody it is not asked again within a second."""
DRAM_LEAST: Final = 512 * MIB
PATIENCE_S: Final = 60.0
TRANSPORT: Final = "nixl"
KINDS: Final = ("ask", "move", "verify", "fetch")
LOOKS_S: Final = {"looking": 0.0, "waiting": 100e-6}
"""Between two looks of raw NIXL; the second as of a transfer worker."""
WAYS: Final = [(threads, look) for threads in ("resting", "busy") for look in LOOKS_S]


class Sides:
    """Two nodes with an engine each, and raw NIXL."""

    def __init__(
        self, stack: ExitStack, *, block_bytes: int, bytes_a_round: int, rounds: int
    ) -> None:
        self.block_bytes = block_bytes
        self._count = bytes_a_round // block_bytes
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
        # Each round brings other blocks; as many again, so that none leaves and credits fit.
        dram_bytes = max(DRAM_LEAST, 2 * (rounds + 2) * bytes_a_round)
        stack.enter_context(environment(UCX))
        self._pair = stack.enter_context(
            PeerPair.start(folder, transport=TRANSPORT, dram=str(dram_bytes))
        )
        self._there, self._here = (
            stack.enter_context(RawEngine(node.socket, block_bytes=block_bytes, timeout_s=60))
            for node in (self._pair.b, self._pair.a)
        )
        self._there.open()
        self._here.open()
        self._wait(self._is_ready, "the memory of the nodes did not become ready")
        for number in range(rounds + 1):
            self._there.store(self.keys(number))
        count = self._count * (rounds + 1)
        self._wait(lambda: self._entries() >= count, "the index did not hear of all blocks")
        self.raw = {
            name: RawNixl(stack, dram_bytes, UCX, rests=rests)
            for name, rests in (("resting", True), ("busy", False))
        }

    def keys(self, number: int) -> list[bytes]:
        """Of a round."""
        return make_keys(self._count, seed=f"round {number}")

    def fetch(self, number: int) -> tuple[float, list[Pieces]]:
        """Seconds, and what was read. 0 seconds: it did not come at the first asking."""
        keys = self.keys(number)
        is_first = True
        for _ in range(ATTEMPTS):
            begin_s = time.perf_counter()
            reply = self._here.lease(keys)
            took_s = time.perf_counter() - begin_s
            if len(reply.slots) == 4 * len(keys):
                break
            self._here.release(reply)
            is_first = False
            threading.Event().wait(PAUSE_S)
        else:
            raise NotMeasured("the blocks of the other node did not come")
        served = self._there.lease_stored(keys)
        pieces = self._pieces(_bytes_at(reply), _bytes_at(served))
        self._here.release(reply)
        self._there.release(served)
        return took_s if is_first else 0.0, pieces

    def parts(self) -> dict[str, float]:
        """Mean milliseconds of the parts of one fetch, of which a lease is several at a time."""
        found = {}
        for kind in KINDS:
            labels = f'{{backend="{TRANSPORT}",kind="{kind}"}}'
            total_s, count = (
                metric(self._pair.a, f"kvstore_transfer_seconds_{what}", labels)
                for what in ("sum", "count")
            )
            found[kind] = round(1e3 * total_s / max(1.0, count), 3)
        return found

    def _pieces(self, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> list[Pieces]:
        """As they were read: a list for each fetch, neighbours joined."""
        step = FETCH_BYTES // self.block_bytes
        length = np.full(len(local), self.block_bytes)
        return [
            joined(make_pieces(*(part[at : at + step] for part in (local, remote, length))))
            for at in range(0, len(local), step)
        ]

    def _wait(self, is_so: Callable[[], bool], otherwise: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > deadline_s:
                raise NotMeasured(otherwise)
            threading.Event().wait(0.05)

    def _is_ready(self) -> bool:
        """Whether all of dram is touched: before that, blocks that come faster push others out."""
        label = '{tier="dram"}'
        with contextlib.suppress(AssertionError):  # not there in the node's first moments
            return all(
                metric(node, "kvstore_ready_bytes", label)
                >= metric(node, "kvstore_capacity_bytes", label)
                for node in (self._pair.a, self._pair.b)
            )
        return False

    def _entries(self) -> float:
        with contextlib.suppress(AssertionError):  # not there in the node's first moments
            return metric(self._pair.a, "kvstore_index_entries")
        return 0.0


def measure(*, bytes_a_round: int, rounds: int) -> dict[str, Any]:
    """Both kinds of blocks."""
    if not is_installed():
        raise NotMeasured("NIXL is not installed")
    figures, detail = {}, {}
    for name, block_bytes in BLOCKS:
        with ExitStack() as stack:
            sides = Sides(
                stack, block_bytes=block_bytes, bytes_a_round=bytes_a_round, rounds=rounds
            )
            found = _side_by_side(sides, rounds)
            parts = sides.parts()
        if not found["fetch"]:
            raise NotMeasured("no round's blocks came at the first asking")
        medians = {side: float(np.median(times)) for side, times in found.items()}
        raw = min(medians.keys() - {"fetch"}, key=lambda side: medians[side])
        value, interval = ratio(found[raw], found["fetch"])
        figures[f"fetch_over_raw_{name}"] = at_least(GOAL, value, interval_95=interval, raw=raw)
        came = len(found["fetch"]) / rounds
        figures[f"at_the_first_asking_{name}"] = at_least(GOAL_CAME, came)
        detail[name] = {
            "bytes": bytes_a_round,
            "seconds": {side: spread(times) for side, times in found.items()},
            "gib_per_s": {
                side: round(bytes_a_round / GIB / took_s, 3) for side, took_s in medians.items()
            },
            "parts_of_a_fetch_ms": parts,
        }
    return {"figures": figures, "detail": detail}


def _side_by_side(sides: Sides, rounds: int) -> dict[str, list[float]]:
    """Seconds of each. What did not come at once came in pieces, and says nothing."""
    times: dict[str, list[float]] = {"fetch": [], **{f"raw_{a}_{b}": [] for a, b in WAYS}}
    for number in range(rounds + 1):
        fetch_s, pieces = sides.fetch(number)
        took = {"fetch": fetch_s}
        for threads, look in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            took_ns = sides.raw[threads].read_ns(pieces, look_s=LOOKS_S[look])
            took[f"raw_{threads}_{look}"] = took_ns / 1e9
        if number and fetch_s:
            for side, took_s in took.items():
                times[side].append(took_s)
    return times


@contextlib.contextmanager
def environment(names: dict[str, str]) -> Iterator[None]:
    """Of the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _bytes_at(reply: LeaseReply) -> NDArray[np.uint64]:
    return slots_array(reply.slots).astype(np.uint64) * np.uint64(PAGE_BYTES)

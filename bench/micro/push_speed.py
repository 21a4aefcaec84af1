"""Pushes of 64 MiB: NIXL by itself, through transfer workers, and from node to node.

    python bench/micro/push_speed.py [--rounds 7] [--out push_speed]

Every round does each once, so that what else the machine does falls on all; ratios are of medians,
for blocks of 2 MiB and of 64 KiB. `raw` is one NIXL WRITE with a descriptor for each block, from
scattered places into a row of them; `raw_busy` with progress threads that never rest, NIXL's own
way; ratios are to the quicker of the two; `transfer_worker` the same through two transfer workers,
from the message to its `Done`; `paced` the same with windows (`pace=on`); `node` from PushExpect at
one real node to its PushEnd, blocks sealed on the other: grants, words, copies out of the landing
slab and checksums of every block included. UCX over tcp in all, as between machines.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.raw_nixl import RawNixl
from kvstore.ports import Pieces
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.transport.pieces import make_pieces
from kvstore.wire.messages import PushClose, PushOpen
from kvstore.wire.transfer_worker import Done
from tests.kit.peers import PeerPair
from tests.kit.transport_parties import TransferWorkerParty

SIZE_BYTES = 64 << 20
ARENA_BYTES = 256 << 20
BLOCKS = {"2MiB": 2 << 20, "64KiB": 64 << 10}
GOALS = {"2MiB": 0.9, "64KiB": 0.8}
"""Speed over raw NIXL."""
SEED = 1
UCX = {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "FATAL"}


class TransferWorkers:
    """Two transfer workers; the first writes into the second's landing memory."""

    def __init__(self, stack: ExitStack, *, paced: bool = False) -> None:
        self._parties = []
        for name in ("a", "b"):
            party = TransferWorkerParty(
                name,
                "nixl",
                environment=UCX,
                arena_bytes=ARENA_BYTES,
                has_landing=True,
                landing=(ARENA_BYTES - SIZE_BYTES, SIZE_BYTES),
                paced=paced,
            )
            stack.callback(party.close)
            party.arena[:] = 1
            self._parties.append(party)
        a, b = self._parties
        a.connect("b", b.descriptor())

    def write_ns(self, pieces: Pieces) -> int:
        begin = time.perf_counter_ns()
        self._parties[0].write(1, "b", pieces)
        assert self._parties[0].ends(1) == {1: Done}
        return time.perf_counter_ns() - begin


class Nodes:
    """Two nodes with an engine each."""

    def __init__(self, stack: ExitStack, folder: Path, block_bytes: int) -> None:
        flags = ("--landing", str(2 * SIZE_BYTES), "--slab", "16MiB")
        pair = stack.enter_context(
            PeerPair.start(folder, transport="nixl", dram="512MiB", flags=flags)
        )
        model = f"blocks of {block_bytes}"
        self._prefill, self._decode = (
            stack.enter_context(RawEngine(node.socket, model=model, block_bytes=block_bytes))
            for node in (pair.b, pair.a)
        )
        for engine in (self._prefill, self._decode):
            engine.timeout_s = 120
            engine.open()
        self._count = SIZE_BYTES // block_bytes
        self._number = 0

    def push_ns(self) -> int:
        """Raises AssertionError: not all came."""
        self._number += 1
        name = f"push-{self._number}"
        keys = make_keys(self._count, seed=name)
        assert self._prefill.scheduler.send(PushOpen(name))
        self._prefill.store(keys)
        self._prefill.lease_stored(keys[-1:])
        begin = time.perf_counter_ns()
        self._decode.expect(name, "b", keys)
        end = self._decode.push_end()
        took_ns = time.perf_counter_ns() - begin
        assert (end.blocks, end.reason) == (self._count, ""), end
        assert self._prefill.scheduler.send(PushClose(name))
        return took_ns


def scattered(block_bytes: int) -> Pieces:
    """Blocks from anywhere in the arena, into a row at its end."""
    count = SIZE_BYTES // block_bytes
    places = np.arange(0, ARENA_BYTES - SIZE_BYTES, block_bytes)
    local = np.random.default_rng(SEED).choice(places, count, replace=False)
    remote = ARENA_BYTES - SIZE_BYTES + np.arange(count) * block_bytes
    return make_pieces(local, remote, np.full(count, block_bytes))


def until_members(nodes: Nodes) -> None:
    """Nodes that have just started do not know each other."""
    for _ in range(60):
        try:
            nodes.push_ns()
        except AssertionError:
            threading.Event().wait(0.5)
        else:
            return
    raise TimeoutError("the nodes never knew each other")


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each way in each round, by the size of blocks."""
    os.environ.update(UCX)
    found: dict[str, dict[str, list[float]]] = {}
    for label, block_bytes in BLOCKS.items():
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            raw, transfer_workers = (
                RawNixl(stack, ARENA_BYTES, UCX, rests=True),
                TransferWorkers(stack),
            )
            busy = RawNixl(stack, ARENA_BYTES, UCX, rests=False)
            paced = TransferWorkers(stack, paced=True)
            nodes, pieces = Nodes(stack, folder, block_bytes), scattered(block_bytes)
            until_members(nodes)
            ways: dict[str, Callable[[], int]] = {
                "raw": lambda: raw.read_ns([pieces], kind="WRITE"),  # noqa: B023
                "raw_busy": lambda: busy.read_ns([pieces], kind="WRITE"),  # noqa: B023
                "transfer_worker": lambda: transfer_workers.write_ns(pieces),  # noqa: B023
                "paced": lambda: paced.write_ns(pieces),  # noqa: B023
                "node": nodes.push_ns,
            }
            times: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(rounds + 1):
                for name, once in ways.items():
                    took_ns = once()
                    print(f"{label} {name} {took_ns / 1e9:.3f} s", flush=True)
                    if number:  # the first warms connections, windows and pages
                        times[name].append(took_ns / 1e9)
        found[label] = times
    return found


def quicker(times: dict[str, list[float]]) -> list[float]:
    """Seconds of NIXL by itself: with progress threads that rest, or never do."""
    return min(times["raw"], times["raw_busy"], key=np.median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="push_speed")
    arguments = parser.parse_args()
    result: dict[str, object] = {"what": "pushes of 64 MiB between two processes, seconds"}
    for label, times in measure(arguments.rounds).items():
        medians = {name: float(np.median(values)) for name, values in times.items()}
        raw_s = float(np.median(quicker(times)))
        result[label] = {
            "seconds": {name: record.summary(values) for name, values in times.items()},
            "gib_per_s": {n: round(SIZE_BYTES / 2**30 / took, 3) for n, took in medians.items()},
            "speed_over_raw": {n: round(raw_s / took, 3) for n, took in medians.items()},
        }
    result["goal"] = GOALS
    print(record.write(arguments.out, result, seed=SEED))
    print({label: result[label]["speed_over_raw"] for label in BLOCKS})  # type: ignore[index]


if __name__ == "__main__":
    main()

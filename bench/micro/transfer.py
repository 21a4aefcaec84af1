"""Reads of 256 MiB between two processes: NIXL by itself, and through transfer workers, by back
end.

    python bench/micro/transfer.py [--rounds 7] [--out transfer]

Every round does each once, so that what else the machine does falls on all; ratios are of medians.
`raw` is one NIXL READ of one descriptor; `nixl` the same bytes through two transfer worker
children, from the message to its `Done`, paced or not, or as 64 KiB blocks that lie scattered. UCX
over tcp in both, as between machines.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.raw_nixl import RawNixl
from kvstore.ports import Pieces
from kvstore.testing.process import Lab
from kvstore.transport.pieces import make_pieces
from kvstore.wire.transfer_worker import Done
from tests.kit.processes import transport_options
from tests.kit.transport_parties import TransferWorkerParty

SIZE_BYTES = 256 << 20
BLOCK_BYTES = 64 << 10
SEED = 1
UCX = {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "FATAL"}


class Pair:
    """Two transfer workers of one back end."""

    def __init__(
        self, stack: ExitStack, backend: str, *, tls: Lab | None = None, paced: bool = False
    ) -> None:
        self._parties = []
        for name in ("a", "b"):
            insecure = {"insecure": "yes"} if backend == "tcp" else {}
            party = TransferWorkerParty(
                name,
                backend,
                options=transport_options(tls, name) if tls else insecure,
                environment=UCX,
                arena_bytes=SIZE_BYTES,
                paced=paced,
            )
            stack.callback(party.close)
            party.arena[:] = np.random.default_rng(SEED).integers(0, 256, SIZE_BYTES, np.uint8)
            self._parties.append(party)
        a, b = self._parties
        a.connect("b", b.descriptor())

    def read_ns(self, pieces: Pieces) -> int:
        begin = time.perf_counter_ns()
        self._parties[0].read(1, "b", pieces)
        assert self._parties[0].ends(1) == {1: Done}
        return time.perf_counter_ns() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="transfer")
    arguments = parser.parse_args()
    whole = make_pieces([0], [0], [SIZE_BYTES])
    at = np.arange(0, SIZE_BYTES, BLOCK_BYTES, dtype=np.uint64)
    order = np.random.default_rng(SEED).permutation(at)
    blocks = make_pieces(order, at, np.full(len(at), BLOCK_BYTES))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        raw, nixl = RawNixl(stack, SIZE_BYTES, UCX, rests=True), Pair(stack, "nixl", paced=True)
        unpaced = Pair(stack, "nixl")
        tcp = Pair(stack, "tcp", tls=Lab(Path(folder)))
        plain = Pair(stack, "tcp")
        ways: dict[str, Callable[[], int]] = {
            "raw": lambda: raw.read_ns([whole]),
            "nixl": lambda: nixl.read_ns(whole),
            "nixl_unpaced": lambda: unpaced.read_ns(whole),
            "nixl_blocks": lambda: nixl.read_ns(blocks),
            "tcp_tls": lambda: tcp.read_ns(whole),
            "tcp_insecure": lambda: plain.read_ns(whole),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.rounds + 1):
            for name, once in ways.items():
                took_ns = once()
                print(f"{name} {took_ns / 1e9:.2f} s", flush=True)
                if number:  # the first warms connections, windows and pages
                    times[name].append(took_ns / 1e9)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    result = {
        "what": "reads of 256 MiB between two processes, seconds",
        "seconds": {name: record.summary(values) for name, values in times.items()},
        "gib_per_s": {name: round(SIZE_BYTES / 2**30 / took, 3) for name, took in medians.items()},
        "speed_over_raw": {name: round(medians["raw"] / took, 3) for name, took in medians.items()},
        "paced_over_unpaced_time": round(medians["nixl"] / medians["nixl_unpaced"], 3),
        "goal": {"nixl_over_raw": 0.9, "paced_over_unpaced_time": 1.02},
    }
    print(record.write(arguments.out, result, seed=SEED))
    print(result["gib_per_s"], result["speed_over_raw"], result["paced_over_unpaced_time"])


if __name__ == "__main__":
    main()

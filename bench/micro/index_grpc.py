"""The index over gRPC with mTLS: keys told a second, a snapshot of a million blocks, Match.

    python bench/micro/index_grpc.py

Three processes on one machine: this one (feeding as a node does, and asking), and `kvstore index`.
A fresh replica for each; writes bench/results/index_grpc.json.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.record import write
from kvstore.client.index import IndexClient
from kvstore.client.tls import load
from kvstore.engine.events import Offered
from kvstore.index.feed import Trust
from kvstore.serve.aio import LoopThread
from kvstore.serve.feed import Feeder, Slice
from kvstore.testing.index_process import IndexProcess, Lab
from kvstore.types import KEY_BYTES, Incarnation, SpaceId, Tier

SPACE: Final = SpaceId(bytes(32))
SNAPSHOT_BLOCKS: Final = 1_000_000
SLICE_BLOCKS: Final = 16_384
TOLD_KEYS: Final = 1_000_000
KEYS_PER_CHANGE: Final = (1, 16, 256)
MATCH_KEYS: Final = (32, 512, 4096)
MATCH_COUNT: Final = 1000
PATIENCE_S: Final = 60.0


def make_keys(count: int) -> bytes:
    """Distinct at random."""
    return np.random.default_rng(1).bytes(count * KEY_BYTES)


def offer(keys: bytes, *, stored: bool = True) -> Offered:
    return Offered(Tier.DRAM, stored, "t", SPACE, keys)


class Node:
    """A feed without an engine behind it."""

    def __init__(self, lab: Lab, address: str, held: bytes) -> None:
        self.held = held
        self.loop = LoopThread("bench")
        self.feeder = Feeder(
            self.loop,
            node="n1",
            incarnation=Incarnation(1),
            address="",
            replicas=[address],
            credentials=load(lab.files("node", "n1")).channel_credentials(),
        )

    def ask(self, row: int) -> Slice:
        end = row + SLICE_BLOCKS
        keys = self.held[row * KEY_BYTES : end * KEY_BYTES]
        return [offer(keys)] if keys else [], end if end * KEY_BYTES < len(self.held) else -1

    def close(self) -> None:
        self.feeder.close()
        self.loop.close()


def wait_for(client: IndexClient, keys: bytes, *, is_there: bool = True) -> None:
    """Until the last of these keys has arrived, or is gone."""
    pause, deadline_s = threading.Event(), time.monotonic() + PATIENCE_S
    while True:
        answer = client.match("t", SPACE, keys[-KEY_BYTES:], timeout_s=PATIENCE_S)
        if bool(answer.matches) is is_there and client.nodes().nodes:
            return
        assert time.monotonic() < deadline_s, "it does not arrive"
        pause.wait(0.002)


def told(lab: Lab, directory: Path, flags: tuple[str, ...], keys_per_change: int) -> float:
    """Keys a second, as fast as the feed takes them without a gap."""
    keys = make_keys(TOLD_KEYS if keys_per_change > 1 else TOLD_KEYS // 4)
    step = keys_per_change * KEY_BYTES
    changes = [offer(keys[at : at + step]) for at in range(0, len(keys), step)]
    with started(lab, directory, flags) as index, client_of(lab, index) as client:
        node = Node(lab, index.address, b"")
        node.feeder.start(node.ask)
        wait_connected(node)
        begin_s = time.perf_counter()
        for change in changes:
            while node.feeder.waiting_keys > 1 << 16:  # a node does not store faster than this
                threading.Event().wait(0.0005)
            node.feeder.put(change)
        wait_for(client, keys)
        wall_s = time.perf_counter() - begin_s
        assert node.feeder.counters.keys_lost == 0
        node.close()
    return len(keys) // KEY_BYTES / wall_s


def started(lab: Lab, directory: Path, flags: tuple[str, ...]) -> IndexProcess:
    return IndexProcess.start(directory, (*lab.flags("index", "i1"), *flags), ready_timeout_s=120)


def client_of(lab: Lab, index: IndexProcess) -> IndexClient:
    return IndexClient([index.address], tls=lab.files("client", "c1"), timeout_s=10)


def wait_connected(node: Node) -> None:
    while not node.feeder.connected_count:
        threading.Event().wait(0.005)


def snapshot_and_match(lab: Lab, directory: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    """Seconds until a million blocks are told to a replica that knows nothing; then questions."""
    keys = make_keys(SNAPSHOT_BLOCKS)
    with started(lab, directory, flags) as index, client_of(lab, index) as client:
        node = Node(lab, index.address, keys)
        node.feeder.lose()  # so that there is something to ask for
        begin_s = time.perf_counter()
        node.feeder.start(node.ask)
        wait_for(client, keys)
        while client.nodes().nodes[0].trust is not Trust.EXACT:
            threading.Event().wait(0.002)
        snapshot_s = time.perf_counter() - begin_s
        found: dict[str, Any] = {"snapshot_1m_s": round(snapshot_s, 3), "match_ms": {}}
        for count in MATCH_KEYS:
            prompt, took = keys[: count * KEY_BYTES], []
            for _ in range(MATCH_COUNT):
                start_s = time.perf_counter()
                answer = client.match("t", SPACE, prompt)
                took.append((time.perf_counter() - start_s) * 1e3)
                assert answer.matches[0].dram_blocks == count
            cuts = statistics.quantiles(took, n=100)
            found["match_ms"][str(count)] = {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3)}
        node.close()
    return found


def main() -> None:
    """Run and record."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        lab = Lab(directory / "pki")
        for name, flags in (("plain", ()), ("compiled", ("--compiled",))):
            results[name] = {
                "keys_per_s": {
                    str(n): round(told(lab, directory, flags, n)) for n in KEYS_PER_CHANGE
                },
                **snapshot_and_match(lab, directory, flags),
            }
            print(name, results[name])
    print(write("index_grpc", results, seed=1))


if __name__ == "__main__":
    main()

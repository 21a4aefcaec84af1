"""The index over gRPC with mTLS: keys told a second, a snapshot of a million blocks, Match.

    python bench/micro/index_grpc.py

Three processes on one machine: this one (feeding as a node does, and asking), and `kvstore index`.
Once with the index compiled, once as it stands. Writes bench/results/index_grpc.json.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench.record import write
from kvstore.client.certificates import load
from kvstore.client.index import IndexClient, channel
from kvstore.engine.events import OffersUntold
from kvstore.index.feed import Trust
from kvstore.net.aio import LoopThread
from kvstore.peers.feed import Feeder, Slice
from kvstore.testing.process import Lab
from kvstore.types import KEY_BYTES, Incarnation, SpaceId, Tier
from kvstore.wire.feed import Hello, Stored
from tests.kit.processes import IndexProcess

SPACE: Final = SpaceId(bytes(32))
SNAPSHOT_BLOCKS: Final = 1_000_000
SLICE_BLOCKS: Final = 16_384
TOLD_KEYS: Final = 1_000_000
KEYS_PER_CHANGE: Final = (1, 16, 256)
MATCH_KEYS: Final = (32, 512, 4096)
MATCH_COUNT: Final = 1000
PATIENCE_S: Final = 90.0
QUEUED_KEYS: Final = 1 << 16
SEED: Final = 1
GOALS: Final = {"keys_per_s": 200_000, "snapshot_1m_s": 2.0, "match_512_p50_ms": 0.6}


def make_keys(count: int, *, seed: int) -> bytes:
    """Distinct at random."""
    return np.random.default_rng((SEED, seed)).bytes(count * KEY_BYTES)


def offer(keys: bytes) -> Stored:
    return Stored("t", SPACE, Tier.DRAM, keys)


class Node:
    """A feed without an engine behind it."""

    def __init__(
        self, lab: Lab, address: str, name: str, held: bytes, *, incarnation: int = 1
    ) -> None:
        self.held, self.incarnation = held, incarnation
        self.loop = LoopThread("bench")
        self.feeder = Feeder(
            self.loop,
            Hello(name, Incarnation(incarnation), 0, 0),
            [address],
            load(lab.files("node", name)).channel_credentials(),
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


def told(lab: Lab, index: IndexProcess, client: IndexClient, keys_per_change: int) -> float:
    """Keys a second, as fast as the feed takes them without a gap."""
    keys = make_keys(TOLD_KEYS if keys_per_change > 1 else TOLD_KEYS // 4, seed=keys_per_change)
    step = keys_per_change * KEY_BYTES
    changes = [offer(keys[at : at + step]) for at in range(0, len(keys), step)]
    pause = threading.Event()
    with contextlib.closing(Node(lab, index.address, f"n{keys_per_change}", b"")) as node:
        node.feeder.start(node.ask)
        while not node.feeder.connected_count:
            pause.wait(0.005)
        begin_s = time.perf_counter()
        for change in changes:
            # No node stores faster than it is told.
            while max(link.changes.waiting_keys for link in node.feeder.links) > QUEUED_KEYS:
                pause.wait(0.0005)
            node.feeder.log.append(change)
        wait_for(client, keys)
        wall_s = time.perf_counter() - begin_s
        assert node.feeder.counters.keys_lost == 0
    return len(keys) // KEY_BYTES / wall_s


def snapshot(client: IndexClient, node: Node) -> float:
    """Seconds from a node's first dialling until its million blocks are known and believed."""
    node.feeder.log.append(OffersUntold())  # so that there is something to ask for
    begin_s = time.perf_counter()
    node.feeder.start(node.ask)
    pause, deadline_s = threading.Event(), time.monotonic() + PATIENCE_S
    while not any(  # its former life's blocks may still be known, and are dropped when it dials
        m.node == "full" and m.incarnation == node.incarnation and m.trust is Trust.EXACT
        for m in client.nodes().nodes
    ):
        assert time.monotonic() < deadline_s, "it is not believed"
        pause.wait(0.002)
    wait_for(client, node.held)
    return time.perf_counter() - begin_s


def asked(client: IndexClient, prompt: bytes) -> dict[str, float]:
    """Milliseconds of Match, one call after the other."""

    def ask() -> None:
        answer = client.match("t", SPACE, prompt)
        assert answer.matches[0].dram_blocks == len(prompt) // KEY_BYTES

    return timed_ms(ask)


def timed_ms(call: Callable[[], object]) -> dict[str, float]:
    """Of one call after the other."""
    took = []
    for _ in range(MATCH_COUNT):
        begin_s = time.perf_counter()
        call()
        took.append((time.perf_counter() - begin_s) * 1e3)
    cuts = statistics.quantiles(took, n=100)
    return {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3)}


def measure(lab: Lab, directory: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    """All numbers of one kind of replica."""
    tls = lab.flags("index", "i1")
    keys = make_keys(SNAPSHOT_BLOCKS, seed=0)
    with (
        IndexProcess.start(directory, (*tls, *flags), timeout_s=PATIENCE_S) as index,
        IndexClient([index.address], tls=lab.files("client", "c1"), timeout_s=10) as client,
    ):
        with contextlib.closing(Node(lab, index.address, "full", keys)) as node:
            found: dict[str, Any] = {"snapshot_1m_s": round(snapshot(client, node), 3)}
        found["keys_per_s"] = {str(n): round(told(lab, index, client, n)) for n in KEYS_PER_CHANGE}
        with contextlib.closing(Node(lab, index.address, "full", keys, incarnation=2)) as node:
            snapshot(client, node)
            with channel(
                index.address, load(lab.files("client", "c1")).channel_credentials()
            ) as to:
                health = HealthStub(to)  # what a call costs that does nothing
                health.Check(HealthCheckRequest(), timeout=PATIENCE_S)
                found["empty_call_ms"] = timed_ms(lambda: health.Check(HealthCheckRequest()))
            found["match_ms"] = {
                str(count): asked(client, keys[: count * KEY_BYTES]) for count in MATCH_KEYS
            }
    return found


def main() -> None:
    """Run and record."""
    results: dict[str, Any] = {"goals": GOALS}
    with tempfile.TemporaryDirectory() as made:
        lab = Lab(Path(made) / "pki")
        for name, flags in (("compiled", ("--compiled",)), ("plain", ())):
            results[name] = measure(lab, Path(made), flags)
            print(name, results[name], flush=True)
            print(write("index_grpc", results, seed=SEED))


if __name__ == "__main__":
    main()

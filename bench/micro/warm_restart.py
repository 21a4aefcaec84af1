"""How soon after the death of the node process a block in memory is served again.

    python bench/micro/warm_restart.py [--blocks 1000000]

A node with so many blocks of 64 KiB in dram (`bench/sparse_node.py`: the bytes of most of them were
never written), and an engine attached. The node process is killed with SIGKILL; from there until an
engine is attached to the next one and has read 32 blocks, byte for byte. That engine connects at
once: the real one waits 50 ms first.

Three ways: with a standby, as a node has one two seconds after it began to serve; without, when
all the code has to be loaded first; and by `kvstore upgrade`, from the end of the old process to
the new one's word that it serves. Each five times; also what the processes take of memory.

Writes bench/results/warm_restart.json. Exit code 1 when the median with a standby is too long.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.peers.memory import memory_of
from kvstore.client.link import Link
from kvstore.supervisor.sockets import ask_for_upgrade
from kvstore.testing.process import NodeProcess, children_of
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.types import KEY_BYTES
from kvstore.units import MIB

SEED = 1
ROUNDS = 5
KEYS = 32
GOAL_S = 1.0
NONCE = "bench"
"""One engine that attaches again and again: what it was granted comes back with it."""
SPARSE_NODE = Path(__file__).resolve().parents[1] / "sparse_node.py"


class Hollow(RawEngine):
    """Stores blocks without their bytes."""

    def _fill(self, link: Link, column: int, keys: Sequence[bytes], slots: object) -> bytes:
        return b"".join(key[:16] for key in keys)


def fill(node: NodeProcess, count: int) -> list[bytes]:
    """So many blocks, of which the last ones are real; returns the keys of those."""
    data = np.random.default_rng(SEED).bytes(KEY_BYTES * count)
    with Hollow(node.socket, nonce=NONCE, timeout_s=60) as engine:
        engine.open()
        engine.store([data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)])
    real = make_keys(KEYS)
    with RawEngine(node.socket, nonce=NONCE) as engine:
        engine.open()
        engine.store(real)
        engine.lease_stored(real)
    return real


def wait_for_children(node: NodeProcess, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(children_of(node.process.pid)) != count:
        assert time.monotonic() < deadline, children_of(node.process.pid)
        threading.Event().wait(0.02)
    threading.Event().wait(1.5)  # the standby has loaded its code


def first_hit_s(node: NodeProcess, keys: list[bytes], *, standby: bool) -> float:
    """From SIGKILL to the bytes."""
    wait_for_children(node, 2)
    _, waiting = children_of(node.process.pid)
    if not standby:
        os.kill(waiting, signal.SIGKILL)
    begin = time.perf_counter()
    node.crash()
    with RawEngine(node.socket, nonce=NONCE, timeout_s=60) as engine:
        engine.open()
        found = engine.read(engine.lease(keys))
        took_s = time.perf_counter() - begin
        assert found == [engine.contents(key) for key in keys]
    return took_s


def away_s(told: str) -> float:
    found = re.search(r"unreachable for ([0-9.]+) s", told)
    assert found is not None, told
    return float(found[1])


def summary(times: list[float]) -> dict[str, object]:
    return {"p50_s": round(statistics.median(times), 4), "rounds_s": [round(t, 4) for t in times]}


def measure(folder: Path, count: int) -> dict[str, object]:
    dram = f"{int(count * 1.06) * 64}KiB"
    with NodeProcess.start(folder, dram=dram, program=[str(SPARSE_NODE)]) as node:
        keys = fill(node, count)
        wait_for_children(node, 2)
        process, standby = children_of(node.process.pid)
        memory = {
            name: round(memory_of(pid, shared=()).private / MIB, 1)
            for name, pid in (("process", process), ("standby", standby))
        }
        memory["all"] = round(memory_of(node.process.pid, shared=()).private / MIB, 1)
        with_standby = [first_hit_s(node, keys, standby=True) for _ in range(ROUNDS)]
        without = [first_hit_s(node, keys, standby=False) for _ in range(ROUNDS)]
        told = [ask_for_upgrade(node.socket) for _ in range(ROUNDS)]
        upgrades = [away_s(text) for text in told]
        kept = re.findall(r"(\d+) blocks \(.*\) were kept", node.log + "".join(told))
        assert len(kept) >= 3 * ROUNDS, node.log
        assert min(map(int, kept)) >= count, kept
    return {
        "blocks": count,
        "first_hit_after_kill": summary(with_standby),
        "first_hit_after_kill_without_standby": summary(without),
        "away_in_upgrade": summary(upgrades),
        "private_mib": memory,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.blocks)
    hit = result["first_hit_after_kill"]
    assert isinstance(hit, dict)
    met = hit["p50_s"] <= GOAL_S
    result |= {"goal_s": GOAL_S, "goal_met": met}
    print(record.write("warm_restart", result, seed=SEED).read_text())
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

"""One client of the index asks all it can; what another one waits, and the index's memory.

    python bench/micro/index_crowd.py

An index of 1 million blocks with mTLS, plain and compiled. A crowd, all of one certificate, keeps
128 calls of 16,384 keys open, each on a connection of its own, or 1,024 on 16 connections; another
certificate asks for 32 keys, one after the other.
Writes bench/results/index_crowd.json.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench.micro.index_grpc import SEED, Node, make_keys, snapshot
from bench.record import write
from kvstore.client.index import IndexClient
from kvstore.testing.process import Lab
from kvstore.types import KEY_BYTES, SpaceId
from tests.kit.processes import IndexProcess

SPACE: Final = SpaceId(bytes(32))
BLOCKS: Final = 1_000_000
CROWDS: Final = {"128_connections": (128, 1), "16_connections": (16, 64)}
"""Connections, and calls of each."""
SMALL_KEYS: Final = 32
QUESTIONS: Final = 300
CROWD: Final = """
import sys, threading
import numpy as np
from pathlib import Path
from kvstore.client.index import channel
from kvstore.client.certificates import load
from kvstore.client.tls import TlsFiles
from kvstore.proto import index_pb2 as pb
from kvstore.wire.feed import KEYS_MAX
from kvstore.proto.index_pb2_grpc import IndexStub
address, ca, cert, key, connections, calls = sys.argv[1:]
files = TlsFiles(ca=Path(ca), cert=Path(cert), key=Path(key))
credentials = load(files).channel_credentials()
asked = pb.MatchRequest(
    tenant="t", space=bytes(32), keys=np.random.default_rng(2).bytes(KEYS_MAX * 32)
)
def ask():
    stub, may_ask = IndexStub(channel(address, credentials)), threading.Semaphore(int(calls))
    while True:
        may_ask.acquire()
        stub.Match.future(asked, timeout=30).add_done_callback(lambda _: may_ask.release())
for _ in range(int(connections)):
    threading.Thread(target=ask, daemon=True).start()
print(flush=True)
threading.Event().wait()
"""
"""Of calls that are refused the next one follows at once."""


def measure(lab: Lab, directory: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    """Milliseconds that small questions take, without the crowd and beside it."""
    keys = make_keys(BLOCKS, seed=0)
    with (
        IndexProcess.start(directory, (*lab.flags("index", "i1"), *flags)) as index,
        IndexClient([index.address], tls=lab.files("client", "quiet"), timeout_s=60) as client,
        contextlib.closing(Node(lab, index.address, "full", keys)) as node,
    ):
        snapshot(client, node)
        memory = psutil.Process(index.process.pid)
        found: dict[str, Any] = {"quiet": times_ms(client, keys)}
        before = memory.memory_info().rss
        files = lab.files("client", "crowd")
        for name, crowd_of in CROWDS.items():
            words = [index.address, *map(str, (files.ca, files.cert, files.key, *crowd_of))]
            command = [sys.executable, "-c", CROWD, *words]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as crowd:
                assert crowd.stdout is not None
                crowd.stdout.readline()
                threading.Event().wait(3)  # until all of it is under way
                found[f"beside_{name}"] = times_ms(client, keys)
                after = memory.memory_info().rss
                crowd.kill()
    found["memory_mib"] = [round(each / 2**20) for each in (before, after)]
    return found


def times_ms(client: IndexClient, held: bytes) -> dict[str, float]:
    """Of small questions, one after the other."""
    found = []
    for number in range(QUESTIONS):
        keys = held[number * KEY_BYTES : (number + SMALL_KEYS) * KEY_BYTES]
        begin_s = time.perf_counter()
        answer = client.match("t", SPACE, keys)
        assert answer.matches[0].dram_blocks == SMALL_KEYS
        found.append((time.perf_counter() - begin_s) * 1000)
    p50, p99 = np.percentile(found, [50, 99]).tolist()
    return {"p50_ms": round(p50, 1), "p99_ms": round(p99, 1), "max_ms": round(max(found), 1)}


def main() -> None:
    """Run and record."""
    results: dict[str, Any] = {"crowds": CROWDS, "keys_of_a_call": 16_384}
    with tempfile.TemporaryDirectory() as made:
        lab = Lab(Path(made) / "pki")
        for name, flags in (("compiled", ("--compiled",)), ("plain", ())):
            results[name] = measure(lab, Path(made), flags)
            print(name, results[name], flush=True)
    write("index_crowd", results, seed=SEED)


if __name__ == "__main__":
    main()

"""The loop's place among threads: what it is worth beside spinning ranks, and what a flood takes.

Twice, with CAP_SYS_NICE and without: lookups of 512 keys while as many processes spin as there are
cores, then what is left to a process that counts while an engine floods the node with hints. Who
asks has a real-time place in both, so that only the node's is measured.
Writes bench/results/loop_place.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.micro.attach_roundtrip import measure_lookups, summary
from kvstore.node.turns import ThreadPriority
from kvstore.testing.process import NodeProcess, popen_tied
from kvstore.testing.raw_engine import RawEngine, make_keys

RESULT = Path(__file__).parents[1] / "results" / "loop_place.json"
WITHOUT = ("setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice", sys.executable)
"""Python without CAP_SYS_NICE."""
COUNT = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
count = 0
while time.monotonic() < end:
    count += 1
print(count)
"""
FLOOD = """
import sys
from pathlib import Path
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.wire.messages import Hint
keys = b"".join(make_keys(2048))
with RawEngine(Path(sys.argv[1])) as engine:
    engine.open()
    print(flush=True)
    while True:
        engine.scheduler.send(Hint(request=1, keys=keys))
        engine.scheduler.receive()
"""


@contextlib.contextmanager
def running(*commands: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """These, until the context ends."""
    started = [popen_tied(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def counted(duration_s: float) -> int:
    """How far a process counts in that time."""
    with running([sys.executable, "-c", COUNT, str(duration_s)]) as (process,):
        assert process.stdout is not None
        return int(process.stdout.readline())


def measure(node: NodeProcess, *, count: int, seconds: float) -> dict[str, object]:
    """Of one node."""
    cores = os.cpu_count() or 1
    keys = make_keys(512)
    result: dict[str, object] = {"place": os.sched_getscheduler(node.pid)}
    with RawEngine(node.socket) as engine:
        engine.open()
        engine.store(keys)
        engine.release(engine.lease_stored(keys))
        joined = b"".join(keys)
        result["quiet"] = summary(measure_lookups(engine, joined, count=count, spin=False))
        spinner = [sys.executable, "-c", COUNT, "1e9"]
        with running(*[spinner] * cores):
            found = measure_lookups(engine, joined, count=count, spin=False)
        result["beside_spinning"] = summary(found)
    with running([sys.executable, "-c", FLOOD, str(node.socket)]) as (flood,):
        assert flood.stdout is not None
        flood.stdout.readline()
        threading.Event().wait(2)  # until the node has seen what comes
        result["counted_beside_flood"] = counted(seconds)
        result["place_in_flood"] = os.sched_getscheduler(node.pid)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000, help="lookups of each kind")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each flood")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    alone = counted(options.seconds)
    ThreadPriority(time.monotonic_ns())
    result: dict[str, object] = {
        "bench": "loop_place",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "counted_alone": alone,
    }
    for name, python in (("real_time", (sys.executable,)), ("ordinary", WITHOUT)):
        with (
            tempfile.TemporaryDirectory() as directory,
            NodeProcess.start(
                Path(directory),
                dram="256MiB",
                python=python[0],
                program=(*python[1:], "-m", "kvstore.cli.main"),
            ) as node,
        ):
            result[name] = measure(node, count=options.count, seconds=options.seconds)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

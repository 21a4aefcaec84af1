"""Round trip of a lookup on the attach socket: LeaseAsk of 512 present keys to LeaseReply.

A real node process; the engine's side is `kvstore.client.link`, once spinning on `receive` (what
the socket and the node cost) and once sleeping in select (what a scheduler that waits pays);
`empty` is a message without keys: socket and loop alone.
Writes bench/results/attach_roundtrip.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import statistics
import tempfile
import time
from pathlib import Path
from typing import TypeVar

from kvstore.client.link import Link
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine, make_keys
from kvstore.wire.messages import Hint, HintReply, LeaseAsk, LeaseRelease, LeaseReply

RESULT = Path(__file__).parents[1] / "results" / "attach_roundtrip.json"
GOAL_P50_US = 60.0
WARM_UP_COUNT = 500

_M = TypeVar("_M", HintReply, LeaseReply)


def receive(link: Link, kind: type[_M], *, spin: bool) -> _M:
    """The next message of that kind."""
    while True:
        if not spin:
            select.select([link], [], [], 1)
        for message in link.receive():
            if isinstance(message, kind):
                return message


def settle(link: Link, number: int) -> None:
    """Wait until the node has dealt with all that was sent before."""
    assert link.send(Hint(request=number, keys=b""))
    receive(link, HintReply, spin=True)


def measure_lookups(engine: RawEngine, keys: bytes, *, count: int, spin: bool) -> list[int]:
    """Nanoseconds of each of `count` lookups, sorted. Giving the lease back is not timed."""
    link = engine.scheduler
    durations = []
    for number in range(10**6, 10**6 + WARM_UP_COUNT + count):
        settle(link, number)
        begin_ns = time.perf_counter_ns()
        assert link.send(LeaseAsk(lease=number, keys=keys))
        reply = receive(link, LeaseReply, spin=spin)
        durations.append(time.perf_counter_ns() - begin_ns)
        assert len(reply.slots) * 8 == len(keys), "every key was leased"
        assert link.send(LeaseRelease(leases=[number]))
    return sorted(durations[WARM_UP_COUNT:])


def measure_empty(engine: RawEngine, *, count: int) -> list[int]:
    """Nanoseconds of each of `count` hints without keys, sorted: socket and loop alone."""
    durations = []
    for number in range(count):
        begin_ns = time.perf_counter_ns()
        settle(engine.scheduler, number)
        durations.append(time.perf_counter_ns() - begin_ns)
    return sorted(durations)


def summary(durations: list[int]) -> dict[str, float]:
    """p50, p99 and maximum in microseconds."""
    cuts = statistics.quantiles(durations, n=100)
    return {
        "p50_us": round(cuts[49] / 1000, 1),
        "p99_us": round(cuts[98] / 1000, 1),
        "max_us": round(durations[-1] / 1000, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="round trips of each kind")
    parser.add_argument("--keys", type=int, default=512, help="keys in each lookup")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    keys = make_keys(options.keys)
    result: dict[str, object] = {
        "bench": "attach_roundtrip",
        "keys": options.keys,
        "round_trips": options.count,
        "goal_p50_us": GOAL_P50_US,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
    }
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        node = stack.enter_context(NodeProcess.start(Path(directory), dram="256MiB"))
        engine = stack.enter_context(RawEngine(node.socket))
        engine.open()
        engine.store(keys)
        engine.release(engine.lease_stored(keys))
        result["empty"] = summary(measure_empty(engine, count=options.count))
        for spin in (True, False):
            durations = measure_lookups(engine, b"".join(keys), count=options.count, spin=spin)
            result["spin" if spin else "select"] = summary(durations)
        result["load_average_1min"] = round(os.getloadavg()[0], 2)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

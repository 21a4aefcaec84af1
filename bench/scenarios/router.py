"""`make bench-router`: what routers add to a request, beside sglang-router and vllm-router.

latency  /v1/completions, one at a time, prompts of 200 B to 128 KB: p10 and p50 minus those of the
         same requests straight to a worker, in turns, so that the machine's moods meet all alike.
         p10 is what it costs where nobody else wants the processor
load     2 KB, CONCURRENCY at a time: requests a second, and requests per processor second of the
         router's own processes
streams  S streams of 50 events a second: delay of an event from worker to reader, p50 and p99, and
         the router's processor share; streams a core = S / share. In turns, too; the streams begin
         within 20 ms, which is where the longest delays are

Four workers that answer at once (`bench/peers/router_worker.py`), the same for all.
The other routers run with their own defaults (cache-aware), from an environment of their own.
kvstore's runs without an index, its default policy; and once more as the endpoint picker behind a
real Envoy. Latencies of that Envoy without a picker, and with one that decides nothing, are what
Envoy and gRPC take. Everything is on loopback of one machine: compare within one run.

With --before a checkout of an earlier commit is measured, too, in the same run.

Writes bench/results/router.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.testing.process import RouterProcess, popen_tied, reap, start_ready
from tests.kit.envoy import Envoy, binary

SEED: Final = 20261124
SIZES: Final = (200, 2_000, 16_000, 128_000)
CONCURRENCY: Final = 32
STREAM_COUNTS: Final = (50, 100, 200)
STREAM_S: Final = 6
WORKERS: Final = 4
READY_S: Final = 60.0
PEERS: Final = record.ROOT / ".venv-routers" / "bin"


class Target:
    """A router, or a worker itself. `pids`: whose processor time counts."""

    def __init__(self, name: str, port: int, pids: Sequence[int]) -> None:
        self.name, self.port, self.pids = name, port, pids

    def cpu_s(self) -> float:
        """Processor seconds of its processes so far."""
        total = 0.0
        for pid in self.pids:
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                times = each.cpu_times()
                total += times.user + times.system
        return total


@contextlib.contextmanager
def worker(directory: Path) -> Iterator[int]:
    process, line = start_ready(
        [str(record.ROOT / "bench" / "peers" / "router_worker.py"), "0"],
        log=directory / "worker.log",
        says="worker ready",
        timeout_s=READY_S,
    )
    try:
        yield int(line.rsplit(":", 1)[1])
    finally:
        reap(process)


@contextlib.contextmanager
def ours(directory: Path, ports: Sequence[int]) -> Iterator[Target]:
    flags = [f for n, p in enumerate(ports) for f in ("--worker", f"w{n}=http://127.0.0.1:{p}")]
    with RouterProcess.start(directory, [*flags, "--log-level", "warning"]) as router:
        port = int(router.address.rpartition(":")[2])
        yield Target("kvstore", port, [router.process.pid])


@contextlib.contextmanager
def before(tree: str, directory: Path, ports: Sequence[int]) -> Iterator[Target]:
    """The router of another checkout."""
    flags = [f for n, p in enumerate(ports) for f in ("--worker", f"w{n}=http://127.0.0.1:{p}")]
    flags += ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--log-level", "warning"]
    os.environ["PYTHONPATH"] = tree
    try:
        process, line = start_ready(
            ["-m", "kvstore.cli.main", "router", *flags],
            log=directory / "before.log",
            says="kvstore router ready:",
            timeout_s=READY_S,
        )
    finally:
        del os.environ["PYTHONPATH"]
    try:
        found = re.search(r"listen=\S+:(\d+)", line)
        assert found
        yield Target("kvstore before", int(found[1]), [process.pid])
    finally:
        reap(process)


@contextlib.contextmanager
def behind_envoy(directory: Path, ports: Sequence[int]) -> Iterator[Target]:
    flags = [f for n, p in enumerate(ports) for f in ("--worker", f"w{n}=http://127.0.0.1:{p}")]
    flags += ["--picker-listen", "127.0.0.1:0", "--log-level", "warning"]
    with RouterProcess.start(directory, flags, name="picker") as router:
        found = re.search(r"picker=(\d+)", router.ready_line)
        assert found
        with Envoy(directory, int(found[1]), _places(ports)) as envoy:
            yield Target("kvstore picker, Envoy", envoy.port, [router.process.pid])


def _places(ports: Sequence[int]) -> list[str]:
    return [f"127.0.0.1:{port}" for port in ports]


@contextlib.contextmanager
def floors(directory: Path, ports: Sequence[int]) -> Iterator[list[Target]]:
    """Envoy without a picker, and with one that decides nothing."""
    alone, empty = directory / "alone", directory / "empty"
    alone.mkdir()
    empty.mkdir()
    process, line = start_ready(
        [str(record.ROOT / "bench" / "peers" / "empty_picker.py"), _places(ports)[0]],
        log=empty / "picker.log",
        says="picker ready",
        timeout_s=READY_S,
    )
    try:
        with (
            Envoy(alone, None, _places(ports)) as envoy,
            Envoy(empty, int(line.rsplit(" ", 1)[1]), _places(ports)) as other,
        ):
            yield [
                Target("Envoy alone", envoy.port, []),
                Target("empty picker, Envoy", other.port, [process.pid]),
            ]
    finally:
        reap(process)


@contextlib.contextmanager
def peer(
    name: str, arguments: Sequence[str], directory: Path, ports: Sequence[int]
) -> Iterator[Target]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        port, metrics = server.getsockname()[1], other.getsockname()[1]
    command = [
        *(str(PEERS / arguments[0]), *arguments[1:], "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics), "--worker-urls"),
        *(f"http://127.0.0.1:{p}" for p in ports),
    ]
    with (directory / f"{name}.log").open("wb") as log:
        process = popen_tied(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=dict(os.environ)
        )
    try:
        _wait(port)
        yield Target(name, port, [process.pid])
    finally:
        process.terminate()
        reap(process)


def _wait(port: int) -> None:
    """Until it serves a request."""
    end_s = time.monotonic() + READY_S
    while True:
        try:
            asyncio.run(_latencies(port, body(200), 1))
        except (OSError, asyncio.IncompleteReadError, AssertionError):
            assert time.monotonic() < end_s, "a router is not ready"
            subprocess.run(["sleep", "0.2"], check=True)
        else:
            return


def body(size: int, *, stream: int = 0) -> bytes:
    """A request whose prompt has so many bytes."""
    fields: dict[str, Any] = {"model": "m", "prompt": "tokens " * (size // 7), "max_tokens": 1}
    if stream:
        fields |= {"stream": True, "max_tokens": stream}
    content = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head[:200]
    if b"content-length: " in head:
        await reader.readexactly(int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0]))
        return
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        await reader.readexactly(size + 2)
    await reader.readexactly(2)


async def _latencies(port: int, request: bytes, count: int) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        await _exchange(reader, writer, request)
        taken.append(time.perf_counter() - begin)
    writer.close()
    return taken


async def _load(port: int, request: bytes, seconds: float) -> int:
    """Requests answered with CONCURRENCY at a time."""
    end_s, counts = time.monotonic() + seconds, [0] * CONCURRENCY

    async def one(at: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while time.monotonic() < end_s:
            await _exchange(reader, writer, request)
            counts[at] += 1
        writer.close()

    await asyncio.gather(*map(one, range(CONCURRENCY)))
    return sum(counts)


async def _streams(port: int, count: int, seconds: int) -> list[float]:
    """Delays of all events, in ms."""
    request, delays = body(200, stream=50 * seconds), list[float]()

    async def one(at: int) -> None:
        await asyncio.sleep(at / count / 50)  # spread over one interval
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head[:200]
        assert b"chunked" in head, head  # an answer that came at once would have a length
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            chunk = await reader.readexactly(size + 2)
            now = time.monotonic_ns()
            delays.extend((now - int(at_ns)) / 1e6 for at_ns in re.findall(rb'"at": (\d+)', chunk))
        await reader.readexactly(2)
        writer.close()

    await asyncio.gather(*map(one, range(count)))
    return delays


def latency(targets: Sequence[Target], *, rounds: int, count: int) -> dict[str, Any]:
    """By size, then target: µs, and those above `direct`."""
    found: dict[str, Any] = {}
    for size in SIZES:
        request, taken = body(size), {target.name: list[float]() for target in targets}
        for number in range(rounds + 1):
            for target in targets:
                values = asyncio.run(_latencies(target.port, request, count))
                if number:  # the first round warms up
                    taken[target.name] += values
        rows = {
            name: {f"p{p}_us": 1e6 * float(np.percentile(values, p)) for p in (10, 50, 99)}
            for name, values in taken.items()
        }
        for row in rows.values():
            for part in ("p10", "p50"):
                row[f"added_{part}_us"] = row[f"{part}_us"] - rows["direct"][f"{part}_us"]
        found[str(size)] = rows
    return found


def load(targets: Sequence[Target], *, seconds: float) -> dict[str, Any]:
    """Requests a second and per processor second of the router, at 2 KB."""
    found = {}
    for target in targets:
        asyncio.run(_load(target.port, body(2000), 0.5))
        before, begin = target.cpu_s(), time.perf_counter()
        count = asyncio.run(_load(target.port, body(2000), seconds))
        spent, took = target.cpu_s() - before, time.perf_counter() - begin
        found[target.name] = {
            "requests_per_s": count / took,
            "requests_per_cpu_s": count / spent if target.pids else None,
        }
    return found


def streams(targets: Sequence[Target], *, rounds: int, seconds: int) -> dict[str, Any]:
    """By target, then number of streams."""
    found: dict[str, Any] = {target.name: {} for target in targets}
    for count in STREAM_COUNTS:
        seen = {target: list[float]() for target in targets}
        spent, took = dict.fromkeys(targets, 0.0), dict.fromkeys(targets, 0.0)
        for _ in range(rounds):
            for target in targets:
                before, begin = target.cpu_s(), time.perf_counter()
                seen[target] += asyncio.run(_streams(target.port, count, seconds))
                spent[target] += target.cpu_s() - before
                took[target] += time.perf_counter() - begin
        for target, delays in seen.items():
            share = spent[target] / took[target]
            found[target.name][str(count)] = {
                "events": len(delays),
                "delay_p50_ms": float(np.percentile(delays, 50)),
                "delay_p99_ms": float(np.percentile(delays, 99)),
                "cpu_share": share,
                "streams_per_core": count / share if target.pids else None,
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of it; the record says so")
    parser.add_argument("--before", help="a checkout of an earlier commit")
    options = parser.parse_args()
    quick = options.quick
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        ports = [stack.enter_context(worker(directory)) for _ in range(WORKERS)]
        targets = [Target("direct", ports[0], [])]
        makers: list[Callable[[], contextlib.AbstractContextManager[Target]]] = [
            lambda: ours(directory, ports)
        ]
        if options.before:
            makers.append(partial(before, options.before, directory, ports))
        makers += [
            partial(peer, arguments[0], arguments, directory, ports)
            for arguments in (("sglang-router", "launch"), ("vllm-router",))
            if (PEERS / arguments[0]).exists()
        ]
        if binary() is not None:
            makers.append(lambda: behind_envoy(directory, ports))
        targets += [stack.enter_context(make()) for make in makers]
        lowest = [] if binary() is None else stack.enter_context(floors(directory, ports))
        rounds, count = (2, 60) if quick else (6, 300)
        result = {
            "workers": WORKERS,
            "latency": latency([*targets, *lowest], rounds=rounds, count=count),
            "load": load(targets, seconds=1 if quick else 6),
            "streams": streams(
                targets[: 4 + bool(options.before)],
                rounds=1 if quick else 4,
                seconds=1 if quick else STREAM_S,
            ),
        }
    for part, rows in result.items():
        print(part, json.dumps(rows, indent=1))
    print(
        record.write(
            "router", {"is_quick": quick, "load_average": load_average, **result}, seed=SEED
        )
    )


if __name__ == "__main__":
    main()

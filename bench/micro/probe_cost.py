"""What the router's probes of engines cost: processor time of a router that serves nobody.

So many engines, each a port with the metrics page of a real vLLM (`tests/data`); the router is the
real process, with its defaults, after all engines are up. CPU seconds of its process a second, by
the kernel, in windows of WINDOW_S: the median, and all of them. Beside one engine, which is what
the router costs by itself. Writes bench/results/probe_cost.json.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.testing.process import RouterProcess

ENGINES: Final = (1, 100, 500)
WINDOW_S: Final = 5.0
WINDOWS: Final = 6
PAGE: Final = record.ROOT / "tests" / "data" / "engine_pages" / "vllm.txt"
GOAL_PERCENT: Final = 1.0
"""For 100 engines."""
PAGES: Final = """
import asyncio, resource, sys
page = open(sys.argv[2], "rb").read()
models = b'{"data": [{"id": "m"}]}'
class Engine(asyncio.Protocol):
    def connection_made(self, transport): self.transport = transport
    def data_received(self, data):
        body = models if b"/v1/models" in data else page
        head = b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
        self.transport.write(head + body)
async def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0) for _ in range(int(sys.argv[1]))]
    print(*(s.sockets[0].getsockname()[1] for s in servers), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(count: int) -> dict[str, Any]:
    """Percent of a core."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as work:
        pages = subprocess.Popen(
            [sys.executable, "-c", PAGES, str(count), str(PAGE)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert pages.stdout is not None
            ports = pages.stdout.readline().split()
            flags = [f"--worker=w{n}=http://127.0.0.1:{port}" for n, port in enumerate(ports)]
            with RouterProcess.start(Path(work), flags) as router:
                _await_up(router, count)
                found = []
                for _ in range(WINDOWS):
                    before, began_s = cpu_s(router.process.pid), time.monotonic()
                    threading.Event().wait(WINDOW_S)
                    spent_s = time.monotonic() - began_s
                    found.append(round(100 * (cpu_s(router.process.pid) - before) / spent_s, 2))
        finally:
            pages.kill()
            pages.wait()
    row = {"median_percent": statistics.median(found), "percent": found}
    print(f"{count:4} engines: {row['median_percent']:.2f} % of a core {found}", flush=True)
    return row


def _await_up(router: RouterProcess, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        with urllib.request.urlopen(router.metrics_url) as answer:
            text = answer.read().decode()
        if f'kvstore_router_workers{{state="up"}} {count}.0' in text:
            return
        threading.Event().wait(0.2)
    raise TimeoutError(f"not all engines are up: {router.log[-500:]}")


def main() -> None:
    rows = {str(count): measure(count) for count in ENGINES}
    result = {
        "engines": rows,
        "page_bytes": PAGE.stat().st_size,
        "goal_percent_for_100": GOAL_PERCENT,
    }
    print(f"written: {record.write('probe_cost', result, seed=0).name}")


if __name__ == "__main__":
    main()

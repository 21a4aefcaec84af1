"""What a node holds, seen from outside: its own counters, and its processes as the kernel has them.

Covers what must return to where it was after anybody's death (promise P3): connections, sessions,
leases, slots by state, descriptors by kind, child processes, memory. Does not cover: what it ought
to be (`tests.kit.kills`).
"""

from __future__ import annotations

import contextlib
import os
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import psutil

from kvstore.testing.process import ChildServer, NodeProcess, children_of

TIMEOUT_S: Final = 10.0


def page(process: ChildServer, path: str) -> tuple[int, str]:
    """Status and text of one of its pages. Raises OSError when it does not answer."""
    url = process.metrics_url.removesuffix("/metrics") + path
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(process: ChildServer) -> dict[str, float]:
    """Numbers of its /metrics by name, with labels as they stand there. Raises OSError when it does
    not answer."""
    lines = page(process, "/metrics")[1].splitlines()
    words = (line.rpartition(" ") for line in lines if line[:1] not in ("", "#"))
    return {name: float(value) for name, _, value in words}


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a node."""

    connections: int
    sessions: int
    leases: int
    slots_sealed: int
    slots_granted: int
    slots_quarantined: int
    slots_leased: int
    blocks_dram: int
    blocks_file: int
    blocks_read: int
    """From disk, since the start."""
    failures: int
    """Bugs that its loop caught."""


def look(node: NodeProcess) -> Gauges:
    """Ask the node. Raises OSError when it does not answer."""
    found = samples(node)

    def of(name: str, label: str = "") -> int:
        return round(found.get(f"kvstore_{name}{label}", 0.0))

    return Gauges(
        connections=of("connections"),
        sessions=of("sessions"),
        leases=of("leases"),
        slots_sealed=of("slots", '{state="sealed"}'),
        slots_granted=of("slots", '{state="granted"}'),
        slots_quarantined=of("slots", '{state="quarantined"}'),
        slots_leased=of("slots", '{state="leased"}'),
        blocks_dram=of("blocks", '{tier="dram"}'),
        blocks_file=of("blocks", '{tier="file"}'),
        blocks_read=of("file_blocks_read_total"),
        failures=of("loop_failures_total"),
    )


def processes(node: NodeProcess) -> list[int]:
    """The processes that a node is made of: supervisor, the one that serves, perhaps a standby."""
    children = children_of(node.supervisor_pid)
    return [node.supervisor_pid, *children] if children else []


def starved_s(pid: int) -> float:
    """Seconds that threads of this process and its descendants were ready to run, and had to wait
    for a core; 0 where the kernel does not count them."""
    waited_ns = 0
    for process in (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))):
        for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread that ended
                waited_ns += int(file.read_text("ascii").split()[1])
    return waited_ns / 1e9


def descriptors(pid: int) -> list[str]:
    """What a process has open, as the kernel names it. Empty when it is gone."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def descriptor_kinds(node: NodeProcess, *, without: Path) -> list[Counter[str]]:
    """Of the supervisor, and of the process that serves, how many descriptors of each kind; those
    below `without`, a store whose segments come and go, are left out."""
    return [_kinds(pid, without) for pid in processes(node)[:2]]


def open_now(pid: int) -> Counter[str]:
    """How many descriptors of each kind a process has, and how many "children"."""
    found = _kinds(pid, None)
    found["children"] = len(children_of(pid))
    return found


def _kinds(pid: int, without: Path | None) -> Counter[str]:
    return Counter(
        name if name.startswith("anon_inode") else name.split(":[")[0]
        for name in descriptors(pid)
        if without is None or not Path(name).is_relative_to(without)
    )


def resident_bytes(node: NodeProcess) -> int:
    """Memory of all its processes, shared memory counted once a process that maps it left out."""
    total = 0
    for pid in processes(node):
        with contextlib.suppress(psutil.NoSuchProcess):
            info = psutil.Process(pid).memory_info()
            total += int(info.rss - info.shared)
    return total

"""Two network namespaces with a link between them whose rate is a token bucket's.

    with Link() as link:
        link.call("b", make)    # what is started or opened by it is on that side

Needs root, `ip` and `tc`; raises NotMeasured where one of them is missing or refused. The bucket is
on b's side, so what a reads from b passes it. Everything goes when the context ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Literal, Self, TypeVar

from bench.cluster.figures import NotMeasured

Side = Literal["a", "b"]
T = TypeVar("T")
ADDRESS: Final[dict[Side, str]] = {"a": "10.231.0.1", "b": "10.231.0.2"}
RATE_MBIT: Final = 1000
BURST_KB: Final = 256
QUEUE_MS: Final = 25
"""Of the bucket's queue: what a port of a switch holds."""
_NEW_NETWORK: Final = 0x40000000
_NEW_MOUNTS: Final = 0x00020000
_SLAVE: Final = 1 << 19 | 1 << 14
"""And all below."""


class Link:
    """Both namespaces, from `with` on."""

    def __init__(self) -> None:
        self._names: dict[Side, str] = {
            side: f"kvstore-{os.getpid()}-{side}" for side in ("a", "b")
        }
        self._threads: dict[Side, ThreadPoolExecutor] = {}
        """One on each side: a process that is started there dies with the thread that did."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise NotMeasured(f"there is no {missing[0]} (Debian: iproute2)")
        with contextlib.ExitStack() as stack:
            for name in self._names.values():
                _run("ip", "netns", "add", name)
                stack.callback(_try, "ip", "netns", "del", name)
            a, b = self._names.values()
            _run("ip", "-n", a, "link", "add", "link0", "type", "veth", "peer", "name", "link1")
            _run("ip", "-n", a, "link", "set", "link1", "name", "link0", "netns", b)
            for side, name in self._names.items():
                _run("ip", "-n", name, "address", "add", f"{ADDRESS[side]}/24", "dev", "link0")
                for device in ("lo", "link0"):
                    _run("ip", "-n", name, "link", "set", device, "up")
            bucket = f"rate {RATE_MBIT}mbit burst {BURST_KB}kb latency {QUEUE_MS}ms".split()
            _run("tc", "-n", b, "qdisc", "add", "dev", "link0", "root", "tbf", *bucket)
            for side, name in self._names.items():
                self._threads[side] = stack.enter_context(ThreadPoolExecutor(1))
                self._threads[side].submit(_enter, name).result()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def call(self, side: Side, make: Callable[[], T]) -> T:
        """What is started or opened by this lives on that side, as long as the link."""
        return self._threads[side].submit(make).result()


def _enter(name: str) -> None:
    """This thread moves into that namespace, and sees its devices in /sys, where UCX looks."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as there:
        steps: tuple[Callable[[], int], ...] = (
            lambda: libc.unshare(_NEW_MOUNTS),
            lambda: libc.mount(b"none", b"/", None, _SLAVE, None),
            lambda: libc.setns(there.fileno(), _NEW_NETWORK),
            lambda: libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
        )
        if any(step() for step in steps):
            raise NotMeasured(f"namespaces cannot be entered: {os.strerror(ctypes.get_errno())}")


def _try(*command: str) -> None:
    """What cannot be cleaned up costs no figures."""
    with contextlib.suppress(NotMeasured):
        _run(*command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        raise NotMeasured(f"`{' '.join(command[:4])} …` says: {said}")

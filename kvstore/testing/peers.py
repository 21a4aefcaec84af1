"""Two real nodes that lend to each other, one of them with the index inside.

    with PeerPair.start(tmp_path, transport="tcp") as pair:
        with RawEngine(pair.b.socket) as there, RawEngine(pair.a.socket) as here:
            there.open(), here.open()
            there.store(keys)
            reply = pair.borrow(here, keys)

For tests and benchmarks. Certificates are made for them. Whatever happens, both are reaped.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from kvstore.testing.index_process import Lab
from kvstore.testing.lan import Lan
from kvstore.testing.process import NodeProcess
from kvstore.testing.raw_engine import RawEngine
from kvstore.wire.messages import LeaseReply

WAIT_S: Final = 180.0
_PAUSE_S: Final = 0.05


class PeerPair:
    """Node a has the index, if there is no other; b tells it, too."""

    def __init__(
        self,
        directory: Path,
        transport: str,
        dram: str,
        flags: Sequence[str],
        lan: Lan | None,
        index: str,
    ) -> None:
        self._lab = Lab(directory)
        self._directory = directory
        self._transport, self._dram, self._flags = transport, dram, tuple(flags)
        self._lan = lan
        inside = ("--index-listen", f"{self._host('a')}:0")
        self.a = self._start("a", ("--index", index) if index else inside)
        self._index = index or self.a.index
        try:
            self.b = self._start("b", ("--index", self._index))
        except BaseException:
            self.a.stop()
            raise

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        directory: Path,
        *,
        transport: str,
        dram: str = "64MiB",
        flags: Sequence[str] = (),
        lan: Lan | None = None,
        index: str = "",
    ) -> Iterator[PeerPair]:
        """Both, until the context ends; on machines "a" and "b" of a network, if there is one; with
        this index, or with one in a. Raises NodeFailed."""
        pair = cls(directory, transport, dram, flags, lan, index)
        try:
            yield pair
        finally:
            for node in (pair.b, pair.a):
                node.stop()

    def _start(self, name: str, index: Sequence[str]) -> NodeProcess:
        folder = self._directory / name
        folder.mkdir(exist_ok=True)
        certificate = self._lab.flags("node", name, with_index=True)
        listen = ("--peer-listen", f"{self._host(name)}:0", "--transport", self._transport)
        flags = (*index, *listen, *certificate, *self._flags)
        machine = self._lan.inside(name) if self._lan else contextlib.nullcontext()
        with machine:
            return NodeProcess.start(folder, dram=self._dram, flags=flags)

    def _host(self, name: str) -> str:
        return self._lan.address(name) if self._lan else "127.0.0.1"

    def restart_b(self) -> None:
        """Another b, with empty memory and another address, after the one before was ended."""
        self.b = self._start("b", ("--index", self._index))

    def borrow(self, engine: RawEngine, keys: Sequence[bytes]) -> LeaseReply:
        """Lease all of these keys, asking again until they have come.

        Raises TimeoutError.
        """
        deadline_s = time.monotonic() + WAIT_S
        while True:
            reply = engine.lease(keys)
            if len(reply.slots) == 4 * len(keys) * engine.columns:
                return reply
            engine.release(reply)
            if time.monotonic() > deadline_s:
                raise TimeoutError("the blocks never came from the other node")
            threading.Event().wait(_PAUSE_S)


def mover_of(node: NodeProcess) -> psutil.Process:
    """The mover of the node process that serves now. Raises TimeoutError."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(node.pid).children():
                if "kvstore.serve.mover_process" in child.cmdline():
                    return child
        threading.Event().wait(_PAUSE_S)
    raise TimeoutError("the node has no mover")


def metric(node: NodeProcess, name: str, labels: str = "") -> float:
    """A number of its /metrics."""
    with urllib.request.urlopen(node.metrics_url, timeout=10) as answer:
        page = answer.read().decode()
    found = re.search(rf"^{re.escape(name + labels)} (\S+)$", page, re.MULTILINE)
    assert found is not None, f"no {name}{labels}"
    return float(found[1])


def at_rest(node: NodeProcess) -> None:
    """Wait until nothing is lent, leased or being fetched, with no engine attached. Raises
    TimeoutError."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        names = ('kvstore_slots{state="leased"}', 'kvstore_slots{state="granted"}')
        if metric(node, "kvstore_leases") == 0 and not any(metric(node, name) for name in names):
            return
        threading.Event().wait(_PAUSE_S)
    raise TimeoutError("leases or slots are held although nobody asks")

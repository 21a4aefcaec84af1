"""Two real nodes that serve each other, one of them with the index inside.

    with PeerPair.start(tmp_path, transport="tcp") as pair:
        with RawEngine(pair.b.socket) as there, RawEngine(pair.a.socket) as here:
            there.open(), here.open()
            there.store(keys)
            reply = pair.fetch(here, keys)

For tests and benchmarks. Certificates are made for them. Whatever happens, both are reaped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import psutil

from kvstore.testing.process import Lab, NodeProcess, children_of
from kvstore.testing.raw_engine import EngineGone, RawEngine
from kvstore.wire.messages import LeaseReply
from kvstore.wire.peers import PEERS, Answer, Ask, decode_answer, encode
from tests.kit.gauges import look, open_now, samples
from tests.kit.lan import Lan

WAIT_S: Final = 180.0
P3_S: Final = 60.0
"""Promise P3 says 15 s from node to node; a busy machine is given four times that."""
_PAUSE_S: Final = 0.05


def session(channel: grpc.Channel, words: Iterator[Ask], *, timeout_s: float) -> Iterator[Answer]:
    """Answers of a node to these words. Raises RpcError."""
    begin: Any = channel.stream_stream(f"/{PEERS}/Session", encode, decode_answer)
    answers: Iterator[Answer] = begin(words, timeout=timeout_s)
    return answers


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
        host: str,
    ) -> None:
        self._lab = Lab(directory)
        self._directory = directory
        self.transport = transport
        self._dram, self._flags = dram, tuple(flags)
        self._lan = lan
        self._loopback = host
        inside = ("--index-listen", f"{self._host('a')}:0")
        self.a = self._start("a", ("--index", index) if index else inside)
        try:
            self.b = self._start("b", ("--index", index or self.a.index))
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
        host: str = "127.0.0.1",
    ) -> Iterator[PeerPair]:
        """Both, until the context ends; on machines "a" and "b" of a network, if there is one; with
        this index, or with one in a. `host`: without a network. Raises NodeFailed."""
        pair = cls(directory, transport, dram, flags, lan, index, host)
        try:
            yield pair
        finally:
            for node in (pair.b, pair.a):
                node.stop()

    def _start(self, name: str, index: Sequence[str]) -> NodeProcess:
        folder = self._directory / name
        folder.mkdir(exist_ok=True)
        certificate = self._lab.flags("node", name, with_index=True)
        listen = ("--peer-listen", f"{self._host(name)}:0", "--transport", self.transport)
        flags = (*index, *listen, *certificate, *self._flags)
        with self.inside(name):
            return NodeProcess.start(folder, dram=self._dram, flags=flags)

    def inside(self, name: str) -> contextlib.AbstractContextManager[None]:
        """This thread is on the machine of a node, where its /metrics are."""
        return self._lan.inside(name) if self._lan else contextlib.nullcontext()

    def _host(self, name: str) -> str:
        return self._lan.address(name) if self._lan else self._loopback

    def fetch(self, engine: RawEngine, keys: Sequence[bytes]) -> LeaseReply:
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


def transfer_worker_of(node: NodeProcess) -> psutil.Process:
    """The transfer worker of the node process that serves now. Raises TimeoutError."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            for child in map(psutil.Process, children_of(node.pid)):
                if "kvstore.peers.transfer_worker_process" in child.cmdline():
                    return child
        threading.Event().wait(_PAUSE_S)
    raise TimeoutError("the node has no transfer worker")


def metric(node: NodeProcess, name: str, labels: str = "") -> float:
    """A number of its /metrics."""
    return metrics(node, name + labels)[0]


def metrics(node: NodeProcess, *names: str) -> list[float]:
    """Numbers of its /metrics, at one moment. Names come with their labels. A page without them, as
    while the index in the node is busy, is asked for again; raises TimeoutError in the end."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        page = samples(node)
        if page.keys() >= {*names}:
            return [page[name] for name in names]
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not all of {names}")
        threading.Event().wait(_PAUSE_S)


def at_rest(node: NodeProcess, *engines: RawEngine) -> None:
    """Wait until a node holds what these idle engines have, and nothing else: nothing is served,
    leased, being fetched, or in doubt, and nobody else is attached. Raises TimeoutError."""
    deadline_s = time.monotonic() + P3_S
    while found := _held(node, engines):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"held although nobody asks: {found}")
        threading.Event().wait(_PAUSE_S)


def _held(node: NodeProcess, engines: Sequence[RawEngine]) -> str:
    """What is not as it should be."""
    for engine in engines:
        engine.hear()
    expected = {
        "connections": sum(1 + len(engine.ranks) for engine in engines),
        "sessions": len(engines),
        "leases": 0,
        "slots_leased": 0,
        "slots_quarantined": 0,
        "slots_granted": sum(len(engine.credits) * engine.columns for engine in engines),
    }
    try:
        gauges = look(node)
    except OSError as error:
        return f"it does not answer: {error}"
    found = {name: getattr(gauges, name) for name in expected}
    return "" if found == expected else f"{found}, not {expected}"


def machinery(node: NodeProcess) -> list[Counter[str]]:
    """What the process that serves and its transfer worker have open."""
    return [open_now(node.pid), open_now(transfer_worker_of(node).pid)]


@contextlib.contextmanager
def attached(socket: Path, **options: Any) -> Iterator[RawEngine]:
    """An engine with a session, until the context ends: then it leaves in good order, after an
    error, too, so that its node need not wait for the end of this process, nor other tests find
    its slots in quarantine. `options`: of RawEngine."""
    with RawEngine(socket, **options) as engine:
        engine.open()
        try:
            yield engine
        except BaseException:
            with contextlib.suppress(EngineGone, TimeoutError, OSError):
                engine.leave()
            raise
        engine.leave()

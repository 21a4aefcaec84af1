"""A link that another flow needs: how much our reads slow it, paced and not.

Two namespaces, a link of 1 Gbit/s between them (`netns`). The other flow is one TCP stream of fixed
size from b to a; meanwhile transfer workers on a read from transfer workers on b over NIXL, again
and again until the flow has ended. Slow-down: the flow's time beside our reads, over its time
alone, less 1. Every round has each kind once.

And alone: reads of the same bytes, paced over unpaced. The first round warms connections, and lets
windows learn the link.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from bench.cluster.figures import NotMeasured, at_most, ratio, spread
from bench.cluster.netns import ADDRESS, BURST_KB, QUEUE_MS, RATE_MBIT, Link, Side
from bench.raw_nixl import is_installed
from kvstore.errors import KVStoreError
from kvstore.ports import Outcome
from kvstore.transport.pieces import make_pieces
from kvstore.wire.transfer_worker import Done
from tests.kit.transport_parties import TransferWorkerParty

UCX: Final = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "link0", "NIXL_LOG_LEVEL": "FATAL"}
GOAL_SLOWED: Final = 0.5
GOAL_ALONE: Final = 1.02
CHUNK_BYTES: Final = 256 << 10
PATIENCE_S: Final = 120.0


class Flow:
    """One TCP stream from b to a, as a program would have it."""

    def __init__(self, stack: ExitStack, link: Link) -> None:
        listener = link.call("a", lambda: socket.create_server((ADDRESS["a"], 0)))
        stack.enter_context(listener)
        self._out = link.call("b", lambda: socket.create_connection(listener.getsockname()))
        stack.enter_context(self._out)
        self._in = stack.enter_context(listener.accept()[0])
        for end in (self._in, self._out):
            end.settimeout(PATIENCE_S)

    def carry_s(self, size_bytes: int) -> float:
        """Seconds until the last byte has arrived."""
        begin_s = time.perf_counter()
        sender = threading.Thread(target=self._out.sendall, args=(bytes(size_bytes),))
        sender.start()
        room, left = bytearray(CHUNK_BYTES), size_bytes
        while left:
            left -= self._in.recv_into(room, min(left, CHUNK_BYTES))
        sender.join()
        return time.perf_counter() - begin_s


class Reader:
    """TransferWorkers on both sides, reading all of an arena at a time."""

    def __init__(self, stack: ExitStack, link: Link, size_bytes: int, *, paced: bool) -> None:
        def party(side: Side) -> TransferWorkerParty:
            made = link.call(
                side,
                lambda: TransferWorkerParty(
                    side, "nixl", environment=UCX, arena_bytes=size_bytes, paced=paced
                ),
            )
            stack.callback(made.close)
            return made

        self._reader, owner = party("a"), party("b")
        owner.arena[:] = 1
        self._reader.connect("b", owner.descriptor())
        self._whole = make_pieces([0], [0], [size_bytes])
        self.reads_beside = 0
        """That were begun while the flow went on."""

    def read_s(self) -> float:
        """Seconds of one read."""
        begin_s = time.perf_counter()
        self._reader.read(1, "b", self._whole)
        assert self._reader.ends(1) == {1: Done}
        return time.perf_counter() - begin_s

    def beside_s(self, flow: Flow, size_bytes: int) -> float:
        """The flow's time while reads go on, which all end well. Raises what ended them."""
        over, began = threading.Event(), threading.Event()
        ends: list[type[Outcome]] = []
        errors: list[Exception] = []

        def read() -> None:
            try:
                while not over.is_set():
                    self._reader.read(1, "b", self._whole)
                    began.set()
                    ends.append(self._reader.ends(1)[1])
            except (AssertionError, KVStoreError, OSError) as error:
                errors.append(error)
            finally:
                began.set()

        reading = threading.Thread(target=read)
        reading.start()
        began.wait(PATIENCE_S)
        try:
            took_s = flow.carry_s(size_bytes)
        finally:
            over.set()
            reading.join()
        if errors:
            raise errors[0]
        assert set(ends) == {Done}, ends
        self.reads_beside += len(ends)
        return took_s


def measure(*, flow_bytes: int, read_bytes: int, rounds: int) -> dict[str, Any]:
    """Slow-downs, and what pacing costs alone."""
    if not is_installed():
        raise NotMeasured("NIXL is not installed")
    flow_s: dict[str, list[float]] = {"alone": [], "paced": [], "unpaced": []}
    read_s: dict[str, list[float]] = {"paced": [], "unpaced": []}
    with ExitStack() as stack:
        link = stack.enter_context(Link())
        flow = Flow(stack, link)
        readers = {name: Reader(stack, link, read_bytes, paced=name == "paced") for name in read_s}
        for number in range(rounds + 1):
            names = list(read_s) if number % 2 else list(read_s)[::-1]
            alone = {name: readers[name].read_s() for name in names}
            times = {"alone": flow.carry_s(flow_bytes)}
            times |= {name: readers[name].beside_s(flow, flow_bytes) for name in names}
            if number:
                for name, took_s in alone.items():
                    read_s[name].append(took_s)
                for name, took_s in times.items():
                    flow_s[name].append(took_s)
    slower = {
        name: [took / alone - 1 for took, alone in zip(flow_s[name], flow_s["alone"], strict=True)]
        for name in read_s
    }
    over, between = ratio(read_s["paced"], read_s["unpaced"])
    slowed, interval = ratio(slower["paced"], slower["unpaced"])
    return {
        "figures": {
            "slow_down_paced_over_unpaced": at_most(GOAL_SLOWED, slowed, interval_95=interval),
            "alone_paced_over_unpaced": at_most(GOAL_ALONE, over, interval_95=between),
        },
        "detail": {
            "link": {"mbit_per_s": RATE_MBIT, "burst_kb": BURST_KB, "queue_ms": QUEUE_MS},
            "flow_bytes": flow_bytes,
            "read_bytes": read_bytes,
            "flow_s": {name: spread(its) for name, its in flow_s.items()},
            "slow_down": {name: spread(its) for name, its in slower.items()},
            "reads_beside": {name: reader.reads_beside for name, reader in readers.items()},
            "read_alone_s": {name: spread(its) for name, its in read_s.items()},
            "link_used_alone": round(
                read_bytes / float(np.median(read_s["paced"])) / (RATE_MBIT * 125_000), 3
            ),
        },
    }

"""The loop of a transfer worker: how often it looks at a back end without a descriptor."""

from __future__ import annotations

import select
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.ports import Outcome
from kvstore.transport.pieces import make_pieces
from kvstore.transport.transfer_worker import POLL_S, POLL_SHARE, TransferWorkerLoop
from kvstore.units import NS_PER_S
from kvstore.wire import transfer_worker as wire


class Still:
    """A back end whose posts end when the test says so."""

    capabilities = SimpleNamespace(ends_forgotten=True)
    refused_count = 0

    def __init__(self) -> None:
        self.posted: list[int] = []
        self.ended: list[Outcome] = []

    def describe(self) -> bytes:
        return b"still"

    def fileno(self) -> int:
        return -1

    def post(self, number: int, *_: object) -> None:
        self.posted.append(number)

    def poll(self) -> list[Outcome]:
        ended, self.ended = self.ended, []
        return ended


def test_pauses_grow_with_the_wait_and_begin_anew_with_any_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns, pauses_s, back_end = NS_PER_S, list[float](), Still()
    monkeypatch.setattr(select, "select", lambda *its: pauses_s.append(its[3]))
    node, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with node, its:
        begin = wire.Begin("still", "a", 1 << 20, {}, paced=False)
        loop = TransferWorkerLoop(its, cast("Any", back_end), begin, now_ns=lambda: now_ns)
        pieces = make_pieces([0], [0], [4096])
        direction = wire.Direction.READ

        def pause_s(after_s: float) -> float:
            nonlocal now_ns
            now_ns += int(after_s * NS_PER_S)
            loop._wait()
            return pauses_s[-1]

        for number in (1, 2):
            node.sendall(wire.encode(*wire.parts_of(number, "p", pieces, direction)))
            loop.turn()
            assert len(back_end.posted) == number
            assert pause_s(0) == POLL_S
            assert pause_s(0.08) == pytest.approx(0.08 / POLL_SHARE)
        back_end.ended = [wire.Done(back_end.posted[0])]
        loop.turn()
        assert pause_s(0) == POLL_S

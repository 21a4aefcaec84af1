"""A node that lies: speaks the protocol, and says whatever a seed makes it say.

It welcomes everybody and opens sessions, so that engines ask it. Then it claims to hold all that
they ask for, in slots that hold noise, with checksums of something else, or outside its memory; it
grants what it does not have, answers questions that nobody asked, and sends what is no message.
It does not tell the one lie that nobody can see: noise with the checksum of noise.
"""

from __future__ import annotations

import os
import random
import select
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np

from kvstore.types import KEY_BYTES, PAGE_BYTES
from kvstore.wire.messages import (
    DATAGRAM_BYTES_MAX,
    Grant,
    HelloRank,
    HelloScheduler,
    Hint,
    HintReply,
    LeaseAsk,
    LeaseMore,
    LeaseReply,
    Message,
    Quiesce,
    Quiet,
    SessionClosed,
    SessionOpen,
    decode_from_engine,
    encode,
)
from tests.kit.scripted_node import ScriptedNode

ARENA_BYTES: Final = 8 << 20
BEAT_S: Final = 0.02
SESSION: Final = 1
LIES: Final = range(10)
NOISE: Final = 9
"""The lie that is about bytes alone: slots that hold noise."""


class Liar(ScriptedNode):
    """Listens at `path` from a thread of its own, for an engine of one rank."""

    def __init__(self, path: Path, *, seed: int, lies: Sequence[int] = LIES) -> None:
        """`lies`: those of `_lie` that it tells."""
        self.asked = 0
        """Questions that it lied to."""
        self._seed = seed
        self._lies = lies
        self._random = random.Random(seed)
        super().__init__(path, incarnation=seed, arena_bytes=ARENA_BYTES)
        self.arena.array[:] = np.random.default_rng(seed).integers(0, 256, ARENA_BYTES, np.uint8)
        self._peers: dict[socket.socket, str] = {}
        """What each is: "", "scheduler" or "rank"."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        for peer in self._peers:
            peer.close()
        self.close()

    def _run(self) -> None:
        while not self._done.is_set():
            ready, _, _ = select.select([self.listener, *self._peers], [], [], BEAT_S)
            for sock in ready:
                if sock is self.listener:
                    peer, _ = sock.accept()
                    peer.setblocking(False)
                    self._peers[peer] = ""
                elif sock in self._peers:
                    self._serve(sock)

    def _serve(self, peer: socket.socket) -> None:
        try:
            datagram, descriptors, _, _ = socket.recv_fds(peer, DATAGRAM_BYTES_MAX, 4)
            for descriptor in descriptors:
                os.close(descriptor)
            if datagram:
                self._answer(peer, datagram)
                return
        except OSError:
            pass  # it hung up, or does not read
        del self._peers[peer]
        peer.close()

    def _answer(self, peer: socket.socket, datagram: bytes) -> None:
        match decode_from_engine(datagram):
            case HelloScheduler():
                self._peers[peer] = "scheduler"
                self.welcome(peer, descriptors=[self.arena.generation_fd])
                self._begin()
            case HelloRank():
                self._peers[peer] = "rank"
                self.welcome(peer)
                self._begin()
            case Quiet():
                for other, kind in list(self._peers.items()):
                    if kind == "scheduler":
                        self._send(other, SessionOpen(SESSION, (1,)))
                        self._send(other, Grant(SESSION, *self._slots(8)))
            case Hint(request=request, keys=keys):
                bits = self._random.randbytes(-(-len(keys) // KEY_BYTES // 8))
                self._send(peer, HintReply(request, bits))
            case LeaseAsk(lease=lease, keys=keys):
                self.asked += 1
                self._lie(peer, lease, len(keys) // KEY_BYTES)
            case _:
                pass

    def _begin(self) -> None:
        """A session as soon as both are there."""
        kinds = sorted(self._peers.values())
        if "rank" in kinds and "scheduler" in kinds:
            for other, kind in list(self._peers.items()):
                if kind == "rank":
                    self._send(other, Quiesce(SESSION))

    def _lie(self, peer: socket.socket, lease: int, count: int) -> None:
        slots, generations = self._slots(count)
        noise = self._random.randbytes(16 * count)
        match self._random.choice(self._lies):
            case 0:
                self._send(peer, LeaseReply(lease + 7, 10_000, slots, generations, noise))
            case 1:
                beyond = np.full(count, ARENA_BYTES // PAGE_BYTES + 1, "<u4").tobytes()
                self._send(peer, LeaseReply(lease, 10_000, beyond, generations, noise))
            case 2:
                peer.send(self._random.randbytes(self._random.randint(1, 2000)))
            case 3:
                self._send(
                    peer, LeaseReply(lease, 0, b"", b"", promoting=count, promoting_ms=10**9)
                )
            case 4:
                self._send(peer, LeaseMore(lease + 1, slots, generations, noise, promoting=3))
                self._send(peer, LeaseReply(lease, 10_000, slots * 2, generations * 2, noise * 2))
            case 5:
                self._send(peer, SessionClosed(SESSION + 5, "no reason"))
                self._send(peer, LeaseReply(lease, 10_000, slots, generations, noise))
            case 6:
                self._send(peer, LeaseReply(lease, 10_000, slots, generations))
            case 7:
                self._send(peer, LeaseReply(lease, 10_000, slots, generations, bytes(16 * count)))
            case 8:
                self._send(peer, LeaseReply(lease, 10_000, slots, generations, noise))
                self._send(peer, LeaseReply(lease, 10_000, slots[:4], generations[:8], noise[:16]))
            case _:
                self._send(peer, LeaseReply(lease, 10_000, slots, generations, noise))

    def _slots(self, count: int) -> tuple[bytes, bytes]:
        """Of its noise, with generations that hold."""
        pages = ARENA_BYTES // PAGE_BYTES
        slots = np.array([self._random.randrange(0, pages, 128) for _ in range(count)], "<u4")
        return slots.tobytes(), np.ones(count, "<u8").tobytes()

    def _send(self, peer: socket.socket, message: Message) -> None:
        peer.send(encode(message))

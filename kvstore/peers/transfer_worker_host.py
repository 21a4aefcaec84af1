"""The transfer worker on the asyncio loop: a transfer is something to be awaited.

Does not cover: starting, watching and killing it (`transfer_worker`), whom to read from
(`fetcher`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Final

from kvstore.peers.transfer_worker import (
    Crowded,
    Down,
    PeerUnreachable,
    TransferEnded,
    TransferWorker,
    TransferWorkerEvent,
    Unusable,
    Up,
)
from kvstore.ports import Clock, Pieces
from kvstore.units import NS_PER_S
from kvstore.wire.transfer_worker import Direction

IDLE_POLL_S: Final = 1.0

_log = logging.getLogger(__name__)


class TransferWorkerHost:
    """The transfer worker of a node for coroutines, from `start` to `close`, both on the asyncio
    loop."""

    def __init__(self, transfer_worker: TransferWorker, clock: Clock) -> None:
        self.descriptor = b""
        """Descriptor that peers need to read here; empty while no transfer worker is ready."""
        self.trouble = "the transfer worker is starting"
        """Why no blocks can be moved; empty while all is well."""
        self.changed: Callable[[], object] = lambda: None
        """Called when `descriptor` has changed."""
        self._transfer_worker = transfer_worker
        self._clock = clock
        self._numbers = itertools.count(1)
        self._awaited: dict[int, asyncio.Future[TransferEnded]] = {}
        self._connected: dict[str, bytes] = {}
        """Descriptor of each peer that the transfer worker is connected to."""
        self._to_forget: set[str] = set()
        """Peers to disconnect from when their reads have ended."""
        self._forgets_reads = False
        """Whether the back end ends the reads of a peer that it disconnects from. If not, only the
        death of the transfer worker would end them: a peer is not forgotten while it is read
        from."""
        self._is_unusable = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def restarts(self) -> int:
        """Number of transfer workers before this one."""
        return self._transfer_worker.restarts

    @property
    def refused(self) -> int:
        """Number of times that a peer wanted to read here and found no room."""
        return self._transfer_worker.refused

    def start(self) -> None:
        """Start the transfer worker. The loop's thread must live as long as the node, because the
        transfer worker ends with that thread."""
        self._loop = asyncio.get_running_loop()
        self._transfer_worker.start()
        self._loop.add_reader(self._transfer_worker.fileno(), self._turn)
        self._turn()

    def close(self) -> None:
        """End the transfer worker; on return every transfer has ended."""
        if self._loop is None:
            return
        self._loop.remove_reader(self._transfer_worker.fileno())
        if self._timer is not None:
            self._timer.cancel()
        for event in self._transfer_worker.close():
            if isinstance(event, TransferEnded):
                self._take(event)

    async def move(
        self,
        peer: str,
        descriptor: bytes,
        pieces: Pieces,
        *,
        timeout_s: float,
        direction: Direction = Direction.READ,
    ) -> TransferEnded:
        """Read from a peer, or write to its landing memory. On return nothing touches the places of
        the pieces here any more.

        Must not be cancelled: only its return proves that.
        """
        assert self._loop is not None
        number = next(self._numbers)
        if not self.descriptor:  # nor is one told of peers that does not say yet that it is there
            return TransferEnded(number, peer, good=False, reason=self.trouble)
        self._to_forget.discard(peer)
        if self._connected.get(peer) != descriptor:
            if peer in self._connected:
                self._transfer_worker.forget(peer)
            self._connected[peer] = descriptor
            self._transfer_worker.connect(peer, descriptor)
        deadline_ns = self._clock.now_ns() + int(timeout_s * NS_PER_S)
        if not self._transfer_worker.post(number, peer, pieces, direction, deadline_ns=deadline_ns):
            trouble = self.trouble or "the transfer worker takes nothing now"
            return TransferEnded(number, peer, good=False, reason=trouble)
        end: asyncio.Future[TransferEnded] = self._loop.create_future()
        self._awaited[number] = end
        self._plan()
        return await asyncio.shield(end)

    def forget(self, peer: str) -> None:
        """Disconnect from a peer that nothing more is read from, as far as is known; deferred while
        a read is under way that the back end cannot end."""
        if self._transfer_worker.is_reading(peer) and not self._forgets_reads:
            self._to_forget.add(peer)
        elif self._connected.pop(peer, None) is not None:
            self._transfer_worker.forget(peer)

    def recycle(self, reason: str) -> None:
        """Kill the transfer worker; another one follows."""
        self._transfer_worker.kill(reason)

    def _turn(self) -> None:
        for event in self._transfer_worker.read():
            self._take(event)
        self._plan()

    def _plan(self) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        at_ns = self._transfer_worker.next_ns()
        wait_s = (at_ns - self._clock.now_ns()) / NS_PER_S if at_ns else IDLE_POLL_S
        self._timer = self._loop.call_later(max(0.0, min(wait_s, IDLE_POLL_S)), self._turn)

    def _become(self, descriptor: bytes, trouble: str) -> None:
        is_another = descriptor != self.descriptor
        self.descriptor, self.trouble = descriptor, trouble
        if is_another:
            self.changed()

    def _take(self, event: TransferWorkerEvent) -> None:
        match event:
            case Up(registered=registered):
                self._forgets_reads = registered.ends_forgotten
                self._become(registered.descriptor, "")
                self._connected.clear()
            case Down(reason=reason):
                self._connected.clear()
                if not self._is_unusable:
                    _log.warning("the transfer worker ended: %s; another one is started", reason)
                    self._become(b"", f"the transfer worker ended: {reason}")
            case Unusable(reason=reason):
                self._is_unusable = True
                _log.error("blocks cannot be moved between nodes: %s", reason)
                self._become(b"", f"blocks cannot be moved: {reason}")
            case PeerUnreachable(peer=peer, reason=reason):
                _log.info("the transfer worker does not reach node %s: %s", peer, reason)
                self._connected.pop(peer, None)
            case Crowded(refused=refused):
                _log.warning(
                    "the transfer worker refused peers %d times: as many as it has room for read"
                    " from this node already",
                    refused,
                )
            case TransferEnded(transfer=transfer, peer=peer):
                self._awaited.pop(transfer).set_result(event)
                if peer in self._to_forget:
                    self._to_forget.discard(peer)
                    self.forget(peer)  # or not yet: it may be read from still

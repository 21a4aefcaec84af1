"""Pushes of this node to others: their grants, and writes into their landing memory.

    peer ──PushGrant, PushRevoke──▶ block_server ─▶ here ─▶ engine: PushAsked, PushRevoked
    engine: WritePush ─▶ transfer worker writes ─▶ Written;  AnswerPeer ─▶ peer

Rules. 1: a peer is written to where its certificate and membership say that it is: a descriptor of
another machine is refused. 2: Written comes when the transfer worker says so, and not before.

Does not cover: which blocks, and when (`engine.moves.pushes`), the other end (`lander`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from kvstore.engine.events import (
    PushAsked,
    PushEvent,
    PushRevoked,
    WritePush,
    Written,
)
from kvstore.errors import ProtocolError
from kvstore.net.aio import Tasks
from kvstore.peers.fetcher import transfer_worker_name
from kvstore.peers.stages import SLOW_S, Stages
from kvstore.peers.transfer_worker import TransferWorker
from kvstore.ports import Clock, Pieces
from kvstore.transport.backends import is_at
from kvstore.types import PAGE_BYTES
from kvstore.wire.peers import PushGrant, PushOver, PushWord
from kvstore.wire.transfer_worker import Direction

WRITE_TIMEOUT_S: Final = 10.0
GRANTS_MAX: Final = 256
"""Most grants of one peer for which no PushOver was sent."""

_log = logging.getLogger(__name__)


class _TakenGrant:
    def __init__(self, node: str, its: PushGrant) -> None:
        self.node, self.its = node, its
        self.is_known = False
        """Whether the grant was passed to the engine."""
        self.is_revoked = False


class Pusher:
    """Passes grants of decode nodes to the engine, and writes blocks to them. Runs on the asyncio
    loop."""

    def __init__(
        self,
        post: Callable[[PushEvent], None],
        *,
        transfer_worker: TransferWorker,
        address_of: Callable[[str], Awaitable[str]],
        answer: Callable[[int, PushWord], None],
        clock: Clock,
        slow_s: float = SLOW_S,
    ) -> None:
        """`post`: passes an event to the engine. `address_of`: peer address of a node, empty if it
        is no member. `answer`: sends a message to a peer, by its number (`block_server`). `slow_s`:
        see `Stages`."""
        self.stages = Stages(("write",), clock, slow_s=slow_s)
        self._post, self._transfer_worker, self._clock = post, transfer_worker, clock
        self._address_of, self._answer = address_of, answer
        self._taken: dict[tuple[int, int], _TakenGrant] = {}
        self._tasks = Tasks("a bug in what pushes blocks")

    # ── of peers ─────────────────────────────────────────────────────────────────────────────────

    def asked(self, peer: int, node: str, grant: PushGrant) -> None:
        """A peer (number and node) gave a grant: check it and pass it to the engine. Raises
        ProtocolError."""
        name = (peer, grant.grant)
        if name in self._taken or sum(each == peer for each, _ in self._taken) >= GRANTS_MAX:
            raise ProtocolError("a grant that was given before, or too many of them")
        taken = self._taken[name] = _TakenGrant(node, grant)
        self._tasks.run(self._ask(peer, taken))

    async def _ask(self, peer: int, taken: _TakenGrant) -> None:
        node, its, reason = taken.node, taken.its, ""
        address = await self._address_of(node)
        if not address:
            reason = f"node {node} is no member that the prefill node knows"
        elif not is_at(its.descriptor, address):
            reason = f"node {node} describes no transfer worker on its own machine"
        elif taken.is_revoked:
            reason = "it was taken back"
        if self._taken.get((peer, its.grant)) is not taken:
            return  # its session has ended
        if reason:
            self.say(peer, PushOver(its.grant, its.epoch, reason, is_quiet=True))
            return
        taken.is_known = True
        self._post(PushAsked(peer, node, its))

    def revoked(self, peer: int, grant: int) -> None:
        """A peer revokes a grant, perhaps before that was passed to the engine."""
        taken = self._taken.get((peer, grant))
        if taken is not None and taken.is_known:
            self._post(PushRevoked(peer, grant))
        elif taken is not None:
            taken.is_revoked = True

    def gone(self, peer: int) -> None:
        """A peer's session has ended: forget its grants."""
        self._taken = {name: its for name, its in self._taken.items() if name[0] != peer}

    # ── of the engine ────────────────────────────────────────────────────────────────────────────

    def write(self, command: WritePush) -> None:
        """Begin a write; Written answers."""
        self._tasks.run(self._write(command))

    def say(self, peer: int, word: PushWord) -> None:
        """Send a message of the engine about a grant to its peer; messages after PushOver are
        dropped."""
        taken = self._taken.get((peer, word.grant))
        if taken is None:
            return
        if isinstance(word, PushOver):
            del self._taken[peer, word.grant]
            if word.reason:
                text = "no more of a request's blocks are pushed to node %s: %s"
                _log.info(text, taken.node, word.reason)
        self._answer(peer, word)

    async def _write(self, command: WritePush) -> None:
        taken = self._taken.get((command.peer, command.grant))
        trouble = "the session has ended"
        if taken is not None:
            trouble = await self._move(command, taken)
        self._post(Written(command.job, trouble))

    async def _move(self, command: WritePush, taken: _TakenGrant) -> str:
        """Write the blocks; returns why not all bytes are there, empty if they are."""
        node, its = taken.node, taken.its
        sizes = np.asarray(command.block_bytes, dtype=np.int64)
        if int(sizes.sum()) != its.block_bytes:
            return "the decode node has blocks of another size"
        begun_ns = self._clock.now_ns()
        slots = np.asarray(command.slots, dtype=np.int64).reshape(-1, len(sizes)) * PAGE_BYTES
        extents = np.frombuffer(its.extents, "<u4").astype(np.int64) * PAGE_BYTES
        extents = extents[command.first : command.first + len(slots)]
        remote = extents[:, None] + (np.cumsum(sizes) - sizes)
        lengths = np.broadcast_to(sizes, slots.shape)
        trouble = await self._transfer_worker.move(
            transfer_worker_name(node),
            its.descriptor,
            Pieces(*(part.reshape(-1).astype(np.uint64) for part in (slots, remote, lengths))),
            timeout_s=WRITE_TIMEOUT_S,
            direction=Direction.WRITE,
        )
        if trouble:
            return f"writing to node {node} failed: {trouble}"
        self.stages.since("write", begun_ns, int(lengths.sum()), node=node)
        return ""

    def close(self) -> None:
        """Stop, because the node ends."""
        self._tasks.cancel()

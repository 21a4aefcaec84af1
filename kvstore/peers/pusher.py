"""Pushes of this node to others: their grants, and writes into their landing memory.

    peer ──Grant, Revoke──▶ lender ─▶ here ─▶ engine: PushAsked, PushRevoked
    engine: WritePush ─▶ mover writes ─▶ Written;  SayPushed, SayPushOver ─▶ peer

Rules. 1: a peer is written to where its certificate and membership say that it is: a descriptor of
another machine is refused. 2: Written comes when the mover says so, and not before.

Does not cover: which blocks, and when (`engine.moves.pushes`), the other end (`lander`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import numpy as np

from kvstore.engine.events import (
    PushAsked,
    PushEvent,
    PushRevoked,
    SayPushed,
    SayPushOver,
    WritePush,
    Written,
)
from kvstore.errors import ProtocolError
from kvstore.peers.borrower import mover_name
from kvstore.peers.mover_host import MoverHost
from kvstore.peers.stages import SLOW_S, Stages
from kvstore.ports import Clock, Pieces
from kvstore.proto import peer_pb2 as pb, pushes
from kvstore.transport.backends import is_at
from kvstore.types import PAGE_BYTES
from kvstore.wire.mover import Direction

WRITE_TIMEOUT_S: Final = 10.0
GRANTS_MAX: Final = 256
"""Grants of one peer without a last word."""

_log = logging.getLogger(__name__)


class _TakenGrant:
    def __init__(self, its: pushes.Taken) -> None:
        self.its = its
        self.is_known = False
        """The engine knows it."""
        self.is_revoked = False


class Pusher:
    """On the asyncio loop."""

    def __init__(
        self,
        post: Callable[[PushEvent], None],
        *,
        mover: MoverHost,
        address_of: Callable[[str], Awaitable[str]],
        answer: Callable[[int, pb.Answer], None],
        clock: Clock,
        slow_s: float = SLOW_S,
    ) -> None:
        """`answer`: says something to a peer, by its number (`lender`). `slow_s`: see `Stages`."""
        self.stages = Stages(("write",), clock, slow_s=slow_s)
        self._post, self._mover, self._clock = post, mover, clock
        self._address_of, self._answer = address_of, answer
        self._taken: dict[tuple[int, int], _TakenGrant] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ── of peers ─────────────────────────────────────────────────────────────────────────────────

    def asked(self, peer: int, node: str, grant: pb.Grant) -> None:
        """A peer grants room. Raises ProtocolError."""
        name = (peer, grant.grant)
        if name in self._taken or sum(each == peer for each, _ in self._taken) >= GRANTS_MAX:
            raise ProtocolError("a grant that was given before, or too many of them")
        taken = self._taken[name] = _TakenGrant(pushes.taken_of(grant, node))
        self._run(self._ask(taken, pushes.asked_event(peer, node, grant)))

    async def _ask(self, taken: _TakenGrant, event: PushAsked) -> None:
        address, reason = await self._address_of(taken.its.node), ""
        if not address:
            reason = f"node {taken.its.node} is no member that the prefill node knows"
        elif not is_at(taken.its.descriptor, address):
            reason = f"node {taken.its.node} describes no transfer worker on its own machine"
        elif taken.is_revoked:
            reason = "it was taken back"
        if self._taken.get((event.peer, event.grant)) is not taken:
            return  # its session has ended
        if reason:
            self.say_over(SayPushOver(event.peer, event.grant, reason, is_quiet=True, cause=0))
            return
        taken.is_known = True
        self._post(event)

    def revoked(self, peer: int, grant: int) -> None:
        """A peer takes its grant back; perhaps before the engine knows it."""
        taken = self._taken.get((peer, grant))
        if taken is not None and taken.is_known:
            self._post(PushRevoked(peer, grant))
        elif taken is not None:
            taken.is_revoked = True

    def gone(self, peer: int) -> None:
        """Its session has ended."""
        self._taken = {name: its for name, its in self._taken.items() if name[0] != peer}

    # ── of the engine ────────────────────────────────────────────────────────────────────────────

    def carry_out(self, command: WritePush | SayPushed | SayPushOver) -> None:
        """An order of the engine."""
        match command:
            case WritePush():
                self._run(self._write(command))
            case SayPushed():
                taken = self._taken.get((command.peer, command.grant))
                if taken is not None:
                    self._answer(command.peer, pushes.pushed_answer(command, taken.its.epoch))
            case SayPushOver():
                self.say_over(command)

    def say_over(self, command: SayPushOver) -> None:
        """The last word about a grant."""
        taken = self._taken.pop((command.peer, command.grant), None)
        if taken is None:
            return
        node, reason = taken.its.node, command.reason
        if reason:
            _log.info("no more of a request's blocks are pushed to node %s: %s", node, reason)
        self._answer(command.peer, pushes.over_answer(command, taken.its.epoch))

    async def _write(self, command: WritePush) -> None:
        taken = self._taken.get((command.peer, command.grant))
        trouble = "the session has ended"
        if taken is not None:
            trouble = await self._move(command, taken.its)
        self._post(Written(command.job, trouble))

    async def _move(self, command: WritePush, its: pushes.Taken) -> str:
        """Returns why not all bytes are there."""
        sizes = np.asarray(command.block_bytes, dtype=np.int64)
        if int(sizes.sum()) != its.block_bytes:
            return "the decode node has blocks of another size"
        begun_ns = self._clock.now_ns()
        slots = np.asarray(command.slots, dtype=np.int64).reshape(-1, len(sizes)) * PAGE_BYTES
        extents = its.extents[command.first : command.first + len(slots)] * PAGE_BYTES
        remote = extents[:, None] + (np.cumsum(sizes) - sizes)
        lengths = np.broadcast_to(sizes, slots.shape)
        ended = await self._mover.move(
            mover_name(its.node),
            its.descriptor,
            Pieces(*(part.reshape(-1).astype(np.uint64) for part in (slots, remote, lengths))),
            timeout_s=WRITE_TIMEOUT_S,
            direction=Direction.WRITE,
        )
        if not ended.good:
            return f"writing to node {its.node} failed: {ended.reason}"
        self.stages.since("write", begun_ns, int(lengths.sum()), node=its.node)
        return ""

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a bug in what pushes blocks", exc_info=error)

    def close(self) -> None:
        """The node ends."""
        for task in self._tasks:
            task.cancel()

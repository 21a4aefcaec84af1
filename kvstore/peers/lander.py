"""Pushes to this node: grants that it gives, words about them, copies out of the landing slab.

    AskPush ─▶ session with the prefill node ─▶ Pushed …, PushOver ─▶ engine
    Land ────▶ copied into slots, verified there ─▶ Landed

Rules. 1: every AskPush has one PushOver, whatever happens: the loss of a session counts as PushOver
for each of its grants, and means that writes may still arrive. 2: the copy is verified, which no
peer can write to. 3: addresses come from membership (`fetcher`).

Does not cover: room (`engine.moves.grants`), the other end (`pusher`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.events import (
    AskPush,
    Land,
    LandCommand,
    Landed,
    LandingUp,
    PushEvent,
    PushOver,
    RecycleTransferWorker,
    RevokePush,
    Staged,
)
from kvstore.errors import ProtocolError
from kvstore.net.aio import Tasks
from kvstore.peers.fetcher import Fetcher
from kvstore.peers.peer_session import PeerSession, SessionLost
from kvstore.peers.stages import SLOW_S, Stages
from kvstore.peers.transfer_worker import TransferWorker
from kvstore.ports import Clock
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, PAGE_BYTES
from kvstore.wire.assembly import Assembly
from kvstore.wire.peers import Pushed, PushRevoke, PushWord, check_pushed
from kvstore.wire.record import scopes_of

ASK_TIMEOUT_S: Final = 2.0
LAND_THREADS: Final = 2
KINDS: Final = (
    *("push_grant", "push_first", "push", "land_copy", "land_verify"),
    *("push_seal", "push_token"),
)
"""Stages that are timed here; see `stages`."""

_log = logging.getLogger(__name__)


class _OpenGrant:
    """A grant for which PushOver has not come."""

    def __init__(self, command: AskPush, begun_ns: int) -> None:
        self.command, self.begun_ns = command, begun_ns
        self.session: PeerSession | None = None
        """Session by which the grant was sent; None: not sent yet."""
        self.is_revoked = False
        self.has_begun = False


class Lander:
    """Sends grants to prefill nodes, and copies out what they push. Runs on the asyncio loop."""

    def __init__(
        self,
        post: Callable[[PushEvent], None],
        *,
        fetcher: Fetcher,
        transfer_worker: TransferWorker,
        memory: NDArray[np.uint8],
        clock: Clock,
        draw_epoch: Callable[[], int],
        slow_s: float = SLOW_S,
    ) -> None:
        """`post`: passes an event to the engine. `memory`: the arena. `draw_epoch`: returns a
        random number that is not 0. `slow_s`: see `Stages`."""
        self.stages = Stages(KINDS, clock, slow_s=slow_s)
        self._post, self._fetcher, self._transfer_worker = post, fetcher, transfer_worker
        self._memory, self._clock, self._draw_epoch = memory, clock, draw_epoch
        self.epoch = 0
        """Epoch of the transfer worker that serves; 0: there is none."""
        self._given: dict[int, _OpenGrant] = {}
        self._tasks = Tasks("a bug in what takes pushes")
        self._threads = ThreadPoolExecutor(LAND_THREADS, thread_name_prefix="land")

    def close(self) -> None:
        """Stop, because the node ends."""
        self._tasks.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def transfer_worker_changed(self) -> None:
        """Draw a new epoch and report it to the engine, because the transfer worker was started, or
        is dead and reaped."""
        self.epoch = self._draw_epoch() if self._transfer_worker.descriptor else 0
        self._post(LandingUp(self.epoch))

    def carry_out(self, command: LandCommand) -> None:
        """Carry out a command of the engine."""
        match command:
            case AskPush(its=its):
                given = self._given[its.grant] = _OpenGrant(command, self._clock.now_ns())
                self._tasks.run(self._ask(given))
            case RevokePush(grant=grant) if grant in self._given:
                given = self._given[grant]
                given.is_revoked = True
                if given.session is not None:
                    self._tasks.run(self._revoke(given.session, grant))
            case Land():
                self._tasks.run(self._land(command))
            case Staged(stage, node, took_ns, size_bytes):
                self.stages.took(stage, took_ns, size_bytes, node=node)
            case RecycleTransferWorker(reason=reason):
                _log.warning("the transfer worker is restarted: %s", reason)
                self._transfer_worker.recycle(reason)

    # ── grants ───────────────────────────────────────────────────────────────────────────────────

    async def _ask(self, given: _OpenGrant) -> None:
        node, its = given.command.node, given.command.its
        try:
            session = await self._fetcher.session(node)
            if given.is_revoked or its.epoch != self.epoch:
                raise SessionLost("it was taken back")
            given.session = session
            session.heard = lambda word: self._hear(session, word)
            grant = msgspec.structs.replace(its, descriptor=self._transfer_worker.descriptor)
            await session.tell(grant, timeout_s=ASK_TIMEOUT_S)
            self.stages.since("push_grant", given.begun_ns, node=node)
        except SessionLost as error:
            self._over(its.grant, str(error), is_quiet=given.session is None)

    async def _revoke(self, session: PeerSession, grant: int) -> None:
        with contextlib.suppress(SessionLost):  # which says it for all grants
            await session.tell(PushRevoke(grant), timeout_s=ASK_TIMEOUT_S)

    def _hear(self, session: PeerSession, word: PushWord | None) -> None:
        if word is None:
            its = [grant for grant, each in self._given.items() if each.session is session]
            for grant in its:
                self._over(grant, session.lost, is_quiet=False)
            return
        given = self._given.get(word.grant)
        if given is None or given.session is not session:
            return  # another peer's grant
        if isinstance(word, Pushed):
            self._hear_pushed(given, word)
        elif given.command.its.epoch == word.epoch:
            self._over(word.grant, word.reason, is_quiet=word.is_quiet)

    def _hear_pushed(self, given: _OpenGrant, pushed: Pushed) -> None:
        try:
            check_pushed(pushed)
        except ProtocolError as error:
            self._over(pushed.grant, str(error), is_quiet=False)
            return
        if pushed.shards and not given.has_begun:
            given.has_begun = True
            self.stages.since("push_first", given.begun_ns)
        self._post(pushed)

    def _over(self, grant: int, reason: str, *, is_quiet: bool) -> None:
        given = self._given.pop(grant, None)
        if given is None:
            return
        node, its = given.command.node, given.command.its
        if not reason:
            count = len(its.keys) // KEY_BYTES
            self.stages.since("push", given.begun_ns, count * its.block_bytes)
        if reason and not given.is_revoked:
            _log.info("a push from node %s has ended early: %s", node, reason)
        self._post(PushOver(grant, its.epoch, reason, is_quiet))

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    async def _land(self, command: Land) -> None:
        loop = asyncio.get_running_loop()
        landed = await loop.run_in_executor(self._threads, lambda: self._copy(command))
        if bad := landed.good.count(0):
            _log.warning(
                "node %s pushed %d of %d blocks with other bytes or shards than it says: dropped",
                *(command.node, bad, len(landed.good)),
            )
        self._post(landed)

    def _copy(self, command: Land) -> Landed:
        """Copy blocks out of the landing slab into their slots and verify the copies. Runs on a
        thread."""
        count, size = len(command.keys) // KEY_BYTES, sum(command.block_bytes)
        nothing = Landed(
            command.job, bytes(count), bytes(count * len(command.shards) * CHECKSUM_BYTES)
        )
        space = command.tenant, command.space
        sources = scopes_of(*space, command.sources, command.source_bytes)
        targets = scopes_of(*space, command.shards, command.block_bytes)
        try:
            assembly = Assembly(sources, targets, head_bytes=command.head_bytes)
        except ValueError:
            return nothing
        slots = np.asarray(command.slots, dtype=np.int64).reshape(count, -1) * PAGE_BYTES
        extents = np.frombuffer(command.extents, "<u4").astype(np.int64) * PAGE_BYTES
        offsets = np.cumsum((0, *command.source_bytes[:-1]))
        moves = assembly.moves(extents[:, None] + offsets, slots)
        of_blocks = zip(*(part.reshape(-1, count).T.tolist() for part in moves), strict=True)
        memory, now_ns = self._memory, self._clock.now_ns
        good, sums, copy_ns, begun_ns = bytearray(count), bytearray(), 0, now_ns()
        for number, (row, runs) in enumerate(zip(slots.tolist(), of_blocks, strict=True)):
            at_ns = now_ns()
            for begin, to, length in zip(*runs, strict=True):
                memory[to : to + length] = memory[begin : begin + length]
            copy_ns += now_ns() - at_ns
            # Block by block: the bytes of the copy are still in the processor's cache.
            made = assembly.verify_at(number, row, memory, command.keys, command.checksums)
            good[number] = made is not None
            sums += b"".join(made or [bytes(len(row) * CHECKSUM_BYTES)])
        size_bytes, verify_ns = count * size, now_ns() - begun_ns - copy_ns
        self.stages.took("land_copy", copy_ns, size_bytes)
        self.stages.took("land_verify", verify_ns, size_bytes)
        return Landed(command.job, bytes(good), bytes(sums))

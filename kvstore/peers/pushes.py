"""Pushes between nodes, both ends: `PushCarrier` writes into the landing memory of others and takes
what others push here, and `Stages` times them.

    engine: WritePush ─▶ transfer worker writes ─▶ Written

    AskPush ─▶ session with the prefill node ─▶ Pushed …, PushOver ─▶ engine
    Land ────▶ copied into slots, verified there ─▶ Landed

Rules. 1: Written comes when the transfer worker says so, and not before. 2: every AskPush has one
PushOver, whatever happens: the loss of a session counts as PushOver for each of its grants, and
means that writes may still arrive. 3: the copy is verified, which no peer can write to.

Stages of a push, each with a warning where it takes longer than any load explains:

    asked ─push_grant─▶ granted ─push_first─▶ first byte ─push─▶ last byte   write: the pusher's end
    report that blocks are there ─land_copy─▶ ─land_verify─▶ sealed           push_seal: all of it
    last byte ─push_token─▶ the engine has the first token of its answer

`push_first` and `push` follow a prefill that may still run, and are never slow.

Does not cover: which blocks, and when (`engine.moves.pushes`), room (`engine.moves.grants`), what
is granted by other nodes (`peer_session`), pushes one by one (`engine.why.findings`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import numpy as np

from kvstore.engine import events
from kvstore.errors import ProtocolError
from kvstore.net.aio import Tasks
from kvstore.obs.metrics import Timings
from kvstore.peers.fetcher import ASK_TIMEOUT_S, MOVE_TIMEOUT_S, Fetcher, transfer_worker_name
from kvstore.peers.peer_session import PeerContext, PeerSession, SessionLost
from kvstore.ports import Clock
from kvstore.transport.pieces import make_pieces
from kvstore.types import KEY_BYTES, PAGE_BYTES
from kvstore.units import NS_PER_S, format_size
from kvstore.wire.assembly import Assembly, good_blocks
from kvstore.wire.peers import PushOver, PushRevoke, PushWord, check_pushed
from kvstore.wire.transfer_worker import Direction

LAND_THREADS: Final = 2
KINDS: Final = (
    *("push_grant", "push_first", "push", "land_copy", "land_verify"),
    *("push_seal", "push_token", "write"),
)
"""Stages of pushes from other nodes, and of those to them: `write`."""
SLOW_S: Final = 0.5
SLOW_TCP_S: Final = 2.0
FRESH_NS: Final = 60 * NS_PER_S
"""How long /healthz names a slow stage."""
_SLOW: Final = {
    "push_grant": "granting room to node {node} took {took:.1f} s: it is stopped or busy",
    "write": "pushing {size} to node {node} took {took:.1f} s: its link or one of the two hosts"
    " is busy",
    "push_seal": "{size} from node {node} were checked and stored in {took:.1f} s: this host is"
    " busy",
    "push_token": "{took:.1f} s from the end of a push of node {node} to the first token: the"
    " engine has a queue",
}

_log = logging.getLogger(__name__)


class Stages:
    """Durations by stage, and warnings. Stages that have a warning are reported on the asyncio loop
    only."""

    def __init__(self, kinds: Sequence[str], clock: Clock, *, slow_s: float) -> None:
        """`kinds`: names of the stages. `slow_s`: a stage that takes longer is logged as slow."""
        self.timings = {kind: Timings() for kind in kinds}
        self._clock, self.slow_ns = clock, int(slow_s * NS_PER_S)
        self._slow: dict[bool, tuple[str, int]] = {}
        """Text and time of the last slow `write` (True), and of the last slow one of the others."""

    def since(self, kind: str, begun_ns: int, size_bytes: int = 0, *, node: str = "") -> int:
        """Record a stage that began at `begun_ns` and ends now. `node`: the other node, for the
        warning. Returns the time."""
        now_ns = self._clock.now_ns()
        self.took(kind, now_ns - begun_ns, size_bytes, node=node)
        return now_ns

    def took(self, kind: str, took_ns: int, size_bytes: int = 0, *, node: str = "") -> None:
        """Record a stage that took `took_ns`, and log a warning if it was slow."""
        self.timings[kind].add(took_ns, size_bytes)
        if took_ns > self.slow_ns and kind in _SLOW:
            its = {"node": node, "took": took_ns / NS_PER_S, "size": format_size(size_bytes)}
            text = _SLOW[kind].format(**its)
            self._slow[kind == "write"] = text, self._clock.now_ns()
            _log.warning("%s", text)

    @property
    def trouble(self) -> str:
        """Texts about the last slow stages, for FRESH_NS; empty: there was none."""
        now_ns = self._clock.now_ns()
        return "; ".join(
            f"{text} ({(now_ns - at_ns) // NS_PER_S} s ago)"
            for _, (text, at_ns) in sorted(self._slow.items())
            if now_ns - at_ns <= FRESH_NS
        )


class _OpenGrant:
    """A grant for which PushOver has not come."""

    def __init__(self, command: events.AskPush, begun_ns: int) -> None:
        self.command, self.begun_ns = command, begun_ns
        self.session: PeerSession | None = None
        """Session by which the grant was sent; None: not sent yet."""
        self.is_revoked = False
        self.has_begun = False


class PushCarrier:
    """Both ends of pushes: sends grants to prefill nodes and copies out what they push, and writes
    blocks to decode nodes. Runs on the asyncio loop."""

    def __init__(
        self,
        context: PeerContext,
        fetcher: Fetcher,
        sessions: Mapping[int, object],
        *,
        draw_epoch: Callable[[], int] = lambda: secrets.randbelow(2**63 - 1) + 1,
    ) -> None:
        """`sessions`: those of connected peers (`BlockServer`), by number. `draw_epoch`: returns a
        random number that is not 0."""
        self.stages = context.stages
        self._post, self._transfer_worker = context.post, context.transfer_worker
        self._memory, self._clock = context.memory, context.clock
        self._fetcher, self._sessions, self._draw_epoch = fetcher, sessions, draw_epoch
        self.epoch = 0
        """Epoch of the transfer worker that serves; 0: there is none."""
        self._given: dict[int, _OpenGrant] = {}
        self._tasks = Tasks("a bug in what pushes blocks")
        self._threads = ThreadPoolExecutor(LAND_THREADS, thread_name_prefix="land")

    def close(self) -> None:
        """Stop, because the node ends."""
        self._tasks.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def transfer_worker_changed(self) -> None:
        """Draw a new epoch and report it to the engine, because the transfer worker was started, or
        is dead and reaped."""
        self.epoch = self._draw_epoch() if self._transfer_worker.descriptor else 0
        self._post(events.LandingUp(self.epoch))

    def carry_out(self, command: events.PushCommand) -> None:
        """Carry out a command of the engine."""
        match command:
            case events.AskPush(its=its):
                given = self._given[its.grant] = _OpenGrant(command, self._clock.now_ns())
                self._tasks.run(self._ask(given))
            case events.RevokePush(grant=grant) if grant in self._given:
                given = self._given[grant]
                given.is_revoked = True
                if given.session is not None:
                    self._tasks.run(self._revoke(given.session, grant))
            case events.Land():
                self._tasks.run(self._land(command))
            case events.WritePush():
                self._tasks.run(self._write(command))
            case events.Staged(stage, node, took_ns, size_bytes):
                self.stages.took(stage, took_ns, size_bytes, node=node)
            case events.RecycleTransferWorker(reason=reason):
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
            for grant in [grant for grant, its in self._given.items() if its.session is session]:
                self._over(grant, session.lost, is_quiet=False)
            return
        given = self._given.get(word.grant)
        if given is None or given.session is not session:
            return  # another peer's grant
        if isinstance(word, PushOver):
            if given.command.its.epoch == word.epoch:
                self._over(word.grant, word.reason, is_quiet=word.is_quiet)
            return
        try:
            check_pushed(word)
        except ProtocolError as error:
            self._over(word.grant, str(error), is_quiet=False)
            return
        if word.shards and not given.has_begun:
            given.has_begun = True
            self.stages.since("push_first", given.begun_ns)
        self._post(word)

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

    async def _land(self, command: events.Land) -> None:
        copying = asyncio.get_running_loop().run_in_executor(self._threads, self._copy, command)
        landed = await copying
        if bad := landed.good.count(0):
            _log.warning(
                "node %s pushed %d of %d blocks with other bytes or shards than it says: dropped",
                *(command.node, bad, len(landed.good)),
            )
        self._post(landed)

    def _copy(self, command: events.Land) -> events.Landed:
        """Copy blocks out of the landing slab into their slots and verify the copies. Runs on a
        thread."""
        count, sources, targets = len(command.keys) // KEY_BYTES, command.sources, command.targets
        made: list[list[bytes] | None] = []
        try:
            assembly = Assembly(sources, targets, head_bytes=command.head_bytes)
        except ValueError:
            return events.Landed(command.job, *good_blocks([None] * count, len(targets)))
        slots = np.asarray(command.slots, dtype=np.int64).reshape(count, -1) * PAGE_BYTES
        extents = np.frombuffer(command.extents, "<u4").astype(np.int64) * PAGE_BYTES
        offsets = np.cumsum((0, *(scope.block_bytes for scope in sources[:-1])))
        moves = assembly.moves(extents[:, None] + offsets, slots)
        of_blocks = zip(*(part.reshape(-1, count).T.tolist() for part in moves), strict=True)
        memory, now_ns = self._memory, self._clock.now_ns
        verified = assembly.verify(slots, memory, command.keys, command.checksums)
        copy_ns, begun_ns = 0, now_ns()
        for runs in of_blocks:
            at_ns = now_ns()
            for begin, to, length in zip(*runs, strict=True):
                memory[to : to + length] = memory[begin : begin + length]
            copy_ns += now_ns() - at_ns
            # Block by block: the bytes of the copy are still in the processor's cache.
            made.append(next(verified))
        size_bytes = count * sum(scope.block_bytes for scope in targets)
        verify_ns = now_ns() - begun_ns - copy_ns
        self.stages.took("land_copy", copy_ns, size_bytes)
        self.stages.took("land_verify", verify_ns, size_bytes)
        return events.Landed(command.job, *good_blocks(made, len(targets)))

    # ── writes ───────────────────────────────────────────────────────────────────────────────────

    async def _write(self, command: events.WritePush) -> None:
        trouble = "the session has ended"
        if command.peer in self._sessions:
            trouble = await self._move(command)
        self._post(events.Written(command.job, trouble))

    async def _move(self, command: events.WritePush) -> str:
        """Write the blocks; returns why not all bytes are there, empty if they are."""
        node, its = command.node, command.its
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
            make_pieces(slots, remote, lengths),
            timeout_s=MOVE_TIMEOUT_S,
            direction=Direction.WRITE,
        )
        if trouble:
            return f"writing to node {node} failed: {trouble}"
        self.stages.since("write", begun_ns, int(lengths.sum()), node=node)
        return ""

"""Blocks from other nodes, as the engine wants them: where they are, and their bytes, verified.

    Locate ─▶ index ─▶ Located
    Fetch ──▶ serve ─▶ transfer worker reads ─▶ give back: did they stay? and verify ─▶ Fetched

Rules. 1: every Locate and every Fetch is answered, whatever happens. 2: Fetched comes when nothing
writes to its slots any more: a transfer that was begun is awaited to its end. 3: a block is good if
it was served until after it was read, and its bytes are what was stored under its key. 4: addresses
come from the index's members, never from an answer of a peer.

Does not cover: what is worth it (`engine.moves.fetches`), sessions (`peer_session`), the transfer
worker (`transfer_worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kvstore.client.index import IndexClient, IndexUnavailable
from kvstore.engine.events import Candidate, Fetch, Fetched, Locate, Located
from kvstore.index.index import Answer
from kvstore.net import aio
from kvstore.peers.peer_session import PeerContext, PeerSession, SessionLost
from kvstore.transport.backends import is_at
from kvstore.transport.pieces import make_pieces
from kvstore.types import KEY_BYTES, PAGE_BYTES, SpaceId
from kvstore.units import NS_PER_S
from kvstore.wire.assembly import Assembly, good_blocks
from kvstore.wire.identity import Identity
from kvstore.wire.record import scopes_of

LOCATE_TIMEOUT_S: Final = 0.25
MEMBERS_EVERY_S: Final = 1.0
"""Average interval at which members are read, with jitter: nodes in step would have an index answer
all of them at once."""
ASK_TIMEOUT_S: Final = 2.0
MOVE_TIMEOUT_S: Final = 10.0
"""Longest time for a transfer. The waiting engine has given up long before; the limit is for a peer
whose transfer worker is stopped."""
FETCHES_AT_ONCE: Final = 4
"""Most fetches from one peer at a time: 64 MiB together, as `engine.moves.fetches` cuts them. All
fetches of a long prompt at once would share the link, and none would end within its timeout."""
KINDS: Final = ("ask", "move", "verify", "fetch")
"""Timed steps: until the peer has served, until the transfer worker has read, until all is
verified, and the whole."""
TROUBLE_MAX: Final = 200
"""Characters of a failure's text."""
ASK_THREADS: Final = 4
"""Threads that query the index."""
VERIFY_THREADS: Final = 4
"""Threads for verification alone: blocks that have come do not wait for an index that hangs."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Fetcher:
    """Answers Locate and Fetch commands of the engine. All of it runs on the asyncio loop, `start`
    and `close` too."""

    def __init__(self, context: PeerContext, *, jitter: Callable[[], float] = aio.jitter) -> None:
        """`jitter`: returns a random number from 0 to 1."""
        self.damaged = 0
        """Blocks since the start that the peer kept until they were read, and whose checksum
        differs."""
        self.not_kept = 0
        """Blocks since the start that did not stay until they were read."""
        self.index: IndexClient | None = None
        """The index to query; set before `start`."""
        self._context, self._post, self._who = context, context.post, context.who
        self._transfer_worker, self._clock = context.transfer_worker, context.clock
        self._since = context.stages.since
        self._jitter = jitter
        self._addresses = {self._who.node: ""}
        """Peer address of each node that the index listed last; empty for those that serve no
        fetches, and for this one."""
        self._looking: asyncio.Task[None] | None = None
        self._sessions: dict[str, PeerSession] = {}
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Limit of the fetches from one peer at a time."""
        self._askers = ThreadPoolExecutor(ASK_THREADS, thread_name_prefix="ask-index")
        self._verifiers = ThreadPoolExecutor(VERIFY_THREADS, thread_name_prefix="verify")
        self._tasks = aio.Tasks("a bug in what asks other nodes")
        self._told: dict[str, str] = {}
        """Trouble of each node that was logged last, and of the index under the empty name."""

    def start(self) -> None:
        """Begin to read the members from the index regularly."""
        self._tasks.run(self._follow_members())

    async def close(self) -> None:
        """Hang up on all peers. Fetches under way are not answered any more: the node ends."""
        await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)
        for threads in (self._askers, self._verifiers):
            threads.shutdown(wait=False, cancel_futures=True)

    def carry_out(self, command: Locate | Fetch) -> None:
        """Begin to ask the index for locations, or a fetch; Located or Fetched answers."""
        work = self._fetch(command) if isinstance(command, Fetch) else self._locate(command)
        self._tasks.run(work)

    # ── where blocks are ─────────────────────────────────────────────────────────────────────────

    async def _locate(self, command: Locate) -> None:
        located = Located(command.locate, is_known=False)
        try:
            begin_ns = self._clock.now_ns()
            answer = await _on(self._askers, lambda: self._match(command, begin_ns))
            # What an engine has in its own memory, nobody serves.
            found = {
                match.holder.node: match.file_blocks
                for match in answer.matches
                if match.file_blocks and not match.holder.engine
            }
            if not found.keys() <= self._addresses.keys():  # it has just joined
                await self._look_anew()
            candidates = tuple(
                Candidate(node, blocks)
                for node, blocks in found.items()
                if self._addresses.get(node)
            )
            located = Located(command.locate, candidates)
        except (IndexUnavailable, ValueError) as error:  # away, or it refuses the question
            self._note("", str(error))
        finally:
            self._post(located)

    def _match(self, command: Locate, begin_ns: int) -> Answer:
        """Query the index. Runs on a thread. Raises IndexUnavailable.

        Queries queue up behind those that an index does not answer. When it is their turn, no
        request waits for them any more, so late ones fail at once: all are answered within twice
        LOCATE_TIMEOUT_S.
        """
        assert self.index is not None
        if self._clock.now_ns() - begin_ns > LOCATE_TIMEOUT_S * NS_PER_S:
            raise IndexUnavailable("it does not answer, and questions wait for it")
        return self.index.match(
            command.tenant, command.space, command.keys, timeout_s=LOCATE_TIMEOUT_S
        )

    async def _follow_members(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(MEMBERS_EVERY_S * (0.5 + self._jitter()))

    async def _look(self) -> None:
        """Read the present members."""
        assert self.index is not None
        index = self.index
        try:
            members = await _on(self._askers, lambda: index.nodes(timeout_s=MEMBERS_EVERY_S))
        except (IndexUnavailable, ValueError) as error:
            self._note("", str(error))
            return
        self._note("", "")
        self._addresses = {member.node: member.address for member in members.nodes}
        self._addresses[self._who.node] = ""
        self._forget_departed()

    def _forget_departed(self) -> None:
        """Drop what is kept of nodes that are no members any more, and of sessions that have ended:
        nothing else would remove it."""
        for name in self._told.keys() - {"", *self._addresses}:
            del self._told[name]
        for node, session in list(self._sessions.items()):
            if session.lost or (session.descriptor and not self._addresses.get(node)):
                self._forget(session, "this node has hung up")

    def _note(self, node: str, trouble: str) -> None:
        """Log a line when the state of a node, or of the index (`node` empty), changes; `trouble`
        empty: it is well."""
        if self._told.get(node, "") != trouble:
            self._told[node] = trouble
            if trouble and node:
                _log.warning("blocks are not fetched from node %s: %s", node, trouble)
            elif trouble:
                _log.warning("where blocks are cannot be asked: %s", trouble)
            elif node:
                _log.info("blocks are fetched from node %s again", node)
            else:
                _log.info("where blocks are can be asked again")

    # ── their bytes ──────────────────────────────────────────────────────────────────────────────

    async def _fetch(self, command: Fetch) -> None:
        count, session = len(command.keys) // KEY_BYTES, None
        fetched = Fetched(command.job, bytes(count), peer_failed=True)
        turns = self._turns.setdefault(command.node, asyncio.Semaphore(FETCHES_AT_ONCE))
        try:
            session = await self.session(command.node)
            async with turns:
                # If it was lost meanwhile, this fails at once: each would wait as long again.
                fetched = await self._fetch_from(session, command, count)
            self._note(command.node, "")
        except SessionLost as error:
            if session is not None:
                self._forget(session, str(error))
            self._note(command.node, str(error))
            # Without a transfer worker of our own nothing is said of the peer.
            fetched = Fetched(
                command.job,
                bytes(count),
                peer_failed=not self._transfer_worker.trouble,
                trouble=(self._transfer_worker.trouble or str(error))[:TROUBLE_MAX],
            )
        finally:
            self._post(fetched)

    async def _fetch_from(self, session: PeerSession, command: Fetch, count: int) -> Fetched:
        """Fetch blocks of `command` (`count` of them) over a session. Raises SessionLost, when no
        transfer is under way."""
        begun_ns = self._clock.now_ns()
        space = command.targets[0].tenant, SpaceId(command.targets[0].space)
        answer = await session.serve(*space, command.keys, timeout_s=ASK_TIMEOUT_S)
        asked_ns = self._since("ask", begun_ns)
        places = answer.places()
        served = len(places)
        if not served:
            return Fetched(command.job, bytes(count), not_served=count)
        targets = command.targets
        sources = scopes_of(*space, answer.shards, answer.block_bytes)
        try:
            assembly = Assembly(sources, targets, head_bytes=command.head_bytes)
        except ValueError as error:
            raise SessionLost(f"node {command.node} serves {error}") from None
        slots = np.asarray(command.slots, dtype=np.int64).reshape(count, -1)[:served] * PAGE_BYTES
        remote, local, length = assembly.moves(places * PAGE_BYTES, slots)
        trouble = await self._transfer_worker.move(
            transfer_worker_name(command.node),
            session.descriptor,
            make_pieces(local, remote, length),
            timeout_s=MOVE_TIMEOUT_S,
        )
        if trouble:
            raise SessionLost(f"reading from node {command.node} failed: {trouble}")
        size_bytes = int(length.sum())
        moved_ns = self._since("move", asked_ns, size_bytes)
        # The peer is asked while the bytes are verified: in their slots, which nobody else knows
        # yet, since a copy would cost more than the checksum. Both have ended when this returns:
        # nobody looks at the slots any more.
        verified = assembly.verify(slots, self._context.memory, command.keys, answer.checksums)
        verifying = _on(self._verifiers, lambda: list(verified))
        try:
            stayed = await session.give_back(answer.serving, count=served, timeout_s=ASK_TIMEOUT_S)
        finally:
            sums = await verifying
        self._since("verify", moved_ns, size_bytes)
        self._since("fetch", begun_ns, size_bytes)
        return self._judge(command, stayed, sums, count=count)

    def _judge(
        self,
        command: Fetch,
        stayed: NDArray[np.bool_],
        sums: Sequence[Sequence[bytes] | None],
        *,
        count: int,
    ) -> Fetched:
        """The end of a fetch of `count` blocks, of which the first were served. A block that did
        not stay on the peer does not count as damaged."""
        its = [made if kept else None for kept, made in zip(stayed.tolist(), sums, strict=True)]
        not_kept, not_served = int((~stayed).sum()), count - len(its)
        its += [None] * not_served
        damaged = its.count(None) - not_kept - not_served
        self.not_kept += not_kept
        self.damaged += damaged
        if damaged:
            text = "a block that it served is not what was stored; see its scrub"
            self._note(command.node, text)
        return Fetched(
            command.job,
            *good_blocks(its, len(command.targets)),
            not_served=not_served,
            not_kept=not_kept,
            damaged=damaged,
        )

    async def find_addresses(self) -> dict[str, str]:
        """Peer address of each other member that serves fetches, by name; read anew if the index
        answers."""
        await self._look()
        return {node: address for node, address in self._addresses.items() if address}

    async def address_of(self, node: str) -> str:
        """Peer address of a member; empty if it is none or has none. If it is unknown, members are
        read anew."""
        if not self._addresses.get(node) and self.index is not None:
            await self._look_anew()
        return self._addresses.get(node, "")

    async def _look_anew(self) -> None:
        """Read the members once for all that wait for it; who waits has no time for more than
        LOCATE_TIMEOUT_S."""
        if self._looking is None or self._looking.done():
            self._looking = self._tasks.run(self._look())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOCATE_TIMEOUT_S):
                await asyncio.shield(self._looking)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    async def session(self, node: str) -> PeerSession:
        """The open session with a node, or a new one; simultaneous callers share it. Raises
        SessionLost."""
        address, session = await self.address_of(node), self._sessions.get(node)
        if session is None or session.lost:
            if not address:
                raise SessionLost(f"node {node} is no member with an address for other nodes")
            if session is not None:
                self._forget(session, session.lost)
            session = PeerSession(node, address, self._context, self._tasks.run)
            self._sessions[node] = session
        trouble = await session.opened()
        if not trouble and not session.descriptor:
            trouble = f"the transfer worker of node {node} is not up"
        elif not trouble and not is_at(session.descriptor, self._addresses.get(node, "")):
            trouble = (
                f"node {node} describes no transfer worker on its own machine: run a kvstore of"
                " this version there"
            )
        if trouble:
            self._forget(session, trouble)
            raise SessionLost(trouble)
        return session

    def _forget(self, session: PeerSession, why: str) -> None:
        """End this session, unless it has been replaced by another. The next fetch opens a new
        one."""
        if self._sessions.get(session.node) is session:
            del self._sessions[session.node]
            self._transfer_worker.forget(transfer_worker_name(session.node))
            session.hang_up(why)


def _on(threads: ThreadPoolExecutor, call: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(threads, call)


def transfer_worker_name(node: str) -> str:
    """Name of a node's transfer worker: as in its certificate."""
    return str(Identity("node", node))

"""The copy thread of one rank: owns the attach socket and moves the blocks, between polls.

    DOWN ──connect──▶ GREETED ──Welcome──▶ ATTACHED ──socket ended, no heartbeat for long──▶ DOWN

The thread attaches by itself, reconnects without end, and raises for no message or silence of the
node. Copies run without the GIL (`kvstore.kernels`). An idle thread wakes ten times a second to
check the node's heartbeat.

A copy is valid when the slot's generation is the granted one before and after it. Between the two
reads and the copy lie calls that release and take the GIL, which are full memory barriers.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvstore.arena import ArenaView, GenerationView
from kvstore.client.core.copies import (
    CompareBlock,
    Copied,
    Copy,
    CopyCompared,
    CopyVoid,
    LoadBlock,
    Mismatch,
    Outcome,
)
from kvstore.client.core.dial import Dial, DialState
from kvstore.client.link import Link, Lost
from kvstore.connector.handoff import Handoff
from kvstore.errors import AttachError, ProtocolError
from kvstore.kernels.compare import BOUNDS
from kvstore.kernels.pack import PagedCache
from kvstore.kernels.reference import Bytes
from kvstore.obs.logs import RateLimit
from kvstore.types import PAGE_BYTES
from kvstore.wire.checksum import checksum_of
from kvstore.wire.messages import Message, NodeMessage, Refused, Welcome

logger = logging.getLogger("vllm.kvstore.rank")
logger.addFilter(RateLimit())  # two engines with one id would detach each other ten times a second

TICK_S = 0.1
POPULATE_BYTES = 16 << 20
"""Mapped ahead of use per idle turn: a few milliseconds at most."""


class Copier:
    """See the module. Everything but `start` and `join` runs on its thread."""

    def __init__(
        self,
        handoff: Handoff,
        caches: Sequence[PagedCache],
        *,
        socket: str,
        heartbeat_timeout_ms: int,
        values: str = "",
    ) -> None:
        """Args:
        handoff: source of jobs.
        caches: blocks to copy, by KV cache group.
        socket: the node's.
        heartbeat_timeout_ms: silence of `dial.GONE_TIMES` as long ends the connection.
        values: type of the numbers in the cache, for comparing; empty: they cannot be compared.
        """
        self._handoff = handoff
        self._caches = caches
        self._socket = socket
        self._dial = Dial(heartbeat_timeout_ms)
        self._values = values
        self._link: Link | None = None
        self._arena: ArenaView | None = None
        self._generations: GenerationView | None = None
        self._unsent: deque[Message] = deque()
        self._populated = 0
        self._notice = ""
        self._thread = threading.Thread(target=self._run, name="kvstore-copy", daemon=True)

    def start(self) -> None:
        """Start the thread; `Handoff.stop` ends it."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """True when the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        reason = "the copy thread failed"
        try:
            while not self._handoff.stopping:
                self._handoff.clear_wake()
                self._attend(time.monotonic_ns())
                if not self._copy_one() and not self._populate():
                    self._sleep()
            reason = "the engine is shutting down"
        finally:
            # Also when a bug of ours ends the thread: nobody may wait for it for ever.
            self._say(f"detached: {reason}")
            with self._handoff.core() as core:
                core.retire(reason)
            if self._link is not None:
                self._link.close()

    def _sleep(self) -> None:
        poller = select.poll()
        poller.register(self._handoff.wake_fd, select.POLLIN)
        if self._link is not None:
            poller.register(
                self._link.fileno(), select.POLLIN | (select.POLLOUT if self._unsent else 0)
            )
        poller.poll(TICK_S * 1000)

    def _say(self, notice: str) -> None:
        """One log line a change, not one an attempt."""
        if notice != self._notice:
            self._notice = notice
            logger.info("kvstore: %s", notice)

    # ── the socket ───────────────────────────────────────────────────────────────────────────────

    def _attend(self, now_ns: int) -> None:
        """Attach, hear the node, notice its absence, speak. Never waits."""
        if self._link is None:
            if self._dial.is_due(now_ns):
                self._connect(now_ns)
            return
        reason, is_refused = "", False
        for message in self._link.receive():
            reason = reason or self._hear(message, now_ns)
            is_refused |= isinstance(message, Refused)
        if not reason:
            page = self._link.generations
            reason = self._dial.objection(now_ns, page.heartbeat_ns() if page else 0)
        if reason:
            self._detach(reason, now_ns, is_refused=is_refused)
        else:
            self._speak()

    def _connect(self, now_ns: int) -> None:
        with self._handoff.core() as core:
            hello = core.hello()
        try:
            self._link = Link.connect(self._socket, hello)
        except AttachError as error:
            self._dial.ended(now_ns)
            self._say(str(error))
        else:
            self._dial.connected(now_ns)

    def _hear(self, message: NodeMessage | Lost, now_ns: int) -> str:
        """Take one message. Returns why the connection must end, or nothing."""
        if isinstance(message, Lost):
            return message.reason
        try:
            with self._handoff.core() as core:
                if isinstance(message, Welcome) and self._dial.state is DialState.GREETED:
                    core.connected(message)
                    self._take_mapping()
                    self._dial.welcomed(now_ns, message.now_ns)
                    self._dial.served()
                else:
                    core.received(message)
        except ProtocolError as error:
            return f"the node broke the protocol: {error}"
        if isinstance(message, Refused):
            return f"the node refuses this engine: {message.reason}"
        return ""

    def _take_mapping(self) -> None:
        assert self._link is not None
        arena, generations = self._link.arena, self._link.generations
        if arena is None or generations is None:
            raise ProtocolError("Welcome to a rank without an arena")
        self._arena, self._generations = arena, generations
        self._populated = 0
        self._say("attached")

    def _speak(self) -> None:
        assert self._link is not None
        with self._handoff.core() as core:
            self._unsent.extend(core.take_outbox())
        while self._unsent and self._link.send(self._unsent[0]):
            self._unsent.popleft()

    def _detach(self, reason: str, now_ns: int, *, is_refused: bool) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._unsent.clear()
        with self._handoff.core() as core:
            core.disconnected()
        if is_refused:
            self._dial.refused(now_ns)
        else:
            self._dial.ended(now_ns)
        self._say(f"detached: {reason}")

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    def _copy_one(self) -> bool:
        with self._handoff.core() as core:
            copy = core.next_copy()
        if copy is None:
            return False
        outcome = self._copy(copy)
        with self._handoff.core() as core:
            core.finished(copy, outcome)
        return True

    def _copy(self, copy: Copy) -> Outcome:
        assert self._arena is not None, "a session without a mapping"
        assert self._generations is not None, "a session without a mapping"
        begin, cache = copy.slot * PAGE_BYTES, self._caches[copy.group]
        end = begin + cache.block_bytes
        if end > self._generations.ready_bytes():
            return CopyVoid("the slot lies outside the arena")
        if not self._is_current(copy):
            return CopyVoid()
        slot = self._arena.array[begin:end]
        if isinstance(copy, CompareBlock):
            return self._compare(copy, slot)
        begin_ns = time.perf_counter_ns()
        checksum = b""
        if not isinstance(copy, LoadBlock):
            checksum = cache.store(copy.block_id, slot, copy.header)
        elif copy.checksum is None:
            cache.load(slot, copy.block_id)
        else:
            checksum = cache.load_checked(slot, copy.block_id, copy.header)
        duration_ns = time.perf_counter_ns() - begin_ns
        if not self._is_current(copy):
            return CopyVoid()
        if isinstance(copy, LoadBlock) and copy.checksum not in (None, checksum):
            return Mismatch()
        return Copied(checksum, duration_ns)

    def _compare(self, copy: CompareBlock, slot: Bytes) -> Outcome:
        if not self._values:
            return CopyVoid("values of this type cannot be compared")
        error = self._caches[copy.group].error(copy.block_id, slot, values=self._values)
        diverged = error > BOUNDS[self._values]
        # Damaged bytes fail their checksum, and are no evidence against the space.
        damaged = diverged and checksum_of(copy.header, [slot.data]) != copy.checksum
        if not self._is_current(copy):
            return CopyVoid()
        return Mismatch() if damaged else CopyCompared(error, diverged)

    def _is_current(self, copy: Copy) -> bool:
        assert self._generations is not None
        (generation,) = self._generations.generations(np.array([copy.slot], np.uint32))
        return int(generation) == copy.generation

    def _populate(self) -> bool:
        """Map the next part of the arena ahead of use. False when there is nothing to map."""
        if self._link is None or self._arena is None or self._generations is None:
            return False
        ready = self._generations.ready_bytes()
        if self._populated >= ready:
            return False
        try:
            self._arena.populate(self._populated, min(self._populated + POPULATE_BYTES, ready))
        except OSError:
            # No memory for page tables now: the copies will fault them in, one by one.
            self._populated = self._arena.size_bytes
            return False
        self._populated += POPULATE_BYTES
        return True

"""The copy thread of one rank: owns the attach socket and moves the blocks, between polls.

    DOWN ──connect──▶ GREETED ──Welcome──▶ ATTACHED ──socket ended, no heartbeat for long──▶ DOWN

The thread attaches by itself, reconnects without end, and raises for no message or silence of the
node. A copy engine (`kvstore.ports.CopyEngine`) moves the bytes, without the GIL. An idle thread
wakes ten times a second to check the node's heartbeat.

A copy is valid when the slot's generation is the granted one before and after it. Between the two
reads and the copy lie calls that release and take the GIL, which are full memory barriers. A block
that took bytes of no use is cleared before its load ends: the engine uses it for other tokens, and
its attention reads whole blocks.

While copies are under way the thread neither attaches nor takes another mapping. Plans come from
the worker's other thread, and results go to it:

    engine's thread ── submit, keep_off, wait_for_load, core ──▶ Handoff ◀── core ── copy thread
                                                     (one lock, one RankCore, one wake)

The lock is held for bookkeeping only, never while bytes move.

A block with a copy in the node's slab on the same GPU is loaded from there, if the word of its
place is the same before and after, and from its slot of dram otherwise; a load that is to be
verified only where that is quicker (`SourcePace`). A slab that gave other bytes, or an error, is
used no more until the thread attaches again.

Does not cover: decisions (`kvstore.client.core.rank`).
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvstore.arena import ArenaView, GenerationView
from kvstore.client.core import rank
from kvstore.client.core.attachment import Dial, DialState
from kvstore.client.core.costs import SourcePace
from kvstore.client.core.plan import StepPlan
from kvstore.client.link import Link, Lost
from kvstore.connector.config import ConnectorConfig
from kvstore.errors import AttachError, ProtocolError
from kvstore.mailbox import Wake
from kvstore.obs.logs import RateLimit
from kvstore.ports import BlockCopy, CopyEnd, CopyEngine, CopyWay
from kvstore.wire import messages as wire
from kvstore.wire.record import checksum_of
from kvstore.wire.space import begin_of

SELECT_FD_END = 1024
"""Descriptors from here on are too large for `select`, which alone can wait less than 1 ms."""


class Handoff:
    """One per rank. Methods say which thread may call them."""

    def __init__(self, core: rank.RankCore) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.wake = Wake()
        """Set when there may be something to do. The copy thread clears it before it looks for
        work, so that no wake is lost; it is closed by the thread that saw the copy thread end."""
        self.stopping = False
        self._is_over: Callable[[], bool] | None = None
        """Condition that the engine's thread waits for. The copy thread checks it, since a wake in
        vain costs every block a change of threads."""

    # ── engine's thread ──────────────────────────────────────────────────────────────────────────

    def submit(self, plan: StepPlan, after: int = 0) -> None:
        """Queue a step's jobs and wake the copy thread. `after`: mark of the engine's work that
        must be done before their copies (`CopyEngine.mark`)."""
        with self._lock:
            self._core.submit(plan, after)
        self.wake.set()

    def keep_off(self, block_ids: Sequence[int], *, timeout_s: float) -> bool:
        """Wait until no store reads these engine blocks, which are about to be overwritten. After
        `timeout_s` such stores are abandoned and the answer is False.

        Right in both cases: bytes read too late are discarded.
        """
        with self._changed:
            if not self._core.fence(block_ids):
                return True
            self.wake.set()
            if self._wait(lambda: not self._core.fence(block_ids), timeout_s):
                return True
            self._core.give_up(block_ids)
            return False

    def wait_for_load(self, timeout_s: float) -> None:
        """Wait until all loads of a request have ended, at most `timeout_s`; no wait if none
        runs."""
        with self._changed:
            self._wait(lambda: self._core.has_loaded_request or not self._core.has_loads, timeout_s)

    def _wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        self._is_over = is_over
        try:
            return self._changed.wait_for(is_over, timeout_s)
        finally:
            self._is_over = None

    def stop(self) -> None:
        """Ask the copy thread to end after the copy in flight."""
        self.stopping = True
        self.wake.set()

    # ── both ─────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def core(self) -> Iterator[rank.RankCore]:
        """Lock the core. At the end the engine's waiting thread wakes if its condition holds."""
        with self._changed:
            yield self._core
            if self._is_over is not None and self._is_over():
                self._changed.notify()

    # ── copy thread ──────────────────────────────────────────────────────────────────────────────

    def await_wake(self, timeout_s: float) -> None:
        """Wait until there may be something to do; finer than a millisecond."""
        if (fd := self.wake.fileno()) < SELECT_FD_END:
            select.select([fd], [], [], timeout_s)
        else:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(1)
        self.wake.clear()


# ── the copy thread ───────────────────────────────────────────────────────────────────────────────

logger = logging.getLogger("vllm.kvstore.rank")
logger.addFilter(RateLimit())  # two engines with one id would detach each other ten times a second

TICK_S = 0.1
POPULATE_BYTES = 16 << 20
"""Bytes of the arena mapped ahead of use per idle turn: a few milliseconds at most."""
UNDER_WAY_S = 0.000_1
"""Pause between two looks at copies that are under way."""
FROM_DRAM_ALONE = "kvstore: blocks are loaded from dram alone: %s"
DRAIN_S_MAX = 60.0
"""How long the thread waits for copies under way before it ends: they may be behind forwards of the
engine, which lives on where the cache was turned off, and uses their blocks once they are reported.
"""


class Copier:
    """See the module. Everything but `start` and `join` runs on its thread."""

    def __init__(self, handoff: Handoff, copies: CopyEngine, config: ConnectorConfig) -> None:
        """Args:
        handoff: source of jobs.
        copies: moves the blocks; this thread's alone but for `mark`.
        config: names the node's socket, and the limit of its silence, GONE_TIMES of which end the
            connection (`client.core.attachment`).
        """
        self._handoff = handoff
        self._copies = copies
        self._under_way: dict[int, rank.Copy] = {}
        """By number."""
        self._places: GenerationView | None = None
        """Page of places of the slab, while loads may use it."""
        self._slab_bytes = 0
        """Size of the slab that is mapped; 0: none is."""
        self._pace = SourcePace()
        self._trouble = ""
        """Trouble of the copy engine, as last logged."""
        self._reported = wire.Pinned(0)
        """Pinned memory, as last reported to the node."""
        self._socket = config.socket
        self._dial = Dial(config.heartbeat_timeout_ms)
        self._link = Link()
        self._arena: ArenaView | None = None
        self._generations: GenerationView | None = None
        self._unsent: deque[wire.Message] = deque()
        self._populated = 0
        self._notice = ""
        self._thread = threading.Thread(target=self._run, name="kvstore-copy", daemon=True)

    def start(self) -> None:
        """Start the thread; `Handoff.stop` ends it."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait, at most `timeout_s`, for the end of the thread. True: it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        reason = "the copy thread failed"
        try:
            while not self._handoff.stopping:
                self._handoff.wake.clear()
                self._attend(time.monotonic_ns())
                if not self._copy() and not self._populate():
                    self._sleep()
            reason = "the engine is shutting down"
        finally:
            # Also when a bug of ours ends the thread: nobody may wait for it for ever.
            self._say(f"detached: {reason}")
            self._end(reason)

    def _end(self, reason: str) -> None:
        try:
            self._drain(until_ns=time.monotonic_ns() + int(DRAIN_S_MAX * 1e9))
            self._copies.close()
        finally:
            with self._handoff.core() as core:
                core.retire(reason)
            self._link.close()

    def _sleep(self) -> None:
        if self._under_way:
            self._handoff.await_wake(UNDER_WAY_S)
            return
        self._copies.pin_ahead(self._populated)
        poller = select.poll()
        poller.register(self._handoff.wake, select.POLLIN)
        if not self._link.closed:
            poller.register(
                self._link.fileno(), select.POLLIN | (select.POLLOUT if self._unsent else 0)
            )
        poller.poll(TICK_S * 1000)

    def _say(self, notice: str) -> None:
        """Log a notice that differs from the last one: one line a change, not one an attempt."""
        if notice != self._notice:
            self._notice = notice
            logger.info("kvstore: %s", notice)

    # ── the socket ───────────────────────────────────────────────────────────────────────────────

    def _attend(self, now_ns: int) -> None:
        """Attach, hear the node, notice its absence, speak. Never waits."""
        if self._link.closed:
            self._leave_slab()
            if self._dial.is_due(now_ns):
                self._connect(now_ns)
            return
        reason, is_refused = "", False
        for message in self._link.receive():
            reason = reason or self._hear(message, now_ns)
            is_refused |= isinstance(message, wire.Refused)
        if not reason:
            page = self._link.generations
            reason = self._dial.check_heartbeat(now_ns, page.heartbeat_ns() if page else 0)
        if reason:
            self._detach(reason, now_ns, is_refused=is_refused)
        else:
            self._speak()

    def _connect(self, now_ns: int) -> None:
        if not self._drain():
            return
        with self._handoff.core() as core:
            hello = core.hello()
        try:
            self._link = Link.connect(self._socket, hello)
        except AttachError as error:
            self._dial.ended(now_ns)
            self._say(str(error))
        else:
            self._dial.connected(now_ns)

    def _hear(self, message: wire.NodeMessage | Lost, now_ns: int) -> str:
        """Take one message. Returns why the connection must end, or nothing."""
        try:
            match message:
                case Lost(reason=reason):
                    return reason
                case wire.Welcome() if self._dial.state is DialState.GREETED:
                    return self._welcomed(message, now_ns)
            with self._handoff.core() as core:
                core.received(message)
        except ProtocolError as error:
            return f"the node broke the protocol: {error}"
        if isinstance(message, wire.Refused):
            return f"the node refuses this engine: {message.reason}"
        return ""

    def _welcomed(self, welcome: wire.Welcome, now_ns: int) -> str:
        """Take the mapping that came with a Welcome. As `_hear`."""
        if not self._drain():
            return "the engine is shutting down"
        self._take_mapping()  # without the lock: it may unpin all of the last one
        with self._handoff.core() as core:
            core.connected(welcome)
            self._dial.welcomed(now_ns, welcome.now_ns)
            self._dial.served()
        self._take_slab()
        return ""

    def _take_mapping(self) -> None:
        arena, generations = self._link.arena, self._link.generations
        if arena is None or generations is None:
            raise ProtocolError("Welcome to a rank without an arena")
        self._arena, self._generations = arena, generations
        self._copies.attach(arena.array, generations.ready_bytes)
        self._populated, self._reported = 0, wire.Pinned(0)
        self._say("attached")

    def _take_slab(self) -> None:
        """Map the node's slab, if there is one, for loads. Called without the core's lock, which
        the engine's thread takes, too, since mapping may take seconds."""
        slab = self._link.slab
        trouble = self._copies.map_slab(slab)
        if trouble:
            logger.warning(FROM_DRAM_ALONE, trouble)
        self._places = None if trouble else self._link.places
        self._slab_bytes = slab.size_bytes if slab is not None and not trouble else 0

    def _speak(self) -> None:
        with self._handoff.core() as core:
            self._unsent.extend(core.take_outbox())
        self._report_pins()
        while self._unsent and self._link.send(self._unsent[0]):
            self._unsent.popleft()

    def _report_pins(self) -> None:
        """Report pinned memory to the node, for its operator, when it has changed and no message is
        unsent. Log changes of the copy engine's trouble."""
        trouble = self._copies.trouble
        pinned = wire.Pinned(self._copies.pinned_bytes, trouble[: wire.UNSERVED_LENGTH_MAX])
        if pinned != self._reported and self._dial.state is DialState.WELCOMED and not self._unsent:
            self._reported = pinned
            self._unsent.append(pinned)
        if trouble != self._trouble:
            self._trouble = trouble
            logger.warning("kvstore: %s", trouble or "memory can be pinned again")

    def _detach(self, reason: str, now_ns: int, *, is_refused: bool) -> None:
        self._link.close()
        self._unsent.clear()
        self._places = None  # memory of a node that is gone, which dram is not
        with self._handoff.core() as core:
            core.disconnected()
        self._dial.ended(now_ns, is_refused=is_refused)
        self._say(f"detached: {reason}")

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    def _copy(self) -> bool:
        """Begin copies, and take those that ended. False: neither."""
        is_busy = False
        while self._begin():  # all that there are: like ones are given to the device in one go
            is_busy = True
        return self._take_ended() or is_busy

    def _drain(self, until_ns: int = 0) -> bool:
        """Wait for the copies under way; others are not begun. False: the thread is to end first,
        or at `until_ns` some are still under way."""
        while self._under_way:
            if self._take_ended():
                continue
            is_late = time.monotonic_ns() > until_ns if until_ns else self._handoff.stopping
            if is_late:
                return False
            self._handoff.await_wake(UNDER_WAY_S)
        return True

    def _begin(self) -> bool:
        with self._handoff.core() as core:
            copy = core.next_copy()
        if copy is None:
            return False
        assert self._generations is not None, "a session without a mapping"
        end = copy.begin + self._copies.block_bytes(copy.group)
        if end > self._generations.ready_bytes():
            self._finish(copy, CopyEnd(copy.number, reason="the slot lies outside the arena"))
        elif not self._is_current(copy):
            self._finish(copy, CopyEnd(copy.number, reason=rank.SLOT_REUSED))
        else:
            place = self._place(copy)
            if place and copy.is_verified and not self._pace.takes_hbm():
                place = 0
            self._order(copy, place)
            self._under_way[copy.number] = copy  # unless an error ends this thread
        return True

    def _order(self, copy: rank.Copy, place: int) -> None:
        """Begin a copy. A load with a `place`, not 0, takes its bytes from the slab."""
        copy.place, copy.slab_begin = place, begin_of(place)
        self._copies.begin(copy)

    def _place(self, copy: rank.Copy) -> int:
        """Word of the place of a block in the slab; 0: it is not to be loaded from there."""
        if self._places is None or copy.way is not CopyWay.LOAD:
            return 0
        (word,) = self._places.generations(np.array([copy.slot], np.uint32)).tolist()
        is_inside = begin_of(word) + self._copies.block_bytes(copy.group) <= self._slab_bytes
        return int(word) if is_inside else 0

    def _is_from_dram_now(self, copy: rank.Copy, end: CopyEnd) -> bool:
        """Whether a load that ended came from the slab, was of no use, and has been ordered again
        from dram."""
        place, copy.place = copy.place, 0
        if not place:
            return False
        is_same = self._place(copy) == place
        if is_same and not end.reason and not copy.is_damaged(end):
            return False
        if not self._is_current(copy):
            return False
        if is_same:
            self._places = None
            reason = end.reason or "a copy in hbm holds other bytes than its block"
            logger.warning(FROM_DRAM_ALONE, reason)
        self._order(copy, 0)
        return True

    def _leave_slab(self) -> None:
        """Unmap the slab of a node that is gone, once no copy is under way."""
        if self._slab_bytes and not self._under_way:
            self._copies.map_slab(None)
            self._slab_bytes = 0

    def _take_ended(self) -> bool:
        ends = self._copies.ended()
        for end in ends:
            copy = self._under_way[end.number]
            if self._places is not None and copy.way is CopyWay.LOAD and end.checksum:
                size = self._copies.block_bytes(copy.group)
                self._pace.ended(end.duration_ns, size, is_hbm=bool(copy.place))
            if self._is_from_dram_now(copy, end):
                continue
            known = copy.failure or self._checked(copy, end)
            is_useless = bool(known.reason) or copy.is_damaged(known)
            if copy.way is CopyWay.LOAD and is_useless and copy.failure is None:
                copy.failure = known
                self._copies.begin(BlockCopy(end.number, CopyWay.CLEAR, copy.group, copy.block_id))
            else:
                del self._under_way[end.number]
                self._finish(copy, known)
        return bool(ends)

    def _finish(self, copy: rank.Copy, end: CopyEnd) -> None:
        with self._handoff.core() as core:
            core.finished(copy, end)

    def _checked(self, copy: rank.Copy, end: CopyEnd) -> CopyEnd:
        """The end as `RankCore.finished` takes it."""
        if end.diverged:
            end = end._replace(checksum=self._slot_sum(copy))
        if not (end.reason or self._is_current(copy)):
            return CopyEnd(end.number, reason=rank.SLOT_REUSED)
        return end

    def _slot_sum(self, copy: rank.Copy) -> bytes:
        assert self._arena is not None
        slot = self._arena.array[copy.begin :][: self._copies.block_bytes(copy.group)]
        return checksum_of(copy.header, [slot.data])

    def _is_current(self, copy: rank.Copy) -> bool:
        assert self._generations is not None
        (generation,) = self._generations.generations(np.array([copy.slot], np.uint32))
        return int(generation) == copy.generation

    def _populate(self) -> bool:
        """Map the next part of the arena ahead of use. False when there is nothing to map."""
        if self._link.closed or self._arena is None:
            return False
        begin = self._populated
        try:
            self._populated = self._arena.populate(begin, begin + POPULATE_BYTES)
        except OSError:
            # No memory for page tables now: the copies will fault them in, one by one.
            self._populated = self._arena.size_bytes
            return False
        return self._populated > begin

"""Requests that wait for blocks of prefill nodes: what they expect, when they are looked at, and
how their waiting ends.

    PushExpect ─▶ keys that no tier holds ─▶ all came, a word, the deadline, no news ─▶ PushEnd

Rules. 1: every PushExpect has one PushEnd, at its deadline or soon after the last news. 2: looks,
ends and grants from one tick to the next have a budget; the loop makes the next tick at once when
it is spent, and answers lookups in between.

Does not cover: room for the blocks and their arrival (`grants`), leases that wait (`arrivals`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.agenda import LOOK_COST, LOOK_COST_MAX, Groups
from kvstore.engine.memory.table import Keys, Rows, each
from kvstore.engine.moves.arrivals import NOBODY, Arrivals, Flags, Name, flags_of
from kvstore.engine.moves.files import Files
from kvstore.engine.moves.pushes import EVER, LOOK_NS, PushSide, PushSides, SideName, Transfers
from kvstore.engine.sessions.owners import Asker, Connection
from kvstore.engine.state import State
from kvstore.engine.why.reasons import PushTimes
from kvstore.errors import ProtocolError
from kvstore.types import PAGE_BYTES, Counts
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.messages import PushEnd, PushExpect, keys_array

# ── expectations ──────────────────────────────────────────────────────────────────────────────────
# What requests wait for, by the names under which it is looked for; their news and limits, and
# whose turn it is to get room. An event looks at expectations that it names, that are due, or whose
# turn it is, and never at all of them. Limits hold per process, whatever its engines are called.

EXPECTS_MAX: Final = 4096
"""Expectations of one process: of 1,024 waiting requests with four KV cache groups."""
KEYS_MAX: Final = 1 << 18
"""Keys that one process expects, 40 MiB: 1,024 prompts of 4,096 tokens in blocks of 16."""
ALL_EXPECTS_MAX: Final = 8 * EXPECTS_MAX
ALL_KEYS_MAX: Final = 4 * KEYS_MAX
STALLED_NS: Final = 10 * NS_PER_S
STALLED_GAPS: Final = 3
"""A transfer is given up after STALLED_NS without news, or after this many times its longest gap
between two news if that is longer: its prefill engine or node hangs. News are blocks of the
transfer, and messages that its engine stores blocks of other requests: it has a queue. While news
come, only the deadline counts."""
ASLEEP_NS: Final = NS_PER_S
"""If two ticks, which come ten times a second, are further apart than this, the node was suspended
and could not receive news: gaps are counted anew."""


ProcessName = tuple[str, ...]
Lane = tuple[ProcessName, str, int]
"""(process, prefill node, size of an extent in pages): expectations of one lane get room in
order."""


class PushNews(msgspec.Struct, gc=False):
    """Times of news of one transfer, shared by its expectations, or of one engine (blocks of any of
    its transfers)."""

    last_ns: int
    """Time of the last news; at first, the time of the PushExpect."""
    is_first: bool = True
    gap_ns: int = 0
    """Longest gap between two news, after the first ones."""

    def hear(self, now_ns: int) -> None:
        """Record that news came at this time."""
        if not self.is_first:
            self.gap_ns = max(self.gap_ns, now_ns - self.last_ns)
        self.is_first, self.last_ns = False, now_ns

    @property
    def stalled_ns(self) -> int:
        """Time at which the gap since the last news will be too long."""
        return self.last_ns + max(STALLED_NS, STALLED_GAPS * self.gap_ns)


class Expectation(PushSide, eq=False, gc=False):
    """A PushExpect that has not ended. Nothing in it refers back to it: many of them do not slow
    down the garbage collector."""

    number: int
    connection: Connection
    process: ProcessName
    session: int
    message: PushExpect
    asker: Asker
    missing: Keys
    """Keys that no tier held when the PushExpect came."""
    news: PushNews
    """News of the transfer."""
    engine_news: PushNews
    """News of the engine."""
    has_come: NDArray[np.bool_]
    """Flags of the `missing` keys: their blocks were sealed since."""
    is_here: bool
    """Whether its prefill engine is on this node."""
    granted: int = 0
    """Number of leading `missing` keys that were granted room."""

    @property
    def stalled_ns(self) -> int:
        """Time at which the gap without news will be too long. For a request that waits without
        room, news of other blocks of its engine count, too: these make room."""
        own_ns = self.news.stalled_ns
        return max(own_ns, self.engine_news.stalled_ns) if self.has_no_room else own_ns

    @property
    def has_no_room(self) -> bool:
        """Whether it waits for its first part of the landing slab."""
        return not self.granted and not self.is_here

    def stalled_by(self, *, is_up: bool) -> str:
        """Reason to report for an expectation that is stalled. `is_up`: whether a transfer worker
        runs."""
        if not self.has_no_room:
            return "nothing was heard of its prefill for too long"
        if not is_up:
            return "there was no transfer worker for too long"
        return "it got no landing memory for too long: too many transfers, or a small --landing"

    @property
    def engine(self) -> tuple[int, int]:
        """Its decode engine: (connection, session)."""
        return self.connection.id, self.session

    @property
    def transfer(self) -> tuple[int, str, str]:
        """Its transfer: (connection, prefill node, name). Another engine, or a request to another
        node, may use the same name."""
        return self.connection.id, self.message.node, self.message.transfer

    @property
    def names(self) -> tuple[SideName, ...]:
        """Names under which it is found: its transfer; (connection, name), as in PushCancel; and,
        if the prefill is on this node, (tenant, name)."""
        transfer = self.message.transfer
        here = ((self.asker.tenant, transfer),) if self.is_here else ()
        return self.transfer, (self.connection.id, transfer), *here

    @property
    def pages(self) -> int:
        """Size of an extent in pages: the shards of a block, one behind the other."""
        return -(-sum(self.asker.block_bytes) // PAGE_BYTES)

    @property
    def lane(self) -> Lane:
        """Its lane: expectations of one lane get room in order, and lanes take turns."""
        return self.process, self.message.node, self.pages


class ExpectedKeys(dict[tuple[int, ...], Counts[bytes]]):
    """Expected keys, counted by expectation, grouped by the scopes (all shards) in which they are
    wanted."""

    def add(self, scopes: tuple[int, ...], keys: Keys) -> None:
        """Count one more expectation that wants these keys in these scopes."""
        if len(keys):
            self.setdefault(scopes, Counts()).update(each(keys))

    def remove(self, scopes: tuple[int, ...], keys: Keys) -> None:
        """Count one expectation less that wants these keys in these scopes."""
        its = self.get(scopes, Counts[bytes]())
        for key in each(keys):
            its.drop(key)
        if not its:
            self.pop(scopes, None)


# ── awaited ───────────────────────────────────────────────────────────────────────────────────────


class Awaited(PushSides[Expectation]):
    """Expectations of this node's engines: blocks that prefill nodes are to push to them."""

    def __init__(
        self, state: State, files: Files, arrivals: Arrivals, transfers: Transfers
    ) -> None:
        super().__init__(state, files, arrivals, transfers)
        self.engines = Groups[tuple[int, int], Expectation]()
        """Expectations that have not ended, by engine."""
        self.queue = Groups[Lane, Expectation]()
        """Those that wait for room, by lane."""
        self._ended: deque[Expectation] = deque()
        """Expectations whose PushEnd is not sent yet."""
        self._counted = Groups[ProcessName, Expectation]()
        """Expectations by process, with ended ones until their PushEnd."""
        self._keys: Counter[ProcessName] = Counter()
        """Number of their keys."""
        self._coming = ExpectedKeys()
        self.is_up = False
        """Whether there is a transfer worker."""
        self._ticked_ns = 0
        self.revoke: Callable[[Expectation], None] = lambda _: None
        """Called with an expectation that has ended: revokes its grants."""

    # ── what is expected ─────────────────────────────────────────────────────────────────────────

    def expect(self, connection: Connection, message: PushExpect) -> None:
        """A request waits for these blocks to be pushed. Raises ProtocolError."""
        state, owner = self._state, connection.owner
        keys = keys_array(message.keys)
        if len(set(each(keys))) != len(keys):
            raise ProtocolError("a PushExpect that names a key twice")
        process, times = state.slots.pins.process(connection.id).name, PushTimes(state.now_ns)
        if refusal := self._refusal(connection, message, process, len(keys)):
            self._tell(connection, message, refusal, times, (0, 0, 0))
            return
        asker = owner.group_of(message).asker
        rows = state.residency.table.find_all(asker.scopes, keys)
        held = np.logical_and.reduce(self._files.there(rows), axis=0)
        missing = keys[~held].copy()
        expect = Expectation(
            *(next(state.numbers), connection, process, owner.open_session, message, asker),
            *(missing, PushNews(state.now_ns), PushNews(state.now_ns)),
            has_come=np.zeros(len(missing), bool),
            is_here=message.node == state.config.node,
            times=times,
            until_ns=state.now_ns + message.deadline_ms * NS_PER_MS,
        )
        self._add(expect)
        if not len(missing):
            self.end(expect, "")
        elif not expect.is_here and expect.pages * PAGE_BYTES > state.config.landing_bytes:
            why = "no block fits this node's landing memory: give it --peer-listen and --landing"
            self.end(expect, why)
        elif expect.is_here:
            self.budget -= LOOK_COST
            self._look_at(expect)
        else:
            self.queue.add(expect, expect.lane)
            self._look_later(expect)

    def _refusal(
        self, connection: Connection, message: PushExpect, process: ProcessName, count: int
    ) -> str:
        state, owner = self._state, connection.owner
        if not owner.open_session:
            return "the engine has no session"
        if state.is_off(*owner.group_of(message).asker.address):
            return "its space is switched off"
        if self._counted.count(process) >= EXPECTS_MAX or self._counted.total >= ALL_EXPECTS_MAX:
            return "too many transfers are expected"
        if self._keys[process] + count > KEYS_MAX or self._keys.total() + count > ALL_KEYS_MAX:
            return "too many blocks are expected"
        return ""

    def _add(self, its: Expectation) -> None:
        """Add an expectation, which shares the news of its transfer and of its engine with earlier
        ones."""
        part, other = self.named.first(its.transfer), self.engines.first(its.engine)
        if part is not None:
            part.news.last_ns = max(part.news.last_ns, its.news.last_ns)
            its.news = part.news
        if other is not None:
            its.engine_news = other.engine_news
        self._counted.add(its, its.process)
        self._keys[its.process] += len(its.missing)
        self.engines.add(its, its.engine)
        self.named.add(its, *its.names)
        self._coming.add(its.asker.scopes, its.missing)

    def get_room(self, its: Expectation, count: int) -> None:
        """Record that the next `count` blocks were granted room. From the first grant on, only news
        of the transfer itself count."""
        if not its.granted:
            its.times.granted_ns = self._state.now_ns
            its.news.last_ns = max(its.news.last_ns, its.engine_news.last_ns)
        its.granted += count
        self._look_later(its)
        if its.granted == len(its.missing):
            self.queue.remove(its, its.lane)

    def cancel(self, connection: Connection, transfer: str) -> None:
        """End the expectations of this transfer: the engine does not wait for it any more."""
        for its in self.named.of((connection.id, transfer)):
            self.end(its, "it was cancelled")

    def coming(self, scopes: Sequence[int], keys: Keys, rows: Rows, name: Name) -> Flags:
        """Flags [S][n] of the keys that are expected (`arrivals.Source`)."""
        del rows, name
        return flags_of(self._coming, scopes, keys)

    def run(self, asker: Asker, keys: Keys) -> int:
        """How many leading keys are in dram or expected; 0 if none of them is expected."""
        is_any = bool(self._coming) and len(keys) > 0
        return self._arrivals.on_their_way(asker.scopes, keys, NOBODY, by=[self]) if is_any else 0

    def end(self, expect: Expectation, reason: str) -> None:
        """End an expectation; `reason` is empty if all its blocks came. PushEnd follows within the
        budget."""
        if expect.reason is None:
            expect.reason = reason
            self.engines.remove(expect, expect.engine)
            self.named.remove(expect, *expect.names)
            self.agenda.drop(expect)
            self.queue.remove(expect, expect.lane)
            self._ended.append(expect)
            self._tell_ends()

    def _tell_ends(self) -> None:
        """Send PushEnd for expectations that have ended, and revoke their grants, as far as the
        budget goes."""
        state = self._state
        while self._ended and self.budget > 0:
            expect = self._ended.popleft()
            message, pushed = expect.message, int(expect.has_come.sum())
            keys, reason = keys_array(message.keys), expect.reason or ""
            self.budget -= LOOK_COST + len(keys)
            self._counted.remove(expect, expect.process)
            self._keys -= Counter({expect.process: len(expect.missing)})
            self.settle_blocks(expect, slice(None))
            self._arrivals.unwatch((0, expect.number))
            self.revoke(expect)
            self._arrivals.settle_keys(expect.missing)
            # Some may have been evicted since they came.
            rows = state.residency.table.find_all(expect.asker.scopes, keys)
            here = np.logical_and.reduce(self._files.there(rows), axis=0)
            counts = int(here.sum()), len(keys) - len(expect.missing), pushed
            self._tell(expect.connection, message, reason, expect.times, counts)

    def _tell(
        self,
        connection: Connection,
        message: PushExpect,
        reason: str,
        times: PushTimes,
        counts: tuple[int, int, int],
    ) -> None:
        """Send PushEnd and report the push. `counts`: blocks that are here, that were here before,
        and that were pushed."""
        state, transfer, first = self._state, message.transfer, message.first_block
        blocks, held, pushed = counts
        state.send(connection, PushEnd(transfer, message.group, first, blocks, reason))
        self._report(
            *(connection.owner.key[0], transfer, times),
            side="decode",
            node=message.node,
            group=message.group,
            first_block=first,
            blocks=len(keys_array(message.keys)),
            held=held,
            pushed=pushed,
            reason=reason,
        )

    def settle_blocks(self, expect: Expectation, places: slice | NDArray[np.intp]) -> None:
        """Mark the blocks at these places of `missing` as arrived, or as not expected any more."""
        left = expect.missing[places][~expect.has_come[places]]
        self._coming.remove(expect.asker.scopes, left)
        expect.has_come[places] = True

    def void(self, tenant: str | None, space: bytes | None) -> None:
        """End expectations of blocks that are cleared. None: of any tenant or space."""
        for its in self:
            if its.asker.is_of(tenant, space):
                self.end(its, "cleared meanwhile")

    # ── looks ────────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """End expectations of engines that left, and look at those that are due, with a fresh
        budget."""
        now_ns, engines = self._state.now_ns, self.engines
        asleep_ns, self._ticked_ns = now_ns - self._ticked_ns, now_ns
        if asleep_ns > ASLEEP_NS:
            for its in self:
                its.news.last_ns = its.engine_news.last_ns = now_ns
        self.budget = LOOK_COST_MAX
        self._tell_ends()
        for engine in list(engines):
            first = engines.first(engine)
            if first is not None and first.connection.owner.open_session != first.session:
                for its in engines.of(engine):
                    self.end(its, "the engine's session has ended")
        self._look_at_due()

    def _look_at(self, expect: Expectation) -> None:
        """End an expectation whose deadline has passed or that is stalled, or set the time of its
        next look."""
        now_ns = self._state.now_ns
        look_ns = self._look_here(expect) if expect.is_here else expect.until_ns
        if now_ns >= expect.until_ns:
            self.end(expect, "its deadline has passed")
        elif now_ns >= expect.stalled_ns:
            self.end(expect, expect.stalled_by(is_up=self.is_up))
        elif expect.reason is None:
            self._look_later(expect, look_ns)

    def _look_later(self, expect: Expectation, look_ns: int = EVER) -> None:
        due_ns = min(look_ns, expect.until_ns, expect.stalled_ns)
        self.agenda.put(expect, due_ns)

    def _look_here(self, expect: Expectation) -> int:
        """Look at an expectation whose prefill is on this node, too: its blocks need only be
        sealed. Returns when to look again."""
        state, address = self._state, expect.asker.address
        _, node, transfer = expect.transfer
        patience = self._transfers.patience(address, transfer, node, expect.times.since_ns)
        is_over = state.now_ns >= patience.until_ns
        if expect.is_called or is_over:
            self._find_here(expect)
        if self._transfers.computed_ns(address[0], transfer) > expect.news.last_ns:
            expect.news.hear(state.now_ns)
        if is_over:
            self.end(expect, patience.reason)
        return min(patience.until_ns, state.now_ns + LOOK_NS)

    def _find_here(self, expect: Expectation) -> None:
        left = np.flatnonzero(~expect.has_come)
        self.budget -= len(left)
        rows = self._state.residency.table.find_all(expect.asker.scopes, expect.missing[left])
        here = np.logical_and.reduce(self._state.residency.words(rows) >= 0, axis=0)
        if here.any():
            expect.news.hear(self._state.now_ns)
        self.settle_blocks(expect, left[here])
        expect.is_called = False
        if here.all():
            self.end(expect, "")
        else:
            rest = expect.missing[left[~here]]
            self._arrivals.watch((0, expect.number), rest, lambda: self._call(expect))

    def _call(self, expect: Expectation) -> Keys:
        """Have dram searched for its blocks at the next look, which is due now. Returns no keys:
        until then none is waited for."""
        expect.is_called = True
        self.agenda.put(expect, self._state.now_ns)
        return expect.missing[:0]

    def __iter__(self) -> Iterator[Expectation]:
        return (its for engine in list(self.engines) for its in self.engines.of(engine))

    def __len__(self) -> int:
        return self.engines.total

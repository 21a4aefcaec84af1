"""Blocks that a prefill node pushes here: room for them, their arrival, the requests that wait.

    PushExpect ─▶ keys that no tier holds ─AskPush─▶ Pushed ─Land─▶ Landed ─▶ sealed, leases wake
                            └─ granted in chain order, as the landing slab has room …  ─▶ PushEnd

Rules. 1: an extent is free again when its bytes were copied out, by the peer's word that nothing
was begun, or by the death of our transfer worker. 2: words of another epoch, about unknown grants,
or about blocks that have landed before are dropped. 3: a block is sealed when its copy was
verified. 4: every PushExpect has one PushEnd, at its deadline or soon after the last news. 5: a
peer is granted part of the slab by as many grants as it takes; an engine may not expect `too_many`.

Does not cover: extents (`landing`), seals (`intake`), leases that wait (`arrivals`), the other
node (`pushes` there).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.events import (
    AskPush,
    Land,
    Landed,
    LandingUp,
    Pushed,
    PushOver,
    RecycleMover,
    RevokePush,
    Staged,
)
from kvstore.engine.memory.policy.port import Words
from kvstore.engine.memory.slots import PEER_WRITER
from kvstore.engine.memory.table import NO_ROWS, Keys, Rows, each
from kvstore.engine.moves.arrivals import Arrivals
from kvstore.engine.moves.expected import (
    ASLEEP_NS,
    Expectation,
    ExpectedKeys,
    GrantedRoom,
    LandingCopy,
    too_many,
)
from kvstore.engine.moves.files import Files
from kvstore.engine.moves.intake import Copies, Intake
from kvstore.engine.moves.jobs import Jobs
from kvstore.engine.moves.landing import LANDING_SHARE, Extents, LandingSlab
from kvstore.engine.moves.pushes import ASKS_MAX, NEWS_NS
from kvstore.engine.moves.transfers import Transfers
from kvstore.engine.sessions.askers import Asker
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.sessions.runs import leading
from kvstore.engine.state import State
from kvstore.engine.witness import PushReport, PushTimes
from kvstore.types import PAGE_BYTES
from kvstore.units import MIB, NS_PER_MS, NS_PER_S
from kvstore.wire.messages import checksums_array, keys_array
from kvstore.wire.pushes import PushEnd, PushExpect

GRANT_BYTES: Final = 64 * MIB
LOOK_KEYS_MAX: Final = 1 << 14  # in a tick, of prefills on this node: two milliseconds
REVOKED_NS: Final = 5 * NS_PER_S
"""A peer that did not answer a revocation for so long may write for ever."""
LIMBO_NS: Final = 5 * NS_PER_S
"""After that our transfer worker is killed."""


class Grants:
    """Everything this node expects of prefill nodes."""

    def __init__(
        self,
        state: State,
        files: Files,
        intake: Intake,
        arrivals: Arrivals,
        transfers: Transfers,
        numbers: Iterator[int],
    ) -> None:
        config = state.config
        self._state, self._files, self._intake = state, files, intake
        self._arrivals, self._transfers, self._numbers = arrivals, transfers, numbers
        begin_bytes = config.arena_bytes - config.landing_bytes
        self._slab = LandingSlab(begin_bytes=begin_bytes, size_bytes=config.landing_bytes)
        self._epoch = 0
        self._expects: list[Expectation] = []
        """In the order of their turns."""
        self._grants: dict[int, GrantedRoom] = {}
        self._pages_of: Counter[str] = Counter()
        """Pages granted, by peer."""
        self._landings: Jobs[LandingCopy] = Jobs(numbers, arena_bytes=config.arena_bytes)
        self._limbo: list[tuple[Extents, int]] = []
        self._limbo_ns = self._ticked_ns = 0  # since when there is limbo; when time passed before
        self._coming = ExpectedKeys()

    # ── what is expected ─────────────────────────────────────────────────────────────────────────

    def expect(self, connection: Connection, message: PushExpect) -> str:
        """A request will be sent these blocks. Returns why the connection must end, or nothing."""
        state, owner = self._state, connection.owner
        if owner.open_session and message.group >= len(owner.groups):
            return "a PushExpect of a KV cache group that its engine does not have"
        keys = keys_array(message.keys)
        if len(set(each(keys))) != len(keys):
            return "a PushExpect that names a key twice"
        if refusal := self._refusal(connection, len(keys)):
            self._say_end(connection, message, 0, refusal)
            return ""
        asker = owner.groups[message.group].asker
        rows = state.residency.find_all(asker.scopes, keys)
        held = np.logical_and.reduce(self._files.there(rows), axis=0)
        missing = keys[~held].copy()
        until_ns = state.now_ns + message.deadline_ms * NS_PER_MS
        times, has_come = PushTimes(state.now_ns), np.zeros(len(missing), dtype=bool)
        its = (connection, owner.open_session, message, asker, missing, times, until_ns)
        is_here = message.node == state.config.node
        expect = Expectation(*its, state.now_ns, has_come, is_here)
        self._expects.append(expect)
        self._coming.add(asker.scopes, missing)
        self._go_on(expect)
        return ""

    def _refusal(self, connection: Connection, count: int) -> str:
        state, owner = self._state, connection.owner
        if not owner.open_session:
            return "the engine has no session"
        if state.is_off(*owner.groups[0].asker.address):
            return "its space is switched off"
        return too_many(self._expects, connection, count)

    def cancel(self, connection: Connection, transfer: str) -> None:
        """Nobody waits for this transfer any more."""
        for its in list(self._expects):
            if its.connection is connection and its.message.transfer == transfer:
                self._end(its, "it was cancelled")

    def coming(self, scopes: Sequence[int], keys: Keys, rows: Rows) -> NDArray[np.bool_]:
        """Flags of the keys that are expected (`arrivals.Source`)."""
        del rows
        return self._coming.flags(scopes, keys)

    def run(self, asker: Asker, keys: Keys) -> int:
        """How many leading keys are in dram or expected; 0 if none of them is expected."""
        if not self._coming or not len(keys):
            return 0
        rows = self._state.residency.find_all(asker.scopes, keys)
        coming = self.coming(asker.scopes, keys, NO_ROWS)
        count = leading((self._state.residency.words(rows) >= 0) | coming)
        return count if coming[:, :count].any() else 0

    # ── grants ───────────────────────────────────────────────────────────────────────────────────

    def _go_on(self, expect: Expectation) -> None:
        """Grant more room to an expectation, or end it."""
        if expect.has_come.all():
            self._end(expect, "")
        elif expect.is_here:
            self._wait_here(expect)
        elif _pages(expect.asker) > self._slab.page_count:
            why = "no block fits this node's landing memory: give it --peer-listen and --landing"
            self._end(expect, why)
        elif self._epoch:
            while self._grant(expect):
                pass

    def _wait_here(self, expect: Expectation) -> None:
        """Prefill on this node, too: its blocks need only be sealed, which a tick looks for."""
        expect.looked_ns = self._state.now_ns
        left = np.flatnonzero(~expect.has_come)
        rows = self._state.residency.find_all(expect.asker.scopes, expect.missing[left])
        here = np.logical_and.reduce(self._state.residency.words(rows) >= 0, axis=0)
        address, since_ns = expect.asker.address, expect.times.since_ns
        _, node, transfer = expect.transfer
        if here.any() or self._transfers.computed_ns(address[0], transfer) > expect.news_ns:
            expect.hear(self._state.now_ns)  # each looks for itself
        self._come(expect, left[here])
        if expect.has_come.all():
            self._end(expect, "")
            return
        patience = self._transfers.patience(address, transfer, node, since_ns)
        if self._state.now_ns >= patience.until_ns:
            self._end(expect, patience.reason)

    def _grant(self, expect: Expectation) -> bool:
        """Grant the next blocks room, if there is any."""
        state, asker, message = self._state, expect.asker, expect.message
        rest = expect.missing[expect.granted :]
        if sum(its.node == message.node for its in self._grants.values()) >= ASKS_MAX:
            return False  # it refuses more of them
        block_bytes = sum(asker.block_bytes)
        pages, held = _pages(asker), self._pages_of[message.node]
        share = max(self._slab.page_count // LANDING_SHARE, 0 if held else pages) - held
        count = min(len(rest), share // pages, max(1, GRANT_BYTES // block_bytes))
        extents = self._slab.take(pages, count)
        count = len(extents)
        if not count:
            return False
        number = next(self._numbers)
        its = (number, expect, expect.granted, rest[:count], extents, pages)
        self._grants[number] = GrantedRoom(*its, np.zeros(count, dtype=bool))
        self._pages_of[message.node] += count * pages
        expect.granted += count
        expect.times.granted_ns = expect.times.granted_ns or state.now_ns
        state.say(
            AskPush(
                grant=number,
                epoch=self._epoch,
                node=message.node,
                transfer=message.transfer,
                tenant=asker.tenant,
                space=asker.space,
                keys=rest[:count].tobytes(),
                extents=extents.astype("<u4").tobytes(),
                block_bytes=block_bytes,
                deadline_ms=max(1, (expect.until_ns - state.now_ns) // NS_PER_MS),
                cause=state.cause,
            )
        )
        return True

    def _end(self, expect: Expectation, reason: str) -> None:
        """Wait no more for an expectation: say so, and take its grants back."""
        if expect.reason is not None:
            return
        expect.reason = reason
        self._expects.remove(expect)
        message, pushed = expect.message, int(expect.has_come.sum())
        keys = keys_array(message.keys)
        self._come(expect, slice(None))
        for number, granted in self._grants.items():
            if granted.expect is expect:
                granted.revoked_ns = self._state.now_ns
                self._state.say(RevokePush(number, granted.node, self._state.cause))
        self._arrivals.news(expect.missing)
        self._state.counters.pushes_cut_short += bool(reason)
        # Some may have been evicted since they came.
        rows = self._state.residency.find_all(expect.asker.scopes, keys)
        here = np.logical_and.reduce(self._files.there(rows), axis=0)
        self._say_end(expect.connection, message, int(here.sum()), reason)
        report = PushReport(
            side="decode",
            node=message.node,
            group=message.group,
            first_block=message.first_block,
            blocks=len(keys),
            held=len(keys) - len(expect.missing),
            pushed=pushed,
            reason=reason,
            **expect.times.as_us(self._state.now_ns),
        )
        self._state.witness.pushed(expect.asker.tenant, message.transfer, report)

    def _come(self, expect: Expectation, places: slice | NDArray[np.intp]) -> None:
        """These are here, or not expected any more."""
        left = expect.missing[places][~expect.has_come[places]]
        self._coming.remove(expect.asker.scopes, left)
        expect.has_come[places] = True

    def _say_end(
        self, connection: Connection, message: PushExpect, blocks: int, reason: str
    ) -> None:
        end = PushEnd(message.transfer, message.group, message.first_block, blocks, reason)
        self._state.send(connection, end)

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────

    def pushed(self, event: Pushed) -> None:
        """A peer says that blocks are in their extents: copy them out."""
        granted, shards = self._grants.get(event.grant), len(event.shards)
        if not shards and granted is not None and event.epoch == self._epoch:
            if granted.expect.may_hear(self._state.now_ns, NEWS_NS // 2):
                self._news(granted.expect, is_block=False)
            return
        count = len(event.checksums) // (16 * shards) if shards else 0
        places = slice(event.first, event.first + count)
        if (
            granted is None
            or event.epoch != self._epoch
            or not 0 < count <= len(granted.keys) - event.first
            or granted.has_landed[places].any()
        ):
            self._state.counters.push_words_dropped += 1
            return
        granted.has_landed[places] = True
        expect = granted.expect
        expect.times.moved(self._state.now_ns)
        self._news(expect, is_block=True)
        if expect.reason is None and sum(event.block_bytes) != sum(expect.asker.block_bytes):
            self._end(expect, f"node {granted.node} pushes blocks of another size")
        if expect.reason is not None:
            self._leave(granted, places)
            return
        self._land(event, granted, places)

    def _news(self, expect: Expectation, *, is_block: bool) -> None:
        """News of the other parts and groups of this transfer, too. A block, after which there will
        be room, is news of what the same engine waits for without room."""
        for its in self._expects:
            has_no_room = its.connection is expect.connection and its.has_no_room
            if its.transfer == expect.transfer or (is_block and has_no_room):
                its.hear(self._state.now_ns)

    def _land(self, event: Pushed, granted: GrantedRoom, places: slice) -> None:
        state, expect, asker = self._state, granted.expect, granted.expect.asker
        count = places.stop - places.start
        if self._intake.room_for(asker, asker.slot_sizes, count) < count:
            self._end(expect, "no room in dram")
            self._leave(granted, places)
            return
        columns = self._intake.hold(asker.slot_sizes, count, writer=PEER_WRITER, quota=asker.quota)
        size_bytes = count * sum(asker.slot_sizes)
        granted.copying += count
        landing = LandingCopy(granted, places, columns, size_bytes, state.now_ns)
        job = self._landings.begin(landing)
        words = np.stack(columns, axis=1).reshape(-1)
        state.say(
            Land(
                job=job,
                node=granted.node,
                tenant=asker.tenant,
                space=asker.space,
                keys=granted.keys[places].tobytes(),
                shards=asker.shards,
                block_bytes=asker.block_bytes,
                head_bytes=asker.head_bytes,
                slots=state.slots.slots_of(words),
                sources=event.shards,
                source_bytes=event.block_bytes,
                checksums=event.checksums,
                extents=granted.extents[places].astype("<u4").tobytes(),
                cause=state.cause,
            )
        )

    def landed(self, event: Landed) -> None:
        """Blocks were copied out and verified: seal the good ones that did not come otherwise."""
        state, job = self._state, self._landings.end(event.job)
        granted, asker = job.granted, job.granted.expect.asker
        expect, keys = granted.expect, granted.keys[job.places]
        good = np.frombuffer(event.good, dtype=np.bool_)
        count = int(good.sum())
        state.counters.push_blocks_damaged += len(good) - count
        if job.is_void or state.is_off(*asker.address):
            good = np.zeros(len(keys), dtype=bool)
        if expect.reason is None and good.all():
            begin = granted.first + job.places.start
            self._come(expect, slice(begin, begin + len(keys)))
        checksums = checksums_array(event.checksums).reshape(len(keys), len(asker.shards), 2)
        for column, words in enumerate(job.columns):
            scope = state.residency.scope(asker.tenant, asker.space, asker.shards[column])
            copies = Copies(scope, keys, words, checksums[:, column])
            self._intake.fetch(copies, good, block_bytes=asker.block_bytes[column])
        state.counters.push_blocks_landed += int(good.sum())
        expect.times.sealed_ns = state.now_ns
        state.witness.landed(job.columns[0])
        took_ns = state.now_ns - job.since_ns
        state.say(Staged("push_seal", granted.node, took_ns, job.size_bytes, state.cause))
        granted.copying -= len(keys)
        if not good.all():
            self._end(expect, "cleared meanwhile" if job.is_void else "damaged on its way")
        self._leave(granted, job.places)
        if expect.reason is None:
            self._go_on(expect)
        self._next()

    def _leave(self, granted: GrantedRoom, places: slice) -> None:
        """These extents are free; and the grant ends with its last one."""
        self._slab.free(granted.extents[places], granted.pages)
        self._owe(granted, places.stop - places.start)
        if granted.has_landed.all() and not granted.copying:
            self._grants.pop(granted.number, None)

    def _owe(self, granted: GrantedRoom, count: int) -> None:
        """So many extents fewer are this peer's."""
        self._pages_of[granted.node] -= count * granted.pages
        if not self._pages_of[granted.node]:
            del self._pages_of[granted.node]

    def over(self, event: PushOver) -> None:
        """The peer's last word about a grant, or its session is lost."""
        granted = self._grants.get(event.grant)
        if granted is None or event.epoch != self._epoch:
            return
        lost, reason = int((~granted.has_landed).sum()), event.reason
        self._give_up(granted, is_quiet=event.is_quiet)
        if lost and not reason:
            reason = f"node {granted.node} says that all is pushed, and {lost} blocks are not here"
        if granted.expect.reason is None and reason:
            self._end(granted.expect, reason)
        self._next()

    def _give_up(self, granted: GrantedRoom, *, is_quiet: bool) -> None:
        """Nothing more comes for a grant. Not `is_quiet`: not known to whom the extents belong."""
        left = granted.extents[~granted.has_landed]
        self._owe(granted, len(left))
        if is_quiet:
            self._slab.free(left, granted.pages)
        elif len(left):
            self._limbo_ns = self._limbo_ns or self._state.now_ns
            self._limbo.append((left, granted.pages))
        granted.has_landed[:] = True
        if not granted.copying:
            self._grants.pop(granted.number, None)

    def _next(self) -> None:
        """Room came back: those that wait for it go on, one after the other."""
        for its in list(self._expects):
            if its.reason is None and not its.is_here and its.granted < len(its.missing):
                self._go_on(its)

    # ── the transfer worker ──────────────────────────────────────────────────────────────────────

    def up(self, event: LandingUp) -> None:
        """Our transfer worker is another one, or dead: nothing writes for the one before."""
        for extents, pages in self._limbo:
            self._slab.free(extents, pages)
        self._limbo, self._limbo_ns = [], 0
        for granted in list(self._grants.values()):
            self._give_up(granted, is_quiet=True)
            self._end(granted.expect, "the transfer worker of the decode node ended")
        self._epoch = event.epoch
        self._next()

    def tick(self) -> None:
        """Time passed: deadlines, engines that left, peers that do not answer, limbo."""
        state, budget = self._state, LOOK_KEYS_MAX
        asleep_ns, self._ticked_ns = state.now_ns - self._ticked_ns, state.now_ns
        if asleep_ns > ASLEEP_NS:
            for expect in self._expects:
                expect.news_ns = state.now_ns
        for expect in sorted(self._expects, key=lambda its: its.looked_ns):
            if expect.connection.owner.open_session != expect.session:
                self._end(expect, "the engine's session has ended")
            elif state.now_ns >= expect.until_ns:
                self._end(expect, "its deadline has passed")
            elif expect.is_stalled(state.now_ns):
                self._end(expect, expect.stalled_by(is_up=bool(self._epoch)))
            elif not expect.is_here or budget > 0:
                budget -= expect.is_here * int((~expect.has_come).sum())
                self._go_on(expect)
        for granted in list(self._grants.values()):
            if granted.revoked_ns and state.now_ns >= granted.revoked_ns + REVOKED_NS:
                self._give_up(granted, is_quiet=False)
        if self._limbo_ns and state.now_ns >= self._limbo_ns + LIMBO_NS:
            self._limbo_ns = state.now_ns
            why = "a peer may write to the landing memory, and nobody knows until when"
            state.say(RecycleMover(why, state.cause))

    def void(self, tenant: str | None, space: bytes | None) -> None:
        """Blocks of these are cleared: none of them comes back."""
        for its in list(self._expects):
            if tenant in (None, its.asker.tenant) and space in (None, its.asker.space):
                self._end(its, "cleared meanwhile")
        for job in self._landings.values():
            asker = job.granted.expect.asker
            if tenant in (None, asker.tenant) and space in (None, asker.space):
                job.is_void = True

    # ── looking in ───────────────────────────────────────────────────────────────────────────────

    def landing_bytes(self) -> dict[str, int]:
        """Bytes of the landing slab by state."""
        limbo = sum(len(extents) * pages for extents, pages in self._limbo)
        free = self._slab.free_pages
        pages = {"free": free, "granted": self._slab.page_count - free - limbo, "limbo": limbo}
        return {state: count * PAGE_BYTES for state, count in pages.items()}

    def __len__(self) -> int:
        return len(self._expects)

    def landing_words(self) -> Words:
        """Slots that are being copied into."""
        return self._landings.words()

    def check(self) -> None:
        """Raises AssertionError when a bound or the bookkeeping is broken. For tests."""
        self._landings.check()
        held, owed = [], Counter[str]()
        for its in self._grants.values():
            held.append((its.extents[~its.has_landed], its.pages))
            owed[its.node] += len(held[-1][0]) * its.pages
        for job in self._landings.values():
            held.append((job.granted.extents[job.places], job.granted.pages))
            owed[job.granted.node] += len(held[-1][0]) * job.granted.pages
        self._slab.check(held + self._limbo)
        assert +owed == self._pages_of, "what peers are granted is miscounted"
        told = ExpectedKeys()
        for expect in self._expects:
            assert expect.reason is None, "an expectation that has ended waits"
            told.add(expect.asker.scopes, expect.missing[~expect.has_come])
        assert told == self._coming, "what is expected is miscounted"


def _pages(asker: Asker) -> int:
    """Size of an extent: the shards of a block, one behind the other."""
    return -(-sum(asker.block_bytes) // PAGE_BYTES)

"""Blocks that a prefill node pushes here: room for them, and their arrival.

    PushExpect ─▶ keys that no tier holds ─AskPush─▶ Pushed ─Land─▶ Landed ─▶ sealed, leases wake
                            └─ granted in chain order, as the landing slab has room …

Rules. 1: an extent is free again when its bytes were copied out, by the peer's word that nothing
was begun, or by the death of our transfer worker. 2: words of another epoch, about unknown grants,
or about blocks that have landed before are dropped. 3: a block is sealed when its copy was
verified. 4: a peer is granted part of the slab by as many grants as it takes.

Covers: the landing slab, grants of it, copies out of it. Does not cover: requests that wait, and
whose turn it is (`awaited`), seals (`intake`), the other node (`pushes` there).
"""

from __future__ import annotations

import itertools
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine import events
from kvstore.engine.agenda import LOOK_COST, Agenda, Groups
from kvstore.engine.memory.slots import PEER_WRITER
from kvstore.engine.memory.table import Keys
from kvstore.engine.moves.intake import Incoming, Intake
from kvstore.engine.moves.jobs import Jobs
from kvstore.engine.moves.pushes import ASKS_MAX
from kvstore.engine.sessions.awaited import Awaited, Expectation
from kvstore.engine.state import State
from kvstore.types import PAGE_BYTES
from kvstore.units import MIB, NS_PER_MS, NS_PER_S
from kvstore.wire.peers import Pushed, PushGrant, PushOver
from kvstore.wire.record import scopes_of

# ── landing slab ──────────────────────────────────────────────────────────────────────────────────
# Extents of the arena's end, the only memory that other nodes write to (ADR 12).
#
#     free ─take─▶ granted ─▶ landed ─▶ free          a write was done, its bytes are copied out
#                     ├─ nothing was begun ─▶ free
#                     └─▶ limbo ─▶ free               by the death of our transfer worker
#
# Free pages are kept as runs, in bins of doubling size, so that no `take` looks at the slab.

PEER_SHARE = 2
"""A peer may be granted at most one part in this many of the slab."""

Extents = NDArray[np.int64]
"""First page of each extent, counted from the start of the arena."""


class LandingSlab:
    """Free and taken pages of the landing slab."""

    def __init__(self, *, begin_bytes: int, size_bytes: int) -> None:
        self._first = begin_bytes // PAGE_BYTES
        self.page_count = size_bytes // PAGE_BYTES
        """Size of the slab in pages."""
        self._is_free = np.zeros(self.page_count, dtype=bool)
        self._end_of: dict[int, int] = {}
        """Page behind each free run, by its first one; no two runs touch."""
        self._begin_of: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(self.page_count.bit_length() + 1)]
        """First pages of free runs by size: bin n has the runs of 2^(n-1) to 2^n - 1 pages."""
        if size_bytes:
            self._free_run(0, self.page_count)

    @property
    def free_pages(self) -> int:
        """Number of pages that no peer may write to."""
        return int(self._is_free.sum())

    def take(self, pages: int, count: int) -> Extents:
        """Take up to `count` extents of `pages` pages each, contiguous; an empty array if there is
        no room for one."""
        begin = self._fitting(pages, count) if count > 0 else None
        if begin is None:
            return np.zeros(0, dtype=np.int64)
        behind = self._remove(begin)
        end = begin + min(count, (behind - begin) // pages) * pages
        self._is_free[begin:end] = False
        if end < behind:
            self._add(end, behind)
        return np.arange(self._first + begin, self._first + end, pages, dtype=np.int64)

    def _fitting(self, pages: int, count: int) -> int | None:
        """First page of a free run with room for all extents, or else of one in the largest bin
        that has room for one extent; None: no run has."""
        all_fit = min((pages * count).bit_length(), len(self._bins)) + 1
        one_fits = min(pages.bit_length(), len(self._bins)) + 1
        for its in [*self._bins[all_fit:], *reversed(self._bins[one_fits:all_fit])]:
            if its:
                return next(reversed(its))
        last = self._bins[one_fits - 1] if one_fits <= len(self._bins) else {}
        return next((begin for begin in last if self._end_of[begin] - begin >= pages), None)

    def free(self, extents: Extents, pages: int) -> None:
        """Free these extents of `pages` pages each, which nothing writes to or reads any more."""
        at = np.sort(extents) - self._first
        edges = np.flatnonzero(np.diff(at) != pages) + 1
        for run in np.split(at, edges) if len(at) else ():
            self._free_run(int(run[0]), int(run[-1]) + pages)

    def _free_run(self, begin: int, end: int) -> None:
        assert not self._is_free[begin:end].any(), "an extent is free twice"
        self._is_free[begin:end] = True
        if begin in self._begin_of:
            begin = self._begin_of[begin]
            self._remove(begin)
        if end in self._end_of:
            end = self._remove(end)
        self._add(begin, end)

    def _add(self, begin: int, end: int) -> None:
        self._end_of[begin], self._begin_of[end] = end, begin
        self._bins[(end - begin).bit_length()][begin] = None

    def _remove(self, begin: int) -> int:
        """Forget a run; returns the page behind it."""
        end = self._end_of.pop(begin)
        del self._begin_of[end], self._bins[(end - begin).bit_length()][begin]
        return end


# ── grants ────────────────────────────────────────────────────────────────────────────────────────

GRANT_BYTES: Final = 64 * MIB
MISSES_MAX: Final = 32
"""Most turns in a row without room, each two microseconds or, of a peer with many grants, ten; the
next event that may have freed some begins anew."""
REVOKED_NS: Final = 5 * NS_PER_S
"""A peer that does not answer a revocation for this long may write for ever: its extents go to
limbo."""
LIMBO_NS: Final = 5 * NS_PER_S
"""Extents stay in limbo for this long; then our transfer worker is killed."""


class GrantedRoom(msgspec.Struct, eq=False):
    """Extents for some blocks of an expectation."""

    number: int
    expect: Expectation
    first: int
    """Place of its first key among the expectation's `missing` keys."""
    keys: Keys
    extents: Extents
    pages: int
    has_landed: NDArray[np.bool_]
    held: int
    """Extents that are not free again: those without a block yet, and those being copied out."""

    @property
    def node(self) -> str:
        """The peer that may write."""
        return self.expect.message.node


class _Landing(Incoming):
    """Blocks that are copied out of the landing slab; their slots are PEER_WRITER's."""

    granted: GrantedRoom
    places: slice
    since_ns: int


class Grants:
    """Grants of this node's landing slab to prefill nodes, and the blocks that arrive by them."""

    def __init__(self, state: State, intake: Intake, awaited: Awaited) -> None:
        config = state.config
        self._state, self._intake, self._awaited = state, intake, awaited
        awaited.revoke = self._revoke
        begin_bytes = config.arena_bytes - config.landing_bytes
        self._slab = LandingSlab(begin_bytes=begin_bytes, size_bytes=config.landing_bytes)
        self._epoch = 0
        self._grants: dict[int, GrantedRoom] = {}
        self._grants_of = Groups[str | Expectation, GrantedRoom]()
        """Grants by peer, and by expectation."""
        self._revoked = Agenda[int]()
        """Revoked grants, at the time when each counts as unanswered."""
        self._landings: Jobs[_Landing] = Jobs(state.numbers, config.arena_bytes)
        self._limbo: list[tuple[Extents, int]] = []
        self._limbo_ns = 0
        """Time since which some extents are in limbo; 0: none are."""

    # ── grants ───────────────────────────────────────────────────────────────────────────────────

    def give_room(self) -> None:
        """Grant the landing slab's free room to expectations, in turn, because some may have been
        freed."""
        misses, awaited = 0, self._awaited
        queue = awaited.queue
        while self._epoch and awaited.budget > 0 and misses < min(MISSES_MAX, len(queue)):
            expect = queue.turn()
            misses = 0 if self._grant(expect, self._room_of(expect)) else misses + 1

    def _room_of(self, expect: Expectation) -> int:
        """Number of extents that the expectation's prefill node may still be granted, by its
        share."""
        node = expect.message.node
        if self._grants_of.count(node) >= ASKS_MAX:
            return 0  # it refuses more of them
        held = sum(its.held * its.pages for its in self._grants_of.of(node))
        share = max(self._slab.page_count // PEER_SHARE, 0 if held else expect.pages)
        return max(0, share - held) // expect.pages

    def _grant(self, expect: Expectation, room: int) -> bool:
        """Grant extents for the next blocks of an expectation, at most `room`. Returns False if
        there is no room."""
        state, asker, message = self._state, expect.asker, expect.message
        rest = expect.missing[expect.granted :]
        block_bytes, pages = sum(asker.block_bytes), expect.pages
        count = min(len(rest), room, max(1, GRANT_BYTES // block_bytes))
        extents = self._slab.take(pages, count)
        count = len(extents)
        if not count:
            return False
        self._awaited.budget -= LOOK_COST
        number = next(state.numbers)
        its = (number, expect, expect.granted, rest[:count], extents, pages)
        granted = self._grants[number] = GrantedRoom(*its, np.zeros(count, dtype=bool), count)
        self._grants_of.add(granted, message.node, expect)
        self._awaited.get_room(expect, count)
        grant = PushGrant(
            grant=number,
            epoch=self._epoch,
            transfer=message.transfer,
            tenant=asker.tenant,
            space=asker.space,
            keys=rest[:count].tobytes(),
            extents=extents.astype("<u4").tobytes(),
            block_bytes=block_bytes,
            deadline_ms=max(1, (expect.until_ns - state.now_ns) // NS_PER_MS),
        )
        state.say(events.AskPush(message.node, grant))
        return True

    def _revoke(self, expect: Expectation) -> None:
        """Revoke the grants of an expectation that has ended."""
        for granted in self._grants_of.of(expect):
            self._revoked.put(granted.number, self._state.now_ns + REVOKED_NS)
            self._state.say(events.RevokePush(granted.number))

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────

    def pushed(self, event: Pushed) -> None:
        """A peer reports that blocks are in their extents: copy them out. A report without blocks
        is news."""
        granted, shards = self._grants.get(event.grant), len(event.shards)
        if not shards and granted is not None and event.epoch == self._epoch:
            granted.expect.news.hear(self._state.now_ns)
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
        for news in (expect.news, expect.engine_news):
            news.hear(self._state.now_ns)
        if expect.reason is None and sum(event.block_bytes) != sum(expect.asker.block_bytes):
            self._awaited.end(expect, f"node {granted.node} pushes blocks of another size")
        if expect.reason is not None:
            self._leave(granted, places)
            return
        self._land(event, granted, places)

    def _land(self, event: Pushed, granted: GrantedRoom, places: slice) -> None:
        state, expect, asker = self._state, granted.expect, granted.expect.asker
        count = places.stop - places.start
        if self._intake.room_for(asker, count) < count:
            self._awaited.end(expect, "no room in dram")
            self._leave(granted, places)
            return
        columns = self._intake.hold(asker, count, itertools.repeat(PEER_WRITER))
        keys = granted.keys[places]
        its = granted, places, state.now_ns
        landing = _Landing(*its, asker=asker, keys=keys, columns=columns)
        job = self._landings.begin(landing)
        state.say(
            events.Land(
                *(job, granted.node, *landing.order(state.slots)),
                scopes_of(*asker.address, event.shards, event.block_bytes),
                event.checksums,
                granted.extents[places].astype("<u4").tobytes(),
            )
        )

    def landed(self, event: events.Landed) -> None:
        """Blocks were copied out and verified: seal the good ones that did not come otherwise."""
        state, job = self._state, self._landings.end(event.job)
        granted, expect, keys = job.granted, job.granted.expect, job.keys
        state.counters.push_blocks_damaged += event.good.count(0)
        good = self._intake.fetch(job, event.good, event.checksums)
        if expect.reason is None and good.all():
            begin = granted.first + job.places.start
            self._awaited.settle_blocks(expect, slice(begin, begin + len(keys)))
        state.counters.push_blocks_landed += int(good.sum())
        expect.times.sealed_ns = state.now_ns
        took_ns = state.now_ns - job.since_ns
        state.say(events.Staged("push_seal", granted.node, took_ns, job.size_bytes))
        if not good.all():
            self._awaited.end(expect, "cleared meanwhile" if job.is_void else "damaged on its way")
        elif expect.has_come.all():
            self._awaited.end(expect, "")
        self._leave(granted, job.places)
        self.give_room()

    def _leave(self, granted: GrantedRoom, places: slice) -> None:
        """Free the extents of these places of a grant."""
        self._slab.free(granted.extents[places], granted.pages)
        self._owe(granted, places.stop - places.start)

    def _owe(self, granted: GrantedRoom, count: int) -> None:
        """Subtract `count` extents from those that the peer holds; the grant ends with its last
        one."""
        granted.held -= count
        if not granted.held:
            del self._grants[granted.number]
            self._revoked.drop(granted.number)
            self._grants_of.remove(granted, granted.node, granted.expect)

    def grant_ended(self, event: PushOver) -> None:
        """The peer's last word about a grant, or its session is lost."""
        granted = self._grants.get(event.grant)
        if granted is None or event.epoch != self._epoch:
            return
        lost, reason = int((~granted.has_landed).sum()), event.reason
        self._give_up(granted, is_quiet=event.is_quiet)
        if lost and not reason:
            reason = f"node {granted.node} says that all is pushed, and {lost} blocks are not here"
        if granted.expect.reason is None and reason:
            self._awaited.end(granted.expect, reason)
        self.give_room()

    def _give_up(self, granted: GrantedRoom, *, is_quiet: bool) -> None:
        """Close a grant for which nothing more comes. Without `is_quiet` the peer may still write:
        the extents go to limbo."""
        left = granted.extents[~granted.has_landed]
        granted.has_landed[:] = True
        self._owe(granted, len(left))
        if is_quiet:
            self._slab.free(left, granted.pages)
        elif len(left):
            self._limbo_ns = self._limbo_ns or self._state.now_ns
            self._limbo.append((left, granted.pages))

    # ── the transfer worker ──────────────────────────────────────────────────────────────────────

    def transfer_worker_changed(self, event: events.LandingUp) -> None:
        """The transfer worker was started or has ended, so nothing writes for an earlier one: free
        limbo and end all grants."""
        for extents, pages in self._limbo:
            self._slab.free(extents, pages)
        self._limbo, self._limbo_ns = [], 0
        for granted in list(self._grants.values()):
            self._give_up(granted, is_quiet=True)
            self._awaited.end(granted.expect, "the transfer worker of the decode node ended")
        self._epoch, self._awaited.is_up = event.epoch, bool(event.epoch)
        self.give_room()

    def tick(self) -> None:
        """Give up grants whose revocation the peer did not answer, give room, and have the transfer
        worker killed when extents stay in limbo."""
        state = self._state
        while (number := self._revoked.take(state.now_ns)) is not None:
            self._give_up(self._grants[number], is_quiet=False)
        self.give_room()
        if self._limbo_ns and state.now_ns >= self._limbo_ns + LIMBO_NS:
            self._limbo_ns = state.now_ns
            why = "a peer may write to the landing memory, and nobody knows until when"
            state.say(events.RecycleTransferWorker(why))

    def void(self, tenant: str | None, space: bytes | None) -> None:
        """End expectations of cleared blocks, and drop their blocks that are being copied. None: of
        any tenant or space."""
        self._awaited.void(tenant, space)
        for job in self._landings.values():
            job.is_void |= job.asker.is_of(tenant, space)

    # ── looking in ───────────────────────────────────────────────────────────────────────────────

    def landing_bytes(self) -> dict[tuple[str], int]:
        """Bytes of the landing slab, by (state,): free, granted or limbo."""
        limbo = sum(len(extents) * pages for extents, pages in self._limbo)
        free = self._slab.free_pages
        pages = {"free": free, "granted": self._slab.page_count - free - limbo, "limbo": limbo}
        return {(state,): count * PAGE_BYTES for state, count in pages.items()}

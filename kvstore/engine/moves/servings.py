"""Blocks that another node reads here: pinned during the read, then checked for changes.

    ServeAsk ─pin the leading run─▶ ServeAnswer … the peer reads … GiveBack ─▶ GivenBack(intact)
      └─ blocks on disk are promoted first, for WAIT_NS at most

Rules. 1: a serving is a lease of a session of its own, negative, so that time ends it like any
other. 2: a peer only reads: giving a slot up early is never unsafe, and `intact` shows it to the
peer. 3: a block is intact if its slot and generation at the end are those of the start. 4: a peer's
share of pins (`shares`) limits the run.

Does not cover: access control (`kvstore.peers`), blocks fetched from others (`fetches`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from kvstore.engine.events import AnswerPeer, PeerAsked, PeerGone
from kvstore.engine.memory.residency import LOOKED_UP_MAX, Run, covers, leading, leading_run, run_of
from kvstore.engine.memory.table import Keys, Rows
from kvstore.engine.moves.arrivals import Arrivals, Name
from kvstore.engine.moves.files import REPEATED, Files
from kvstore.engine.sessions.owners import Asker, asker
from kvstore.engine.state import State
from kvstore.types import Shard, SpaceId
from kvstore.units import NS_PER_S
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, keys_array
from kvstore.wire.peers import GiveBack, GivenBack, ServeAnswer, ServeAsk

# ── servings ──────────────────────────────────────────────────────────────────────────────────────

WAIT_NS = NS_PER_S
"""Longest wait of a serving for blocks from disk; the peer waits twice as long for the answer."""
WAITING_MAX = 64
"""Most servings of one peer that wait for the disk."""
WRITE_LEASE: Final = 1 << 63
"""Leases of writes to peers are numbered from here on; a serving's number is below it."""


class _Waiting(msgspec.Struct, frozen=True):
    """A serving that is answered when its blocks on disk have come."""

    name: Name
    asker: Asker
    keys: Keys
    until_ns: int


class Servings:
    """All servings of a node. Those that were answered are leases of (-peer, serving)."""

    def __init__(self, state: State, files: Files, arrivals: Arrivals) -> None:
        self._state = state
        self._files = files
        self._arrivals = arrivals
        self._waiting: dict[Name, _Waiting] = {}

    def serve(self, event: PeerAsked[ServeAsk]) -> None:
        """Pin the longest run of these keys, in the shards of any parallel size that was stored
        here, and answer; wait for the disk first, if needed."""
        state, ask, name = self._state, event.its, (-event.peer, event.its.serving)
        keys = keys_array(ask.keys)[:KEYS_PER_DATAGRAM_MAX]
        found = self.best((ask.tenant, ask.space), keys) if self._may_serve(name) else None
        if found is None:
            self._say_nothing(name)
            return
        asker, rows = found
        count = rows.shape[1]
        keys = keys[:count]
        run = run_of(state.residency, rows)
        state.touch(run)  # before anything makes room for what is promoted
        if run.repeats():
            self._say_nothing(name)
        elif run.count == count:
            self._answer(name, asker, run)
        elif self._files.promote(asker, keys[run.count :], held=run.rows(), name=name) == REPEATED:
            self._say_nothing(name)
        else:  # answered at once where dram has no room to read into
            until_ns = state.now_ns + WAIT_NS
            waiting = self._waiting[name] = _Waiting(name, asker, keys, until_ns)
            self._arrivals.look(name, lambda: self._look(waiting))

    def _may_serve(self, name: Name) -> bool:
        count = sum(session == name[0] for session, _ in self._waiting)
        is_new = count < WAITING_MAX and name not in self._waiting
        return is_new and self._state.leases.may_add(*name)

    def best(self, address: tuple[str, SpaceId], keys: Keys) -> tuple[Asker, Rows] | None:
        """The shards that have the longest run of a (tenant, space) as an asker, and rows [S][n] of
        that run; None: there is no block to serve."""
        state = self._state
        known = state.known.get(address)
        if known is None or state.is_off(*address) or not len(keys):
            return None
        scopes = state.residency.shards(*address)
        found = covers(frozenset(scopes), (known.space.layer_count, known.space.kv_head_count))
        # Each shard is looked into once, and of many fewer keys than were asked for.
        place = {shard: n for n, shard in enumerate({s: None for cover in found for s in cover})}
        keys = keys[: LOOKED_UP_MAX // max(len(place), 1)]
        rows = state.residency.table.find_all([scopes[shard] for shard in place], keys)
        there, in_dram = self._files.there(rows), state.residency.words(rows) >= 0

        def length(cover: tuple[Shard, ...]) -> tuple[int, int]:
            its = [place[shard] for shard in cover]
            return leading(there[its]), leading(in_dram[its])

        best = max(found, key=length, default=())
        count = length(best)[0] if best else 0
        if not count:
            return None
        columns = [(shard, scopes[shard]) for shard in best]
        return asker(address, known.space, columns), rows[[place[shard] for shard in best], :count]

    def _answer(self, name: Name, asker: Asker, run: Run) -> None:
        state, session = self._state, name[0]
        account = state.slots.pins.join_node(-session)
        run, _ = state.leasable(session, account, run)
        words, shards = run.words(), len(asker.scopes)
        if not run.count:
            self._say_nothing(name)
            return
        state.leases.add(*name, words, state.now_ns, account, shards)
        state.touch(run)
        state.counters.served_blocks += run.count
        state.counters.served_bytes += run.count * sum(asker.block_bytes)
        slots = state.slots.slots_of(words).astype("<u4").tobytes()
        checksums = run.every_checksum(state.residency).astype("<u8").tobytes()
        answer = ServeAnswer(name[1], asker.shards, asker.block_bytes, slots, checksums)
        state.say(AnswerPeer(-session, answer))

    def _say_nothing(self, name: Name) -> None:
        self._state.say(AnswerPeer(-name[0], ServeAnswer(name[1])))

    def _look(self, waiting: _Waiting) -> Keys:
        """Answer a waiting serving whose blocks came or whose time is up. Returns the keys that it
        still waits for, none if it was answered."""
        state, name = self._state, waiting.name
        run = leading_run(state.residency, waiting.asker.scopes, waiting.keys)
        rest = waiting.keys[run.count :]
        is_coming = self._arrivals.on_their_way(waiting.asker.scopes, rest, name) > 0
        if len(rest) and is_coming and state.now_ns < waiting.until_ns:
            return rest
        del self._waiting[name]
        # It may have been switched off, or evicted for others, meanwhile.
        is_off = state.is_off(waiting.asker.tenant, waiting.asker.space)
        if run.count and not is_off and state.leases.may_add(*name):
            self._answer(name, waiting.asker, run)
        else:
            self._say_nothing(name)
        return rest[:0]

    def returned(self, event: PeerAsked[GiveBack]) -> None:
        """The peer has read a serving: answer which of its blocks stayed unchanged, and release its
        lease."""
        state = self._state
        lease = state.leases.get(-event.peer, event.its.serving)
        intact = np.zeros(0, dtype=bool) if lease is None else lease.intact(state.slots)
        state.leases.release(-event.peer, [event.its.serving])
        state.credits_due |= state.slots.any_starved
        state.counters.served_blocks_changed += int((~intact).sum())
        state.say(AnswerPeer(event.peer, GivenBack(event.its.serving, intact.tobytes())))

    def gone(self, event: PeerGone) -> None:
        """The connection to a peer has ended, so the peer reads no more, or drops the bytes that it
        read: end its servings."""
        self._state.leases.end_session(-event.peer)
        self._state.slots.pins.leave(-event.peer)
        for name in [name for name in self._waiting if name[0] == -event.peer]:
            self._arrivals.unwatch(name)
            del self._waiting[name]
        self._state.credits_due = True

    def tick(self, expired: Iterable[Name]) -> None:
        """Answer servings that waited too long for the disk, and count those among the leases that
        have expired: `returned` then answers that no block stayed."""
        now_ns = self._state.now_ns
        for name in [name for name, its in self._waiting.items() if its.until_ns <= now_ns]:
            self._arrivals.unwatch(name)
            self._look(self._waiting[name])
        late = sum(session < 0 and lease < WRITE_LEASE for session, lease in expired)
        self._state.counters.servings_expired += late

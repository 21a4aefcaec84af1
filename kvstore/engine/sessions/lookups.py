"""Lookups: blocks that a request can load, pinned by a lease; hints about its keys, from its engine
or, before that, from a router.

    LeaseAsk ──▶ the longest run in dram, pinned; the rest begun to be brought ──▶ LeaseReply
    Hint, PrepareBlocks ──▶ touched in dram, read from disk, asked of other nodes ──▶ what is here

Rules of PrepareBlocks, by which a router wants blocks before an engine asks for them. 1: nothing is
pinned and nobody waits: what comes is a block like any other. 2: blocks come in the shards of an
engine of their space that is attached here; without one nothing is brought. 3: what is brought
ahead takes half of the room in motion at most (`Asker.is_ahead`) and, over time, a share of the
arena: a flood neither holds up engines nor turns the cache over.

Does not cover: leases that grow (`moves.arrivals`), callers of PrepareBlocks and their limits
(`kvstore.peers.preparer`).
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.events import BlocksPrepared, PrepareBlocks
from kvstore.engine.memory.policies import prints
from kvstore.engine.memory.residency import LOOKED_UP_MAX, Run, leading, leading_run, run_of
from kvstore.engine.memory.table import Keys
from kvstore.engine.moves.arrivals import Arrivals, Name, Wait
from kvstore.engine.moves.fetches import Fetches
from kvstore.engine.moves.files import REPEATED, Files
from kvstore.engine.moves.hbm import HbmCopies
from kvstore.engine.sessions.awaited import Awaited
from kvstore.engine.sessions.owners import A_ROUTER, Asker, Connection, OwnerGroup
from kvstore.engine.state import State
from kvstore.engine.why.curve import BlockEvent
from kvstore.engine.why.findings import Finding, RangeReport
from kvstore.engine.why.reasons import Reason, Wanted
from kvstore.errors import ProtocolError
from kvstore.types import Bucket, SpaceId
from kvstore.units import NS_PER_S
from kvstore.wire import messages as wire
from kvstore.wire.peers import PrepareReply

AHEAD_SHARE = 2
"""At most one part in this many of the arena may be brought ahead at once …"""
AHEAD_NS = 30 * NS_PER_S
"""… and as much again in each such time."""


class Lookups:
    """Answers LeaseAsk, Hint and PrepareBlocks."""

    def __init__(
        self,
        state: State,
        files: Files,
        fetches: Fetches,
        awaited: Awaited,
        arrivals: Arrivals,
        hbm: HbmCopies | None,
    ) -> None:
        self._state = state
        self._files = files
        self._fetches = fetches
        self._awaited = awaited
        self._arrivals = arrivals
        self._hbm = hbm
        self._ahead = Bucket(state.config.arena_bytes // AHEAD_SHARE, AHEAD_NS)
        """Bytes that may be brought ahead."""

    def lease(self, connection: Connection, ask: wire.LeaseAsk) -> None:
        """Pin the longest run in dram and answer. Raises ProtocolError."""
        state, session = self._state, connection.owner.open_session
        state.counters.lease_asks += 1
        if not session:
            self._serve_nothing(connection, ask)
            return
        group = connection.owner.group_of(ask)
        if state.is_off(*group.asker.address):
            self._refuse(connection, ask, group.asker)
        else:
            self._lease(connection, session, ask, group)

    def _lease(
        self, connection: Connection, session: int, ask: wire.LeaseAsk, group: OwnerGroup
    ) -> None:
        state, asker = self._state, group.asker
        shards = len(asker.scopes)
        # With many shards a full ask would be answered with more than fits a datagram.
        keys = wire.keys_array(ask.keys)[: wire.KEYS_PER_DATAGRAM_MAX // shards]
        if not state.leases.may_add(session, ask.lease):
            keys = keys[:0]
        run = leading_run(state.residency, asker.scopes, keys)
        if run.repeats():
            raise ProtocolError("a LeaseAsk that names a key twice")
        account = state.slots.pins.account(connection.id)
        run, refused = state.leasable(session, account, run)
        words = run.words()
        rest = keys[run.count :]
        state.touch(run)
        if run.count:
            # Before anything makes room for what is promoted.
            held = state.leases.add(session, ask.lease, words, state.now_ns, account, shards)
        # Nothing is brought behind a block that may not be pinned.
        name, wants = (session, ask.lease), keys[:0] if refused else rest
        promoting, estimate, wanted = self._bring(asker, wants, run, name)
        if promoting == REPEATED:
            raise ProtocolError("a LeaseAsk that names a key twice")
        origins, leased = self._arrivals.leased(asker, run, words, asked=ask.with_checksums)
        reply = wire.LeaseReply(
            lease=ask.lease,
            ttl_ms=state.config.lease_ttl_ms,
            promoting=promoting,
            promoting_ms=estimate[0],
            promoting_from=estimate[1],
            **leased,
        )
        state.send(connection, reply)
        if self._hbm is not None:
            self._hbm.leased(group, run)
        if not len(keys):
            return
        # Other groups have the same tokens: their blocks take room and count for nothing.
        seen = BlockEvent.NAMED if ask.group else BlockEvent.ASKED
        state.curve.see(seen, asker, keys, state.paces.of(*asker.address).compute_ns_per_token)
        finding = Finding(connection.owner.key, asker.address, asker.scopes, state.now_ns)
        finding.take(origins)
        finding.leave(run, rest)
        finding.held, finding.promoting, finding.refused = run.count, promoting, (0, refused)
        # Other nodes are asked for what lies behind what comes from disk.
        finding.searched = wanted.search
        finding.search_begin = promoting - wanted.coming - wanted.at
        state.trail.looked_up(connection, ask.lease, finding)
        if promoting:
            if not run.count:
                held = state.leases.add(session, ask.lease, words, state.now_ns, account, shards)
            wait = (connection, ask.lease, held, asker, rest, ask.with_checksums, promoting)
            bring = functools.partial(self._files.promote, asker, name=name)
            self._arrivals.wait(Wait(*wait, bring))

    def _bring(
        self, asker: Asker, keys: Keys, run: Run, name: Name
    ) -> tuple[int, tuple[int, str], Wanted]:
        """Begin to bring blocks that are not in dram for the lease of this name: leading ones from
        disk, later ones from other nodes. Returns (number on their way or possibly so,
        (estimated time in ms, source) of those that take longest, result of asking other nodes)."""
        pushed = self._awaited.run(asker, keys)
        estimate = (0, wire.PUSHED if pushed else "")
        if not len(keys):
            return pushed, estimate, Wanted()
        promoting = self._files.promote(asker, keys, held=run.rows(), name=name)
        if promoting == REPEATED:
            return REPEATED, estimate, Wanted()
        if promoting:
            estimate = self._files.estimate_ms(asker, keys[:promoting], name), ""
        # What is pushed is not asked for elsewhere.
        promoting += self._awaited.run(asker, keys[promoting:]) if promoting else pushed
        wanted = self._fetches.want(asker, keys[promoting:])
        if wanted.coming:
            estimate = max(estimate, self._fetches.estimate(asker, keys[promoting:], wanted))
        return promoting + wanted.coming, estimate, wanted

    def _refuse(self, connection: Connection, ask: wire.LeaseAsk, asker: Asker) -> None:
        """Answer with no block because the space is switched off, and record that for `explain`."""
        state, keys = self._state, wire.keys_array(ask.keys)
        self._serve_nothing(connection, ask)
        if len(keys):
            finding = Finding(connection.owner.key, asker.address, asker.scopes, state.now_ns)
            finding.rest = [RangeReport(0, len(keys), "", Reason.SWITCHED_OFF)]
            state.trail.looked_up(connection, ask.lease, finding)

    def _serve_nothing(self, connection: Connection, ask: wire.LeaseAsk) -> None:
        ttl_ms = self._state.config.lease_ttl_ms
        nothing = wire.LeaseReply(lease=ask.lease, ttl_ms=ttl_ms, slots=b"", generations=b"")
        self._state.send(connection, nothing)

    def hint(self, connection: Connection, hint: wire.Hint) -> None:
        """Touch the named blocks that are here, begin to bring others, and reply which keys are
        known, up to LOOKED_UP_MAX. Raises ProtocolError."""
        state, owner, keys = self._state, connection.owner, wire.keys_array(hint.keys)
        present: NDArray[np.bool_] = np.zeros(len(keys), dtype=bool)
        if owner.open_session:
            asker = owner.group_of(hint).asker
            keys = keys[: LOOKED_UP_MAX // len(asker.scopes) // 8 * 8]
            present = present[: len(keys)]
            if not state.is_off(*asker.address):
                present = self._hint(asker, keys)
        bits = np.packbits(present, bitorder="little").tobytes()
        reply = wire.HintReply(hint.request, bits, hint.group, hint.first_block)
        state.send(connection, reply)

    def _hint(self, asker: Asker, keys: Keys) -> NDArray[np.bool_]:
        """Flags of the keys that are known in every shard."""
        rows = self._state.residency.table.find_all(asker.scopes, keys)
        present: NDArray[np.bool_] = np.logical_and.reduce(rows >= 0, axis=0)
        self._use(asker, keys, self._state.residency.words(rows))
        self._state.curve.see(BlockEvent.NAMED, asker, keys)
        columns = zip(asker.scopes, rows, asker.block_bytes, strict=True)
        for scope, its, block_bytes in columns:
            self._files.writes.asked_again(scope, its, block_bytes=block_bytes)
        self._files.promote(asker, keys)
        held = len(keys) if bool(present.all()) else int(np.argmin(present))
        held += self._awaited.run(asker, keys[held:])
        self._fetches.want(asker, keys[held:])
        return present

    def _use(self, asker: Asker, keys: Keys, words: NDArray[np.int64]) -> None:
        """Record that a request uses these blocks; words are [S][n]. Shards of one pool are handled
        together."""
        sizes, scopes = np.array(asker.slot_sizes), np.array(asker.scopes)
        for size in dict.fromkeys(asker.slot_sizes):
            its = np.flatnonzero(sizes == size)
            named = np.stack([prints(scope, keys) for scope in scopes[its].tolist()], axis=1)
            pool = self._state.slots.pools[size]
            self._state.slots.use(pool, words[its].T.reshape(-1), named.reshape(-1))

    # ── ahead of engines ─────────────────────────────────────────────────────────────────────────

    def prepare(self, event: PrepareBlocks) -> None:
        """Begin to bring the blocks, and answer with what was begun."""
        state, its = self._state, event.its
        asker = self._asker_ahead((its.tenant, its.space), its.engine)
        if asker is None:
            refused = "no engine of this space is attached here, or the space is switched off"
            reply = PrepareReply(refused=refused)
        elif state.slots.any_starved:
            reply = PrepareReply(refused="memory is short here: blocks in use leave no room")
        else:
            keys = wire.keys_array(its.keys)[: wire.KEYS_PER_DATAGRAM_MAX]
            reply = self._bring_ahead(asker, keys[: LOOKED_UP_MAX // len(asker.scopes)])
        state.counters.prepares += 1
        state.counters.prepared_blocks += reply.reading + reply.sought
        state.say(BlocksPrepared(event.ask, reply))

    def _asker_ahead(self, address: tuple[str, SpaceId], engine: str) -> Asker | None:
        """The asker for blocks of a (tenant, space): a group of an attached engine, `engine` if
        possible. None: no such engine is attached, or the space is off."""
        if self._state.is_off(*address):
            return None
        able = [
            (group.owner.key[1] != engine, group.asker)
            for group in self._state.open_groups()
            if group.asker.address == address
        ]
        if not able:
            return None
        _, chosen = min(able, key=lambda each: each[0])
        # Its own parts of bounded resources stay the engine's.
        return msgspec.structs.replace(chosen, engine=A_ROUTER, title=A_ROUTER, is_ahead=True)

    def _bring_ahead(self, asker: Asker, keys: Keys) -> PrepareReply:
        state = self._state
        rows = state.residency.table.find_all(asker.scopes, keys)
        run = run_of(state.residency, rows)
        state.touch(run)
        held = leading(rows >= 0)  # in dram, or on disk
        block_bytes = sum(asker.slot_sizes)
        room = max(0, self._ahead.left(state.now_ns)) // block_bytes
        there = self._files.promote(asker, keys[: min(held, run.count + room)])
        if there == REPEATED:
            return PrepareReply(refused="a key is named twice")
        reading = max(0, there - run.count)
        sought = 0
        if run.count + reading == held:  # behind a block that stays on disk, nothing helps
            pushed = held + self._awaited.run(asker, keys[held:])
            sought = self._fetches.want(asker, keys[pushed : pushed + room - reading]).coming
        self._ahead.take((reading + sought) * block_bytes)
        return PrepareReply(run.count, reading, sought)

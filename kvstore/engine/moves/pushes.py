"""Blocks that this node writes to others, as they are sealed here (ADR 39).

    PushAsked ─▶ the next key is in dram ─▶ pinned ─WritePush─▶ Written ─▶ SayPushed …
                    └─ all were pushed, or nothing more will come ─▶ SayPushOver

Rules. 1: blocks go in the order of the grant. 2: the last word of a grant comes when its last write
has ended. 3: a block counts as pushed if its generation was the same after the write. 4: all is
bounded: ASKS_MAX grants of a peer, JOBS_MAX writes of each.

Does not cover: room on the other node (`grants` there), transfers (`transfers`), moving bytes
(`kvstore.peers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.events import (
    PeerGone,
    PushAsked,
    PushRevoked,
    SayPushed,
    SayPushOver,
    WritePush,
    Written,
)
from kvstore.engine.memory.policy.port import Words
from kvstore.engine.memory.table import Keys
from kvstore.engine.moves.arrivals import Arrivals, Name
from kvstore.engine.moves.files import Files
from kvstore.engine.moves.loans import Loans
from kvstore.engine.moves.transfers import Transfers
from kvstore.engine.sessions.askers import Asker
from kvstore.engine.sessions.runs import Run, run_of
from kvstore.engine.state import State
from kvstore.engine.witness import PushReport, PushTimes
from kvstore.types import Shard, SpaceId
from kvstore.units import MIB, NS_PER_MS, NS_PER_S
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, keys_array

WRITE_BYTES: Final = 8 * MIB
"""Size of one write: the other node verifies it while the next one moves."""
JOBS_MAX: Final = 4
"""Writes of one grant at a time."""
ASKS_MAX: Final = 64
"""Grants of one peer."""
NEWS_NS: Final = 2 * NS_PER_S
"""Between two words that the engine computes, while it has no block of the grant yet."""
LEASE: Final = 1 << 63
"""Leases of writes are numbered from here on; a loan's number is below it."""


class _Ask(msgspec.Struct):
    """A grant of another node, which waits for blocks of this one."""

    peer: int
    grant: int
    node: str
    transfer: str
    address: tuple[str, SpaceId]
    keys: Keys
    times: PushTimes
    until_ns: int
    said_ns: int
    """When the other node heard of this grant, the last time."""
    next: int = 0
    """Blocks that were written, or are being."""
    pushed: int = 0
    """Blocks that were reported to the other node."""
    jobs: int = 0
    """Writes under way."""
    reason: str | None = None
    """Why no more is written; None: more may be."""
    is_quiet: bool = True
    """No write failed."""

    @property
    def name(self) -> Name:
        """For arrivals, apart from loans."""
        return -self.peer, LEASE + self.grant


class _PushWrite(msgspec.Struct, frozen=True):
    ask: _Ask
    first: int
    count: int
    shards: tuple[Shard, ...]
    block_bytes: tuple[int, ...]
    words: Words
    generations: NDArray[np.uint64]
    checksums: bytes


class Pushes:
    """All grants of other nodes, by (peer, grant)."""

    def __init__(
        self,
        state: State,
        files: Files,
        arrivals: Arrivals,
        loans: Loans,
        transfers: Transfers,
        numbers: Iterator[int],
    ) -> None:
        self._state, self._files, self._arrivals, self._loans = state, files, arrivals, loans
        self._transfers, self._numbers = transfers, numbers
        self._asks: dict[tuple[int, int], _Ask] = {}
        self._writes: dict[int, _PushWrite] = {}

    def asked(self, event: PushAsked) -> None:
        """Write what is here, and wait for the rest."""
        state, name = self._state, (event.peer, event.grant)
        if name in self._asks or sum(peer == event.peer for peer, _ in self._asks) >= ASKS_MAX:
            self._last_word(event.peer, event.grant, "too many grants of one node", is_quiet=True)
            return
        ask = self._asks[name] = _Ask(
            event.peer,
            event.grant,
            event.node,
            event.transfer,
            (event.tenant, SpaceId(event.space)),
            keys_array(event.keys)[:KEYS_PER_DATAGRAM_MAX].copy(),
            PushTimes(state.now_ns),
            state.now_ns + event.deadline_ms * NS_PER_MS,
            state.now_ns,
        )
        self._go_on(ask)

    def _go_on(self, ask: _Ask) -> None:
        """Write more, and wait for what is not here."""
        rest = self._look(ask)
        if len(rest):
            self._arrivals.watch(ask.name, rest, lambda: self._look(ask))

    def _look(self, ask: _Ask) -> Keys:
        """Write the leading blocks that are here. Returns the keys that are waited for."""
        nothing = ask.keys[:0]
        rest = ask.keys[ask.next :]
        if ask.reason is not None or not len(rest):
            return nothing  # all of it is on its way: nothing is waited for
        found = self._loans.best(ask.address, rest)
        why = self._impatience(ask, is_here=found is not None)
        if found is not None and why is None:
            asker, rows = found
            run = run_of(self._state, rows)
            if run.repeats():
                why = "a grant that names a key twice"
            else:
                if run.count < rows.shape[1]:
                    self._files.promote(asker, rest[run.count : rows.shape[1]], held=run.rows())
                self._write(ask, asker, run)
        if why is not None:
            self._end(ask, why)
            self._settle(ask)
            return nothing
        return ask.keys[ask.next :]

    def _impatience(self, ask: _Ask, *, is_here: bool) -> str | None:
        """Why the grant waits no longer; None: it does."""
        now_ns = self._state.now_ns
        if now_ns >= ask.until_ns:
            return "its deadline has passed"
        if self._state.is_off(*ask.address):
            return "its space is switched off"
        patience = self._transfers.patience(ask.address, ask.transfer, ask.node, ask.times.since_ns)
        # A block that is here is written, whatever became of its transfer.
        waits = now_ns < patience.until_ns or (is_here and patience.until_ns)
        return None if waits else patience.reason

    def _write(self, ask: _Ask, asker: Asker, run: Run) -> None:
        state, shards = self._state, len(asker.shards)
        account = state.slots.pins.join_node(ask.peer)
        per_write = max(1, WRITE_BYTES // sum(asker.block_bytes))
        words, sums, at = run.words(), run.every_checksum(state) if run.count else None, 0
        while at < run.count and ask.jobs < JOBS_MAX:
            piece = words[at * shards : min(at + per_write, run.count) * shards]
            count = state.leases.fitting(-ask.peer, account, piece, shards)
            job = next(self._numbers)
            if not count or not state.leases.may_add(-ask.peer, LEASE + job):
                state.counters.pins_refused += 1
                return
            assert sums is not None
            piece = piece[: count * shards]
            state.leases.add(-ask.peer, LEASE + job, piece, state.now_ns, account, shards)
            self._writes[job] = _PushWrite(
                ask,
                ask.next,
                count,
                asker.shards,
                asker.block_bytes,
                piece,
                state.slots.generation[piece],
                sums[at * shards : (at + count) * shards].astype("<u8").tobytes(),
            )
            state.say(
                WritePush(
                    job=job,
                    peer=ask.peer,
                    grant=ask.grant,
                    first=ask.next,
                    block_bytes=asker.block_bytes,
                    slots=state.slots.slots_of(piece),
                    cause=state.cause,
                )
            )
            ask.next += count
            ask.jobs += 1
            at += count

    def written(self, event: Written) -> None:
        """A write has ended: say which blocks are there."""
        state, write = self._state, self._writes.pop(event.job)
        ask = write.ask
        ask.jobs -= 1
        same = state.slots.generation[write.words] == write.generations
        state.leases.release(-ask.peer, [LEASE + event.job])
        state.credits_due |= state.slots.any_starved
        whole = same.reshape(write.count, -1).all(axis=1)
        count = write.count if whole.all() else int(np.argmin(whole))
        if event.trouble:
            ask.is_quiet = False
            self._end(ask, event.trouble)
        else:
            if count and self._asks.get((ask.peer, ask.grant)) is ask:
                self._say_pushed(ask, write, count)
            if count < write.count:
                self._end(ask, "a block was evicted while it was pushed")
        if ask.reason is None:
            self._go_on(ask)
        self._settle(ask)

    def _say_pushed(self, ask: _Ask, write: _PushWrite, count: int) -> None:
        counters = self._state.counters
        counters.pushed_blocks += count
        ask.pushed += count
        ask.times.moved(self._state.now_ns)
        counters.pushed_bytes += count * sum(write.block_bytes)
        checksums = write.checksums[: count * len(write.shards) * 16]
        self._say(ask, write.first, write.shards, write.block_bytes, checksums)

    def _say_news(self, ask: _Ask) -> None:
        """The engine computes, and has not come to this transfer, or to its next block: a word
        without blocks, so that nobody takes a long queue for an engine that hangs."""
        computed_ns = self._transfers.computed_ns(ask.address[0], ask.transfer)
        is_time = self._state.now_ns >= ask.said_ns + NEWS_NS
        if ask.reason is None and is_time and computed_ns > ask.said_ns:
            self._say(ask, ask.next)

    def _say(
        self,
        ask: _Ask,
        first: int,
        shards: tuple[Shard, ...] = (),
        block_bytes: tuple[int, ...] = (),
        checksums: bytes = b"",
    ) -> None:
        ask.said_ns = self._state.now_ns
        self._state.say(
            SayPushed(
                peer=ask.peer,
                grant=ask.grant,
                first=first,
                shards=shards,
                block_bytes=block_bytes,
                checksums=checksums,
                cause=self._state.cause,
            )
        )

    def revoked(self, event: PushRevoked) -> None:
        """The other node takes its grant back."""
        ask = self._asks.get((event.peer, event.grant))
        if ask is not None:
            self._end(ask, "it was taken back")
            self._settle(ask)

    def gone(self, event: PeerGone) -> None:
        """Its session has ended, and with it its grants; writes under way end by themselves."""
        for ask in [ask for ask in self._asks.values() if ask.peer == event.peer]:
            self._end(ask, "the session has ended")
            del self._asks[ask.peer, ask.grant]

    def tick(self) -> None:
        """Time passed: grants may have waited long enough."""
        for ask in list(self._asks.values()):
            if ask.reason is None:
                self._go_on(ask)
                self._say_news(ask)
            self._settle(ask)

    def _end(self, ask: _Ask, reason: str) -> None:
        if ask.reason is None:
            ask.reason = reason
            self._arrivals.unwatch(ask.name)

    def _settle(self, ask: _Ask) -> None:
        """Say the last word, if nothing is under way."""
        if ask.reason is None and ask.next == len(ask.keys) and not ask.jobs:
            self._end(ask, "")
        name = (ask.peer, ask.grant)
        if ask.reason is None or ask.jobs or self._asks.get(name) is not ask:
            return
        del self._asks[name]
        self._state.counters.pushes_cut_short += bool(ask.reason)
        self._last_word(*name, ask.reason, is_quiet=ask.is_quiet)
        report = PushReport(
            side="prefill",
            node=ask.node,
            blocks=len(ask.keys),
            pushed=ask.pushed,
            reason=ask.reason,
            **ask.times.as_us(self._state.now_ns),
        )
        self._state.witness.pushed(ask.address[0], ask.transfer, report)

    def _last_word(self, peer: int, grant: int, reason: str, *, is_quiet: bool) -> None:
        self._state.say(SayPushOver(peer, grant, reason, is_quiet, self._state.cause))

    def __len__(self) -> int:
        return len(self._asks)

    def sessions(self) -> set[int]:
        """Sessions that hold leases for writes."""
        return {-write.ask.peer for write in self._writes.values()}

    def check(self) -> None:
        """Raises AssertionError when the bookkeeping is broken. For tests."""
        jobs = [write.ask for write in self._writes.values()]
        for name, ask in self._asks.items():
            assert name == (ask.peer, ask.grant)
            assert ask.jobs == sum(its is ask for its in jobs) <= JOBS_MAX, "writes are miscounted"
            assert ask.reason is None or ask.jobs, "a grant that nobody ends"

"""Blocks that another node reads here: pinned while it does, and told whether they stayed.

    Lend ──pin the leading run──▶ Lent … the peer reads … LoanReturned ──▶ LoanEnded(intact)

Rules. 1: a loan is a lease of a session of its own, negative, so that time ends it like any other.
2: a peer only reads: giving a slot up early is never unsafe here, and `intact` tells it so. 3: what
a block was lent with is what it must still be at the end: slot and generation.
Does not cover: who may ask (`kvstore.serve`), what is fetched from others (`fetches`).
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.covers import covers
from kvstore.engine.events import Lend, Lent, LoanEnded, LoanReturned, PeerGone
from kvstore.engine.leases import Lease
from kvstore.engine.policy.port import Words
from kvstore.engine.runs import Run, leading_run
from kvstore.engine.state import State
from kvstore.engine.table import Keys
from kvstore.types import Shard, SpaceId
from kvstore.wire.layout import shard_bytes
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, keys_array


class _Loan(msgspec.Struct, frozen=True):
    held: Lease | None
    """None: nothing was lent."""
    words: Words
    generations: NDArray[np.uint64]
    block_count: int


class Loans:
    """All loans of a node, by (peer, loan)."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._loans: dict[tuple[int, int], _Loan] = {}

    def lend(self, event: Lend) -> None:
        """Pin the longest run that is in dram, whatever the parallel size it was stored with."""
        state = self._state
        name = (event.peer, event.loan)
        keys = keys_array(event.keys)[:KEYS_PER_DATAGRAM_MAX]
        may_add = name not in self._loans and state.leases.may_add(-event.peer, event.loan)
        shards, run = self._best(event, keys if may_add else keys[:0])
        if run.repeats():
            shards, run = (), leading_run(state, (), keys)
        words = run.words()
        sums = np.empty(0, dtype=np.uint64)
        sizes: tuple[int, ...] = ()
        if run.count:
            space = state.known[event.tenant, SpaceId(event.space)].space
            sizes = tuple(shard_bytes(space, shard) for shard in shards)
            held = state.leases.add(-event.peer, event.loan, words, state.now_ns)
            generations = state.slots.generation[words]
            self._loans[name] = _Loan(held, words, generations, run.count)
            for words_of_shard in run.words_by_shard:
                mine = words_of_shard[: run.count]
                state.slots.touch(state.slots.pool_of(int(mine[0])), mine)
            sums = run.every_checksum(state)
            state.counters.loaned_blocks += run.count
        state.say(
            Lent(
                peer=event.peer,
                loan=event.loan,
                shards=shards if run.count else (),
                block_bytes=sizes,
                slots=state.slots.slots_of(words).astype("<u4").tobytes(),
                generations=state.slots.generation[words].astype("<u8").tobytes(),
                checksums=sums.astype("<u8").tobytes(),
                cause=state.cause,
            )
        )

    def _best(self, event: Lend, keys: Keys) -> tuple[tuple[Shard, ...], Run]:
        """The cover with the longest run, and that run."""
        state, space = self._state, SpaceId(event.space)
        nothing: tuple[tuple[Shard, ...], Run] = ((), leading_run(state, (), keys))
        known = state.known.get((event.tenant, space))
        if known is None or state.is_off(event.tenant, space) or not len(keys):
            return nothing
        scopes = {
            shard: number
            for (its_tenant, its_space, shard), number in state.residency.scopes().items()
            if its_tenant == event.tenant and its_space == space
        }
        found = [
            (cover, leading_run(state, [scopes[shard] for shard in cover], keys))
            for cover in covers(
                scopes,
                layer_count=known.space.layer_count,
                head_count=known.space.kv_head_count,
            )
        ]
        return max(found, key=lambda pair: pair[1].count, default=nothing)

    def returned(self, event: LoanReturned) -> None:
        """Say whether what was lent stayed, and let go of it."""
        state = self._state
        loan = self._loans.pop((event.peer, event.loan), None)
        intact = np.zeros(loan.block_count if loan else 0, dtype=bool)
        if loan is not None and state.leases.get(-event.peer, event.loan) is loan.held:
            same = state.slots.generation[loan.words] == loan.generations
            intact = same.reshape(loan.block_count, -1).all(axis=1)
            state.leases.release(-event.peer, [event.loan])
        state.credits_due |= state.slots.any_starved
        state.counters.loan_blocks_changed += int((~intact).sum())
        state.say(
            LoanEnded(peer=event.peer, loan=event.loan, intact=intact.tobytes(), cause=state.cause)
        )

    def gone(self, event: PeerGone) -> None:
        """Nobody reads these any more, or nobody will believe what it read."""
        self._state.leases.end_session(-event.peer)
        self._loans = {name: loan for name, loan in self._loans.items() if name[0] != event.peer}
        self._state.credits_due = True

    def tick(self) -> None:
        """Loans whose lease has run out are forgotten: `returned` tells their peers the same."""
        late = [
            (peer, loan)
            for (peer, loan), found in self._loans.items()
            if self._state.leases.get(-peer, loan) is not found.held
        ]
        for name in late:
            del self._loans[name]
        self._state.counters.loans_expired += len(late)

    def blocks(self) -> dict[tuple[int, int], int]:
        """How many each loan is about."""
        return {name: loan.block_count for name, loan in self._loans.items()}

    def sessions(self) -> set[int]:
        """Sessions that hold leases for peers."""
        return {-peer for peer, _ in self._loans}

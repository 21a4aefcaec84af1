"""Invariants of an engine between two steps; those of moves are in `moves_check`. The cost grows
with the size."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.engine import Engine
from kvstore.engine.memory import journal as journal_module
from kvstore.engine.memory.journal import Journal
from kvstore.engine.memory.policies import Reuse, Words
from kvstore.engine.memory.slots import FILE_WRITER, PEER_WRITER, UNKNOWN_WRITER, Slots, SlotState
from kvstore.engine.memory.table import Keys
from kvstore.engine.moves.fetches import Fetches
from kvstore.engine.moves.files import Files
from kvstore.engine.moves.grants import Grants
from kvstore.engine.moves.hbm import HbmCopies
from kvstore.engine.sessions.owners import Owner, OwnerGroup
from kvstore.engine.state import State
from kvstore.types import Tier
from tests.kit.moves_check import (
    check_fetches,
    check_grants,
    check_hbm,
    check_pushes,
    peer_sessions,
    pinned_words,
    words_of,
)
from tests.kit.parts_check import check_leases, check_queue, check_trail, published


def is_distinct(words: Words) -> bool:
    """Whether none is there twice; of few, much quicker than `np.unique`."""
    return len(set(words.tolist())) == len(words)


def bytes_by_group(slots: Slots, words: Words) -> list[int]:
    """What each quota group has of these slots."""
    sizes = slots.sizes(words)
    totals = np.bincount(slots.group[words], weights=sizes, minlength=len(slots.quotas.share))
    its: list[int] = totals.astype(np.int64).tolist()
    return its


def check_engine(engine: Engine) -> None:
    """Raises AssertionError with the first contradiction found."""
    state, files, pushes, grants = engine._state, engine.files, engine._pushes, engine.grants
    _check_slabs(state.slots)
    _check_slots(state)
    _check_blocks(state)
    _check_journal(state)
    _check_leases(state, files, peer_sessions(state, pushes))
    _check_pins(state)
    _check_files(state, files)
    check_pushes(pushes)
    check_grants(grants)
    _check_fetches(state, engine._fetches, grants)
    _check_owners(state)
    if engine._hbm is not None:
        _check_hbm(state, engine._hbm)
    check_trail(state.trail)


def _check_hbm(state: State, hbm: HbmCopies) -> None:
    """The same for copies in hbm."""
    slots, dram, residency = state.hbm, state.slots, state.residency
    assert slots is not None
    _check_slabs(slots)
    check_hbm(hbm)
    granted = np.flatnonzero(slots.state == SlotState.GRANTED)
    copying = words_of(hbm._jobs)
    assert is_distinct(copying), "two copies are made into one slot"
    assert set(granted.tolist()) == set(copying.tolist()), "a slot held for a copy nobody makes"
    assert not (slots.state == SlotState.QUARANTINED).any(), "nobody else writes to hbm"
    sealed = np.flatnonzero(slots.state == SlotState.SEALED)
    assert np.array_equal(np.flatnonzero(residency.word_of_hbm >= 0), sealed), "a copy of nothing"
    words = residency.word_of_hbm[sealed].astype(np.int64)
    assert bool((residency.hbm_of_word[words] == sealed).all()), "block and copy disagree"
    assert int((residency.hbm_of_word >= 0).sum()) == len(sealed), "a block whose copy is no more"
    assert bool((dram.state[words] == SlotState.SEALED).all()), "a copy outlived its block"
    assert bool((dram.sizes(words) == slots.sizes(sealed)).all()), "a copy of another size"
    assert slots.sealed_bytes == int(slots.sizes(sealed).sum()), "bytes of copies are miscounted"
    assert not slots.raised, "a raised generation of hbm was not published"


def _check_slabs(slots: Slots) -> None:
    seen: set[int] = set()
    inside = np.zeros(len(slots.state), dtype=bool)
    for pool in slots.pools.values():
        assert not seen & pool.slabs, "a slab is in two pools"
        seen |= pool.slabs
        words = slots.words_of_slabs(pool, np.array([*pool.slabs], int)).reshape(-1)
        assert not inside[words].any(), "two slots share a generation word"
        assert is_distinct(words), "two slots share a generation word"
        inside[words] = True
        assert bool((slots.sizes(words) == pool.slot_bytes).all()), "a slab is cut otherwise"
        free = set(pool.free)
        assert len(free) == len(pool.free), "a slot is free twice"
        if isinstance(pool.policy, Reuse):
            fresh = (slots.stamps[words] > 0) & ~pool.policy._is_reused[words]
            assert pool.policy._fresh_count == np.count_nonzero(fresh), "fresh ones are miscounted"
        expected = words[slots.state[words] == SlotState.FREE]
        assert free == set(expected.tolist()), "the free list is not the free slots"
    assert all(slab < slots.slabs_ready for slab in seen), "a slab without pages is used"
    assert not slots.state[~inside].any(), "a slot outside all slabs is in use"


def _check_slots(state: State) -> None:
    slots = state.slots
    writable = (slots.state == SlotState.GRANTED) | (slots.state == SlotState.QUARANTINED)
    assert bool(((slots.writer != 0) == writable).all()), "a writer without a grant, or reverse"
    counted = dict(Counter(slots.writer[writable].tolist()))
    writers = set(counted)
    assert counted == slots.writers.counts, "what writers may write is miscounted"
    for writer in writers:
        its = np.flatnonzero(slots.writer == writer)
        assert np.array_equal(slots.of_writer(writer), its), "a writer's slots are listed wrongly"
    ours = {FILE_WRITER, PEER_WRITER, UNKNOWN_WRITER}
    assert writers <= {*ours, *state.connections}, "a slot is granted to nobody"
    for writer in writers - ours:
        states = slots.state[slots.writer == writer]
        ended = state.connections[writer].ended
        assert not ended or bool((states == SlotState.QUARANTINED).all()), "granted after the end"
    in_states = np.bincount(slots.state, minlength=len(SlotState))
    assert slots.counts[1:].tolist() == in_states[1:].tolist(), "slots in states are miscounted"
    sealed = slots.state == SlotState.SEALED
    assert slots.sealed_bytes == sum(bytes_by_group(slots, np.flatnonzero(sealed))), (
        "bytes of sealed slots are miscounted"
    )
    assert slots.pins.leased == (slots.leases > 0).sum(), "leased slots are miscounted"
    check_leases(state.leases)
    assert bool(((slots.stamps != 0) == sealed).all()), "a policy holds other slots than the sealed"
    held = bytes_by_group(slots, np.flatnonzero(slots.state != SlotState.FREE))
    assert held == slots.quotas.held.tolist(), "what groups hold is miscounted"
    assert bool((slots.generation > 0).all()), "generations start at 1"
    assert not slots.raised, "a raised generation was not published"


def _check_blocks(state: State) -> None:
    residency, slots = state.residency, state.slots
    table = residency.table
    used = table.used_rows()
    assert len(used) == len(table), "row counts differ"
    counted = dict(Counter(table.scopes[used].tolist()))
    assert counted == table.count_of, "rows of scopes are miscounted"
    held = (residency.words(used) >= 0) | (residency.file[used] != 0)
    assert bool(held.all()), "a row whose block no tier holds"
    sealed = np.flatnonzero(slots.state == SlotState.SEALED)
    rows = residency.row_of_word[sealed].astype(np.int64)
    assert bool((rows >= 0).all()), "a sealed slot without a block"
    assert bool((residency.words(rows) == sealed).all()), "slot and block disagree"
    assert int((residency.row_of_word >= 0).sum()) == len(sealed), "a block in an unsealed slot"
    assert residency.spare_rows >= 0, "a slot has no row for its next block"
    assert residency.count(Tier.DRAM) == len(sealed), "blocks in dram are miscounted"
    assert residency.count(Tier.FILE) == (residency.file != 0).sum(), (
        "blocks on disk are miscounted"
    )
    for scope in counted:
        mine = used[table.scopes[used] == scope]
        found = residency.table.find(scope, table.keys[mine])
        assert bool((found == mine).all()), "the table does not find a row"


def _check_journal(state: State) -> None:
    """The journal, with which another process would go on, agrees with the tables."""
    slots, residency, journal = state.slots, state.residency, state.journal
    sealed = np.flatnonzero(slots.state == SlotState.SEALED)
    told = slots.state[published(journal)]
    assert bool((told == SlotState.SEALED).all()), "the journal tells of what is gone"
    rows = residency.row_of_word[sealed].astype(np.int64)
    scopes = residency.table.scopes[rows]
    for scope in set(scopes.tolist()):
        its = scopes == scope
        assert is_published(
            journal,
            sealed[its],
            scope,
            residency.table.keys[rows[its]],
            residency.checksum[rows[its]],
        ), "the journal tells of another block"
    assert not residency.unverified[slots.state != SlotState.SEALED].any(), "a mark without a block"


def is_published(
    journal: Journal, words: Words, scope: int, keys: Keys, checksums: NDArray[np.uint64]
) -> bool:
    """Whether the rows of these slots are valid, and have this content."""
    id, rows = journal._ids.get(scope, 0), journal._rows[words]
    return not id or bool(
        (rows[:, journal_module._CHECK_AT] == journal_module._checks(words, rows)).all()
        and (rows[:, :4] == keys).all()
        and (rows[:, 4:6] == checksums).all()
        and (rows[:, journal_module._SCOPE_AT] == id).all()
    )


def _check_leases(state: State, files: Files, peers: set[int]) -> None:
    expected = np.zeros_like(state.slots.leases)
    sessions = {owner.open_session for owner in state.owners.values()} | peers
    for session, _, lease in state.leases.items():
        assert session in sessions, "a lease outlived its session"
        for words, generations in lease.pieces:
            expected[words[state.slots.generation[words] == generations]] += 1
    np.add.at(expected, pinned_words(files.writes), 1)
    assert bool((expected == state.slots.leases).all()), "lease counts differ"


def _check_pins(state: State) -> None:
    """Pins are counted, and within their bounds."""
    slots = state.slots
    pins, quotas = slots.pins, slots.quotas
    writable = (slots.state == SlotState.GRANTED) | (slots.state == SlotState.QUARANTINED)
    assert not (slots.leases[slots.state != SlotState.SEALED]).any(), "a lease without a block"
    pinned = bytes_by_group(slots, np.flatnonzero(writable | (slots.leases > 0)))
    assert pinned == pins.node.held, "what is pinned is miscounted"
    most = np.maximum(np.maximum(quotas.share, quotas.floor), pins.block_bytes_max)
    assert bool((np.array(pins.node.held) <= most).all()), (
        "more is pinned than the share of a group"
    )
    counts = {name: np.zeros_like(slots.leases) for name in pins.accounts}
    for _, _, lease in state.leases.items():
        for words, generations in lease.pieces:
            held = words[slots.generation[words] == generations]
            for account in lease.account.line():
                if account is pins.node:
                    continue  # whose leases are those of the slots
                assert pins.accounts[account.name] is account, "an account that left has a lease"
                counts[account.name][held] += 1
    its = {name: [np.flatnonzero(counts[name])] for name in counts} | {pins.node.name: []}
    for connection in state.connections:
        for lowest in (pins.account(connection), pins.process(connection)):
            for account in lowest.line():
                its[account.name].append(slots.of_writer(connection))
    for name, account in pins.accounts.items():
        assert np.array_equal(account.counts, counts[name]), "leases of an account are miscounted"
        held = bytes_by_group(slots, np.concatenate(its[name]))
        assert held == account.held, "pins of an account are miscounted"
        limit = np.maximum(quotas.share, quotas.floor)
        for each in account.line():
            limit = limit * each.part[0] // each.part[1]
        most = np.maximum(limit, quotas.floor) + pins.block_bytes_max
        assert bool((np.array(account.held) <= most).all()), f"{name} pins more than its part"


def _check_files(state: State, files: Files) -> None:
    held = np.flatnonzero(state.slots.writer == FILE_WRITER)
    reading = words_of(files._reads)
    assert is_distinct(reading), "two reads into one slot"
    assert set(held.tolist()) == set(reading.tolist()), "a slot held for a read that nobody makes"
    check_queue(files._queue)
    assert files.pace.begun_bytes or not files._queue or files.is_behind, "queued for ever"
    watches = files._arrivals._watches
    assert files._queue._reads.keys() <= watches.keys(), "queued for nobody"
    leases = {(session, number) for session, number, _ in state.leases.items()}
    assert {name for name in watches if name[0] > 0} <= leases, "a watch without its lease"


def _check_fetches(state: State, fetches: Fetches, grants: Grants) -> None:
    check_fetches(fetches)
    held = np.flatnonzero(state.slots.writer == PEER_WRITER)
    fetching = np.concatenate([words_of(fetches._fetching), words_of(grants._landings)])
    assert is_distinct(fetching), "two fetches into one slot"
    assert set(held.tolist()) == set(fetching.tolist()), "a slot held for a fetch nobody makes"


def _check_owners(state: State) -> None:
    slots = state.slots
    for key, owner in state.owners.items():
        assert owner.key == key
        assert not owner.is_empty, "an owner without connections"
        for connection in [owner.scheduler, *owner.ranks.values()]:
            if connection is not None:
                assert not connection.ended, "an ended connection is attached"
                assert state.connections[connection.id] is connection
        if owner.open_session:
            for index, group in enumerate(owner.groups):
                _check_group(slots, owner, group, owner.open_session + index)


def _check_group(slots: Slots, owner: Owner, group: OwnerGroup, session: int) -> None:
    scopes, writers = group.asker.scopes, [owner.ranks[rank].id for rank in group.writers]
    assert len(writers) == len(scopes) == len(set(scopes)), "columns differ"
    assert group.session == session, "credits of a group carry another number"
    granted = (slots.state == SlotState.GRANTED) & (slots.session == session)
    assert int(granted.sum()) == group.granted_slots, "credits are miscounted"
    for rank, size in zip(writers, group.asker.slot_sizes, strict=True):
        its = np.flatnonzero(granted & (slots.writer == rank))
        assert bool((slots.sizes(its) == size).all()), "a credit of another size"
    assert {*slots.writer[granted].tolist()} <= {*writers}, "a credit of a rank that does not write"

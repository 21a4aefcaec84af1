"""Invariants of blocks that move, between two steps of an engine; and slots and sessions that moves
hold. `engine_check` has all others.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvstore.engine.memory.policies import NONE, Words
from kvstore.engine.moves.fetches import (
    ABSENT_MAX,
    COMING_BYTES,
    COMING_BYTES_MAX,
    LOCATES_MAX,
    Fetches,
)
from kvstore.engine.moves.grants import Extents, Grants, LandingSlab
from kvstore.engine.moves.hbm import MOVING_BYTES_MAX, HbmCopies
from kvstore.engine.moves.jobs import Jobs
from kvstore.engine.moves.pushes import JOBS_MAX, Pushes
from kvstore.engine.moves.writes import Writes
from kvstore.engine.sessions.awaited import (
    Awaited,
    ExpectedKeys,
    ProcessName,
)
from kvstore.engine.state import State


def words_of(jobs: Jobs[Any]) -> Words:
    """Slots of all jobs."""
    held = [job.words for job in jobs.values()]
    return np.concatenate(held) if held else NONE


def pinned_words(writes: Writes) -> Words:
    """Slots that are being written from, once per write, while their blocks stay."""
    generation = writes._state.slots.generation
    jobs = writes._jobs.values()
    held = [job.words[generation[job.words] == job.generations] for job in jobs]
    return np.concatenate(held) if held else NONE


def peer_sessions(state: State, pushes: Pushes) -> set[int]:
    """Sessions that may hold leases for peers."""
    there = {session for session in state.slots.pins._of if session < 0}
    return there | {-write.ask.peer for write in pushes._writes.values()}


def check_jobs(jobs: Jobs[Any]) -> None:
    """What is in motion is counted."""
    assert jobs.moving_bytes == sum(job.size_bytes for job in jobs.values())


def check_fetches(fetches: Fetches) -> None:
    """Questions and fetches are bounded, and each key on its way has one that brings it."""
    assert len(fetches._locating) <= LOCATES_MAX
    assert len(fetches._absent) <= ABSENT_MAX
    check_jobs(fetches._fetching)
    jobs = fetches._locating.keys() | fetches._fetching.keys()
    for its in fetches._coming.values():
        assert its.keys(), "scopes of nothing"
        assert set(its.values()) <= jobs, "nobody brings a key"
    told = Counter[str]()
    for question in fetches._locating.values():
        told[question.asker.engine] += len(question.keys)
    for job in fetches._fetching.values():
        told[job.asker.engine] += len(job.keys)
    assert told == fetches._coming_of, "what engines are told of is miscounted"
    assert fetches._coming_of.total() * COMING_BYTES <= COMING_BYTES_MAX


def check_hbm(hbm: HbmCopies) -> None:
    """Copies are bounded, and each has its job."""
    jobs = hbm._jobs
    check_jobs(jobs)
    assert jobs.moving_bytes <= max(
        MOVING_BYTES_MAX, *(job.size_bytes for job in jobs.values()), 0
    ), "more is in motion than may be"
    copied = {word for job in jobs.values() for word in job.sources.tolist()}
    assert set(np.flatnonzero(jobs.at).tolist()) <= copied, "a copy that nobody makes"


# ── pushes ────────────────────────────────────────────────────────────────────────────────────────


def check_pushes(pushes: Pushes) -> None:
    """Grants of other nodes."""
    jobs = [write.ask for write in pushes._writes.values()]
    asks = {its: None for group in pushes.named.values() for its in group}
    for ask in asks:
        assert pushes.named.of((ask.peer, ask.its.grant)) == [ask]
        assert ask.jobs == sum(its is ask for its in jobs) <= JOBS_MAX, "writes are miscounted"
        assert ask.reason is None or ask.jobs, "a grant that nobody ends"
        assert (ask in pushes.agenda._entries) is (ask.reason is None), (
            "a grant that nobody looks at"
        )
    assert pushes.named.total == 3 * len(asks), "a grant lacks a name"
    assert len(pushes) == len(asks), "grants of peers are miscounted"


def check_grants(grants: Grants) -> None:
    """Each extent of the landing slab has one owner, and what is expected is counted."""
    check_jobs(grants._landings)
    held = []
    for its in grants._grants.values():
        held.append((its.extents[~its.has_landed], its.pages))
    copied = Counter[int]()
    for job in grants._landings.values():
        held.append((job.granted.extents[job.places], job.granted.pages))
        copied[job.granted.number] += len(job.keys)
    for number, its in grants._grants.items():
        left = int((~its.has_landed).sum()) + copied[number]
        assert its.held == left > 0, "a grant ends with its last extent"
    check_slab(grants._slab, held + grants._limbo)
    assert grants._revoked._entries.keys() <= grants._grants.keys(), (
        "an ended grant is answered for"
    )
    check_awaited(grants._awaited)


def check_awaited(awaited: Awaited) -> None:
    """What requests expect of prefill nodes."""
    told = ExpectedKeys()
    counts, keys = Counter[ProcessName](), Counter[ProcessName]()
    waiting = list(awaited)
    for groups in (awaited.named, awaited.queue):
        found = {its for group in groups.values() for its in group}
        assert found <= set(waiting), "an expectation that has ended is found"
    for its in [*waiting, *awaited._ended]:
        told.add(its.asker.scopes, its.missing[~its.has_come])
        counts[its.process] += 1
        keys[its.process] += len(its.missing)
        is_waiting = its in waiting
        assert (its.reason is None) is is_waiting, "an expectation that has ended waits"
        assert (its in awaited.agenda._entries) is is_waiting, "an expectation nobody looks at"
        wants_room = is_waiting and not its.is_here and its.granted < len(its.missing)
        has_turn = its in awaited.queue.of(its.lane)
        assert has_turn is wants_room, "an expectation without a turn"
    assert told == awaited._coming, "what is expected is miscounted"
    counted = Counter({each: awaited._counted.count(each) for each in awaited._counted})
    assert (counts, +keys) == (counted, awaited._keys), "what processes expect is miscounted"


def check_slab(slab: LandingSlab, held: list[tuple[Extents, int]]) -> None:
    """These (extents, pages), each once, are what is taken of the landing slab."""
    taken = np.zeros(slab.page_count, dtype=np.int64)
    for extents, pages in held:
        at = (extents[:, None] - slab._first + np.arange(pages)).reshape(-1)
        np.add.at(taken, at, 1)
    assert bool((taken <= 1).all()), "an extent has two owners"
    assert bool(((taken == 1) == ~slab._is_free).all()), "an extent of nobody is taken"
    edges = np.flatnonzero(np.diff(slab._is_free, prepend=False, append=False)).tolist()
    runs = dict(zip(edges[::2], edges[1::2], strict=True))
    assert runs == slab._end_of, "the free runs are not the free pages"
    assert {end: begin for begin, end in runs.items()} == slab._begin_of
    for n, begins in enumerate(slab._bins):
        assert all((runs[begin] - begin).bit_length() == n for begin in begins)
    assert sum(map(len, slab._bins)) == len(runs), "a free run is in no bin"

"""Copies of blocks in hbm: which are made, and which give way to others.

    leased again within WINDOW_NS ─▶ Promote ──verified, and still in dram──▶ Shown
                                                                               │ used longest ago,
                                               slot of hbm is free ◀── or no more in dram

Rules. 1: hbm holds copies of sealed slots of dram, of the same size, and nothing else: a slot of
dram that is freed takes its copy with it, so nothing is lost with hbm, and no lease names it. 2: a
slot of hbm that a copy is made into is the tier's until that has truly ended, however late. 3: only
blocks that a rank on the slab's GPU loads are copied. 4: what is in motion is bounded.

Does not cover: how ranks find copies (`kvstore.wire.space`), copying (`kvstore.tiers.hbm`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.residency import Run
from kvstore.engine.memory.shares import OTHERS
from kvstore.engine.memory.slots import Slots, SlotState
from kvstore.engine.moves.intake import Admission
from kvstore.engine.moves.jobs import Jobs, pieces
from kvstore.engine.sessions.owners import Asker, OwnerGroup
from kvstore.engine.state import State
from kvstore.tier_events import Promote, Promoted, Shown
from kvstore.types import SLOT_BYTES_MIN
from kvstore.units import MIB, NS_PER_S
from kvstore.wire.record import Scope

WINDOW_NS: Final = 60 * NS_PER_S
"""A block that is leased twice within this time is worth a copy."""
MOVING_BYTES_MAX: Final = 256 * MIB
"""Most bytes in motion at once: a tenth of a second or so of one direction of the bus."""
JOB_BYTES_MAX: Final = 32 * MIB
HBM_WRITER: Final = -3
"""Writer of slots that copies are being made into: the hbm tier."""


class _Rise(NamedTuple):
    """A job that copies blocks from dram into hbm."""

    sources: Words
    """Slots of dram, whose generations at the start are in `generations`."""
    generations: NDArray[np.uint64]
    words: Words
    """Slots of hbm that the copies are made into."""
    size_bytes: int


class HbmCopies:
    """Decides which blocks of dram get copies in hbm; slots of hbm are in `state.hbm`."""

    def __init__(self, state: State, slots: Slots) -> None:
        self._state = state
        self._slots = slots
        self._admission = Admission(slots, 0, state.config.low_watermark, self._demote)
        count, arena_bytes = len(state.slots.state), len(slots.state) * SLOT_BYTES_MIN
        self._jobs: Jobs[_Rise] = Jobs(state.numbers, arena_bytes, places=count)
        self._leased_ns = np.zeros(count, dtype=np.int64)
        """Time of the last lease of each slot of dram, for the generation in `_generation`."""
        self._generation = np.zeros(count, dtype=np.uint64)
        self._has_failed = False

    def leased(self, group: OwnerGroup, run: Run) -> None:
        """Note that an engine is about to load these blocks, and begin to copy those leased twice
        within WINDOW_NS."""
        for column, is_here in enumerate(group.on_gpu):
            if is_here and run.count and not self._has_failed:
                self._leased(group.asker, column, run.words_by_shard[column][: run.count])

    def _leased(self, asker: Asker, column: int, words: Words) -> None:
        state = self._state
        copies = state.residency.hbm_of_word[words].astype(np.int64)
        held = copies[copies >= 0]
        if len(held):
            self._slots.touch(held)
            state.counters.hbm_blocks_leased += len(held)
        generations, now_ns = state.slots.generation[words], state.now_ns
        again = (self._generation[words] == generations) & (copies < 0)
        again &= (now_ns - self._leased_ns[words] <= WINDOW_NS) & (self._jobs.at[words] == 0)
        self._leased_ns[words], self._generation[words] = now_ns, generations
        if again.any():
            self._promote(asker, column, words[again])

    def _promote(self, asker: Asker, column: int, words: Words) -> None:
        """Begin to copy the leading ones of these blocks of one shard, as many as there is room
        for."""
        state, size = self._state, asker.slot_sizes[column]
        count = min(len(words), self._jobs.room(size, bytes_max=MOVING_BYTES_MAX))
        pool = self._slots.pool(size)
        self._admission.make_room(pool, count, state.active_sizes(), OTHERS)
        count = min(count, len(pool.free))
        # Places of copies that gave way are taken back before another one is made there.
        state.publish_generations()
        scope = Scope(*asker.address, asker.shards[column], asker.block_bytes[column])
        for place in pieces(count, JOB_BYTES_MAX // size):
            piece = words[place]
            targets = self._slots.grant(pool, len(piece), writer=HBM_WRITER, session=0)
            rise = _Rise(piece, state.slots.generation[piece], targets, len(piece) * size)
            job = self._jobs.begin(rise, piece)
            named = state.named(state.residency.row_of_word[piece].astype(np.int64), piece)
            state.say(Promote(job, scope, *named, self._slots.slots_of(targets)))

    def promoted(self, event: Promoted) -> None:
        """A job has ended: show readers the copies of blocks that stayed in dram meanwhile, and
        free the other slots. After a first failure of the device hbm is given up."""
        state, job = self._state, self._jobs.end(event.job)
        self._jobs.leave(event.job, job.sources)
        if event.trouble and not self._has_failed:
            self._has_failed = True
            self._demote(np.flatnonzero(self._slots.state == SlotState.SEALED))
        good = np.frombuffer(event.good, dtype=np.bool_) & (not self._has_failed)
        good &= state.slots.generation[job.sources] == job.generations
        self._slots.free(job.words[~good])
        sources, words = job.sources[good], job.words[good]
        state.counters.hbm_blocks_promoted += len(words)
        state.counters.hbm_blocks_dropped += len(good) - len(words)
        if not len(words):
            return
        self._slots.seal(words, np.zeros(len(words), dtype=np.uint64))
        state.residency.put_hbm(sources, words)
        slots = state.slots.slots_of(sources), self._slots.slots_of(words)
        state.publish_generations()
        state.say(Shown(*slots))

    def _demote(self, words: Words) -> None:
        self._state.counters.hbm_blocks_demoted += len(words)
        self._state.drop_copies(words)

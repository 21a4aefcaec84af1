"""The copies of one rank between its cache and the arena: the world's transfer engine.

A copy is two events, so that everything can happen in between. What can become of one:

    copy stalls                   it takes its time: its slot may be somebody else's by then
    late write                    its socket ends first: it writes to a slot that was abandoned
    copy fails half way           a part is written, then an error
    one of several copies fails   the same on one rank of several, or of its copies
    copy never ends               until its process is killed

Checked: nobody else writes to a slot while a copy does, however late that is (I4), and what is
read under a valid generation did not change meanwhile (I5).

Does not cover: which copy is next (`client.core.rank`), sockets (`rank`).
"""

from __future__ import annotations

from typing import Final

from kvstore.client.core.rank import SLOT_REUSED, Copy
from kvstore.ports import CopyEnd, CopyWay
from kvstore.types import CHECKSUM_BYTES, PAGE_BYTES
from kvstore.units import NS_PER_MS
from kvstore.wire.space import slot_bytes
from tests.kit.reference import checksum
from tests.sim.world.ground import Rank
from tests.sim.world.parts import DAMAGED, TORN, SimMemory

FENCE_NS_MAX: Final = 100 * NS_PER_MS
"""As the connector waits for stores that read blocks which are needed."""
_STALL_SHARE: Final = 0.25
_FAIL_SHARE: Final = 0.05
_CLEAR_SHARE: Final = 0.25
_HANG_SHARE: Final = 0.04
"""Of the copies that an enabled fault could hit."""
_VOID: Final = CopyEnd(0, reason=SLOT_REUSED)


class Violation(AssertionError):
    """A promise was broken; the text is the story, `steps` says in which step with faults."""

    def __init__(self, text: str, steps: int = 0) -> None:
        super().__init__(text)
        self.steps = steps


class SimCopies:
    """The copying thread of `rank`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._world = rank.world
        self.running: Copy | None = None
        self.hangs = False
        """The one that runs never ends."""
        self._begun_with: bytes | None = b""
        self._ticket = 0
        self._place = 0
        """Word of the place in a slab that the load which runs reads; 0: it reads dram."""
        self._stalled_until_ns = 0
        self._slot_pages = slot_bytes(rank.block_bytes) // PAGE_BYTES

    @property
    def _memory(self) -> SimMemory:
        memory = self._rank.memory
        assert memory is not None, "a copy without an arena"
        return memory

    def step(self) -> bool:
        """Begin the next copy, or end the one that runs. False: nothing to do."""
        if self.running is not None:
            if not self.hangs and self._world.now_ns >= self._stalled_until_ns:
                self._end()
            return True
        copy = self._rank.core.next_copy()
        if copy is not None:
            self._begin(copy)
        return copy is not None

    def end_within_fence(self) -> bool:
        """Somebody waits for what runs, or for the next one. False: not that long."""
        if self.hangs or self._stalled_until_ns > self._world.now_ns + FENCE_NS_MAX:
            return False
        self._stalled_until_ns = 0
        return self.step()

    def stall(self) -> None:
        """What runs, or is next, takes its time."""
        duration_ms = self._world.random.randint(10, 1500)
        self._stalled_until_ns = self._world.now_ns + duration_ms * NS_PER_MS

    def end_process(self) -> None:
        """Its process is gone, and with it what runs."""
        self.running = None

    # ── one copy ─────────────────────────────────────────────────────────────────────────────────

    def _begin(self, copy: Copy) -> None:
        rank, memory = self._rank, self._memory
        if not self._holds(copy):
            rank.core.finished(copy, _VOID)
            return
        self.running = copy
        if copy.way is CopyWay.LOAD:
            self._place = memory.slab.place(copy.slot) if memory.slab is not None else 0
            self._begun_with = self._source(copy)
            rank.pool[copy.block_id] = TORN
        elif copy.way is CopyWay.STORE:
            self._begun_with = rank.pool[copy.block_id]
            self._ticket = memory.begin_write(copy.slot, self._slot_pages, rank.block_bytes)
        if self._strikes("copy never ends", _HANG_SHARE):
            self.hangs = True
        elif copy.way is CopyWay.LOAD and self._strikes("copy stalls", _STALL_SHARE):
            self.stall()
        elif copy.way is CopyWay.LOAD and self._strikes("clear", _CLEAR_SHARE):
            # The slot is free for others before the copy ends.
            rank.machine.clear(None, None)
            self.stall()

    def _end(self) -> None:
        copy, self.running = self.running, None
        assert copy is not None
        if self._strikes(self._rank.failure, _FAIL_SHARE):
            end = self._fail(copy)
        elif copy.way is CopyWay.LOAD and self._is_from_dram_now(copy):
            self.running = copy
            return
        elif copy.way is CopyWay.LOAD:
            end = self._end_load(copy)
        elif copy.way is CopyWay.STORE:
            end = self._end_store(copy)
        else:
            end = self._end_compare(copy)
        self._rank.core.finished(copy, end)

    def _fail(self, copy: Copy) -> CopyEnd:
        """Half of it is there: in the cache torn bytes, in the slot the beginning of the block."""
        rank, memory = self._rank, self._memory
        rank.disturbed_ns = self._world.now_ns
        if copy.way is CopyWay.STORE:
            data = self._world.words.payload(rank.pool[copy.block_id] or TORN, rank.block_bytes)
            self._write(copy, memory, data[: len(data) // 2])
        return CopyEnd(0, reason="the copy failed")

    def _end_store(self, copy: Copy) -> CopyEnd:
        rank = self._rank
        word = rank.pool[copy.block_id]
        if word != self._begun_with or word is None:
            word = TORN
        data = self._world.words.payload(word, rank.block_bytes)
        self._write(copy, self._memory, data)
        rank.stored_blocks += 1
        return CopyEnd(0, checksum(copy.header, data))

    def _write(self, copy: Copy, memory: SimMemory, data: bytes) -> None:
        if not memory.end_write(copy.slot, data, self._ticket):
            raise Violation(f"{self._rank.name}: another wrote to a slot of its while it wrote")

    def _end_load(self, copy: Copy) -> CopyEnd:
        rank, memory = self._rank, self._memory
        data = self._source(copy)
        self._world.slab_blocks += bool(self._place)
        is_whole = data == self._begun_with
        word = self._world.words.word(data)
        if not is_whole:
            word = DAMAGED if memory.is_damaged else TORN
        rank.pool[copy.block_id] = word
        if not self.still_holds(copy):
            return _VOID
        return CopyEnd(0, checksum(copy.header, data) if is_whole else bytes(CHECKSUM_BYTES))

    def _source(self, copy: Copy) -> bytes:
        length, slab = self._rank.block_bytes, self._memory.slab
        if not self._place:
            return self._memory.read(copy.slot, length)
        assert slab is not None
        return slab.read(self._place, length)

    def _is_from_dram_now(self, copy: Copy) -> bool:
        """A load from the slab came to nothing, as in `connector.copier`: it begins again."""
        place, slab = self._place, self._memory.slab
        if not place or not self._holds(copy):
            return False
        assert slab is not None
        data = self._source(copy)
        is_same = self.still_shows(place, copy) and bool(self._rank.socket)
        is_right = copy.checksum in (None, checksum(copy.header, data))
        if is_same and is_right:
            return False
        self._place = 0
        self._begun_with = self._source(copy)
        return True

    def still_shows(self, place: int, copy: Copy) -> bool:
        """Whether the place still is that of the block, once the bytes of a load are there."""
        slab = self._memory.slab
        return slab is not None and slab.place(copy.slot) == place

    def _end_compare(self, copy: Copy) -> CopyEnd:
        rank = self._rank
        data = self._memory.read(copy.slot, rank.block_bytes)
        differs = self._world.words.word(data) != rank.pool[copy.block_id]
        if not self._holds(copy):
            return _VOID
        return CopyEnd(0, checksum(copy.header, data), 1.4 if differs else 0.0, diverged=differs)

    def _holds(self, copy: Copy) -> bool:
        """Whether the slot still has the generation that the copy was ordered for."""
        return self._memory.generation(copy.slot) == copy.generation

    def still_holds(self, copy: Copy) -> bool:
        """The same, once the bytes of a load are there."""
        return self._holds(copy)

    def _strikes(self, fault: str, share: float) -> bool:
        world = self._world
        if fault not in world.enabled or world.random.random() >= share:
            return False
        world.strike(fault, self._rank.machine)
        world.note(f"it hits {self._rank.name}")
        return True

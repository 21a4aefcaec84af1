"""One rank of an engine without a model: its memory, its socket and its copying thread.

Real: `RankCore`. Simulated: the paged cache, one word a block; the copying thread, two events a
copy, so that everything can happen in between; the socket. The word of a block is derived from its
tenant, model, weights, key and shard, and the bytes in the arena from the word, so bytes of another
block are noticed (the oracle); replicas hold the same words.

Does not cover: the engine that it is a part of (`sim_engine`), what happens when (`world`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from kvstore.client.core.copies import CompareBlock, Compared, Copy
from kvstore.client.core.rank import (
    Copied,
    LoadBlock,
    Mismatch,
    RankConfig,
    RankCore,
    Void,
)
from kvstore.testing.sim_parts import TORN, SimMemory
from kvstore.types import PAGE_BYTES, Shard
from kvstore.units import NS_PER_MS
from kvstore.wire.layout import shard_bytes, slot_bytes
from kvstore.wire.messages import Message, Welcome
from kvstore.wire.space import Space

if TYPE_CHECKING:
    from kvstore.testing.sim_engine import SimEngine


class Violation(AssertionError):
    """A promise was broken; the text is the story, `steps` says in which step with faults."""

    def __init__(self, text: str, steps: int = 0) -> None:
        super().__init__(text)
        self.steps = steps


def checksum(header: bytes, data: bytes) -> bytes:
    """As `kernels` makes it and the file tier verifies it."""
    return xxhash.xxh3_128_digest(header + data)


class SimRank:
    """One process of an engine. `SimEngine` and `World` call its methods as events."""

    def __init__(
        self, engine: SimEngine, *, rank: int, space: Space, shard: Shard, blocks: int
    ) -> None:
        self.world = engine.world
        self.name = f"{engine.name} rank {rank}"
        self.space = space
        self.shard = shard
        self._engine = engine
        self._address: tuple[str | None, bytes] = (None, b"")
        self.block_bytes = block_bytes = shard_bytes(space, shard)
        self.core = RankCore(
            RankConfig(
                engine_id=engine.name,
                nonce="1",
                tenant=engine.tenant,
                rank=rank,
                process=f"{engine.name}-rank{rank}",
                space=space,
                shard=shard,
                block_bytes=block_bytes,
            )
        )
        self.pool: list[bytes | None] = [None] * blocks
        self.memory: SimMemory | None = None
        self.socket = 0
        self.copying: tuple[Copy, bytes | None] | None = None
        self.stalled_until_ns = 0
        self.disturbed_ns = 0
        """When it last lost its socket."""
        self.stored_blocks = 0
        self._slot_pages = slot_bytes(block_bytes) // PAGE_BYTES
        self._ticket = 0

    @property
    def idle(self) -> bool:
        return not self.core.has_work and self.copying is None

    # ── the cache ────────────────────────────────────────────────────────────────────────────────

    def expected(self, key: bytes) -> bytes:
        """What this rank's shard of the block must be."""
        weights = self._engine.weights
        if self._address[0] != weights:
            text = f"{self._engine.tenant}/{self.space.model}/{weights}/{self.shard}/"
            self._address = (weights, text.encode())
        return self._address[1] + key

    def check_block(self, block: int, key: bytes, what: str) -> None:
        found, expected = self.pool[block], self.expected(key)
        if found != expected:
            raise Violation(
                f"{self.name}: {what} (engine block {block}): {found!r:.60} instead of "
                f"{expected!r:.60}"
            )

    # ── the socket ───────────────────────────────────────────────────────────────────────────────

    def poll(self) -> None:
        """As the copy thread between two copies, which is the only time it looks at its socket."""
        if self.copying is not None:
            return
        if self.socket:
            for message in self.world.take_inbox(self.socket):
                if message is None:
                    self.drop()
                    break
                self._hear(message)
        else:
            self.socket = self.world.connect(self.core.hello())
        for message in self.core.take_outbox():
            if self.socket:
                self.world.sockets.send(self.socket, message)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self.core.connected(message)
            self.memory = self.world.sockets[self.socket].memory
        else:
            self.core.received(message)  # type: ignore[arg-type]

    def drop(self) -> None:
        self.world.sockets.hang_up(self.socket)
        self.socket = 0
        self.disturbed_ns = self.world.now_ns
        self.core.disconnected()

    # ── the copying thread ───────────────────────────────────────────────────────────────────────

    def copy_step(self, *, waited_for: bool = False) -> bool:
        """Begin the next copy, or end the one that runs. False: nothing to do."""
        if self.copying is not None:
            if waited_for or self.world.now_ns >= self.stalled_until_ns:
                self._end_copy()
            return True
        copy = self.core.next_copy()
        if copy is None:
            return False
        memory = self.memory
        assert memory is not None
        if not self.holds(copy):
            self.core.finished(copy, Void())
        elif isinstance(copy, LoadBlock):
            self.copying = (copy, memory.read(copy.slot, self.block_bytes))
            self.pool[copy.block_id] = TORN
            if "copy stalls" in self.world.enabled and self.world.random.random() < 0.1:
                self.stall()
        elif isinstance(copy, CompareBlock):
            self.copying = (copy, self.pool[copy.block_id])
        else:
            self.copying = (copy, self.pool[copy.block_id])
            self._ticket = memory.begin_write(copy.slot, self._slot_pages, self.block_bytes)
        return True

    def stall(self) -> None:
        """A copy under way takes its time."""
        self.stalled_until_ns = self.world.now_ns + self.world.random.randint(10, 1500) * NS_PER_MS

    def holds(self, copy: Copy) -> bool:
        """Whether the slot still has the generation that the copy was ordered for."""
        assert self.memory is not None
        return self.memory.tier.generation(copy.slot) == copy.generation

    def still_holds(self, copy: LoadBlock) -> bool:
        """The same, once the bytes of a load are there."""
        return self.holds(copy)

    def _end_copy(self) -> None:
        assert self.copying is not None
        copy, begun_with = self.copying
        memory = self.memory
        assert memory is not None
        self.copying = None
        if isinstance(copy, LoadBlock):
            self.core.finished(copy, self._end_load(copy, memory, begun_with))
            return
        if isinstance(copy, CompareBlock):
            self.core.finished(copy, self._end_compare(copy, memory))
            return
        word = self.pool[copy.block_id]
        if word != begun_with or word is None:
            word = TORN
        data = self.world.words.payload(word, self.block_bytes)
        if not memory.end_write(copy.slot, data, self._ticket):
            raise Violation(f"{self.name}: another wrote to a slot of its while it wrote")
        self.stored_blocks += 1
        self.core.finished(copy, Copied(checksum(copy.header, data)))

    def _end_compare(self, copy: CompareBlock, memory: SimMemory) -> Compared | Void | Mismatch:
        data = memory.read(copy.slot, self.block_bytes)
        differs = self.world.words.word(data) != self.pool[copy.block_id]
        if not self.holds(copy):
            return Void()
        if differs and checksum(copy.header, data) != copy.checksum:
            return Mismatch()
        return Compared(1.4 if differs else 0.0, differs)

    def _end_load(
        self, copy: LoadBlock, memory: SimMemory, begun_with: bytes | None
    ) -> Copied | Void | Mismatch:
        data = memory.read(copy.slot, self.block_bytes)
        self.pool[copy.block_id] = self.world.words.word(data) if data == begun_with else TORN
        if not self.still_holds(copy):
            return Void()
        if copy.checksum is not None and checksum(copy.header, data) != copy.checksum:
            return Mismatch()
        return Copied()

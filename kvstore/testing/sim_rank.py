"""One rank of an engine without a model: its memory, its socket and its copying thread.

Real: `RankCore`. Simulated: the paged cache, one word of bytes a block; the copying thread, two
events a copy, so that everything can happen in between; the socket. The word of a block is derived
from its key and the rank's shard, so bytes of another block or another shard are noticed (the
oracle); replicas hold the same words.

Does not cover: the engine that it is a part of (`sim_engine`), what happens when (`world`).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvstore.client.core.rank import (
    Copied,
    LoadBlock,
    Mismatch,
    RankConfig,
    RankCore,
    StoreBlock,
    Void,
)
from kvstore.testing.sim_parts import TORN, SimMemory
from kvstore.types import PAGE_BYTES, Shard
from kvstore.wire.layout import slot_bytes
from kvstore.wire.messages import Message, Welcome
from kvstore.wire.space import Space

if TYPE_CHECKING:
    from kvstore.testing.world import World


class Violation(AssertionError):
    """A promise was broken; the text is the story."""


def content(space: str, key: bytes, shard: Shard) -> bytes:
    """What the bytes of a block's shard must be."""
    return f"{space}/{shard}/".encode() + key


def checksum(header: bytes, data: bytes) -> bytes:
    """Any 16 bytes that change with header and data will do here."""
    return hashlib.blake2b(header + data, digest_size=16).digest()


class SimRank:
    """One process of an engine. `SimEngine` and `World` call its methods as events."""

    def __init__(
        self, world: World, engine: str, *, rank: int, space: Space, shard: Shard, blocks: int
    ) -> None:
        self.world = world
        self.name = f"{engine} rank {rank}"
        self.space = space
        self.shard = shard
        block_bytes = (
            (shard.layer_end - shard.layer_begin)
            * (shard.head_end - shard.head_begin)
            * space.block_tokens
            * space.token_bytes
        )
        self.core = RankCore(
            RankConfig(
                engine_id=engine,
                nonce="1",
                tenant="t",
                rank=rank,
                process=f"{engine}-rank{rank}",
                space=space,
                shard=shard,
                block_bytes=block_bytes,
            )
        )
        self.pool: list[bytes | None] = [None] * blocks
        self.memory: SimMemory | None = None
        self.socket = 0
        self.copying: tuple[LoadBlock | StoreBlock, bytes | None] | None = None
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
        return content(self.space.model, key, self.shard)

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
                self.world.send(self.socket, message)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self.core.connected(message)
            self.memory = self.world.memory_of(self.socket)
        else:
            self.core.received(message)  # type: ignore[arg-type]

    def drop(self) -> None:
        self.world.hang_up(self.socket)
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
        if memory.tier.generation(copy.slot) != copy.generation:
            self.core.finished(copy, Void())
        elif isinstance(copy, LoadBlock):
            self.copying = (copy, memory.contents.get(copy.slot))
            self.pool[copy.block_id] = TORN
        else:
            self.copying = (copy, self.pool[copy.block_id])
            self._ticket = memory.begin_write(copy.slot, self._slot_pages)
        return True

    def _end_copy(self) -> None:
        assert self.copying is not None
        copy, begun_with = self.copying
        memory = self.memory
        assert memory is not None
        self.copying = None
        now = (
            memory.contents.get(copy.slot)
            if isinstance(copy, LoadBlock)
            else self.pool[copy.block_id]
        )
        data = now if now == begun_with and now is not None else TORN
        if isinstance(copy, LoadBlock):
            self.pool[copy.block_id] = data
            if memory.tier.generation(copy.slot) != copy.generation:
                self.core.finished(copy, Void())
            elif copy.checksum is not None and checksum(copy.header, data) != copy.checksum:
                self.core.finished(copy, Mismatch())
            else:
                self.core.finished(copy, Copied())
            return
        if not memory.end_write(copy.slot, data, self._ticket):
            raise Violation(f"{self.name}: another wrote to a slot of its while it wrote")
        self.stored_blocks += 1
        self.core.finished(copy, Copied(checksum(copy.header, data)))

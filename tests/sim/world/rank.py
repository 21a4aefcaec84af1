"""One rank of an engine without a model: its memory and its socket.

Real: `RankCore`. Simulated: the paged cache, one word a block; the socket. The word of a block is
derived from its tenant, model, weights, key and shard, and the bytes in the arena from the word, so
bytes of another block are noticed (the oracle); replicas hold the same words.

What dram does to a block by itself is noticed by those who verify every load, and by every way
through a file. Who verifies a sample may be given damaged bytes, but never another block's, nor
half of one.

Does not cover: its copies (`copies`), the engine that it is a part of (`engine`), what
happens when (`world`).
"""

from __future__ import annotations

import msgspec

from kvstore.client.core.rank import RankCore
from kvstore.types import Shard
from kvstore.wire.messages import Message, Welcome
from kvstore.wire.space import Space, shard_bytes
from tests.kit.cores import has_work
from tests.kit.hello import group_of, rank_hello
from tests.sim.world.copies import SimCopies, Violation
from tests.sim.world.ground import Engine, Ground
from tests.sim.world.parts import DAMAGED, SimMemory
from tests.sim.world.slab import GPU


class SimRank:
    """One process of an engine. `SimEngine` and `World` call its methods as events."""

    def __init__(
        self, engine: Engine, *, rank: int, space: Space, shard: Shard, blocks: int
    ) -> None:
        self.world: Ground = engine.world
        self.machine = engine.machine
        self.name = f"{engine.name} rank {rank}"
        self.space = space
        self.shard = shard
        self._engine = engine
        self._addresses: dict[tuple[str, int], bytes] = {}
        self.block_bytes: int = shard_bytes(space, shard)
        others = range(1, len(engine.kinds))
        spaces = [space, *(msgspec.structs.replace(space, group=str(n)) for n in others)]
        self.core = RankCore(
            rank_hello(
                *(group_of(each, shard) for each in spaces),
                name=engine.name,
                rank=rank,
                nonce="1",
                tenant=engine.tenant,
                process=f"{engine.name}-rank{rank}",
                gpu=GPU,
            )
        )
        self.pool: list[bytes | None] = [None] * blocks
        self.memory: SimMemory | None = None
        self.socket = 0
        self.disturbed_ns = 0
        """When it last lost its socket, or a copy."""
        self.stored_blocks = 0
        self.copies = SimCopies(self)

    @property
    def idle(self) -> bool:
        return not has_work(self.core) and self.copies.running is None

    @property
    def failure(self) -> str:
        """What it is called when a copy of it fails."""
        alone = len(self._engine.shards) == 1
        return "copy fails half way" if alone else "one of several copies fails"

    # ── the cache ────────────────────────────────────────────────────────────────────────────────

    def expected(self, key: bytes, group: int = 0) -> bytes:
        """What this rank's shard of the block of a KV cache group must be."""
        weights = self._engine.weights
        address = self._addresses.get((weights, group))
        if address is None:
            of_group = f"/group {group}" if group else ""
            text = f"{self._engine.tenant}/{self.space.model}/{weights}{of_group}/{self.shard}/"
            address = self._addresses[weights, group] = text.encode()
        return address + key

    def check_block(self, block: int, key: bytes, what: str, *, group: int = 0) -> None:
        found, expected = self.pool[block], self.expected(key, group)
        if found == expected:
            return
        if found != DAMAGED or self._engine.verifies_all or not self.machine.was_damaged:
            raise Violation(
                f"{self.name}: {what} (engine block {block}): {found!r:.60} instead of "
                f"{expected!r:.60}"
            )

    # ── the socket ───────────────────────────────────────────────────────────────────────────────

    def poll(self) -> None:
        """As the copy thread between two copies, which is the only time it looks at its socket."""
        if self.copies.running is not None:
            return
        if self.socket:
            for message in self.machine.take_inbox(self.socket):
                if message is None:
                    self.drop()
                    break
                self._hear(message)
        else:
            self.socket = self.machine.connect(self.core.hello())
        for message in self.core.take_outbox():
            if self.socket:
                self.machine.sockets.send(self.socket, message)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self.core.connected(message)
            self.memory = self.machine.sockets[self.socket].memory
        else:
            self.core.received(message)  # type: ignore[arg-type]

    def drop(self) -> None:
        self.machine.sockets.hang_up(self.socket)
        self.socket = 0
        self.disturbed_ns = self.world.now_ns
        self.core.disconnected()

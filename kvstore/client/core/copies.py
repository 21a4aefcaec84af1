"""A job of one rank while it runs, and the block copies that it consists of.

    LoadJob, StoreJob ──▶ RunningLoad, RunningStore ──copy()──▶ LoadBlock, StoreBlock
                                                     ◀─────────  Copied | Void | Mismatch

Covers: unpacking a plan's arrays, which block is next, what the driver answers. Does not cover:
which job runs when and what is said about it (`kvstore.client.core.rank`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvstore.client.core.plan import LoadJob, StoreJob
from kvstore.errors import ProtocolError
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, BlockKey, Generation, SlotId
from kvstore.wire.messages import generations_array, slots_array
from kvstore.wire.record import header

PLAN_MALFORMED = "the plan's arrays do not fit together"


class LoadBlock(msgspec.Struct, frozen=True):
    """Copy: slot → engine block. The generation is compared before and after."""

    block_id: int
    slot: SlotId
    generation: Generation
    key: BlockKey
    header: bytes
    """What the checksum covers before the payload (`kvstore.wire.record`)."""
    checksum: bytes | None
    """16 bytes to compare with, or None: the bytes crossed no medium and no restart of the node,
    do not verify."""


class StoreBlock(msgspec.Struct, frozen=True):
    """Copy: engine block → slot, if the slot still has this generation; return the checksum."""

    block_id: int
    slot: SlotId
    generation: Generation
    key: BlockKey
    header: bytes


class Copied(msgspec.Struct, frozen=True):
    """The copy is complete and its generation was valid to the end."""

    checksum: bytes = b""
    """16 bytes; of a load that was not asked to verify: empty."""
    duration_ns: int = 0


class Void(msgspec.Struct, frozen=True):
    """The slot no longer holds what the plan says, or cannot be reached; nothing may be used."""

    reason: str = "the slot was given to another block"


class Mismatch(msgspec.Struct, frozen=True):
    """Load: generation valid, checksum wrong."""


Copy = LoadBlock | StoreBlock
Outcome = Copied | Void | Mismatch


class Job:
    """One job under way; blocks before `index` are done."""

    __slots__ = ("abandoned", "checksums", "generations", "index", "plan", "prefix", "slots")

    def __init__(self, plan: LoadJob | StoreJob, *, column: int, prefix: bytes) -> None:
        self.plan = plan
        self.index = 0
        self.prefix = prefix
        self.abandoned = ""
        """Why the job ends with its copy in flight; empty while it goes on."""
        n = len(plan.block_ids)
        checksums = plan.checksums if isinstance(plan, LoadJob) else b""
        shards, rest = divmod(len(plan.slots), 4 * n)
        if (
            rest
            or column >= shards
            or len(plan.keys) != n * KEY_BYTES
            or len(plan.generations) != n * shards * 8
            or len(checksums) not in (0, n * shards * CHECKSUM_BYTES)
        ):
            raise ProtocolError(PLAN_MALFORMED)
        self.slots: list[int] = slots_array(plan.slots).reshape(n, shards)[:, column].tolist()
        words = generations_array(plan.generations).reshape(n, shards)[:, column]
        self.generations: list[int] = words.tolist()
        step, first = shards * CHECKSUM_BYTES, column * CHECKSUM_BYTES
        every = [checksums[at : at + CHECKSUM_BYTES] for at in range(first, len(checksums), step)]
        self.checksums = [checksum if any(checksum) else None for checksum in every]
        """Of each block, None where nothing is to verify; empty when that is so for all."""

    @property
    def remaining(self) -> tuple[int, ...]:
        """Engine blocks from the next one on."""
        return self.plan.block_ids[self.index :]

    def places(self, indexes: Iterable[int]) -> tuple[bytes, bytes]:
        """Slots and generations of these blocks, as they travel."""
        places = [(self.slots[i], self.generations[i]) for i in indexes]
        slots = b"".join(slot.to_bytes(4, "little") for slot, _ in places)
        return slots, b"".join(generation.to_bytes(8, "little") for _, generation in places)

    def key(self, index: int) -> BlockKey:
        return BlockKey(self.plan.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES])


class RunningLoad(Job):
    """Slots → engine blocks; ends at the first block that cannot be had."""

    __slots__ = ("duration_ns",)
    plan: LoadJob

    def __init__(self, plan: LoadJob, *, column: int, prefix: bytes) -> None:
        super().__init__(plan, column=column, prefix=prefix)
        self.duration_ns = 0

    def verified(self) -> list[int]:
        """Indexes of the blocks that were copied and compared with their checksum."""
        done = self.checksums[: self.index]
        return [i for i, checksum in enumerate(done) if checksum is not None]

    def copy(self) -> LoadBlock:
        i, key = self.index, self.key(self.index)
        return LoadBlock(
            block_id=self.plan.block_ids[i],
            slot=SlotId(self.slots[i]),
            generation=Generation(self.generations[i]),
            key=key,
            header=header(self.prefix, key),
            checksum=self.checksums[i] if self.checksums else None,
        )


class RunningStore(Job):
    """Engine blocks → granted slots; a block that cannot be copied does not stop the others."""

    __slots__ = ("sealed",)
    plan: StoreJob

    def __init__(self, plan: StoreJob, *, column: int, prefix: bytes) -> None:
        super().__init__(plan, column=column, prefix=prefix)
        self.sealed: dict[int, bytes] = {}
        """Checksum by index of the blocks that were copied."""

    def copy(self) -> StoreBlock:
        i, key = self.index, self.key(self.index)
        return StoreBlock(
            block_id=self.plan.block_ids[i],
            slot=SlotId(self.slots[i]),
            generation=Generation(self.generations[i]),
            key=key,
            header=header(self.prefix, key),
        )

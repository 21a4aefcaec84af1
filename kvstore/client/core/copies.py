"""A job of one rank while it runs, and the block copies that it consists of.

    LoadJob ─────────▶ RunningLoad  ──copy()──▶ LoadBlock       Copied | Void | Mismatch
    StoreJob ────────▶ RunningStore ──copy()──▶ StoreBlock      Copied | Void
      with `compare` ▶ RunningCheck ──copy()──▶ CompareBlock    Compared | Void | Mismatch

Covers: unpacking a plan's arrays, which block is next, ends of copies, the datagrams about
them. Does not cover: order and reports of jobs (`kvstore.client.core.rank`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from kvstore.client.core.plan import CompareResult, LoadJob, StoreJob
from kvstore.errors import ProtocolError
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, BlockKey, Generation, SlotId
from kvstore.wire import messages as wire
from kvstore.wire.record import header

PLAN_MALFORMED = "the plan's arrays do not fit together"


class SlotBlock(msgspec.Struct, frozen=True):
    """One block of the engine's cache, and a slot that counts only while it has this generation."""

    group: int
    """KV cache group of the block."""
    block_id: int
    slot: SlotId
    generation: Generation
    key: BlockKey
    header: bytes
    """Bytes before the payload that the checksum covers (`kvstore.wire.record`)."""
    checksum: bytes | None = None
    """16 bytes to compare with; None: no check, since the bytes crossed no medium and no restart
    of the node."""
    after: int = 0
    """Mark of engine work (`ports.CopyEngine.mark`) that must be done before the copy; 0: none."""


class LoadBlock(SlotBlock, frozen=True):
    """Copy: slot → engine block. The generation is compared before and after."""


class StoreBlock(SlotBlock, frozen=True):
    """Copy: engine block → slot, if the slot still has this generation; return the checksum."""


class CompareBlock(SlotBlock, frozen=True):
    """Copy nothing: compare an engine block with a slot, if that still has this generation. Where
    values differ and the checksum does not match, the slot's bytes are damaged, nothing more."""


class Copied(msgspec.Struct, frozen=True):
    """The copy is complete and its generation was valid to the end."""

    checksum: bytes = b""
    """16 bytes; of a load that was not asked to verify: empty."""
    duration_ns: int = 0


class CopyVoid(msgspec.Struct, frozen=True):
    """The slot no longer holds the planned block, or cannot be read; nothing may be used."""

    reason: str = "the slot was given to another block"


class Mismatch(msgspec.Struct, frozen=True):
    """Load or compare: generation valid, checksum wrong."""


class CopyCompared(msgspec.Struct, frozen=True):
    """The slot held the block to the end, and its bytes are those that were stored."""

    error: float
    """Relative distance of the values in the two."""
    diverged: bool
    """Error beyond that of another order of computing: another block, model or prompt."""


Copy = LoadBlock | StoreBlock | CompareBlock
Outcome = Copied | CopyVoid | Mismatch | CopyCompared


class RankColumn(msgspec.Struct, frozen=True):
    """A rank's part in one KV cache group of a session."""

    number: int
    """Place of its shard in the [n][S] arrays."""
    writes: bool
    prefix: bytes
    """Prefix of the headers that checksums cover."""


class Job:
    """One job under way. Blocks before index `next` were handed out in order; their copies end in
    any order."""

    kind: ClassVar[type[Copy]]

    def __init__(self, plan: LoadJob | StoreJob, its: RankColumn, after: int) -> None:
        self.plan = plan
        self.after = after
        """Mark of engine work that must be done before any copy of the job; 0: none."""
        self.next = 0
        self.in_flight: set[int] = set()
        """Indexes of blocks whose copy has not ended."""
        self.prefix = its.prefix
        self.abandoned = ""
        """Why the job ends with its copies in flight; empty while it goes on."""
        n, column = len(plan.block_ids), its.number
        checksums = plan.checksums
        shards, rest = divmod(len(plan.slots), 4 * n)
        if (
            rest
            or column >= shards
            or len(plan.keys) != n * KEY_BYTES
            or len(plan.generations) != n * shards * 8
            or len(checksums) not in (0, n * shards * CHECKSUM_BYTES)
        ):
            raise ProtocolError(PLAN_MALFORMED)
        self.slots = wire.slots_array(plan.slots).reshape(n, shards)[:, column]
        self.generations = wire.generations_array(plan.generations).reshape(n, shards)[:, column]
        step, first = shards * CHECKSUM_BYTES, column * CHECKSUM_BYTES
        every = [checksums[at : at + CHECKSUM_BYTES] for at in range(first, len(checksums), step)]
        self.checksums = [checksum if any(checksum) else None for checksum in every]
        """One per block, None where there is nothing to verify; empty if that is so for all."""

    @property
    def has_next(self) -> bool:
        """Whether there is a copy to hand out."""
        return not self.abandoned and self.next < len(self.plan.block_ids)

    @property
    def is_over(self) -> bool:
        """Nothing is in flight, and nothing will be."""
        return not (self.in_flight or self.has_next)

    @property
    def remaining(self) -> tuple[int, ...]:
        """Engine blocks whose copy has not ended."""
        in_flight = (self.plan.block_ids[i] for i in self.in_flight)
        return (*in_flight, *self.plan.block_ids[self.next :])

    def begin(self) -> int:
        """Hand out the next copy. Returns its index."""
        index = self.next
        self.in_flight.add(index)
        self.next += 1
        return index

    def places(self, indexes: list[int]) -> tuple[bytes, bytes]:
        """Slots (u32 each) and generations (u64 each) of these blocks, as datagrams have them."""
        return self.slots[indexes].tobytes(), self.generations[indexes].tobytes()

    def key(self, index: int) -> BlockKey:
        return BlockKey(self.plan.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES])

    def copy(self, index: int) -> Copy:
        key = self.key(index)
        return self.kind(
            self.plan.group,
            self.plan.block_ids[index],
            SlotId(int(self.slots[index])),
            Generation(int(self.generations[index])),
            key,
            header(self.prefix, key),
            self.checksums[index] if self.checksums else None,
            self.after,
        )


class RunningLoad(Job):
    """Slots → engine blocks; no copy begins after one that failed."""

    kind = LoadBlock
    plan: LoadJob

    def __init__(self, plan: LoadJob, its: RankColumn, after: int) -> None:
        super().__init__(plan, its, after)
        self.copied: set[int] = set()
        self.duration_ns = 0

    @property
    def loaded_blocks(self) -> int:
        """Leading blocks that hold what was stored."""
        count = 0
        while count in self.copied:
            count += 1
        return count

    def verified(self) -> list[int]:
        """Indexes of the blocks that were copied and compared with their checksum."""
        if not self.checksums:
            return []
        return [i for i in sorted(self.copied) if self.checksums[i] is not None]


class RunningStore(Job):
    """Engine blocks → granted slots; a block that cannot be copied does not stop the others."""

    kind = StoreBlock
    plan: StoreJob

    def __init__(self, plan: StoreJob, its: RankColumn, after: int) -> None:
        super().__init__(plan, its, after)
        self.sealed: dict[int, bytes] = {}
        """Checksum by index of the blocks that were copied."""

    def forget(self, blocks: frozenset[int]) -> None:
        """Drop the checksums of copies from these engine blocks, so that they are not sealed: the
        bytes may have been another request's."""
        for index in [i for i in self.sealed if self.plan.block_ids[i] in blocks]:
            del self.sealed[index]


class RunningCheck(Job):
    """Compares engine blocks with slots; writes nothing."""

    kind = CompareBlock
    plan: StoreJob

    def __init__(self, plan: StoreJob, its: RankColumn, after: int) -> None:
        super().__init__(plan, its, after)
        self.compared = 0
        self.diverged: list[int] = []
        self.worst = 0.0

    def forget(self, blocks: frozenset[int]) -> None:
        """Reset the result if the job reads one of these engine blocks: the values may have been
        another request's."""
        if not blocks.isdisjoint(self.plan.block_ids):
            self.compared, self.diverged, self.worst = 0, [], 0.0

    def take(self, index: int, outcome: Outcome) -> None:
        """Take the outcome of a block."""
        if isinstance(outcome, CopyCompared):
            self.compared += 1
            self.worst = max(self.worst, outcome.error)
            if outcome.diverged:
                self.diverged.append(index)

    def result(self) -> CompareResult:
        blocks = tuple(sorted(self.diverged))
        return CompareResult(self.plan.job, self.compared, blocks, self.worst)


# ── messages to the node ─────────────────────────────────────────────────────────────────────────


def seals(job: RunningStore, indexes: list[int]) -> Iterator[wire.Seal]:
    """Messages that seal the blocks of a job at `indexes`, which are complete."""
    for batch in _batches(indexes):
        slots, generations = job.places(batch)
        yield wire.Seal(
            session=job.plan.session,
            keys=b"".join(job.key(i) for i in batch),
            slots=slots,
            generations=generations,
            checksums=b"".join(job.sealed[i] for i in batch),
            group=job.plan.group,
        )


def drops(job: RunningStore, indexes: list[int]) -> Iterator[wire.Drop]:
    """Messages that drop the blocks of a job at `indexes`, whose slots were not written."""
    for batch in _batches(indexes):
        yield wire.Drop(job.plan.session, *job.places(batch), group=job.plan.group)


def verified(job: RunningLoad) -> Iterator[wire.Verified]:
    """Messages that report the blocks of a load whose bytes are those that were stored."""
    for batch in _batches(job.verified()):
        yield wire.Verified(*job.places(batch))


def distrust(job: Job, index: int) -> wire.Distrust:
    """The message that reports the bytes of a job's block as damaged."""
    return wire.Distrust(*job.places([index]))


def _batches(indexes: list[int]) -> Iterator[list[int]]:
    step = wire.KEYS_PER_DATAGRAM_MAX
    return (indexes[at : at + step] for at in range(0, len(indexes), step))

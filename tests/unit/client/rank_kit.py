"""A rank core in a session, jobs for it, and a driver that copies nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.client.core.plan import LoadJob, StepPlan, StoreJob
from kvstore.client.core.rank import Copy, RankCore
from kvstore.ports import CopyEnd
from kvstore.types import Shard
from kvstore.wire.messages import PROTOCOL_VERSION, Quiesce, Quiet, Welcome
from kvstore.wire.space import Group, ShardColumn
from tests.kit.hello import rank_hello, space_of

SPACE = space_of(
    kv_dtype="auto",
    isa="vec",
    block_tokens=128,
    hash_block_tokens=128,
    layer_count=2,
    kv_head_count=2,
    head_bytes=(128 * 64,),
)
CONFIG = rank_hello(Group(SPACE, Shard(0, 2, 1, 2), 4096), rank=1)
SHARDS = 2
COLUMN = 1
WELCOME = Welcome(
    protocol=PROTOCOL_VERSION, incarnation=7, now_ns=1, arena_bytes=1 << 20, generation_bytes=4096
)
SUM = bytes(range(16))
COPIED = CopyEnd(0, SUM, duration_ns=10)
VOID = CopyEnd(0, reason="gone")
DAMAGED = CopyEnd(0, b"other bytes here")
"""Of a copy with a checksum."""


def arrays(first: int, count: int) -> tuple[bytes, bytes, bytes]:
    """Keys, slots, generations of `count` blocks: in column c of block i the slot is
    16 * (SHARDS * (first + i) + c), the generation that plus one."""
    numbers = np.arange(SHARDS * first, SHARDS * (first + count), dtype=np.uint64) * 16
    keys = b"".join((first + i).to_bytes(32, "big") for i in range(count))
    return keys, numbers.astype("<u4").tobytes(), (numbers + 1).astype("<u8").tobytes()


def load(
    session: int, first: int, count: int, *, lease: int = 1, checksums: bytes = b""
) -> LoadJob:
    keys, slots, generations = arrays(first, count)
    blocks = tuple(range(first, first + count))
    return LoadJob(
        request=f"r{lease}",
        lease=lease,
        session=session,
        block_ids=blocks,
        keys=keys,
        slots=slots,
        generations=generations,
        checksums=checksums,
    )


def store(session: int, first: int, count: int, *, job: int = 1) -> StoreJob:
    keys, slots, generations = arrays(first, count)
    return StoreJob(
        job=job,
        session=session,
        block_ids=tuple(range(first, first + count)),
        keys=keys,
        slots=slots,
        generations=generations,
    )


def serving(
    session: int = 5,
    *,
    column: int = COLUMN,
    writes: bool = True,
    copies_max: int = 1,
    is_fenced_late: bool = False,
) -> RankCore:
    core = RankCore(CONFIG, copies_max=copies_max, is_fenced_late=is_fenced_late)
    core.hello()
    core.connected(WELCOME)
    core.received(Quiesce(session, columns=(ShardColumn(column, writes=writes),)))
    assert core.take_outbox() == [Quiet(session)]
    return core


def run(core: RankCore, end: Callable[[Copy], CopyEnd] | None = None) -> list[Copy]:
    copies = []
    while (copy := core.next_copy()) is not None:
        copies.append(copy)
        whole = COPIED._replace(checksum=copy.checksum or SUM)
        core.finished(copy, end(copy) if end else whole)
    return copies


def begun(core: RankCore, count: int = 1) -> list[Copy]:
    """So many copies, in flight."""
    copies = [core.next_copy() for _ in range(count)]
    assert None not in copies
    return [copy for copy in copies if copy is not None]


def plan(*jobs: LoadJob | StoreJob) -> StepPlan:
    return StepPlan(
        loads=tuple(job for job in jobs if isinstance(job, LoadJob)),
        stores=tuple(job for job in jobs if isinstance(job, StoreJob)),
    )

"""A slab of device memory under test: blocks of dram that are copied into it."""

from __future__ import annotations

import select
from collections.abc import Sequence

import numpy as np

from kvstore.tier_events import Promote, Promoted
from kvstore.tiers.hbm import HbmTier
from kvstore.types import PAGE_BYTES, Shard
from kvstore.wire.record import Scope, checksum_of

WAIT_S = 20.0
KEY = bytes(range(32))


def order_of(
    blocks: Sequence[tuple[int, int, bytes]], *, job: int = 1, checksums: bytes | None = None
) -> Promote:
    """An order for blocks (slot of dram, slot of hbm, bytes there), all of one length."""
    scope = Scope("t", bytes(32), Shard(0, 1, 0, 1), len(blocks[0][2]))
    sums = [checksum_of(scope.prefix() + KEY, [data]) for _, _, data in blocks]
    return Promote(
        job,
        scope,
        KEY * len(blocks),
        np.array([source for source, _, _ in blocks], np.uint32),
        b"".join(sums) if checksums is None else checksums,
        np.array([target for _, target, _ in blocks], np.uint32),
    )


def ended(tier: HbmTier) -> Promoted:
    """The next end of an order."""
    assert select.select([tier.fileno()], [], [], WAIT_S)[0], "no order ended"
    return next(tier.take_events())


def read(tier: HbmTier, slot: int, length: int) -> bytes:
    """Bytes of a slot of hbm, of a tier that copies nothing meanwhile."""
    begin = np.uint64(tier._address + slot * PAGE_BYTES)
    tier._copy(np.array([tier._staging.ctypes.data], np.uint64), np.array([begin]), length)
    tier._finish()
    return tier._staging[:length].tobytes()

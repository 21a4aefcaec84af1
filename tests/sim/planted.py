"""Bugs that were shipped in systems like this one, planted here one at a time, for tests only.

Each replaces one function by a version that does what went wrong elsewhere; nothing in the product
asks whether it is planted. The seeded world must notice every one of them.

Two more of the twelve need a cluster, and are for the world of several nodes to catch: a stale
index after a restart at the same address, and a ghost endpoint (a router that goes on sending to a
node that is gone).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from kvstore.client.core.lookups import Lookup, Lookups
from kvstore.client.core.plan import LoadJob, LoadResult
from kvstore.client.core.rank import RankCore
from kvstore.engine.leases import Leases
from kvstore.engine.owners import Connection
from kvstore.engine.stores import Stores
from kvstore.engine.table import BlockTable, Keys, Rows
from kvstore.testing.sim_rank import SimRank
from kvstore.tiers.file.catalog import Segment
from kvstore.tiers.file.jobs import ReadJob
from kvstore.tiers.file.reader import Reader, Wanted
from kvstore.tiers.file.tier import FileTier
from kvstore.wire.messages import Distrust
from kvstore.wire.record import Scope

Planted = Callable[[], contextlib.AbstractContextManager[Any]]


def free_on_abort() -> contextlib.AbstractContextManager[Any]:
    """The slots of a read that takes too long are given up: the disk writes there later."""
    late = FileTier._late

    def broken(self: FileTier, job: ReadJob, now_ns: int) -> None:
        late(self, job, now_ns)
        self._end(job)

    return mock.patch.object(FileTier, "_late", broken)


def lease_checked_before_the_copy_only() -> contextlib.AbstractContextManager[Any]:
    """A slot that is reused while it is copied from is not noticed."""
    return mock.patch.object(SimRank, "still_holds", return_value=True)


def batch_path_without_check() -> contextlib.AbstractContextManager[Any]:
    """Of several records that are read at once only the first is verified."""
    is_good = Reader._is_good

    def broken(
        self: Reader, segment: Segment, scope: Scope, prefix: bytes, wanted: Wanted, row: int
    ) -> bool:
        return row > 0 or is_good(self, segment, scope, prefix, wanted, row)

    return mock.patch.object(Reader, "_is_good", broken)


def verdict_not_invalidated() -> contextlib.AbstractContextManager[Any]:
    """A copy that failed its checksum stays, and is lent to the next one."""

    def broken(self: Stores, connection: Connection, message: Distrust) -> None:
        return

    return mock.patch.object(Stores, "distrust", broken)


def size_only_validation() -> contextlib.AbstractContextManager[Any]:
    """A record is good when it is as long as it should be."""
    return mock.patch.object(Reader, "_is_good", return_value=True)


def pin_without_owner() -> contextlib.AbstractContextManager[Any]:
    """Leases of a session that ends are forgotten, their pins are not taken back."""

    def broken(self: Leases, session: int) -> None:
        self._by_session.pop(session, None)

    return mock.patch.object(Leases, "end_session", broken)


def double_unpin() -> contextlib.AbstractContextManager[Any]:
    """A lease that is given back is taken back once more: somebody else's pin goes with it."""
    release = Leases.release

    def broken(self: Leases, session: int, leases: list[int]) -> None:
        for number in leases:
            lease = self.get(session, number)
            if lease is not None:
                self._unpin(lease)
        release(self, session, leases)

    return mock.patch.object(Leases, "release", broken)


def first_of_several_errors_frees() -> contextlib.AbstractContextManager[Any]:
    """The first rank whose part of a load fails ends it, while other ranks still copy theirs."""
    reported = Lookups.reported

    def broken(self: Lookups, result: LoadResult, now_ns: int) -> Lookup | None:
        entry = self._by_lease.get(result.lease)
        ended = reported(self, result, now_ns)
        if ended is None and entry is not None and result.failed_block_ids:
            self.release(entry[0])
            return entry[0]
        return ended

    return mock.patch.object(Lookups, "reported", broken)


def hit_without_load() -> contextlib.AbstractContextManager[Any]:
    """A load that could not begin is reported as done."""
    load_result = RankCore._load_result

    def broken(
        self: RankCore, plan: LoadJob, *, loaded: int, duration_ns: int, reason: str
    ) -> None:
        load_result(self, plan, loaded=len(plan.block_ids), duration_ns=duration_ns, reason="")

    return mock.patch.object(RankCore, "_load_result", broken)


def truncated_hash() -> contextlib.AbstractContextManager[Any]:
    """Keys are told apart by a few of their bits."""
    return _both(
        mock.patch.object(BlockTable, "find", _with_short_keys(BlockTable.find)),
        mock.patch.object(BlockTable, "insert", _with_short_keys(BlockTable.insert)),
    )


def _with_short_keys(
    method: Callable[[BlockTable, int, Keys], Rows],
) -> Callable[[BlockTable, int, Keys], Rows]:
    def broken(self: BlockTable, scope: int, keys: Keys) -> Rows:
        short = np.zeros_like(keys)
        short[:, 0] = keys[:, 0] & np.uint64(0xFF)
        return method(self, scope, short)

    return broken


@contextlib.contextmanager
def _both(*contexts: contextlib.AbstractContextManager[Any]) -> Any:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


PLANTED: Sequence[Planted] = (
    free_on_abort,
    lease_checked_before_the_copy_only,
    batch_path_without_check,
    verdict_not_invalidated,
    size_only_validation,
    pin_without_owner,
    double_unpin,
    first_of_several_errors_frees,
    hit_without_load,
    truncated_hash,
)
NOT_YET = ("stale_index_after_same_address_restart", "ghost_endpoint")
"""Of the twelve."""

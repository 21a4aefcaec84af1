"""Bugs that were shipped in systems like this one, planted here one at a time, for tests only.

Each replaces one function by a version that does what went wrong elsewhere; nothing in the product
asks whether it is planted. The seeded world must notice every one of them.

Two of the twelve are a cluster's, and have first the form here that they take on one machine and in
a shared directory: a stale index after a restart at the same address (a peer's directory, a node's
sessions) and a ghost endpoint (a rank that is gone). `CLUSTERED` has their forms in a cluster, and
what else goes wrong between nodes. The router's come with that.

`RESTARTED` is a bug of a node process that goes on with the memory of the one before.

`FOUND` are bugs of the product that a seed found: planted again, so that each stays found whatever
becomes of that seed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.client.core import lookups, stores
from kvstore.client.core.lookups import EngineLookups
from kvstore.client.core.plan import LoadJob, LoadResult
from kvstore.client.core.request import Request, needed_blocks
from kvstore.client.core.scheduler import SchedulerCore
from kvstore.client.core.stores import EngineStores, FilledBlocks, OpenJob
from kvstore.engine.events import Fetch, Fetched
from kvstore.engine.memory.journal import Journal, JournalContents
from kvstore.engine.memory.shares import QuotaGroup, Quotas
from kvstore.engine.memory.table import BlockTable, Keys, Rows
from kvstore.engine.moves.stores import Stores
from kvstore.engine.sessions.leases import Leases
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.sessions.sessions import Sessions
from kvstore.engine.state import State
from kvstore.index.feed import Feed, Heard
from kvstore.peers import fetcher
from kvstore.peers.fetcher import Fetcher, _session_of
from kvstore.peers.peer_session import PeerSession, SessionLost
from kvstore.tiers.file.contents import SegmentFile
from kvstore.tiers.file.directory import Directory
from kvstore.tiers.file.discovery import Peers
from kvstore.tiers.file.reader import Reader, ReadJob, WantedBlock
from kvstore.tiers.file.tier import FileTier
from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, ConnectionId
from kvstore.wire.assembly import Assembly
from kvstore.wire.feed import Hello
from kvstore.wire.messages import Distrust, LeaseRelease
from kvstore.wire.peers import ServeAnswer, checksums_of
from kvstore.wire.record import BlockPage, Scope, checksum_of, parse_page
from tests.sim.world import engine, groups
from tests.sim.world.copies import SimCopies
from tests.sim.world.groups import NULL_BLOCK, Kind

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
    return mock.patch.object(SimCopies, "still_holds", return_value=True)


def batch_path_without_check() -> contextlib.AbstractContextManager[Any]:
    """Of several records that are read at once only the first is verified."""
    is_good = Reader._is_good

    def broken(
        self: Reader, file: SegmentFile, scope: Scope, prefix: bytes, wanted: WantedBlock, row: int
    ) -> bool:
        return row > 0 or is_good(self, file, scope, prefix, wanted, row)

    return mock.patch.object(Reader, "_is_good", broken)


def verdict_not_invalidated() -> contextlib.AbstractContextManager[Any]:
    """A copy that failed its checksum stays, and is served to the next one."""

    def broken(self: Stores, connection: Connection, message: Distrust) -> None:
        return

    return mock.patch.object(Stores, "distrust", broken)


def size_only_validation() -> contextlib.AbstractContextManager[Any]:
    """A record is good when it is as long as it should be."""
    return mock.patch.object(Reader, "_is_good", return_value=True)


def pin_without_owner() -> contextlib.AbstractContextManager[Any]:
    """Leases of a session that ends are forgotten, their pins are not taken back."""

    def broken(self: Leases, session: int) -> None:
        for number in self._by_session.pop(session, {}):
            self._agenda.drop((session, number))

    return mock.patch.object(Leases, "end_session", broken)


def double_unpin() -> contextlib.AbstractContextManager[Any]:
    """A lease that is given back is taken back once more: somebody else's pin goes with it."""
    release = Leases.release

    def broken(self: Leases, session: int, leases: list[int]) -> None:
        for number in leases:
            lease = self.get(session, number)
            if lease is not None:
                for words, generations in lease.pieces:
                    held = self._slots.generation[words] == generations
                    self._slots.pins.unpin(words[held], lease.account)
        release(self, session, leases)

    return mock.patch.object(Leases, "release", broken)


def first_of_several_errors_frees() -> contextlib.AbstractContextManager[Any]:
    """The first rank whose part of a load fails ends it, while other ranks still copy theirs."""
    reported = EngineLookups.reported

    def broken(self: EngineLookups, result: LoadResult, now_ns: int) -> bool:
        entry = self._by_lease.get(result.lease)
        has_ended = reported(self, result, now_ns)
        if not has_ended and entry is not None and result.failed_block_ids:
            self.release(entry[0])
            return True
        return has_ended

    return mock.patch.object(EngineLookups, "reported", broken)


def hit_without_load() -> contextlib.AbstractContextManager[Any]:
    """A load that could not begin is reported as done."""
    result = LoadJob.result

    def broken(self: LoadJob, **more: Any) -> LoadResult:
        return result(self, **more | {"loaded": len(self.block_ids), "reason": ""})

    return mock.patch.object(LoadJob, "result", broken)


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


def stale_index_after_same_address_restart() -> contextlib.AbstractContextManager[Any]:
    """A peer that begins again under the same name is taken for what it was: what it had is still
    believed, what it has is never seen."""
    return mock.patch.object(Peers, "_is_same", return_value=True)


def stale_sessions_after_same_address_restart() -> contextlib.AbstractContextManager[Any]:
    """A restarted node counts sessions from 1 again: leases and credits of its predecessor pass for
    its own."""
    init = Sessions.__init__

    def broken(self: Sessions, state: State) -> None:
        init(self, state)
        self._next_session = 1

    return mock.patch.object(Sessions, "__init__", broken)


def ghost_endpoint() -> contextlib.AbstractContextManager[Any]:
    """A rank whose socket ended counts as present: its engine goes on being served and granted
    to."""
    ended = Sessions.ended

    def broken(self: Sessions, id: ConnectionId) -> None:
        connection = self._state.connections.get(id)
        if connection is not None and connection.role == "rank":
            connection.ended = True
            return
        ended(self, id)

    return mock.patch.object(Sessions, "ended", broken)


# ── with the memory of the process before ────────────────────────────────────────────────────────


def granted_slots_are_free_after_a_restart() -> contextlib.AbstractContextManager[Any]:
    """The next process gives slots to others that a rank may still write to."""
    examine = Journal.examine

    def broken(self: Journal, *, quotas: Sequence[str], writers: set[int]) -> JournalContents:
        found = examine(self, quotas=quotas, writers=writers)
        self.name_writer(found.held, 0)
        return msgspec.structs.replace(found, held=found.held[:0], writers=found.writers[:0])

    return mock.patch.object(Journal, "examine", broken)


# ── found here ───────────────────────────────────────────────────────────────────────────────────


def identity_put_aside_too_early() -> contextlib.AbstractContextManager[Any]:
    """A directory whose identity cannot be read is given a new one, the old one put aside before it
    is there: on a disk that takes none, it was a stranger's for ever."""
    identity = Directory._identity

    def broken(self: Directory) -> bytes:
        try:
            return identity(self)
        except OSError:
            self.put_aside("store", "no regular file", keep_bytes=0)
            return self._new_identity("", keep_bytes=0)

    return mock.patch.object(Directory, "_identity", broken)


# ── between nodes ────────────────────────────────────────────────────────────────────────────────


def stale_index_answers_believed() -> contextlib.AbstractContextManager[Any]:
    """What the index says is there is taken for what was read, neither verified nor asked of its
    source."""

    def broken(
        self: Fetcher,
        assembly: Assembly,
        command: Fetch,
        slots: NDArray[np.int64],
        answer: ServeAnswer,
    ) -> list[Sequence[bytes] | None]:
        return [
            checksums_of(answer.checksums, block=block, shards=len(answer.shards))
            for block in range(len(slots))
        ]

    return _both(mock.patch.object(Fetcher, "_verify", broken), _whatever_stayed())


def stale_index_keeps_what_was_there_before_a_restart() -> contextlib.AbstractContextManager[Any]:
    """What a node said before it was started anew still counts."""
    hello = Feed._hello

    def broken(self: Feed, event: Hello, now_ms: int) -> Heard:
        return msgspec.structs.replace(hello(self, event, now_ms), forget=False)

    return mock.patch.object(Feed, "_hello", broken)


def ghost_endpoint_of_a_peer() -> contextlib.AbstractContextManager[Any]:
    """A session stays in use when its node is gone and another incarnation, or another node, is at
    that address."""
    return _both(
        mock.patch.object(Fetcher, "_forget", return_value=None),
        mock.patch.object(fetcher, "_is_lost", lambda opening: _session_of(opening) is None),
    )


def serving_checked_before_the_read_only() -> contextlib.AbstractContextManager[Any]:
    """That a block did not stay until it had been read does not count against it."""
    return _whatever_stayed()


def _whatever_stayed() -> contextlib.AbstractContextManager[Any]:
    judge = Fetcher._judge

    def broken(
        self: Fetcher, command: Fetch, stayed: NDArray[np.bool_], *others: Any, shards: int
    ) -> tuple[bytes, bytes]:
        return judge(self, command, np.ones_like(stayed), *others, shards=shards)

    return mock.patch.object(Fetcher, "_judge", broken)


def fetched_slots_freed_by_a_timer() -> contextlib.AbstractContextManager[Any]:
    """A fetch that takes long is given up: the transfer worker writes to its slots later."""
    fetch = Fetcher._fetch_from

    async def broken(self: Fetcher, session: PeerSession, command: Fetch, count: int) -> Fetched:
        try:
            return await asyncio.wait_for(
                asyncio.shield(fetch(self, session, command, count)), 0.05
            )
        except TimeoutError:
            raise SessionLost("it takes too long") from None

    return mock.patch.object(Fetcher, "_fetch_from", broken)


# ── of engines with several KV cache groups, and of what several ranks share ─────────────────────


def window_off_by_one() -> contextlib.AbstractContextManager[Any]:
    """A load leaves out the first of the blocks that a window reaches."""

    def broken(*arguments: Any) -> list[range]:
        first, *others = needed_blocks(*arguments)
        return [first, *(each[1:] for each in others)]

    return mock.patch.object(lookups, "needed_blocks", broken)


def groups_swapped() -> contextlib.AbstractContextManager[Any]:
    """Blocks are stored under the keys of the next KV cache group."""
    bind = EngineStores.bind

    def broken(self: EngineStores, request: Request, filled: FilledBlocks, needed: Any) -> None:
        group = (filled.group + 1) % len(self._config.block_sizes)
        bind(self, request, filled._replace(group=group), needed)

    return mock.patch.object(EngineStores, "bind", broken)


def null_block_stored() -> contextlib.AbstractContextManager[Any]:
    """What stands in a table for blocks that are not kept is taken for one."""
    return mock.patch.object(stores, "NULL_BLOCK", -1)


def state_of_another_boundary() -> contextlib.AbstractContextManager[Any]:
    """Of a recurrent layer the state that the engine hands over is taken for the one before."""
    handed_over = groups.handed_over

    def broken(kind: Kind, table: Sequence[int], computed: int) -> list[int]:
        blocks = handed_over(kind, table, computed)
        return [*blocks[1:], NULL_BLOCK] if kind == "state" else blocks

    return mock.patch.object(engine, "handed_over", broken)


def fence_skipped_for_a_freed_window() -> contextlib.AbstractContextManager[Any]:
    """Blocks of other groups than the first are handed out again while a store reads them."""
    begin = EngineStores._begin

    def broken(self: EngineStores, entry: OpenJob) -> None:
        begin(self, entry)
        if entry.job.group:
            self._source_blocks.subtract(entry.job.block_ids)
            self._source_blocks = +self._source_blocks

    return mock.patch.object(EngineStores, "_begin", broken)


def load_targets_not_fenced() -> contextlib.AbstractContextManager[Any]:
    """A load writes where a store still reads."""
    plan = SchedulerCore.plan

    def broken(self: SchedulerCore, *arguments: Any, **more: Any) -> Any:
        loads = self._take_loads()
        return msgspec.structs.replace(plan(self, *arguments, **more), loads=loads)

    return mock.patch.object(SchedulerCore, "plan", broken)


def lease_released_at_the_first_rank() -> contextlib.AbstractContextManager[Any]:
    """The other ranks still copy."""
    reported = EngineLookups.reported

    def broken(self: EngineLookups, result: LoadResult, now_ns: int) -> bool:
        has_ended = reported(self, result, now_ns)
        entry = self._by_lease.get(result.lease)
        if not has_ended and entry is not None and entry[0].parts:
            self._attachment.outbox.append(LeaseRelease(leases=[p.lease for p in entry[0].parts]))
        return has_ended

    return mock.patch.object(EngineLookups, "reported", broken)


# ── of tenants and spaces ────────────────────────────────────────────────────────────────────────


def quota_rounded_up() -> contextlib.AbstractContextManager[Any]:
    """A group loses a slot more than it has above its share."""
    spare = Quotas.spare_bytes

    def broken(self: Quotas, giver: QuotaGroup, asker: QuotaGroup) -> int:
        found = spare(self, giver, asker)
        return found + SLOT_BYTES_MIN - 1 if found else 0

    return mock.patch.object(Quotas, "spare_bytes", broken)


def record_of_another_space() -> contextlib.AbstractContextManager[Any]:
    """A record on disk is good, wherever it lies, for whoever asks for its key."""

    def broken(
        self: Reader, file: SegmentFile, scope: Scope, prefix: bytes, wanted: WantedBlock, row: int
    ) -> bool:
        page = self._headers.page(row)
        found = parse_page(
            page, segment_id=bytes(page[8:24]), place=int.from_bytes(page[24:32], "little")
        )
        if not isinstance(found, BlockPage) or found.key != wanted.key:
            return False
        payload = self._payload(wanted.slot * PAGE_BYTES, scope.block_bytes)
        return checksum_of(found.scope.prefix() + found.key, [payload]) == found.checksum

    return mock.patch.object(Reader, "_is_good", broken)


GROUPED: Sequence[Planted] = (
    window_off_by_one,
    groups_swapped,
    null_block_stored,
    state_of_another_boundary,
    fence_skipped_for_a_freed_window,
    load_targets_not_fenced,
    lease_released_at_the_first_rank,
)
SHARED: Sequence[Planted] = (quota_rounded_up, record_of_another_space)
"""Of what tenants and spaces share."""
CALM: Sequence[Planted] = (stale_index_after_same_address_restart, quota_rounded_up)
"""In no world of 200 with faults of its own was one of these noticed."""
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
    stale_index_after_same_address_restart,
    stale_sessions_after_same_address_restart,
    ghost_endpoint,
)
"""The twelve, of one of them two forms."""
CLUSTERED: Sequence[Planted] = (
    stale_index_answers_believed,
    stale_index_keeps_what_was_there_before_a_restart,
    ghost_endpoint_of_a_peer,
    serving_checked_before_the_read_only,
    fetched_slots_freed_by_a_timer,
)
"""Forms of the twelve between nodes."""
RESTARTED: Sequence[Planted] = (granted_slots_are_free_after_a_restart,)
"""Beside the twelve."""
FOUND: dict[Planted, tuple[str, ...]] = {
    identity_put_aside_too_early: ("disk full", "no descriptors", "node killed"),
    stale_index_after_same_address_restart: ("directory emptied", "directory swapped"),
    batch_path_without_check: ("misdirected read", "clear", "node restarts in a step"),
    record_of_another_space: ("misdirected read",),
}
"""With the faults that it takes."""

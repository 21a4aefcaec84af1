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
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client.core import lookups, stores
from kvstore.client.core.lookups import EngineLookups
from kvstore.client.core.plan import LoadJob, LoadResult
from kvstore.client.core.request import Request, needed_blocks
from kvstore.client.core.scheduler import SchedulerCore
from kvstore.client.core.stores import EngineStores, FilledBlocks
from kvstore.engine.events import Fetch
from kvstore.engine.memory.journal import Journal
from kvstore.engine.memory.shares import QuotaGroup, Quotas
from kvstore.engine.memory.table import BlockTable, Keys
from kvstore.engine.moves.stores import Stores
from kvstore.engine.sessions.leases import Leases
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.sessions.sessions import Sessions
from kvstore.engine.state import State
from kvstore.index.feed import Places
from kvstore.peers.fetcher import Fetcher
from kvstore.peers.peer_session import PeerSession, SessionLost
from kvstore.tier_events import ReadFile
from kvstore.tiers.file.contents import SegmentFile
from kvstore.tiers.file.directory import Directory
from kvstore.tiers.file.discovery import Peers
from kvstore.tiers.file.parts import FileJob
from kvstore.tiers.file.reader import Reader
from kvstore.tiers.file.tier import FileTier
from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, ConnectionId
from kvstore.wire.assembly import Assembly
from kvstore.wire.messages import Distrust, LeaseRelease
from kvstore.wire.peers import checksums_of
from kvstore.wire.record import BlockPage, checksum_of, parse_page
from tests.kit.planted import Patch, instead_of
from tests.sim.world import engine
from tests.sim.world.copies import SimCopies
from tests.sim.world.groups import NULL_BLOCK, Kind


@instead_of(FileTier, "_late")
def free_on_abort(late: Any, self: FileTier, job: FileJob[ReadFile], now_ns: int) -> None:
    """The slots of a read that takes too long are given up: the disk writes there later."""
    late(self, job, now_ns)
    if job.runs:
        job.runs = 0
        self._end_if_done(job)


def lease_checked_before_the_copy_only(patch: pytest.MonkeyPatch) -> None:
    """A slot that is reused while it is copied from is not noticed."""
    patch.setattr(SimCopies, "still_holds", lambda *_: True)


@instead_of(Reader, "_is_good")
def batch_path_without_check(
    is_good: Any,
    self: Reader,
    file: SegmentFile,
    order: ReadFile,
    index: int,
    row: int,
    page: int,
) -> Any:
    """Of several records that are read at once only the first is verified."""
    return row > 0 or is_good(self, file, order, index, row, page)


@instead_of(Stores, "distrust")
def verdict_not_invalidated(
    _: Any, self: Stores, connection: Connection, message: Distrust
) -> None:
    """A copy that failed its checksum stays, and is served to the next one."""


def size_only_validation(patch: pytest.MonkeyPatch) -> None:
    """A record is good when it is as long as it should be."""
    patch.setattr(Reader, "_is_good", lambda *_: True)


@instead_of(Leases, "end_session")
def pin_without_owner(_: Any, self: Leases, session: int) -> None:
    """Leases of a session that ends are forgotten, their pins are not taken back."""
    for number in self._by_session.pop(session, {}):
        self._agenda.drop((session, number))


@instead_of(Leases, "release")
def double_unpin(release: Any, self: Leases, session: int, leases: list[int]) -> None:
    """A lease that is given back is taken back once more: somebody else's pin goes with it."""
    for number in leases:
        lease = self.get(session, number)
        if lease is not None:
            for words, generations in lease.pieces:
                held = self._slots.generation[words] == generations
                self._slots.pins.unpin(words[held], lease.account)
    release(self, session, leases)


@instead_of(EngineLookups, "reported")
def first_of_several_errors_frees(
    reported: Any, self: EngineLookups, result: LoadResult, now_ns: int
) -> Any:
    """The first rank whose part of a load fails ends it, while other ranks still copy theirs."""
    entry = self._by_lease.get(result.lease)
    has_ended = reported(self, result, now_ns)
    if not has_ended and entry is not None and result.failed_block_ids:
        self.release(entry.request)
        return True
    return has_ended


@instead_of(LoadJob, "result")
def hit_without_load(result: Any, self: LoadJob, **more: Any) -> Any:
    """A load that could not begin is reported as done."""
    return result(self, **more | {"loaded": len(self.block_ids), "reason": ""})


def truncated_hash(patch: pytest.MonkeyPatch) -> None:
    """Keys are told apart by a few of their bits."""
    for name in ("find", "insert"):
        _with_short_keys(name)(patch)


def _with_short_keys(name: str) -> Patch:
    @instead_of(BlockTable, name)
    def broken(real: Any, self: BlockTable, scope: int, keys: Keys) -> Any:
        short = np.zeros_like(keys)
        short[:, 0] = keys[:, 0] & np.uint64(0xFF)
        return real(self, scope, short)

    return broken


def stale_index_after_same_address_restart(patch: pytest.MonkeyPatch) -> None:
    """A peer that begins again under the same name is taken for what it was: what it had is still
    believed, what it has is never seen."""
    patch.setattr(Peers, "_is_same", lambda *_: True)


@instead_of(Sessions, "__init__")
def stale_sessions_after_same_address_restart(init: Any, self: Sessions, state: State) -> None:
    """A restarted node counts sessions from 1 again: leases and credits of its predecessor pass for
    its own."""
    init(self, state)
    self._next_session = 1


@instead_of(Sessions, "ended")
def ghost_endpoint(ended: Any, self: Sessions, id: ConnectionId) -> None:
    """A rank whose socket ended counts as present: its engine goes on being served and granted
    to."""
    connection = self._state.connections.get(id)
    if connection is not None and connection.role == "rank":
        connection.ended = True
        return
    ended(self, id)


# ── with the memory of the process before ────────────────────────────────────────────────────────


@instead_of(Journal, "examine")
def granted_slots_are_free_after_a_restart(
    examine: Any, self: Journal, *, quotas: Sequence[str], writers: set[int]
) -> Any:
    """The next process gives slots to others that a rank may still write to."""
    found = examine(self, quotas=quotas, writers=writers)
    self.name_writer(found.held, 0)
    return msgspec.structs.replace(found, held=found.held[:0], writers=found.writers[:0])


# ── found here ───────────────────────────────────────────────────────────────────────────────────


@instead_of(Directory, "_identity")
def identity_put_aside_too_early(identity: Any, self: Directory) -> Any:
    """A directory whose identity cannot be read is given a new one, the old one put aside before it
    is there: on a disk that takes none, it was a stranger's for ever."""
    try:
        return identity(self)
    except OSError:
        self.put_aside("store", "no regular file", keep_bytes=0)
        return self._new_identity("", keep_bytes=0)


# ── between nodes ────────────────────────────────────────────────────────────────────────────────


def stale_index_answers_believed(patch: pytest.MonkeyPatch) -> None:
    """What the index says is there is taken for what was read, neither verified nor asked of its
    source."""

    def broken(
        self: Assembly,
        slots: NDArray[np.int64],
        memory: NDArray[np.uint8],
        keys: bytes,
        checksums: bytes,
    ) -> list[Sequence[bytes]]:
        del memory, keys
        return [
            checksums_of(checksums, block=block, shards=len(self.sources))
            for block in range(len(slots))
        ]

    patch.setattr(Assembly, "verify", broken)
    serving_checked_before_the_read_only(patch)


@instead_of(Places, "forget")
def stale_index_keeps_what_was_there_before_a_restart(_: Any, self: Places) -> None:
    """What a node said before it was started anew still counts."""
    self.abandon()


def ghost_endpoint_of_a_peer(patch: pytest.MonkeyPatch) -> None:
    """A session stays in use when its node is gone and another incarnation, or another node, is at
    that address."""

    @instead_of(Fetcher, "session")
    async def kept(session: Any, self: Fetcher, node: str) -> PeerSession:
        known = self._sessions.get(node)
        return known if known is not None and known.descriptor else await session(self, node)

    patch.setattr(Fetcher, "_forget", lambda *_: None)
    kept(patch)


@instead_of(Fetcher, "_judge")
def serving_checked_before_the_read_only(
    judge: Any, self: Fetcher, command: Fetch, stayed: NDArray[np.bool_], *others: Any, count: int
) -> Any:
    """That a block did not stay until it had been read does not count against it."""
    return judge(self, command, np.ones_like(stayed), *others, count=count)


@instead_of(Fetcher, "_fetch_from")
async def fetched_slots_freed_by_a_timer(
    fetch: Any, self: Fetcher, session: PeerSession, command: Fetch, count: int
) -> Any:
    """A fetch that takes long is given up: the transfer worker writes to its slots later."""
    try:
        return await asyncio.wait_for(asyncio.shield(fetch(self, session, command, count)), 0.05)
    except TimeoutError:
        raise SessionLost("it takes too long") from None


# ── of engines with several KV cache groups, and of what several ranks share ─────────────────────


@instead_of(lookups, "needed_blocks")
def window_off_by_one(_: Any, *arguments: Any) -> list[range]:
    """A load leaves out the first of the blocks that a window reaches."""
    first, *others = needed_blocks(*arguments)
    return [first, *(each[1:] for each in others)]


@instead_of(EngineStores, "bind")
def groups_swapped(
    bind: Any, self: EngineStores, request: Request, filled: FilledBlocks, needed: Any
) -> None:
    """Blocks are stored under the keys of the next KV cache group."""
    group = (filled.group + 1) % len(self._config.block_sizes)
    bind(self, request, filled._replace(group=group), needed)


def null_block_stored(patch: pytest.MonkeyPatch) -> None:
    """What stands in a table for blocks that are not kept is taken for one."""
    patch.setattr(stores, "NULL_BLOCK", -1)


@instead_of(engine, "handed_over")
def state_of_another_boundary(
    handed_over: Any, kind: Kind, table: Sequence[int], computed: int
) -> Any:
    """Of a recurrent layer the state that the engine hands over is taken for the one before."""
    blocks = handed_over(kind, table, computed)
    return [*blocks[1:], NULL_BLOCK] if kind == "state" else blocks


@instead_of(EngineStores, "source_blocks")
def fence_skipped_for_a_freed_window(_: Any, self: EngineStores) -> Any:
    """Blocks of other groups than the first are handed out again while a store reads them."""
    jobs = [entry.job for entry in self._outstanding.values() if not entry.job.group]
    return (block for job in jobs for block in job.block_ids)


@instead_of(SchedulerCore, "plan")
def load_targets_not_fenced(plan: Any, self: SchedulerCore, *arguments: Any, **more: Any) -> Any:
    """A load writes where a store still reads."""
    loads = self._take_loads()
    return msgspec.structs.replace(plan(self, *arguments, **more), loads=loads)


@instead_of(EngineLookups, "reported")
def lease_released_at_the_first_rank(
    reported: Any, self: EngineLookups, result: LoadResult, now_ns: int
) -> Any:
    """The other ranks still copy."""
    has_ended = reported(self, result, now_ns)
    entry = self._by_lease.get(result.lease)
    if not has_ended and entry is not None:
        leases = [part.lease for part in entry.request.parts]
        self._attachment.outbox.append(LeaseRelease(leases=leases))
    return has_ended


# ── of tenants and spaces ────────────────────────────────────────────────────────────────────────


@instead_of(Quotas, "spare_bytes")
def quota_rounded_up(spare: Any, self: Quotas, giver: QuotaGroup, asker: QuotaGroup) -> Any:
    """A group loses a slot more than it has above its share."""
    found = spare(self, giver, asker)
    return found + SLOT_BYTES_MIN - 1 if found else 0


@instead_of(Reader, "_is_good")
def record_of_another_space(
    _: Any,
    self: Reader,
    file: SegmentFile,
    order: ReadFile,
    index: int,
    row: int,
    page: int,
) -> bool:
    """A record on disk is good, wherever it lies, for whoever asks for its key."""
    raw = self._headers.page(row)
    found = parse_page(raw, segment_id=bytes(raw[8:24]), place=int.from_bytes(raw[24:32], "little"))
    if not isinstance(found, BlockPage) or found.key != order.key(index):
        return False
    payload = self._payload(int(order.slots[index]) * PAGE_BYTES, order.scope.block_bytes)
    return checksum_of(found.scope.prefix() + found.key, [payload]) == found.checksum


GROUPED: Sequence[Patch] = (
    window_off_by_one,
    groups_swapped,
    null_block_stored,
    state_of_another_boundary,
    fence_skipped_for_a_freed_window,
    load_targets_not_fenced,
    lease_released_at_the_first_rank,
)
SHARED: Sequence[Patch] = (quota_rounded_up, record_of_another_space)
"""Of what tenants and spaces share."""
CALM: Sequence[Patch] = (stale_index_after_same_address_restart, quota_rounded_up)
"""In no world of 200 with faults of its own was one of these noticed."""
PLANTED: Sequence[Patch] = (
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
CLUSTERED: Sequence[Patch] = (
    stale_index_answers_believed,
    stale_index_keeps_what_was_there_before_a_restart,
    ghost_endpoint_of_a_peer,
    serving_checked_before_the_read_only,
    fetched_slots_freed_by_a_timer,
)
"""Forms of the twelve between nodes."""
RESTARTED: Sequence[Patch] = (granted_slots_are_free_after_a_restart,)
"""Beside the twelve."""
FOUND: dict[Patch, tuple[str, ...]] = {
    identity_put_aside_too_early: ("disk full", "no descriptors", "node killed"),
    stale_index_after_same_address_restart: ("directory emptied", "directory swapped"),
    batch_path_without_check: ("misdirected read", "clear", "node restarts in a step"),
    record_of_another_space: ("misdirected read",),
}
"""With the faults that it takes."""

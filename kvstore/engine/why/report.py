"""Snapshots of the engine: typed rows for `kvstore inspect`, at most ROWS_MAX, with keys cut to
8 hex digits; and the blocks that were used last."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.slots import Slots, SlotState
from kvstore.engine.memory.table import each
from kvstore.engine.sessions.owners import ANOTHER_NODE, UnservedReport, unserved
from kvstore.engine.state import State
from kvstore.engine.why.ledger import SavingsReport
from kvstore.types import SpaceId, Tier
from kvstore.units import NS_PER_MS
from kvstore.wire.load import EngineEntry, Load
from kvstore.wire.messages import HelloRank, HelloScheduler
from kvstore.wire.peers import PrepareRequest
from kvstore.wire.space import group_kind

if TYPE_CHECKING:
    from kvstore.engine.sessions.owners import Connection
    from kvstore.engine.trust import TierScrub
    from kvstore.engine.why.curve import CurveReport


ROWS_MAX = 10_000
NO_BUDGET = -1
_COUNTS: Final = ("blocks_dram", "blocks_file", "bytes_dram", "engines")
"""Fields of a SpaceReport that are counted."""


class NodeReport(msgspec.Struct, frozen=True):
    """State of a node, in counts."""

    incarnation: str
    connections: int
    owners: int
    sessions: int
    leases: int
    blocks: int
    restarts: int
    """Node processes before this one."""
    blocks_kept: int
    """Blocks taken over from earlier processes, in dram."""


class TierReport(msgspec.Struct, frozen=True):
    """One tier. Slot counts are for memory, counts of blocks not written for the disk tier."""

    tier: str
    capacity_bytes: int
    ready_bytes: int
    pinned_bytes: int = 0
    """Most bytes of dram that any one rank has pinned for copies of its GPU; 0: no rank did."""
    used_bytes: int = 0
    """Bytes of slots that hold a block; in the disk tier, of whole segments."""
    blocks: int = 0
    slots_sealed: int = 0
    slots_granted: int = 0
    slots_quarantined: int = 0
    slots_leased: int = 0
    policy: str = ""
    """Eviction policy of dram; admission policy of the disk tier."""
    not_admitted: int = 0
    """Times a block was not written because it was seen for the first time."""
    over_budget: int = 0
    """Times a block was not written, or not kept, because the day's budget was used up."""
    budget_left_bytes: int = NO_BUDGET
    """Bytes that may be written to disk now; NO_BUDGET: any amount."""
    reads: str = "closed"
    """State of the circuit breaker of disk reads: closed (reads go on), open (none), half-open (one
    probe). `writes`: that of disk writes."""
    writes: str = "closed"
    scrubbed_blocks: int = 0
    """Blocks verified by the scrub since the start."""
    scrubbed_bytes: int = 0
    scrub_bad: int = 0
    """Damaged blocks among those, which were dropped."""
    scrub_age_ms: int = -1
    """Time since the end of the last complete scrub; -1: none yet."""


class QuotaReport(msgspec.Struct, frozen=True):
    """Share of dram that one quota guarantees, and use by its engines."""

    quota: str
    """Name of a model or tenant; empty: the row of all engines without a quota."""
    promised_bytes: int
    used_bytes: int
    """Slots that hold its blocks or are granted to it; may exceed the guarantee."""


class SpaceReport(msgspec.Struct, frozen=True):
    """One (tenant, space): blocks that one model's engines share."""

    space: str
    """All hex digits, as other commands need them."""
    tenant: str
    label: str
    group: str
    """Kind of the model's KV cache group, if there are several."""
    blocks_dram: int
    blocks_file: int
    bytes_dram: int
    engines: int
    off: str
    """Tier in which a shadow check switched the space off, or all; empty: the space is on."""


class BlockReport(msgspec.Struct, frozen=True):
    """One shard of one block."""

    key: str
    space: str
    tenant: str
    shard: str
    tiers: str
    slot: int
    generation: int
    leases: int


class LeaseReport(msgspec.Struct, frozen=True):
    """One lease."""

    engine_id: str
    session: int
    lease: int
    blocks: int
    age_ms: int
    expires_in_ms: int


class JobReport(msgspec.Struct, frozen=True):
    """Slots that one rank may still write."""

    engine_id: str
    rank: int
    connection: int
    attached: bool
    slots_granted: int
    slots_quarantined: int


class UsedSlots(NamedTuple):
    """Sealed slots of dram with their last use; arrays of shape [n]."""

    words: Words
    stamps: Words
    """Stamp of the last use of each slot: greater is later."""
    sizes: Words
    arena_bytes: int


NamedBlock = tuple[tuple[str, SpaceId], bytes]
"""(tenant and space, key) of a block."""


class Snapshots:
    """Views of an engine's state, for reports and pages. No view changes it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.ledger, self.ages = state.ledger, state.ages
        """Sums over requests; ages of evicted blocks, by tier."""

    def nodes(self) -> list[NodeReport]:
        """State of this node, as one row."""
        state = self._state
        return [
            NodeReport(
                incarnation=f"{state.config.incarnation:016x}",
                connections=sum(not c.ended for c in state.connections.values()),
                owners=len(state.owners),
                sessions=sum(bool(owner.open_session) for owner in state.owners.values()),
                leases=len(state.leases),
                blocks=len(state.residency.table),
                restarts=state.config.restarts,
                blocks_kept=state.counters.blocks_kept,
            )
        ]

    def engines(self) -> tuple[EngineEntry, ...]:
        """Engines that have a session, for routers."""
        return tuple(
            EngineEntry(
                engine=owner.key[1],
                tenant=owner.key[0],
                space=owner.groups[0].asker.space,
                model=hello.label,
                rank=hello.data_rank,
                role=hello.role,
                address=hello.address,
            )
            for owner in self._state.owners.values()
            if owner.open_session and owner.scheduler is not None
            if isinstance(hello := owner.scheduler.hello, HelloScheduler)
        )

    def tier_rows(
        self, budget_left_bytes: int | None, scrubs: Mapping[Tier, TierScrub]
    ) -> list[TierReport]:
        """One row per tier. `budget_left_bytes`: bytes that may be written to disk now."""
        state = self._state
        config, counters, slots, hbm = state.config, state.counters, state.slots, state.hbm
        rows = [
            _memory(
                "dram",
                slots,
                capacity_bytes=config.arena_bytes - config.landing_bytes,
                ready_bytes=slots.slabs_ready * slots.slab_bytes,
                pinned_bytes=max((c.pinned_bytes for c in self._ranks()), default=0),
                blocks=state.residency.count(Tier.DRAM),
                slots_leased=slots.pins.leased,
                policy=config.policy,
                **_scrubbed(scrubs[Tier.DRAM], state),
            ),
            TierReport(
                tier="file",
                capacity_bytes=config.file_bytes,
                ready_bytes=config.file_bytes,
                used_bytes=state.tick.file_used_bytes,
                blocks=state.residency.count(Tier.FILE),
                policy=config.file_admission.value,
                not_admitted=counters.file_blocks_not_admitted,
                over_budget=counters.file_blocks_over_budget,
                budget_left_bytes=NO_BUDGET if budget_left_bytes is None else budget_left_bytes,
                reads=state.tick.file_breakers[0],
                writes=state.tick.file_breakers[1],
                **_scrubbed(scrubs[Tier.FILE], state),
            ),
        ]
        if hbm is not None:
            # Copies in a GPU's memory: verified when they are made, and not scrubbed.
            size_bytes, blocks = hbm.slab_count * hbm.slab_bytes, int(hbm.counts[SlotState.SEALED])
            sizes = {"capacity_bytes": size_bytes, "ready_bytes": size_bytes}
            rows.append(_memory("hbm", hbm, blocks=blocks, policy="lru", **sizes))
        return rows

    def _ranks(self) -> Iterator[Connection]:
        """Attached ranks."""
        connections = self._state.connections.values()
        return (each for each in connections if each.role == "rank" and not each.ended)

    def unpinned(self) -> str:
        """Error of a rank that cannot pin the arena's memory, with its engine, for operators; empty
        if all ranks can."""
        found = [each for each in self._ranks() if each.trouble]
        more = f" (and {len(found) - 1} more ranks)" if len(found) > 1 else ""
        return f"engine {found[0].owner.title}{more}: {found[0].trouble}" if found else ""

    def load(self) -> Load:
        """Load of this node, without its traffic with other nodes, published every few seconds:
        made from counters, without a pass over any table."""
        state = self._state
        counters, slots, ledger = state.counters, state.slots, state.ledger
        total = ledger.total()
        return Load(
            at_ms=state.now_ns // NS_PER_MS,
            dram_bytes=state.config.arena_bytes - state.config.landing_bytes,
            dram_used_bytes=slots.sealed_bytes,
            file_bytes=state.config.file_bytes,
            file_used_bytes=state.tick.file_used_bytes,
            blocks_hit=sum(ledger.hits.values()),
            blocks_missed=sum(ledger.misses.values()),
            saved_ms=total.saved_ns // NS_PER_MS,
            waited_ms=total.spent_ns // NS_PER_MS,
            stored_bytes=counters.stored_bytes,
            leased_bytes=counters.leased_bytes,
            served_bytes=counters.served_bytes,
            leases=len(state.leases),
            engines=sum(bool(owner.open_session) for owner in state.owners.values()),
            slots_quarantined=int(slots.counts[SlotState.QUARANTINED]),
        )

    def savings(self) -> list[SavingsReport]:
        """Savings and costs of loads, by model, tenant and tier."""
        return self._state.ledger.report()

    def curve(self) -> list[CurveReport]:
        """Expected hit ratio by capacity of dram, one row each."""
        return self._state.curve.report(self._state.now_ns)

    def unserved(self) -> list[UnservedReport]:
        """Engines that this node does not serve, and why."""
        state = self._state
        is_full = len(state.attached()) >= state.config.connection_count_max
        return unserved(state.owners.values(), state.refusals, state.now_ns, is_full=is_full)

    def quotas(self) -> list[QuotaReport]:
        """One row per quota and one for all others; none without quotas."""
        table = self._state.slots.quotas
        if not table.any:
            return []
        rows = zip(table.names, table.share.tolist(), table.held.tolist(), strict=True)
        others, *named = (QuotaReport(name, share, held) for name, share, held in rows)
        return [*named, others]

    def spaces(self) -> list[SpaceReport]:
        """One row per (tenant, space) that holds a block or has an engine."""
        state = self._state
        residency = state.residency
        used = residency.table.used_rows()
        scopes, words = residency.table.scopes[used], residency.words(used)
        # Counted over whole columns: no pass per scope.
        in_dram, in_file = words >= 0, residency.file[used] != 0
        columns = {
            "blocks_dram": np.bincount(scopes[in_dram]),
            "blocks_file": np.bincount(scopes[in_file]),
            "bytes_dram": np.bincount(scopes[in_dram], state.slots.sizes(words[in_dram])),
        }
        found: defaultdict[tuple[str, SpaceId], Counter[str]] = defaultdict(Counter)
        for name, column in columns.items():
            for scope in np.flatnonzero(column).tolist():
                tenant, space, _ = residency.address(scope)
                found[tenant, space][name] += int(column[scope])
        for group in state.open_groups():
            found[group.asker.address]["engines"] += 1
        return [self._space(each, found[each]) for each in sorted({*found, *state.off})]

    def _space(self, address: tuple[str, SpaceId], counts: Counter[str]) -> SpaceReport:
        # Of the latest engine, also when it is gone.
        known, off = self._state.known.get(address), self._state.off.get(address)
        return SpaceReport(
            space=address[1].hex(),
            tenant=address[0],
            label=known.label if known else "",
            group=group_kind(known.space) if known else "",
            **{name: counts[name] for name in _COUNTS},
            off="" if off is None else off.tier.name.lower() if off.tier else "all",
        )

    def space_ids(self) -> list[SpaceId]:
        """Full ids of the spaces that hold a block or have had an engine."""
        state = self._state
        held = {space for _, space, _ in state.residency.scopes()}
        return sorted(held | {space for _, space in state.off})

    def spaces_off(self) -> list[tuple[str, SpaceId, Tier | None]]:
        """(tenant, space, tier or all) of the spaces that a shadow check switched off."""
        return [(*address, off.tier) for address, off in self._state.off.items()]

    def blocks(self, *, limit: int = 1000, space: str = "") -> list[BlockReport]:
        """Up to `limit` blocks whose space begins with the hex digits `space`."""
        state = self._state
        residency, slots = state.residency, state.slots
        wanted = {n for (_, s, _), n in residency.scopes().items() if s.hex().startswith(space)}
        rows, out = residency.rows_in(wanted, min(limit, ROWS_MAX)), []
        for row, word in zip(rows.tolist(), residency.words(rows).tolist(), strict=True):
            tenant, its_space, its = residency.address(int(residency.table.scopes[row]))
            is_held, place = word >= 0, (-1, 0, 0)
            if is_held:
                slot = int(slots.slots_of(np.array([word]))[0])
                place = slot, int(slots.generation[word]), int(slots.leases[word])
            has_copy = state.hbm is not None and is_held and residency.hbm_of_word[word] >= 0
            held = {"hbm": has_copy, "dram": is_held, "file": int(residency.file[row]) != 0}
            key = residency.table.keys[row].tobytes()[:4].hex()
            shard = f"layers {its.layer_begin}-{its.layer_end}"
            shard += f" heads {its.head_begin}-{its.head_end}"
            tiers = "+".join(name for name, there in held.items() if there)
            out.append(BlockReport(key, its_space.hex(), tenant, shard, tiers, *place))
        return out

    def leases(self) -> list[LeaseReport]:
        """Leases of engines and of other nodes, at most ROWS_MAX."""
        state = self._state
        who = {its.open_session: (its.key[1], its.open_session) for its in state.owners.values()}
        return [
            LeaseReport(
                *who.get(session, (ANOTHER_NODE, 0)),
                lease=number,
                blocks=lease.block_count,
                age_ms=(state.now_ns - lease.granted_ns) // NS_PER_MS,
                expires_in_ms=(lease.expires_ns - state.now_ns) // NS_PER_MS,
            )
            for session, number, lease in state.leases.items()[:ROWS_MAX]
        ]

    def jobs(self) -> list[JobReport]:
        """One row for each rank that holds slots that it may still write to."""
        state = self._state
        slots, out = state.slots, []
        for connection in state.connections.values():
            hello, words = connection.hello, slots.of_writer(connection.id)
            if isinstance(hello, HelloRank) and len(words):
                counts = np.bincount(slots.state[words], minlength=len(SlotState))
                its = _slots(counts, SlotState.GRANTED, SlotState.QUARANTINED)
                who = hello.engine_id, hello.rank, connection.id
                out.append(JobReport(*who, attached=not connection.ended, **its))
        return out

    def used_slots(self) -> UsedSlots:
        """All sealed slots of dram. About 20 ms for a million."""
        slots, arena_bytes = self._state.slots, self._state.config.arena_bytes
        words = np.flatnonzero(slots.state == SlotState.SEALED)
        return UsedSlots(words, slots.stamps[words], slots.sizes(words), arena_bytes)

    def named(self, words: Words) -> Iterator[NamedBlock]:
        """Blocks in these slots now; slots that were emptied are left out. Each is made as it is
        taken: thousands, which nobody else is to wait for."""
        residency = self._state.residency
        rows = residency.row_of_word[words].astype(np.int64)
        rows = rows[rows >= 0]
        scopes, keys = residency.table.scopes[rows].tolist(), each(residency.table.keys[rows])
        addresses = {scope: residency.address(scope)[:2] for scope in set(scopes)}
        return ((addresses[scope], key) for scope, key in zip(scopes, keys, strict=True))


def _memory(tier: str, slots: Slots, **its: Any) -> TierReport:
    """Row of a tier in memory, from counts that are kept up to date: a scrape scans no column,
    however large the arena is."""
    its |= _slots(slots.counts, SlotState.SEALED, SlotState.GRANTED, SlotState.QUARANTINED)
    return TierReport(tier=tier, used_bytes=slots.sealed_bytes, **its)


def _scrubbed(scrub: TierScrub, state: State) -> dict[str, Any]:
    its = {"scrubbed_blocks": scrub.blocks, "scrubbed_bytes": scrub.size_bytes}
    return its | {"scrub_bad": scrub.bad, "scrub_age_ms": scrub.age_ms(state.now_ns)}


def _slots(counts: NDArray[np.int64], *states: SlotState) -> dict[str, Any]:
    """Numbers of slots in these states, by field."""
    return {f"slots_{state.name.lower()}": int(counts[state]) for state in states}


# ── hottest ───────────────────────────────────────────────────────────────────────────────────────
# Blocks in dram that were used last, in runs that another node can be asked to fetch.
#
#     engine: used_slots ─▶ hottest_runs ─ SLICE slots at a time ─▶ engine: named ─▶ runs
#
# The engine answers two short questions; sorting, which takes long, is done where it is asked. A
# slot that has another block by the time of the second question counts as that one. Does not cover:
# who takes them (`kvstore.peers.preparer`).

RUN_KEYS: int = 512
SLICE: Final = 4096


def hottest_runs(
    used: UsedSlots, share: float, name: Callable[[Words], Iterator[NamedBlock]]
) -> list[PrepareRequest]:
    """The blocks of dram used last, up to this share of the arena's bytes, in runs of RUN_KEYS of
    one space: latest use first, so that a prefix comes before what continues it. `name` asks the
    engine for `named`."""
    latest = np.argsort(-used.stamps)
    latest = latest[used.stamps[latest] > 0]
    words = used.words[latest[np.cumsum(used.sizes[latest]) <= share * used.arena_bytes]]
    spaces: dict[tuple[str, SpaceId], dict[bytes, None]] = {}
    for at in range(0, len(words), SLICE):
        for address, key in name(words[at : at + SLICE]):
            # A block has a row for each shard; its place is that of the shard used last.
            spaces.setdefault(address, {})[key] = None
    return [
        PrepareRequest(tenant, space, "", b"".join(keys[at : at + RUN_KEYS]))
        for (tenant, space), keys in ((address, list(its)) for address, its in spaces.items())
        for at in range(0, len(keys), RUN_KEYS)
    ]

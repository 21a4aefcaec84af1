"""Typed snapshots for `kvstore inspect`. Bounded; keys are cut to 8 hex digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvstore.engine.memory.slots import Slots, SlotState
from kvstore.engine.sessions.askers import ANOTHER_NODE
from kvstore.types import Tier
from kvstore.units import NS_PER_MS
from kvstore.wire.load import EngineEntry, Load
from kvstore.wire.messages import HelloRank, HelloScheduler
from kvstore.wire.space import group_kind

if TYPE_CHECKING:
    from kvstore.engine.sessions.owners import Connection
    from kvstore.engine.state import State
    from kvstore.engine.trust.scrubs import TierScrub

ROWS_MAX = 10_000
NO_BUDGET = -1


class NodeReport(msgspec.Struct, frozen=True):
    """A node."""

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
    pinned_bytes: int
    """Dram that some rank has pinned for the copies of its GPU, at most; 0: no rank did."""
    used_bytes: int
    """Slots that hold a block; in the disk tier, whole segments."""
    blocks: int
    slots_sealed: int
    slots_granted: int
    slots_quarantined: int
    slots_leased: int
    policy: str
    """Eviction policy of dram; admission policy of the disk tier."""
    not_admitted: int
    """Times a block was not written because it was seen for the first time."""
    over_budget: int
    """Times a block was not written, or not kept, because the day's budget was used up."""
    budget_left_bytes: int
    """Bytes that may be written to disk now; NO_BUDGET: any amount."""
    reads: str
    """State of the circuit breaker: closed (reads go on), open (none), half-open (one probe)."""
    writes: str
    scrubbed_blocks: int
    """Blocks verified by the scrub since the start."""
    scrubbed_bytes: int
    scrub_bad: int
    """Damaged blocks among those, which were dropped."""
    scrub_age_ms: int
    """Time since the end of the last complete scrub; -1: none yet."""


class QuotaReport(msgspec.Struct, frozen=True):
    """Share of dram that one quota guarantees, and use by its engines."""

    quota: str
    """Name of a model or tenant; empty: all others together."""
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


def nodes(state: State) -> list[NodeReport]:
    """This node, in one row."""
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


def engines(state: State) -> tuple[EngineEntry, ...]:
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
        for owner in state.owners.values()
        if owner.open_session and owner.scheduler is not None
        if isinstance(hello := owner.scheduler.hello, HelloScheduler)
    )


def tiers(
    state: State, budget_left_bytes: int | None, scrubs: Mapping[Tier, TierScrub]
) -> list[TierReport]:
    """One row per tier."""
    dram_scrub, file_scrub = scrubs[Tier.DRAM], scrubs[Tier.FILE]
    counters = state.counters
    slots, hbm = state.slots, state.hbm
    # Counted as they change: a scrape looks at no column, however large the arena is.
    held = slots.counts.tolist()
    return [
        TierReport(
            tier="dram",
            capacity_bytes=state.config.arena_bytes - state.config.landing_bytes,
            ready_bytes=slots.slabs_ready * slots.slab_bytes,
            pinned_bytes=max((c.pinned_bytes for c in _ranks(state)), default=0),
            used_bytes=slots.sealed_bytes,
            blocks=state.residency.count(Tier.DRAM),
            slots_sealed=held[SlotState.SEALED],
            slots_granted=held[SlotState.GRANTED],
            slots_quarantined=held[SlotState.QUARANTINED],
            slots_leased=slots.pins.leased,
            policy=state.config.policy,
            not_admitted=0,
            over_budget=0,
            budget_left_bytes=NO_BUDGET,
            reads="closed",
            writes="closed",
            scrubbed_blocks=dram_scrub.blocks,
            scrubbed_bytes=dram_scrub.size_bytes,
            scrub_bad=dram_scrub.bad,
            scrub_age_ms=dram_scrub.age_ms(state.now_ns),
        ),
        TierReport(
            tier="file",
            capacity_bytes=state.config.file_bytes,
            ready_bytes=state.config.file_bytes,
            pinned_bytes=0,
            used_bytes=state.file_used_bytes,
            blocks=state.residency.count(Tier.FILE),
            slots_sealed=0,
            slots_granted=0,
            slots_quarantined=0,
            slots_leased=0,
            policy=state.config.file_admission.value,
            not_admitted=counters.file_blocks_not_admitted,
            over_budget=counters.file_blocks_over_budget,
            budget_left_bytes=NO_BUDGET if budget_left_bytes is None else budget_left_bytes,
            reads=state.file_breakers[0],
            writes=state.file_breakers[1],
            scrubbed_blocks=file_scrub.blocks,
            scrubbed_bytes=file_scrub.size_bytes,
            scrub_bad=file_scrub.bad,
            scrub_age_ms=file_scrub.age_ms(state.now_ns),
        ),
        *([] if hbm is None else [_hbm(hbm)]),
    ]


def _ranks(state: State) -> Iterator[Connection]:
    """Attached ranks."""
    connections = state.connections.values()
    return (each for each in connections if each.role == "rank" and not each.ended)


def unpinned(state: State) -> str:
    """Trouble of a rank that cannot pin memory, for operators; empty: none has any."""
    found = [each for each in _ranks(state) if each.trouble]
    more = f" (and {len(found) - 1} more ranks)" if len(found) > 1 else ""
    return f"engine {found[0].owner.title}{more}: {found[0].trouble}" if found else ""


def _hbm(slots: Slots) -> TierReport:
    """Copies in a GPU's memory: verified when they are made, and not scrubbed."""
    held, size_bytes = slots.counts.tolist(), slots.slab_count * slots.slab_bytes
    return TierReport(
        tier="hbm",
        capacity_bytes=size_bytes,
        ready_bytes=size_bytes,
        pinned_bytes=0,
        used_bytes=slots.sealed_bytes,
        blocks=held[SlotState.SEALED],
        slots_sealed=held[SlotState.SEALED],
        slots_granted=held[SlotState.GRANTED],
        slots_quarantined=0,
        slots_leased=0,
        policy="lru",
        not_admitted=0,
        over_budget=0,
        budget_left_bytes=NO_BUDGET,
        reads="closed",
        writes="closed",
        scrubbed_blocks=0,
        scrubbed_bytes=0,
        scrub_bad=0,
        scrub_age_ms=-1,
    )


def load(state: State) -> Load:
    """Load of this node. Published every few seconds, so no pass over any table."""
    counters, slots = state.counters, state.slots
    return Load(
        at_ms=state.now_ns // NS_PER_MS,
        dram_bytes=state.config.arena_bytes - state.config.landing_bytes,
        dram_used_bytes=slots.sealed_bytes,
        file_bytes=state.config.file_bytes,
        file_used_bytes=state.file_used_bytes,
        blocks_hit=counters.blocks_hit,
        blocks_missed=counters.blocks_missed,
        stored_bytes=counters.stored_bytes,
        leased_bytes=counters.leased_bytes,
        lent_bytes=counters.lent_bytes,
        leases=len(state.leases),
        engines=sum(bool(owner.open_session) for owner in state.owners.values()),
        slots_quarantined=int(slots.counts[SlotState.QUARANTINED]),
    )


def quotas(state: State) -> list[QuotaReport]:
    """One row per quota and one for all others; none without quotas."""
    table = state.slots.quotas
    if not table.any:
        return []
    rows = zip(table.names, table.share.tolist(), table.held.tolist(), strict=True)
    others, *named = (QuotaReport(name, share, held) for name, share, held in rows)
    return [*named, others]


def spaces(state: State) -> list[SpaceReport]:
    """One row per (tenant, space) that holds a block or has an engine."""
    residency = state.residency
    used = residency.table.used_rows()
    scopes = residency.table.scopes[used]
    words = residency.words(used)
    found: dict[tuple[str, str], list[int]] = {}
    # Of the latest engine, also when it is gone.
    known_of = {(tenant, space.hex()): known for (tenant, space), known in state.known.items()}
    for group in state.open_groups():
        tenant, its_space = group.asker.address
        found.setdefault((tenant, its_space.hex()), [0, 0, 0, 0])[3] += 1
    off = {
        (t, space.hex()): (o.tier.name.lower() if o.tier else "all")
        for (t, space), o in state.off.items()
    }
    for address in off:
        found.setdefault(address, [0, 0, 0, 0])
    # Counted over whole columns: no pass per scope.
    is_held = words >= 0
    in_dram = np.bincount(scopes[is_held])
    word_of = np.zeros(len(in_dram), dtype=np.int64)
    word_of[scopes[is_held]] = words[is_held]  # one of its words: they are of one size
    in_file = np.bincount(scopes[residency.file[used] != 0], minlength=len(in_dram))
    in_dram = np.pad(in_dram, (0, len(in_file) - len(in_dram)))
    for scope in np.flatnonzero(in_dram + in_file).tolist():
        tenant, space, _ = residency.address(scope)
        row = found.setdefault((tenant, space.hex()), [0, 0, 0, 0])
        row[0] += int(in_dram[scope])
        row[1] += int(in_file[scope])
        if in_dram[scope]:
            slot_bytes = state.slots.pool_of(int(word_of[scope])).slot_bytes
            row[2] += int(in_dram[scope]) * slot_bytes
    return [
        SpaceReport(
            space=space,
            tenant=tenant,
            label=known.label if (known := known_of.get((tenant, space))) else "",
            group=group_kind(known.space) if known else "",
            blocks_dram=row[0],
            blocks_file=row[1],
            bytes_dram=row[2],
            engines=row[3],
            off=off.get((tenant, space), ""),
        )
        for (tenant, space), row in sorted(found.items())
    ]


def blocks(state: State, *, limit: int, space: str) -> list[BlockReport]:
    """Up to `limit` blocks whose space begins with the hex digits `space`."""
    residency, slots = state.residency, state.slots
    wanted = {n for (_, s, _), n in residency.scopes().items() if s.hex().startswith(space)}
    out = []
    for row in residency.rows_in(wanted, min(limit, ROWS_MAX)).tolist():
        tenant, its_space, shard = residency.address(int(residency.table.scopes[row]))
        word = int(residency.words(np.array([row]))[0])
        has_copy = state.hbm is not None and word >= 0 and residency.hbm_of_word[word] >= 0
        held = [
            (has_copy, "hbm"),
            (word >= 0, "dram"),
            (int(residency.file[row]) != 0, "file"),
        ]
        out.append(
            BlockReport(
                key=residency.table.keys[row].tobytes()[:4].hex(),
                space=its_space.hex(),
                tenant=tenant,
                shard=f"layers {shard.layer_begin}-{shard.layer_end} "
                f"heads {shard.head_begin}-{shard.head_end}",
                tiers="+".join(name for there, name in held if there),
                slot=int(slots.slots_of(np.array([word]))[0]) if word >= 0 else -1,
                generation=int(slots.generation[word]) if word >= 0 else 0,
                leases=int(slots.leases[word]) if word >= 0 else 0,
            )
        )
    return out


def leases(state: State) -> list[LeaseReport]:
    """Leases of engines and of other nodes, at most ROWS_MAX."""
    owner_of = {owner.open_session: owner for owner in state.owners.values()}
    now_ns, rows = state.now_ns, []
    for session, number, lease in state.leases.items()[:ROWS_MAX]:
        owner = owner_of.get(session)
        rows.append(
            LeaseReport(
                engine_id=owner.key[1] if owner is not None else ANOTHER_NODE,
                session=session if owner is not None else 0,
                lease=number,
                blocks=lease.block_count,
                age_ms=(now_ns - lease.granted_ns) // NS_PER_MS,
                expires_in_ms=(lease.expires_ns - now_ns) // NS_PER_MS,
            )
        )
    return rows


def jobs(state: State) -> list[JobReport]:
    """Ranks that hold slots they may write."""
    slots, out = state.slots, []
    for connection in state.connections.values():
        words = slots.of_writer(connection.id)
        if isinstance(connection.hello, HelloRank) and len(words):
            by_state = np.bincount(slots.state[words], minlength=len(SlotState)).tolist()
            out.append(
                JobReport(
                    engine_id=connection.hello.engine_id,
                    rank=connection.hello.rank,
                    connection=connection.id,
                    attached=not connection.ended,
                    slots_granted=by_state[SlotState.GRANTED],
                    slots_quarantined=by_state[SlotState.QUARANTINED],
                )
            )
    return out

"""Owners: attached engine instances, their connections and sessions.

An owner is one engine instance: a scheduler and `rank_count` ranks. See ADR 3 for how a session
forms, ADR 2 for ranks that hold the same shard. Holds facts only, whether an engine's parts fit,
and which engines are not served; `sessions` acts on them (frees slots, sends datagrams).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kvstore.engine.memory.residency import covers
from kvstore.engine.memory.shares import OTHERS, QuotaGroup
from kvstore.errors import ProtocolError
from kvstore.types import ConnectionId, Shard, SpaceId
from kvstore.units import NS_PER_S
from kvstore.wire.messages import HelloRank, HelloScheduler, Hint, LeaseAsk, PushExpect, Seal
from kvstore.wire.space import Group, Space, shard_bytes, slot_bytes

# ── askers ────────────────────────────────────────────────────────────────────────────────────────
# For whom blocks are brought to dram: an engine, another node that fetches from this one, or a
# router on behalf of an engine. Blocks on their way outlive the engine that asked, so nothing here
# refers to it.

ANOTHER_NODE = "(another node)"
"""Title of an asker that is another node."""
A_ROUTER = "(a router)"
"""Title of an asker that is a router, for blocks that are brought before an engine asks."""


class Asker(msgspec.Struct, frozen=True):
    """One KV cache group that blocks are brought for; one column per distinct shard, as in a
    session."""

    tenant: str
    space: SpaceId
    shards: tuple[Shard, ...]
    scopes: tuple[int, ...]
    """Scopes of the shards, valid while the engine is attached or blocks of them are held."""
    slot_sizes: tuple[int, ...]
    block_bytes: tuple[int, ...]
    head_bytes: tuple[int, ...]
    block_tokens: int
    quota: QuotaGroup = OTHERS
    engine: str = ANOTHER_NODE
    """Engine whose share of bounded resources is used."""
    title: str = ANOTHER_NODE
    """Name for people, in explanations of evictions."""
    is_ahead: bool = False
    """Whether no request waits for the blocks yet: they take at most half of the room in motion."""

    @property
    def address(self) -> tuple[str, SpaceId]:
        """Tenant and space."""
        return self.tenant, self.space

    def is_of(self, tenant: str | None, space: bytes | None) -> bool:
        """Whether its blocks are of this tenant and space; None: of any."""
        return tenant in (None, self.tenant) and space in (None, self.space)

    def column(self, number: int) -> Asker:
        """This asker for the shard in one column only."""
        its = ("shards", "scopes", "slot_sizes", "block_bytes")
        return msgspec.structs.replace(self, **{f: (getattr(self, f)[number],) for f in its})


def asker(
    address: tuple[str, SpaceId], space: Space, columns: Sequence[tuple[Shard, int]], **whose: Any
) -> Asker:
    """The asker for an engine or for another node. `columns`: shards and their scopes; `whose`:
    quota, engine and title, if it is an engine."""
    sizes = tuple(shard_bytes(space, shard) for shard, _ in columns)
    return Asker(
        tenant=address[0],
        space=address[1],
        shards=tuple(shard for shard, _ in columns),
        scopes=tuple(scope for _, scope in columns),
        slot_sizes=tuple(slot_bytes(size) for size in sizes),
        block_bytes=sizes,
        head_bytes=space.head_bytes,
        block_tokens=space.block_tokens,
        **whose,
    )


# ── owners ────────────────────────────────────────────────────────────────────────────────────────

OwnerKey = tuple[str, str, str]
"""Tenant, engine id, nonce."""


class Connection(msgspec.Struct, eq=False):
    """One attached process. Kept after its socket ended while the process may still write to
    slots."""

    id: ConnectionId
    hello: HelloScheduler | HelloRank
    owner: Owner
    ended: bool = False
    asked_session: int = 0
    """Session of the last Quiesce to this rank."""
    quiet_session: int = 0
    """Session of the last Quiet from this rank."""
    pinned_bytes: int = 0
    """Bytes of the arena that this rank has pinned."""
    trouble: str = ""
    """Error that keeps the rank from pinning more; empty: none."""

    @property
    def role(self) -> Literal["scheduler", "rank"]:
        return "scheduler" if isinstance(self.hello, HelloScheduler) else "rank"


class OwnerGroup(msgspec.Struct, eq=False):
    """A KV cache group of a session, with one column per distinct shard."""

    owner: Owner
    asker: Asker
    writers: tuple[int, ...]
    """Rank that writes the shard, by column."""
    session: int
    """Number that granted slots carry: the session's, plus the group's index."""
    on_gpu: tuple[bool, ...] = ()
    """Whether a rank on the GPU of hbm loads the shard, by column; empty: there is no hbm."""
    granted_slots: int = 0
    """Slots granted and not yet sealed or dropped, all columns together."""

    @property
    def granted_blocks(self) -> int:
        """Credits that the engine holds, in blocks."""
        return -(-self.granted_slots // len(self.writers))


class Owner(msgspec.Struct, eq=False):
    """One engine instance."""

    key: OwnerKey
    scheduler: Connection | None = None
    ranks: dict[int, Connection] = {}
    forming: int = 0
    """Session of the last Quiesce, until it opens or the owner changes; 0: none."""
    open_session: int = 0
    unserved: str = ""
    """Reason, from the scheduler, why this engine cannot be served."""
    waits_since_ns: int = 0
    """Time since which the scheduler has been attached without a session."""
    groups: tuple[OwnerGroup, ...] = ()
    """KV cache groups of the last session."""
    sealed_ns: int = 0
    """When a rank last sealed blocks, of any request: a sign that the engine computes."""

    @property
    def is_complete(self) -> bool:
        """Whether the scheduler and at least as many ranks as it reported are attached."""
        return self.scheduler is not None and len(self.ranks) >= self.rank_count

    @property
    def rank_count(self) -> int:
        """Number of ranks that the scheduler's Hello reports; the scheduler must be attached."""
        return self.hello.rank_count

    @property
    def hello(self) -> HelloScheduler:
        """Hello of the scheduler, which must be attached."""
        assert self.scheduler is not None
        assert isinstance(self.scheduler.hello, HelloScheduler)
        return self.scheduler.hello

    @property
    def title(self) -> str:
        """Text for people: the engine's id and the label of its model."""
        label = self.hello.label if self.scheduler is not None else ""
        return f"{self.key[1]} ({label})" if label else self.key[1]

    @property
    def is_empty(self) -> bool:
        return self.scheduler is None and not self.ranks

    def rank_hellos(self) -> list[HelloRank]:
        """Hellos of the attached ranks, by rank."""
        hellos = (self.ranks[rank].hello for rank in sorted(self.ranks))
        return [hello for hello in hellos if isinstance(hello, HelloRank)]

    def group_of(self, message: LeaseAsk | Hint | PushExpect | Seal) -> OwnerGroup:
        """The KV cache group that a message names. Raises ProtocolError: there is no such group."""
        if message.group >= len(self.groups):
            kind = type(message).__name__
            raise ProtocolError(f"a {kind} of a KV cache group that its engine does not have")
        return self.groups[message.group]

    def columns(self, group: int) -> dict[Shard, HelloRank]:
        """Distinct shards of a group in column order, each with the Hello of the rank that writes
        it."""
        columns: dict[Shard, HelloRank] = {}
        for hello in self.rank_hellos():
            if group < len(hello.groups):  # as on every rank, once `objection` has none
                columns.setdefault(hello.groups[group].shard, hello)
        return columns

    @property
    def address(self) -> tuple[str, SpaceId] | None:
        """Tenant and space of the first group of the last session; None: there was no session."""
        return self.groups[0].asker.address if self.groups else None


def objection(owner: Owner, *, slab_bytes: int) -> str:
    """Why an engine whose processes are all attached cannot be served, in one sentence; empty when
    it can be."""
    hellos = owner.rank_hellos()
    if len(hellos) != owner.rank_count:
        return (
            f"{len(hellos)} ranks are attached where its scheduler speaks of {owner.rank_count}: "
            "two engines may share an engine_id"
        )
    spaces = [group.space for group in hellos[0].groups]
    if any([group.space for group in hello.groups] != spaces for hello in hellos):
        return "its ranks report different models or settings: all ranks must load the same"
    if any(space in spaces[:index] for index, space in enumerate(spaces)):
        return "two of its KV cache groups report the same space: their blocks would be mixed up"
    if [hello.rank for hello in hellos] != list(range(len(hellos))):
        return f"its ranks are not numbered from 0 to {len(hellos) - 1}"
    for hello in hellos:
        for group in hello.groups:
            if reason := _group_objection(hello.rank, group, slab_bytes=slab_bytes):
                return reason
    # Replicas carry the very same shard; shards that only overlap have no one to write them.
    for index, space in enumerate(spaces):
        shards = frozenset(owner.columns(index))
        whole = covers(shards, (space.layer_count, space.kv_head_count))
        if all(len(cover) < len(shards) for cover in whole):
            return "its ranks do not cover all layers and heads exactly once"
    return ""


def _group_objection(rank: int, group: Group, *, slab_bytes: int) -> str:
    s, space = group.shard, group.space
    inside = 0 <= s.layer_begin < s.layer_end <= space.layer_count
    if not (inside and 0 <= s.head_begin < s.head_end <= space.kv_head_count):
        return f"rank {rank} reports layers or heads that the model does not have"
    if len(space.head_bytes) not in (1, space.layer_count):
        return (
            f"rank {rank} reports the sizes of {len(space.head_bytes)} layers where the model has "
            f"{space.layer_count}"
        )
    expected = shard_bytes(space, s)
    if group.block_bytes != expected:
        return (
            f"rank {rank} reports blocks of {group.block_bytes} bytes where its layers "
            f"and heads make {expected}"
        )
    if slot_bytes(group.block_bytes) > slab_bytes:
        return (
            f"a block of rank {rank} takes {group.block_bytes} bytes, more than a slab "
            f"of {slab_bytes}: start the node with a larger --slab (and --dram)"
        )
    return ""


# ── unserved ──────────────────────────────────────────────────────────────────────────────────────
# Engines that this node does not serve, and why: an operator must see them.
#
# Three kinds. An engine that reports that its ranks cannot be served, such as ones whose cache is
# on a GPU (`Unserved`). One that this node refused (`objection`), for as long as it asks again. One
# whose scheduler is attached, but whose session does not open. Not among them: ranks without a
# scheduler, which are an engine that is still starting; and refusals before there is an engine,
# such as of a uid (`kvstore.node.attach`).

FORMS_NS_MAX: Final = 30 * NS_PER_S
"""A session that has not opened this long after its scheduler attached will not open: ranks attach
before their scheduler does."""
REFUSED_NS_MAX: Final = 30 * NS_PER_S
"""A refusal is shown for this long: a refused engine asks again after 10 s, and one that did not is
gone."""
REFUSED_COUNT_MAX: Final = 64
"""Engines whose last refusal is remembered."""


class UnservedReport(msgspec.Struct, frozen=True):
    """An engine without a session."""

    engine: str
    tenant: str
    reason: str


class Refusal(NamedTuple):
    """An engine was refused."""

    reason: str
    at_ns: int
    is_full: bool = False
    """Whether it was because the node had no room for it."""


def unserved(
    owners: Iterable[Owner], refusals: Mapping[OwnerKey, Refusal], now_ns: int, *, is_full: bool
) -> list[UnservedReport]:
    """One row for each engine that is attached without being served, or was refused lately.
    `is_full`: whether the node has no room now; if it has, refusals for want of room are left
    out."""
    attached = [(owner, _reason(owner, now_ns)) for owner in owners]
    rows = [UnservedReport(each.title, each.key[0], reason) for each, reason in attached if reason]
    return rows + [
        UnservedReport(engine, tenant, f"refused: {its.reason}")
        for (tenant, engine, _), its in refusals.items()
        if now_ns - its.at_ns <= REFUSED_NS_MAX and (is_full or not its.is_full)
    ]


def _reason(owner: Owner, now_ns: int) -> str:
    if owner.open_session:
        return ""
    if owner.unserved:
        return owner.unserved
    if owner.scheduler is None or now_ns - owner.waits_since_ns <= FORMS_NS_MAX:
        return ""
    if owner.is_complete:
        return "its ranks do not answer: one of them may be stopped"
    return f"{len(owner.ranks)} of its {owner.rank_count} ranks are attached"

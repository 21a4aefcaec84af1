"""An engine under test, and processes that attach to it: the least that tests of it need.

`Node.step` takes events, sorts what comes out by connection, and checks the engine each time.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np

from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.events import (
    Admit,
    Changed,
    Command,
    Ended,
    Event,
    Exited,
    Hangup,
    OffersUntold,
    Ready,
    Received,
    Release,
    Send,
    Tick,
)
from kvstore.engine.memory.journal import Journal
from kvstore.engine.memory.residency import Residency
from kvstore.engine.state import State
from kvstore.engine.why.reasons import Tombstones
from kvstore.tier_events import RaiseGenerations
from kvstore.types import SLOT_BYTES_MIN, ConnectionId, Shard, SpaceId, Tier
from kvstore.units import NS_PER_MS
from kvstore.wire.feed import BlocksChanged, Removed, Stored
from kvstore.wire.messages import (
    Distrust,
    Drop,
    EngineMessage,
    Grant,
    HelloRank,
    HelloScheduler,
    Hint,
    HintReply,
    LeaseAsk,
    LeaseMore,
    LeaseReply,
    Message,
    Quiesce,
    Quiet,
    Refused,
    Seal,
    SessionOpen,
)
from kvstore.wire.space import Space
from tests.kit import engine_check
from tests.kit.hello import group_of, rank_hello, scheduler_hello, space_of

M = TypeVar("M", bound=Message)
N = TypeVar("N", bound="Node")

LAYERS, HEADS, TOKENS = 3, 2, 16
WHOLE = Shard(0, LAYERS, 0, HEADS)
HALVES = (Shard(0, LAYERS, 0, 1), Shard(0, LAYERS, 1, 2))
"""Two ranks with slots of one size."""
UNEVEN = (Shard(0, 1, 0, HEADS), Shard(1, LAYERS, 0, HEADS))
"""Two ranks, the second with slots of twice the size."""
LATENT = (WHOLE, WHOLE)
"""Two ranks that both hold everything, as with MLA: the first writes."""
REPLICAS = (HALVES[0], HALVES[0], HALVES[1], HALVES[1])
"""Four ranks, two heads: ranks 0 and 2 write."""


def space(model: str = "m", *, layer_bytes: int = SLOT_BYTES_MIN) -> Space:
    """A model whose blocks take `layer_bytes` per layer."""
    return space_of(
        model,
        weights="w",
        attention_backend="a",
        layer_count=LAYERS,
        kv_head_count=HEADS,
        head_bytes=(layer_bytes // HEADS,),
        hash_seed="",
        kv_format="e",
    )


SMALL = space("small", layer_bytes=16 << 10)
"""A whole block fits one slot of the least size."""


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def number_of(raw: bytes) -> int:
    """Which `key` this is."""
    return next(number for number in range(1000) if key(number) == raw)


def short(number: int) -> str:
    """The digits of a key that `Node.blocks` shows."""
    return key(number)[:4].hex()


def config_of(*, slots: int = 1, slab_slots: int = 1, **its: Any) -> EngineConfig:
    """An engine's configuration with an arena of so many of the smallest slots."""
    return EngineConfig(
        incarnation=7,
        arena_bytes=slots * SLOT_BYTES_MIN,
        slab_bytes=slab_slots * SLOT_BYTES_MIN,
        generation_bytes=4096 + 8 * slots,
        **{"block_count_max": 256} | its,
    )


def residency_of(block_count_max: int, word_count: int) -> Residency:
    """An empty table over an arena of so many of the smallest slots."""
    config = config_of(slots=word_count, block_count_max=block_count_max)
    journal = Journal.fresh(arena_bytes=config.arena_bytes, slab_bytes=config.slab_bytes)
    return Residency(config, journal, Tombstones(block_count_max=block_count_max))


def pairs(message: LeaseReply | LeaseMore | Grant | Seal) -> list[tuple[int, int]]:
    """The (slot, generation) that a message names."""
    slots = np.frombuffer(message.slots, dtype="<u4").tolist()
    return list(zip(slots, np.frombuffer(message.generations, dtype="<u8").tolist(), strict=True))


def arrays(places: Sequence[tuple[int, int]]) -> tuple[bytes, bytes]:
    """Slots and generations, as they travel."""
    slots = np.array([slot for slot, _ in places], dtype="<u4")
    return slots.tobytes(), np.array([g for _, g in places], dtype="<u8").tobytes()


class Defaults:
    """What a Node gets when a test says nothing of it."""

    def __init__(self) -> None:
        self.policy = "lru"


DEFAULTS = Defaults()


@lru_cache
def some_tile(shards: frozenset[Shard], layer_count: int, head_count: int) -> bool:
    """Whether some of these shards have each layer of each head exactly once."""
    cells = {
        shard: frozenset(
            (layer, head)
            for layer in range(shard.layer_begin, shard.layer_end)
            for head in range(shard.head_begin, shard.head_end)
        )
        for shard in shards
    }

    def tile(left: frozenset[tuple[int, int]]) -> bool:
        """Whether some have the cells that are left; the first one is a corner of its shard."""
        if not left:
            return True
        return any(min(left) in its and its <= left and tile(left - its) for its in cells.values())

    return tile(frozenset(itertools.product(range(layer_count), range(head_count))))


class Node:
    """An engine and what it said, by connection."""

    kept: ClassVar[dict[type[Any], str]] = {}
    """Kinds of commands that a test answers → the list that has them."""

    def __init__(
        self,
        *,
        slots: int = 32,
        slab_slots: int = 4,
        ready_slots: int | None = None,
        **config: Any,
    ) -> None:
        arena = slots * SLOT_BYTES_MIN
        fixed: dict[str, Any] = {
            "credit_share": 0.25,
            "policy": DEFAULTS.policy,
            "tell_changes": True,
            "tell_offers": True,
        } | config
        self.config = config_of(slots=slots, slab_slots=slab_slots, **fixed)
        for name in self.kept.values():
            setattr(self, name, [])
        self.engine = Engine(self.config, self.journal())
        self.now_ns = 10**9
        self.sent: dict[int, list[Message]] = defaultdict(list)
        self.hangups: dict[int, str] = {}
        self.admitted: list[int] = []
        self.released: list[int] = []
        self.told: set[tuple[Tier, str, SpaceId, Shard, bytes]] = set()
        """What the tiers hold, as the changes tell it."""
        self.offered: set[tuple[Tier, str, SpaceId, bytes]] = set()
        """What peers can have, as the offers tell it."""
        self.untold = 0
        """Times that offers had to be asked for."""
        self.raised: dict[int, int] = {}
        self._connections = 0
        self.step(Ready(arena if ready_slots is None else ready_slots * SLOT_BYTES_MIN))

    def journal(self) -> Journal | None:
        """What the engine keeps its journal in."""
        return None

    def step(self, *events: Event) -> list[Command]:
        """Take events; what was said is sorted into `sent`, `hangups` and so on.

        Returns the commands, but those that only tell of changes."""
        commands = self.engine.step(events, self.now_ns)
        for command in commands:
            if type(command) in self.kept:
                getattr(self, self.kept[type(command)]).append(command)
            match command:
                case Send(connection=connection, message=message):
                    self.sent[connection].append(message)
                case Admit(connection=connection):
                    self.admitted.append(connection)
                case Hangup(connection=connection, reason=reason):
                    self.hangups[connection] = reason
                case Release(connection=connection):
                    self.released.append(connection)
                case Changed():
                    self._hear_change(command)
                case Stored() | Removed():
                    self._hear_offer(command)
                case OffersUntold():
                    self.untold += 1
                case RaiseGenerations(slots=slots, generations=generations, tier=Tier.DRAM):
                    self.raised.update(zip(slots.tolist(), generations.tolist(), strict=True))
        engine_check.check_engine(self.engine)
        if self.config.tell_changes:
            assert self.told == self._held(), "the changes tell another story than the tables"
        if any(isinstance(command, OffersUntold) for command in commands):
            self.ask_offers()
        if self.config.tell_offers:
            assert self.offered == self._whole(), "the offers tell another story than the tables"
        telling = Changed | BlocksChanged | OffersUntold
        return [command for command in commands if not isinstance(command, telling)]

    def ask_offers(self) -> None:
        """Begin again with what the engine says it holds, slice by slice."""
        self.offered, row = set(), 0
        while row >= 0:
            offers, row = self.engine.offered(row)
            for offer in offers:
                self._hear_offer(offer)

    def _hear_offer(self, offer: BlocksChanged) -> None:
        scope = offer.tier, offer.tenant, offer.space
        keys = {(*scope, offer.keys[at : at + 32]) for at in range(0, len(offer.keys), 32)}
        assert keys, "an offer of nothing"
        self.offered = self.offered | keys if isinstance(offer, Stored) else self.offered - keys

    @property
    def state(self) -> State:
        """What the engine holds. Tests reach into it here and nowhere else."""
        return self.engine._state

    def _whole(self) -> set[tuple[Tier, str, SpaceId, bytes]]:
        """Blocks of which a tier holds some shards that have every cell, each a layer and a head,
        once."""
        state = self.state
        shards: dict[tuple[Tier, str, SpaceId, bytes], set[Shard]] = defaultdict(set)
        for tier, tenant, space, shard, key in self._held():
            shards[tier, tenant, space, key].add(shard)
        known = {address: its.space for address, its in state.known.items()}
        return {
            block
            for block, there in shards.items()
            if (space_ := known.get((block[1], block[2]))) is not None
            and some_tile(frozenset(there), space_.layer_count, space_.kv_head_count)
        }

    def _hear_change(self, change: Changed) -> None:
        scope = change.tier, *change.scope
        keys = {(*scope, change.keys[at : at + 32]) for at in range(0, len(change.keys), 32)}
        assert len(keys) * 32 == len(change.keys) > 0, "a change that tells nothing, or a key twice"
        if change.stored:
            assert not keys & self.told, "stored twice"
            self.told |= keys
        else:
            assert keys <= self.told, "removed where it was not"
            self.told -= keys

    def _held(self) -> set[tuple[Tier, str, SpaceId, Shard, bytes]]:
        residency = self.state.residency
        rows = residency.table.used_rows()
        tiers = {Tier.DRAM: residency.words(rows) >= 0, Tier.FILE: residency.file[rows] != 0}
        return {
            (
                tier,
                *residency.address(int(residency.table.scopes[row])),
                residency.table.keys[row].tobytes(),
            )
            for tier, there in tiers.items()
            for row in rows[there]
        }

    def hear(self, connection: int, message: EngineMessage) -> list[Command]:
        return self.step(Received(ConnectionId(connection), message))

    def end(self, *connections: int) -> list[Command]:
        return self.step(*(Ended(ConnectionId(c)) for c in connections))

    def exit(self, *connections: int) -> list[Command]:
        """Processes have ended."""
        return self.step(*(Exited(ConnectionId(c)) for c in connections))

    def tick(self, ms: float = 1) -> list[Command]:
        self.now_ns += int(ms * NS_PER_MS)
        return self.step(Tick())

    def connect(self, hello: HelloScheduler | HelloRank, process: int = 0) -> int:
        self._connections += 1
        self.step(Received(ConnectionId(self._connections), hello, process))
        return self._connections

    def be_quiet(self, rank: int) -> None:
        """A rank answers what it was asked last, once."""
        asked = self.last(rank, Quiesce).session
        if self.state.connections[ConnectionId(rank)].quiet_session < asked:
            self.hear(rank, Quiet(asked))

    def last(self, connection: int, kind: type[M]) -> M:
        """The newest message of a kind to a connection."""
        return next(m for m in reversed(self.sent[connection]) if isinstance(m, kind))

    def refusal(self, connection: int) -> Refused:
        """Why a connection was hung up on."""
        assert connection in self.hangups
        return self.last(connection, Refused)

    def count(self, connection: int, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.sent[connection])

    def blocks(self) -> dict[str, str]:
        """8 hex digits of each key → its tiers."""
        return {block.key: block.tiers for block in self.engine.blocks()}

    def sizes(self) -> list[int]:
        """Slot sizes in use."""
        return list(self.state.slots.pools)

    def quarantined(self) -> int:
        return self.engine.tiers()[0].slots_quarantined

    def granted(self) -> int:
        return self.engine.tiers()[0].slots_granted


class Hellos:
    """How the processes of one engine instance introduce themselves."""

    gpu = ""

    def __init__(
        self,
        name: str = "e",
        *,
        shards: Sequence[Shard] = (WHOLE,),
        space: Space = SMALL,
        tenant: str = "t",
        epoch: str = "",
        more: Sequence[tuple[Space, Sequence[Shard]]] = (),
    ) -> None:
        """`more`: further KV cache groups, each with a shard for every rank."""
        self.name = name
        self.shards = shards
        self.space = space
        self.groups = [(space, shards), *more]
        self.tenant = tenant
        self.epoch = epoch
        self.columns = list(dict.fromkeys(shards))
        """Distinct shards, in the order of columns."""
        self.writers = [self.shards.index(shard) for shard in self.columns]
        """Rank that writes, by column."""

    def scheduler_hello(self, **changes: Any) -> HelloScheduler:
        fields = {
            "tenant": self.tenant,
            "rank_count": len(self.shards),
            "process": f"{self.name}-scheduler",
            "label": self.name,
            "weights_epoch": self.epoch,
        }
        return scheduler_hello(self.name, **fields | changes)

    def rank_hello(self, rank: int, /, **changes: Any) -> HelloRank:
        changed = {name: changes.pop(name) for name in ("space", "block_bytes") if name in changes}
        groups = [group_of(space, shards[rank]) for space, shards in self.groups]
        groups[0] = msgspec.structs.replace(groups[0], **changed)
        fields = {"tenant": self.tenant, "process": f"{self.name}-rank{rank}", "gpu": self.gpu}
        return rank_hello(*groups, name=self.name, **{"rank": rank, **fields, **changes})


class Peer(Hellos):
    """One engine instance: a scheduler and ranks, attached in an open session."""

    def __init__(
        self,
        node: Node,
        name: str = "e",
        *,
        shards: Sequence[Shard] = (WHOLE,),
        space: Space = SMALL,
        tenant: str = "t",
        epoch: str = "",
        more: Sequence[tuple[Space, Sequence[Shard]]] = (),
        process: int = 0,
        gpu: str = "",
    ) -> None:
        self.gpu = gpu
        super().__init__(name, shards=shards, space=space, tenant=tenant, epoch=epoch, more=more)
        self.node = node
        self.session = 0
        self.used: set[tuple[int, int]] = set()
        self.scheduler = node.connect(self.scheduler_hello(), process)
        self.ranks = [node.connect(self.rank_hello(i), process) for i in range(len(shards))]
        self.be_quiet()

    def be_quiet(self) -> None:
        """All ranks answer that have not; the session opens unless the peer was refused."""
        if any(rank in self.node.hangups for rank in self.ranks):
            return
        for rank in self.ranks:
            self.node.be_quiet(rank)
        self.session = self.node.last(self.scheduler, SessionOpen).session

    def credits(self, group: int = 0) -> list[tuple[int, int]]:
        """(slot, generation) of every Grant of this session, shard minor, oldest first."""
        return [
            place
            for message in self.node.sent[self.scheduler]
            if isinstance(message, Grant)
            and (message.session, message.group) == (self.session, group)
            for place in pairs(message)
        ]

    def sealed(
        self,
        *numbers: int,
        places: Sequence[tuple[int, int]] | None = None,
        rank: int = 0,
        group: int = 0,
        session: int = 0,
    ) -> Received:
        """A Seal of blocks in the oldest credits that are not used yet, or in `places`; of this
        session, or of another one."""
        if places is None:
            unused = self.unused(rank, group)
            assert len(unused) >= len(numbers), f"{len(numbers)} blocks, {len(unused)} credits"
            places = unused[: len(numbers)]
        self.used.update(places)
        slots, generations = arrays(places)
        seal = Seal(
            session=session or self.session,
            keys=keys(*numbers),
            slots=slots,
            generations=generations,
            checksums=b"".join(checksum(number, rank) for number in numbers),
            group=group,
        )
        return Received(ConnectionId(self.ranks[rank]), seal)

    def seal(self, *numbers: int, **its: Any) -> list[tuple[int, int]]:
        """The same, heard by the node; returns where."""
        event = self.sealed(*numbers, **its)
        self.node.step(event)
        assert isinstance(event.message, Seal)
        return pairs(event.message)

    def unused(self, rank: int = 0, group: int = 0) -> list[tuple[int, int]]:
        """Credits of a rank that writes which it has neither sealed nor dropped."""
        mine = self.credits(group)[self.writers.index(rank) :: len(self.columns)]
        return [place for place in mine if place not in self.used]

    def store(self, *numbers: int) -> None:
        """Seal these blocks in all shards, one datagram per block and rank."""
        for number in numbers:
            for rank in self.writers:
                self.seal(number, rank=rank)

    def drop(self, *places: tuple[int, int], rank: int = 0) -> None:
        slots, generations = arrays(places)
        self.used.update(places)
        self.node.hear(
            self.ranks[rank], Drop(session=self.session, slots=slots, generations=generations)
        )

    def distrust(self, *places: tuple[int, int], rank: int = 0) -> None:
        slots, generations = arrays(places)
        self.node.hear(self.ranks[rank], Distrust(slots=slots, generations=generations))

    def lease(
        self, lease: int, *numbers: int, with_checksums: bool = False, group: int = 0
    ) -> LeaseReply:
        ask = LeaseAsk(lease, keys(*numbers), with_checksums=with_checksums, group=group)
        self.node.hear(self.scheduler, ask)
        reply = self.node.last(self.scheduler, LeaseReply)
        assert reply.lease == lease
        return reply

    @property
    def more(self) -> LeaseMore:
        """What a lease was told last of blocks on their way."""
        return self.node.last(self.scheduler, LeaseMore)

    def hint(self, *numbers: int, group: int = 0) -> list[bool]:
        self.node.hear(self.scheduler, Hint(request=1, keys=keys(*numbers), group=group))
        reply = self.node.last(self.scheduler, HintReply)
        assert reply.group == group
        present = reply.present
        bits = np.unpackbits(np.frombuffer(present, dtype=np.uint8), bitorder="little")
        assert not bits[len(numbers) :].any()
        return [bool(bit) for bit in bits[: len(numbers)]]


def attached(node: N, **its: Any) -> tuple[N, Peer]:
    """A node, and an engine that is attached to it."""
    return node, Peer(node, **its)


def checksum(number: int, rank: int = 0) -> bytes:
    return hashlib.blake2b(f"{number}/{rank}".encode(), digest_size=16).digest()

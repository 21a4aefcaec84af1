"""What one tenant can learn of another, take from it, or see in memory that was another's.

T1 addresses that differ in one field share nothing · T2 no answer and no path through the code
tells what another tenant has stored · T3 no byte of another tenant is taken for one's own, however
slots are evicted, served and read at the same time · T13 a flood of keys stays within its limits.
See `kvstore/docs/threats.md`.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import pytest

from kvstore.arena import Arena, GenerationView
from kvstore.engine.events import Admit, Command, Event, Hangup, Send, Tick
from kvstore.index.chain import block_keys
from kvstore.tier_events import RaiseGenerations
from kvstore.tiers.dram import DramTier
from kvstore.types import (
    KEY_BYTES,
    PAGE_BYTES,
    SLOT_BYTES_MIN,
    BlockKey,
    ConnectionId,
    Incarnation,
    Shard,
    SpaceId,
)
from kvstore.units import NS_PER_S
from kvstore.wire.messages import (
    EngineMessage,
    Hint,
    LeaseAsk,
    LeaseRelease,
    LeaseReply,
    Seal,
    encode,
)
from kvstore.wire.record import Scope, checksum_of, header
from kvstore.wire.space import fingerprint
from tests.amounts import amount, covered
from tests.faults.mutate import no_growth
from tests.kit.engine_check import check_engine
from tests.kit.memory_tier import until_populated
from tests.unit.engine.harness import SMALL, Node, Peer, arrays, space

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Quick(Node):
    """A node's engine over real memory, without sockets and without a check after every step.

    `generations` is what engines see. Closed at the end of `with`.
    """

    def __init__(self, *, slots: int, **config: Any) -> None:
        self.arena = Arena(arena_bytes=slots * SLOT_BYTES_MIN, incarnation=Incarnation(7))
        self.tier = DramTier(self.arena)
        self.tier.start()
        until_populated(self.tier)
        self.generations = GenerationView(
            self.arena.generation_fd,
            size_bytes=self.arena.generation_bytes,
            arena_bytes=self.arena.arena_bytes,
            incarnation=7,
        )
        super().__init__(slots=slots, tell_changes=False, **config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.generations.close()
        self.tier.close()

    def step(self, *events: Event) -> list[Command]:
        """As the loop and the executor do it: generations are raised before anybody hears."""
        commands = self.engine.step(events, self.now_ns)
        for command in commands:
            if isinstance(command, RaiseGenerations):
                self.tier.raise_generations(command.slots, command.generations)
        for command in commands:
            match command:
                case Send(connection=connection, message=message):
                    self.sent[connection].append(message)
                case Admit(connection=connection):
                    self.admitted.append(connection)
                case Hangup(connection=connection, reason=reason):
                    self.hangups[connection] = reason
                case _:
                    pass
        return commands

    def writable(self, peer: Peer) -> list[tuple[int, int]]:
        """(slot, generation) of every slot that the peer's first rank may write now."""
        slots = self.engine._state.slots
        words = slots.of_writer(ConnectionId(peer.ranks[0]))
        values = slots.generation[words].tolist()
        return list(zip(slots.slots_of(words).tolist(), values, strict=True))

    def seal(self, peer: Peer, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Seal a block per key in as many slots as there are; where. Nothing is written there."""
        places = self.writable(peer)[: len(keys)]
        slots, generations = arrays(places)
        packed = b"".join(keys[: len(places)])
        seal = Seal(peer.session, packed, slots, generations, bytes(16 * len(places)))
        self.hear(peer.ranks[0], seal)
        return places

    def ask(self, peer: Peer, lease: int, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Lease these keys; (slot, generation) of the run that is there."""
        self.sent.clear()
        self.hear(peer.scheduler, LeaseAsk(lease, b"".join(keys)))
        reply = self.last(peer.scheduler, LeaseReply)
        slots = np.frombuffer(reply.slots, "<u4").tolist()
        return list(zip(slots, np.frombuffer(reply.generations, "<u8").tolist(), strict=True))


def digest(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


# ── T1 ───────────────────────────────────────────────────────────────────────────────────────────

PAIRS = amount(20_000, nightly=100_000)


class Address(NamedTuple):
    """All that a block is addressed by."""

    tenant: str
    space: bytes
    shard: Shard
    block_bytes: int
    key: bytes

    def header(self) -> bytes:
        """What its checksum covers before its bytes."""
        prefix = Scope(
            tenant=self.tenant,
            space=SpaceId(self.space),
            shard=self.shard,
            block_bytes=self.block_bytes,
        ).prefix()
        return header(prefix, BlockKey(self.key))


def changed(address: Address, number: int) -> Address:
    """The address with exactly one field changed, by as little as it can be."""

    def flipped(data: bytes) -> bytes:
        at = number % len(data)
        return data[:at] + bytes([data[at] ^ 1 << number % 8]) + data[at + 1 :]

    match number % 8:
        case 0:
            return address._replace(tenant=address.tenant + "\0")
        case 1:
            return address._replace(space=flipped(address.space))
        case 2:
            return address._replace(key=flipped(address.key))
        case 3:
            return address._replace(block_bytes=address.block_bytes + 1)
        case part:
            name = Shard.__struct_fields__[part - 4]
            bounds = {name: getattr(address.shard, name) + 1}
            return address._replace(shard=msgspec.structs.replace(address.shard, **bounds))


def test_addresses_that_differ_in_one_field_have_nothing_in_common() -> None:
    source = random.Random(1)
    headers, sums = set(), set()
    for number in range(PAIRS):
        address = Address(
            tenant="t" * source.randrange(1, 4) + source.choice(("", "\0", "é")) + str(number),
            space=source.randbytes(32),
            shard=Shard(*(source.randrange(4) for _ in range(4))),
            block_bytes=source.randrange(1, 1 << 20),
            key=source.randbytes(KEY_BYTES),
        )
        for its in (address, changed(address, number)):
            headers.add(its.header())
            sums.add(checksum_of(its.header(), [b"the same bytes"]))
    assert len(headers) == len(sums) == 2 * PAIRS


def test_a_name_does_not_run_into_the_key_behind_it() -> None:
    """The same bytes, cut at another place."""
    whole = b"tenant" + bytes(range(32, 64))
    address = Address("tenant", bytes(32), Shard(0, 1, 0, 1), 16, whole[6:])
    longer = address._replace(tenant=whole[:7].decode(), key=whole[7:] + b"x")
    assert address.header() + b"x" != longer.header()
    assert len({address.header(), longer.header()}) == 2


def test_spaces_that_differ_in_one_field_are_two() -> None:
    count, base = 200, SMALL
    found = set()
    for name, value in msgspec.structs.asdict(base).items():
        for number in range(1, count + 1):
            other = value + number if isinstance(value, int) else f"{value}{number}"
            made = msgspec.structs.replace(base, **{name: other})
            found.add(fingerprint(made, weights_epoch=""))
    found |= {fingerprint(base, weights_epoch=str(number)) for number in range(count)}
    found.add(fingerprint(base, weights_epoch=""))
    assert len(found) == count * (len(base.__struct_fields__) + 1) + 1


def test_prompts_that_differ_in_one_token_salt_or_seed_share_no_key_from_there_on() -> None:
    source = random.Random(2)
    for _ in range(2_000):
        tokens = [source.randrange(1 << 17) for _ in range(16)]
        at = source.randrange(16)
        other = [*tokens[:at], tokens[at] ^ 1 << source.randrange(17), *tokens[at + 1 :]]
        plain = block_keys(tokens, block_tokens=4, seed="s")
        assert block_keys(other, block_tokens=4, seed="s")[: at // 4] == plain[: at // 4]
        assert not set(block_keys(other, block_tokens=4, seed="s")[at // 4 :]) & set(plain)
        assert not set(block_keys(tokens, block_tokens=4, seed="s", cache_salt="x")) & set(plain)
        assert not set(block_keys(tokens, block_tokens=4, seed="r")) & set(plain)


# ── T2 ───────────────────────────────────────────────────────────────────────────────────────────

PROBES = amount(1_000, nightly=2_000)
SEEN_AUC = (0.47, 0.53)
CONTROL_AUC_MIN = 0.95


class Steps:
    """Lines of Python that run inside: what takes time, without a clock."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, _frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        self.count += event == "line"
        return self._trace


def auc(present: Sequence[float], absent: Sequence[float]) -> float:
    """How often a value of one kind is above one of the other: 0.5 tells nothing."""
    values = np.concatenate([present, absent])
    order = values.argsort(kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    for value in np.unique(values):
        same = values == value
        ranks[same] = ranks[same].mean()
    n, m = len(present), len(absent)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


def observed(node: Quick, spy: Peer, key: bytes, number: int) -> dict[str, float]:
    """All that a spy sees of two questions about a key, as numbers."""
    seen: dict[str, float] = {}
    asked: list[EngineMessage] = [Hint(number, key), LeaseAsk(number, key, with_checksums=True)]
    for message in [*asked, LeaseRelease([number])]:
        name = type(message).__name__
        node.sent.clear()
        with Steps() as steps:
            commands = node.hear(spy.scheduler, message)
        # The number that it chose itself comes back: that tells nothing.
        answers = [
            encode(msgspec.structs.replace(answer, **{answer.__struct_fields__[0]: 0}))
            for answer in node.sent[spy.scheduler]
        ]
        seen[f"{name} steps"] = steps.count
        seen[f"{name} commands"] = len(commands)
        seen[f"{name} answers"] = len(answers)
        seen[f"{name} bytes"] = sum(map(len, answers))
        seen[f"{name} bits"] = sum(int.from_bytes(answer, "big").bit_count() for answer in answers)
    return seen


def probed(tenant: str, model: str) -> dict[str, float]:
    """AUC of everything that a spy sees, by name, over probes of what a victim has and has not."""
    source = random.Random(3)
    seen: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with Quick(slots=256, block_count_max=2_048, credit_blocks_max=64) as node:
        victim = Peer(node, "victim", tenant="victim")
        spy = Peer(node, "spy", tenant=tenant, space=space(model, layer_bytes=16 << 10))
        stored: list[bytes] = []
        for number in range(128):
            node.seal(victim, [digest("stored", number)])
            stored.append(digest("stored", number))
        for number in range(PROBES):
            is_there = source.random() < 0.5
            key = source.choice(stored) if is_there else digest("absent", number)
            seen[is_there].append(observed(node, spy, key, number + 1))
        check_engine(node.engine)
    return {
        name: auc([row[name] for row in seen[True]], [row[name] for row in seen[False]])
        for name in seen[True][0]
    }


@pytest.mark.parametrize(
    ("tenant", "model"), [("spy", "small"), ("victim", "other")], ids=["tenant", "model"]
)
def test_nothing_tells_what_others_have_stored(tenant: str, model: str) -> None:
    found = probed(tenant, model)
    told = {name: value for name, value in found.items() if not SEEN_AUC[0] <= value <= SEEN_AUC[1]}
    assert not told


def test_the_probe_has_power() -> None:
    found = probed("victim", "small")
    assert max(abs(value - 0.5) + 0.5 for value in found.values()) >= CONTROL_AUC_MIN
    assert found["Hint bits"] >= CONTROL_AUC_MIN
    assert found["LeaseAsk bytes"] >= CONTROL_AUC_MIN
    assert abs(found["LeaseAsk steps"] - 0.5) + 0.5 >= CONTROL_AUC_MIN


# ── T3 ───────────────────────────────────────────────────────────────────────────────────────────

RACES = amount(20_000, nightly=100_000)
PARTS = 4
AT_ONCE = 24
SLOTS = 72
END = SLOT_BYTES_MIN - PAGE_BYTES
"""A slot's first and last page are written and read, at different times."""


def canary(tenant: str, key: bytes) -> bytes:
    return (tenant.encode() + key)[:KEY_BYTES] * (PAGE_BYTES // KEY_BYTES)


class Race:
    """A reader and a rival that share a few slots."""

    def __init__(self, node: Quick) -> None:
        self.node = node
        self.peers = {name: Peer(node, name, tenant=name) for name in ("reader", "rival")}
        self.numbers = itertools.count()
        self.held: dict[str, list[bytes]] = {"reader": [], "rival": []}

    def store(self, name: str, count: int) -> None:
        """Write canaries into what may be written, then seal; the oldest of others go."""
        keys = [digest(name, next(self.numbers)) for _ in range(count)]
        for key, (slot, _) in zip(keys, self.node.writable(self.peers[name]), strict=False):
            view = self.node.tier.arena.array.data[slot * PAGE_BYTES :][:SLOT_BYTES_MIN]
            view[:PAGE_BYTES] = view[END:] = canary(name, key)
        self.held[name] = (self.held[name] + keys)[-AT_ONCE:]
        self.node.seal(self.peers[name], keys)

    def disturb(self, source: random.Random, lease: int) -> None:
        """Anything that may happen while somebody reads: mostly nothing."""
        match source.randrange(6):
            case 0:
                self.node.now_ns += 20 * NS_PER_S  # longer than a lease lasts
                self.node.step(Tick())
            case 1:
                self.node.hear(self.peers["reader"].scheduler, LeaseRelease([lease]))
            case _:
                pass
        if source.random() < 0.3:
            for _ in range(3):
                self.store("rival", SLOTS // 2)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_canary_of_a_rival_is_read_as_ones_own(part: int) -> None:
    source = random.Random(part)
    races = good = overwritten = 0
    with Quick(slots=SLOTS, credit_share=0.5) as node, no_growth():
        race = Race(node)
        arena = node.arena.array
        for lease in itertools.count(1):
            if races >= RACES // PARTS:
                break
            race.store("reader", AT_ONCE)
            keys = race.held["reader"]
            leased = node.ask(race.peers["reader"], lease, keys)
            slots = np.array([slot for slot, _ in leased], np.uint32)
            wanted = np.array([generation for _, generation in leased], np.uint64)
            begins = (slots.astype(np.int64) * PAGE_BYTES).tolist()
            race.disturb(source, lease)
            copies = [arena[at : at + PAGE_BYTES].tobytes() for at in begins]
            race.disturb(source, lease)
            ends = [arena[at + END : at + SLOT_BYTES_MIN].tobytes() for at in begins]
            race.disturb(source, lease)
            is_valid = node.generations.generations(slots) == wanted
            for key, begin, end, valid in zip(keys, copies, ends, is_valid.tolist(), strict=False):
                races += 1
                good += valid
                mine = canary("reader", key)
                overwritten += not begin == end == mine
                assert not valid or begin == end == mine, "foreign bytes, taken for good"
            node.hear(race.peers["reader"].scheduler, LeaseRelease([lease]))
            if lease % 200 == 0:
                check_engine(node.engine)
                node.sent.clear()
    assert good > RACES // PARTS // 20
    assert overwritten > RACES // PARTS // 20, "hardly ever was there a race"
    covered("reads that raced with another tenant", races)


# ── T13 ──────────────────────────────────────────────────────────────────────────────────────────

FLOOD_KEYS = amount(200_000, nightly=1_000_000)
FLOOD_AT_ONCE = 2_048
OWNED = 1_000


def test_a_flood_of_keys_stays_within_its_limits() -> None:
    """Stored and asked for, by another tenant than the one that was promised half of the memory."""
    slots = 4_096
    with Quick(
        slots=slots,
        slab_slots=64,
        block_count_max=slots,
        credit_share=0.5,
        credit_blocks_max=FLOOD_AT_ONCE,
        quotas=(("modest", slots // 2 * SLOT_BYTES_MIN),),
    ) as node:
        modest = Peer(node, "modest", tenant="modest")
        flood = Peer(node, "flood", tenant="flood")
        mine = [digest("mine", number) for number in range(OWNED)]
        stored = 0
        while stored < OWNED:
            stored += len(node.seal(modest, mine[stored:]))
        with no_growth():
            sent = 0
            for number in itertools.count():
                if sent >= FLOOD_KEYS:
                    break
                keys = np.random.default_rng(number).bytes(FLOOD_AT_ONCE * KEY_BYTES)
                split = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
                node.hear(flood.scheduler, Hint(number, keys))
                sent += max(1, len(node.seal(flood, split)))
                node.sent.clear()
                if number % 100 == 0:
                    node.tick(100)
        check_engine(node.engine)
        found = sum(len(node.ask(modest, number + 1, [key])) for number, key in enumerate(mine))
        assert found >= 0.9 * OWNED
        assert node.engine.nodes()[0].blocks <= slots

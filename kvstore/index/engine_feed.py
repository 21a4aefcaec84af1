"""Events of one engine about its own memory, in order and without gaps, or not at all.

    begin ─▶ JOINING ─▶ LIVE ⇄ FILLING        batches by number in, changes of the index out
                 ▲________│_______│           a gap that cannot be filled: all is void

An engine numbers its batches from 0 and keeps the last ones, which it replays from a number on.

1. Nothing is published while the past is replayed: only the blocks held at its end.
2. A gap is filled by a replay. Live batches wait meanwhile.
3. A gap that cannot be filled, or a batch that cannot be read, may have been a removal: all blocks
   are void, and later batches count anew. A forgotten block costs a miss; a published block that
   is gone costs the time of its readers.
4. Numbers that do not rise are those of another publisher: begin again.
5. A replay may lack pieces in its middle (a full queue drops them): it is asked for again from
   there. The first piece missing means that the engine keeps it no more.
6. Batches are worked on in pieces of PIECE_WORK_MAX: while `has_more`, the caller calls `more` and
   passes in nothing else. Other engines get their turn between pieces.

A publisher sends nothing until the subscription has reached it, and the first replay may end before
that: so the batches in between are requested once more, JOINED_MS after joining.

Pure; time is an argument. Covers: numbers, gaps, what counts, and (`EngineBlocks`) which keys the
engine's names of blocks stand for. Does not cover: forms (`wire.kv_events`), sockets
(`kvstore.peers.engine_memory`).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from kvstore.errors import ProtocolError
from kvstore.index.chain import block_keys
from kvstore.types import BlockKey, Counts, EngineSource, Tier
from kvstore.wire import kv_events as wire
from kvstore.wire.feed import Change, Left, Removed, Stored

WAITING_BATCHES_MAX: Final = 1024
WAITING_BYTES_MAX: Final = 16 << 20
REPLAY_MS: Final = 5000
"""A replay without a batch for this long counts as ended."""
JOINED_MS: Final = 1000
"""Time after joining at which the batches since the replay are requested."""
PIECE_WORK_MAX: Final = 1024
"""Work done in one call: about 30 ms. A name, 64 tokens of one, or 256 bytes to be decoded count as
1."""
_WORK_TOKENS: Final = 64
_WORK_BYTES: Final = 256
OWN_GROUPS: Final = (None, 0)
"""KV cache groups whose events count: all groups of a model have the same keys, and the first is
enough."""
BLOCK_COUNT_MAX: Final = 1 << 20

Name = int | bytes
"""Name of a block in the engine's events: its hash."""
_Kind = TypeVar("_Kind", Stored, Removed)


# ── names and keys ────────────────────────────────────────────────────────────────────────────────
#
#     parent, tokens ─stored──▶ keys of the chain            the engine's names of them are kept
#     names ─────────removed──▶ the keys that they stood for
#
# Engines may name blocks by other hashes than ours, or by a part of them. A block's tokens and its
# parent's key give the key that everybody else uses (`chain`); the engine's name for it is
# remembered until it is removed. A block with an unknown parent, an adapter or anything else but
# tokens and a salt in its key is left out: it is not offered, which costs a miss. Where whole names
# are known to be keys, nothing of that is needed. Bounded: `block_count_max` names.


class EngineBlocks:
    """Blocks held by one data-parallel rank of one engine, by name and key."""

    def __init__(self, source: EngineSource, *, block_count_max: int = BLOCK_COUNT_MAX) -> None:
        """`source`: the engine; blocks of another size than it says are left out."""
        self._source = source
        self._block_count_max = block_count_max
        self._keys: dict[Name, BlockKey] = {}
        self._held = Counts[BlockKey]()
        """Held keys, with the number of names of each: a name may cover more than the block."""
        self.left_out = 0
        """Number of blocks since the start whose key could not be made."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        """Whether a block of this key is held. May be asked by any thread."""
        return key in self._held

    def keys(self) -> list[BlockKey]:
        """Keys of all held blocks, one per name."""
        return list(self._keys.values())

    def stored(self, event: wire.EngineStored) -> list[BlockKey]:
        """Add blocks of one chain. Returns the keys of those blocks whose key can be made."""
        # Before any key is made: a full memory costs nothing.
        names = event.block_hashes[: max(0, self._block_count_max - len(self._keys))]
        keys = self._keys_of(event, names) if names else []
        named = dict(zip(names, keys, strict=False))
        self.left_out += len(event.block_hashes) - len(named)
        self.removed(list(named))  # a name that is given again may stand for another key now
        self._held.update(named.values())
        self._keys.update(named)
        return list(named.values())

    def _keys_of(self, event: wire.EngineStored, names: Sequence[Name]) -> list[BlockKey]:
        """Keys of these first blocks of an event; empty: they cannot be made."""
        size, tokens, salt = event.block_size, event.token_ids, _salt_of(event)
        if size <= 0 or self._source.block_tokens not in (0, size):
            return []
        if self._source.names_are_keys and all(isinstance(name, bytes) for name in names):
            return [BlockKey(name) for name in names if isinstance(name, bytes)]
        parent, seed = event.parent_block_hash, self._source.hash_seed
        above = None if parent is None else self._keys.get(parent)
        is_known = parent is None or above is not None
        if not is_known or salt is None or size * len(event.block_hashes) != len(tokens):
            return []
        tokens = tokens[: size * len(names)]
        return block_keys(tokens, block_tokens=size, parent=above, seed=seed, cache_salt=salt)

    def removed(self, names: Sequence[Name]) -> list[BlockKey]:
        """Remove blocks by name. Returns the keys that no name is left for."""
        return [
            key
            for name in names
            if (key := self._keys.pop(name, None)) is not None and self._held.drop(key)
        ]

    def cleared(self) -> None:
        """Remove all blocks."""
        self._keys.clear()
        self._held.clear()


# ── the feed ──────────────────────────────────────────────────────────────────────────────────────


class EngineCounters:
    """Counts since the start, of all engines that share this object."""

    def __init__(self) -> None:
        self.batches = 0
        self.replays = 0
        self.voids = 0
        """Number of times that all blocks were dropped: after a gap, or an unreadable batch."""
        self.refused = 0
        """Batches that could not be read."""


class Phase(enum.Enum):
    """State of the feed of one engine."""

    UNREACHABLE = "unreachable"
    JOINING = "joining"
    LIVE = "live"
    FILLING = "filling"


class EngineFeed:
    """Feed of KV events of one data-parallel rank of one engine."""

    def __init__(
        self,
        source: EngineSource,
        say: Callable[[Change], object],
        counters: EngineCounters | None = None,
    ) -> None:
        """`say`: called with each change of the index that follows from what happens."""
        self.source, self._say = source, say
        self.blocks = EngineBlocks(source)
        self.counters = counters or EngineCounters()
        self.phase = Phase.UNREACHABLE
        self.lookahead_tokens = 0
        """Tokens behind a block that its hash covers: hits may be a block shorter than is held."""
        self._can_replay = bool(source.replay_endpoint)
        self._asked: int | None = None
        """Number from which on a replay is to be requested; None: no request is due."""
        self._next: int | None = None
        """Number of the batch that comes next; None: any."""
        self._last_live = -1
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._events: deque[wire.EngineEvent] = deque()
        """Pieces of received batches that are not applied yet."""
        self._in_order = 0
        """Batches of this replay that were taken."""
        self._has_hole = False
        self._quiet_since_ms = 0
        self._rest_due_ms: int | None = None

    # ── what happens ─────────────────────────────────────────────────────────────────────────────

    def begin(self, now_ms: int) -> None:
        """The engine was connected; another process may have taken its place. All earlier blocks
        are void, and a replay is requested."""
        self.end()
        self._last_live = -1
        if self._can_replay:
            self.phase = Phase.JOINING
            self._rest_due_ms = now_ms + JOINED_MS
            self._ask(0, now_ms)
        else:
            self.phase = Phase.LIVE

    def end(self) -> None:
        """The engine is disconnected: all its blocks are void."""
        self._void()
        self.phase, self._next, self._asked, self._rest_due_ms = Phase.UNREACHABLE, None, None, None
        self.lookahead_tokens = 0
        self._waiting.clear()

    def take_ask(self) -> int | None:
        """Number from which on to request a replay now, in place of any replay under way; None:
        none is wanted. Each request is returned once."""
        asked, self._asked = self._asked, None
        return asked

    def heard(self, number: int, payload: bytes, now_ms: int) -> None:
        """A live batch came."""
        if self.phase is Phase.UNREACHABLE:
            return
        if number <= self._last_live:
            self.begin(now_ms)
        self._last_live = number
        self._wait(number, payload)
        if self.phase is Phase.LIVE:
            self.more(now_ms)

    def replayed(self, number: int, payload: bytes, now_ms: int) -> None:
        """A batch of a replay came."""
        if self.phase not in (Phase.JOINING, Phase.FILLING):
            return
        self._quiet_since_ms = now_ms
        if self._next is not None and number < self._next:
            return
        if self._is_behind(number):
            if self._in_order:
                self._has_hole = True
                return
            # The engine keeps no more what is missing. As when joining: told is what is held at
            # the end.
            self._void()
            self.phase = Phase.JOINING
        self._in_order += 1
        self._take(number, payload)
        self.more(now_ms)

    def replay_ended(self, now_ms: int) -> None:
        """The replay has ended: go live, or request the rest if a piece is missing."""
        if self.phase not in (Phase.JOINING, Phase.FILLING):
            return
        if self._has_hole:
            assert self._next is not None
            self._ask(self._next, now_ms)
        elif self.phase is Phase.FILLING and not self._in_order:
            self._give_up(now_ms)
        else:
            # It has published nothing so far: what comes first must be its first.
            self._next = self._next or 0
            self._go_live(now_ms)

    def tick(self, now_ms: int) -> None:
        """Time passed: replays may be due, or may have stopped."""
        match self.phase:
            case Phase.LIVE if self._rest_due_ms is not None and now_ms >= self._rest_due_ms:
                self._rest_due_ms = None
                self._fill(now_ms)
            case Phase.JOINING | Phase.FILLING if now_ms - self._quiet_since_ms >= REPLAY_MS:
                if self._in_order:  # its end was lost
                    self._ask(self._next or 0, now_ms)
                else:
                    self._give_up(now_ms)
            case _:
                pass

    @property
    def has_more(self) -> bool:
        """Whether received batches are not fully applied: `more` is to be called."""
        return bool(self._events) or (self.phase is Phase.LIVE and bool(self._waiting))

    def more(self, now_ms: int) -> None:
        """Apply one piece of the received batches."""
        work = 0
        while work < PIECE_WORK_MAX:
            if self._events:
                event = self._events.popleft()
                work += _work_of(event)
                self._apply(event)
                self._quiet_since_ms = now_ms
            elif self.phase is Phase.LIVE and self._waiting:
                number, payload = self._waiting[0]
                is_behind = self._is_behind(number)
                if is_behind and self._can_replay:
                    self._fill(now_ms)
                    break
                self._waiting.popleft()
                work += 1 + len(payload) // _WORK_BYTES
                if is_behind:
                    self._void()
                if self._next is None or number >= self._next:  # or else it was in a replay
                    self._take(number, payload)
            else:
                break

    def held_keys(self) -> list[BlockKey]:
        """Keys of all published blocks that were not removed since: quickly made."""
        return [] if self.phase is Phase.JOINING else self.blocks.keys()

    def held_of(self, keys: Sequence[BlockKey]) -> list[Stored]:
        """The change that stores these blocks; none without keys."""
        return self._changed(Stored, keys)

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, number: int, now_ms: int) -> None:
        self._asked = number
        self._in_order, self._has_hole, self._quiet_since_ms = 0, False, now_ms
        self.counters.replays += 1

    def _fill(self, now_ms: int) -> None:
        self.phase = Phase.FILLING
        self._ask(self._next or 0, now_ms)

    def _give_up(self, now_ms: int) -> None:
        """The replay was not answered. If a batch is missing, all blocks are void; go on with the
        live batches."""
        is_gap = any(self._is_behind(number) for number, _ in self._waiting)
        if self.phase is Phase.JOINING or is_gap:
            self._void()
            self._next = None
        self._go_live(now_ms)

    def _go_live(self, now_ms: int) -> None:
        was_joining = self.phase is Phase.JOINING
        self.phase = Phase.LIVE
        if was_joining:
            self._tell(*self.held_of(self.blocks.keys()))
        self.more(now_ms)

    def _is_behind(self, number: int) -> bool:
        """Whether what comes before this batch is missing."""
        return self._next is not None and number > self._next

    def _wait(self, number: int, payload: bytes) -> None:
        size_bytes = sum(len(each) for _, each in self._waiting) + len(payload)
        if len(self._waiting) >= WAITING_BATCHES_MAX or size_bytes > WAITING_BYTES_MAX:
            self._waiting.clear()  # which shows as a gap
        self._waiting.append((number, payload))

    def _void(self) -> None:
        self.counters.voids += bool(len(self.blocks))
        self._clear()
        self._events.clear()

    def _clear(self) -> None:
        if len(self.blocks):
            self._tell(Left(self.source.engine, self.source.rank))
        self.blocks.cleared()

    def _tell(self, *changes: Change) -> None:
        """Say changes, but not while the past is replayed."""
        for change in changes if self.phase is not Phase.JOINING else ():
            self._say(change)

    def _take(self, number: int, payload: bytes) -> None:
        """Decode the batch that is next in order and queue its events for `more`. An unreadable
        batch voids all blocks."""
        self._next = number + 1
        self.counters.batches += 1
        try:
            events = wire.decode_batch(payload)
        except ProtocolError:
            self.counters.refused += 1
            self._void()
            return
        for event in events:
            self._events.extend(_pieces_of(event))

    def _apply(self, event: wire.EngineEvent) -> None:
        match event:
            case wire.EngineCleared():
                self._clear()
            case _ if event.medium not in wire.OWN_MEDIA or event.group_idx not in OWN_GROUPS:
                pass
            case wire.EngineRemoved():
                self._tell(*self._changed(Removed, self.blocks.removed(event.block_hashes)))
            case wire.EngineStored():
                self.lookahead_tokens = max(map(len, event.lookahead_token_ids or ()), default=0)
                self._tell(*self.held_of(self.blocks.stored(event)))

    def _changed(self, kind: type[_Kind], keys: Sequence[BlockKey]) -> list[_Kind]:
        its = self.source
        scope = its.tenant, its.space, Tier.HBM
        return [kind(*scope, b"".join(keys), its.engine, its.rank)] if keys else []


def _salt_of(event: wire.EngineStored) -> str | None:
    """The salt hashed into the keys of these blocks; None: more than tokens and a salt is.

    Events name extra keys without their kind: a single text, in the first block of a prompt without
    an adapter, is a salt.
    """
    first, *rest = event.extra_keys or [None]
    if event.lora_id is not None or event.lora_name is not None or any(rest):
        return None
    if not first:
        return ""
    is_salt = (
        event.parent_block_hash is None
        and isinstance(first, list)
        and len(first) == 1
        and isinstance(first[0], str)
    )
    return first[0] if is_salt else None


def _work_of(event: wire.EngineEvent) -> int:
    tokens = event.token_ids if isinstance(event, wire.EngineStored) else ()
    names = () if isinstance(event, wire.EngineCleared) else event.block_hashes
    return 1 + len(names) + len(tokens) // _WORK_TOKENS


def _pieces_of(event: wire.EngineEvent) -> Iterator[wire.EngineEvent]:
    """The event, split into events of at most PIECE_WORK_MAX work each."""
    if _work_of(event) <= PIECE_WORK_MAX or isinstance(event, wire.EngineCleared):
        yield event
        return
    hashes = event.block_hashes
    if isinstance(event, wire.EngineRemoved):
        for at in range(0, len(hashes), PIECE_WORK_MAX):
            yield msgspec.structs.replace(event, block_hashes=hashes[at : at + PIECE_WORK_MAX])
        return
    size, extra_keys = event.block_size, event.extra_keys or []
    # Tokens that do not belong to blocks name none: not those of a piece, either.
    tokens = event.token_ids if size * len(hashes) == len(event.token_ids) else []
    count = max(1, PIECE_WORK_MAX // (1 + max(0, size) // _WORK_TOKENS))
    for at in range(0, len(hashes), count):
        yield msgspec.structs.replace(
            event,
            block_hashes=hashes[at : at + count],
            parent_block_hash=hashes[at - 1] if at else event.parent_block_hash,
            token_ids=tokens[max(0, at * size) : max(0, (at + count) * size)],
            extra_keys=extra_keys[at : at + count],
        )

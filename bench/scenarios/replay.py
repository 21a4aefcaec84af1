"""A workload replayed through the node's engine itself: hint, lease, seal, release.

A hit is the leading run that a lease gets, with what comes from disk if there is one: a log of
segments that does what the engine tells it, at once. Requests overlap: up to eight are served at a
time, each sealing a chunk of 16 blocks (a chunked prefill of 8,192 tokens) when it is its turn, so
that chains arrive in pieces between those of others. Does not cover: bytes, sockets, time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from bench.micro.engine_ops import SPACE, WHOLE
from bench.scenarios.workloads import Request, Workload, keys_of
from kvstore.engine.engine import Engine, EngineConfig
from kvstore.engine.events import Event, Ready, Received, Send
from kvstore.tier_events import (
    FileCommand,
    FileKnown,
    FileMoved,
    FileRead,
    FileReclaim,
    FileWritten,
    ReadFile,
    ReclaimFile,
    WriteFile,
)
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, SLOT_BYTES_MIN, AdmissionMode, ConnectionId
from kvstore.wire.messages import (
    PROTOCOL_VERSION,
    Grant,
    HelloRank,
    HelloScheduler,
    Hint,
    HintReply,
    LeaseAsk,
    LeaseMore,
    LeaseRelease,
    LeaseReply,
    Message,
    Quiesce,
    Quiet,
    Seal,
)
from kvstore.wire.record import Scope
from kvstore.wire.space import Group, fingerprint

SERVED_AT_ONCE: Final = 8
CHUNK_BLOCKS: Final = 16
CREDITS: Final = 64
_SLAB_SLOTS: Final = 64
_SEGMENTS: Final = 16
"""Of a full disk."""
_SCOPE = Scope("t", fingerprint(SPACE, weights_epoch=""), WHOLE, SLOT_BYTES_MIN)
SCHEDULER, RANK = ConnectionId(1), ConnectionId(2)


class Hits(msgspec.Struct):
    """What was asked for and what was there."""

    blocks: int = 0
    blocks_hit: int = 0
    tokens: int = 0
    tokens_hit: int = 0
    evictions: int = 0

    def add(self, request: Request, *, hit: int, block_tokens: int) -> None:
        self.blocks += len(request.blocks)
        self.blocks_hit += hit
        self.tokens += request.prompt_tokens
        self.tokens_hit += hit * block_tokens

    def ratios(self) -> dict[str, float]:
        """Miss ratios, by blocks and by tokens of the prompts."""
        return {
            "miss_blocks": round(1 - self.blocks_hit / self.blocks, 4),
            "miss_tokens": round(1 - self.tokens_hit / self.tokens, 4),
        }


class Disk:
    """A file tier of so many blocks that answers at once; which blocks lie where, no bytes."""

    def __init__(self, admission: AdmissionMode, *, capacity: int) -> None:
        self.admission = admission
        self.capacity = capacity
        self.written = 0
        """Blocks, with those that reclaimed segments kept."""
        self._segments: deque[dict[int, bytes]] = deque([{}])
        """Oldest first: keys by place."""

    def carry_out(self, command: FileCommand) -> list[Event]:
        """Do it; returns what the engine is told."""
        match command:
            case WriteFile(job=job, keys=keys):
                places = self._append(_split(keys))
                return [FileWritten(job, _places(places)), *self._reclaims()]
            case ReadFile(job=job, keys=keys):
                return [FileRead(job, b"\x01" * (len(keys) // KEY_BYTES))]
            case ReclaimFile(keep=keep):
                old = self._segments.popleft()
                kept = np.frombuffer(keep, "<u8").tolist()
                new = self._append([old[place] for place in kept])
                keys = b"".join(old[place] for place in kept)
                moved = FileMoved(_SCOPE, keys, keep, _places(new))
                return [*([moved] if kept else []), *self._reclaims()]
        raise AssertionError(f"{type(command).__name__} is not expected")

    def _append(self, keys: Sequence[bytes]) -> list[int]:
        places = []
        for key in keys:
            if len(self._segments[-1]) >= max(1, self.capacity // _SEGMENTS):
                self._segments.append({})
            self.written += 1
            self._segments[-1][self.written] = key
            places.append(self.written)
        return places

    def _reclaims(self) -> list[Event]:
        """The oldest segment has to go when all together hold too much."""
        if sum(map(len, self._segments)) <= self.capacity:
            return []
        oldest = self._segments[0]
        keys, places = b"".join(oldest.values()), _places(list(oldest))
        part = FileKnown(_SCOPE, keys, places, b"")
        return [FileReclaim(1, (part,))]


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def _places(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, dtype="<u8").tobytes()


class CachedNode:
    """An engine core with one attached rank and so many slots, in which every block takes one."""

    def __init__(self, *, policy: str, slots: int, disk: Disk | None) -> None:
        self._disk = disk
        disk_blocks = disk.capacity if disk else 0
        slots = -(-(slots + CREDITS) // _SLAB_SLOTS) * _SLAB_SLOTS
        arena = slots * SLOT_BYTES_MIN
        self.engine = Engine(
            EngineConfig(
                incarnation=1,
                arena_bytes=arena,
                slab_bytes=_SLAB_SLOTS * SLOT_BYTES_MIN,
                generation_bytes=4096 + 8 * slots,
                block_count_max=slots + disk_blocks,
                file_bytes=disk_blocks * SLOT_BYTES_MIN,
                file_admission=disk.admission if disk else AdmissionMode.ALL,
                credit_share=1.0,
                credit_blocks_max=CREDITS,
                policy=policy,
            )
        )
        self._now_ns = 0
        self._slots, self._generations = b"", b""
        self._leases = 0
        self.step(Ready(arena))
        name: dict[str, Any] = {
            "protocol": PROTOCOL_VERSION,
            "engine_id": "e",
            "nonce": "n",
            "tenant": "t",
        }
        self.step(Received(SCHEDULER, HelloScheduler(rank_count=1, process="s", **name)))
        groups = (Group(SPACE, WHOLE, SLOT_BYTES_MIN),)
        rank = HelloRank(rank=0, process="r", groups=groups, **name)
        [asked] = [m for m in self.step(Received(RANK, rank)) if isinstance(m, Quiesce)]
        self.session = asked.session
        self.step(Received(RANK, Quiet(self.session)))

    def step(self, *events: Event) -> list[Message]:
        """One step, and those of the disk that follow; returns what was sent. Credits are kept."""
        sent: list[Message] = []
        left = list(events)
        while left:
            self._now_ns += 1000
            commands = self.engine.step(left, self._now_ns)
            sent += [command.message for command in commands if isinstance(command, Send)]
            orders = [command for command in commands if isinstance(command, FileCommand)]
            left = [event for order in orders for event in self._disk_says(order)]
        for message in sent:
            if isinstance(message, Grant):
                self._slots += message.slots
                self._generations += message.generations
        return sent

    def _disk_says(self, order: FileCommand) -> list[Event]:
        assert self._disk is not None
        return self._disk.carry_out(order)

    def open(self, keys: bytes) -> tuple[int, np.ndarray, int]:
        """A request arrives: (its lease, which keys are known, length of the leased run)."""
        self._leases += 1
        # The disk answers the hint first; no more than a part of dram comes for one question.
        sent = self.step(Received(SCHEDULER, Hint(request=self._leases, keys=keys)))
        sent += self.step(Received(SCHEDULER, LeaseAsk(lease=self._leases, keys=keys)))
        [hint] = [m for m in sent if isinstance(m, HintReply)]
        run = sum(len(m.slots) // 4 for m in sent if isinstance(m, LeaseReply | LeaseMore))
        bits = np.unpackbits(np.frombuffer(hint.present, dtype=np.uint8), bitorder="little")
        return self._leases, bits[: len(keys) // KEY_BYTES].astype(bool), run

    def seal(self, keys: bytes) -> None:
        """These blocks are computed and stored, as far as there are credits."""
        count = min(len(keys) // KEY_BYTES, len(self._slots) // 4)
        keys = keys[: KEY_BYTES * count]
        slots, self._slots = self._slots[: 4 * count], self._slots[4 * count :]
        generations = self._generations[: 8 * count]
        self._generations = self._generations[8 * count :]
        sums = bytes(CHECKSUM_BYTES * count)
        self.step(Received(RANK, Seal(self.session, keys, slots, generations, sums)))

    def close(self, lease: int) -> None:
        """The request has ended."""
        self.step(Received(SCHEDULER, LeaseRelease(leases=[lease])))


class _Active:
    """A request that is being served."""

    __slots__ = ("at", "lease", "missing")

    def __init__(self, lease: int, missing: list[int]) -> None:
        self.lease = lease
        self.missing = missing
        self.at = 0


def replay(
    workload: Workload,
    *,
    policy: str,
    slots: int,
    block_tokens: int,
    disk: Disk | None = None,
) -> Hits:
    """Serve all requests with a cache of so many blocks, and a disk behind it if given."""
    node, hits = CachedNode(policy=policy, slots=slots, disk=disk), Hits()
    table = workload.key_table()
    active: deque[_Active] = deque()

    def turn() -> None:
        served = active.popleft()
        chunk = served.missing[served.at : served.at + CHUNK_BLOCKS]
        if chunk:
            node.seal(keys_of(table, chunk))
            served.at += CHUNK_BLOCKS
        if served.at < len(served.missing):
            active.append(served)
        else:
            node.close(served.lease)

    for request in workload.requests:
        if not request.blocks:
            hits.add(request, hit=0, block_tokens=block_tokens)
            continue
        while len(active) >= SERVED_AT_ONCE:
            turn()
        for _ in range(len(active)):
            turn()
        lease, known, hit = node.open(keys_of(table, request.blocks))
        hits.add(request, hit=hit, block_tokens=block_tokens)
        known_of = zip(request.blocks, known.tolist(), strict=True)
        active.append(_Active(lease, [block for block, is_known in known_of if not is_known]))
    while active:
        turn()
    hits.evictions = node.engine.counters.evictions
    return hits

"""A workload replayed through the node's engine itself: hint, lease, seal, release.

A hit is the leading run that a lease gets. Requests overlap: up to eight are served at a time, each
sealing a chunk of 16 blocks (a chunked prefill of 8,192 tokens) when it is its turn, so that chains
arrive in pieces between those of others. Does not cover: bytes, sockets, time.
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
from kvstore.engine.policy.disk import AdmissionMode, DiskAdmission
from kvstore.engine.policy.port import prints
from kvstore.types import CHECKSUM_BYTES, SLOT_BYTES_MIN, ConnectionId
from kvstore.wire.messages import (
    Grant,
    HelloRank,
    HelloScheduler,
    Hint,
    HintReply,
    LeaseAsk,
    LeaseRelease,
    LeaseReply,
    Message,
    Quiesce,
    Quiet,
    Seal,
    keys_array,
)

SERVED_AT_ONCE: Final = 8
CHUNK_BLOCKS: Final = 16
CREDITS: Final = 64
_SLAB_SLOTS: Final = 64
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


class CachedNode:
    """An engine core with one attached rank and so many slots, in which every block takes one."""

    def __init__(self, *, policy: str, slots: int) -> None:
        slots = -(-(slots + CREDITS) // _SLAB_SLOTS) * _SLAB_SLOTS
        arena = slots * SLOT_BYTES_MIN
        self.engine = Engine(
            EngineConfig(
                incarnation=1,
                arena_bytes=arena,
                slab_bytes=_SLAB_SLOTS * SLOT_BYTES_MIN,
                generation_bytes=4096 + 8 * slots,
                block_count_max=slots,
                credit_share=1.0,
                credit_blocks_max=CREDITS,
                policy=policy,
            )
        )
        self._now_ns = 0
        self._slots, self._generations = b"", b""
        self._leases = 0
        self.step(Ready(arena))
        name: dict[str, Any] = {"protocol": 1, "engine_id": "e", "nonce": "n", "tenant": "t"}
        self.step(Received(SCHEDULER, HelloScheduler(rank_count=1, process="s", **name)))
        rank = HelloRank(
            rank=0, process="r", space=SPACE, shard=WHOLE, block_bytes=SLOT_BYTES_MIN, **name
        )
        [asked] = [m for m in self.step(Received(RANK, rank)) if isinstance(m, Quiesce)]
        self.session = asked.session
        self.step(Received(RANK, Quiet(self.session)))

    def step(self, *events: Event) -> list[Message]:
        """One step; returns what was sent. Credits are kept."""
        self._now_ns += 1000
        sent = [c.message for c in self.engine.step(events, self._now_ns) if isinstance(c, Send)]
        for message in sent:
            if isinstance(message, Grant):
                self._slots += message.slots
                self._generations += message.generations
        return sent

    def open(self, keys: bytes) -> tuple[int, np.ndarray, int]:
        """A request arrives: (its lease, which keys are known, length of the leased run)."""
        self._leases += 1
        sent = self.step(
            Received(SCHEDULER, Hint(request=self._leases, keys=keys)),
            Received(SCHEDULER, LeaseAsk(lease=self._leases, keys=keys)),
        )
        [hint] = [m for m in sent if isinstance(m, HintReply)]
        [reply] = [m for m in sent if isinstance(m, LeaseReply)]
        bits = np.unpackbits(np.frombuffer(hint.present, dtype=np.uint8), bitorder="little")
        return self._leases, bits[: len(keys) // 32].astype(bool), len(reply.slots) // 4

    def seal(self, keys: bytes) -> None:
        """These blocks are computed and stored."""
        count = len(keys) // 32
        assert len(self._slots) >= 4 * count, "the node grants what it has room for"
        slots, self._slots = self._slots[: 4 * count], self._slots[4 * count :]
        generations = self._generations[: 8 * count]
        self._generations = self._generations[8 * count :]
        sums = bytes(CHECKSUM_BYTES * count)
        self.step(Received(RANK, Seal(self.session, keys, slots, generations, sums)))

    def close(self, lease: int) -> None:
        """The request has ended."""
        self.step(Received(SCHEDULER, LeaseRelease(leases=[lease])))


class Disk:
    """Blocks behind dram in a log of fixed size: the oldest goes first. Loads cost nothing here."""

    def __init__(self, mode: AdmissionMode, *, capacity: int, seed: int) -> None:
        self._admission = DiskAdmission(mode, key_count=4 * capacity, seed=seed)
        self._capacity = capacity
        self._held: dict[int, None] = {}
        self.written = 0

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def offer(self, blocks: Sequence[int], keys: bytes) -> None:
        """Blocks in dram, wanted by one request, that it does not hold."""
        admitted = self._admission.admit(prints(1, keys_array(keys)))
        for block, goes in zip(blocks, admitted.tolist(), strict=True):
            if goes:
                self._held[block] = None
                self.written += 1
        while len(self._held) > self._capacity:
            del self._held[next(iter(self._held))]


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
    node, hits = CachedNode(policy=policy, slots=slots), Hits()
    table = workload.key_table()
    active: deque[_Active] = deque()

    def offer(blocks: Sequence[int]) -> None:
        new = [] if disk is None else [block for block in blocks if block not in disk]
        if disk is not None and new:
            disk.offer(new, keys_of(table, new))

    def turn() -> None:
        served = active.popleft()
        chunk = served.missing[served.at : served.at + CHUNK_BLOCKS]
        if chunk:
            node.seal(keys_of(table, chunk))
            offer(chunk)
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
        held = list(zip(request.blocks, known.tolist(), strict=True))
        if disk is not None:
            while hit < len(held) and (held[hit][1] or held[hit][0] in disk):
                hit += 1
            offer([block for block, is_known in held if is_known])
        hits.add(request, hit=hit, block_tokens=block_tokens)
        active.append(_Active(lease, [block for block, is_known in held if not is_known]))
    while active:
        turn()
    hits.evictions = node.engine.counters.evictions
    return hits

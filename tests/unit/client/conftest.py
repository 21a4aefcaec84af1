"""A scheduler's core, and a node that answers it as a test says."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import numpy as np
import pytest

from kvstore.client.core.plan import (
    HitRules,
    LoadJob,
    LoadResult,
    Outcome,
    RankReport,
)
from kvstore.client.core.scheduler import SchedulerCore
from kvstore.units import NS_PER_MS
from kvstore.wire import messages as m
from tests.kit.cores import core_config

BLOCK_TOKENS = 128
M = TypeVar("M", bound=m.Message)


def chain(name: str, count: int) -> list[bytes]:
    """`count` keys of one prompt."""
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(count)]


class AnsweredCore:
    """Holds one core and a clock; `keys` are what it pretends to hold, those of later KV cache
    groups as `named` writes them."""

    def __init__(self, *, rules: HitRules | None = None, **changes: Any) -> None:
        config = core_config(
            engine_id="e",
            nonce="n",
            process="p",
            tenant="t",
            block_tokens=BLOCK_TOKENS,
            **{"rank_count": 1, **changes},
        )
        self.core = SchedulerCore(config, rules)
        self.name = ""
        self.group_count = len(config.block_sizes)
        self.shard_counts = (1,) * self.group_count
        self.now_ns = 1_000_000_000
        self.keys: set[bytes] = set()
        self.session = 0
        self.sent: list[m.Message] = []

    def wait(self, ms: float) -> None:
        self.now_ns += int(ms * NS_PER_MS)

    def attach(self, credits: int = 0, *, incarnation: int = 7) -> None:
        """Connect and open a session with so many credits."""
        assert self.core.attachment.dial.is_due(self.now_ns)
        self.core.attachment.dial.connected(self.now_ns)
        self.give(
            m.Welcome(
                protocol=1,
                incarnation=incarnation,
                now_ns=self.now_ns,
                arena_bytes=1 << 20,
                generation_bytes=8192,
            )
        )
        self.open_session()
        for group in range(self.group_count):
            self.grant(credits, group=group)

    def reopen(self, reason: str = "a rank left") -> None:
        """The session ends, and another one begins."""
        self.give(m.SessionClosed(session=self.session, reason=reason))
        self.open_session()

    def open_session(self) -> None:
        self.session += 1
        self.give(m.SessionOpen(self.session, self.shard_counts, node=self.name))

    def grant(self, credits: int, first_slot: int = 0, group: int = 0) -> None:
        if credits:
            slots = np.arange(first_slot, first_slot + 16 * credits, 16, dtype="<u4")
            generations = np.ones(credits, dtype="<u8")
            self.give(m.Grant(self.session, slots.tobytes(), generations.tobytes(), group))

    def give(self, message: m.Message) -> str | None:
        return self.core.received(message, self.now_ns)

    def exchange(self) -> list[m.Message]:
        """Answer what the core sent, as a node with `self.keys` would; returns what it sent."""
        sent = self.core.take_outbox()
        self.sent += sent
        for message in sent:
            if isinstance(message, m.LeaseAsk):
                self.give(self.lease_reply(message))
            elif isinstance(message, m.Hint):
                present = [named(k, message.group) in self.keys for k in split(message.keys)]
                bits = np.packbits(np.array(present, dtype=bool), bitorder="little").tobytes()
                self.give(m.HintReply(message.request, bits, message.group, message.first_block))
        return sent

    def lease_reply(self, ask: m.LeaseAsk) -> m.LeaseReply:
        count = 0
        for key in split(ask.keys):
            if named(key, ask.group) not in self.keys:
                break
            count += 1
        shards = count * self.shard_counts[ask.group]
        return m.LeaseReply(
            lease=ask.lease,
            ttl_ms=900,
            slots=np.arange(0, 16 * shards, 16, dtype="<u4").tobytes(),
            generations=np.full(shards, 5, dtype="<u8").tobytes(),
            checksums=b"x" * 16 * shards if ask.with_checksums else b"",
        )

    def holding(self, count: int, held: int | None = None, *, credits: int = 0) -> list[bytes]:
        """A prompt of so many blocks, of which it holds the first `held`, or all; attached."""
        keys = chain("a", count)
        self.hold(keys[:held])
        self.attach(credits)
        return keys

    def hold(self, keys: list[bytes]) -> list[bytes]:
        """These, and no others."""
        self.keys = set(keys)
        return keys

    def arrive(self, request: str, keys: list[bytes]) -> None:
        tokens = len(keys) * BLOCK_TOKENS + 3
        self.core.new_request(request, keys, prompt_tokens=tokens, now_ns=self.now_ns)

    def match(self, request: str, local: int = 0) -> Outcome:
        return self.core.match(request, local_tokens=local * BLOCK_TOKENS, now_ns=self.now_ns)

    def look_up(self, request: str, keys: list[bytes], local: int = 0) -> None:
        """It arrives and asks; what the core sent is answered."""
        self.arrive(request, keys)
        self.match(request, local)
        self.exchange()

    def allocate(self, request: str, blocks: list[int], loaded: int) -> None:
        """It has these blocks, and loads so many."""
        tokens = loaded * BLOCK_TOKENS
        self.core.allocated(request, tables=(blocks,), external_tokens=tokens, now_ns=self.now_ns)

    def load(self, request: str, blocks: list[int], loaded: int) -> LoadJob:
        """The same, and the job of the next step."""
        self.allocate(request, blocks, loaded)
        (job,) = self.core.plan((), self.now_ns).loads
        return job

    def ended(self, request: str, lease: int, blocks: int, *, rank: int = 0, **more: Any) -> None:
        """A rank reports that so many blocks of a load are in its cache."""
        fields = {"failed_block_ids": (), "bytes_moved": 1, "duration_ns": 1, **more}
        result = LoadResult(request=request, lease=lease, loaded_blocks=blocks, **fields)
        self.core.reported(RankReport(rank, loads=(result,)), self.now_ns)

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.sent if isinstance(message, kind)]


def named(key: bytes, group: int) -> bytes:
    """A block of a KV cache group."""
    return key + bytes((group,)) if group else key


def split(keys: bytes) -> list[bytes]:
    return [keys[i : i + 32] for i in range(0, len(keys), 32)]


@pytest.fixture
def node() -> AnsweredCore:
    return AnsweredCore()

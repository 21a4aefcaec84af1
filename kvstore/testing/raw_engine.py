"""An engine without vLLM: a scheduler and its ranks on real sockets, blocking and in one thread.

    with RawEngine(node.socket) as engine:
        engine.open()
        engine.store(keys)
        assert engine.lease(keys).slots

For tests and benchmarks of a real node. The engine follows the protocol but decides nothing: no
breaker, no back-off, no cost model (`kvstore.client.core` has those). Each 8 bytes of a block
encode key and place in the block of all ranks: a head in a wrong place is seen with any shards.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.client.link import Link, Lost
from kvstore.types import KEY_BYTES, PAGE_BYTES, BlockKey, Shard
from kvstore.wire import messages as wire
from kvstore.wire.record import Scope, checksum_of, header
from kvstore.wire.space import Group, ShardColumn, Space, fingerprint

BLOCK_TOKENS: Final = 16
LAYER_COUNT: Final = 4
HEAD_COUNT: Final = 4
TOKEN_BYTES: Final = 256
BLOCK_BYTES: Final = LAYER_COUNT * HEAD_COUNT * BLOCK_TOKENS * TOKEN_BYTES
"""64 KiB: the smallest slot, if one rank has the whole block."""
_ODD: Final = 0x9E3779B97F4A7C15
"""Odd factor whose multiples differ in all their bytes."""


class EngineGone(Exception):
    """The node refused, hung up or closed the session; carries its reason."""


def make_space(*, model: str = "model", block_bytes: int = BLOCK_BYTES) -> Space:
    """A small space, different for each `model`. `block_bytes`: size of a block in all ranks
    together.
    """
    return Space(
        model=model,
        weights="weights",
        draft="",
        group="",
        dtype="float32",
        kv_dtype="float32",
        quantization="",
        attention_backend="CPU",
        kv_layout="LBHNC",
        isa="",
        block_tokens=BLOCK_TOKENS,
        hash_block_tokens=BLOCK_TOKENS,
        layer_count=LAYER_COUNT,
        kv_head_count=HEAD_COUNT,
        head_bytes=(block_bytes // (LAYER_COUNT * HEAD_COUNT),),
        hash_algorithm="sha256_cbor",
        hash_seed="0",
        kv_format="vllm-cpu-1",
    )


def make_keys(count: int, *, seed: str = "") -> list[bytes]:
    """Distinct keys, the same for the same seed."""
    return [hashlib.sha256(f"{seed}/{n}".encode()).digest() for n in range(count)]


class RawEngine:
    """A scheduler and `rank_count` ranks that share the heads among them.

    With `replicas` > 1, groups of that many neighbours hold the same heads; the first ones store.
    """

    def __init__(
        self,
        socket: Path,
        *,
        engine_id: str = "engine",
        tenant: str = "default",
        model: str = "model",
        rank_count: int = 1,
        replicas: int = 1,
        block_bytes: int = BLOCK_BYTES,
        nonce: str = "",
        events: tuple[str, str] = ("", ""),
        gpu: str = "",
        address: str = "",
        timeout_s: float = 10.0,
    ) -> None:
        """Connect all sockets. `block_bytes`: in all ranks. `gpu`: of each rank. The `nonce` of an
        earlier engine attaches its processes again. `events`: endpoints of KV events and replay.

        Raises AttachError without a node.
        """
        assert rank_count % replicas == 0
        self.columns = rank_count // replicas
        """Number of distinct shards; rank r has shard r // replicas."""
        self.replicas, self.timeout_s, self.session, self._failure = replicas, timeout_s, 0, ""
        self.credits: list[tuple[NDArray[np.uint32], NDArray[np.uint64]]] = []
        """(slots [columns], generations [columns]) of each free block, oldest first."""
        self.push_ends: list[wire.PushEnd] = []
        self._lease_ids = itertools.count(1)
        self._replies: dict[int, wire.LeaseReply] = {}
        self._quiesced: Counter[Link] = Counter()
        """Number of Quiesce messages to each rank."""
        self.nonce = nonce = nonce or secrets.token_hex(4)
        self._tell_apart(tenant, model, block_bytes)
        who = (wire.PROTOCOL_VERSION, engine_id, nonce, tenant)
        self.scheduler = Link.connect(
            socket,
            wire.HelloScheduler(
                *who,
                rank_count=rank_count,
                process=f"scheduler-{nonce}",
                label=model,
                events=events[0],
                events_replay=events[1],
                address=address,
            ),
        )
        self.ranks = [
            Link.connect(
                socket,
                wire.HelloRank(
                    *who,
                    rank=rank,
                    process=f"rank{rank}-{nonce}",
                    groups=(Group(self._space, self._shard(rank), self.block_bytes),),
                    gpu=gpu,
                ),
            )
            for rank in range(rank_count)
        ]

    def _tell_apart(self, tenant: str, model: str, block_bytes: int) -> None:
        """Set up contents of blocks, and prefixes of their checksums, which differ by tenant, model
        and shard.
        """
        assert HEAD_COUNT % self.columns == 0
        assert block_bytes % (LAYER_COUNT * HEAD_COUNT * KEY_BYTES) == 0
        self._space = make_space(model=model, block_bytes=block_bytes)
        self.block_bytes = block_bytes // self.columns
        shards = [self._shard(column * self.replicas) for column in range(self.columns)]
        self._places = [_places(shard, block_bytes) for shard in shards]
        """Numbers of `_places`, by column."""
        self._prefixes = [
            Scope(
                tenant=tenant,
                space=fingerprint(self._space, weights_epoch=""),
                shard=shard,
                block_bytes=self.block_bytes,
            ).prefix()
            for shard in shards
        ]

    def open(self) -> None:
        """Wait until the node has opened a session. Raises EngineGone, TimeoutError."""
        self.wait(lambda: self.session != 0)

    def store(self, keys: Sequence[bytes]) -> None:
        """Fill and seal a block per key, with its `contents`.

        As many as there are credits at a time, waiting for more. Raises EngineGone, TimeoutError.
        """
        left = list(keys)
        while left:
            self.wait(lambda: bool(self.credits))
            batch = left[: min(len(self.credits), wire.KEYS_PER_DATAGRAM_MAX)]
            del left[: len(batch)]
            granted, self.credits = self.credits[: len(batch)], self.credits[len(batch) :]
            for column, link in enumerate(self.ranks[:: self.replicas]):
                slots = np.array([slots[column] for slots, _ in granted], "<u4")
                generations = np.array([values[column] for _, values in granted], "<u8")
                seal = wire.Seal(
                    session=self.session,
                    keys=b"".join(batch),
                    slots=slots.tobytes(),
                    generations=generations.tobytes(),
                    checksums=self._fill(link, column, batch, slots),
                )
                _send(link, seal)

    def hint(self, keys: Sequence[bytes]) -> None:
        """Send the hint of a new request with these keys."""
        _send(self.scheduler, wire.Hint(request=next(self._lease_ids), keys=b"".join(keys)))

    def expect(
        self, transfer: str, node: str, keys: Sequence[bytes], *, deadline_ms: int = 60_000
    ) -> None:
        """Report to the node that a prefill node will push these keys."""
        message = wire.PushExpect(transfer, node, b"".join(keys), deadline_ms)
        _send(self.scheduler, message)

    def push_end(self) -> wire.PushEnd:
        """Wait for the end of the oldest push that was expected. Raises EngineGone,
        TimeoutError.
        """
        self.wait(lambda: bool(self.push_ends))
        return self.push_ends.pop(0)

    def lease(self, keys: Sequence[bytes]) -> wire.LeaseReply:
        """Ask for a lease of these keys and wait for the reply, and for blocks from disk or from
        another node.

        Raises EngineGone, TimeoutError.
        """
        return self.finish(self.ask(keys))

    def ask(self, keys: Sequence[bytes]) -> wire.LeaseReply:
        """Ask for a lease of these keys. Returns the first answer; more blocks may be on their way.

        Raises EngineGone, TimeoutError.
        """
        number = next(self._lease_ids)
        _send(self.scheduler, wire.LeaseAsk(lease=number, keys=b"".join(keys)))
        self.wait(lambda: number in self._replies)
        return self._replies[number]

    def finish(self, reply: wire.LeaseReply) -> wire.LeaseReply:
        """Wait for blocks that are on their way. Returns the whole answer. Raises EngineGone,
        TimeoutError.
        """
        self.wait(lambda: not self._replies[reply.lease].promoting)
        return self._replies.pop(reply.lease)

    def coming(self, reply: wire.LeaseReply) -> int:
        """Number of blocks of a lease that are still on their way, by the messages so far."""
        return self._replies[reply.lease].promoting

    def lease_stored(self, keys: Sequence[bytes]) -> wire.LeaseReply:
        """Lease `keys` once all of them are published: a seal and a lookup travel on two sockets.
        Raises TimeoutError.
        """
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            reply = self.lease(keys)
            if len(reply.slots) == 4 * len(keys) * self.columns:
                return reply
            self.release(reply)
            if time.monotonic() > deadline_s:
                raise TimeoutError("the node never published these keys")

    def release(self, reply: wire.LeaseReply) -> None:
        """Give a lease back."""
        self._replies.pop(reply.lease, None)
        _send(self.scheduler, wire.LeaseRelease(leases=[reply.lease]))

    def renew(self, reply: wire.LeaseReply) -> None:
        """Renew a lease for its whole life from now."""
        _send(self.scheduler, wire.LeaseRenew(leases=[reply.lease]))

    def read(self, reply: wire.LeaseReply, *, rank: int = 0) -> list[bytes]:
        """Bytes of a rank's shard of every leased block."""
        arena = self.ranks[rank].arena
        assert arena is not None
        slots = wire.slots_array(reply.slots).reshape(-1, self.columns)[:, rank // self.replicas]
        begins = slots.astype(np.int64) * PAGE_BYTES
        return [arena.array[at : at + self.block_bytes].tobytes() for at in begins]

    def contents(self, key: bytes, *, rank: int = 0) -> bytes:
        """Bytes that a rank's shard of a block should have."""
        return self._words(rank // self.replicas, key).tobytes()

    def is_right(self, reply: wire.LeaseReply, keys: Sequence[bytes]) -> bool:
        """Whether every leased block, from the first of these keys on, has the bytes of its key, in
        every rank."""
        return all(
            block == self.contents(key, rank=rank)
            for rank in range(len(self.ranks))
            for key, block in zip(keys, self.read(reply, rank=rank), strict=False)
        )

    def wait(self, done: Callable[[], bool]) -> None:
        """Serve the sockets until `done`. Raises EngineGone, TimeoutError."""
        deadline_s = time.monotonic() + self.timeout_s
        while not done():
            if self._failure:
                raise EngineGone(self._failure)
            if not self.hear(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError("the node said nothing in time")

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Receive messages, waiting up to `timeout_s` for the first. Returns whether
        there was one.
        """
        links = [link for link in (self.scheduler, *self.ranks) if not link.closed]
        ready, _, _ = select.select(links, [], [], timeout_s)
        for link in ready:
            for message in link.receive():
                self._hear(link, message)
        return bool(ready)

    def leave(self) -> None:
        """Detach in good order: the ranks report that they are quiet, and none of their slots is
        quarantined, although this process lives on. Raises TimeoutError."""
        self.hear()
        before = self._quiesced.copy()
        self.scheduler.close()
        deadline_s = time.monotonic() + self.timeout_s
        while any(not rank.closed and self._quiesced[rank] == before[rank] for rank in self.ranks):
            if not self.hear(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError("the node did not ask the ranks to be quiet")
        self.close()

    def close(self) -> None:
        """Close all sockets. Granted slots stay quarantined as long as this process lives."""
        for link in (self.scheduler, *self.ranks):
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self, link: Link, message: wire.NodeMessage | Lost) -> None:
        match message:
            case wire.Quiesce(session=session):
                column, lowest = divmod(self.ranks.index(link), self.replicas)
                assert message.columns == (ShardColumn(column, writes=lowest == 0),), message
                link.send(wire.Quiet(session=session))
                self._quiesced[link] += 1
            case wire.SessionOpen(session=session):
                self.session = session
            case wire.SessionClosed(reason=reason):
                self.session = 0
                self.credits.clear()
                self._failure = reason
            case wire.Grant():
                shape = (-1, self.columns)
                slots = wire.slots_array(message.slots).reshape(shape)
                generations = wire.generations_array(message.generations).reshape(shape)
                self.credits += zip(slots, generations, strict=True)
            case wire.LeaseReply():
                self._replies[message.lease] = message
            case wire.LeaseMore() if message.lease in self._replies:
                reply = self._replies[message.lease]
                self._replies[message.lease] = msgspec.structs.replace(
                    reply,
                    slots=reply.slots + message.slots,
                    generations=reply.generations + message.generations,
                    promoting=message.promoting,
                )
            case wire.PushEnd():
                self.push_ends.append(message)
            case wire.Refused(reason=reason) | Lost(reason=reason):
                self._failure = self._failure or reason
            case _:
                pass

    def _shard(self, rank: int) -> Shard:
        heads, column = HEAD_COUNT // self.columns, rank // self.replicas
        return Shard(0, LAYER_COUNT, column * heads, (column + 1) * heads)

    def checksum(self, column: int, key: bytes) -> bytes:
        """Checksum of the shard of a block in a column."""
        return self._checksum(column, key, self._words(column, key))

    def _checksum(self, column: int, key: bytes, words: NDArray[np.uint64]) -> bytes:
        return checksum_of(
            header(self._prefixes[column], BlockKey(key)), [words.view(np.uint8).data]
        )

    def _words(self, column: int, key: bytes) -> NDArray[np.uint64]:
        """Content of the shard of a block in a column, u64 [block_bytes / 8]."""
        repeated = np.frombuffer(key * (self.block_bytes // KEY_BYTES), np.uint64)
        return repeated ^ self._places[column]

    def _fill(
        self, link: Link, column: int, keys: Sequence[bytes], slots: NDArray[np.uint32]
    ) -> bytes:
        """Write the shards of blocks to their slots; returns their checksums."""
        assert link.arena is not None
        checksums = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            words, begin = self._words(column, key), slot * PAGE_BYTES
            link.arena.array[begin : begin + self.block_bytes] = words.view(np.uint8)
            checksums.append(self._checksum(column, key, words))
        return b"".join(checksums)


def _places(shard: Shard, block_bytes: int) -> NDArray[np.uint64]:
    """A number for each 8 bytes of a shard, by their place in the block of all ranks, whatever the
    number of ranks. u64 [shard bytes / 8].
    """
    every = np.arange(block_bytes // 8, dtype=np.uint64) * np.uint64(_ODD)
    pages = every.reshape(LAYER_COUNT, HEAD_COUNT, -1)
    layers = slice(shard.layer_begin, shard.layer_end)
    return pages[layers, shard.head_begin : shard.head_end].ravel()


def _send(link: Link, message: wire.Message) -> None:
    if not link.send(message):
        raise EngineGone("the node does not read, or is gone")

"""What the node's engine costs: block operations per second on one core, and bytes per block.

Drives `Engine.step` itself, without sockets or memory, with keys from a fixed seed:

- leases: an engine leases and gives back 512 blocks at a time;
- stores: it seals 512 at a time into an arena that is full, so each seal evicts;
- order: the eviction policy by itself, in a pool of a million slots: uses, and pops with the
  inserts that follow them;
- full: 1,000,000 blocks that dram and the file tier both know, in a fresh process each.

An operation is one of lease, release, grant or seal of one block. Goals: 100,000 per second on one
core; 300 bytes of memory per block. Prints JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench.record import summary
from kvstore.engine.engine import Engine, EngineConfig
from kvstore.engine.events import Event, Ready, Received, Send
from kvstore.engine.memory.policies import POLICIES, maker
from kvstore.tier_events import FileKnown
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, SLOT_BYTES_MIN, ConnectionId, Shard
from kvstore.wire.messages import (
    PROTOCOL_VERSION,
    Grant,
    HelloRank,
    HelloScheduler,
    LeaseAsk,
    LeaseRelease,
    LeaseReply,
    Message,
    Quiesce,
    Quiet,
    Seal,
)
from kvstore.wire.record import Scope
from kvstore.wire.space import Group, Space, fingerprint

BATCH = 512
BLOCKS = 1_000_000
OPS_PER_S_GOAL = 100_000
BYTES_PER_BLOCK_GOAL = 300
SEED = 1
WHOLE = Shard(0, 1, 0, 1)
SPACE = Space(
    model="m",
    weights="w",
    draft="",
    group="",
    dtype="float32",
    kv_dtype="float32",
    quantization="",
    attention_backend="a",
    kv_layout="LBHNC",
    isa="",
    block_tokens=128,
    hash_block_tokens=128,
    layer_count=1,
    kv_head_count=1,
    head_bytes=(SLOT_BYTES_MIN,),
    hash_algorithm="sha256_cbor",
    hash_seed="",
    kv_format="e",
)
SCHEDULER, RANK = ConnectionId(1), ConnectionId(2)


class Driven:
    """An engine with one attached rank; credits are used in the order in which they come."""

    def __init__(self, *, slots: int, blocks: int, policy: str) -> None:
        arena = slots * SLOT_BYTES_MIN
        self.engine = Engine(
            EngineConfig(
                incarnation=1,
                arena_bytes=arena,
                slab_bytes=min(64 << 20, arena // 4),
                generation_bytes=4096 + 8 * slots,
                block_count_max=blocks,
                credit_blocks_max=BATCH,
                policy=policy,
            )
        )
        self.random = np.random.default_rng(SEED)
        self.now_ns = 0
        self.step_us: list[float] = []
        self.slots: list[bytes] = []
        self.generations: list[bytes] = []
        self.step(Ready(arena))
        self.session = self._attach()

    def step(self, *events: Event) -> list[Message]:
        """One timed step; returns what was sent. Credits are kept."""
        self.now_ns += 1000
        begin = time.perf_counter()
        commands = self.engine.step(events, self.now_ns)
        self.step_us.append((time.perf_counter() - begin) * 1e6)
        sent = [command.message for command in commands if isinstance(command, Send)]
        for message in sent:
            if isinstance(message, Grant):
                self.slots.append(message.slots)
                self.generations.append(message.generations)
        return sent

    def _attach(self) -> int:
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
        self.step(Received(RANK, Quiet(asked.session)))
        return asked.session

    def seal(self) -> bytes:
        """Seal new blocks into the oldest Grant's slots; returns their keys."""
        slots, generations = self.slots.pop(0), self.generations.pop(0)
        count = len(slots) // 4
        keys = self.random.bytes(count * KEY_BYTES)
        checksums = bytes(count * CHECKSUM_BYTES)
        self.step(Received(RANK, Seal(self.session, keys, slots, generations, checksums)))
        return keys

    def lease(self, number: int, keys: bytes) -> int:
        """Lease and give back; returns how many blocks were found."""
        [reply] = self.step(Received(SCHEDULER, LeaseAsk(lease=number, keys=keys)))
        self.step(Received(SCHEDULER, LeaseRelease(leases=[number])))
        assert isinstance(reply, LeaseReply)
        return len(reply.slots) // 4

    def fill(self, blocks: int, *, file_too: bool) -> list[bytes]:
        """Store so many new blocks; the file tier knows them too. Returns their keys in batches."""
        batches, stored = [], 0
        while stored < blocks:
            keys = self.seal()
            stored += len(keys) // KEY_BYTES
            batches.append(keys)
            if file_too:
                places = np.arange(1, len(keys) // KEY_BYTES + 1, dtype="<u8").tobytes()
                space = fingerprint(SPACE, weights_epoch="")
                self.step(
                    FileKnown(
                        Scope("t", space, WHOLE, SLOT_BYTES_MIN),
                        keys,
                        places,
                        bytes(len(keys) // 2),
                    )
                )
        return batches


def leases(rounds: int, policy: str) -> dict[str, Any]:
    """Lease and release of 512 blocks in the order in which they were stored."""
    driven = Driven(slots=1 << 16, blocks=1 << 16, policy=policy)
    batches = [b for b in driven.fill(1 << 15, file_too=False) if len(b) == BATCH * KEY_BYTES]
    driven.step_us.clear()
    found = sum(driven.lease(i, batches[i % len(batches)]) for i in range(rounds))
    assert found == rounds * BATCH, f"{found} of {rounds * BATCH} blocks were found"
    return {
        "ops_per_s": round(2 * found / (sum(driven.step_us) / 1e6)),
        "ask_512_us": summary(driven.step_us[::2]),
    }


def stores(rounds: int, policy: str) -> dict[str, Any]:
    """Grant and seal of 512 blocks, each batch in place of the least recently used ones."""
    driven = Driven(slots=1 << 14, blocks=1 << 15, policy=policy)
    driven.fill(1 << 15, file_too=False)
    driven.step_us.clear()
    evicted = driven.engine.counters.evictions
    sealed = sum(len(driven.seal()) // KEY_BYTES for _ in range(rounds))
    evicted = driven.engine.counters.evictions - evicted
    assert evicted > 0.9 * sealed, f"{evicted} evictions for {sealed} stores"
    return {
        "ops_per_s": round(2 * sealed / (sum(driven.step_us) / 1e6)),
        "step_us": summary(driven.step_us),
        "blocks_per_step": sealed / rounds,
    }


def order(rounds: int, policy: str) -> dict[str, Any]:
    """Batches of 512 in a full pool of a million slots, of which one in eight has been used."""
    stamps = np.zeros(BLOCKS, dtype=np.int64)
    everywhere = np.ones(BLOCKS, dtype=bool)
    chosen = maker(policy, stamps)(members=lambda: everywhere, slot_count_max=BLOCKS)
    random = np.random.default_rng(SEED)
    stamp = 1
    times: dict[str, list[float]] = {"insert": [], "use": [], "pop": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        times[name].append((time.perf_counter() - begin) * 1e6)
        return result

    prints = random.integers(2**64, size=BLOCKS, dtype=np.uint64)
    chosen.insert(np.arange(BLOCKS), np.arange(stamp, stamp + BLOCKS), prints)
    stamp += BLOCKS
    used = random.permutation(BLOCKS)[: BLOCKS // 8]
    chosen.use(used, np.arange(stamp, stamp + len(used)))
    stamp += BLOCKS // 8
    for _ in range(rounds):
        used = random.choice(BLOCKS, size=BATCH, replace=False)
        stamps_of = np.arange(stamp, stamp + 2 * BATCH)
        stamp += 2 * BATCH
        timed("use", lambda used=used, at=stamps_of[:BATCH]: chosen.use(used, at))  # type: ignore[misc]
        words = timed("pop", lambda: chosen.pop(BATCH, lambda at: everywhere[at]))
        new = random.integers(2**64, size=len(words), dtype=np.uint64)
        timed("insert", lambda w=words, at=stamps_of[BATCH:], new=new: chosen.insert(w, at, new))  # type: ignore[misc]
    means = {f"{name}_512_us_mean": round(float(np.mean(us)), 1) for name, us in times.items()}
    return means | {f"{name}_512_us": summary(us) for name, us in times.items()}


def full(blocks: int, policy: str) -> dict[str, Any]:
    """Memory and steps of an engine that knows so many blocks, in this process."""
    # What the libraries themselves take is there before the first look.
    Driven(slots=1 << 10, blocks=1 << 10, policy=policy).fill(1 << 9, file_too=True)
    gc.collect()
    before = _rss_bytes()
    room = -(-int(blocks * 1.06) // 1024) * 1024
    driven = Driven(slots=room, blocks=room, policy=policy)
    sample: list[bytes] = []
    stored = 0
    while stored < blocks:
        [batch] = driven.fill(1, file_too=True)
        stored += len(batch) // KEY_BYTES
        if len(sample) < 64 and len(batch) == BATCH * KEY_BYTES:
            sample.append(batch)
    assert driven.engine.counters.evictions == 0
    fill_us = summary(driven.step_us)
    driven.step_us.clear()
    for i in range(500):
        driven.lease(i, sample[i % len(sample)])
    gc.collect()
    grown = _rss_bytes() - before
    assert len(driven.engine.blocks(limit=1)) == 1
    return {
        "blocks": stored,
        "bytes_per_block": round(grown / stored, 1),
        "fill_step_us": fill_us,
        "lease_step_us": summary(driven.step_us),
    }


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _in_fresh_process(blocks: int, policy: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only-full", "--blocks", str(blocks), "--policy", policy]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="What the node's engine costs; prints JSON.")
    parser.add_argument("--rounds", type=int, default=2000, help="batches of 512 per measurement")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="blocks of the full engine")
    parser.add_argument("--policy", default="lru", choices=sorted(POLICIES))
    parser.add_argument("--only-full", action="store_true", help="only the full engine, here")
    options = parser.parse_args()
    if options.only_full:
        print(json.dumps(full(options.blocks, options.policy)))
        return 0
    result: dict[str, Any] = {
        "seed": SEED,
        "batch": BATCH,
        "policy": options.policy,
        "order": order(options.rounds // 10, options.policy),
        "leases": leases(options.rounds, options.policy),
        "stores": stores(options.rounds, options.policy),
        "full": _in_fresh_process(options.blocks, options.policy),
        "goals": {"ops_per_s": OPS_PER_S_GOAL, "bytes_per_block": BYTES_PER_BLOCK_GOAL},
    }
    result["goals_met"] = {
        "ops_per_s": min(result["leases"]["ops_per_s"], result["stores"]["ops_per_s"])
        >= OPS_PER_S_GOAL,
        "bytes_per_block": result["full"]["bytes_per_block"] <= BYTES_PER_BLOCK_GOAL,
    }
    print(json.dumps(result, indent=1))
    return 0 if all(result["goals_met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

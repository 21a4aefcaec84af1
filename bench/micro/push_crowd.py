"""What crowds of pushes cost the node's loop: CPU time and calls of `Engine.step`, without sockets.

- decode: 256 requests wait for blocks of four prefill nodes, with a landing slab of 1 GiB: cost of
  each write of 8 MiB that lands (`Pushed` and `Landed`), in blocks of 128 KiB or in one of 8 MiB;
- prefill: four decode nodes wait for 64 grants each, whose blocks are not computed yet: cost of a
  tick, and of a `PushClose`;
- flood: 40 processes expect 256 transfers each, of other nodes or of this one, and the next one
  whenever one ends; or one process does so with eight engines. Another engine asks for a lease now
  and then: time from its datagram to the answer, which has the rest of the loop's round before it.

A round is the driver's: a tick, if one is due or the engine is behind, then schedulers for KIND_NS,
whoever took least in front. Calls are those of Python functions: they depend on no machine.
Writes bench/results/push_crowd.json.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.micro.engine_ops import SEED, SPACE, WHOLE
from kvstore.engine.engine import Engine, EngineConfig
from kvstore.engine.events import (
    AskPush,
    Command,
    Event,
    Land,
    Landed,
    LandingUp,
    PeerAsked,
    Ready,
    Received,
    RevokePush,
    Send,
    Tick,
)
from kvstore.node.driver import KIND_NS, TICK_NS
from kvstore.types import CHECKSUM_BYTES, KEY_BYTES, ConnectionId
from kvstore.units import GIB, KIB, MIB, NS_PER_MS, NS_PER_S
from kvstore.wire.messages import (
    PROTOCOL_VERSION,
    HelloRank,
    HelloScheduler,
    LeaseAsk,
    LeaseRelease,
    PushClose,
    PushEnd,
    PushExpect,
    PushOpen,
    Quiesce,
    Quiet,
)
from kvstore.wire.peers import Pushed, PushGrant, PushOver
from kvstore.wire.space import Group, fingerprint, shard_bytes

WRITE_BYTES: Final = 8 * MIB
DECODE_PROMPTS: Final = 256
PROMPT_BYTES: Final = 64 * MIB
PEERS: Final = 4
WRITES: Final = 200
GRANTS: Final = 64
GRANT_BLOCKS: Final = 512
TICKS: Final = 40
PROCESSES: Final = 40
EXPECTS: Final = 256
EXPECT_KEYS: Final = 32
FLOOD_S: Final = 20
ASK_EVERY_NS: Final = 7 * NS_PER_MS
LATE_MS: Final = 20.0
GOALS: Final = {"landed_ms": 1.0, "late_part": 0.05}


class Crowded:
    """An engine of one node, and the CPU time and calls of its steps."""

    def __init__(self, *, block_bytes: int, landing_bytes: int = 0, node: str = "d") -> None:
        self.space = msgspec.structs.replace(SPACE, head_bytes=(block_bytes,))
        arena_bytes = 4 * GIB + landing_bytes
        config = EngineConfig(
            incarnation=1,
            arena_bytes=arena_bytes,
            slab_bytes=64 * MIB,
            generation_bytes=4096 + 8 * (arena_bytes // (64 * KIB)),
            block_count_max=1 << 17,
            credit_blocks_max=8,
            landing_bytes=landing_bytes,
            node=node,
        )
        self.engine = Engine(config)
        self.random = np.random.default_rng(SEED)
        self.now_ns, self.cpu_ns, self.calls = NS_PER_S, 0, 0
        self.counts_calls = False
        self._connections = 0
        self.step(Ready(arena_bytes))

    def step(self, *events: Event) -> list[Command]:
        """Time passes as the step takes it."""
        sys.setprofile(self._count if self.counts_calls else None)
        begin_ns = time.thread_time_ns()
        commands = self.engine.step(events, self.now_ns)
        took_ns = time.thread_time_ns() - begin_ns
        sys.setprofile(None)
        self.cpu_ns += took_ns
        self.now_ns += took_ns
        return commands

    def _count(self, _frame: object, what: str, _argument: object) -> None:
        self.calls += what == "call"

    def cost(self, *events: Event) -> tuple[list[Command], dict[str, float]]:
        """Commands of these events, a step each, and what the steps took."""
        self.cpu_ns = self.calls = 0
        commands = [command for event in events for command in self.step(event)]
        return commands, {"ms": self.cpu_ns / 1e6, "calls": self.calls}

    def attach(self, name: str, process: int) -> ConnectionId:
        """An engine of one rank; returns its scheduler's connection."""
        whose: dict[str, Any] = {
            "protocol": PROTOCOL_VERSION,
            "engine_id": name,
            "nonce": "n",
            "tenant": "t",
        }
        scheduler, rank = (ConnectionId(self._connections + n) for n in (1, 2))
        self._connections += 2
        hello = HelloScheduler(rank_count=1, process=f"{name}-s", **whose)
        self.step(Received(scheduler, hello, process))
        groups = (Group(self.space, WHOLE, shard_bytes(self.space, WHOLE)),)
        commands = self.step(
            Received(rank, HelloRank(rank=0, process=f"{name}-r", groups=groups, **whose), process)
        )
        (asked,) = [c.message for c in commands if isinstance(c, Send)][-1:]
        assert isinstance(asked, Quiesce)
        self.step(Received(rank, Quiet(asked.session)))
        return scheduler

    def keys(self, count: int) -> bytes:
        """Keys that nobody has."""
        return self.random.bytes(count * KEY_BYTES)


# ── a decode node ────────────────────────────────────────────────────────────────────────────────


class Decode:
    """A decode node; its peers write all that they are granted, in turns."""

    def __init__(self, block_bytes: int) -> None:
        self.node = Crowded(block_bytes=block_bytes, landing_bytes=GIB)
        self._block_bytes = block_bytes
        self._scheduler = self.node.attach("decode", process=1)
        self._grants: deque[tuple[AskPush, int]] = deque()
        self._take(self.node.step(LandingUp(1)))
        for number in range(DECODE_PROMPTS):
            keys = self.node.keys(PROMPT_BYTES // block_bytes)
            expect = PushExpect(f"r{number}", f"p{number % PEERS}", keys, 600_000)
            self._take(self.node.step(Received(self._scheduler, expect)))

    def _take(self, commands: list[Command]) -> None:
        self._grants.extend((each, 0) for each in commands if isinstance(each, AskPush))

    def tick(self) -> dict[str, float]:
        """What a tick takes."""
        self.node.now_ns += TICK_NS
        commands, cost = self.node.cost(Tick())
        self._take(commands)
        return cost

    def land(self) -> dict[str, float]:
        """What the next write of a peer takes."""
        asked, first = self._grants.popleft()
        granted = asked.its
        count = min(len(granted.keys) // KEY_BYTES - first, WRITE_BYTES // self._block_bytes)
        sums = bytes(count * CHECKSUM_BYTES)
        pushed = Pushed(
            grant=granted.grant,
            epoch=1,
            first=first,
            shards=(WHOLE,),
            block_bytes=(self._block_bytes,),
            checksums=sums,
        )
        commands, cost = self.node.cost(pushed)
        (land,) = [each for each in commands if isinstance(each, Land)]
        more, its = self.node.cost(Landed(land.job, bytes([1] * count), sums))
        if first + count < len(granted.keys) // KEY_BYTES:
            self._grants.append((asked, first + count))
        self._take(commands + more)
        return {name: cost[name] + its[name] for name in cost}


def decode(block_bytes: int) -> dict[str, Any]:
    """Costs of writes that land, and of ticks between them."""
    its = Decode(block_bytes)
    landed, ticks = [], []
    for number in range(WRITES):
        its.node.counts_calls = number % 4 == 0  # which takes time
        landed.append(its.land())
        ticks.append(its.tick())
    return {"landed": _costs(landed), "tick": _costs(ticks)}


# ── a prefill node ───────────────────────────────────────────────────────────────────────────────


def prefill() -> dict[str, Any]:
    """Costs of ticks and closes while four nodes wait for 64 grants each."""
    node = Crowded(block_bytes=128 * KIB, node="p")
    scheduler = node.attach("prefill", process=1)
    for number in range(PEERS * GRANTS):
        node.step(Received(scheduler, PushOpen(f"r{number}", "")))
        node.step(
            PeerAsked(
                number // GRANTS + 1,
                f"d{number // GRANTS}",
                PushGrant(
                    grant=number + 1,
                    epoch=1,
                    transfer=f"r{number}",
                    tenant="t",
                    space=fingerprint(node.space, weights_epoch=""),
                    keys=node.keys(GRANT_BLOCKS),
                    extents=bytes(4 * GRANT_BLOCKS),
                    block_bytes=128 * KIB,
                    deadline_ms=600_000,
                ),
            )
        )
    ticks, closes = [], []
    for number in range(TICKS):
        node.counts_calls = number % 4 == 0
        node.now_ns += TICK_NS
        ticks.append(node.cost(Tick())[1])
        closes.append(node.cost(Received(scheduler, PushClose(f"r{number}", "aborted")))[1])
    return {"tick": _costs(ticks), "close": _costs(closes)}


def _costs(found: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "ms": record.summary([each["ms"] for each in found if not each["calls"]]),
        "calls": record.summary([each["calls"] for each in found if each["calls"]]),
    }


# ── a flood ──────────────────────────────────────────────────────────────────────────────────────


class Flood:
    """Engines of some processes that expect more whenever a transfer ends, and one that asks."""

    def __init__(self, *, processes: int, engines: int, is_here: bool) -> None:
        self.node = Crowded(block_bytes=128 * KIB, landing_bytes=GIB)
        self._is_here = is_here
        self._asker = self.node.attach("asker", process=1)
        self._process = {
            self.node.attach(f"e{process}/{number}", process + 2): process
            for process in range(processes)
            for number in range(engines)
        }
        self._to_expect = dict.fromkeys(self._process, EXPECTS)
        self._took = dict.fromkeys(range(processes), 0.0)
        self._events: deque[Event] = deque()
        self._number = self._lease = 0
        self._tick_ns = self._ask_ns = self.node.now_ns
        self.late_ms: list[float] = []
        self._act(LandingUp(1))

    def _act(self, *events: Event) -> None:
        for command in self.node.step(*events):
            match command:
                case Send(connection=connection, message=PushEnd()):
                    self._to_expect[connection] += 1
                case RevokePush(grant=grant):
                    self._events.append(PushOver(grant, 1, "it was taken back", is_quiet=True))

    def round(self) -> None:
        """One of the loop; it sleeps until something is there."""
        node = self.node
        expecting = [its for its, count in self._to_expect.items() if count]
        if not (expecting or self._events or node.engine.is_behind):
            node.now_ns = max(node.now_ns, min(self._ask_ns, self._tick_ns + TICK_NS))
        if node.now_ns >= self._tick_ns + TICK_NS or node.engine.is_behind:
            self._tick_ns = node.now_ns
            self._took = {process: took / 2 for process, took in self._took.items()}
            self._act(Tick())
        while self._events:
            self._act(self._events.popleft())
        until_ns = node.now_ns + KIND_NS
        while self._ask_ns <= node.now_ns and node.now_ns < until_ns:
            self._ask()
        for scheduler in sorted(expecting, key=lambda its: self._took[self._process[its]]):
            if node.now_ns >= until_ns:
                break
            begin_ns = node.now_ns
            self._expect(scheduler)
            self._took[self._process[scheduler]] += node.now_ns - begin_ns

    def _ask(self) -> None:
        self._lease += 1
        self._act(Received(self._asker, LeaseAsk(lease=self._lease, keys=self.node.keys(32))))
        self.late_ms.append((self.node.now_ns - self._ask_ns) / 1e6)
        self._act(Received(self._asker, LeaseRelease(leases=[self._lease])))
        self._ask_ns += ASK_EVERY_NS

    def _expect(self, scheduler: ConnectionId) -> None:
        self._to_expect[scheduler] -= 1
        self._number += 1
        where = "d" if self._is_here else f"p{self._number % PEERS}"
        expect = PushExpect(f"r{self._number}", where, self.node.keys(EXPECT_KEYS), 600_000)
        self._act(Received(scheduler, expect))


def flood(*, processes: int, engines: int, is_here: bool) -> dict[str, Any]:
    """Milliseconds until a lookup is answered, from when all expect what they may."""
    gc.collect()  # or a lookup waits while what the flood before left is collected: 0.1 s and more
    its = Flood(processes=processes, engines=engines, is_here=is_here)
    while its.node.now_ns < (1 + FLOOD_S) * NS_PER_S:
        its.round()
    late_ms = its.late_ms[len(its.late_ms) // 10 :]
    late = sum(each > LATE_MS for each in late_ms) / len(late_ms)
    return {"lookup_ms": record.summary(late_ms), "late_part": late}


def main() -> int:
    gc.freeze()  # as a node does
    result: dict[str, Any] = {"goals": GOALS, "prompts": DECODE_PROMPTS, "peers": PEERS}
    for name, block_bytes in (("128KiB", 128 * KIB), ("8MiB", 8 * MIB)):
        result[f"decode_{name}"] = decode(block_bytes)
        print(name, result[f"decode_{name}"], flush=True)
    result["prefill"] = prefill()
    print("prefill", result["prefill"], flush=True)
    for processes, engines in ((PROCESSES, 1), (1, 8)):
        for is_here in (False, True):
            name = f"flood_{processes}x{engines}_{'here' if is_here else 'peers'}"
            result[name] = flood(processes=processes, engines=engines, is_here=is_here)
            print(name, result[name], flush=True)
    print(f"written: {record.write('push_crowd', result, seed=SEED).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

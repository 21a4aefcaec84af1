"""One engine on one node whose disk changes its pace, in virtual time.

Real: the node's core, the scheduler's core, a rank's core. Simulated: a disk that serves one read
after the other, an engine that computes requests in turn, the copies, the clock. All blocks of
every prompt are on disk and none in dram, so each request is a decision: wait or compute.

`Story.ratio` is the time of a request over the time of computing it, and those that came before it:
what a cache may not make worse.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from kvstore.client.core.plan import LoadJob, LoadResult, RankReport
from kvstore.client.core.rank import RankCore
from kvstore.client.core.scheduler import SchedulerCore
from kvstore.engine.engine import Engine, EngineConfig
from kvstore.engine.events import Admit, Command, Event, Ready, Received, Send, Tick
from kvstore.tier_events import FileKnown, FileLate, FileRead, FileWritten, ReadFile, WriteFile
from kvstore.types import SLOT_BYTES_MIN, ConnectionId, Shard
from kvstore.units import MIB, NS_PER_MS
from kvstore.wire.load import Learned
from kvstore.wire.messages import Message
from kvstore.wire.record import Scope
from kvstore.wire.space import Group, Space, fingerprint
from tests.kit.cores import core_config
from tests.kit.hello import rank_hello
from tests.sim.world.parts import sim_space

TENANT, TOKENS = "t", 128
SHARD = Shard(0, 1, 0, 1)
POLL_NS_MIN = NS_PER_MS // 2
POLL_BLOCKS = 0.04
"""How often an engine that has nothing else to do asks again: while it would compute so much."""
HOP_NS = NS_PER_MS // 20
READ_DEADLINE_NS = 2000 * NS_PER_MS
STEP_TOKENS_MAX = 2048
ARENA_SLABS = 1024
SCHEDULER, RANK = ConnectionId(1), ConnectionId(2)


class Setting(msgspec.Struct, frozen=True):
    """What does not change in one run."""

    compute_ns: int
    """Of a token."""
    load_ns: int
    """Of a token copied from dram."""
    block_bytes: int
    disk_ns_per_byte: float
    """At its best."""
    seek_ns: int
    learned: Learned = Learned()


def _space(block_bytes: int) -> Space:
    return msgspec.structs.replace(
        sim_space("m"),
        block_tokens=TOKENS,
        hash_block_tokens=TOKENS,
        layer_count=1,
        kv_head_count=1,
        head_bytes=(block_bytes,),
    )


class Story(msgspec.Struct, frozen=True):
    """One request."""

    factor: float
    """How much slower than at its best the disk was when it came."""
    blocks: int
    loaded_blocks: int
    took_ns: int
    computing_ns: int

    @property
    def ratio(self) -> float:
        return self.took_ns / self.computing_ns


class _Request(msgspec.Struct):
    name: str
    blocks: int
    left: int
    """Tokens that are to be computed."""
    loaded: int = 0
    ended_ns: int = 0
    """When its prefill was done."""


class Disk:
    """Serves reads in order. `factor` may change at any time; what waits is served at the new."""

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        self._setting = setting
        self._rng = rng
        self.factor = 1.0
        self._queue: deque[tuple[int, ReadFile]] = deque()
        self._free_ns = 0
        self._running: tuple[int, ReadFile] | None = None
        self._begun: dict[int, int] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._queue or self._begun or self._running)

    def ask(self, read: ReadFile, now_ns: int) -> None:
        self._queue.append((now_ns, read))
        self._begun[read.job] = now_ns

    def events(self, now_ns: int) -> list[Event]:
        """What ended or became late until now."""
        events: list[Event] = []
        while True:
            if self._running is not None and self._running[0] <= now_ns:
                self._free_ns, read = self._running
                self._running = None
                self._begun.pop(read.job, None)
                events.append(FileRead(read.job, b"\1" * (len(read.keys) // 32)))
            if self._running is not None or not self._queue:
                break
            asked_ns, read = self._queue.popleft()
            size = len(read.keys) // 32 * self._setting.block_bytes
            jitter = self._rng.uniform(0.9, 1.1)
            service = self._setting.seek_ns + size * self._setting.disk_ns_per_byte
            end_ns = max(self._free_ns, asked_ns) + int(service * self.factor * jitter)
            self._running = (end_ns, read)
        for job, begin_ns in list(self._begun.items()):
            if now_ns - begin_ns >= READ_DEADLINE_NS:
                del self._begun[job]
                events.append(FileLate(job))
        return events


class SlowDiskWorld:
    """See the module. `run` and `run_together` are the only things to call but `disk.factor`."""

    def __init__(self, setting: Setting, *, seed: int) -> None:
        self.setting = setting
        self.random = random.Random(seed)
        self.now_ns = 10**12
        self.disk = Disk(setting, self.random)
        space = _space(setting.block_bytes)
        self._scope = Scope(
            TENANT, fingerprint(space, weights_epoch=""), SHARD, setting.block_bytes
        )
        slab = max(4 * MIB, setting.block_bytes)
        self.node = Engine(
            EngineConfig(
                incarnation=1,
                arena_bytes=ARENA_SLABS * slab,
                slab_bytes=slab,
                generation_bytes=ARENA_SLABS * slab // SLOT_BYTES_MIN * 8,
                block_count_max=1 << 20,
                file_bytes=1 << 40,
                learned=setting.learned,
            )
        )
        self.core = SchedulerCore(
            core_config(
                engine_id="e",
                nonce="n",
                process="s",
                tenant=TENANT,
                rank_count=1,
                block_tokens=TOKENS,
                verify_every=0,
            )
        )
        self.rank = RankCore(rank_hello(Group(space, SHARD, setting.block_bytes)))
        self._poll_ns = max(POLL_NS_MIN, int(POLL_BLOCKS * TOKENS * setting.compute_ns))
        self._inbox: list[Message] = []
        self._requests = 0
        self._feed([Ready(ARENA_SLABS * slab)])
        self.core.attachment.dial.connected(self.now_ns)
        self._feed([Received(SCHEDULER, self.core.attachment.hello())])
        self._feed([Received(RANK, self.rank.hello())])
        self._exchange()
        assert self.core.attachment.is_open

    # ── the node ─────────────────────────────────────────────────────────────────────────────────

    def _feed(self, events: Sequence[Event]) -> None:
        for command in self.node.step(events, self.now_ns) if events else ():
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Send(connection=connection, message=message):
                self._to_engine(connection, message)
            case Admit(connection=connection, welcome=welcome):
                self._to_engine(connection, welcome)
            case ReadFile():
                self.disk.ask(command, self.now_ns)
            case WriteFile():
                count = len(command.keys) // 32
                self._feed([FileWritten(command.job, bytes(8 * count))])
            case _:
                pass

    def _to_engine(self, connection: int, message: Message) -> None:
        if connection == SCHEDULER:
            self._inbox.append(message)
        elif type(message).__name__ == "Welcome":
            self.rank.connected(message)  # type: ignore[arg-type]
        else:
            self.rank.received(message)  # type: ignore[arg-type]

    def _exchange(self) -> None:
        """A moment passes: the disk, the node and the engine hear each other."""
        self.now_ns += HOP_NS
        self._feed([Tick(), *self.disk.events(self.now_ns)])
        for _ in range(3):
            self._feed([Received(SCHEDULER, m) for m in self.core.take_outbox()])  # type: ignore[arg-type]
            self._feed([Received(RANK, m) for m in self.rank.take_outbox()])  # type: ignore[arg-type]
            inbox, self._inbox = self._inbox, []
            for message in inbox:
                self.core.received(message, self.now_ns)

    def pause(self, ms: int) -> None:
        """Time passes with nobody asking."""
        self._pass_until(self.now_ns + ms * NS_PER_MS)

    def _pass_until(self, end_ns: int) -> None:
        while self.now_ns < end_ns:
            moment_ns = end_ns if self.disk.is_idle else self.now_ns + 5 * NS_PER_MS
            self.now_ns = min(end_ns, moment_ns)
            self._exchange()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def run(self, blocks: int) -> Story:
        """A request for a prompt that is on disk and nowhere else, until its prefill is done."""
        (story,) = self.run_together([blocks])
        return story

    def run_together(self, sizes: Sequence[int]) -> list[Story]:
        """Requests that come at once, as many as `sizes`, until all their prefills are done. Blocks
        of each prompt are on disk and nowhere else. Without a cache they are computed in turn."""
        begin_ns, factor = self.now_ns, self.disk.factor
        requests = [self._arrive(blocks) for blocks in sizes]
        self._exchange()
        waiting, computing = list(requests), list[_Request]()
        while waiting or computing:
            self._step(waiting, computing)
            for request in [its for its in computing if not its.left]:
                request.ended_ns = self.now_ns
                computing.remove(request)
                self.core.finished(request.name)
        self._exchange()
        computed_ns = self._computing_ns([request.blocks * TOKENS + 1 for request in requests])
        return [
            Story(
                *(factor, request.blocks, request.loaded // TOKENS),
                *(request.ended_ns - begin_ns, computing_ns),
            )
            for request, computing_ns in zip(requests, computed_ns, strict=True)
        ]

    def _computing_ns(self, prompts: Sequence[int]) -> list[int]:
        """When each of these prompts would be done by computing them all, in steps as they are."""
        ended, computed = [], 0
        for tokens in itertools.accumulate(prompts):
            if tokens > computed:  # its last step has as many of the next prompts as it takes
                steps = -(-(tokens - computed) // STEP_TOKENS_MAX)
                computed = min(computed + steps * STEP_TOKENS_MAX, sum(prompts))
            ended.append(computed * self.setting.compute_ns)
        return ended

    def _arrive(self, blocks: int) -> _Request:
        self._requests += 1
        name = f"r{self._requests}"
        keys = [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(blocks)]
        places = np.arange(1, blocks + 1, dtype="<u8") + (self._requests << 20)
        known = FileKnown(self._scope, b"".join(keys), places.tobytes(), bytes(16 * blocks))
        self._feed([known])
        tokens = blocks * TOKENS + 1
        self.core.new_request(name, keys, prompt_tokens=tokens, now_ns=self.now_ns)
        return _Request(name, blocks, left=tokens)

    def _admit(self, request: _Request, tokens: int) -> None:
        tables = (range(request.blocks + 1),)
        self.core.allocated(request.name, tables=tables, external_tokens=tokens, now_ns=self.now_ns)
        request.loaded, request.left = tokens, request.left - tokens

    def _step(self, waiting: list[_Request], computing: list[_Request]) -> None:
        """One step of the engine, as vLLM plans it: as many tokens as it takes of those that it
        computes already, then of those that wait, in turn; a load takes no token of this step."""
        room = STEP_TOKENS_MAX
        for request in computing:
            room -= self._schedule(request, room)
        for request in list(waiting):
            if not room:
                break
            outcome = self.core.match(request.name, local_tokens=0, now_ns=self.now_ns)
            if outcome is None:
                continue
            waiting.remove(request)
            self._admit(request, outcome if isinstance(outcome, int) else 0)
            computing.append(request)
            if not request.loaded:
                room -= self._schedule(request, room)
        tokens = STEP_TOKENS_MAX - room
        plan = self.core.plan((), self.now_ns, computed_tokens=tokens)
        for job in plan.loads:
            self._load(job)
        end_ns = self.now_ns + tokens * self.setting.compute_ns
        self._pass_until(end_ns - 6 * NS_PER_MS)
        self.now_ns = max(self.now_ns, end_ns)
        if tokens:
            self.core.reported(RankReport(rank=0, step=plan.step), self.now_ns)
        else:
            self._exchange()
            self.now_ns += self._poll_ns

    def _schedule(self, request: _Request, room: int) -> int:
        """Returns the tokens that this step computes of the request."""
        scheduled = min(room, request.left)
        request.left -= scheduled
        entry = self.core.requests[request.name]
        self.core.lookups.queue(entry, request.left)
        return scheduled

    def _load(self, job: LoadJob) -> None:
        duration_ns = len(job.block_ids) * TOKENS * self.setting.load_ns
        self.now_ns += duration_ns
        result = LoadResult(job.request, job.lease, len(job.block_ids), (), 0, duration_ns)
        report = RankReport(rank=0, loads=(result,))
        self.core.reported(report, self.now_ns)

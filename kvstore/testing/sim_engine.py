"""An inference engine without a model: the real connector cores driven in vLLM's order of calls.

Real: `SchedulerCore`, `RankCore`. Simulated: the engine's block pool and scheduler, the copying
thread (two events a copy, so that everything can happen in between), the sockets. The bytes of a
block are a word derived from its key, so every block can be checked at every step (the oracle).
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.plan import StepPlan
from kvstore.client.core.rank import Copied, LoadBlock, Mismatch, RankConfig, RankCore, Void
from kvstore.client.core.scheduler import PENDING, Hit, SchedulerCore
from kvstore.testing.sim_parts import TORN, SimMemory
from kvstore.types import PAGE_BYTES, Shard
from kvstore.wire.layout import slot_bytes
from kvstore.wire.messages import Message, Welcome
from kvstore.wire.space import Space

if TYPE_CHECKING:
    from kvstore.testing.world import World

BLOCK_TOKENS = 16


class Violation(AssertionError):
    """A promise was broken; the text is the story."""


def content(space: str, key: bytes) -> bytes:
    """What the bytes of a block must be."""
    return space.encode() + b"/" + key


def checksum(header: bytes, data: bytes) -> bytes:
    """Any 16 bytes that change with header and data will do here."""
    return hashlib.blake2b(header + data, digest_size=16).digest()


class SimRequest:
    """One request: `keys` for its full blocks, as far as its tokens are known."""

    def __init__(self, name: str, keys: list[bytes], *, tokens: int, decode_tokens: int) -> None:
        self.name = name
        self.all_keys = keys
        self.prompt_tokens = tokens
        self.tokens = tokens
        self.tokens_end = tokens + decode_tokens
        self.computed = 0
        self.table: list[int] = []
        self.loading = False
        self.load_done = False
        self.aborted = False
        self.waiting_since_ns = 0
        """Since it was added, preempted or failed to load: no lease of it is older."""

    @property
    def keys(self) -> list[bytes]:
        return self.all_keys[: self.tokens // BLOCK_TOKENS]


class SimEngine:
    """One engine with one rank. `World` calls its public methods as events."""

    def __init__(self, world: World, name: str, *, space: Space, blocks: int) -> None:
        self.world = world
        self.name = name
        self.space = space
        self.random = world.random
        shard = Shard(0, space.layer_count, 0, space.kv_head_count)
        block_bytes = (
            space.layer_count * space.kv_head_count * space.block_tokens * space.token_bytes
        )
        self.core = SchedulerCore(
            SchedulerConfig(
                engine_id=name,
                nonce="1",
                process=f"{name}-scheduler",
                tenant="t",
                rank_count=1,
                block_tokens=BLOCK_TOKENS,
                min_load_tokens=world.random.choice((0, BLOCK_TOKENS, 2 * BLOCK_TOKENS)),
                # A flipped byte in dram shows only to a load that verifies.
                verify_every=1
                if "byte flipped" in world.enabled
                else world.random.choice((0, 1, 3)),
            )
        )
        self.rank = RankCore(
            RankConfig(
                engine_id=name,
                nonce="1",
                tenant="t",
                rank=0,
                process=f"{name}-rank",
                space=space,
                shard=shard,
                block_bytes=block_bytes,
            )
        )
        self.slot_pages = slot_bytes(block_bytes) // PAGE_BYTES
        self.pool: list[bytes | None] = [None] * blocks
        self.free = deque(range(blocks))
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []
        self.memory: SimMemory | None = None
        self.scheduler_socket = 0
        self.rank_socket = 0
        self.copying: tuple[object, bytes | None] | None = None
        self.ticket = 0
        self.stalled_until_ns = 0
        self.disturbed_ns = 0
        """When it last lost a socket."""
        self.finished_count = 0
        self.loaded_blocks = 0
        self.restored_blocks = 0

    # ── sockets ──────────────────────────────────────────────────────────────────────────────────

    def poll_scheduler(self) -> None:
        """As `connector.scheduler_side.poll`."""
        world, core = self.world, self.core
        if not self.scheduler_socket and core.attachment.wants_connection(world.now_ns):
            self.scheduler_socket = world.connect(core.attachment.hello())
            if self.scheduler_socket:
                core.attachment.connected(world.now_ns)
            else:
                core.attachment.connect_failed(world.now_ns, "absent")
        if self.scheduler_socket:
            for message in world.take_inbox(self.scheduler_socket):
                if message is None or core.received(message, world.now_ns) is not None:
                    self.drop_scheduler("ended")
                    break
        if self.scheduler_socket and core.attachment.heartbeat_lost(
            world.now_ns, world.heartbeat_ns
        ):
            self.drop_scheduler("heartbeat")
        for message in core.take_outbox():
            if self.scheduler_socket:
                world.send(self.scheduler_socket, message)

    def drop_scheduler(self, reason: str) -> None:
        self.world.hang_up(self.scheduler_socket)
        self.scheduler_socket = 0
        self.disturbed_ns = self.world.now_ns
        self.core.attachment.disconnected(self.world.now_ns, reason)

    def poll_rank(self) -> None:
        """As the copy thread between two copies, which is the only time it looks at its socket."""
        world, rank = self.world, self.rank
        if self.copying is not None:
            return
        if self.rank_socket:
            for message in world.take_inbox(self.rank_socket):
                if message is None:
                    self.drop_rank()
                    break
                self._rank_message(message)
        else:
            self.rank_socket = world.connect(rank.hello())
        for message in rank.take_outbox():
            if self.rank_socket:
                world.send(self.rank_socket, message)

    def _rank_message(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self.rank.connected(message)
            self.memory = self.world.memory_of(self.rank_socket)
        else:
            self.rank.received(message)  # type: ignore[arg-type]

    def drop_rank(self) -> None:
        self.world.hang_up(self.rank_socket)
        self.rank_socket = 0
        self.disturbed_ns = self.world.now_ns
        self.rank.disconnected()

    # ── the copying thread ───────────────────────────────────────────────────────────────────────

    def copy_step(self, *, waited_for: bool = False) -> bool:
        """Begin the next copy, or end the one that runs. False: nothing to do."""
        if self.copying is not None:
            if waited_for or self.world.now_ns >= self.stalled_until_ns:
                self._end_copy()
            return True
        copy = self.rank.next_copy()
        if copy is None:
            return False
        memory = self.memory
        assert memory is not None
        valid = memory.tier.generation(copy.slot) == copy.generation
        if not valid:
            self.rank.finished(copy, Void())
            return True
        source = (
            memory.contents.get(copy.slot)
            if isinstance(copy, LoadBlock)
            else self.pool[copy.block_id]
        )
        self.copying = (copy, source)
        if isinstance(copy, LoadBlock):
            self.pool[copy.block_id] = TORN
        else:
            self.ticket = memory.begin_write(copy.slot, self.slot_pages)
        return True

    def _end_copy(self) -> None:
        assert self.copying is not None
        copy, begun_with = self.copying
        memory = self.memory
        assert memory is not None
        self.copying = None
        if isinstance(copy, LoadBlock):
            now = memory.contents.get(copy.slot)
            data = now if now == begun_with and now is not None else TORN
            self.pool[copy.block_id] = data
            if memory.tier.generation(copy.slot) != copy.generation:
                self.rank.finished(copy, Void())
            elif copy.checksum is not None and checksum(copy.header, data) != copy.checksum:
                self.rank.finished(copy, Mismatch())
            else:
                self.rank.finished(copy, Copied())
            return
        now = self.pool[copy.block_id]  # type: ignore[attr-defined]
        data = now if now == begun_with and now is not None else TORN
        if not memory.end_write(copy.slot, data, self.ticket):  # type: ignore[attr-defined]
            raise Violation(f"{self.name}: another wrote to a slot of its while it wrote")
        self.rank.finished(copy, Copied(checksum(copy.header, data)))  # type: ignore[arg-type, attr-defined]

    # ── the engine ───────────────────────────────────────────────────────────────────────────────

    def add(self, request: SimRequest) -> None:
        self.poll_scheduler()
        request.waiting_since_ns = self.world.now_ns
        self.core.new_request(
            request.name,
            request.keys,
            prompt_tokens=request.prompt_tokens,
            now_ns=self.world.now_ns,
        )
        self.waiting.append(request)
        self.poll_scheduler()

    def abort(self, request: SimRequest) -> None:
        """The client went away."""
        self.core.finished(request.name)
        request.aborted = True
        if request in self.running:
            self.running.remove(request)
            self._free(request)
        elif not request.loading or request.load_done:
            self.waiting.remove(request)
            self._free(request)

    def preempt(self, request: SimRequest) -> None:
        """Blocks are gone at once; the request starts again."""
        self.running.remove(request)
        self._free(request)
        request.computed = 0
        request.waiting_since_ns = self.world.now_ns
        self.waiting.appendleft(request)

    def _free(self, request: SimRequest) -> None:
        self.free.extend(reversed(request.table))
        request.table = []

    def step(self) -> None:
        """One step in vLLM's order: schedule, plan, fence, forward, loads, stores, report."""
        self.poll_scheduler()
        new_blocks: list[int] = []
        scheduled: list[tuple[SimRequest, int]] = []
        self._schedule_running(new_blocks, scheduled)
        self._schedule_waiting(new_blocks, scheduled)
        for request, count in scheduled:
            full = self.core.full_blocks(
                request.name,
                computed_tokens=request.computed + count,
                known_tokens=request.tokens,
            )
            if full:
                self.core.fill(
                    request.name, request.keys, block_ids=request.table, full_blocks=full
                )
        self._check_loading_is_not_stored()
        plan = self.core.plan(new_blocks, self.world.now_ns)
        self.poll_scheduler()
        self._execute(plan, scheduled)

    def _check_loading_is_not_stored(self) -> None:
        """Nobody stores blocks that a load still writes, whatever the engine claims of them."""
        for request in self.waiting:
            if request.loading and not request.load_done and not request.aborted:
                tokens = request.tokens
                if self.core.full_blocks(request.name, computed_tokens=tokens, known_tokens=tokens):
                    raise Violation(f"{self.name}: {request.name} is stored while it loads")

    def _schedule_running(
        self, new_blocks: list[int], scheduled: list[tuple[SimRequest, int]]
    ) -> None:
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(request.tokens - request.computed, 3 * BLOCK_TOKENS)
            if not self._grow(request, request.computed + count, new_blocks):
                self.preempt(self.running[-1])
                continue
            scheduled.append((request, count))
        scheduled[:] = [(r, n) for r, n in scheduled if r in self.running]

    def _schedule_waiting(
        self, new_blocks: list[int], scheduled: list[tuple[SimRequest, int]]
    ) -> None:
        # Those that hold blocks come first, or a full pool could wait for itself.
        for request in sorted(self.waiting, key=lambda r: not r.table):
            if request.loading:
                if request.aborted or not request.load_done:
                    continue
                request.loading = request.load_done = False
            elif request.computed == 0:
                outcome = self.core.match(
                    request.name, request.keys, local_tokens=0, now_ns=self.world.now_ns
                )
                if outcome is PENDING:
                    continue
                external = outcome.tokens if isinstance(outcome, Hit) else 0
                if not self._fits(request) or not self._grow(request, external, new_blocks):
                    break
                self._allocated(request, external)
                if external:
                    request.computed = external
                    request.loading = True
                    continue
            if request.computed >= request.tokens:
                request.computed = request.tokens - 1  # the last token is always computed
            count = min(request.tokens - request.computed, 4 * BLOCK_TOKENS)
            if not self._fits(request):
                break
            self._grow(request, request.computed + count, new_blocks)
            self._allocated(request, 0)
            self.waiting.remove(request)
            self.running.append(request)
            scheduled.append((request, count))

    def _allocated(self, request: SimRequest, external: int) -> None:
        self.core.allocated(
            request.name,
            request.keys,
            block_ids=request.table,
            external_tokens=external,
            now_ns=self.world.now_ns,
        )

    def _fits(self, request: SimRequest) -> bool:
        """As vLLM admits: the whole request beside what the prompts under way still need."""
        under_way = [*self.running, *(r for r in self.waiting if r.table and r is not request)]
        reserved = sum(max(0, _blocks(r.tokens) - len(r.table)) for r in under_way)
        return _blocks(request.tokens) - len(request.table) <= len(self.free) - reserved

    def _grow(self, request: SimRequest, tokens: int, new_blocks: list[int]) -> bool:
        wanted = _blocks(tokens) - len(request.table)
        if wanted > len(self.free):
            return False
        for _ in range(wanted):
            block = self.free.popleft()
            new_blocks.append(block)
            request.table.append(block)
        return True

    def _execute(self, plan: StepPlan, scheduled: Sequence[tuple[SimRequest, int]]) -> None:
        while self.rank.fence(plan.fence_blocks):
            if not self.copy_step(waited_for=True):
                raise Violation(f"{self.name}: the fence waits for nothing")
        for request, count in scheduled:
            self._forward(request, count)
        self.rank.submit(plan)
        # The copying thread may have run before the engine looks for what has ended.
        for _ in range(self.random.randrange(4)):
            self.copy_step()
        report = self.rank.take_report()
        by_name = {request.name: request for request in self.waiting}
        self.core.reported(report, self.world.now_ns)
        for result in report.loads:
            loading = by_name.get(result.request)
            if loading is None or not loading.loading or loading.load_done:
                raise Violation(f"{self.name}: a load of {result.request} ended twice or unasked")
            self._load_ended(loading, result.failed_block_ids, result.loaded_blocks)

    def _load_ended(self, request: SimRequest, failed: tuple[int, ...], loaded_blocks: int) -> None:
        if request.aborted:
            self._free(request)
            self.waiting.remove(request)
            return
        good = request.table.index(failed[0]) if failed else loaded_blocks
        for i in range(good):
            self._check_block(request, i, "loaded")
        self.loaded_blocks += good
        request.load_done = True
        if failed:
            if self.world.is_calm(self, since_ns=request.waiting_since_ns):
                raise Violation(f"{self.name}: {request.name} lost what its lease promised")
            request.waiting_since_ns = self.world.now_ns
            request.computed = good * BLOCK_TOKENS
            if not good:
                request.loading = request.load_done = False
                self._free(request)

    def _forward(self, request: SimRequest, count: int) -> None:
        done = request.computed // BLOCK_TOKENS
        for i in range(done):
            self._check_block(request, i, "read by attention")
        request.computed += count
        known = len(request.keys)
        for i in range(done, -(-request.computed // BLOCK_TOKENS)):
            full = i < known and (i + 1) * BLOCK_TOKENS <= request.computed
            word = content(self.space.model, request.keys[i]) if full else b"partial" + bytes([i])
            self.pool[request.table[i]] = word
        if request.computed == request.tokens:
            if request.tokens == request.tokens_end:
                self.running.remove(request)
                self.core.finished(request.name)
                self._free(request)
                self.finished_count += 1
            else:
                request.tokens += 1

    def _check_block(self, request: SimRequest, index: int, when: str) -> None:
        expected = content(self.space.model, request.all_keys[index])
        found = self.pool[request.table[index]]
        if found != expected:
            raise Violation(
                f"{self.name}: {request.name} block {index} (engine block "
                f"{request.table[index]}) {when}: {found!r:.60} instead of {expected!r:.60}"
            )

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.rank.has_work or self.copying)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def new_random_request(
    source: random.Random, chains: Sequence[list[bytes]], number: int, blocks: int
) -> SimRequest:
    """A prompt over one of the known chains: most share prefixes, lengths are around edges."""
    keys = source.choice(chains)
    longest = min(len(keys), blocks - 2) * BLOCK_TOKENS
    tokens = max(1, source.randrange(1, longest) + source.choice((-1, 0, 0, 1)))
    decode = min(source.choice((0, 0, 1, BLOCK_TOKENS, 40)), len(keys) * BLOCK_TOKENS - tokens)
    decode = max(0, min(decode, (blocks - 2) * BLOCK_TOKENS - tokens))
    return SimRequest(f"r{number}", keys, tokens=tokens, decode_tokens=decode)

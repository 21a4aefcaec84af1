"""An inference engine without a model: the real connector cores driven in vLLM's order of calls.

Real: `SchedulerCore`. Simulated: the engine's block pool and scheduler, its sockets. Ranks are
`rank`'s; all of them are given the same plans and report every step, as vLLM's do.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.plan import StepPlan
from kvstore.client.core.scheduler import PENDING, Hit, SchedulerCore
from kvstore.types import Shard
from kvstore.wire.space import Space
from tests.sim.world.copies import Violation
from tests.sim.world.machine import Machine
from tests.sim.world.parts import CORRUPTIONS, Knobs
from tests.sim.world.rank import SimRank

BLOCK_TOKENS = 16
_RESTART_SHARE: Final = 0.03
"""Of the steps."""
_ATTACH_TURNS: Final = 30


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
        self.loads_ended = 0
        """Ranks that reported the end of its load."""
        self.good_blocks = 0
        """The least that any of those ranks loaded."""
        self.load_failed = False
        self.waiting_since_ns = 0
        """Since it was added, preempted or failed to load: no lease of it is older."""

    @property
    def keys(self) -> list[bytes]:
        return self.all_keys[: self.tokens // BLOCK_TOKENS]


class SimEngineClock:
    """Time as one engine sees it: of a namespace of its own, perhaps, and not at the same pace."""

    def __init__(self, machine: Machine) -> None:
        world = machine.world
        self._machine = machine
        self._shift_ns = world.random.choice((0, 10**13, -(5 * 10**11)))
        self._drift_ppm = 0
        self._born_ns = machine.now_ns
        if "clock drifts" in world.enabled:
            world.strike("clock drifts", machine)
            self._drift_ppm = world.random.choice((-50_000, -200, 200, 50_000))

    @property
    def now_ns(self) -> int:
        machine_ns = self._machine.now_ns
        drift_ns = (machine_ns - self._born_ns) * self._drift_ppm // 1_000_000
        return machine_ns + self._shift_ns + drift_ns


class SimEngine:
    """One engine of `shards` ranks. `World` calls its public methods as events."""

    def __init__(
        self,
        machine: Machine,
        name: str,
        *,
        space: Space,
        blocks: int,
        shards: Sequence[Shard] | None = None,
        tenant: str = "t",
        knobs: Knobs | None = None,
    ) -> None:
        self.machine = machine
        self.world = world = machine.world
        self.tenant = tenant
        self.name = name
        self.space = space
        self.random = world.random
        self.shards = shards or (Shard(0, space.layer_count, 0, space.kv_head_count),)
        knobs = knobs or world.knobs
        # What changes in dram shows only to a load that verifies.
        verify = (1, 1, 3) if world.enabled.intersection(CORRUPTIONS) else (0, 0, 3)
        verify_every = world.random.choice(verify)
        self.verifies_all = verify_every == 1
        self._clock = SimEngineClock(machine)
        self.core = SchedulerCore(
            SchedulerConfig(
                engine_id=name,
                nonce="1",
                process=f"{name}-scheduler",
                tenant=tenant,
                rank_count=len(self.shards),
                block_tokens=BLOCK_TOKENS,
                lookup_deadline_ms=knobs.lookup_deadline_ms,
                promotion_deadline_ms=knobs.promotion_deadline_ms,
                prefill_ns_per_token=knobs.prefill_ns_per_token,
                breaker_cooldown_ms=knobs.cooldown_ms,
                min_load_tokens=world.random.choice((0, BLOCK_TOKENS, 2 * BLOCK_TOKENS)),
                verify_every=verify_every,
                shadow_every=knobs.shadow_every,
            )
        )
        self.ranks = [
            SimRank(self, rank=rank, space=space, shard=shard, blocks=blocks)
            for rank, shard in enumerate(self.shards)
        ]
        self.dead_rank: SimRank | None = None
        """Its process was killed: the engine steps no more, and ends soon."""
        self.blocks = blocks
        self._stopped_until_ns = 0
        self.free = deque(range(blocks))
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []
        self.scheduler_socket = 0
        self._disturbed_ns = 0
        self.finished_count = 0
        self.loaded_blocks = 0

    @property
    def weights(self) -> str:
        """The epoch of its weights: what it computes depends on it."""
        return self.core.attachment.weights_epoch

    @property
    def now_ns(self) -> int:
        """As its processes see it."""
        return self._clock.now_ns

    @property
    def runs(self) -> bool:
        return self.machine.runs and self.world.now_ns >= self._stopped_until_ns

    def stop(self, duration_ns: int) -> None:
        """All its processes stand still, in the middle of whatever they do."""
        self._disturbed_ns = self.world.now_ns
        self._stopped_until_ns = self.world.now_ns + duration_ns

    def go_on(self) -> None:
        """It is stopped no more."""
        self._stopped_until_ns = 0

    @property
    def hangs(self) -> bool:
        """A copy of it never ends: only its own end helps."""
        return any(rank.copies.hangs for rank in self.ranks)

    @property
    def disturbed_ns(self) -> int:
        """When it last lost a socket."""
        return max(self._disturbed_ns, *(rank.disturbed_ns for rank in self.ranks))

    # ── sockets ──────────────────────────────────────────────────────────────────────────────────

    def poll_scheduler(self) -> None:
        """As `connector.scheduler_side.poll`."""
        machine, core, now_ns = self.machine, self.core, self.now_ns
        if not self.scheduler_socket and core.attachment.wants_connection(now_ns):
            self.scheduler_socket = machine.connect(core.attachment.hello())
            if self.scheduler_socket:
                core.attachment.connected(now_ns)
            else:
                core.attachment.connect_failed(now_ns, "absent")
        if self.scheduler_socket:
            for message in machine.take_inbox(self.scheduler_socket):
                if message is None or core.received(message, now_ns) is not None:
                    self.drop_scheduler("ended")
                    break
        if self.scheduler_socket and core.attachment.objection(now_ns, machine.heartbeat_ns):
            self.drop_scheduler("heartbeat")
        for message in core.take_outbox():
            if self.scheduler_socket:
                machine.sockets.send(self.scheduler_socket, message)

    def drop_scheduler(self, reason: str) -> None:
        self.machine.sockets.hang_up(self.scheduler_socket)
        self.scheduler_socket = 0
        self._disturbed_ns = self.world.now_ns
        self.core.attachment.disconnected(self.now_ns, reason)

    def poll_ranks(self) -> None:
        """The copying threads of some ranks look at their sockets; with one rank, of that one."""
        for rank in self.ranks:
            if rank is not self.dead_rank and (len(self.ranks) == 1 or self.random.random() < 0.7):
                rank.poll()

    def copy_step(self) -> bool:
        """Each rank's copying thread goes on, or does not. False: no rank had anything to do."""
        busy = False
        for rank in self.ranks:
            if rank is not self.dead_rank and (len(self.ranks) == 1 or self.random.random() < 0.7):
                busy = rank.copies.step() or busy
        return busy

    # ── the engine ───────────────────────────────────────────────────────────────────────────────

    def add(self, request: SimRequest) -> None:
        self.poll_scheduler()
        request.waiting_since_ns = self.world.now_ns
        self.core.new_request(
            request.name,
            request.keys,
            prompt_tokens=request.prompt_tokens,
            now_ns=self.now_ns,
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

    def reset(self) -> None:
        """Other weights: whatever was computed with the old ones is let go first."""
        for request in list(self.running):
            self.preempt(request)
        for request in [r for r in self.waiting if r.table and not r.aborted]:
            self.abort(request)
        self.core.new_weights(f"w{self.random.randrange(10**9)}", self.now_ns, emptied=True)
        self.drop_scheduler("reset")

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
        plan = self.core.plan(new_blocks, self.now_ns)
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
                    request.name, request.keys, local_tokens=0, now_ns=self.now_ns
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
            now_ns=self.now_ns,
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
        for rank in self.ranks:
            while rank.core.fence(plan.fence_blocks):
                if rank.copies.running is None and not rank.core.has_work:
                    raise Violation(f"{rank.name}: the fence waits for nothing")
                if not rank.copies.end_within_fence():
                    rank.core.give_up(plan.fence_blocks)
                    break
        for request, count in scheduled:
            self._forward(request, count)
        self._fall_behind()
        for rank in self.ranks:
            rank.core.submit(plan)
        # The copying threads may have run before the engine looks for what has ended.
        for _ in range(self.random.randrange(4)):
            self.copy_step()
        by_name = {request.name: request for request in self.waiting}
        for rank in self.ranks:
            report = rank.core.take_report()
            self.core.reported(report, self.now_ns)
            for result in report.loads:
                loading = by_name.get(result.request)
                if loading is None or not loading.loading or loading.load_done:
                    raise Violation(f"{rank.name}: a load of {result.request} ended unasked")
                self._load_ended(loading, result.loaded_blocks, len(result.failed_block_ids))

    def _fall_behind(self) -> None:
        """The scheduler may be a step ahead of its ranks: until they have this plan the node may
        have ended, come back and be attached to."""
        machine, fault = self.machine, "node restarts in a step"
        if fault not in self.world.enabled or self.random.random() >= _RESTART_SHARE:
            return
        self.world.strike(fault, machine)
        if self.random.random() < 0.5 or not machine.upgrade_node(warm=True):
            machine.kill_node()
        machine.restart_node()
        for _ in range(_ATTACH_TURNS):
            self.world.pass_time()
            self.poll_scheduler()
            for rank in self.ranks:
                rank.poll()
            machine.node_step()

    def _load_ended(self, request: SimRequest, loaded: int, failed: int) -> None:
        """One rank's part ended; with the last one the request goes on, where all ranks can."""
        if not request.loads_ended:
            request.good_blocks = loaded + failed
        request.loads_ended += 1
        request.good_blocks = min(request.good_blocks, loaded)
        if failed:
            if self.world.is_calm(self, since_ns=request.waiting_since_ns):
                raise Violation(f"{self.name}: {request.name} lost what its lease promised")
            request.load_failed = True
        if request.loads_ended < len(self.ranks):
            return
        request.loads_ended = 0
        failed_at_all, request.load_failed = request.load_failed, False
        if request.aborted:
            self._free(request)
            self.waiting.remove(request)
            return
        good = request.good_blocks
        for i in range(good):
            self._check_block(request, i, "loaded")
        self.loaded_blocks += good
        request.load_done = True
        if failed_at_all:
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
            for rank in self.ranks:
                word = rank.expected(request.keys[i]) if full else b"partial" + bytes([i])
                rank.pool[request.table[i]] = word
        if request.computed == request.tokens:
            if request.tokens == request.tokens_end:
                self.running.remove(request)
                self.core.finished(request.name)
                self._free(request)
                self.finished_count += 1
            else:
                request.tokens += 1

    def _check_block(self, request: SimRequest, index: int, when: str) -> None:
        for rank in self.ranks:
            what = f"{request.name} block {index} {when}"
            rank.check_block(request.table[index], request.all_keys[index], what)

    @property
    def idle(self) -> bool:
        if self.dead_rank is not None:
            return False
        return not (self.waiting or self.running) and all(rank.idle for rank in self.ranks)


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

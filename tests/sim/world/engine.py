"""An inference engine without a model: the real connector cores driven in vLLM's order of calls.

Real: `SchedulerCore`. Simulated: the engine's block pool and scheduler, its sockets. Ranks are
`rank`'s; all of them are given the same plans and report every step, as vLLM's do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.client.core.plan import SchedulerConfig, StepPlan
from kvstore.client.core.scheduler import SchedulerCore
from kvstore.types import Shard
from kvstore.wire.space import Space
from tests.kit.cores import core_config, has_work
from tests.sim.world.clocks import SimEngineClock
from tests.sim.world.copies import Violation
from tests.sim.world.groups import (
    BLOCK_TOKENS,
    NULL_BLOCK,
    Kind,
    SimRules,
    block_count,
    chunk,
    first_needed,
    handed_over,
    places,
    places_of_hit,
)
from tests.sim.world.machine import Machine
from tests.sim.world.parts import CORRUPTIONS, Knobs
from tests.sim.world.rank import SimRank
from tests.sim.world.requests import SimRequest, state_word

_RESTART_SHARE: Final = 0.03
"""Of the steps."""
_ATTACH_TURNS: Final = 30


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
        kinds: Sequence[Kind] | None = None,
    ) -> None:
        """`kinds`: of its KV cache groups; None: the world's."""
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
        self.kinds: Sequence[Kind] = world.knobs.group_kinds if kinds is None else kinds
        self._clock = SimEngineClock(machine)
        config = self._core_config(knobs, verify_every=verify_every)
        self.core = SchedulerCore(config, SimRules(self.kinds) if len(self.kinds) > 1 else None)
        blocks_total = len(self.kinds) * blocks + 1
        self.ranks = [
            SimRank(self, rank=rank, space=space, shard=shard, blocks=blocks_total)
            for rank, shard in enumerate(self.shards)
        ]
        self.dead_rank: SimRank | None = None
        """Its process was killed: the engine steps no more, and ends soon."""
        self.blocks = blocks
        """For each KV cache group."""
        self._stopped_until_ns = 0
        self.free = deque(range(1, blocks_total))
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []
        self.scheduler_socket = 0
        self._disturbed_ns = 0
        self.finished_count = 0
        self.loaded_blocks = 0

    def _core_config(self, knobs: Knobs, *, verify_every: int) -> SchedulerConfig:
        return core_config(
            engine_id=self.name,
            nonce="1",
            process=f"{self.name}-scheduler",
            tenant=self.tenant,
            rank_count=len(self.shards),
            block_tokens=BLOCK_TOKENS,
            group_tokens=(BLOCK_TOKENS,) * len(self.kinds),
            group_names=tuple(self.kinds),
            lookup_deadline_ms=knobs.lookup_deadline_ms,
            prefill_ns_per_token=knobs.prefill_ns_per_token,
            breaker_cooldown_ms=knobs.cooldown_ms,
            min_load_tokens=self.world.random.choice((0, BLOCK_TOKENS, 2 * BLOCK_TOKENS)),
            verify_every=verify_every,
            shadow_every=knobs.shadow_every,
        )

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
        if not self.scheduler_socket and core.attachment.dial.is_due(now_ns):
            self.scheduler_socket = machine.connect(core.attachment.hello())
            if self.scheduler_socket:
                core.attachment.dial.connected(now_ns)
            else:
                core.attachment.connect_failed(now_ns, "absent")
        if self.scheduler_socket:
            for message in machine.take_inbox(self.scheduler_socket):
                if message is None or core.received(message, now_ns) is not None:
                    self.drop_scheduler("ended")
                    break
        if self.scheduler_socket and core.attachment.check_heartbeat(now_ns, machine.heartbeat_ns):
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
        for request in [r for r in self.waiting if r.tables and not r.aborted]:
            self.abort(request)
        self.core.new_weights(f"w{self.random.randrange(10**9)}", self.now_ns, emptied=True)
        self.drop_scheduler("reset")

    def _free(self, request: SimRequest) -> None:
        for table in request.tables:
            self.free.extend(block for block in reversed(table) if block != NULL_BLOCK)
        request.tables = []

    def step(self) -> None:
        """One step in vLLM's order: schedule, plan, fence, forward, loads, stores, report."""
        self.poll_scheduler()
        new_blocks: list[int] = []
        scheduled: list[tuple[SimRequest, int]] = []
        self._schedule_running(new_blocks, scheduled)
        self._schedule_waiting(new_blocks, scheduled)
        self.core.begin_step(self.now_ns)
        for request, count in scheduled:
            if (entry := self.core.requests[request.name]).left_tokens:
                self.core.lookups.queue(entry, entry.prompt_tokens - (request.computed + count))
            settled = self.core.settled_tokens(
                request.name,
                computed_tokens=request.computed + count,
                known_tokens=request.tokens,
            )
            if settled:
                tables = [
                    handed_over(kind, table, request.computed + count)
                    for kind, table in zip(self.kinds, request.tables, strict=True)
                ]
                self.core.fill(request.name, tables=tables, settled_tokens=settled)
        self._check_loading_is_not_stored()
        self._check_queue()
        plan = self.core.plan(new_blocks, self.now_ns)
        self.poll_scheduler()
        self._execute(plan, scheduled)

    def _check_loading_is_not_stored(self) -> None:
        """Nobody stores blocks that a load still writes, whatever the engine claims of them."""
        for request in self.waiting:
            if request.loading and not request.load_done and not request.aborted:
                tokens = request.tokens
                if self.core.settled_tokens(
                    request.name, computed_tokens=tokens, known_tokens=tokens
                ):
                    raise Violation(f"{self.name}: {request.name} is stored while it loads")

    def _check_queue(self) -> None:
        """What is left to compute is what the requests under way have left, and never negative."""
        left = dict.fromkeys((True, False), 0)
        for entry in self.core.requests.values():
            left[entry.is_queued] += entry.left_tokens
        counted = self.core.costs.left_tokens
        if counted != left:
            raise Violation(f"{self.name}: the queue is miscounted: {counted}, not {left}")

    def _schedule_running(
        self, new_blocks: list[int], scheduled: list[tuple[SimRequest, int]]
    ) -> None:
        for request in list(self.running):
            if request not in self.running:
                continue
            count = chunk(self.kinds, request.computed, request.tokens, 3 * BLOCK_TOKENS)
            if not self._grow(request, request.computed + count, new_blocks):
                self.preempt(self.running[-1])
                continue
            scheduled.append((request, count))
        scheduled[:] = [(r, n) for r, n in scheduled if r in self.running]

    def _schedule_waiting(
        self, new_blocks: list[int], scheduled: list[tuple[SimRequest, int]]
    ) -> None:
        # Those that hold blocks come first, or a full pool could wait for itself.
        for request in sorted(self.waiting, key=lambda r: not r.tables):
            if request.loading:
                if request.aborted or not request.load_done:
                    continue
                request.loading = request.load_done = False
            elif request.computed == 0:
                outcome = self.core.match(
                    request.name,
                    local_tokens=0,
                    tokens_max=request.tokens - 1,
                    now_ns=self.now_ns,
                )
                if outcome is None:
                    continue
                external = outcome if isinstance(outcome, int) else 0
                if not self._fits(request) or not self._grow(
                    request, external, new_blocks, is_hit=True
                ):
                    break
                self._allocated(request, external)
                if external:
                    request.computed = external
                    request.good_blocks = external // BLOCK_TOKENS
                    request.loading = True
                    continue
            if request.computed >= request.tokens:
                request.computed = request.tokens - 1  # the last token is always computed
            count = chunk(self.kinds, request.computed, request.tokens, 4 * BLOCK_TOKENS)
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
            tables=request.tables,
            external_tokens=external,
            now_ns=self.now_ns,
        )

    def _fits(self, request: SimRequest) -> bool:
        """As vLLM admits: the whole request beside what the prompts under way still need."""
        under_way = [*self.running, *(r for r in self.waiting if r.tables and r is not request)]
        reserved = sum(max(0, self._lacks(r)) for r in under_way)
        return self._lacks(request) <= len(self.free) - reserved

    def _lacks(self, request: SimRequest) -> int:
        """Blocks that its tokens may take beyond those it has, in tables without gaps."""
        return len(self.kinds) * block_count(request.tokens) - sum(map(len, request.tables))

    def _grow(
        self, request: SimRequest, tokens: int, new_blocks: list[int], *, is_hit: bool = False
    ) -> bool:
        """Room for so many tokens, after blocks that are not needed any more were let go."""
        tables = request.tables or [[] for _ in self.kinds]
        wanted = [
            places_of_hit(kind, tokens) if is_hit else places(kind, len(table), tokens)
            for kind, table in zip(self.kinds, tables, strict=True)
        ]
        for kind, table in zip(self.kinds, tables, strict=True):
            for at in range(min(first_needed(kind, request.computed), len(table))):
                if table[at] != NULL_BLOCK:
                    self.free.append(table[at])
                    table[at] = NULL_BLOCK
        if sum(map(sum, wanted)) > len(self.free):
            return False
        for table, flags in zip(tables, wanted, strict=True):
            for is_real in flags:
                table.append(self.free.popleft() if is_real else NULL_BLOCK)
                if is_real and not is_hit:  # the core names the targets of a load
                    new_blocks.append(table[-1])
        if tokens:
            request.tables = tables
        return True

    def _execute(self, plan: StepPlan, scheduled: Sequence[tuple[SimRequest, int]]) -> None:
        for rank in self.ranks:
            while rank.core.fence(plan.fence_blocks):
                if rank.copies.running is None and not has_work(rank.core):
                    raise Violation(f"{rank.name}: the fence waits for nothing")
                if not rank.copies.end_within_fence():
                    rank.core.give_up(plan.fence_blocks)
                    break
        for request, count in scheduled:
            self._forward(request, count)
        self._fall_behind()
        by_name = {request.name: request for request in self.waiting}
        for job in plan.loads:
            by_name[job.request].load_count += 1
        for rank in self.ranks:
            rank.core.submit(plan)
        # The copying threads may have run before the engine looks for what has ended.
        for _ in range(self.random.randrange(4)):
            self.copy_step()
        for rank in self.ranks:
            report = rank.core.take_report()
            self.core.reported(report, self.now_ns)
            for result in report.loads:
                loading = by_name.get(result.request)
                if loading is None or not loading.loading or loading.load_done:
                    raise Violation(f"{rank.name}: a load of {result.request} ended unasked")
                if not result.failed_block_ids:
                    self._check_lease_is_held(loading, result.lease)
                self._load_ended(loading, result.loaded_blocks, len(result.failed_block_ids))

    def _check_lease_is_held(self, request: SimRequest, lease: int) -> None:
        """A load that a rank has just ended was leased to its end, whatever others did."""
        last = request.loads_ended + 1 == request.load_count * len(self.ranks)
        is_calm = self.world.is_calm(self, since_ns=request.waiting_since_ns)
        if last or request.aborted or request.load_failed or not is_calm:
            return
        held = {each.lease for each in self.machine.node.leases() if each.engine_id == self.name}
        if lease not in held:
            raise Violation(f"{self.name}: a lease of {request.name} ended before its loads")

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
        """A load of one rank ended; with the last one the request goes on, where all ranks can.
        With several KV cache groups it begins anew where one of them failed."""
        request.loads_ended += 1
        if failed:
            if self.world.is_calm(self, since_ns=request.waiting_since_ns):
                raise Violation(f"{self.name}: {request.name} lost what its lease promised")
            request.load_failed = True
            good = loaded if len(self.kinds) == 1 else 0
            request.good_blocks = min(request.good_blocks, good)
        if request.loads_ended < request.load_count * len(self.ranks):
            return
        request.loads_ended = request.load_count = 0
        failed_at_all, request.load_failed = request.load_failed, False
        if request.aborted:
            self._free(request)
            self.waiting.remove(request)
            return
        good = request.good_blocks
        for group, kind in enumerate(self.kinds):
            for i in range(first_needed(kind, good * BLOCK_TOKENS), good):
                self._check_block(request, group, i, "loaded")
        self.loaded_blocks += good
        request.load_done = True
        if failed_at_all:
            request.waiting_since_ns = self.world.now_ns
            request.computed = good * BLOCK_TOKENS
            if not good:
                request.loading = request.load_done = False
                self._free(request)

    def _forward(self, request: SimRequest, count: int) -> None:
        before = request.computed
        request.computed += count
        for group, kind in enumerate(self.kinds):
            for i in range(first_needed(kind, before), before // BLOCK_TOKENS):
                self._check_block(request, group, i, "read by attention")
            self._write(request, group, before)
        if request.computed == request.tokens:
            if request.tokens == request.tokens_end:
                self.running.remove(request)
                self.core.finished(request.name)
                self._free(request)
                self.finished_count += 1
            else:
                request.decode()

    def _write(self, request: SimRequest, group: int, before: int) -> None:
        """The blocks of the tokens that were computed; of states, the one at their end."""
        known, table = len(request.keys), request.tables[group]
        if self.kinds[group] == "state" and before % BLOCK_TOKENS:
            word = self.ranks[0].pool[table[(before - 1) // BLOCK_TOKENS]]
            if word != state_word(request, before):
                raise Violation(f"{self.name}: {request.name} begins with the state {word!r:.60}")
        for i in range(before // BLOCK_TOKENS, block_count(request.computed)):
            if table[i] == NULL_BLOCK:
                continue
            full = i < known and (i + 1) * BLOCK_TOKENS <= request.computed
            for rank in self.ranks:
                if full:
                    word = rank.expected(request.keys[i], group)
                elif self.kinds[group] == "state":
                    word = state_word(request, request.computed)
                else:
                    word = b"partial" + bytes([i])
                rank.pool[table[i]] = word

    def _check_block(self, request: SimRequest, group: int, index: int, when: str) -> None:
        for rank in self.ranks:
            what = f"{request.name} block {index} of group {group} {when}"
            rank.check_block(
                request.tables[group][index], request.all_keys[index], what, group=group
            )

    @property
    def idle(self) -> bool:
        if self.dead_rank is not None:
            return False
        return not (self.waiting or self.running) and all(rank.idle for rank in self.ranks)

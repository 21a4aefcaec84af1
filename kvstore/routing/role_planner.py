"""Roles of workers that may change them: prefill for others, or whole requests.

    window: queue of prefillers, TTFT and time per token within objectives ─▶ starved role
    starved for `dwell_s`, the other role can spare a worker, cool-down over ─▶ one worker changes

| starved  | sign                                                                | gives a worker |
|----------|---------------------------------------------------------------------|----------------|
| prefill  | prefill queue ≥ PREFILL_HIGH_S; or > PREFILL_LOW_S and TTFT         | decode         |
|          | missed by > 5 % of requests; or time per token missed by > 5 %      |                |
|          | where decoders compute prompts more than they stream                |                |
| decode   | time per token missed by > 5 %, or more streams than `streams_max`, | prefill        |
|          | while the prefill queue is ≤ PREFILL_LOW_S                          |                |

Rule 1: only workers of role `any` change; those that an operator fixed count, and stay.
Rule 2: a worker is to spare if the rest of its role stays below `spare` of what it can do, and not
fewer than the least number are left.
Rule 3: a change that takes back the last one doubles the next cool-down, up to eight times.
Rule 4: prefillers are the first of a pool by address, so that several routers choose the same.
Rule 5: requests that began before a change say nothing about the roles after it.
A change applies to decisions that follow: requests under way end where they are.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

import numpy as np

from kvstore.routing.fleet import Fleet
from kvstore.routing.placing import Placer
from kvstore.routing.policy import PolicyPlanner, PoolRoles
from kvstore.routing.rows import FleetColumn, WorkerState
from kvstore.routing.values import WorkerRole
from kvstore.units import NS_PER_S

PREFILL_HIGH_S: Final = 1.0
"""Seconds of prefill ahead at a prefiller from which there are too few prefillers."""
PREFILL_LOW_S: Final = 0.25
"""Seconds of prefill ahead up to which a prefiller can change its role."""
SPARE: Final = 0.8
"""Highest load of a role's remaining workers after a change."""
_EVERY_NS: Final = NS_PER_S // 2
_MISSED: Final = 0.05
"""Share of requests that may miss an objective."""
_SAMPLES_MIN: Final = 5.0
_DOUBLINGS_MAX: Final = 3
_SOON: Final = 2
"""A change to the other role within this many cool-downs takes back the last one."""


class PoolPlan:
    """Window and history of one pool."""

    def __init__(self, now_ns: int) -> None:
        self.prefill_s = 0.0
        """Seconds of prefill ahead of a request at the prefillers and in their lanes, smoothed."""
        self.work_rate = 0.0
        """Seconds of remote prefill that arrive per second, smoothed."""
        self.streams = 0.0
        """Streams per worker that decodes, smoothed."""
        self.late_first, self.slow_tokens = np.zeros((2, 2))
        """(requests that missed the objective, all requests) in the window: by their TTFT, and by
        their time per token.
        """
        self.local_rate = 0.0
        """Seconds of local prefill that arrive per second at each worker that decodes, smoothed."""
        self.work_s = self.local_s = 0.0
        """Seconds of remote and of local prefill that were sent since the last look."""
        self.starved: WorkerRole | None = None
        self.since_ns = self.changed_ns = now_ns
        self.last: WorkerRole | None = None
        """Role that the last changed worker was given."""
        self.doublings = 0

    def has_spare(
        self, wanted: WorkerRole, prefillers: int, serving: int, bounds: PoolRoles, most: float
    ) -> bool:
        """Whether the role that gives a worker can do without it. `most`: streams at a worker."""
        if wanted is WorkerRole.PREFILL:
            left = serving - 1
            streams = self.streams * serving / max(1, left)
            return left >= bounds.decode_min and streams <= SPARE * most
        left = prefillers - 1
        return left >= bounds.prefill_min and (
            left == 0 or bool(np.less_equal(self.work_rate / left, SPARE))
        )


class Planner:
    """See the module."""

    def __init__(self, fleet: Fleet, placer: Placer) -> None:
        self._fleet, self._placer = fleet, placer
        self.due_ns = 0
        self.changes = Counter[tuple[str, WorkerRole]]()
        """(pool, new role) → changes."""
        self._pools: dict[str, PoolPlan] = {}

    def first_token(self, pool: str, arrived_ns: int, now_ns: int) -> None:
        """A request got its first token: count whether its TTFT missed the objective."""
        plan = self._pools.get(pool)
        if plan is not None and arrived_ns >= plan.changed_ns:
            ttft_s = (now_ns - arrived_ns) / NS_PER_S
            plan.late_first += (ttft_s > self._fleet.policy.planner.ttft_s, 1)

    def ended(self, pool: str, began_ns: int, now_ns: int, output_tokens: int) -> None:
        """A request got its last token, its first one at `began_ns`: count whether its time per
        token missed the objective.
        """
        plan = self._pools.get(pool)
        if plan is not None and output_tokens > 1 and began_ns >= plan.changed_ns:
            itl_s = (now_ns - began_ns) / NS_PER_S / (output_tokens - 1)
            plan.slow_tokens += (itl_s > self._fleet.policy.planner.itl_s, 1)

    def prefill_sent(self, pool: str, work_s: float, *, is_remote: bool) -> None:
        """Add a prefill of `work_s` seconds that was sent."""
        if (plan := self._pools.get(pool)) is not None:
            plan.work_s += work_s * is_remote
            plan.local_s += work_s * (not is_remote)

    def plan(self, now_ns: int) -> None:
        """Look at all pools with flexible workers, and change one role in each at most."""
        passed_s = (now_ns - self.due_ns + _EVERY_NS) / NS_PER_S if self.due_ns else 1.0
        self.due_ns = now_ns + _EVERY_NS
        settings = self._fleet.policy.planner
        if not settings.is_on:
            return
        pools = {s.spec.pool for s in self._fleet.workers if s.spec.role is WorkerRole.ANY}
        for gone in self._pools.keys() - pools:
            del self._pools[gone]
        for pool in sorted(pools):
            plan = self._pools.setdefault(pool, PoolPlan(now_ns))
            self._look(pool, plan, passed_s, now_ns)
            self._decide(pool, plan, now_ns)

    def _look(self, pool: str, plan: PoolPlan, passed_s: float, now_ns: int) -> None:
        """Take the numbers of this moment into the window."""
        kept = math.exp(-passed_s / self._fleet.policy.planner.window_s)
        columns = self._fleet.columns
        prefillers = self._fleet.crew(pool, prefill=True).rows
        serving = self._fleet.crew(pool, prefill=False).rows
        rows = prefillers if prefillers.size else serving
        queued_s = float(columns[FleetColumn.WORK_S, rows].sum())
        laned = sum(opened.uncached for opened in self._placer.laned.get(pool, {}).values())
        queued_s += laned / self._fleet.policy.costs.prefill_tokens_per_s
        streams = float(columns[FleetColumn.STREAMS, serving].sum())
        plan.prefill_s += (1 - kept) * (queued_s / max(1, rows.size) - plan.prefill_s)
        plan.streams += (1 - kept) * (streams / max(1, serving.size) - plan.streams)
        plan.work_rate += (1 - kept) * (plan.work_s / passed_s - plan.work_rate)
        local_rate = plan.local_s / passed_s / max(1, serving.size)
        plan.local_rate += (1 - kept) * (local_rate - plan.local_rate)
        plan.work_s = plan.local_s = 0.0
        plan.late_first *= kept
        plan.slow_tokens *= kept
        starved = _starved(plan, self._fleet.policy.planner)
        if starved is not plan.starved:
            plan.starved, plan.since_ns = starved, now_ns

    def _decide(self, pool: str, plan: PoolPlan, now_ns: int) -> None:
        settings = self._fleet.policy.planner
        bounds = settings.pools.get(pool, PoolRoles())
        members = [state for state in self._fleet.workers if state.spec.pool == pool]
        up = [state for state in members if state.is_up]
        prefillers = sum(state.role is WorkerRole.PREFILL for state in up)
        serving = len(up) - prefillers
        wanted = plan.starved
        if prefillers < bounds.prefill_min and serving > bounds.decode_min:
            wanted = WorkerRole.PREFILL
        elif serving < bounds.decode_min and prefillers:
            wanted = WorkerRole.BOTH
        else:
            cool_s = settings.cooldown_s * 2**plan.doublings
            is_due = now_ns - plan.since_ns >= settings.dwell_s * NS_PER_S
            is_cool = now_ns - plan.changed_ns >= cool_s * NS_PER_S
            if wanted is None or not (is_due and is_cool):
                return
            if not plan.has_spare(wanted, prefillers, serving, bounds, settings.streams_max):
                return
        self._change(pool, plan, wanted, up, now_ns)

    def _change(
        self, pool: str, plan: PoolPlan, role: WorkerRole, up: list[WorkerState], now_ns: int
    ) -> None:
        able = [s for s in up if s.spec.role is WorkerRole.ANY and s.role is not role]
        if not able:
            return
        able.sort(key=lambda state: (state.spec.address, state.spec.rank))
        chosen = able[0 if role is WorkerRole.PREFILL else -1]
        self._fleet.assign(chosen.spec.worker, role)
        self._placer.splits.pop(pool, None)  # learned with another number of prefillers
        self.changes[pool, role] += 1
        cool_s = self._fleet.policy.planner.cooldown_s * 2**plan.doublings
        since_s = (now_ns - plan.changed_ns) / NS_PER_S
        is_back = plan.last not in (None, role) and since_s < _SOON * cool_s
        plan.doublings = min(_DOUBLINGS_MAX, plan.doublings + 1) if is_back else 0
        plan.last, plan.changed_ns, plan.since_ns = role, now_ns, now_ns
        plan.late_first, plan.slow_tokens = np.zeros((2, 2))


def _starved(plan: PoolPlan, settings: PolicyPlanner) -> WorkerRole | None:
    is_slow = _is_high(*plan.slow_tokens)
    if plan.prefill_s >= PREFILL_HIGH_S or (
        _is_high(*plan.late_first) and plan.prefill_s > PREFILL_LOW_S
    ):
        return WorkerRole.PREFILL
    if is_slow and plan.local_rate > plan.streams / settings.streams_max:
        return WorkerRole.PREFILL  # prompts that decoders compute slow their streams down
    is_full = is_slow or plan.streams > settings.streams_max
    return WorkerRole.BOTH if is_full and plan.prefill_s <= PREFILL_LOW_S else None


def _is_high(missed: float, requests: float) -> bool:
    return bool(requests >= _SAMPLES_MIN and missed > _MISSED * requests)

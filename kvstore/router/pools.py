"""Models of the policy that no worker serves: their requests fail though every worker is up.

    policy.models × workers ─▶ `faults` ─▶ PoolWatch ─▶ /healthz, readiness, the log

A worker whose models are not known yet serves any. A pool without workers is no fault where the
policy holds requests for one (`holds_without_workers`). The log names a fault when every worker has
answered or failed, and again after a reload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final

from kvstore.router.engines.workers import Worker, Workers
from kvstore.routing.policy import ModelPool, RoutingPolicy

_log = logging.getLogger(__name__)


def faults(policy: RoutingPolicy, workers: Collection[Worker]) -> list[str]:
    """A sentence about each pool that gets requests of a model and does not serve it; empty: it
    does.
    """
    found = []
    for model, rule in policy.models.items():
        for pool in rule.pools or (ModelPool(pool=""),):  # without pools: sought in all
            crew = [w for w in workers if w.serves_requests and pool.pool in ("", w.address.pool)]
            if pool.weight:
                found.append(_fault(model, pool, crew, policy))
    return found


def _fault(model: str, pool: ModelPool, crew: Collection[Worker], policy: RoutingPolicy) -> str:
    name, served = pool.pool, pool.served or model
    if name and not crew and not policy.limits.holds_without_workers:
        return f"pool {name} of model {model} has no worker: add pool={name} to its workers"
    if not crew or any(served in worker.models or not worker.models for worker in crew):
        return ""
    serve = ", ".join(sorted({each for worker in crew for each in worker.models}))[:200]
    what = f"workers{' of pool ' * bool(name)}{name} serve {serve}, not {served}"
    return f"{what}: correct models.{model} of the policy, or the engines' --served-model-name"


class PoolWatch:
    """See the module; `once` is repeated by its owner."""

    pause_s: Final = 0.5

    def __init__(self, policy: Callable[[], RoutingPolicy], workers: Workers) -> None:
        self._policy, self._workers = policy, workers
        self.notes: list[str] = []
        self.said: list[str] = []
        """Notes that are in the log already; cleared at a reload."""

    async def once(self) -> None:
        found = faults(self._policy(), list(self._workers))
        self._workers.serve_a_model = "" in found or not found
        self.notes = list(dict.fromkeys(filter(None, found)))
        states = {worker.state for worker in self._workers}
        if states and "new" not in states:
            for note in self.notes:
                if note not in self.said:
                    _log.warning("%s", note)
            self.said = self.notes

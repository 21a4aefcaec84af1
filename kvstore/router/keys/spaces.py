"""Scopes of workers in the index: (tenant, space) of each, and how keys of a model are made.

    worker: node, engine, models ─┬─ space= of its flag
    registry of the index ────────┴─ entries of that node, of that engine or model

Made anew when a worker, the registry or the policy changed. Prompts with adapters have no keys:
those fold in what only an engine knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore.router.engines.workers import Worker, Workers
from kvstore.router.keys.index_calls import IndexCalls
from kvstore.router.keys.rendering import KeyPlan
from kvstore.routing.policy import RoutingPolicy

MODELS_MAX: Final = 1000
"""Names of clients that are remembered, wrong ones included."""


class PrefixScope(NamedTuple):
    """Where and how prefixes of a model are looked up."""

    model: str
    """As engines serve it."""
    plan: KeyPlan
    places: frozenset[tuple[str, bytes]]


class Spaces:
    """See the module."""

    def __init__(
        self, workers: Workers, index: IndexCalls, policy: Callable[[], RoutingPolicy]
    ) -> None:
        self._workers, self._index, self._policy = workers, index, policy
        self._made: dict[str, PrefixScope | None] = {}
        self._version, self._made_by = (-1, -1), policy()

    def of(self, worker: Worker) -> list[tuple[str, bytes]]:
        """(tenant, space) of its engine."""
        address = worker.address
        if address.space:
            return [(address.tenant, bytes.fromhex(address.space))]
        entries = [each.entry for each in self._index.listed if each.node == address.node]
        if address.engine:
            entries = [each for each in entries if each.engine == address.engine]
        elif len(entries) > 1 and worker.models:
            entries = [each for each in entries if each.model in worker.models] or entries
        return sorted({(each.tenant, bytes(each.space)) for each in entries})

    def scope(self, model: str) -> PrefixScope | None:
        """Scope of a model as a client names it; None: its prefixes are not in the index."""
        policy, version = self._policy(), (self._workers.version, self._index.epoch)
        if version != self._version or policy is not self._made_by or len(self._made) > MODELS_MAX:
            self._made.clear()
            self._version, self._made_by = version, policy
        if model not in self._made:
            self._made[model] = self._scope(model)
        return self._made[model]

    def _scope(self, model: str) -> PrefixScope | None:
        names = self._served(model)
        able = [
            worker
            for worker in self._workers
            if worker.address.node
            and worker.block_tokens
            and worker.has_parity
            and any(worker.serves(name) and name not in worker.adapters for name in names)
        ]
        plans = Counter(KeyPlan(w.block_tokens, w.address.hash_seed) for w in able)
        if not plans:
            return None
        plan = plans.most_common(1)[0][0]
        chosen = [w for w in able if (w.block_tokens, w.address.hash_seed) == plan]
        places = frozenset(place for worker in chosen for place in self.of(worker))
        served = next((name for name in names if any(w.serves(name) for w in chosen)), model)
        return PrefixScope(served, plan, places) if places else None

    def _served(self, model: str) -> list[str]:
        for name, rule in self._policy().models.items():
            if model == name or model in rule.aliases:
                return [pool.served or name for pool in rule.pools] or [name]
        return [model]

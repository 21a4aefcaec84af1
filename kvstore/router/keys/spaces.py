"""Scopes of workers in the index: (tenant, space) of each, and how keys of a model are made.

    worker: node, engine, models ─┬─ space= of its flag
    registry of the index ────────┴─ entries of that node, of that engine or model

Made anew when a worker, the registry or the policy changed. The keys of a LoRA adapter fold in its
name, its path and the digest of its weights: engines say it (`parity`), and those that say another
one than most are load-only for its requests.
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
"""Most model names that are remembered, unknown ones included."""
OTHER_KEYS: Final = "most engines have other weights under that name, or another path"


class PrefixScope(NamedTuple):
    """Parameters for the keys of a model, and the (tenant, space) pairs in which the index is asked
    for them.
    """

    model: str
    """Model as engines serve it; of an adapter the base model, whose tokens it shares."""
    plan: KeyPlan
    places: frozenset[tuple[str, bytes]]
    load_only: dict[str, str]
    """Worker → why its prefixes are not known for this adapter."""


class Spaces:
    """Scopes of workers and models in the index; see the module."""

    def __init__(
        self, workers: Workers, index: IndexCalls, policy: Callable[[], RoutingPolicy]
    ) -> None:
        self._workers, self._index, self._policy = workers, index, policy
        self._made: dict[str, PrefixScope | None] = {}
        self._version, self._made_by = (-1, -1), policy()

    def of(self, worker: Worker) -> list[tuple[str, bytes]]:
        """(tenant, space) pairs of a worker's engine; several if its node lists several
        that fit.
        """
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
            and any(worker.serves(name) for name in names)
        ]
        if any(name in worker.adapters for name in names for worker in able):
            return self._adapter_scope(names, able)
        plans = {w: KeyPlan(w.block_tokens, w.address.hash_seed) for w in able if w.has_parity}
        if not plans:
            return None
        plan = Counter(plans.values()).most_common(1)[0][0]
        chosen = [worker for worker in plans if plans[worker] == plan]
        places = frozenset(place for worker in chosen for place in self.of(worker))
        served = next((name for name in names if any(w.serves(name) for w in chosen)), model)
        return PrefixScope(served, plan, places, {}) if places else None

    def _adapter_scope(self, names: list[str], able: list[Worker]) -> PrefixScope | None:
        """Scope of an adapter by the workers whose keys equal those of most: the same name, path
        and weights. The other workers are load-only for its requests; None: no worker has keys.
        """
        found = [(w, name, w.adapters[name]) for w in able for name in names if name in w.adapters]
        plans: dict[Worker, KeyPlan] = {}
        for worker, name, adapter in found:
            if not adapter.is_wanted:
                adapter.is_wanted, adapter.due_s = True, 0.0
            if worker.has_parity and not adapter.trouble:
                its = KeyPlan(worker.block_tokens, worker.address.hash_seed)
                plans[worker] = its._replace(adapter=(name, adapter.path), digest=adapter.digest)
        most = Counter(plans.values()).most_common(1)
        plan = most[0][0] if most else None
        load_only, served = dict[str, str](), ""
        for worker, _, adapter in found:
            is_other = worker in plans and plans[worker] != plan
            adapter.other = OTHER_KEYS if is_other else ""
            if why := worker.parity or adapter.trouble or adapter.other:
                load_only[worker.name] = why
            else:
                served = adapter.base
        if plan is None:
            return None
        places = frozenset(
            place for worker, its in plans.items() if its == plan for place in self.of(worker)
        )
        return PrefixScope(served, plan, places, load_only) if places else None

    def _served(self, model: str) -> list[str]:
        for name, rule in self._policy().models.items():
            if model == name or model in rule.aliases:
                return [pool.served or name for pool in rule.pools] or [name]
        return [model]

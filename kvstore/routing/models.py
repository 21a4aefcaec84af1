"""Names of models: aliases, adapters, and pools with weights.

    model as the client wrote it ─▶ rule (name, alias, adapter) ─▶ pool by weight ─▶ ModelSide

The side of an A/B split is a hash of the session, or of the request where there is none: a session
gets the same side at every router of a cluster, and a canary of 10 % gets 10 % of them. When
weights change, a session stays where it was for `session_ttl_s` (`ahead`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import xxhash

from kvstore.routing.policy import ModelPool, RoutingPolicy
from kvstore.routing.values import WorkerSpec

_PARTS: Final = 1 << 32


class ModelSide(msgspec.Struct, frozen=True):
    """Destination of a request."""

    pool: str
    model: str
    """Base model, as workers name it."""
    body_model: str
    """Name to write into the body: the adapter, or the base model."""
    adapter: str = ""
    is_listed: bool = True
    """A worker, or the policy, names the model."""


class ModelUnknown(Exception):
    """The model is not there; `known` are the names that are."""

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__(", ".join(known))
        self.known = known


class ModelMap:
    """Names of models that clients may use, with their pools, by one policy and one set
    of workers.
    """

    def __init__(self, policy: RoutingPolicy, workers: Iterable[WorkerSpec] = ()) -> None:
        """`workers`: their models and adapters count if the policy names no models; and a rule that
        names no pools has the pools of the workers that serve its model.
        """
        self._rules: dict[str, tuple[str, str, tuple[ModelPool, ...]]] = {}
        """Name → (base, adapter, pools)."""
        pools_of: dict[tuple[str, str], dict[str, None]] = {}
        """(model, adapter) → pools that serve them."""
        specs = list(workers)
        for spec in specs:
            models = spec.models or ("",)
            for names in (*((m, "") for m in models), *((models[0], a) for a in spec.adapters)):
                pools_of.setdefault(names, {})[spec.pool] = None
        for base, rule in policy.models.items():
            pools = rule.pools or _pools(pools_of.get((base, ""), {base: None}))
            for name in (base, *rule.aliases):
                self._rules[name] = (base, "", pools)
            for adapter in rule.adapters:
                self._rules[adapter] = (base, adapter, pools)
        self.any_pools: tuple[ModelPool, ...] = ()
        """Pools of workers that take names of models that nobody lists."""
        if not policy.models:
            pools_of.pop(("", ""), None)
            self.any_pools = _pools(
                dict.fromkeys(s.pool for s in specs if s.takes_any_model or not s.models)
            )
            for (model, adapter), found in pools_of.items():
                self._rules[adapter or model] = (model, adapter, _pools(found))
        bases = {base for base, _, _ in self._rules.values()}
        is_alike = not policy.models and len({spec.models for spec in specs}) == 1
        self.sole = min(bases) if bases and (is_alike or len(bases) == 1) else ""
        """The base model for requests that name none: the only one, or the first where all workers
        list the same, so that any engine has the word; empty: there are several, or none is known.
        """

    def is_new(self, name: str) -> bool:
        """Whether nobody lists the name, though other names are listed."""
        return bool(name and self._rules) and name not in self._rules

    @property
    def known(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._rules))

    def served(self, name: str) -> list[str]:
        """Names of a client's model at the workers of its pools; for an adapter, those of its base
        model.
        """
        base, _, pools = self._rules.get(name, (name, "", ()))
        return [pool.served or base for pool in pools] or [base]

    def resolve(self, name: str, *, session: str, request_id: str, stays_in: str = "") -> ModelSide:
        """Pool and model for a request. `name`: empty for the only model. `stays_in`: pool of the
        session's last request.

        Raises:
            ModelUnknown: no rule has the name.
        """
        name = name or self.sole
        found = self._rules.get(name)
        if found is None:
            if not self.any_pools:
                raise ModelUnknown(self.known)
            found = (name, "", self.any_pools)
        base, adapter, pools = found
        pool = next((its for its in pools if its.pool == stays_in and its.weight), None)
        if pool is None:
            subject = f"{base}\0{session or request_id}"
            pool = pools[0] if len(pools) == 1 else _by_weight(pools, subject)
        served = pool.served or base
        return ModelSide(pool.pool, served, adapter or served, adapter, name in self._rules)


def _pools(names: Iterable[str]) -> tuple[ModelPool, ...]:
    return tuple(ModelPool(pool=name) for name in names)


def _by_weight(pools: tuple[ModelPool, ...], subject: str) -> ModelPool:
    point = xxhash.xxh3_64_intdigest(subject.encode()) % _PARTS / _PARTS
    point *= sum(pool.weight for pool in pools)
    for pool in pools:
        point -= pool.weight
        if point < 0:
            return pool
    return pools[-1]

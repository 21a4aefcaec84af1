"""Names of models: aliases, adapters, and pools with weights.

    model as the client wrote it ─▶ rule (name, alias, adapter) ─▶ pool by weight ─▶ ModelSide

The side of an A/B split is a hash of the session, or of the request where there is none: a session
stays on its side, whatever router of a cluster it meets, and a canary of 10 % gets 10 % of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import xxhash

from kvstore.routing.policy import ModelPool, RoutingPolicy

_PARTS: Final = 1 << 32


class ModelSide(msgspec.Struct, frozen=True):
    """Destination of a request."""

    pool: str
    model: str
    """Base model, as workers name it."""
    body_model: str
    """Name to write into the body: the adapter, or the base model."""
    adapter: str = ""


class ModelUnknown(Exception):
    """The model is not there; `known` are the names that are."""

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__(", ".join(known))
        self.known = known


class ModelMap:
    """Names by one policy and one set of workers."""

    def __init__(self, policy: RoutingPolicy, served: Iterable[tuple[str, str]] = ()) -> None:
        """Args: `served`: (model, pool) of workers, used when the policy names no models."""
        self._rules: dict[str, tuple[str, str, tuple[ModelPool, ...]]] = {}
        """Name → (base, adapter, pools)."""
        for base, rule in policy.models.items():
            pools = rule.pools or (ModelPool(pool=base),)
            for name in (base, *rule.aliases):
                self._rules[name] = (base, "", pools)
            for adapter in rule.adapters:
                self._rules[adapter] = (base, adapter, pools)
        self._any: tuple[ModelPool, ...] = ()
        """Pools whose workers take every model."""
        if not policy.models:
            pools_of: dict[str, dict[str, None]] = {}
            for model, pool in served:
                pools_of.setdefault(model, {})[pool] = None
            self._any = tuple(ModelPool(pool=pool) for pool in pools_of.pop("", ()))
            for model, names in pools_of.items():
                pools = tuple(ModelPool(pool=pool) for pool in names)
                self._rules[model] = (model, "", pools)

    @property
    def known(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._rules))

    def resolve(self, name: str, *, session: str, request_id: str) -> ModelSide:
        """Raises:
        ModelUnknown: no rule has the name.
        """
        found = self._rules.get(name)
        if found is None:
            if not self._any:
                raise ModelUnknown(self.known)
            found = (name, "", self._any)
        base, adapter, pools = found
        pool = (
            pools[0] if len(pools) == 1 else _by_weight(pools, f"{base}\0{session or request_id}")
        )
        served = pool.served or base
        return ModelSide(pool.pool, served, adapter or served, adapter)


def _by_weight(pools: tuple[ModelPool, ...], subject: str) -> ModelPool:
    point = xxhash.xxh3_64_intdigest(subject.encode()) % _PARTS / _PARTS
    point *= sum(pool.weight for pool in pools)
    for pool in pools:
        point -= pool.weight
        if point < 0:
            return pool
    return pools[-1]

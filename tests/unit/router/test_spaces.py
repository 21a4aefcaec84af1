"""Scopes of workers in the index, by flags, registry, adapters and aliases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.workers import UNASKED, WorkerAdapter, Workers
from kvstore.router.keys.index_calls import OTHER_KEYS, IndexCalls, Listed, Spaces
from kvstore.routing.policy import RoutingPolicy, parse
from kvstore.wire.load import EngineEntry

ONE, TWO = bytes(32), bytes([1]) * 32


def listed(engine: str, space: bytes, model: str) -> Listed:
    entry = EngineEntry(engine=engine, tenant="t", space=cast("Any", space), model=model)
    return "n1", entry


class Site:
    def __init__(self, *addresses: WorkerAddress) -> None:
        self.index = SimpleNamespace(
            epoch=1, listed=(listed("e1", ONE, "m"), listed("e2", TWO, "other"))
        )
        self.policy = RoutingPolicy()
        self.workers = Workers(lambda _: None)
        for worker in self.workers.replace(addresses):
            worker.block_tokens, worker.has_parity = 16, True
            worker.models = worker.models or ("m",)
        self.spaces = Spaces(self.workers, cast("IndexCalls", self.index), lambda: self.policy)


def address(**more: Any) -> WorkerAddress:
    return WorkerAddress(name="a", url="http://127.0.0.1:1", **{"node": "n1", **more})


def test_an_engine_is_found_by_flag_name_or_model() -> None:
    for given, expected in (
        (address(space=TWO.hex(), tenant="x"), [("x", TWO)]),
        (address(engine="e2"), [("t", TWO)]),
        (address(), [("t", ONE)]),
        (address(node="n2"), []),
    ):
        site = Site(given)
        assert site.spaces.of(site.workers["a"]) == expected


def test_a_model_has_a_scope_while_a_worker_with_equal_keys_serves_it() -> None:
    site = Site(address())
    scope = site.spaces.scope("m")
    assert scope is not None
    assert (scope.model, scope.plan.block_tokens, set(scope.places)) == ("m", 16, {("t", ONE)})
    assert site.spaces.scope("unknown") is None
    site.workers["a"].has_parity = False
    site.workers.describe(site.workers["a"])
    assert site.spaces.scope("m") is None


def equal(site: Site, adapter: WorkerAdapter, digest: bytes) -> None:
    """Its keys were compared."""
    adapter.digest, adapter.parity, adapter.has_parity = digest, "", True
    site.workers.version += 1


def with_adapter(site: Site, name: str, *, path: str = "/lora", digest: bytes = b"") -> None:
    worker = site.workers[name]
    adapter = worker.adapters["lora"] = WorkerAdapter("m", path)
    if digest:
        equal(site, adapter, digest)


def test_an_adapter_has_keys_when_an_engine_said_its_digest() -> None:
    site = Site(address())
    with_adapter(site, "a")
    adapter = site.workers["a"].adapters["lora"]
    assert not adapter.is_wanted, "nobody asked for it"
    assert site.spaces.scope("lora") is None
    assert adapter.is_wanted
    equal(site, adapter, b"d" * 32)
    scope = site.spaces.scope("lora")
    assert scope is not None
    assert scope.model == "m", "its tokens are those of the base model"
    assert (scope.plan.adapter, scope.plan.digest) == (("lora", "/lora"), b"d" * 32)
    assert (set(scope.places), scope.load_only) == ({("t", ONE)}, {})
    base = site.spaces.scope("m")
    assert base is not None
    assert (base.plan.adapter, base.plan.digest, base.load_only) == (None, b"", {})


def test_engines_with_other_weights_than_most_are_load_only_for_an_adapter() -> None:
    names = ("a", "b", "c", "unknown", "path", "red", "without")
    site = Site(*(msgspec.structs.replace(address(), name=name) for name in names))
    for name in names:
        other = {"c": b"e" * 32, "unknown": b""}.get(name, b"d" * 32)
        if name != "without":
            path = "/other" if name == "path" else "/lora"
            with_adapter(site, name, path=path, digest=other)
    site.workers["red"].parity, site.workers["red"].has_parity = "keys differ", False
    scope = site.spaces.scope("lora")
    assert scope is not None
    assert scope.plan.digest == b"d" * 32
    assert scope.load_only == {
        "c": OTHER_KEYS,
        "path": OTHER_KEYS,
        "unknown": UNASKED,
        "red": "keys differ",
    }
    assert site.workers["c"].adapters["lora"].other == OTHER_KEYS


def test_aliases_have_the_keys_of_their_model() -> None:
    site = Site(address())
    assert site.spaces.scope("alias") is None
    site.policy = parse(
        {"models": {"public": {"aliases": ["alias"], "pools": [{"pool": "p", "served": "m"}]}}}
    )
    scope = site.spaces.scope("alias")
    assert scope is not None
    assert scope.model == "m", "a policy that was read again counts at once"

"""Scopes of workers in the index, by flags, registry, adapters and aliases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kvstore.router.engines.workers import WorkerAddress, Workers
from kvstore.router.keys.index_calls import IndexCalls, Listed
from kvstore.router.keys.spaces import Spaces
from kvstore.routing.policy import RoutingPolicy, parse
from kvstore.wire.load import EngineEntry

ONE, TWO = bytes(32), bytes([1]) * 32


def listed(engine: str, space: bytes, model: str) -> Listed:
    entry = EngineEntry(engine=engine, tenant="t", space=cast("Any", space), model=model)
    return Listed("n1", entry)


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
    site.workers.judge(site.workers["a"])
    assert site.spaces.scope("m") is None


def test_adapters_have_no_keys_and_aliases_those_of_their_model() -> None:
    site = Site(address())
    site.workers["a"].adapters = ("lora",)
    assert site.spaces.scope("lora") is None
    assert site.spaces.scope("alias") is None
    site.policy = parse(
        {"models": {"public": {"aliases": ["alias"], "pools": [{"pool": "p", "served": "m"}]}}}
    )
    scope = site.spaces.scope("alias")
    assert scope is not None
    assert scope.model == "m", "a policy that was read again counts at once"

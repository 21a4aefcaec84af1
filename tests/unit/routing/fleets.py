"""Cores, workers and requests for tests of the router's decisions."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Match
from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    AbandonWorker,
    Arrived,
    Failure,
    Fault,
    Joined,
    Lack,
    Leg,
    LegFailed,
    Prepare,
    Probed,
    Raced,
    Rejected,
    RouteCommand,
    Routed,
    RouteEvent,
)
from kvstore.routing.features import FeatureColumn
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.receipts import Receipt
from kvstore.routing.rows import StateChange
from kvstore.routing.values import (
    PrefixAnswer,
    ProbeResult,
    RouteRequest,
    WorkerRole,
    WorkerSpec,
)
from tests.kit.routing_check import check

MS = 1_000_000
S = 1000 * MS
Word = Routed | Raced | Rejected | Prepare
"""Commands about requests."""


def spec(number: int, **more: Any) -> WorkerSpec:
    fields: dict[str, Any] = {
        "worker": f"w{number}",
        "address": f"10.0.0.{number}:80",
        "url": f"w{number}",
        "pool": "p",
        "node": f"n{number}",
        "engine": "e",
        "memory_tokens": 400_000,
    }
    return WorkerSpec(**{**fields, **more})


def prefiller(number: int, **more: Any) -> WorkerSpec:
    return spec(number, role=WorkerRole.PREFILL, **more)


def core_of(*specs: WorkerSpec, policy: RoutingPolicy | None = None, seed: int = 1) -> RouterCore:
    """All its workers have answered a probe."""
    core = RouterCore(policy or RoutingPolicy(), seed=seed)
    for each in specs:
        core.step(Joined(each), 0)
        core.step(Probed(each.worker, ProbeResult.ANSWERED), 0)
    return core


def keys(name: str, blocks: int) -> bytes:
    return b"".join(hashlib.sha256(f"{name} {n}".encode()).digest() for n in range(blocks))


def request(name: str, tokens: int = 4096, **more: Any) -> RouteRequest:
    fields: dict[str, Any] = {
        "request_id": name,
        "model": "m",
        "prompt_tokens": tokens,
        "block_tokens": 16,
        "keys": keys(more.pop("prefix", name), tokens // 16),
    }
    return RouteRequest(**{**fields, **more})


def answer(*matches: Match, trust: Trust = Trust.EXACT) -> PrefixAnswer:
    return PrefixAnswer(trust, [*matches], 3)


def hbm(number: int, blocks: int, trust: Trust = Trust.EXACT) -> Match:
    return Match(Holder(f"n{number}", "e"), blocks, trust=trust)


def columns(**given: list[float]) -> np.ndarray:
    """Features of workers, by column."""
    made = np.zeros((len(FeatureColumn), len(next(iter(given.values())))))
    made[[FeatureColumn.HIT_RATIO, FeatureColumn.FETCH_RATIO, FeatureColumn.WARM]] = 1
    for name, values in given.items():
        made[FeatureColumn[name.upper()]] = values
    return made


def turn(core: RouterCore, event: RouteEvent, now_ns: int = S) -> list[Word]:
    """The commands of a step, those about workers left out; the core is whole after it."""
    commands = core.step(event, now_ns)
    check(core)
    return [each for each in commands if not isinstance(each, StateChange | AbandonWorker)]


def knowing(its: RouteRequest, prefix: PrefixAnswer | None) -> RouteRequest:
    """The request with the index's answer."""
    return msgspec.structs.replace(its, answer=prefix)


def explain(
    core: RouterCore, its: RouteRequest, prefix: PrefixAnswer | None, now_ns: int
) -> Receipt:
    return core.explain(knowing(its, prefix), now_ns)


def arrive(
    core: RouterCore, its: RouteRequest, prefix: PrefixAnswer | None = None, now_ns: int = S
) -> Routed | Rejected | None:
    """The final word about this request; None: it is held."""
    for command in turn(core, Arrived(knowing(its, prefix)), now_ns):
        if not isinstance(command, Prepare) and command.request_id == its.request_id:
            assert isinstance(command, Routed | Rejected)
            return command
    assert its.request_id in core.room.entries
    return None


def fail(
    name: str,
    failure: Failure = Failure.STATUS,
    leg: Leg = Leg.DECODE,
    *,
    lack: Lack | None = None,
    why: str = "",
    **more: Any,
) -> LegFailed:
    return LegFailed(name, leg, Fault(failure, lack, why), **more)


def fault(failure: Failure | None) -> Fault | None:
    return None if failure is None else Fault(failure, why="status 503")


def goes_down(core: RouterCore, worker: str, now_ns: int = S) -> list[Word]:
    """Nothing listens there. Returns the commands about requests."""
    return turn(core, Probed(worker, ProbeResult.REFUSED, "connection refused"), now_ns)


def comes_back(core: RouterCore, worker: str, now_ns: int = S) -> list[Word]:
    """It answers a probe. Returns the commands about requests."""
    return turn(core, Probed(worker, ProbeResult.ANSWERED), now_ns)


def routed(command: RouteCommand | None) -> Routed:
    assert isinstance(command, Routed), command
    return command


def rejected(command: RouteCommand | None) -> Rejected:
    assert isinstance(command, Rejected), command
    return command

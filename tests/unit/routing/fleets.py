"""Cores, workers and requests for tests of the router's decisions."""

from __future__ import annotations

import hashlib
from typing import Any

from kvstore.routing.core import RouterCore
from kvstore.routing.events import Arrived, Joined, Rejected, RouteCommand, Routed
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import (
    PrefixAnswer,
    PrefixMatch,
    PrefixTrust,
    RouteRequest,
    WorkerRole,
    WorkerSpec,
)

MS = 1_000_000
S = 1000 * MS


def spec(number: int, **more: Any) -> WorkerSpec:
    fields: dict[str, Any] = {
        "worker": f"w{number}",
        "address": f"10.0.0.{number}:80",
        "pool": "p",
        "node": f"n{number}",
        "engine": "e",
        "memory_tokens": 400_000,
    }
    return WorkerSpec(**{**fields, **more})


def prefiller(number: int, **more: Any) -> WorkerSpec:
    return spec(number, role=WorkerRole.PREFILL, **more)


def core_of(*specs: WorkerSpec, policy: RoutingPolicy | None = None, seed: int = 1) -> RouterCore:
    core = RouterCore(policy or RoutingPolicy(), seed=seed)
    for each in specs:
        core.step(Joined(each), 0)
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


def answer(*matches: PrefixMatch, trust: PrefixTrust = PrefixTrust.EXACT) -> PrefixAnswer:
    return PrefixAnswer(trust, matches, 3)


def hbm(number: int, blocks: int, trust: PrefixTrust = PrefixTrust.EXACT) -> PrefixMatch:
    return PrefixMatch(f"n{number}", "e", 0, blocks, trust=trust)


def arrive(
    core: RouterCore, its: RouteRequest, prefix: PrefixAnswer | None = None, now_ns: int = S
) -> RouteCommand:
    """The command about this request."""
    commands = core.step(Arrived(its, prefix), now_ns)
    core.check()
    return next(c for c in commands if c.request_id == its.request_id)


def routed(command: RouteCommand) -> Routed:
    assert isinstance(command, Routed), command
    return command


def rejected(command: RouteCommand) -> Rejected:
    assert isinstance(command, Rejected), command
    return command

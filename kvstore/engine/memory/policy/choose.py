"""Policies by name, as configuration has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstore.engine.memory.policy.lru import Lru
from kvstore.engine.memory.policy.port import Members, Policy, Stamps
from kvstore.engine.memory.policy.reuse import Columns, Reuse
from kvstore.errors import ConfigError

MakePolicy = Callable[[Members, int], Policy]
"""Makes the policy of a pool from the mask of its members and its largest number of slots."""


def _lru(stamps: Stamps) -> MakePolicy:
    return lambda members, _: Lru(stamps, members=members)


def _reuse(stamps: Stamps) -> MakePolicy:
    columns = Columns(stamps)
    return lambda members, count: Reuse(columns, members=members, slot_count_max=count)


POLICIES: Final[dict[str, Callable[[Stamps], MakePolicy]]] = {"lru": _lru, "reuse": _reuse}


def maker(name: str, stamps: Stamps) -> MakePolicy:
    """Factory of policies for the pools of one arena, by the policy's name; they share `stamps`.
    Raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"no eviction policy is called {name!r}: use {' or '.join(POLICIES)}")
    return POLICIES[name](stamps)

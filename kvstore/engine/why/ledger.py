"""Sums over the requests that have ended: hits, misses by reason, and what loads saved.

    Story, rows of explain ──count──▶ Ledger ──▶ /metrics, `kvstore top`

A block of a prompt that is not in the engine's own cache is either a hit or a miss, with the reason
that explain gives for it. Blocks behind a gap miss for the reason of the gap. Bounded: NAMED_MAX
pairs of model and tenant, all later ones together. Does not cover: single requests (`explain`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from kvstore.engine.why.findings import TIERS, RangeReport
from kvstore.engine.why.reasons import CLASSES, Reason
from kvstore.wire.messages import Story

NAMED_MAX: Final = 32
OTHER: Final = ("other", "other")
_BEHIND: Final = (Reason.BEHIND_A_GAP, Reason.BEHIND_A_GAP_ON_DISK)


class Savings(msgspec.Struct):
    """Sums of one model and tenant."""

    prompt_tokens: int = 0
    loaded_tokens: int = 0
    saved_ns: int = 0
    """Estimated time to compute the loaded tokens."""
    waited_ns: int = 0
    """For lookups, for blocks from disk or other nodes, and for copies."""


class Ledger:
    """Sums of one node, since its start."""

    def __init__(self) -> None:
        self.hits = dict.fromkeys(TIERS.values(), 0)
        """Blocks by tier."""
        self.misses = dict.fromkeys(CLASSES.values(), 0)
        """Blocks by class of reasons."""
        self.accounts: dict[tuple[str, str], Savings] = {}
        """By (model, tenant)."""

    def count(self, name: tuple[str, str], story: Story, rows: Iterable[RangeReport]) -> None:
        """A request of this model and tenant ended, with these rows."""
        gap = CLASSES[Reason.NOT_REMEMBERED]
        for row in rows:
            if row.reason:
                gap = gap if row.reason in _BEHIND else CLASSES[row.reason]
                self.misses[gap] += row.blocks
            elif row.tier != "engine":
                self.hits[row.tier or "dram"] += row.blocks
        if name not in self.accounts and len(self.accounts) >= NAMED_MAX:
            name = OTHER
        its = self.accounts.setdefault(name, Savings())
        its.prompt_tokens += story.prompt_tokens
        its.loaded_tokens += story.loaded_tokens
        its.saved_ns += story.saved_ns
        its.waited_ns += story.lookup_ns + story.promotion_ns + story.load_ns

    def total(self) -> Savings:
        """All models and tenants together."""
        every = self.accounts.values()
        return Savings(*(sum(getattr(a, f) for a in every) for f in Savings.__struct_fields__))

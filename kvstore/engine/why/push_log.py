"""Pushes that have ended, by transfer: what moved, when each stage was reached, and why no more.

    asked ─▶ granted ─▶ first byte ─▶ last byte ─▶ verified and sealed

TRANSFERS_MAX transfers with PARTS_MAX pushes each; counts, times and names of nodes, no keys. Does
not cover: requests (`explain`), durations of all pushes (`kvstore.peers.stages`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from kvstore.engine.witness import PushReport

TRANSFERS_MAX: Final = 1024
PARTS_MAX: Final = 64
"""Pushes of one transfer: a group of a long prompt has several."""


class Staged(msgspec.Struct, frozen=True):
    """A stage of pushes from a peer that ends here: its duration, for metrics and warnings."""

    stage: Literal["push_seal", "push_token"]
    """From the word that blocks are there until they are sealed; from the end of the push until the
    first token of its request."""
    node: str
    took_ns: int
    size_bytes: int
    cause: int


class PushLog:
    """By (tenant, transfer), the oldest in front."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], list[PushReport]] = OrderedDict()

    def tell(self, tenant: str, transfer: str, report: PushReport) -> None:
        """A push has ended."""
        told = self._told.setdefault((tenant, transfer), [])
        if len(told) < PARTS_MAX:
            told.append(report)
        if len(self._told) > TRANSFERS_MAX:
            self._told.popitem(last=False)

    def of(self, tenant: str, transfer: str) -> tuple[PushReport, ...]:
        """Pushes of this transfer that are still remembered."""
        return tuple(self._told.get((tenant, transfer), ()))

    def check(self) -> None:
        """Raises AssertionError when a bound is broken. For tests."""
        assert len(self._told) <= TRANSFERS_MAX

"""Engines that this node does not serve, and why: an operator must see them.

Three kinds. An engine that reports that its ranks cannot be served, such as ones whose cache is on
a GPU (`Unserved`). One that this node refused (`owners.objection`), for as long as it asks again.
One whose scheduler is attached, but whose session does not open. Not among them: ranks without a
scheduler, which are an engine that is still starting.

Covers: the refusals that are kept, and the rows of the report. Does not cover: refusals before
there is an engine, such as of a uid (`kvstore.node.connection`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from kvstore.engine.sessions.owners import Owner, OwnerKey
from kvstore.units import NS_PER_S

FORMS_NS_MAX: Final = 30 * NS_PER_S
"""A session that has not opened this long after its scheduler attached will not open: ranks attach
before their scheduler does."""
REFUSED_NS_MAX: Final = 30 * NS_PER_S
"""A refusal is shown for this long: a refused engine asks again after 10 s, and one that did not is
gone."""
REFUSED_COUNT_MAX: Final = 64


class UnservedReport(msgspec.Struct, frozen=True):
    """An engine without a session."""

    engine: str
    tenant: str
    reason: str


class Refusals:
    """Engines that were refused lately; at most REFUSED_COUNT_MAX."""

    def __init__(self) -> None:
        self._last: dict[OwnerKey, tuple[str, int, bool]] = {}

    def add(self, owner: OwnerKey, reason: str, now_ns: int, *, is_full: bool = False) -> None:
        """Add a refusal, in place of an earlier one of this engine; the latest ones stay.
        `is_full`: the node had no room for it."""
        self._last.pop(owner, None)
        self._last[owner] = (reason, now_ns, is_full)
        if len(self._last) > REFUSED_COUNT_MAX:
            del self._last[next(iter(self._last))]

    def rows(self, now_ns: int, *, is_full: bool) -> list[UnservedReport]:
        """Rows of refused engines that may still be there. `is_full`: whether the node has no room
        now; if it has, refusals for want of room are left out."""
        return [
            UnservedReport(engine, tenant, f"refused: {reason}")
            for (tenant, engine, _), (reason, at_ns, was_full) in self._last.items()
            if now_ns - at_ns <= REFUSED_NS_MAX and (is_full or not was_full)
        ]


def unserved(
    owners: Iterable[Owner], refusals: Refusals, now_ns: int, *, is_full: bool
) -> list[UnservedReport]:
    """One row for each engine that is attached without being served, or was refused lately."""
    attached = [(owner, _reason(owner, now_ns)) for owner in owners]
    rows = [UnservedReport(each.title, each.key[0], reason) for each, reason in attached if reason]
    return rows + refusals.rows(now_ns, is_full=is_full)


def _reason(owner: Owner, now_ns: int) -> str:
    if owner.open_session:
        return ""
    if owner.unserved:
        return owner.unserved
    if owner.scheduler is None or now_ns - owner.waits_since_ns <= FORMS_NS_MAX:
        return ""
    if owner.is_complete:
        return "its ranks do not answer: one of them may be stopped"
    return f"{len(owner.ranks)} of its {owner.rank_count} ranks are attached"

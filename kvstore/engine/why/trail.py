"""The trail of blocks: what moves, lookups and tables report, in a bounded history.

    left ─▶ tombstones     looked up, grew ─▶ findings     asked, judged, fetched ─▶ searches
    pushes: asked ─▶ granted ─▶ first byte ─▶ last byte ─▶ verified and sealed ─▶ pushed

Rules. 1: calls that report return nothing, so that no move depends on them. 2: all is bounded:
FINDINGS_MAX lookups, PENDING_KEYS_MAX keys that wait to be examined, TRANSFERS_MAX transfers of
PARTS_MAX pushes, with counts, times and names of nodes only.
Does not cover: requests, and explanations from the trail (`explain`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from kvstore.engine.memory.table import Keys
from kvstore.engine.sessions.owners import Asker, Connection, OwnerKey
from kvstore.engine.why.findings import (
    NO_FLAGS,
    Finding,
    RangeReport,
    Searches,
    examine,
)
from kvstore.engine.why.reasons import Origins, PushReport, Reason, Tombstones, Wanted

if TYPE_CHECKING:
    from kvstore.engine.memory.residency import Run
    from kvstore.engine.state import State

FINDINGS_MAX: Final = 4096
PENDING_KEYS_MAX: Final = 1 << 16
LOOKS_PER_TICK: Final = 16_384
"""Looks at a key in a shard: some milliseconds of the loop."""
LOOKS_OF_ONE: Final = 256
"""Looks that a lookup is charged at least."""
TRANSFERS_MAX: Final = 1024
PARTS_MAX: Final = 64
"""Pushes of one transfer: a group of a long prompt has several."""


class Trail:
    """The trail of one node."""

    def __init__(self, *, block_count_max: int) -> None:
        self.tombstones = Tombstones(block_count_max=block_count_max)
        self.searches = Searches()
        self._findings: OrderedDict[tuple[int, int], Finding] = OrderedDict()
        """The latest lookups, by (session, lease)."""
        self._pending: deque[Finding] = deque()
        self._pending_keys = 0
        self._pushes: OrderedDict[tuple[str, str], list[PushReport]] = OrderedDict()
        """Pushes that have ended, by (tenant, transfer), the oldest in front."""

    # ── reports ──────────────────────────────────────────────────────────────────────────────────

    def looked_up(
        self,
        connection: Connection,
        lease: int,
        asker: Asker,
        run: Run,
        rest: Keys,
        origins: Origins | None,
        promoting: int,
        refused: int,
        wanted: Wanted,
        *,
        now_ns: int,
    ) -> None:
        """A LeaseAsk was answered.

        Args:
            connection: of its engine.
            lease: its number.
            asker: the group that it is for.
            run: blocks leased at once.
            rest: keys behind the run.
            origins: those of the run; None: all were in dram.
            promoting: leading blocks of the rest that are on their way.
            refused: leading blocks of the rest that are in dram and may not be pinned.
            wanted: the part of other nodes.
            now_ns: time of the lookup.
        """
        key, address = connection.owner.key, asker.address
        finding = Finding(key, address, asker.scopes, now_ns, promoting=promoting)
        finding.take(origins)
        finding.held, finding.refused = run.count, (0, refused)
        if len(rest):
            # Copies: they may be a few of a large message, all of which would be kept.
            finding.keys = rest.copy()
            # Flags: to keep the arrays would cost more than to make these.
            finding.present = run.rows_by_shard[0][run.count :] >= 0
            finding.in_dram = run.words_by_shard[0][run.count :] >= 0
        if wanted.number:
            # Other nodes are asked for what lies behind what comes from disk.
            finding.searched, place = self.searches.get(wanted.number, wanted.at)
            finding.search_begin = promoting - wanted.coming - place
        self._add(connection, lease, finding)

    def switched_off(
        self, connection: Connection, lease: int, asker: Asker, blocks: int, now_ns: int
    ) -> None:
        """A lookup of a space that is off was answered with nothing."""
        finding = Finding(connection.owner.key, asker.address, asker.scopes, now_ns)
        finding.rest = [RangeReport(0, blocks, "", Reason.SWITCHED_OFF)]
        self._add(connection, lease, finding)

    def _add(self, connection: Connection, lease: int, finding: Finding) -> None:
        """Keep a finding; the oldest one gives way. Its keys are queued to be examined."""
        self._findings[connection.owner.open_session, lease] = finding
        if len(self._findings) > FINDINGS_MAX:
            self._findings.popitem(last=False)
        if finding.keys is not None:
            count = len(finding.keys)
            if self._pending_keys + count > PENDING_KEYS_MAX:
                _close(finding, [RangeReport(0, count, "", Reason.UNEXAMINED)])
            else:
                self._pending_keys += count
                self._pending.append(finding)

    def grew(
        self, session: int, lease: int, run: Run, origins: Origins | None, refused: int
    ) -> None:
        """A lease grew by the blocks of `run`, which had been on their way; `refused` further ones
        could not be pinned."""
        finding = self._findings.get((session, lease))
        if finding is not None:
            finding.take(origins)
            finding.arrived += run.count
            finding.refused = (finding.arrived, refused)

    def pushed(self, tenant: str, transfer: str, report: PushReport) -> None:
        """A push of a transfer has ended."""
        told = self._pushes.setdefault((tenant, transfer), [])
        if len(told) < PARTS_MAX:
            told.append(report)
        if len(self._pushes) > TRANSFERS_MAX:
            self._pushes.popitem(last=False)

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────

    def finding(self, owner: OwnerKey, session: int, lease: int) -> Finding | None:
        """The finding of this engine's lookup, if it is still kept."""
        finding = self._findings.get((session, lease))
        return finding if finding is not None and finding.owner == owner else None

    def pushes(self, tenant: str, transfer: str) -> tuple[PushReport, ...]:
        """Ended pushes of this transfer that are still remembered."""
        return tuple(self._pushes.get((tenant, transfer), ()))

    def tick(self, state: State) -> None:
        """Examine some of the findings that wait."""
        budget = LOOKS_PER_TICK
        while self._pending and budget > 0:
            finding = self._pending.popleft()
            if finding.keys is not None:
                budget -= max(len(finding.keys) * len(finding.scopes), LOOKS_OF_ONE)
                self.examine(finding, state)

    def examine(self, finding: Finding, state: State) -> None:
        """Examine a finding now, unless that was done: on request, or in its turn."""
        if finding.keys is not None:
            self._pending_keys -= len(finding.keys)
            _close(finding, examine(state, finding, finding.keys))


def _close(finding: Finding, rest: list[RangeReport]) -> None:
    """Store the ranges of an examined finding and drop its keys."""
    finding.rest, finding.keys = rest, None
    finding.present = finding.in_dram = NO_FLAGS

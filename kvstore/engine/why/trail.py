"""The trail of blocks: the engine's witness (`Witness`), with a bounded history.

    left ─▶ tombstones     looked up, grew ─▶ findings     asked, judged, fetched ─▶ searches

Does not cover: requests, and explanations from the trail (`explain`).
"""

from __future__ import annotations

import numpy as np

from kvstore.engine.events import Fetched
from kvstore.engine.memory.policy.port import Words
from kvstore.engine.sessions.askers import Asker
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.why.findings import Brought, Finding, Findings, RangeReport
from kvstore.engine.why.push_log import PushLog
from kvstore.engine.why.reasons import Reason
from kvstore.engine.why.searches import SEARCHES_MAX, Searches
from kvstore.engine.why.tombstones import Tombstones
from kvstore.engine.witness import LookedUp, Origin, Origins


class Trail:
    """The trail of one node."""

    def __init__(self, *, block_count_max: int, word_count: int) -> None:
        self.tombstones = Tombstones(block_count_max=block_count_max)
        self.searches = Searches()
        self.findings = Findings()
        self.push_log = PushLog()
        self._search_of_word = np.zeros(word_count, dtype=np.int64)
        """Search that last brought a block into each slot."""
        self.left = self.tombstones.write
        self.asked = self.searches.asked
        self.judged = self.searches.judged
        self.fetching = self.searches.fetching
        self.pushed = self.push_log.tell

    def looked_up(self, found: LookedUp, now_ns: int) -> None:
        """See `Witness`."""
        run, rest = found.run, found.rest
        owner = found.connection.owner
        finding = Finding(owner, found.asker, now_ns, run.count, found.promoting)
        finding.refused = (0, found.refused)
        if run.count:
            words = run.words_by_shard[0][: run.count]
            finding.brought(0, self._brought(words, found.origins))
        if len(rest):
            # Copies: they may be a few of a large message, all of which would be kept.
            finding.keys = rest.copy()
            # Flags: to keep the arrays would cost more than to make these.
            finding.present = run.rows_by_shard[0][run.count :] >= 0
            finding.in_dram = run.words_by_shard[0][run.count :] >= 0
        if found.wanted.number:
            # Other nodes are asked for what lies behind what comes from disk.
            finding.searched, place = self.searches.get(found.wanted.number, found.wanted.at)
            finding.search_begin = found.promoting - found.wanted.coming - place
        self.findings.add(found.connection, found.lease, finding)

    def switched_off(
        self, connection: Connection, lease: int, asker: Asker, blocks: int, now_ns: int
    ) -> None:
        """See `Witness`."""
        finding = Finding(connection.owner, asker, now_ns)
        finding.rest = [RangeReport(0, blocks, "", Reason.SWITCHED_OFF)]
        self.findings.add(connection, lease, finding)

    def grew(
        self, session: int, lease: int, words: Words, origins: Origins | None, refused: int
    ) -> None:
        """See `Witness`."""
        finding = self.findings.latest(session, lease)
        if finding is not None:
            finding.brought(finding.held + finding.arrived, self._brought(words, origins))
            finding.arrived += len(words)
            finding.refused = (finding.arrived, refused)

    def _brought(self, words: Words, origins: Origins | None) -> Brought | None:
        if origins is None:
            return None
        return Brought(origins, np.where(origins == Origin.PEER, self._search_of_word[words], 0))

    def fetched(
        self, event: Fetched, words: Words, good: int, *, is_void: bool, now_ns: int
    ) -> None:
        """See `Witness`."""
        number = self.searches.fetched(event, good, is_void=is_void, now_ns=now_ns)
        self._search_of_word[words] = number

    def landed(self, words: Words) -> None:
        """See `Witness`."""
        self._search_of_word[words] = 0

    def check(self) -> None:
        """Raises AssertionError when a bound is broken. For tests."""
        self.findings.check()
        self.push_log.check()
        assert len(self.searches) <= SEARCHES_MAX

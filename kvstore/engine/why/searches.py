"""Searches of other nodes for blocks: one record for each query to the index.

    asked ─▶ no node, too dear, avoided, no room ─── or on its way ─▶ fetched, or failed

Lookups that wait for the same blocks share the record, and so do those that would have asked again.
The newest SEARCHES_MAX are kept, with counts, times and the names of nodes, no keys. Does not
cover: decisions (`moves.fetches`), the blocks of a lookup that a search is about (`findings`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore.engine.events import Candidate, Fetched
from kvstore.engine.why.reasons import Reason

SEARCHES_MAX: Final = 4096


class Search(msgspec.Struct):
    """One query to the index, and the results of its fetches."""

    number: int
    asked: int
    """Number of blocks in the query."""
    sought: Reason
    node: str = ""
    """Node that was chosen; if none was, the one that was too slow or in back-off."""
    known: int = 0
    """Leading blocks that the node has, by the index."""
    wanted: int = 0
    """Number of blocks for whose fetch there was room."""
    missing: int = 0
    """Known blocks that were not here when the index answered."""
    fetched: int = 0
    not_served: int = 0
    not_kept: int = 0
    damaged: int = 0
    is_void: bool = False
    """Cleared or switched off here while the blocks were on their way."""
    trouble: str = ""
    """Last failure, as the shell reported it."""
    failures: int = 0
    """Failures of the node in a row, when it was avoided."""
    fetch_ns: int = 0
    """Estimated time to fetch, as against `compute_ns` to compute, if computing was as quick."""
    compute_ns: int = 0
    begun_ns: int = 0
    ended_ns: int = 0
    under_way: int = 0
    """Number of fetches under way."""

    @property
    def is_late(self) -> bool:
        """Whether the fetched blocks come, or came, after the request had stopped waiting."""
        return self.sought is Reason.ON_ITS_WAY or (
            self.sought is Reason.FETCHED and self.wanted == self.missing
        )


class Searches:
    """Searches by the number of their query, and by the number of each fetch that followed from
    it."""

    def __init__(self) -> None:
        self._by_number: OrderedDict[int, tuple[Search, Sequence[int]]] = OrderedDict()
        """(search, place in the question of each key of this question or fetch)."""

    def __len__(self) -> int:
        return len(self._by_number)

    def get(self, number: int, at: int = 0) -> tuple[Search | None, int]:
        """The search with this number of a query or fetch, and the place in the query of key number
        `at`; (None, 0) if the search is not kept any more."""
        search, places = self._by_number.get(number, (None, ()))
        return search, int(places[at]) if search is not None else 0

    def _keep(self, number: int, search: Search, places: Sequence[int]) -> None:
        self._by_number[number] = search, places
        if len(self._by_number) > SEARCHES_MAX:
            self._by_number.popitem(last=False)

    def asked(self, question: int, blocks: int, why: Reason) -> None:
        """Record a query about this many blocks. `why`: NO_ANSWER_YET, or the reason why the index
        was not asked."""
        self._keep(question, Search(question, blocks, why), range(blocks))

    def judged(
        self, question: int, why: Reason, candidate: Candidate | None = None, *figures: float
    ) -> None:
        """Record the result of a query, or of one candidate in its answer. Among several nodes the
        one that was chosen last counts, else the one that was too slow for most blocks, else the
        first that was in back-off.

        Args:
            question: number of the query.
            why: the result.
            candidate: the node; None: the result concerns all of them.
            figures: failures of the node in a row; or estimated times in ns for fetching and for
                computing a block; or blocks to be fetched, without a candidate.
        """
        search, _ = self.get(question)
        if search is None:
            return
        if candidate is None:
            search.sought, search.missing = why, int(sum(figures))
            return
        known = min(candidate.blocks, search.asked)
        if why is Reason.NODE_AVOIDED and search.sought is not Reason.NOBODY_HAS_IT:
            return
        if why is Reason.FETCH_COST:
            if search.sought is Reason.HERE_BY_NOW or (search.fetch_ns and search.known >= known):
                return
            search.fetch_ns, search.compute_ns = (int(cost * known) for cost in figures)
        search.sought, search.node = why, candidate.node
        search.known, search.failures = known, int(figures[0]) if figures else 0

    def fetching(self, question: int, job: int, places: Sequence[int], now_ns: int) -> None:
        """A fetch began, of the blocks at these places of a question."""
        search, _ = self.get(question)
        if search is not None:
            search.sought, search.begun_ns = Reason.ON_ITS_WAY, search.begun_ns or now_ns
            search.wanted += len(places)
            search.under_way += 1
            self._keep(job, search, places)

    def fetched(self, event: Fetched, good: int, *, is_void: bool, now_ns: int) -> None:
        """A fetch ended with `good` good blocks. `is_void`: they were cleared or switched off
        meanwhile."""
        search, places = self._by_number.get(event.job, (None, ()))
        if search is None:
            return  # it is not kept any more
        self._by_number[event.job] = search, [int(places[0])]
        search.fetched += good
        search.not_served += event.not_served
        search.not_kept += event.not_kept
        search.damaged += event.damaged
        search.trouble = event.trouble or search.trouble
        search.is_void |= is_void
        search.under_way -= 1
        search.ended_ns = now_ns
        if not search.under_way:
            is_whole = search.fetched == search.wanted
            search.sought = Reason.FETCHED if is_whole else Reason.FETCH_FAILED

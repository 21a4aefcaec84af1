"""The witness of moving blocks: codes and counts, for `why` to explain afterwards.

Calls return nothing, so no move depends on a witness. Does not cover: the records (`why.trail`),
counters.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.engine.events import Candidate, Fetched
from kvstore.engine.memory.policy.port import Words
from kvstore.engine.memory.table import Keys
from kvstore.engine.why.reasons import Reason

if TYPE_CHECKING:
    from kvstore.engine.sessions.askers import Asker
    from kvstore.engine.sessions.owners import Connection
    from kvstore.engine.sessions.runs import Run


class Origin(enum.IntEnum):
    """Place of a leased block when it was asked for."""

    DRAM = 0
    FILE = 1
    PEER = 2


Origins = NDArray[np.uint8]
"""An `Origin` per block."""


class Wanted(NamedTuple):
    """Blocks from other nodes that a lookup may wait for, and why no more."""

    coming: int = 0
    """Leading blocks that are on their way, or may be."""
    number: int = 0
    """Number of the question or fetch that brings them or did not; 0: other nodes play no part."""
    at: int = 0
    """Place of the lookup's first block among the keys of that question or fetch."""


class LookedUp(NamedTuple):
    """One LeaseAsk, and the parts of its answer."""

    connection: Connection
    lease: int
    asker: Asker
    run: Run
    """Blocks leased at once."""
    origins: Origins | None
    """Origins of these; None: all were in dram."""
    rest: Keys
    """Keys behind the run."""
    promoting: int
    """Leading blocks of the rest that are on their way."""
    refused: int
    """Leading blocks of the rest that are in dram and may not be pinned."""
    wanted: Wanted


class Witness(Protocol):
    """Port for reports of moves and lookups."""

    def left(self, scopes: NDArray[np.uint32], keys: Keys, stamp: int) -> None:
        """Blocks left their last tier; the stamp says why."""
        ...

    def looked_up(self, found: LookedUp, now_ns: int) -> None:
        """A lookup was answered."""
        ...

    def switched_off(
        self, connection: Connection, lease: int, asker: Asker, blocks: int, now_ns: int
    ) -> None:
        """A lookup of a space that is off was answered with nothing."""
        ...

    def grew(
        self, session: int, lease: int, words: Words, origins: Origins | None, refused: int
    ) -> None:
        """A lease grew by blocks that were on their way, in these slots of the first shard; so many
        more could not be pinned."""
        ...

    def asked(self, question: int, blocks: int, why: Reason) -> None:
        """The index was asked for locations of blocks, or why it was not."""
        ...

    def judged(
        self, question: int, why: Reason, candidate: Candidate | None = None, *figures: float
    ) -> None:
        """Result of a question, or of one candidate of its answer.

        Args:
            question: its number.
            why: the result.
            candidate: the node; None: the result concerns all of them.
            figures: failures of the node in a row; or estimated times in ns for fetching and for
                computing a block; or blocks to be fetched, without a candidate.
        """
        ...

    def fetching(self, question: int, job: int, places: Sequence[int], now_ns: int) -> None:
        """A fetch began, of the blocks at these places of a question."""
        ...

    def fetched(
        self, event: Fetched, words: Words, good: int, *, is_void: bool, now_ns: int
    ) -> None:
        """A fetch ended with so many good blocks, some in these slots. `is_void`: cleared or
        switched off meanwhile."""
        ...

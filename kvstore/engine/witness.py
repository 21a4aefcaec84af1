"""What is told of blocks while they move, for `why` to explain afterwards: codes and counts.

Nothing is answered, so no move depends on what is listened to. Does not cover: what is made of it
(`why.trail`), counters.
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
    """Where a leased block was when it was asked for."""

    DRAM = 0
    FILE = 1
    PEER = 2


Origins = NDArray[np.uint8]
"""An `Origin` per block."""


class Wanted(NamedTuple):
    """What a lookup may wait for from other nodes, and why no more."""

    coming: int = 0
    """Leading blocks that are on their way, or may be."""
    number: int = 0
    """Of the question, or the fetch, that brings them or did not; 0: other nodes play no part."""
    at: int = 0
    """Place of the lookup's first block among its keys."""


class LookedUp(NamedTuple):
    """One LeaseAsk, and what its answer was made of."""

    connection: Connection
    lease: int
    asker: Asker
    run: Run
    """Leased at once."""
    origins: Origins | None
    """Of these; None: all were in dram."""
    rest: Keys
    """What was asked for besides."""
    promoting: int
    """Of the rest, on their way."""
    refused: int
    """Of the rest, in dram and not to be pinned."""
    wanted: Wanted


class Witness(Protocol):
    """Listens."""

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
        """A lease got blocks that were on their way, in these slots of the first shard; so many
        more could not be pinned."""
        ...

    def asked(self, question: int, blocks: int, why: Reason) -> None:
        """The index was asked where blocks are, or why it was not."""
        ...

    def judged(
        self, question: int, why: Reason, candidate: Candidate | None = None, *figures: float
    ) -> None:
        """What became of a question, or of one candidate of its answer.

        Args:
            question: its number.
            why: what became of it.
            candidate: the node; None: it is about all of them.
            figures: failures of the node in a row; or what fetching a block and computing it cost
                in ns, as estimated; or blocks to be fetched, if it is about none.
        """
        ...

    def fetching(self, question: int, job: int, places: Sequence[int], now_ns: int) -> None:
        """A fetch began, of the blocks at these places of a question."""
        ...

    def fetched(
        self, event: Fetched, words: Words, good: int, *, is_void: bool, now_ns: int
    ) -> None:
        """It ended with so many good blocks, some in these slots. `is_void`: cleared or switched
        off meanwhile."""
        ...

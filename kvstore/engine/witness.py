"""The witness of moving blocks: codes and counts, for `why` to explain afterwards.

Calls return nothing, so no move depends on a witness. Does not cover: the records (`why.trail`),
counters.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.events import Candidate, Fetched
from kvstore.engine.memory.policy.port import Words
from kvstore.engine.memory.table import Keys
from kvstore.engine.why.reasons import Reason
from kvstore.units import NS_PER_US

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


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of a request that were pushed here (`decode`), or from here for a grant (`prefill`).
    Times are since they were asked for; 0: never."""

    side: str
    node: str
    """The other one."""
    group: int = 0
    first_block: int = 0
    """Number in the prompt (decode) or in the grant (prefill) of the first one."""
    blocks: int
    held: int = 0
    """Blocks of these that were here before."""
    pushed: int
    reason: str
    """Why not all of the rest; empty: all came."""
    granted_us: int = 0
    first_us: int = 0
    last_us: int = 0
    sealed_us: int = 0
    ended_us: int = 0


class PushTimes(msgspec.Struct):
    """When a push reached its stages, on the node's clock; 0: not yet."""

    since_ns: int
    granted_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    sealed_ns: int = 0

    def moved(self, now_ns: int) -> None:
        """Bytes have come, or were written."""
        self.first_ns, self.last_ns = self.first_ns or now_ns, now_ns

    def as_us(self, now_ns: int) -> dict[str, int]:
        """Times for a report made now. A stage of the step that asked counts as 1 µs."""
        reached = {f.removesuffix("_ns"): getattr(self, f) for f in self.__struct_fields__[1:]}
        reached["ended"] = now_ns
        return {
            f"{name}_us": max(1, (at_ns - self.since_ns) // NS_PER_US) if at_ns else 0
            for name, at_ns in reached.items()
        }


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

    def landed(self, words: Words) -> None:
        """Another node pushed blocks into these slots of the first shard."""
        ...

    def pushed(self, tenant: str, transfer: str, report: PushReport) -> None:
        """A push of a transfer has ended."""
        ...

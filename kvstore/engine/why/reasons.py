"""Why a block is not here, was not loaded, or did not come: reasons, tombstones that keep them,
searches of other nodes, and the values that moves and lookups report to the trail.

Does not cover: words for scripts and whole texts (`kvstore.obs.reasons`), results of lookups
(`findings`).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policies import prints
from kvstore.engine.memory.table import Keys
from kvstore.units import NS_PER_MS, NS_PER_US
from kvstore.wire.messages import Story

if TYPE_CHECKING:
    from kvstore.engine.events import Candidate, Fetched
    from kvstore.engine.why.explain import RequestReport
    from kvstore.engine.why.findings import RangeReport


class Reason(enum.IntEnum):
    """Reason of a range of blocks, of a request, or of a question to the index: its number, and the
    sentence for people, which nothing here reads.

    Numbers never change: rows cross from a node to a command of another version. Those of
    departures fit the byte that a tombstone has for them. In a sentence, {name} is an engine or a
    space, {node} another node, and other braces are numbers. docs/reference/reasons.md lists them
    in this order.
    """

    text: str

    def __new__(cls, number: int, text: str = "") -> Self:
        made = int.__new__(cls, number)
        made._value_, made.text = number, text
        return made

    NONE = 0

    # A block left its last tier.
    EVICTED_FOR_STORES = 1, "evicted from dram to make room for stores of {name}"
    EVICTED_FOR_READS = 2, "evicted from dram to make room for blocks {name} read from disk"
    RECLAIMED = 3, "its segment on disk, the oldest, was reclaimed"
    CROWDED_OUT = 4, "dropped from disk because the node's table was full"
    CLEARED = 5, "cleared"
    FAILED_CHECK = 6, "dropped because its bytes in dram failed their checksum"
    FILE_LOST = 7, "its record on disk was damaged or is gone"
    FAILED_SCRUB = 8, "dropped because the scrub found its bytes in dram changed"
    DIVERGED = 9, "dropped when its space was switched off by a shadow check"

    # A lookup did not find it, or not all of it.
    NEVER_STORED = 20, "never stored since the node started"
    FORGOTTEN = 21, "never stored, or no longer remembered"
    UNEXAMINED = 22, "not held; no reason recorded, since too many lookups ran at once"
    TOO_MIXED = 23, "too many different reasons to list"
    RESET = 38, "stored before the engine's cache was reset; held in space {name}"
    OTHER_SPACE = 24, "held in space {name} only: another model, other weights or settings"
    NOT_ALL_SHARDS = 25, "shards of some ranks are missing"
    BEHIND_A_GAP = 26, "held, but an earlier block of the prompt was missing"
    BEHIND_A_GAP_ON_DISK = 27, "on disk, but an earlier block of the prompt was missing"
    NOT_READ = 28, "on disk; dram had no room to read it into"
    PROMOTION_DEADLINE = 29, "on disk; not read within {waited}"
    PROMOTION_COST = 30, "on disk; computing it was estimated to be faster"
    PINNED_SHARE_USED_UP = 31, "held, but the engine's limit of pinned dram was reached"
    SWITCHED_OFF = 32, "its space is switched off (shadow check) until kvstore clear --space"
    TOO_LATE = 33, "fetched, but after the request had stopped waiting"
    WAIT_COST = 39, "fetched; computing it was estimated to be faster than waiting for it"
    BEYOND_THE_QUESTION = 34, "beyond the number of blocks that one lookup covers"
    NOT_REMEMBERED = 35, "the result of the lookup is no longer recorded"
    NOT_NEEDED = 36, "held, but the engine took fewer blocks"
    NOT_PUSHED = 37, "not pushed by node {node}: {name}"

    # The engine decided: see `reason_of`.
    NODE_UNREACHABLE = 50, "the node was unreachable: stopped, restarting, or not attached yet"
    BREAKER_OPEN = 51, "the engine's circuit breaker was open after several failures"
    COST_GATE = 52, "too few tokens to be worth a load (min_load_tokens)"
    NO_FULL_BLOCK = 53, "the prompt has no full block"
    OWN_CACHE = 64, "nothing to load: the engine's own cache had it"
    NOT_STORED = 54, "the node did not hold the first block asked for"
    DEADLINE = 55, "the node's answer took longer than lookup_deadline_ms"
    LOAD_FAILED = 56, "the load failed and the rest was computed"
    SHADOW_CHECK = 57, "a hit, recomputed to compare it with the cache (shadow_every)"
    ADAPTER = 58, "the adapter's files are unreadable or have changed: see the engine's log"
    IMAGE_UUID = 59, "an image has a uuid from the client instead of a hash of its content"
    IMAGES_OFF = 60, "requests with images are neither stored nor loaded (images: none)"
    NOT_ASKED = 61, "no lookup: the request ended early, or may not read caches"
    OTHER_VERSION = 62, "unknown reason: the engine has another version"
    GROUP_NOT_STORED = 63, "not all KV cache groups had the blocks that a longer hit needs"

    # What became of asking other nodes.
    NO_ANSWER_YET = 80, "the index had not yet named other nodes that hold it"
    INDEX_UNREACHABLE = 81, "other nodes unknown: the index is unreachable"
    TOO_MANY_QUESTIONS = 82, "other nodes not queried: too many queries at once"
    NOBODY_HAS_IT = 83, "no other node is known to hold it"
    HERE_BY_NOW = 84, "already here when node {node} could have served it"
    FETCH_COST = (
        85,
        (
            "node {node} holds {known} blocks: fetching was estimated at {fetching}, computing at"
            " {computing}; a fetch must take at most half of that"
        ),
    )
    NODE_AVOIDED = 86, "node {node} holds it; not fetched after {failures} failures in a row"
    NO_ROOM = 87, "node {node} holds it; dram had no room for fetched blocks"
    ON_ITS_WAY = 88, "{fetched} of {wanted} blocks came from node {node} before the wait ended"
    FETCHED = 89, "{fetched} of {wanted} blocks came from node {node} in {took}"
    FETCH_FAILED = 90, "fetch from node {node} failed after {took}: {fetched} of {wanted} came"


_CLASSES: Final = {
    "never-stored": "NEVER_STORED FORGOTTEN NOT_STORED",
    "evicted": "EVICTED_FOR_STORES EVICTED_FOR_READS RECLAIMED CROWDED_OUT",
    "cleared": "CLEARED RESET",
    "damaged": "FAILED_CHECK FILE_LOST FAILED_SCRUB LOAD_FAILED",
    "other-identity": "OTHER_SPACE NOT_ALL_SHARDS GROUP_NOT_STORED ADAPTER IMAGE_UUID",
    "too-late": "NOT_READ PROMOTION_DEADLINE TOO_LATE DEADLINE NO_ANSWER_YET ON_ITS_WAY NOT_PUSHED",
    "too-dear": "PROMOTION_COST COST_GATE FETCH_COST WAIT_COST",
    "no-room": "PINNED_SHARE_USED_UP TOO_MANY_QUESTIONS NO_ROOM",
    "unreachable": "NODE_UNREACHABLE BREAKER_OPEN INDEX_UNREACHABLE NODE_AVOIDED FETCH_FAILED",
    "switched-off": "DIVERGED SWITCHED_OFF SHADOW_CHECK IMAGES_OFF",
}
OTHER_CLASS: Final = "other"
"""Not asked for, not needed, or not recorded."""
CLASSES: Final = dict.fromkeys(Reason, OTHER_CLASS) | {
    Reason[name]: its for its, names in _CLASSES.items() for name in names.split()
}
"""Reason → class, the label of misses in metrics."""

_OF_ENGINES: Final = {
    reason.name.lower().replace("_", " "): reason
    for reason in Reason
    if Reason.NODE_UNREACHABLE <= reason < Reason.NO_ANSWER_YET
    or reason in (Reason.PINNED_SHARE_USED_UP, Reason.PROMOTION_DEADLINE)
} | {"": Reason.NONE}


def reason_of(outcome: str) -> Reason:
    """Reason for an engine's `Story.outcome`, which says why no blocks, or no more, were loaded."""
    return _OF_ENGINES.get(outcome, Reason.OTHER_VERSION)


# ── tombstones ────────────────────────────────────────────────────────────────────────────────────
# Tombstones of blocks that left: why, when, and for which engine. Bounded; newest wins.
#
#     block ── leaves its last tier ──▶ one entry of 16 bytes at a place given by its print
#
# One flat array. If the prints of two blocks lead to one place, the later block stays, so a block
# that is not found here was never stored or left too long ago. A print is 64 bits of scope and key:
# a tombstone may, very rarely, be another block's. This affects explanations, never bytes. Does not
# cover: blocks that a tier still holds (`residency`), use by lookups (`findings`).

COUNT_MAX: Final = 1 << 20
"""Most entries; 16 MiB."""
NAMES_MAX: Final = 4096
NAME_SHIFT: Final = 8
TIME_SHIFT: Final = 24

Stamps = NDArray[np.uint64]
"""Packed: time in ms from bit TIME_SHIFT on, number of a name from bit NAME_SHIFT on, reason.
0: not known."""


class Names:
    """Short texts by number; 0 is the empty text, and any new text when all numbers are taken."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}

    def number(self, name: str) -> int:
        """Number of this text, a new one for a new text."""
        if len(self._numbers) < NAMES_MAX:
            self._numbers.setdefault(name, len(self._numbers))
        return self._numbers.get(name, 0)

    def text(self, number: int) -> str:
        return list(self._numbers)[number]


def stamp(why: Reason, name: int, now_ns: int) -> int:
    """Packed stamp of a reason, a name's number and a time; never 0."""
    assert 0 <= name < NAMES_MAX
    return now_ns // NS_PER_MS << TIME_SHIFT | name << NAME_SHIFT | why


def restamp(packed: int, why: Reason) -> int:
    """`packed` with another reason, without a name; 0 stays 0."""
    return packed >> TIME_SHIFT << TIME_SHIFT | why if packed else 0


class Tombstones:
    """Stamps of the blocks that left one node, by scope and key."""

    def __init__(self, *, block_count_max: int) -> None:
        size = min(COUNT_MAX, 1 << max(4, (block_count_max - 1).bit_length()))
        self._mask = np.uint64(size - 1)
        # Print and stamp side by side: one cache line a block.
        self._entries = np.zeros((size, 2), dtype=np.uint64)
        self.has_overwritten = False
        """Whether any entry gave way to another block's."""

    def write(self, scopes: NDArray[np.uint32], keys: Keys, packed: int) -> None:
        """Record that these blocks left, all with one stamp."""
        its = prints(scopes, keys)
        places = (its & self._mask).astype(np.int64)
        if not self.has_overwritten:
            old = self._entries[places]
            self.has_overwritten = bool(((old[:, 1] != 0) & (old[:, 0] != its)).any())
        self._entries[places, 0] = its
        self._entries[places, 1] = packed
        if not self.has_overwritten:  # by another one of these
            self.has_overwritten = bool((self._entries[places, 0] != its).any())

    def find(self, scope: int, keys: Keys) -> Stamps:
        """Stamp of each key, 0 where none is known."""
        its = prints(scope, keys)
        entries = self._entries[(its & self._mask).astype(np.int64)]
        return np.where(entries[:, 0] == its, entries[:, 1], np.uint64(0))


# ── searches ──────────────────────────────────────────────────────────────────────────────────────
# Searches of other nodes for blocks: one record for each query to the index.
#
#     asked ─▶ no node, too dear, avoided, no room ─── or on its way ─▶ fetched, or failed
#
# Lookups that wait for the same blocks share the record, and so do those that would have asked
# again. It has counts, times and the names of nodes, no keys. Does not cover: decisions
# (`moves.fetches`), the blocks that a search is about, which searches are kept (`findings`).


class Search(msgspec.Struct):
    """One query to the index, and the results of its fetches."""

    number: int
    asked: int
    """Number of blocks in the query."""
    sought: Reason
    """Result so far; at first NO_ANSWER_YET, or why the index was not asked."""
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

    def judged(self, why: Reason, candidate: Candidate | None = None, *figures: float) -> None:
        """Record the result of the query, or of one candidate in its answer. Among several nodes
        the one that was chosen last counts, else the one that was too slow for most blocks, else
        the first that was in back-off.

        Args:
            why: the result.
            candidate: the node; None: the result concerns all of them.
            figures: failures of the node in a row; or estimated times in ns for fetching and for
                computing a block; or blocks to be fetched, without a candidate.
        """
        if candidate is None:
            self.sought, self.missing = why, int(sum(figures))
            return
        known = min(candidate.blocks, self.asked)
        if why is Reason.NODE_AVOIDED and self.sought is not Reason.NOBODY_HAS_IT:
            return
        if why is Reason.FETCH_COST:
            if self.sought is Reason.HERE_BY_NOW or (self.fetch_ns and self.known >= known):
                return
            self.fetch_ns, self.compute_ns = (int(cost * known) for cost in figures)
        self.sought, self.node = why, candidate.node
        self.known, self.failures = known, int(figures[0]) if figures else 0

    def fetching(self, blocks: int, now_ns: int) -> None:
        """A fetch of blocks of the query began."""
        self.sought, self.begun_ns = Reason.ON_ITS_WAY, self.begun_ns or now_ns
        self.wanted += blocks
        self.under_way += 1

    def fetch_ended(self, event: Fetched, good: int, *, is_void: bool, now_ns: int) -> None:
        """A fetch ended with `good` good blocks. `is_void`: they were cleared or switched off
        meanwhile."""
        self.fetched += good
        self.not_served += event.not_served
        self.not_kept += event.not_kept
        self.damaged += event.damaged
        self.trouble = event.trouble or self.trouble
        self.is_void |= is_void
        self.under_way -= 1
        self.ended_ns = now_ns
        if not self.under_way:
            is_whole = self.fetched == self.wanted
            self.sought = Reason.FETCHED if is_whole else Reason.FETCH_FAILED


# ── reports ───────────────────────────────────────────────────────────────────────────────────────

Origins = NDArray[np.int64]
"""Where each leased block was when it was asked for: FROM_DRAM, FROM_DISK, PUSHED_HERE, or, on
another node, the number of the search that led to it."""
FROM_DRAM: Final = 0
FROM_DISK: Final = -1
PUSHED_HERE: Final = -2


class Wanted(NamedTuple):
    """Result of asking other nodes for blocks of a lookup: how many may come, and by which
    query."""

    coming: int = 0
    """Number of leading blocks that are on their way from other nodes, or may be."""
    search: Search | None = None
    """The search that brings these blocks, or that brought none; None: other nodes were not
    asked."""
    at: int = 0
    """Place of the lookup's first key among the keys of that search."""


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """One push of a request's blocks, to this node (`side` decode) or from it for a grant (`side`
    prefill). Times are in µs since the blocks were asked for; 0: never."""

    side: str
    node: str
    """The node at the other end."""
    group: int = 0
    first_block: int = 0
    """Number of the first block, in the prompt (decode) or in the grant (prefill)."""
    blocks: int
    held: int = 0
    """Blocks of these that were here before."""
    pushed: int
    reason: str
    """Why the rest of the blocks did not come; empty: all came."""
    granted_us: int = 0
    first_us: int = 0
    last_us: int = 0
    sealed_us: int = 0
    ended_us: int = 0


PUSH_STAGES: Final = ("granted", "first", "last", "sealed", "ended")


class PushTimes(msgspec.Struct):
    """When a push reached its stages, on the node's clock; 0: not yet."""

    since_ns: int
    granted_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    sealed_ns: int = 0

    def moved(self, now_ns: int) -> None:
        """Note that bytes came, or were written, at this time."""
        self.first_ns, self.last_ns = self.first_ns or now_ns, now_ns

    def as_us(self, now_ns: int) -> dict[str, int]:
        """Fields of a PushReport made now: name of each time, in µs since `since_ns`. A stage
        reached in the step that asked counts as 1 µs, because 0 means never."""
        since_ns, *reached = msgspec.structs.astuple(self)
        return {
            f"{name}_us": max(1, (at_ns - since_ns) // NS_PER_US) if at_ns else 0
            for name, at_ns in zip(PUSH_STAGES, (*reached, now_ns), strict=True)
        }


class StoryTold(msgspec.Struct, frozen=True):
    """A request ended, for traces. Only if EngineConfig.tell_stories."""

    row: RequestReport
    ranges: tuple[RangeReport, ...]
    story: Story
    ended_ns: int
    """When the request ended, on the node's clock."""
    block_bytes: int
    """Size of a block of the first KV cache group, all shards together; 0: not known."""


class Staged(msgspec.Struct, frozen=True):
    """Duration of a stage of pushes from a peer, for metrics and warnings; the stage has ended."""

    stage: Literal["push_seal", "push_token"]
    """push_seal: from the message that blocks are there until they are sealed. push_token: from the
    end of the push until the first token of its request."""
    node: str
    took_ns: int
    size_bytes: int

"""Why a block is not here, was not loaded, or did not come: codes, for rows and tombstones.

Numbers never change: rows cross from a node to a command of another version. Those of departures
fit the byte that a tombstone has for them. Does not cover: their texts (`kvstore.obs.reasons`).
"""

from __future__ import annotations

import enum
from typing import Final


class Reason(enum.IntEnum):
    """Reason of a range of blocks, of a request, or of a question to the index."""

    NONE = 0

    # A block left its last tier.
    EVICTED_FOR_STORES = 1
    EVICTED_FOR_READS = 2
    RECLAIMED = 3
    CROWDED_OUT = 4
    CLEARED = 5
    FAILED_CHECK = 6
    FILE_LOST = 7
    FAILED_SCRUB = 8
    DIVERGED = 9

    # A lookup did not find it, or not all of it.
    NEVER_STORED = 20
    FORGOTTEN = 21
    UNEXAMINED = 22
    TOO_MIXED = 23
    OTHER_SPACE = 24
    NOT_ALL_SHARDS = 25
    BEHIND_A_GAP = 26
    BEHIND_A_GAP_ON_DISK = 27
    NOT_READ = 28
    PROMOTION_DEADLINE = 29
    PROMOTION_COST = 30
    PINNED_SHARE_USED_UP = 31
    SWITCHED_OFF = 32
    TOO_LATE = 33
    BEYOND_THE_QUESTION = 34
    NOT_REMEMBERED = 35
    NOT_NEEDED = 36
    NOT_PUSHED = 37
    RESET = 38
    WAIT_COST = 39

    # The engine decided: see `reason_of`.
    NODE_UNREACHABLE = 50
    BREAKER_OPEN = 51
    COST_GATE = 52
    NO_FULL_BLOCK = 53
    NOT_STORED = 54
    DEADLINE = 55
    LOAD_FAILED = 56
    SHADOW_CHECK = 57
    ADAPTER = 58
    IMAGE_UUID = 59
    IMAGES_OFF = 60
    NOT_ASKED = 61
    OTHER_VERSION = 62
    GROUP_NOT_STORED = 63
    OWN_CACHE = 64

    # What became of asking other nodes.
    NO_ANSWER_YET = 80
    INDEX_UNREACHABLE = 81
    TOO_MANY_QUESTIONS = 82
    NOBODY_HAS_IT = 83
    HERE_BY_NOW = 84
    FETCH_COST = 85
    NODE_AVOIDED = 86
    NO_ROOM = 87
    ON_ITS_WAY = 88
    FETCHED = 89
    FETCH_FAILED = 90


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

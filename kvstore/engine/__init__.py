"""The pure engine of a node: events in, commands out.

| room        | cares about                                       | in → out                    |
|-------------|---------------------------------------------------|-----------------------------|
| `engine`    | dispatch, operations on all blocks                | events → commands           |
| `events`    | the values that go in and come out                | –                           |
| `agenda`    | what is looked at when: by time, by name          | –                           |
| `state`     | tables that the rooms share, counts for /metrics | –                       |
| `memory/`   | slots, tiers of each block, eviction              | transitions → states        |
| `sessions/` | attached engines, their lookups and leases        | Hellos, asks → replies      |
| `moves/`    | blocks that come to dram and leave it             | seals, ends → reads, writes |
| `trust`     | scrubs, and spaces that are switched off          | findings → counts, off, on  |
| `why/`      | results of lookups, stories, snapshots            | engine → rows               |

Other packages import only names of this module and of `events`, by a contract of pyproject.toml.

A new policy goes into `memory/policies.py`; a new message is dispatched in `engine.py`.
"""

# Loaded when they are asked for: `kvstore explain` needs rows of the engine and not the engine.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore.engine.engine import (
        CLEAR_ROWS_MAX as CLEAR_ROWS_MAX,
        Engine as Engine,
        EngineConfig as EngineConfig,
    )
    from kvstore.engine.memory.journal import (
        LAYOUT_VERSION as LAYOUT_VERSION,
        UNREADABLE as UNREADABLE,
        Journal as Journal,
        JournalUnusable as JournalUnusable,
    )
    from kvstore.engine.memory.policies import POLICIES as POLICIES
    from kvstore.engine.sessions.owners import (
        OwnerKey as OwnerKey,
        UnservedReport as UnservedReport,
    )
    from kvstore.engine.trust import NO_PASS as NO_PASS, Sealed as Sealed
    from kvstore.engine.why.curve import (
        BOUNDS_S as BOUNDS_S,
        Ages as Ages,
        CurveReport as CurveReport,
    )
    from kvstore.engine.why.explain import (
        HashingReport as HashingReport,
        RequestReport as RequestReport,
    )
    from kvstore.engine.why.findings import SPACE_DIGITS as SPACE_DIGITS, RangeReport as RangeReport
    from kvstore.engine.why.ledger import Ledger as Ledger, SavingsReport as SavingsReport
    from kvstore.engine.why.reasons import PushReport as PushReport, Reason as Reason
    from kvstore.engine.why.report import (
        NO_BUDGET as NO_BUDGET,
        BlockReport as BlockReport,
        JobReport as JobReport,
        LeaseReport as LeaseReport,
        NodeReport as NodeReport,
        QuotaReport as QuotaReport,
        SpaceReport as SpaceReport,
        TierReport as TierReport,
        hottest_runs as hottest_runs,
    )

_PLACES: Final = {
    "engine": "CLEAR_ROWS_MAX Engine EngineConfig",
    "memory.journal": "LAYOUT_VERSION UNREADABLE Journal JournalUnusable",
    "memory.policies": "POLICIES",
    "sessions.owners": "OwnerKey UnservedReport",
    "trust": "NO_PASS Sealed",
    "why.curve": "BOUNDS_S Ages CurveReport",
    "why.explain": "HashingReport RequestReport",
    "why.findings": "SPACE_DIGITS RangeReport",
    "why.ledger": "Ledger SavingsReport",
    "why.reasons": "PushReport Reason",
    "why.report": "NO_BUDGET BlockReport JobReport LeaseReport NodeReport QuotaReport SpaceReport"
    " TierReport hottest_runs",
}


def __getattr__(name: str) -> object:
    for place, names in _PLACES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

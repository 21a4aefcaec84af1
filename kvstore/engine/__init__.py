"""The pure engine of a node: events in, commands out.

| room        | cares about                                       | in → out                    |
|-------------|---------------------------------------------------|-----------------------------|
| `engine`    | dispatch, and what concerns all blocks            | events → commands           |
| `events`    | the values that go in and come out                | –                           |
| `state`     | what the rooms share; `counters`: for /metrics    | –                           |
| `check`     | what must be true between two steps               | engine → nothing, or an error |
| `memory/`   | slots, which tier holds which block, what to keep | transitions → states        |
| `sessions/` | who is attached, what he asks and was promised    | Hellos, asks → replies      |
| `moves/`    | blocks that come to dram and leave it             | seals, ends → reads, writes |
| `trust/`    | what is verified again, what is switched off      | –                           |
| `why/`      | what lookups found, stories, snapshots            | engine → rows               |

What others may import is here and in `events`; a contract of pyproject.toml holds it.

A new policy goes beside `memory/policy/lru.py`; a new message is dispatched in `engine.py`.
"""

from kvstore.engine.engine import (
    CLEAR_ROWS_MAX,
    Engine,
    EngineConfig,
)
from kvstore.engine.memory.journal import (
    LAYOUT_VERSION,
    UNREADABLE,
    Journal,
    JournalUnusable,
)
from kvstore.engine.memory.policy.choose import (
    POLICIES,
)
from kvstore.engine.memory.policy.disk import (
    AdmissionMode,
)
from kvstore.engine.memory.quotas import (
    QUOTA_COUNT_MAX,
)
from kvstore.engine.moves.writes import (
    MOVING_SHARE,
)
from kvstore.engine.sessions.owners import (
    OwnerKey,
)
from kvstore.engine.sessions.unserved import (
    UnservedReport,
)
from kvstore.engine.trust.scrubs import (
    NO_PASS,
    Sealed,
)
from kvstore.engine.why.explain import (
    HashingReport,
    RangeReport,
    RequestReport,
)
from kvstore.engine.why.findings import (
    SPACE_DIGITS,
)
from kvstore.engine.why.report import (
    NO_BUDGET,
    BlockReport,
    JobReport,
    LeaseReport,
    NodeReport,
    QuotaReport,
    SpaceReport,
    TierReport,
)

__all__ = [
    "CLEAR_ROWS_MAX",
    "LAYOUT_VERSION",
    "MOVING_SHARE",
    "NO_BUDGET",
    "NO_PASS",
    "POLICIES",
    "QUOTA_COUNT_MAX",
    "SPACE_DIGITS",
    "UNREADABLE",
    "AdmissionMode",
    "BlockReport",
    "Engine",
    "EngineConfig",
    "HashingReport",
    "JobReport",
    "Journal",
    "JournalUnusable",
    "LeaseReport",
    "NodeReport",
    "OwnerKey",
    "QuotaReport",
    "RangeReport",
    "RequestReport",
    "Sealed",
    "SpaceReport",
    "TierReport",
    "UnservedReport",
]

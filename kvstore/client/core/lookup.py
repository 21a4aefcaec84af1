"""State of one request's lookup: its stage, and the questions it consists of.

State only; `lookups.py` has the rules and a picture of the stages.
"""

from __future__ import annotations

import enum

from kvstore.client.core.hits import HitPlan, Presence
from kvstore.client.core.waits import BlockWait
from kvstore.wire.messages import LEASE_LIVES_MAX, LeaseReply


class LookupStage(enum.Enum):
    """Stage of one request's lookup; `lookups.py` has a picture."""

    NONE = 0
    ASKED = 1
    HELD = 2
    LOADING = 3
    PROMOTING = 4
    SHADOW = 5


WAITING_STAGES = (LookupStage.ASKED, LookupStage.PROMOTING, LookupStage.HELD)
"""The node may hold leases, and no load has begun."""


class LookupPart:
    """One LeaseAsk of a request: long prompts and KV cache groups need several."""

    __slots__ = (
        "count",
        "file_blocks",
        "first",
        "group",
        "is_closed",
        "lease",
        "peer_blocks",
        "promoting",
        "renew_at_ns",
        "reply",
        "ttl_ns",
    )

    def __init__(self, lease: int, group: int, first: int, count: int) -> None:
        self.lease = lease
        self.group = group
        self.first = first
        """Number in the prompt of its first block."""
        self.count = count
        self.promoting = 0
        """Blocks behind those of the reply that are on their way to dram."""
        self.is_closed = False
        """Blocks came that nobody waited for: what follows them does not follow the reply's."""
        self.file_blocks = 0
        """Blocks found that came from disk for this request."""
        self.peer_blocks = 0
        """The same from another node."""
        self.reply: LeaseReply | None = None
        self.renew_at_ns = 0
        self.ttl_ns = 0

    def expect(self, promoting: int, found: int) -> None:
        """So many more are on their way, says the node; no more than were asked for are waited for,
        nor longer than these take to compute."""
        self.promoting = min(promoting, max(0, self.count - found))


class Lookup:
    """The lookup state of one request. Only `Lookups` changes it."""

    __slots__ = (
        "asked_again_ns",
        "asked_at_ns",
        "asked_leases",
        "detail",
        "end_tokens",
        "failed",
        "first_block",
        "found_blocks",
        "has_weighed",
        "hinted_ns",
        "hinted_session",
        "is_probe",
        "is_shadow",
        "is_trial",
        "is_verified",
        "load_jobs",
        "load_reports",
        "lost_ns",
        "miss_reason",
        "parts",
        "plan",
        "present",
        "pushed_until_ns",
        "replied_at_ns",
        "rounds",
        "session",
        "stage",
        "tag",
        "wait",
        "waited",
        "waiting_since_ns",
    )

    def __init__(self, tag: int = 0) -> None:
        self.tag = tag
        """The request's number in hints."""
        self.present = Presence()
        self.hinted_ns = 0
        """When the node was sent hints that name all blocks of the request."""
        self.hinted_session = 0
        """In which session; 0: it was not."""
        self.stage = LookupStage.NONE
        self.detail = ""
        """A rank's reason for a load that failed."""
        self.asked_leases: list[int] = []
        """Leases of the last question about the first KV cache group, in chain order; kept after
        their release."""
        self.replied_at_ns = 0
        """When the last question was answered in full; 0 while it is not."""
        self.wait: BlockWait | None = None
        """For blocks that are on their way."""
        self.waited = False
        """Whether the last question led to one."""
        self.has_weighed = False
        """Whether blocks on their way were weighed against computing since it was asked."""
        self.lost_ns = 0.0
        """Time that its waits took beyond what they saved."""
        self.failed = ""
        """Why this request is answered 0 for ever; empty while it is not."""
        self.session = 0
        self.first_block = 0
        self.found_blocks = 0
        self.end_tokens = 0
        """End of the prompt, where its tail is looked up, too; 0: it is not."""
        self.is_probe = False
        """Loads do not pay: this is the shortest load, to measure."""
        self.is_shadow = False
        """If it is a hit, it may be computed and compared."""
        self.is_trial = False
        """Loads failed: the load of this request, if it has any, is the probe."""
        self.is_verified = False
        """Every block of its load is compared with its checksum."""
        self.asked_at_ns = 0
        """When the lookup began."""
        self.asked_again_ns = 0
        """When its last question was asked."""
        self.plan: HitPlan | None = None
        """Blocks of all KV cache groups that the hit takes; with one group always None."""
        self.rounds = 0
        """Plans so far."""
        self.waiting_since_ns = 0
        """Since when the engine has got the answer to ask again, for any reason; 0: its last answer
        was another."""
        self.parts: list[LookupPart] = []
        self.pushed_until_ns = 0
        """While a prefill node sends its blocks nothing is asked, at most until then."""
        self.load_jobs = 0
        """Under way: one for each KV cache group."""
        self.load_reports = 0
        self.miss_reason = ""

    def end_wait(self, now_ns: int) -> None:
        """Blocks came, or it took too long: take what is there."""
        assert self.wait is not None
        self.lost_ns += self.wait.ended(now_ns)
        self.wait, self.stage = None, LookupStage.HELD

    def is_old(self, now_ns: int) -> bool:
        """Whether its leases, renewed or not, could end under a load that begins now."""
        age_ns = now_ns - self.asked_at_ns
        return any(p.reply and age_ns > (LEASE_LIVES_MAX - 1) * p.ttl_ns for p in self.parts)

    @property
    def file_blocks(self) -> int:
        """Blocks found of the first group that came from disk for this request."""
        return sum(part.file_blocks for part in self.parts if not part.group)

    @property
    def peer_blocks(self) -> int:
        """Blocks found of the first group that came from another node for this request."""
        return sum(part.peer_blocks for part in self.parts if not part.group)

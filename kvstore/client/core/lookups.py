"""Leases and loads of requests: questions to the node, waits, ends of loads.

    NONE ──ask──▶ ASKED ──reply──▶ HELD ──allocated──▶ LOADING ──every rank reported──▶ NONE
                    │   │            ▲ │ not loaded, finished
                    │   │ more comes │ ▼
                    │   ▼ from disk  │ NONE
                    │  PROMOTING ────┘ all came, or it takes too long
                    ▼ deadline         HELD ──every n-th hit──▶ SHADOW ──compared, finished──▶ NONE
                  NONE (late reply is released)

Rules. 1: a lease that was asked for is released exactly once, or dies with its session. 2: a
request whose load failed is answered 0 for ever; so is one whose hit is computed to be compared.
3: nothing here waits, and no request gets the answer to ask again for ever, whatever the node does.
4: of the loads that begin, every n-th is verified, whatever lookups come between; hits are chosen
for a shadow check in the same way.
Does not cover: a request's state (`lookup.py`), comparing (`shadow.py`), stores (`stores.py`), the
connection (`attachment.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstore.breaker import Breaker
from kvstore.client.core.attachment import Attachment
from kvstore.client.core.checksums import all_sent, joined_checksums
from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.costs import Costs
from kvstore.client.core.lookup import WAITING_STAGES, Lookup, LookupPart, LookupStage
from kvstore.client.core.plan import LoadJob, LoadResult
from kvstore.client.core.stats import SchedulerStats
from kvstore.types import CHECKSUM_BYTES
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import (
    ASKS_PER_LOOKUP_MAX,
    KEYS_PER_DATAGRAM_MAX,
    LEASE_LIVES_MAX,
    LEASES_PER_DATAGRAM_MAX,
    LeaseAsk,
    LeaseMore,
    LeaseRelease,
    LeaseRenew,
    LeaseReply,
)


class Pending(msgspec.Struct, frozen=True):
    """Ask again in the next step."""


class Hit(msgspec.Struct, frozen=True):
    """So many tokens beyond the prefix-cache hit can be loaded."""

    tokens: int


class Miss(msgspec.Struct, frozen=True):
    """Nothing to load; `reason` is one of a small fixed set of words for metrics and logs."""

    reason: str


Outcome = Pending | Hit | Miss
PENDING = Pending()


SHADOW_CHECK = "shadow check"
"""Why a hit that is computed to be compared is a miss."""


class EngineLookups:
    """All lookups of one engine."""

    def __init__(
        self,
        config: SchedulerConfig,
        attachment: Attachment,
        breaker: Breaker,
        stats: SchedulerStats,
        costs: Costs,
    ) -> None:
        self._config = config
        self._attachment = attachment
        self._breaker = breaker
        """Circuit breaker for lookups."""
        self._copies = Breaker(
            failures_max=config.breaker_failures_max, cooldown_ms=config.breaker_cooldown_ms
        )
        """Circuit breaker for loads: a node that answers may lease blocks that cannot be loaded."""
        self._stats = stats
        self._next_lease = 1
        self._loads_unverified = 0
        """Loads begun since the last one that is verified."""
        self._hits_unchecked = 0
        """Hits since the last one with a shadow check."""
        self._costs = costs
        self._by_lease: dict[int, tuple[Lookup, LookupPart]] = {}

    @property
    def leases_open(self) -> int:
        """Leases asked for and not yet released."""
        return len(self._by_lease)

    def match(
        self,
        lookup: Lookup,
        keys: Sequence[bytes],
        *,
        first_block: int,
        now_ns: int,
        may_ask: bool = True,
    ) -> Outcome:
        """The answer for a request whose blocks before `first_block` the engine has itself.

        Idempotent: the engine repeats the question until the request is admitted. With `may_ask`
        False nothing new is asked of the node in this step; the deadline begins with the question.
        """
        outcome = self._match(lookup, keys, first_block, now_ns, may_ask=may_ask)
        if outcome is not PENDING:
            lookup.waiting_since_ns = 0
        return outcome

    def _match(
        self, lookup: Lookup, keys: Sequence[bytes], first_block: int, now_ns: int, *, may_ask: bool
    ) -> Outcome:
        if lookup.failed:
            return self._miss(lookup, lookup.failed)
        if lookup.stage in WAITING_STAGES and (
            lookup.session != self._attachment.session or first_block < lookup.first_block
        ):
            self.release(lookup)
        if lookup.stage is LookupStage.HELD and self._is_old(lookup, now_ns):
            self.release(lookup)
        if lookup.stage is LookupStage.NONE:
            wanted = (len(keys) - first_block) * self._config.block_tokens
            if self._has_waited_long(lookup, wanted, now_ns):
                return self._give_up(lookup, now_ns)
            if not may_ask and self._attachment.is_open:
                return PENDING
            refusal = self._ask(lookup, keys, first_block=first_block, now_ns=now_ns)
            if refusal is None or refusal is PENDING:
                lookup.waiting_since_ns = lookup.waiting_since_ns or now_ns
                return PENDING
            return refusal
        if lookup.stage is LookupStage.ASKED:
            wanted = sum(part.count for part in lookup.parts) * self._config.block_tokens
            if now_ns - lookup.asked_at_ns < self._costs.answer_ns(wanted):
                return PENDING
            return self._give_up(lookup, now_ns)
        if lookup.stage is LookupStage.PROMOTING:
            if now_ns < lookup.promoted_until_ns:
                return PENDING
            self._stats.add("promotions_given_up")
            lookup.stage = LookupStage.HELD
        assert lookup.stage is LookupStage.HELD, lookup.stage
        if lookup.is_verified and not all_sent([part.reply for part in lookup.parts if part.reply]):
            self.release(lookup)
            self._count_failure(self._breaker, now_ns)
            lookup.failed, lookup.detail = "load failed", "the node sent no checksums"
            return self._miss(lookup, lookup.failed)
        blocks = lookup.first_block + lookup.found_blocks - first_block
        if self._config.lookahead_tokens:
            blocks -= 1  # what follows it need not be what followed it when it was stored
        tokens = blocks * self._config.block_tokens
        if tokens < max(self._config.min_load_tokens, 1):
            self.release(lookup)
            return self._miss(lookup, "cost gate" if tokens > 0 else "not stored")
        if lookup.is_shadow and self._is_due(self._hits_unchecked, self._config.shadow_every):
            self._hits_unchecked = 0
            lookup.stage = LookupStage.SHADOW
            lookup.failed = SHADOW_CHECK
            return self._miss(lookup, lookup.failed)
        lookup.miss_reason = ""
        return Hit(min(tokens, self._costs.least_tokens) if lookup.is_probe else tokens)

    def _has_waited_long(self, lookup: Lookup, wanted_tokens: int, now_ns: int) -> bool:
        """Whether a request without an answer so far may ask no more. Each wait has its own end;
        this ends a row of them, as with a node whose sessions come and go."""
        limit_ns = self._costs.answer_ns(wanted_tokens) + NS_PER_MS * (
            self._config.heartbeat_timeout_ms + self._config.promotion_deadline_ms
        )
        return 0 < lookup.waiting_since_ns < now_ns - limit_ns

    @staticmethod
    def _is_old(lookup: Lookup, now_ns: int) -> bool:
        """Whether its leases, renewed or not, could end under a load that begins now."""
        age_ns = now_ns - lookup.asked_at_ns
        return any(p.reply and age_ns > (LEASE_LIVES_MAX - 1) * p.ttl_ns for p in lookup.parts)

    def _give_up(self, lookup: Lookup, now_ns: int) -> Miss:
        """The node did not answer in time: this request asks it no more."""
        self.release(lookup)
        self._count_failure(self._breaker, now_ns)
        lookup.failed = "deadline"
        return self._miss(lookup, lookup.failed)

    def replied(self, reply: LeaseReply, now_ns: int) -> None:
        """The node's answer to a LeaseAsk; late or unknown ones are given back."""
        entry = self._by_lease.get(reply.lease)
        if entry is None:
            if reply.slots:
                self._attachment.outbox.append(LeaseRelease(leases=[reply.lease]))
            return
        lookup, part = entry
        part.reply = reply
        part.promoting = reply.promoting
        part.file_blocks, part.peer_blocks = reply.from_file, reply.from_peer
        part.ttl_ns = reply.ttl_ms * NS_PER_MS
        part.renew_at_ns = now_ns + part.ttl_ns // 3
        if lookup.stage is not LookupStage.ASKED or any(p.reply is None for p in lookup.parts):
            return
        self._breaker.succeeded()
        lookup.replied_at_ns = now_ns
        lookup.stage = LookupStage.HELD
        self._count_found(lookup)
        wait_ns = self._worth_waiting_ns(lookup)
        if wait_ns > 0:
            lookup.stage = LookupStage.PROMOTING
            lookup.waited_for_disk = True
            lookup.promoted_until_ns = now_ns + wait_ns

    def grew(self, more: LeaseMore) -> None:
        """More blocks of a lease have come to dram, or none will."""
        entry = self._by_lease.get(more.lease)
        if entry is None or entry[1].reply is None:
            return
        lookup, part = entry
        if lookup.stage not in (LookupStage.ASKED, LookupStage.PROMOTING):
            return  # nobody waits for them any more; they are released with the lease
        reply = part.reply
        assert reply is not None
        part.reply = msgspec.structs.replace(
            reply,
            slots=reply.slots + more.slots,
            generations=reply.generations + more.generations,
            checksums=joined_checksums([reply, more]),
        )
        part.promoting = more.promoting
        part.file_blocks += more.from_file
        part.peer_blocks += more.from_peer
        if lookup.stage is LookupStage.PROMOTING:
            self._count_found(lookup)
            if not self._coming(lookup):
                lookup.stage = LookupStage.HELD

    def _count_found(self, lookup: Lookup) -> None:
        lookup.found_blocks = 0
        for part in lookup.parts:
            found = self.found_blocks(part)
            lookup.found_blocks += found
            if found < part.count:
                break

    def _coming(self, lookup: Lookup) -> int:
        """Blocks on their way that would lengthen the prefix found."""
        coming = 0
        for part in lookup.parts:
            coming += part.promoting
            if self.found_blocks(part) + part.promoting < part.count:
                break
        return coming

    def _worth_waiting_ns(self, lookup: Lookup) -> int:
        """How long to wait for blocks from disk."""
        coming = self._coming(lookup)
        if not coming:
            return 0
        estimates = [p.reply.promoting_ms for p in lookup.parts if p.reply and p.promoting]
        return self._costs.patience_ns(
            coming * self._config.block_tokens, max(estimates) * NS_PER_MS
        )

    def start_load(
        self,
        lookup: Lookup,
        *,
        request: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        first_block: int,
        now_ns: int,
    ) -> LoadJob:
        """The job that fills `block_ids` with blocks `first_block`… of the held leases."""
        assert lookup.stage is LookupStage.HELD, lookup.stage
        shards = self._attachment.shard_counts[0]
        begin = first_block - lookup.first_block
        end = begin + len(block_ids)
        assert 0 <= begin < end <= lookup.found_blocks, (begin, end, lookup.found_blocks)
        replies = [part.reply for part in lookup.parts if part.reply is not None]
        self._loads_unverified = 0 if lookup.is_verified else self._loads_unverified + 1
        self._hits_unchecked += 1

        def cut(arrays: list[bytes], size: int) -> bytes:
            return b"".join(arrays)[begin * shards * size : end * shards * size]

        lookup.stage = LookupStage.LOADING
        lookup.load_reports = 0
        lookup.target_blocks = tuple(block_ids)
        return LoadJob(
            request=request,
            lease=lookup.parts[0].lease,
            session=lookup.session,
            block_ids=lookup.target_blocks,
            keys=b"".join(keys[first_block : first_block + len(block_ids)]),
            slots=cut([r.slots for r in replies], 4),
            generations=cut([r.generations for r in replies], 8),
            checksums=cut([joined_checksums(replies)], CHECKSUM_BYTES),
        )

    def reported(self, result: LoadResult, now_ns: int) -> Lookup | None:
        """One rank's result. Returns the lookup when all ranks have reported, else None."""
        entry = self._by_lease.get(result.lease)
        if entry is None or entry[0].stage is not LookupStage.LOADING:
            return None
        lookup = entry[0]
        # Blocks that one rank cannot load often fail on others too: one failure, not many.
        if result.failed_block_ids and not lookup.failed:
            lookup.failed = lookup.miss_reason = "load failed"
            lookup.detail = result.reason
            if lookup.session == self._attachment.session:
                # Not for a session that ended under its loads.
                self._count_failure(self._copies, now_ns)
        lookup.load_reports += 1
        if lookup.load_reports < self._config.rank_count:
            return None
        if not lookup.failed:
            self._copies.succeeded()
        lookup.is_trial = False
        self.release(lookup)
        return lookup

    def release(self, lookup: Lookup) -> None:
        """Give every lease of the lookup back. No effect when there is none."""
        released = [part.lease for part in lookup.parts]
        for lease in released:
            self._by_lease.pop(lease, None)
        # An unanswered ask is released too: the node handles datagrams in order.
        if released and lookup.session == self._attachment.session:
            self._attachment.outbox.append(LeaseRelease(leases=released))
        if lookup.is_trial:
            lookup.is_trial = False
            self._copies.unused()
        lookup.parts = []
        lookup.stage = LookupStage.NONE
        lookup.target_blocks = ()

    def renew(self, now_ns: int) -> None:
        """Renew leases past a third of their life. Called every step; cheap when none is due."""
        due = []
        for lease, (_, part) in self._by_lease.items():
            if part.reply is not None and now_ns >= part.renew_at_ns:
                part.renew_at_ns = now_ns + part.ttl_ns // 3
                due.append(lease)
        for i in range(0, len(due), LEASES_PER_DATAGRAM_MAX):
            batch = due[i : i + LEASES_PER_DATAGRAM_MAX]
            self._attachment.outbox.append(LeaseRenew(leases=batch))

    def _ask(
        self, lookup: Lookup, keys: Sequence[bytes], *, first_block: int, now_ns: int
    ) -> Outcome | None:
        attachment = self._attachment
        wanted = len(keys) - first_block
        if not attachment.is_open:
            patience_ns = self._costs.answer_ns(wanted * self._config.block_tokens)
            if attachment.is_coming(now_ns, patience_ns):
                return PENDING
            return self._miss(lookup, "node away")
        if wanted * self._config.block_tokens < max(self._config.min_load_tokens, 1):
            return self._miss(lookup, "cost gate" if wanted > 0 else "no full block")
        lookup.is_probe = not self._costs.loads_pay
        if lookup.is_probe and not self._costs.may_probe(wanted * self._config.block_tokens):
            return self._miss(lookup, "cost gate")
        # Both or none: a probe that is not sent would never come back.
        if not (self._breaker.may_allow(now_ns) and self._copies.may_allow(now_ns)):
            return self._miss(lookup, "breaker open")
        self._breaker.allows(now_ns)
        self._copies.allows(now_ns)
        lookup.is_trial = self._copies.is_open
        lookup.is_shadow = self._is_due(self._hits_unchecked, self._config.shadow_every)
        due = self._is_due(self._loads_unverified, self._config.verify_every)
        lookup.is_verified = due or lookup.is_shadow
        keys_per_ask = max(1, KEYS_PER_DATAGRAM_MAX // attachment.shard_counts[0])
        lookup.session = attachment.session
        lookup.first_block = first_block
        lookup.found_blocks = 0
        lookup.asked_at_ns, lookup.replied_at_ns = now_ns, 0
        lookup.asked_leases, lookup.waited_for_disk = [], False
        lookup.stage = LookupStage.ASKED
        end = min(len(keys), first_block + keys_per_ask * ASKS_PER_LOOKUP_MAX)
        for begin in range(first_block, end, keys_per_ask):
            batch = keys[begin : min(begin + keys_per_ask, end)]
            part = LookupPart(self._next_lease, len(batch))
            self._next_lease += 1
            lookup.parts.append(part)
            lookup.asked_leases.append(part.lease)
            self._by_lease[part.lease] = (lookup, part)
            attachment.outbox.append(
                LeaseAsk(
                    lease=part.lease,
                    keys=b"".join(batch),
                    with_checksums=lookup.is_verified,
                )
            )
        return None

    @property
    def is_breaker_open(self) -> bool:
        """Whether lookups are off for a while, after failures of lookups or loads."""
        return self._breaker.is_open or self._copies.is_open

    def _count_failure(self, breaker: Breaker, now_ns: int) -> None:
        if breaker.failed(now_ns):
            self._stats.add("breaker_openings")

    @staticmethod
    def _is_due(since: int, every: int) -> bool:
        """Whether the next one is the `every`-th; 0: never."""
        return 0 < every <= since + 1

    def found_blocks(self, part: LookupPart) -> int:
        """Blocks that the answer to one question leases."""
        assert part.reply is not None
        return min(len(part.reply.slots) // (4 * self._attachment.shard_counts[0]), part.count)

    def _miss(self, lookup: Lookup, reason: str) -> Miss:
        lookup.miss_reason = reason
        return Miss(reason)

"""Leases and loads of requests: questions to the node, waits, ends of loads.

    NONE ──ask──▶ ASKED ──reply──▶ HELD ──allocated──▶ LOADING ──every rank reported──▶ NONE
                    │   │            ▲ │ not loaded, finished
                    │   │ more comes │ ▼
                    │   ▼ from disk  │ NONE
                    │  PROMOTING ────┘ all came, or it takes too long (`waits`)
                    ▼ deadline         HELD ──every n-th hit──▶ SHADOW ──compared, finished──▶ NONE
                  NONE (late reply is released)

Rules. 1: a lease that was asked for is released exactly once, or dies with its session. 2: a
request whose load failed is answered 0 for ever; so is one whose hit is computed to be compared.
3: nothing here waits, and no request asks again for ever, whatever the node does. 4: of the loads
that begin, every n-th is verified, whatever lookups come between; shadow checks likewise.

With several KV cache groups the first question is about the first group, with full attention; hints
ask which blocks of the others the node knows. From HELD the lookup goes back to ASKED for those
that the engine's rules want, at most ROUNDS_MAX times: the hit is shorter where some are gone.
Does not cover: a request's state (`lookup.py`), comparing (`shadow.py`), stores (`stores.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstore.breaker import Breaker
from kvstore.client.core.attachment import Attachment
from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.costs import Costs
from kvstore.client.core.hits import PENDING, Hit, HitPlan, HitRules, Miss, Outcome, block_keys
from kvstore.client.core.loads import (
    all_sent,
    coming_tokens,
    found_blocks,
    joined_checksums,
    keys_per_ask,
    leading_blocks,
    load_job,
    needed_blocks,
    next_plan,
    short_parts,
    surveys,
)
from kvstore.client.core.lookup import WAITING_STAGES, Lookup, LookupPart, LookupStage
from kvstore.client.core.plan import LoadJob, LoadResult, SchedulerStats
from kvstore.client.core.waits import BlockWait
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import (
    ASKS_PER_LOOKUP_MAX,
    LEASES_PER_DATAGRAM_MAX,
    LeaseAsk,
    LeaseMore,
    LeaseRelease,
    LeaseRenew,
    LeaseReply,
)

ROUNDS_MAX = 3
"""Plans of one lookup: each is shorter, since blocks were missing that the node had known."""
HINT_NS_MAX = 50 * NS_PER_MS
"""Answers to the hints of a request are good for so long."""
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
        rules: HitRules | None,
    ) -> None:
        self._config = config
        self._sizes = config.block_sizes
        self._rules = rules
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
        tokens_max: int,
        now_ns: int,
        may_ask: bool = True,
    ) -> Outcome:
        """The answer for a request whose blocks before `first_block` the engine has itself.

        Idempotent: the engine repeats the question until the request is admitted. Without `may_ask`
        nothing is asked in this step; the deadline begins with the question. With several KV cache
        groups a hit has at most `tokens_max` tokens.
        """
        outcome = self._match(lookup, keys, first_block, now_ns, may_ask=may_ask)
        if lookup.stage is LookupStage.HELD and outcome is PENDING:
            outcome = self._held(lookup, keys, first_block, tokens_max, now_ns)
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
        if lookup.stage is LookupStage.HELD and lookup.is_old(now_ns):
            self.release(lookup)
        if lookup.stage is LookupStage.NONE:
            wanted = self._wanted_tokens(lookup, keys, first_block)
            if now_ns < lookup.pushed_until_ns and self._costs.is_worth(wanted):
                return PENDING
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
            wanted = sum(part.count for part in lookup.parts) * self._sizes[0]
            if now_ns - lookup.asked_again_ns < self._costs.answer_ns(wanted):
                return PENDING
            return self._give_up(lookup, now_ns)
        if lookup.stage is LookupStage.PROMOTING:
            assert lookup.wait is not None
            if now_ns < lookup.wait.until_ns:
                return PENDING
            self._stats.add("promotions_given_up")
            lookup.end_wait(now_ns)
            lookup.miss_reason = "promotion deadline"
            for part in lookup.parts:
                part.promoting = 0
        assert lookup.stage is LookupStage.HELD, lookup.stage
        return PENDING

    def _held(
        self,
        lookup: Lookup,
        keys: Sequence[bytes],
        first_block: int,
        tokens_max: int,
        now_ns: int,
    ) -> Outcome:
        """The answer, once the node has given its own."""
        if lookup.is_verified and not all_sent([part.reply for part in lookup.parts if part.reply]):
            self.release(lookup)
            self._count_failure(self._breaker, now_ns)
            lookup.failed, lookup.detail = "load failed", "the node sent no checksums"
            return self._miss(lookup, lookup.failed)
        if self._rules is None:
            blocks = lookup.first_block + lookup.found_blocks - first_block
            if self._config.lookahead_tokens:
                blocks -= 1  # what follows it need not be what followed it when it was stored
            tokens = blocks * self._sizes[0]
            if lookup.end_tokens:
                tokens = min(tokens, lookup.end_tokens - first_block * self._sizes[0])
        else:
            plan = self._plan(self._rules, lookup, keys, tokens_max, now_ns)
            if plan is None:
                return PENDING
            tokens = plan.tokens - first_block * self._sizes[0]
        nothing, lookup.miss_reason = lookup.miss_reason, ""
        if lookup.plan is not None and lookup.plan.lacking_group:
            lookup.miss_reason = "group not stored"
            lookup.detail = self._config.group_names[lookup.plan.lacking_group]
        if tokens < max(self._config.min_load_tokens, 1):
            self.release(lookup)
            nothing = lookup.miss_reason or nothing or "not stored"
            return self._miss(lookup, "cost gate" if tokens > 0 else nothing)
        if lookup.is_shadow and self._is_due(self._hits_unchecked, self._config.shadow_every):
            self._hits_unchecked = 0
            lookup.stage = LookupStage.SHADOW
            lookup.failed = SHADOW_CHECK
            return self._miss(lookup, lookup.failed)
        return Hit(min(tokens, self._costs.least_tokens) if lookup.is_probe else tokens)

    def _plan(
        self,
        rules: HitRules,
        lookup: Lookup,
        keys: Sequence[bytes],
        tokens_max: int,
        now_ns: int,
    ) -> HitPlan | None:
        """The hit that is leased in all groups, maybe none; None: its blocks are asked for."""
        short = short_parts(lookup, self.found_blocks)
        if lookup.plan is not None and not short:
            return lookup.plan
        for part in short:
            end = part.first + part.count
            lookup.present.lack(part.group, part.first + self.found_blocks(part), end)
        self._give_back(lookup, [part for part in lookup.parts if part.group])
        lookup.rounds += 1
        if lookup.rounds > ROUNDS_MAX:
            lookup.plan = HitPlan(0, (), lacking_group=short[0].group if short else 0)
            return lookup.plan
        local_tokens = lookup.first_block * self._sizes[0]
        if lookup.is_probe:
            tokens_max = min(tokens_max, local_tokens + self._costs.least_tokens)
        lookup.plan = plan = next_plan(
            rules, self._config, lookup, key_count=len(keys), tokens_max=tokens_max
        )
        if plan.tokens > local_tokens:
            ranges = needed_blocks(plan, self._sizes, local_tokens, plan.tokens)
            for group, blocks in enumerate(ranges[1:], 1):
                self._ask_part(lookup, group, keys, blocks)
        if all(part.reply for part in lookup.parts):
            return plan
        lookup.stage, lookup.asked_again_ns = LookupStage.ASKED, now_ns
        return None

    def _has_waited_long(self, lookup: Lookup, wanted_tokens: int, now_ns: int) -> bool:
        """Whether a request may ask no more: the end of a row of waits, of which each has its own
        end, as with a node whose sessions come and go."""
        limit_ns = self._costs.answer_ns(wanted_tokens) + self._costs.computing_ns(wanted_tokens)
        limit_ns += self._config.heartbeat_timeout_ms * NS_PER_MS
        return 0 < lookup.waiting_since_ns < now_ns - limit_ns

    def _give_up(self, lookup: Lookup, now_ns: int) -> Miss:
        """The node did not answer in time: this request asks it no more."""
        self.release(lookup)
        self._count_failure(self._breaker, now_ns)
        lookup.failed = "deadline"
        return self._miss(lookup, lookup.failed)

    def replied(self, reply: LeaseReply, now_ns: int) -> None:
        """The node's answer to a LeaseAsk; late ones are given back. Only the first counts."""
        entry = self._by_lease.get(reply.lease)
        if entry is None:
            if reply.slots:
                self._attachment.outbox.append(LeaseRelease(leases=[reply.lease]))
            return
        lookup, part = entry
        if part.reply is not None:
            return
        part.reply = reply
        part.expect(reply.promoting, self.found_blocks(part))
        part.file_blocks, part.peer_blocks = reply.from_file, reply.from_peer
        part.ttl_ns = reply.ttl_ms * NS_PER_MS
        part.renew_at_ns = now_ns + part.ttl_ns // 3
        if lookup.stage is not LookupStage.ASKED or any(p.reply is None for p in lookup.parts):
            return
        self._breaker.succeeded()
        lookup.replied_at_ns = now_ns
        lookup.stage = LookupStage.HELD
        lookup.found_blocks = leading_blocks(lookup.parts, self._attachment.shard_counts[0])
        lookup.wait = self._worth_waiting(lookup, now_ns)
        if lookup.wait is not None:
            lookup.stage, lookup.waited = LookupStage.PROMOTING, True
        elif any(part.promoting for part in lookup.parts):
            lookup.miss_reason = "cost gate"

    def grew(self, more: LeaseMore, now_ns: int) -> None:
        """More blocks of a lease have come to dram, or none will."""
        entry = self._by_lease.get(more.lease)
        if entry is None or (reply := entry[1].reply) is None:
            return
        lookup, part = entry
        if part.is_closed or lookup.stage not in (LookupStage.ASKED, LookupStage.PROMOTING):
            part.is_closed, part.promoting = True, 0
            return  # nobody waits for them any more; they are released with the lease
        part.reply = msgspec.structs.replace(
            reply,
            slots=reply.slots + more.slots,
            generations=reply.generations + more.generations,
            checksums=joined_checksums([reply, more]),
        )
        part.expect(more.promoting, self.found_blocks(part))
        part.file_blocks += more.from_file
        part.peer_blocks += more.from_peer
        if lookup.wait is not None:
            self._look(lookup, lookup.wait, now_ns)

    def _look(self, lookup: Lookup, wait: BlockWait, now_ns: int) -> None:
        """Blocks of a lookup that waits have come, or none will."""
        found = lookup.found_blocks
        lookup.found_blocks = leading_blocks(lookup.parts, self._attachment.shard_counts[0])
        came = (lookup.found_blocks - found) * self._sizes[0]
        if lookup.plan is not None:  # it needs them all
            is_short = short_parts(lookup, self.found_blocks)
            came = 0 if is_short else lookup.plan.tokens - lookup.first_block * self._sizes[0]
        coming = coming_tokens(lookup, self._sizes[0], self.found_blocks)
        wait.arrived(self._costs.saving_ns(came), self._costs.saving_ns(coming), now_ns)
        if not coming:
            lookup.end_wait(now_ns)

    def _worth_waiting(self, lookup: Lookup, now_ns: int) -> BlockWait | None:
        """A wait for the blocks on their way, if there are any and computing takes longer."""
        coming = coming_tokens(lookup, self._sizes[0], self.found_blocks)
        if not coming:
            return None
        estimate_ms, source = max(
            (part.reply.promoting_ms, part.reply.promoting_from)
            for part in lookup.parts
            if part.reply and part.promoting and bool(part.group) == (lookup.plan is not None)
        )
        estimate_ns = estimate_ms * NS_PER_MS
        is_first, lookup.has_weighed = not lookup.has_weighed, True
        lost_ns = lookup.lost_ns
        return self._costs.wait(
            source, coming, estimate_ns, now_ns, lost_ns=lost_ns, is_first=is_first
        )

    def start_load(
        self,
        lookup: Lookup,
        *,
        request: str,
        keys: Sequence[bytes],
        tables: Sequence[Sequence[int]],
        local_tokens: int,
        tokens: int,
    ) -> list[LoadJob]:
        """The jobs, one for each group, that fill the `tokens` of a Hit behind the engine's own
        `local_tokens`. `tables`: block tables of the request, by group."""
        assert lookup.stage is LookupStage.HELD, lookup.stage
        end_tokens = local_tokens + tokens
        assert lookup.plan is None or end_tokens == lookup.plan.tokens, (lookup.plan, end_tokens)
        self._loads_unverified = 0 if lookup.is_verified else self._loads_unverified + 1
        self._hits_unchecked += 1
        ranges = needed_blocks(lookup.plan, self._sizes, local_tokens, end_tokens)
        for group, size in enumerate(self._sizes):
            lookup.present.have(group, range(ranges[group].start, end_tokens // size))
        jobs = [
            load_job(
                [part for part in lookup.parts if part.group == group],
                blocks,
                request=request,
                session=lookup.session,
                keys=block_keys(keys, self._config.keys_per_block(group)),
                table=tables[group],
                shards=self._attachment.shard_counts[group],
            )
            for group, blocks in enumerate(ranges)
            if blocks
        ]
        lookup.stage = LookupStage.LOADING
        lookup.load_jobs, lookup.load_reports = len(jobs), 0
        return jobs

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
        if result.failed_block_ids:
            lookup.present.lack(entry[1].group, entry[1].first)
        lookup.load_reports += 1
        if lookup.load_reports < self._config.rank_count * lookup.load_jobs:
            return None
        if not lookup.failed:
            self._copies.succeeded()
        lookup.is_trial = False
        self.release(lookup)
        return lookup

    def release(self, lookup: Lookup) -> None:
        """Give every lease of the lookup back. No effect when there is none."""
        self._give_back(lookup, lookup.parts)
        if lookup.wait is not None:
            lookup.wait.dropped()
            lookup.wait = None
        if lookup.is_trial:
            lookup.is_trial = False
            self._copies.unused()
        lookup.stage = LookupStage.NONE
        lookup.plan, lookup.rounds = None, 0

    def _give_back(self, lookup: Lookup, parts: Sequence[LookupPart]) -> None:
        released = [part.lease for part in parts if self._by_lease.pop(part.lease, None)]
        # An unanswered ask is released too: the node handles datagrams in order.
        if released and lookup.session == self._attachment.session:
            self._attachment.outbox.append(LeaseRelease(leases=released))
        lookup.parts = [part for part in lookup.parts if part not in parts]

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
        wanted = self._wanted_tokens(lookup, keys, first_block)
        # Of an earlier question, before a preemption, nothing is told any more.
        lookup.first_block, lookup.asked_leases = first_block, []
        if not attachment.is_open:
            patience_ns = self._costs.answer_ns(wanted)
            if attachment.is_coming(now_ns, patience_ns):
                return PENDING
            return self._miss(lookup, "node away")
        if wanted < max(self._config.min_load_tokens, 1):
            return self._miss(lookup, "cost gate" if wanted > 0 else "no full block")
        lookup.is_probe = not self._costs.loads_pay
        if lookup.is_probe and not self._costs.may_probe(wanted):
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
        lookup.session = attachment.session
        lookup.found_blocks = 0
        lookup.asked_at_ns, lookup.replied_at_ns = now_ns, 0
        lookup.asked_again_ns = now_ns
        lookup.waited, lookup.has_weighed, lookup.miss_reason = False, False, ""
        lookup.stage = LookupStage.ASKED
        # The node answers in order: these before the question that follows.
        is_known = lookup.hinted_session == attachment.session
        if not is_known or now_ns - lookup.hinted_ns > HINT_NS_MAX:
            attachment.outbox.extend(surveys(self._config, lookup, keys, attachment.shard_counts))
        blocks = keys_per_ask(attachment.shard_counts[0]) * ASKS_PER_LOOKUP_MAX
        end_block = min(len(keys) // self._config.keys_per_block(0), first_block + blocks)
        self._ask_part(lookup, 0, keys, range(first_block, end_block))
        lookup.asked_leases = [part.lease for part in lookup.parts]
        return None

    def _wanted_tokens(self, lookup: Lookup, keys: Sequence[bytes], first_block: int) -> int:
        blocks = len(keys) // self._config.keys_per_block(0)
        return (lookup.end_tokens or blocks * self._sizes[0]) - first_block * self._sizes[0]

    def _ask_part(self, lookup: Lookup, group: int, keys: Sequence[bytes], blocks: range) -> None:
        """Ask for blocks of a group."""
        names = block_keys(keys, self._config.keys_per_block(group))
        size = keys_per_ask(self._attachment.shard_counts[group])
        for begin in blocks[::size]:
            batch = names[begin : min(begin + size, blocks.stop)]
            part = LookupPart(self._next_lease, group, begin, len(batch))
            self._next_lease += 1
            lookup.parts.append(part)
            self._by_lease[part.lease] = (lookup, part)
            self._attachment.outbox.append(
                LeaseAsk(part.lease, b"".join(batch), lookup.is_verified, group)
            )

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
        """As `loads.found_blocks`."""
        return found_blocks(part, self._attachment.shard_counts[part.group])

    def _miss(self, lookup: Lookup, reason: str) -> Miss:
        lookup.miss_reason = reason
        return Miss(reason)

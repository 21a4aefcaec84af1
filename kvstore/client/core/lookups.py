"""Leases and loads of requests: questions to the node, waits, ends of loads.

    NONE ──ask──▶ ASKED ──reply──▶ HELD ──allocated──▶ LOADING ──every rank reported──▶ NONE
                    │   │            ▲ │ not loaded, finished
                    │   │ more comes │ ▼
                    │   ▼ from disk  │ NONE
                    │  PROMOTING ────┘ all came, or it takes too long (`costs`)
                    ▼ deadline         HELD ──every n-th hit──▶ SHADOW ──compared, finished──▶ NONE
                  NONE (late reply is released)

Rules. 1: a lease that was asked for is released exactly once, or dies with its session. 2: a
request whose load failed is answered 0 for ever; so is one whose hit is computed to be compared.
3: nothing here waits, and no request asks again for ever, whatever the node does. 4: of the loads
that begin, every n-th is verified, whatever lookups come between; shadow checks likewise.

With several KV cache groups the first question is about the first group, with full attention; hints
ask which blocks of the others the node knows. From HELD the lookup goes back to ASKED for those
that the engine's rules want, at most ROUNDS_MAX times: the hit is shorter where some are gone.
Does not cover: a request's state (`request.py`), comparing (`shadow.py`), stores (`stores.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.breaker import Breaker
from kvstore.client.core.attachment import Attachment
from kvstore.client.core.costs import BlockWait, Costs
from kvstore.client.core.plan import HitPlan, HitRules, LoadJob, LoadResult, Outcome
from kvstore.client.core.request import (
    WAITING_STAGES,
    LookupPart,
    LookupStage,
    Request,
    block_keys,
    keys_per_ask,
    needed_blocks,
)
from kvstore.units import NS_PER_MS
from kvstore.wire import messages as wire

ROUNDS_MAX = 3
"""Most plans of one lookup: each is shorter than the one before, of which blocks were missing that
the node had known."""
FAILURES_MAX = 3
"""Failures in a row that open a circuit breaker."""
HINT_NS_MAX = 50 * NS_PER_MS
"""Time for which the answers to the hints of a request are good."""
SHADOW_CHECK = "shadow check"
"""Why a hit that is computed to be compared is a miss."""


class EngineLookups:
    """All lookups of one engine."""

    def __init__(self, attachment: Attachment, costs: Costs, rules: HitRules | None) -> None:
        self._config, self._stats = attachment.config, attachment.stats
        self._attachment, self._costs, self._rules = attachment, costs, rules
        self._sizes = self._config.block_sizes
        limits = {"failures_max": FAILURES_MAX, "cooldown_ms": self._config.breaker_cooldown_ms}
        self._breaker = Breaker(**limits)
        """Circuit breaker for lookups."""
        self._copies = Breaker(**limits)
        """Circuit breaker for loads: a node that answers may lease blocks that cannot be loaded."""
        self._next_lease = 1
        self._loads_unverified = 0
        """Loads begun since the last one that is verified."""
        self._hits_unchecked = 0
        """Hits since the last one with a shadow check."""
        self._by_lease: dict[int, LookupPart] = {}

    @property
    def leases_open(self) -> int:
        """Leases asked for and not yet released."""
        return len(self._by_lease)

    def match(
        self, request: Request, *, tokens_max: int, now_ns: int, may_ask: bool = True
    ) -> Outcome:
        """The answer for a request whose blocks before `local_blocks` the engine has itself.

        Idempotent: the engine repeats the question until the request is admitted. Without `may_ask`
        nothing is asked in this step; the deadline begins with the question. With several KV cache
        groups a hit has at most `tokens_max` tokens.
        """
        if request.stage is not LookupStage.SHADOW:  # which excludes the tail by its end
            request.end_tokens = request.prompt_tokens if request.seeks_tail else 0
        outcome = self._match(request, now_ns, may_ask=may_ask)
        if request.stage is LookupStage.HELD and outcome is None:
            outcome = self._held(request, tokens_max, now_ns)
        if outcome is not None:
            request.waiting_since_ns = 0
            hit_tokens = outcome if isinstance(outcome, int) else 0
            self.queue(request, request.prompt_tokens - request.local_tokens - hit_tokens)
        elif request.stage is not LookupStage.PROMOTING:
            self.queue(request, 0)
        return outcome

    def queue(self, request: Request, tokens: int) -> None:
        """Count `tokens` of the request as left to compute, now or in its turn; while it waits for
        blocks, as left if none comes. Replaces its earlier count."""
        left_tokens = self._costs.left_tokens
        left_tokens[request.is_queued] -= request.left_tokens
        request.left_tokens, request.is_queued = max(0, tokens), request.wait is None
        left_tokens[request.is_queued] += request.left_tokens

    def _queue_rest(self, request: Request) -> None:
        """Count the request's tokens that its leases do not cover as left to compute."""
        found = (request.first_block + request.found_blocks) * self._sizes[0]
        self.queue(request, request.prompt_tokens - found)

    def _match(self, request: Request, now_ns: int, *, may_ask: bool) -> Outcome:
        if request.failed:
            return self._miss(request, request.failed)
        if request.stage in WAITING_STAGES and (
            request.session != self._attachment.session
            or request.local_blocks < request.first_block
        ):
            self.release(request)
        if request.stage is LookupStage.HELD and request.may_outlive_leases(now_ns):
            self.release(request)
        if request.stage is LookupStage.NONE:
            wanted = request.end_tokens or len(self._keys(request, 0)) * self._sizes[0]
            wanted -= request.local_blocks * self._sizes[0]
            if now_ns < request.pushed_until_ns and self._costs.is_worth(wanted):
                return None
            if self._has_waited_long(request, wanted, now_ns):
                return self._give_up(request, now_ns)
            if not may_ask and self._attachment.is_open:
                return None
            refusal = self._ask(request, wanted, now_ns)
            if refusal is None:
                request.waiting_since_ns = request.waiting_since_ns or now_ns
            return refusal
        if request.stage is LookupStage.ASKED:
            wanted = sum(part.count for part in request.parts) * self._sizes[0]
            if now_ns - request.asked_again_ns < self._costs.answer_ns(wanted):
                return None
            return self._give_up(request, now_ns)
        if request.stage is LookupStage.PROMOTING:
            assert request.wait is not None
            queued_ns = self._costs.queued_ns(now_ns)
            if not request.wait.is_over(queued_ns, now_ns):
                return None
            self._stats["promotions_given_up"] += 1
            request.end_wait(queued_ns, now_ns)
            request.miss_reason = "promotion deadline"
            for part in request.parts:
                part.promoting = 0
        assert request.stage is LookupStage.HELD, request.stage
        return None

    def _held(self, request: Request, tokens_max: int, now_ns: int) -> Outcome:
        """The answer to the engine, once the node has answered; None: the node was asked about
        further KV cache groups."""
        if request.is_verified and not all(part.is_verifiable for part in request.parts):
            self.release(request)
            self._count_failure(self._breaker, now_ns)
            request.failed, request.detail = "load failed", "the node sent no checksums"
            return self._miss(request, request.failed)
        local_tokens = request.local_blocks * self._sizes[0]
        if self._rules is None:
            blocks = request.first_block + request.found_blocks - request.local_blocks
            if self._config.lookahead_tokens:
                blocks -= 1  # what follows it need not be what followed it when it was stored
            tokens = blocks * self._sizes[0]
            if request.end_tokens:
                tokens = min(tokens, request.end_tokens - local_tokens)
        else:
            plan = self._plan(self._rules, request, tokens_max, now_ns)
            if plan is None:
                return None
            tokens = plan.tokens - local_tokens
        nothing, request.miss_reason = request.miss_reason, ""
        if request.plan is not None and request.plan.lacking_group:
            request.miss_reason = "group not stored"
            request.detail = self._config.group_names[request.plan.lacking_group]
        if tokens < max(self._config.min_load_tokens, 1):
            self.release(request)
            nothing = request.miss_reason or nothing or "not stored"
            return self._miss(request, "cost gate" if tokens > 0 else nothing)
        if request.is_shadow and self._is_due(self._hits_unchecked, self._config.shadow_every):
            self._hits_unchecked = 0
            request.stage = LookupStage.SHADOW
            request.failed = SHADOW_CHECK
            return self._miss(request, request.failed)
        return min(tokens, self._costs.least_tokens) if request.is_probe else tokens

    def _plan(
        self, rules: HitRules, request: Request, tokens_max: int, now_ns: int
    ) -> HitPlan | None:
        """The hit whose blocks are leased in all groups, maybe of 0 tokens; None: the node has just
        been asked for its blocks."""
        short = request.short_parts
        if request.plan is not None and not short:
            return request.plan
        for part in short:
            absent = slice(part.first + part.found_blocks, part.first + part.count)
            request.present.mark(part.group, absent, present=False)
        self._give_back(request, [part for part in request.parts if part.group])
        request.rounds += 1
        if request.rounds > ROUNDS_MAX:
            request.plan = HitPlan(0, (), lacking_group=short[0].group if short else 0)
            return request.plan
        local_tokens = request.first_block * self._sizes[0]
        if request.is_probe:
            tokens_max = min(tokens_max, local_tokens + self._costs.least_tokens)
        request.plan = plan = request.next_plan(rules, self._config, tokens_max)
        if plan.tokens > local_tokens:
            ranges = needed_blocks(plan, self._sizes, local_tokens, plan.tokens)
            for group, blocks in enumerate(ranges[1:], 1):
                self._ask_part(request, group, blocks)
        if all(part.reply for part in request.parts):
            return plan
        request.stage, request.asked_again_ns = LookupStage.ASKED, now_ns
        return None

    def _has_waited_long(self, request: Request, wanted_tokens: int, now_ns: int) -> bool:
        """Whether a request has waited too long to ask again. Each wait has a limit of its own;
        this one ends a row of waits, as with a node whose sessions come and go."""
        limit_ns = self._costs.answer_ns(wanted_tokens) + self._costs.computing_ns(wanted_tokens)
        limit_ns += self._config.heartbeat_timeout_ms * NS_PER_MS + request.queue_ns_max
        return 0 < request.waiting_since_ns < now_ns - limit_ns

    def _give_up(self, request: Request, now_ns: int) -> str:
        """The node did not answer in time: this request asks it no more."""
        self.release(request)
        self._count_failure(self._breaker, now_ns)
        request.failed = "deadline"
        return self._miss(request, request.failed)

    def replied(self, reply: wire.LeaseReply, now_ns: int) -> None:
        """Take the node's answer to a LeaseAsk; only the first one counts. The lease of a late
        answer is released."""
        part = self._by_lease.get(reply.lease)
        if part is None:
            if reply.slots:
                self._attachment.outbox.append(wire.LeaseRelease(leases=[reply.lease]))
            return
        if part.reply is not None:
            return
        request, part.reply = part.request, reply
        part.take(reply)
        part.ttl_ns = reply.ttl_ms * NS_PER_MS
        part.renew_at_ns = now_ns + part.ttl_ns // 3
        if request.stage is not LookupStage.ASKED or any(p.reply is None for p in request.parts):
            return
        self._breaker.succeeded()
        request.replied_at_ns = now_ns
        request.stage = LookupStage.HELD
        request.found_blocks = request.leading_blocks
        request.wait = self._worth_waiting(request, now_ns)
        if request.wait is not None:
            request.stage, request.waited = LookupStage.PROMOTING, True
            request.queue_ns_max = max(request.queue_ns_max, request.wait.queue_ns_max)
        elif any(part.promoting for part in request.parts):
            request.miss_reason = "cost gate"
        self._queue_rest(request)

    def grew(self, more: wire.LeaseMore, now_ns: int) -> None:
        """Take a LeaseMore: more blocks of a lease have come to dram, or no more will."""
        part = self._by_lease.get(more.lease)
        if part is None or part.reply is None:
            return
        request = part.request
        if part.is_closed or request.stage not in (LookupStage.ASKED, LookupStage.PROMOTING):
            part.is_closed, part.promoting = True, 0
            return  # nobody waits for them any more; they are released with the lease
        part.take(more)
        if request.wait is not None:
            self._look(request, request.wait, now_ns)

    def _look(self, request: Request, wait: BlockWait, now_ns: int) -> None:
        """Update the wait of a lookup after a LeaseMore; end it if no more blocks are coming."""
        found = request.found_blocks
        request.found_blocks = request.leading_blocks
        came = (request.found_blocks - found) * self._sizes[0]
        if request.plan is not None:  # it needs them all
            is_short = request.short_parts
            came = 0 if is_short else request.plan.tokens - request.first_block * self._sizes[0]
        coming = request.coming_tokens
        queued_ns = self._costs.queued_ns(now_ns)
        wait.arrived(self._costs.saving_ns(came), self._costs.saving_ns(coming), queued_ns, now_ns)
        if not coming:
            request.end_wait(queued_ns, now_ns)
            self._queue_rest(request)

    def _worth_waiting(self, request: Request, now_ns: int) -> BlockWait | None:
        """A wait for the blocks on their way, if there are any and computing takes longer."""
        coming = request.coming_tokens
        if not coming:
            return None
        estimate_ms, source = max(
            (part.reply.promoting_ms, part.reply.promoting_from)
            for part in request.parts
            if part.reply and part.promoting and bool(part.group) == (request.plan is not None)
        )
        estimate_ns = estimate_ms * NS_PER_MS
        is_first, request.has_weighed = not request.has_weighed, True
        return self._costs.wait(
            source, coming, estimate_ns, now_ns, lost_ns=request.lost_ns, is_first=is_first
        )

    def start_load(
        self, request: Request, tables: Sequence[Sequence[int]], tokens: int
    ) -> list[LoadJob]:
        """The jobs, one for each group, that fill the `tokens` of a hit behind the engine's own.
        `tables`: block tables of the request, by group."""
        assert request.stage is LookupStage.HELD, request.stage
        end_tokens = request.local_tokens + tokens
        assert request.plan is None or end_tokens == request.plan.tokens, (request.plan, end_tokens)
        self._loads_unverified = 0 if request.is_verified else self._loads_unverified + 1
        self._hits_unchecked += 1
        ranges = needed_blocks(request.plan, self._sizes, request.local_tokens, end_tokens)
        for group, size in enumerate(self._sizes):
            leased = slice(ranges[group].start, end_tokens // size)
            request.present.mark(group, leased, present=True)
        jobs = [
            request.load_job(group, blocks, keys=self._keys(request, group), table=tables[group])
            for group, blocks in enumerate(ranges)
            if blocks
        ]
        request.stage = LookupStage.LOADING
        request.load_reports_left = len(jobs) * self._config.hello.rank_count
        return jobs

    def reported(self, result: LoadResult, now_ns: int) -> bool:
        """Take one rank's result of a load. Returns whether all ranks have reported now."""
        part = self._by_lease.get(result.lease)
        if part is None or part.request.stage is not LookupStage.LOADING:
            return False
        request = part.request
        # Blocks that one rank cannot load often fail on others too: one failure, not many.
        if result.failed_block_ids and not request.failed:
            request.failed = request.miss_reason = "load failed"
            request.detail = result.reason
            if request.session == self._attachment.session:
                # Not for a session that ended under its loads.
                self._count_failure(self._copies, now_ns)
        if result.failed_block_ids:
            request.present.mark(part.group, slice(part.first, None), present=False)
        request.load_reports_left -= 1
        if request.load_reports_left:
            return False
        if not request.failed:
            self._copies.succeeded()
        request.is_trial = False
        self.release(request)
        return True

    def release(self, request: Request) -> None:
        """Give every lease of the lookup back. No effect when there is none."""
        self._give_back(request, request.parts)
        if request.wait is not None:
            request.wait.dropped()
            request.wait = None
        if request.is_trial:
            request.is_trial = False
            self._copies.return_probe()
        request.stage = LookupStage.NONE
        request.plan, request.rounds = None, 0

    def _give_back(self, request: Request, parts: Sequence[LookupPart]) -> None:
        released = [part.lease for part in parts if self._by_lease.pop(part.lease, None)]
        # An unanswered ask is released too: the node handles datagrams in order.
        if released and request.session == self._attachment.session:
            self._attachment.outbox.append(wire.LeaseRelease(leases=released))
        request.parts = [part for part in request.parts if part not in parts]

    def renew(self, now_ns: int) -> None:
        """Renew leases past a third of their life. Called every step; cheap when none is due."""
        due = []
        for lease, part in self._by_lease.items():
            if part.reply is not None and now_ns >= part.renew_at_ns:
                part.renew_at_ns = now_ns + part.ttl_ns // 3
                due.append(lease)
        for i in range(0, len(due), wire.LEASES_PER_DATAGRAM_MAX):
            batch = due[i : i + wire.LEASES_PER_DATAGRAM_MAX]
            self._attachment.outbox.append(wire.LeaseRenew(leases=batch))

    def _ask(self, request: Request, wanted_tokens: int, now_ns: int) -> str | None:
        """Ask the node, or, while it is about to attach, not yet: a later call asks. Returns the
        reason if this request does not ask at all."""
        attachment, first_block = self._attachment, request.local_blocks
        # Of an earlier question, before a preemption, nothing is told any more.
        request.first_block, request.asked_leases = first_block, []
        if not attachment.is_open:
            patience_ns = self._costs.answer_ns(wanted_tokens)
            if attachment.is_coming(now_ns, patience_ns):
                return None
            return self._miss(request, "node unreachable")
        if wanted_tokens < max(self._config.min_load_tokens, 1):
            return self._miss(request, "cost gate" if wanted_tokens > 0 else "no full block")
        request.is_probe = not self._costs.loads_pay
        if request.is_probe and not self._costs.may_probe(wanted_tokens):
            return self._miss(request, "cost gate")
        # Both or none: a probe that is not sent would never come back.
        if not (self._breaker.may_allow(now_ns) and self._copies.may_allow(now_ns)):
            return self._miss(request, "breaker open")
        self._breaker.allows(now_ns)
        self._copies.allows(now_ns)
        request.is_trial = self._copies.is_open
        request.is_shadow = self._is_due(self._hits_unchecked, self._config.shadow_every)
        due = self._is_due(self._loads_unverified, self._config.verify_every)
        request.is_verified = due or request.is_shadow
        request.session = attachment.session
        request.found_blocks = 0
        request.asked_at_ns, request.replied_at_ns = now_ns, 0
        request.asked_again_ns = now_ns
        request.waited, request.has_weighed, request.miss_reason = False, False, ""
        request.stage = LookupStage.ASKED
        # The node answers in order: these before the question that follows.
        is_known = request.hinted_session == attachment.session
        if not is_known or now_ns - request.hinted_ns > HINT_NS_MAX:
            attachment.outbox.extend(request.surveys(self._config, attachment.shard_counts))
        blocks = keys_per_ask(attachment.shard_counts[0]) * wire.ASKS_PER_LOOKUP_MAX
        end_block = min(len(self._keys(request, 0)), first_block + blocks)
        self._ask_part(request, 0, range(first_block, end_block))
        request.asked_leases = [part.lease for part in request.parts]
        return None

    def _keys(self, request: Request, group: int) -> Sequence[bytes]:
        return block_keys(request.sought, self._config.keys_per_block(group))

    def _ask_part(self, request: Request, group: int, blocks: range) -> None:
        """Ask for blocks of a group."""
        names, shards = self._keys(request, group), self._attachment.shard_counts[group]
        size = keys_per_ask(shards)
        for begin in blocks[::size]:
            batch = names[begin : min(begin + size, blocks.stop)]
            part = LookupPart(request, self._next_lease, group, begin, len(batch), shards)
            self._next_lease += 1
            request.parts.append(part)
            self._by_lease[part.lease] = part
            self._attachment.outbox.append(
                wire.LeaseAsk(part.lease, b"".join(batch), request.is_verified, group)
            )

    def _count_failure(self, breaker: Breaker, now_ns: int) -> None:
        if breaker.failed(now_ns):
            self._stats["breaker_openings"] += 1

    @staticmethod
    def _is_due(since: int, every: int) -> bool:
        """Whether the next one, `since` others after the last that was due, is the `every`-th; with
        0 none is."""
        return 0 < every <= since + 1

    def _miss(self, request: Request, reason: str) -> str:
        request.miss_reason = reason
        return reason

"""The scheduler side of a connector: requests and datagrams in, step plans and datagrams out.

    engine's scheduler ── new_request, match, allocated, fill, finished ─▶ core ──▶ StepPlan
    attach socket      ── connected, received, disconnected ─────────────▶ core ──▶ outbox

Joins `attachment` (connection), `lookups` (leases, loads) and `stores` (credits, fences); holds
the state of requests. Pure: no engine types, no clock, no socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from kvstore.client.core.attachment import Attachment
from kvstore.client.core.costs import Costs
from kvstore.client.core.lookups import EngineLookups
from kvstore.client.core.plan import (
    HitRules,
    LoadJob,
    LoadResult,
    Outcome,
    RankReport,
    SchedulerConfig,
    StepPlan,
)
from kvstore.client.core.pushes import EnginePushes
from kvstore.client.core.request import WAITING_STAGES, LookupStage, Presence, Request, block_keys
from kvstore.client.core.shadow import Shadows
from kvstore.client.core.stores import EngineStores, FilledBlocks
from kvstore.wire import messages as wire
from kvstore.wire.requests import DecodePart, PrefillPart

STORIES_KEPT_MAX = 64
"""Stories of requests that ended while the node was unreachable; sent when it is back."""


class SchedulerCore:
    """See the module. All times are the caller's monotonic nanoseconds."""

    def __init__(self, config: SchedulerConfig, rules: HitRules | None = None) -> None:
        """`rules`: of an engine with several KV cache groups."""
        assert (rules is not None) == (len(config.block_sizes) > 1)
        self.config = config
        self._rules = rules
        self.attachment = Attachment(config)
        self.stats = self.attachment.stats
        self.costs = Costs(config)
        self.lookups = EngineLookups(self.attachment, self.costs, rules)
        self.stores = EngineStores(self.attachment)
        self.pushes = EnginePushes(self.attachment, self.stores, rules)
        self._shadows = Shadows(self.attachment, self.lookups, self.stores)
        self.requests: dict[str, Request] = {}
        """Requests under way, by the engine's names."""
        self._by_tag: dict[int, Request] = {}
        self._next_tag = 1
        self._loads: list[LoadJob] = []
        self._incarnation = 0
        self._engine_holds_old = False
        """Blocks of before the last reset may still be in the engine's own cache."""
        self._now_ns = 0
        """The latest time that a caller gave."""
        self._untold: deque[tuple[int, wire.Story]] = deque(maxlen=STORIES_KEPT_MAX)
        """Stories not sent yet, with the time of each request's end."""

    # ── connection ───────────────────────────────────────────────────────────────────────────────

    def received(self, message: wire.Message, now_ns: int) -> str | None:
        """Take one datagram. Returns a reason when the socket must be closed."""
        self._now_ns = now_ns
        match message:
            case wire.LeaseReply():
                self.lookups.replied(message, now_ns)
            case wire.LeaseMore():
                self.lookups.grew(message, now_ns)
            case wire.PushEnd():
                self.pushes.ended(message)
            case wire.HintReply():
                request = self._by_tag.get(message.request)
                if request is not None:
                    first_block, flags = message.first_block, message.present
                    request.present.update_from_answer(message.group, first_block, flags)
            case _:
                reason = self.attachment.received(message, now_ns)
                if isinstance(message, wire.SessionOpen):
                    self.costs.opened(message)
                    self.pushes.session_opened()
                if self.attachment.incarnation != self._incarnation:
                    self._incarnation = self.attachment.incarnation
                    self.stores.recent.clear()
                    for entry in self.requests.values():
                        entry.present = Presence()  # the node may have lost everything
                self._tell_what_was_kept()
                return reason
        return None

    def take_outbox(self) -> list[wire.Message]:
        """Datagrams to send now, in order."""
        outbox, self.attachment.outbox = self.attachment.outbox, []
        return outbox

    def take_notices(self) -> list[str]:
        """Sentences for the log: one per change of state."""
        notices, self.attachment.notices = self.attachment.notices, []
        return notices

    def new_weights(self, epoch: str, now_ns: int, *, emptied: bool) -> None:
        """Weights changed or the cache was reset: nothing stored so far may be served again.

        The caller closes the socket; the next attachment opens a space of its own.

        Args:
            epoch: names that space.
            now_ns: now.
            emptied: the engine holds no block any more. If it does, nothing of its requests is
                stored, nor of later ones that begin with blocks of its own cache.
        """
        self.attachment.restart(epoch, now_ns)
        self.stores.recent.clear()
        self._engine_holds_old = not emptied
        if not emptied:
            for entry in self.requests.values():
                entry.is_old = True

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def new_request(
        self,
        request: str,
        keys: Sequence[bytes],
        *,
        prompt_tokens: int,
        now_ns: int,
        may_hint: bool = True,
        transfer: PrefillPart | DecodePart | None = None,
        tail: bytes = b"",
        traceparent: str = "",
    ) -> None:
        """A request arrived, maybe with a part in a transfer. Sends hints, if it may; pins
        nothing. `tail`: key of the prompt's tail, where a transfer includes it;
        ignored with several KV cache groups or drafts."""
        self._now_ns = now_ns
        has_tails = self._rules is None and not self.config.lookahead_tokens
        entry = Request(
            request,
            self._next_tag,
            keys,
            prompt_tokens=prompt_tokens,
            block_tokens=self.config.block_tokens,
            next_blocks=[0] * len(self.config.block_sizes),
            hint_sequence=self.stores.next_sequence(),
            transfer=transfer,
            traceparent=traceparent,
            tail=tail if transfer is not None and has_tails else b"",
            arrived_ns=now_ns,
        )
        self._next_tag += 1
        self.requests[request] = self._by_tag[entry.tag] = entry
        self._set_due(entry)
        if isinstance(transfer, PrefillPart):
            self.pushes.open(entry)
        elif transfer is not None and may_hint:
            self.pushes.expect(entry, transfer.node, now_ns)
        if not (self.attachment.is_open and may_hint):
            return
        # A decode engine's hint excludes the tail: its place is that of a block of the answer.
        keys = entry.stored
        for group in range(len(self.config.block_sizes)):
            if hinted := self._keys(keys, group)[: wire.KEYS_PER_DATAGRAM_MAX]:
                self.attachment.outbox.append(wire.Hint(entry.tag, b"".join(hinted), group))
        if len(keys) <= wire.KEYS_PER_DATAGRAM_MAX:
            entry.hinted_ns, entry.hinted_session = now_ns, self.attachment.session

    def match(
        self,
        request: str,
        *,
        local_tokens: int,
        now_ns: int,
        tokens_max: int = 0,
        may_ask: bool = True,
    ) -> Outcome:
        """How many tokens beyond `local_tokens` (whole blocks) can be loaded. `tokens_max`,
        `may_ask`: see `EngineLookups.match`."""
        entry, self._now_ns = self.requests[request], now_ns
        entry.local_tokens = local_tokens
        self.pushes.resumed(entry)
        self.pushes.look()
        outcome = self.lookups.match(entry, tokens_max=tokens_max, now_ns=now_ns, may_ask=may_ask)
        if outcome is not None:
            entry.answer = outcome
            # The engine repeats its question until it has room for the request.
            if entry.answered_ns <= entry.asked_at_ns:
                entry.answered_ns = now_ns
        return outcome

    def allocated(
        self, request: str, *, tables: Sequence[Sequence[int]], external_tokens: int, now_ns: int
    ) -> None:
        """The engine admitted the request; `tables` are its whole block tables, by KV cache group.

        With `external_tokens` > 0 a load is planned into the blocks after the local ones; with 0
        the engine computes, and held leases are given back.
        """
        entry = self.requests[request]
        self.pushes.admitted(entry, now_ns)
        if self._engine_holds_old and entry.local_tokens >= self.config.block_tokens:
            entry.is_old = True
            self._shadows.ended(entry)  # what it computes differs, and nobody is to blame
        # The engine repeats its question at will, but admits a request once a start.
        size = self.config.block_tokens
        file_tokens = min(external_tokens, entry.file_blocks * size)
        peer_tokens = min(external_tokens - file_tokens, entry.peer_blocks * size)
        if entry.answer is not None:
            self._count(entry.answer, file_tokens=file_tokens, peer_tokens=peer_tokens)
            entry.answer = None
            entry.cut_load(external_tokens)  # of an admission before a preemption
        if external_tokens > 0:
            jobs = self.lookups.start_load(entry, tables, external_tokens)
            self._loads.extend(jobs)
            entry.load_ns, entry.admitted_ns = {}, now_ns
            entry.loaded_tokens = external_tokens
            entry.file_tokens, entry.peer_tokens = file_tokens, peer_tokens
            self.stats["load_blocks"] += sum(len(job.block_ids) for job in jobs)
        elif entry.stage in WAITING_STAGES:
            self.lookups.release(entry)

    def begin_step(self, now_ns: int) -> None:
        """Note when the engine begins to plan a step: the time of first tokens that it knows by
        now."""
        self._now_ns = now_ns

    def settled_tokens(self, request: str, *, computed_tokens: int, known_tokens: int) -> int:
        """Tokens of the request that will be computed and verified after this step, or 0 when
        nothing is left to store or compare: the cheap question asked for every running request.

        Args:
            request: its id.
            computed_tokens: computed so far plus scheduled in this step (drafts included).
            known_tokens: verified tokens; drafts and placeholders are not among them.
        """
        entry = self.requests[request]
        if entry.stage is LookupStage.LOADING:
            return 0
        if known_tokens > entry.prompt_tokens and not entry.first_token_ns:
            entry.first_token_ns = self._now_ns
            self._set_due(entry)
        tokens = max(0, min(computed_tokens, known_tokens) - self.config.lookahead_tokens)
        if self.config.store == "prompt":
            tokens = min(tokens, entry.prompt_tokens)
        has_work = self.stores.has_work(entry, tokens) or self._shadows.has_work(entry, tokens)
        return tokens if has_work else 0

    def fill(self, request: str, *, tables: Sequence[Sequence[int]], settled_tokens: int) -> None:
        """Store, or compare, the blocks that this step completes. Call only if `settled_tokens` is
        not 0. `tables`: of the request, by KV cache group."""
        entry = self.requests[request]
        has_to_store = self.stores.has_work(entry, settled_tokens)
        for group, (size, table) in enumerate(zip(self.config.block_sizes, tables, strict=True)):
            names = self._keys(entry.stored, group)
            count = min(entry.full_blocks(settled_tokens, size), len(names), len(table))
            filled = FilledBlocks(group, names, table, count)
            self._shadows.bind(entry, filled)
            first = entry.next_blocks[group]
            if has_to_store and first < count:
                rules = self._rules
                needed = rules.are_needed(group, first, count) if rules is not None else None
                self.stores.bind(entry, filled, needed)
        self._set_due(entry)

    def _keys(self, keys: Sequence[bytes], group: int) -> Sequence[bytes]:
        return block_keys(keys, self.config.keys_per_block(group))

    def _set_due(self, entry: Request) -> None:
        blocks = zip(entry.next_blocks, self.config.block_sizes, strict=True)
        due = min((done + 1) * size for done, size in blocks) + self.config.lookahead_tokens
        if entry.tail_tokens:
            due = min(due, entry.prompt_tokens)
        entry.due_tokens = due if entry.first_token_ns else min(due, entry.prompt_tokens + 1)

    def finished(self, request: str, why_early: str = "", now_ns: int = 0) -> wire.Story:
        """The request ended; `why_early` is the reason if it did so early (aborted, failed).
        Returns its story. A running load ends by its ranks' reports."""
        self._now_ns = max(self._now_ns, now_ns)  # its only step may have begun long ago
        entry = self.requests.pop(request)
        del self._by_tag[entry.tag]
        self.lookups.queue(entry, 0)
        self.pushes.finished(entry, why_early, self._now_ns)
        if entry.stage in WAITING_STAGES:
            self.lookups.release(entry)
        self._shadows.ended(entry)
        if not why_early:
            entry.first_token_ns = entry.first_token_ns or self._now_ns
        story = entry.story(self.costs.saved_ns(entry.loaded_tokens), self._now_ns)
        self.stats["saved_prefill_ns"] += story.saved_ns
        self.stats["waited_ns"] += story.lookup_ns + story.promotion_ns + story.load_ns
        self.tell(story, self._now_ns)
        return story

    def tell(self, story: wire.Story, now_ns: int) -> None:
        """Send the story of a request that has ended, or bypasses the cache, once there is a
        session."""
        self._now_ns = now_ns
        if self.attachment.is_open:
            self.attachment.outbox.append(story)
        else:
            self._untold.append((self._now_ns, story))

    def _tell_what_was_kept(self) -> None:
        while self._untold and self.attachment.is_open:
            ended_ns, story = self._untold.popleft()
            age_ns = max(0, self._now_ns - ended_ns)
            self.attachment.outbox.append(msgspec.structs.replace(story, age_ns=age_ns))

    def _count(self, outcome: int | str, *, file_tokens: int, peer_tokens: int) -> None:
        """Count how a request was answered when it was admitted."""
        if isinstance(outcome, str):
            self.stats[f"misses:{outcome}"] += 1
            return
        self.stats["hits"] += 1
        self.stats["hit_tokens:file"] += file_tokens
        self.stats["hit_tokens:peer"] += peer_tokens
        self.stats["hit_tokens:dram"] += outcome - file_tokens - peer_tokens

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def plan(self, new_blocks: Iterable[int], now_ns: int, *, computed_tokens: int = 0) -> StepPlan:
        """This step's orders.

        Args:
            new_blocks: engine blocks handed out since the last plan.
            now_ns: now.
            computed_tokens: tokens that this step computes, of all requests.
        """
        step = self.costs.compute.planned(computed_tokens, now_ns)
        self._now_ns = now_ns
        self.pushes.settle(now_ns)
        self.lookups.renew(now_ns)
        targets = (block for job in self._loads for block in job.block_ids)
        fence = self.stores.fence([*new_blocks, *targets])
        stores = self.stores.take_jobs(now_ns)
        # Last: what fails above leaves the loads for `rescue_plan`.
        return StepPlan(self._take_loads(), stores, fence, step)

    def rescue_plan(self) -> StepPlan:
        """The last plan of a caller that cannot go on: the loads that the engine waits for, and a
        fence of all blocks whose copy may still run, since no later plan can fence them."""
        fence = tuple(sorted({*self.stores.source_blocks()}))
        return StepPlan(loads=self._take_loads(), fence_blocks=fence)

    def _take_loads(self) -> tuple[LoadJob, ...]:
        loads, self._loads = tuple(self._loads), []
        return loads

    def reported(self, report: RankReport, now_ns: int) -> None:
        """Take one rank's report."""
        self.costs.reported(report.step, now_ns)
        if self.attachment.is_open and (news := self.costs.take_news()) is not None:
            self.attachment.outbox.append(news)
        self._now_ns = now_ns
        for result in report.loads:
            self._load_reported(report.rank, result, now_ns)
        for entry in self.stores.reported(report):
            self._shadows.finished(entry)
        self.pushes.settle(now_ns)
        self.stats["store_blocks_sealed"] += report.blocks_sealed
        self.stats["store_blocks_dropped"] += report.blocks_dropped
        self.stats["store_bytes"] += report.store_bytes
        self.stats["store_ns"] += report.store_ns
        self.stats["fence_ns"] += report.fence_ns

    def _load_reported(self, rank: int, result: LoadResult, now_ns: int) -> None:
        self.stats["load_bytes"] += result.bytes_moved
        self.stats["load_ns"] += result.duration_ns
        entry = self.requests.get(result.request)
        if result.failed_block_ids and not (entry and entry.failed):
            self.stats["load_failures"] += 1
        if entry is not None:
            entry.load_ns[rank] = entry.load_ns.get(rank, 0) + result.duration_ns
            if result.failed_block_ids:
                # With several groups the engine computes the whole request.
                blocks = 0 if self._rules else result.loaded_blocks
                entry.cut_load(blocks * self.config.block_tokens)
        has_ended = self.lookups.reported(result, now_ns)
        if self._rules is None:
            tokens = result.loaded_blocks * self.config.block_tokens
            self.costs.load.loaded(tokens, result.duration_ns)
        elif has_ended and entry is not None:
            for duration_ns in entry.load_ns.values():  # of all groups
                self.costs.load.loaded(entry.loaded_tokens, duration_ns)

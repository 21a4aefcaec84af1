"""The scheduler's half of the connector: vllm's requests and steps to `client.core`, and back.

Translates only. Runs on the engine's scheduler thread and waits for the node in one case only: it
watches the socket for the answer to a lookup, for `_SPIN_NS_PER_STEP` a step, or `_SPIN_NS_IDLE`
while nothing is computed: an answer usually takes less than the extra step of "ask again". For
blocks from disk or of a push (up to `pushes.WATCH_NS_MAX`) only an engine that computes nothing
watches. While it is idle a thread looks instead (`Attendant`), never both at once.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvstore.client.core.plan import LoadJob, StepPlan
from kvstore.client.core.request import cut_name
from kvstore.client.core.scheduler import SchedulerCore
from kvstore.client.link import Link, Lost
from kvstore.connector.copier import SELECT_FD_END
from kvstore.connector.prompts import Adapters, adapter_keys, tail_key, why_left_out
from kvstore.errors import AttachError, ProtocolError
from kvstore.obs.logs import RateLimit
from kvstore.wire.messages import Message, Story
from kvstore.wire.requests import DecodePart, PrefillPart, read_transfer, traceparent_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.request import Request

    from kvstore.client.core.plan import Outcome, RankReport, SchedulerConfig
    from kvstore.connector.config import ConnectorConfig
    from kvstore.connector.groups import EngineGroups


logger = logging.getLogger("vllm.kvstore.scheduler")
logger.addFilter(RateLimit())
request_logger = logging.getLogger("vllm.kvstore.requests")

_SPIN_NS_PER_STEP = 300_000
_SPIN_NS_IDLE = 3_000_000
"""Longest watch in a step while the engine has nothing to compute: a step more costs 1 to 2 ms."""
_KEYS_ASKED_PER_STEP = 4096
"""Most keys of lookups begun in one step: joining and sending them takes its thread up to 2 ms."""
_UNREAD_NS_MAX = 250_000_000
"""A node that takes nothing from a full socket for this long is as good as stopped."""
_ENDED_EARLY = {
    "FINISHED_ABORTED": "aborted",
    "FINISHED_IGNORED": "too long",
    "FINISHED_ERROR": "failed",
}
_IDLE_NS = 100_000_000
"""An engine that has not looked at the socket for this long is idle, or in a long step."""


class SchedulerSide:
    """One per engine, in the scheduler's process."""

    def __init__(
        self,
        config: ConnectorConfig,
        core_config: SchedulerConfig,
        groups: EngineGroups,
        *,
        adapter_dtype: str = "",
        in_lockstep: bool = False,
    ) -> None:
        """`in_lockstep`: other data-parallel ranks wait for each step of this engine."""
        self._config, self._groups = config, groups
        self._tail_block_tokens = 0 if groups.are_several else core_config.block_tokens
        self._core = SchedulerCore(core_config, groups.rules)
        self._link = Link()
        self._adapters = Adapters(dtype=adapter_dtype)
        self._requests: dict[str, Request] = {}
        self._unread: set[str] = set()
        """Requests that wait for their adapter to be read."""
        self._in_lockstep = in_lockstep
        self._watched_ns = 0
        """Time spent in this step on watching the socket."""
        self._computing: set[str] = set()
        """Requests that were admitted to compute and have not ended: they wait for a step."""
        self._keys_left = _KEYS_ASKED_PER_STEP
        self._unsent: deque[Message] = deque()
        """Messages that a full socket did not take yet; bounded: no lookup begins meanwhile."""
        self._unsent_since_ns = 0
        self._pool: BlockPool | None = None
        self._promised: LoadJob | None = None
        """A load that the core may not have planned yet."""
        self._unreturned: StepPlan | None = None
        """A plan that the engine may not have got yet."""
        self._polled_ns = 0
        self._closed = False
        self.poll()

    # ── the socket ───────────────────────────────────────────────────────────────────────────────

    def attend(self) -> None:
        """Poll the socket in place of steps while the engine makes none."""
        if time.monotonic_ns() - self._polled_ns >= _IDLE_NS:
            self.poll()

    def poll(self) -> None:
        """Receive the node's messages, notice its absence, send messages that are due. Never
        waits."""
        core, now_ns = self._core, time.monotonic_ns()
        self._polled_ns = now_ns
        if self._closed:
            return
        if self._link.closed and core.attachment.dial.is_due(now_ns):
            self._connect(now_ns)
        for message in self._link.receive():
            reason = message.reason if isinstance(message, Lost) else core.received(message, now_ns)
            if reason is not None:
                self._drop(reason, now_ns)
                break
        page = self._link.generations
        if reason := core.attachment.check_heartbeat(now_ns, page.heartbeat_ns() if page else 0):
            self._drop(reason, now_ns)
        self._flush(now_ns)
        for notice in core.take_notices():
            logger.info("kvstore: %s", notice)

    def _connect(self, now_ns: int) -> None:
        try:
            self._link = Link.connect(self._config.socket, self._core.attachment.hello())
        except AttachError as error:
            self._core.attachment.connect_failed(now_ns, str(error))
        else:
            self._core.attachment.dial.connected(now_ns)

    def _flush(self, now_ns: int) -> None:
        is_behind = bool(self._unsent)
        for message in self._core.take_outbox():
            # Stories may be lost; in a backlog they would only make it longer.
            if not (is_behind and isinstance(message, Story)):
                self._unsent.append(message)
        if self._link.closed:
            self._unsent.clear()
        while self._unsent and self._link.send(self._unsent[0]):
            self._unsent.popleft()
            self._unsent_since_ns = now_ns
        if not self._unsent:
            self._unsent_since_ns = now_ns
        elif now_ns - self._unsent_since_ns > _UNREAD_NS_MAX:
            self._drop("the node does not read its socket", now_ns)

    def _drop(self, reason: str, now_ns: int) -> None:
        self._link.close()
        self._unsent.clear()
        self._core.attachment.disconnected(now_ns, reason)

    def _watch(self, watch_ns: int) -> None:
        """Wait up to `watch_ns` for a message of the node, such as the answer to a question just
        asked, and take it."""
        if self._link.closed or self._link.fileno() >= SELECT_FD_END:
            self._watched_ns += watch_ns
            return
        begin_ns = time.monotonic_ns()
        select.select([self._link.fileno()], [], [], watch_ns / 1e9)
        self.poll()
        self._watched_ns += time.monotonic_ns() - begin_ns

    @property
    def _is_idle(self) -> bool:
        """Whether only requests that the next step would begin wait for that step."""
        return not (self._computing or self._in_lockstep)

    def _watch_left_ns(self, request_id: str) -> int:
        if not self._is_idle:
            return _SPIN_NS_PER_STEP - self._watched_ns
        push_ns = self._core.pushes.watch_ns(request_id, time.monotonic_ns())
        return max(_SPIN_NS_IDLE, push_ns) - self._watched_ns

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def on_new_request(self, request: Request) -> None:
        """Hint the node about a new request."""
        self.poll()
        self._begin(request)

    def _begin(self, request: Request) -> bool:
        """Hint the node, or leave the request out. False: its adapter is being read."""
        now_ns, keys = time.monotonic_ns(), self._keys(request)
        if keys is None:
            self._unread.add(request.request_id)
            return False
        transfer = self._transfer(request)
        if isinstance(keys, str):
            if isinstance(transfer, PrefillPart):
                self._core.pushes.leave_out(request.request_id, transfer, keys)
            self._leave_out(request, keys, now_ns)
            return True
        self._core.new_request(
            request.request_id,
            keys,
            prompt_tokens=request.num_prompt_tokens,
            now_ns=now_ns,
            may_hint=not self._unsent,  # in a backlog hints would only make it longer
            transfer=transfer,
            traceparent=traceparent_of(request.trace_headers),
            tail=tail_key(request, keys, transfer, self._tail_block_tokens),
        )
        self._requests[request.request_id] = request
        self._flush(now_ns)
        return True

    def _transfer(self, request: Request) -> PrefillPart | DecodePart | None:
        """The request's part in a transfer, if any. Its parameters come from clients: broken ones
        are counted, logged and ignored."""
        try:
            return read_transfer(request.kv_transfer_params, request.request_id)
        except ProtocolError as error:
            self._core.stats["pushes_malformed"] += 1
            logger.warning("kvstore: a request's parameters are ignored: %s", error)
            return None

    def _leave_out(self, request: Request, reason: str, now_ns: int) -> None:
        story = Story(
            cut_name(request.request_id),
            prompt_tokens=request.num_prompt_tokens,
            outcome=reason,
            traceparent=traceparent_of(request.trace_headers),
        )
        self._core.tell(story, now_ns)
        self._flush(now_ns)

    def _keys(self, request: Request) -> Sequence[bytes] | str | None:
        """Keys of a request; a text: why it bypasses the cache; None: its adapter is being read.
        The answer may change: a session may get images after its first prompt, and the files of an
        adapter may change."""
        if reason := why_left_out(request, self._config.images):
            return reason
        own: Sequence[bytes] = request.block_hashes
        if request.lora_request is None:
            return own
        digest = self._adapters.look(request.lora_request, time.monotonic_ns())
        return adapter_keys(request, digest) if isinstance(digest, bytes) else digest and "adapter"

    def get_num_new_matched_tokens(
        self, request: Request, local_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to load beyond the local ones; None: ask again next step."""
        self._computing.discard(request.request_id)  # preempted, if it was
        if request.request_id in self._unread:
            self._unread.discard(request.request_id)
            if not self._begin(request):
                return None, False
        if request.request_id not in self._requests or request.skip_reading_prefix_cache:
            return 0, False
        if isinstance(self._keys(request), str):
            return 0, False
        self.poll()
        outcome = self._match(request, local_tokens)
        while (
            outcome is None
            and not self._link.closed
            and (watch_ns := self._watch_left_ns(request.request_id)) > 0
            and not self._unsent
            and (self._is_idle or self._core.requests[request.request_id].awaits_answer)
        ):
            self._flush(time.monotonic_ns())
            self._watch(watch_ns)
            outcome = self._match(request, local_tokens)
        self._flush(time.monotonic_ns())
        if isinstance(outcome, str):
            return 0, False
        return outcome, outcome is not None

    def _match(self, request: Request, local_tokens: int) -> Outcome:
        asked_before = self._core.lookups.leases_open
        outcome = self._core.match(
            request.request_id,
            local_tokens=local_tokens,
            tokens_max=request.num_tokens - 1,
            now_ns=time.monotonic_ns(),
            may_ask=self._keys_left > 0 and not self._unsent,
        )
        if self._core.lookups.leases_open > asked_before:
            self._keys_left -= len(request.block_hashes)
        return outcome

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, external_tokens: int
    ) -> None:
        """The engine admitted the request with this block table."""
        if not external_tokens:
            self._computing.add(request.request_id)
        if request.request_id not in self._requests:
            return
        tables = self._groups.tables(blocks.get_block_ids()) if external_tokens else ()
        if external_tokens:
            # Should an error of ours follow, this load still ends: as failed, and computed again.
            # The engine's own blocks before it are others' too, and valid.
            local_blocks = self._core.requests[request.request_id].local_blocks
            targets = tuple(tables[0][local_blocks:])
            self._promised = LoadJob(
                request=request.request_id, lease=0, session=0, block_ids=targets
            )
        self._core.allocated(
            request.request_id,
            tables=tables,
            external_tokens=external_tokens,
            now_ns=time.monotonic_ns(),
        )
        self._promised = None

    def file_tokens(self, request: Request) -> int:
        """Tokens of the request's load that came from disk for it."""
        entry = self._core.requests.get(request.request_id)
        return entry.file_tokens if entry is not None else 0

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """The request ended; its blocks are free at once, fences protect running copies. Returns
        the parameters for a decode engine, if it was prefilled for one."""
        why_early = _ENDED_EARLY.get(request.status.name, "")
        answer = self._core.pushes.answer(request.request_id, request.num_prompt_tokens)
        answer = answer or self._adapters.answer(request, time.monotonic_ns())
        self._end(request, why_early)
        return None if why_early else answer

    def _end(self, request: Request, why_early: str) -> None:
        self._computing.discard(request.request_id)
        if request.request_id in self._unread:
            self._unread.discard(request.request_id)
            self._leave_out(request, "adapter", time.monotonic_ns())
        if self._requests.pop(request.request_id, None) is None:
            return
        story = self._core.finished(request.request_id, why_early, time.monotonic_ns())
        self._flush(time.monotonic_ns())
        if self._config.log_requests:
            request_logger.info(
                "kvstore: request %s: prompt %d tokens, engine's own %d, loaded %d%s, "
                "lookup %.2f ms, load %.2f ms, blocks stored or known %d",
                story.request,
                story.prompt_tokens,
                story.local_tokens,
                story.loaded_tokens,
                f" ({story.outcome})" if story.outcome else "",
                story.lookup_ns / 1e6,
                story.load_ns / 1e6,
                story.stored_blocks,
            )

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def build_plan(self, output: SchedulerOutput) -> StepPlan:
        """This step's orders to the ranks."""
        self.poll()
        self._core.begin_step(self._polled_ns)
        self._computing.update(output.num_scheduled_tokens)
        for request_id in output.preempted_req_ids or ():
            self._core.pushes.preempted(request_id)
        self._watched_ns = 0
        self._keys_left = _KEYS_ASKED_PER_STEP
        state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            computed = request.num_computed_tokens + scheduled
            entry = self._core.requests[request_id]
            if entry.left_tokens:
                self._core.lookups.queue(entry, entry.prompt_tokens - computed)
            # Most steps complete no block of a request.
            if computed >= entry.due_tokens and state is not None:
                self._store(request, computed, state)
        self._unreturned = plan = self._core.plan(
            _new_blocks(output, self._groups.table_tokens),
            time.monotonic_ns(),
            computed_tokens=sum(output.num_scheduled_tokens.values()),
        )
        self._flush(time.monotonic_ns())
        self._unreturned = None
        return plan

    def _store(self, request: Request, computed: int, state: KVConnectorBlockState) -> None:
        """Store the blocks that this step completes, as far as there is room for them."""
        if isinstance(self._keys(request), str):
            return
        request_id = request.request_id
        settled = self._core.settled_tokens(
            request_id, computed_tokens=computed, known_tokens=request.num_tokens
        )
        block_ids = state.get_block_ids(request_id) if settled else None
        if block_ids is not None:
            offers = state.boundary_state_offloads.get(request_id, ())
            tables = self._groups.stored_tables(block_ids, offers)
            self._core.fill(request_id, tables=tables, settled_tokens=settled)

    def rescue_plan(self) -> StepPlan:
        """The plan to send after an error of ours: loads that the engine waits for must still reach
        the ranks."""
        plan = self._unreturned or self._core.rescue_plan()
        if self._promised is not None:
            plan = msgspec.structs.replace(plan, loads=(*plan.loads, self._promised))
        self._unreturned = self._promised = None
        return plan

    def reported(self, reports: Iterable[RankReport]) -> None:
        """Take the ranks' reports."""
        now_ns = time.monotonic_ns()
        for report in reports:
            self._core.reported(report, now_ns)
        self._flush(now_ns)

    def has_pending_work(self) -> bool:
        """Whether an idle engine should keep stepping for running copies."""
        return self._core.stores.running(time.monotonic_ns())

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Keep the pool of the engine's own blocks, which shows whether a reset emptied it."""
        self._pool = pool

    def reset(self, epoch: str) -> bool:
        """Move to a space of its own: nothing stored before is served again. False when the engine
        still holds blocks of before, which its own reset, just tried, then left in its cache."""
        now_ns, pool = time.monotonic_ns(), self._pool
        # One block, which pads tables, is never free.
        emptied = pool is not None and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        self._core.new_weights(epoch, now_ns, emptied=emptied)
        self._link.close()
        self._unsent.clear()
        self.poll()
        return emptied

    def take_stats(self) -> dict[str, int]:
        """Counts since the last call."""
        return self._core.stats.take()

    def cannot_be_served(self, reason: str) -> None:
        """A rank's cache cannot be shared: log the reason and report it to the node."""
        self._core.attachment.cannot_be_served(reason)
        self.poll()

    def close(self, unserved: str = "") -> None:
        """Detach, for ever. `unserved`: why the engine goes on without a cache, for its
        operator."""
        if unserved:
            self.cannot_be_served(unserved)
        self._closed = True
        self._adapters.close()
        self._drop("the engine is shutting down", time.monotonic_ns())


def _new_blocks(output: SchedulerOutput, table_tokens: Sequence[int]) -> list[int]:
    """Engine blocks that the forward or a copy of this step will overwrite. Blocks computed before,
    such as prefix-cache hits, are only read; the core names a load's targets. `table_tokens`: of a
    block, by group; 0: all its blocks are written in every step."""
    blocks: list[int] = []

    def add(tables: Sequence[list[int]], computed: int) -> None:
        for table, tokens in zip(tables, table_tokens, strict=True):
            blocks.extend(table[computed // tokens if tokens else 0 :])

    for new in output.scheduled_new_reqs:
        add(new.block_ids, new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    for request_id, tables, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        # The whole table for a request that was preempted, for others the blocks added to it.
        if tables is not None:
            add(tables, computed if request_id in cached.resumed_req_ids else 0)
    blocks.extend(copy[1] for copy in output.kv_cache_block_copies or ())
    return blocks


# ── while the engine is idle ──────────────────────────────────────────────────────────────────────

TICK_S: Final = 0.1
END_S_MAX: Final = 1.0
TURN: Final = threading.RLock()
"""One lock for all connectors of this process: they work on one thread anyway."""
os.register_at_fork(before=TURN.acquire, after_in_parent=TURN.release, after_in_child=TURN.release)


class Attendant:
    """The thread that keeps an idle engine attached.

    The scheduler's half looks at its socket in the steps of the engine, and an idle engine makes
    none: after a restart of the node its next request would miss. So this thread looks ten times a
    second, whenever the engine has not. Methods of the connector and this thread take turns
    (`TURN`): the thread skips a look rather than wait, and the engine waits for one look at most.
    After a fork the child has no such thread, and finds nothing half done.
    """

    def __init__(
        self, attend: weakref.WeakMethod[Callable[[], object]], *, tick_s: float = TICK_S
    ) -> None:
        """`attend`: one look, which raises nothing; when its owner is gone, so is the thread."""
        self._attend = attend
        self._tick_s = tick_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-attend", daemon=True)

    def start(self) -> None:
        """Begin to look. Once."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; from any thread."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(END_S_MAX)

    def _run(self) -> None:
        while not self._stopped.wait(self._tick_s):
            if TURN.acquire(blocking=False):
                try:
                    attend = self._attend()
                    if attend is None or self._stopped.is_set():
                        return
                    attend()
                    del attend
                finally:
                    TURN.release()

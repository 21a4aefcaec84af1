"""A simulated engine like vLLM: chunked prefill beside decodes, a prefix cache with LRU.

    submit ─▶ waiting ─▶ prefill in chunks ─▶ first token ─▶ decode, a token a step ─▶ done

A step takes `step_s`, `stream_s` for each decode in it, and the prefill tokens at `tokens_per_s`,
each made slower by the context that it attends to. Decodes go first, then prefills in the order of
arrival, `chunk_tokens` in all. Steps without prefill are taken many at once.
Does not cover: preemption (a request enters when all its blocks, its answer's too, are free).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import Final

import msgspec

BLOCK_TOKENS: Final = 512


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """Timing of one engine: about an 8B model on one H100."""

    tokens_per_s: float = 24_000.0
    attention_tokens: float = 65_536.0
    step_s: float = 0.006
    stream_s: float = 0.000_06
    chunk_tokens: int = 2048
    cache_blocks: int = 900
    running_max: int = 256
    link_s: float = 0.001
    link_tokens_per_s: float = 75_000.0
    """To another engine: 10 GB/s at 131 kB a token."""
    dram_blocks: int = 0
    """Node's tier beside the engine; 0: none."""
    dram_tokens_per_s: float = 150_000.0


class Job(msgspec.Struct):
    """A request in the simulation. `blocks`: numbers of its full blocks."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str = ""
    tenant: str = ""
    service: str = ""
    worker: int = -1
    cached_tokens: int = 0
    computed: int = 0
    first_s: float = -1.0
    end_s: float = -1.0
    status: int = 200
    parent: Job | None = None
    """Of a remote prefill: the request that it is a leg of."""
    arrived_tokens: int = 0
    """Tokens whose KV came from a prefiller."""
    ready_s: float = 0.0
    """Its load from a tier is done."""
    reserved: int = 0
    held: tuple[int, ...] = ()

    @property
    def ttft_s(self) -> float:
        """From arrival."""
        return self.first_s - self.arrival_s

    @property
    def itl_s(self) -> float:
        """Mean time between tokens."""
        return (self.end_s - self.first_s) / max(1, self.output_tokens - 1)


class SimulatedEngine:
    """See the module. Time is what the caller says."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.decoding: list[tuple[int, int, Job]] = []
        """Heap by the step in which the last token comes."""
        self.free: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody uses, oldest first."""
        self.used: dict[int, int] = {}
        self.reserved = 0
        """Blocks in use without a number that others can hit."""
        self.dram: OrderedDict[int, None] = OrderedDict()
        self.steps = 0
        self.until_s = 0.0
        self.version = 0
        self._begin_s = 0.0
        self._jump = 0
        self._step_s = 0.0
        self._plan: list[tuple[Job, int]] = []
        self.changes: list[tuple[bool, int]] = []
        """(is stored, block) since somebody looked, in order."""

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return self._jump > 0

    @property
    def running(self) -> int:
        """Requests that are admitted."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def used_share(self) -> float:
        """Share of the cache that running requests hold, as engines report it."""
        return (len(self.used) + self.reserved) / self.model.cache_blocks

    def hit_blocks(self, blocks: tuple[int, ...]) -> int:
        """Leading blocks in the cache."""
        for count, block in enumerate(blocks):
            if block not in self.used and block not in self.free:
                return count
        return len(blocks)

    def dram_hits(self, blocks: tuple[int, ...]) -> int:
        """Leading blocks in the cache or in dram of the node."""
        for count, block in enumerate(blocks):
            if block not in self.used and block not in self.free and block not in self.dram:
                return count
        return len(blocks)

    def submit(self, job: Job, now_s: float) -> None:
        """Queue a request."""
        self.waiting.append(job)
        if not self._jump:
            self._begin(now_s)
        elif not self._plan:  # a run of plain decode steps: it ends with the step under way
            done = int((now_s - self._begin_s) / self._step_s)
            if done + 1 < self._jump:
                self._jump = done + 1
                self.until_s = self._begin_s + self._jump * self._step_s
                self.version += 1

    def abort(self, job: Job, now_s: float) -> None:
        """Its client has left. The step under way goes on without it."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self.prefilling:
            self.prefilling.remove(job)
            self._plan = [each for each in self._plan if each[0] is not job]
            self._release(job)
        elif any(each is job for *_, each in self.decoding):
            self.decoding = [each for each in self.decoding if each[2] is not job]
            heapq.heapify(self.decoding)
            self._release(job)
            if not self._plan and self._jump > 1:
                self._jump = 1 + int((now_s - self._begin_s) / self._step_s)
                self.until_s = self._begin_s + self._jump * self._step_s
                self.version += 1

    def advance(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """The step that ends now: jobs with their first token, jobs that are done."""
        self.steps += self._jump
        firsts, ends = [], []
        while self.decoding and self.decoding[0][0] <= self.steps:
            job = heapq.heappop(self.decoding)[2]
            job.end_s = now_s
            self._release(job)
            ends.append(job)
        for job, tokens in self._plan:
            job.computed += tokens
            if job.computed >= job.prompt_tokens:
                self.prefilling.remove(job)
                self._seal(job)
                job.first_s = now_s
                firsts.append(job)
                if job.output_tokens <= 1:
                    job.end_s = now_s
                    self._release(job)
                    ends.append(job)
                else:
                    last = self.steps + job.output_tokens - 1
                    heapq.heappush(self.decoding, (last, job.number, job))
        self._jump = 0
        self._begin(now_s)
        return firsts, ends

    def _begin(self, now_s: float) -> None:
        model, streams = self.model, len(self.decoding)
        budget = model.chunk_tokens - streams
        self._plan = []
        prefill_s = 0.0
        for job in self.prefilling:
            budget, cost_s = self._chunk(job, budget, now_s)
            prefill_s += cost_s
        while budget > 0 and self.waiting and self._may_admit(self.waiting[0], now_s):
            job = self.waiting.popleft()
            self.prefilling.append(job)
            budget, cost_s = self._chunk(job, budget, now_s)
            prefill_s += cost_s
        if self._plan:
            self._jump = 1
        elif streams:
            self._jump = self.decoding[0][0] - self.steps
        elif self.prefilling:  # loads are under way
            self._jump = 1
            self._step_s = max(0.0, min(job.ready_s for job in self.prefilling) - now_s) + 1e-6
            self._begin_s, self.until_s = now_s, now_s + self._step_s
            self.version += 1
            return
        else:
            self._jump = 0
            self.version += 1
            return
        if self.prefilling and not self._plan:
            self._jump = 1
        self._step_s = model.step_s + streams * model.stream_s + prefill_s
        self._begin_s, self.until_s = now_s, now_s + self._jump * self._step_s
        self.version += 1

    def _chunk(self, job: Job, budget: int, now_s: float) -> tuple[int, float]:
        tokens = min(budget, job.prompt_tokens - job.computed)
        if tokens <= 0 or job.ready_s > now_s:
            return budget, 0.0
        context = job.computed + tokens / 2
        self._plan.append((job, tokens))
        slower = 1 + context / self.model.attention_tokens
        return budget - tokens, tokens / self.model.tokens_per_s * slower

    def _may_admit(self, job: Job, now_s: float) -> bool:
        """Allocate all blocks of a request, or nothing."""
        model = self.model
        if len(self.prefilling) + len(self.decoding) >= model.running_max:
            return False
        hits = self.hit_blocks(job.blocks)
        if hits * BLOCK_TOKENS >= job.prompt_tokens:
            hits -= 1
        held = job.blocks[:hits]
        total = -(-(job.prompt_tokens + job.output_tokens) // BLOCK_TOKENS)
        new = total - hits
        idle = sum(1 for block in held if block in self.free)
        if len(self.used) + idle + self.reserved + new > model.cache_blocks:
            if self.used or self.reserved:
                return False
            new = max(0, model.cache_blocks - hits)  # larger than the cache: takes all of it
        for block in held:
            self.free.pop(block, None)
            self.used[block] = self.used.get(block, 0) + 1
        self.reserved += new
        while self.free and len(self.used) + self.reserved + len(self.free) > model.cache_blocks:
            self._evict()
        job.held, job.reserved = held, new
        job.computed = job.cached_tokens = hits * BLOCK_TOKENS
        job.computed = max(job.computed, job.arrived_tokens)
        if model.dram_blocks:
            self._load(job, hits, now_s)
        return True

    def _load(self, job: Job, hits: int, now_s: float) -> None:
        more = self.dram_hits(job.blocks) - hits
        if (hits + more) * BLOCK_TOKENS >= job.prompt_tokens:
            more -= 1
        if more > 0:
            job.ready_s = now_s + more * BLOCK_TOKENS / self.model.dram_tokens_per_s
            job.computed = job.cached_tokens = (hits + more) * BLOCK_TOKENS

    def _evict(self) -> None:
        block, _ = self.free.popitem(last=False)
        self.changes.append((False, block))

    def _seal(self, job: Job) -> None:
        """Its blocks can be hit."""
        sealed: list[int] = []
        for block in job.blocks[len(job.held) :]:
            if block in self.free:
                self.free.pop(block)
                self.used[block] = 1
            elif block in self.used:
                self.used[block] += 1
            elif job.reserved > 0:
                self.used[block] = 1
                self.reserved -= 1
                job.reserved -= 1
                self.changes.append((True, block))
            else:
                break
            sealed.append(block)
        job.held = (*job.held, *sealed)
        if self.model.dram_blocks:
            for block in job.blocks:
                self.dram[block] = None
                self.dram.move_to_end(block)
            while len(self.dram) > self.model.dram_blocks:
                self.dram.popitem(last=False)

    def _release(self, job: Job) -> None:
        for block in reversed(job.held):
            self.used[block] -= 1
            if not self.used[block]:
                del self.used[block]
                self.free[block] = None
        self.reserved -= job.reserved
        job.held, job.reserved = (), 0

    def check(self) -> None:
        """Raises AssertionError if blocks are lost."""
        assert len(self.used) + len(self.free) + self.reserved <= self.model.cache_blocks
        assert not self.used.keys() & self.free.keys()

"""What no router beats: every request alone on an idle engine, with a cache that all engines share.

cache without limit ─▶ a bound on any router's mean TTFT
one LRU cache of the size of all engines' together ─▶ what placement alone can reach
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from bench.routing.engine import BLOCK_TOKENS, EngineModel, Job
from bench.routing.traces import RouterTrace


def alone_s(job: Job, hits: int, model: EngineModel) -> float:
    """TTFT on an idle engine that has its first blocks."""
    at, seconds = hits * BLOCK_TOKENS, 0.0
    while at < job.prompt_tokens:
        tokens = min(model.chunk_tokens, job.prompt_tokens - at)
        slower = 1 + (at + tokens / 2) / model.attention_tokens
        seconds += model.step_s + tokens / model.tokens_per_s * slower
        at += tokens
    return seconds


def mean_alone_s(trace: RouterTrace, model: EngineModel, cache_blocks: int | None) -> float:
    """Args:
    cache_blocks: of the shared cache; None: it keeps everything.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    total = 0.0
    for job in trace.jobs:
        hits = _leading(job.blocks, cache)
        hits -= hits * BLOCK_TOKENS >= job.prompt_tokens
        total += alone_s(job, hits, model)
        for block in reversed(job.blocks):  # the end of a chain leaves first
            cache[block] = None
            cache.move_to_end(block)
        while cache_blocks is not None and len(cache) > cache_blocks:
            cache.popitem(last=False)
    return total / len(trace.jobs)


def _leading(blocks: Sequence[int], cache: OrderedDict[int, None]) -> int:
    for count, block in enumerate(blocks):
        if block not in cache:
            return count
    return len(blocks)

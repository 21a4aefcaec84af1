"""Kinds of engines: where their health and metrics are, and the names of the numbers.

    GET health ─▶ 2xx: up        GET metrics ─▶ lines of Prometheus' text ─▶ EngineFigures

One table for all kinds; a number that a kind does not publish is None, and the core goes by its own
counts. Several series of one name (data-parallel ranks) are added up, shares are averaged.
Covers texts. Does not cover: calls (`probes`), models' names (GET /v1/models, the same everywhere).
"""

from __future__ import annotations

import functools
import math
import re
from typing import Final, NamedTuple

import msgspec

from kvstore.routing.values import LoadSample

_LINE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL: Final = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')


LINE_BYTES_MAX: Final = 16 << 10
VALUE_MAX: Final = 1e12
"""Larger numbers of an engine are ignored: products of two must stay finite."""


class Figure(NamedTuple):
    """Series that hold one number: the metric's name, and the value of a label (empty:
    any series).
    """

    metric: str
    label: str = ""
    value: str = ""


class EngineKind(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Paths and metrics of one kind of engine. Empty metric: not published."""

    health: str = "/health"
    metrics: str = "/metrics"
    """Path of the metrics page; empty: none."""
    port: int = 0
    """Port of the metrics; 0: the engine's own."""
    waiting: Figure = Figure("")
    running: Figure = Figure("")
    memory: Figure = Figure("")
    """Share of the KV cache in use."""
    has_memory: bool = True
    """False: only some versions publish `memory`."""
    adapters: str = ""
    """Metric whose label `running_lora_adapters` lists adapters."""
    cache: str = ""
    """Metric whose labels describe the cache."""
    block: str = ""
    """Label of `cache` with the tokens of a block."""
    blocks: str = ""
    """Label of `cache` with the number of blocks."""
    block_gauge: Figure = Figure("")
    """Gauges of both, for kinds without such a metric: tokens of a block, number of blocks."""
    blocks_gauge: Figure = Figure("")
    advice: str = ""
    """Hint for operators how to make the engine publish metrics."""

    @functools.cached_property
    def wanted(self) -> tuple[bytes, ...]:
        """Beginnings of the lines that are read."""
        figures = (self.waiting, self.running, self.memory, self.block_gauge, self.blocks_gauge)
        names = {*(figure.metric for figure in figures), self.cache, self.adapters}
        return tuple(name.encode() for name in sorted(filter(None, names)))

    @property
    def load(self) -> tuple[Figure, ...]:
        """Figures of load that the page must have."""
        found = (self.waiting, self.running, *([self.memory] if self.has_memory else ()))
        return tuple(each for each in found if each.metric)


ENGINES: Final[dict[str, EngineKind]] = {
    "vllm": EngineKind(
        waiting=Figure("vllm:num_requests_waiting"),
        running=Figure("vllm:num_requests_running"),
        memory=Figure("vllm:kv_cache_usage_perc"),
        adapters="vllm:lora_requests_info",
        cache="vllm:cache_config_info",
        block="block_size",
        blocks="num_gpu_blocks",
    ),
    "sglang": EngineKind(
        waiting=Figure("sglang:num_queue_reqs"),
        running=Figure("sglang:num_running_reqs"),
        memory=Figure("sglang:token_usage"),
        cache="sglang:cache_config_info",
        block="page_size",
        blocks="num_pages",
        block_gauge=Figure("sglang:page_size"),  # with the next: 0.5.11 and later
        blocks_gauge=Figure("sglang:num_pages"),
        advice="start it with --enable-metrics",
    ),
    "tgi": EngineKind(waiting=Figure("tgi_queue_size"), running=Figure("tgi_batch_current_size")),
    "trtllm": EngineKind(
        metrics="/prometheus/metrics",
        waiting=Figure("trtllm_num_requests_waiting"),
        running=Figure("trtllm_num_requests_running"),
        memory=Figure("trtllm_kv_cache_utilization"),
        block_gauge=Figure("trtllm_kv_cache_tokens_per_block"),
        blocks_gauge=Figure("trtllm_kv_cache_max_blocks"),
        advice="set return_perf_metrics and enable_iter_perf_stats in its options",
    ),
    "triton": EngineKind(
        health="/v2/health/ready",
        port=8002,
        waiting=Figure("nv_trt_llm_request_metrics", "request_type", "waiting"),
        running=Figure("nv_trt_llm_request_metrics", "request_type", "scheduled"),
        memory=Figure("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "fraction"),
        block_gauge=Figure(
            "nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "tokens_per"
        ),
        blocks_gauge=Figure("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max"),
    ),
    "llamacpp": EngineKind(
        waiting=Figure("llamacpp:requests_deferred"),
        running=Figure("llamacpp:requests_processing"),
        memory=Figure("llamacpp:kv_cache_usage_ratio"),
        has_memory=False,
        advice="start it with --metrics",
    ),
    "ollama": EngineKind(health="/api/version", metrics=""),
    # DeepSpeed-FastGen and all others that speak OpenAI's API.
    "openai": EngineKind(health="/v1/models", metrics=""),
}


class EngineFigures(NamedTuple):
    """Numbers that were read from a page of metrics."""

    load: LoadSample
    block_tokens: int
    """Tokens of a block; 0: not published, as with `memory_tokens`."""
    memory_tokens: int
    missing: tuple[str, ...] = ()
    """Metrics of the kind that the page does not have: renamed, or not counted yet."""


def findings_of(kind: EngineKind, page: bytes) -> EngineFigures:
    """Numbers in a page of metrics of an engine. Lines that are no metrics, or have absurd values,
    are skipped.
    """
    figures = (kind.waiting, kind.running, kind.memory, kind.block_gauge, kind.blocks_gauge)
    sums: dict[Figure, list[float]] = {}
    block = blocks = 0
    adapters: tuple[float, tuple[str, ...]] | None = None
    for line in page.split(b"\n"):
        if not line.startswith(kind.wanted) or len(line) > LINE_BYTES_MAX:
            continue
        if (read := _read_line(line)) is None:
            continue
        name, labels, value = read
        for figure in figures:
            if figure.metric == name and labels.get(figure.label, "") == figure.value:
                sums.setdefault(figure, []).append(value)
        if name == kind.cache:
            block, blocks = _count(labels.get(kind.block)), _count(labels.get(kind.blocks))
        if name == kind.adapters and (adapters is None or value >= adapters[0]):  # the newest
            named = labels.get("running_lora_adapters", "").split(",")
            adapters = (value, tuple(filter(None, (each.strip() for each in named))))
    memory = sums.get(kind.memory)
    block = block or round(max([0.0, *sums.get(kind.block_gauge, ())]))
    blocks = blocks or round(max([0.0, *sums.get(kind.blocks_gauge, ())]))
    return EngineFigures(
        LoadSample(
            waiting=_total(sums.get(kind.waiting)),
            running=_total(sums.get(kind.running)),
            memory_used=min(1.0, max(0.0, sum(memory) / len(memory))) if memory else None,
            adapters=adapters[1] if adapters else None,
        ),
        block,
        block * blocks,
        tuple(each.metric for each in kind.load if each not in sums),
    )


@functools.lru_cache(maxsize=4096)
def _read_line(line: bytes) -> tuple[str, dict[str, str], float] | None:
    """(name, labels, value) of a line; None: it is no metric. Cached, as most lines are those of
    the last probe, so the labels must not be changed.
    """
    found = _LINE.match(line.decode("utf-8", "replace"))
    try:
        value = float(found[3]) if found is not None else math.nan
    except ValueError:
        return None
    if found is None or not abs(value) <= VALUE_MAX:  # no NaN, either
        return None
    return found[1], dict(_LABEL.findall(found[2] or "")), value


def _total(values: list[float] | None) -> int | None:
    return None if values is None else max(0, round(sum(values)))


def _count(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 10 else 0

"""Time to first token of each kind of hit, and cold throughput, on both sides in turn.

Covers: the order in which requests are sent, and ratios within the run. Does not cover: starting
anything (`bench.peers.sides`) and what is a valid hit (`bench.scenarios.single.Hits`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from rich.progress import Progress

from bench import record
from bench.peers.sides import Name, Side
from bench.scenarios.single import (
    HIT_TOKENS,
    PROMPT_TOKENS,
    BenchError,
    Hits,
    Prompt,
    median_ratio_interval,
)
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS

BURST: Final = 2
HITS_PER_PROMPT: Final = 6


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Of the medians, with its interval."""
    low, high = median_ratio_interval(over, under)
    return {"ratio": float(np.median(over) / np.median(under)), "interval_95": [low, high]}


def measure_dram(sides: Sequence[Side], prompts: Sequence[Prompt], progress: Progress) -> Any:
    """Per fresh prompt a recompute, then pairs of a dram hit and an own hit over all prompts seen.
    Each step is done on one side and at once on the other, the first to go alternating."""
    hits = {side.name: Hits(side.engine) for side in sides}
    task = progress.add_task("dram hits", total=len(prompts) * (1 + HITS_PER_PROMPT))
    turn = 0
    for seen, prompt in enumerate(prompts, start=1):
        for name in _order(sides, seen):
            hits[name].recompute(prompt)
        progress.advance(task)
        for _ in range(HITS_PER_PROMPT):
            turn += 1
            for name in _order(sides, turn):
                hits[name].dram(prompts[turn % seen])
                hits[name].own(prompts[turn % seen])
            progress.advance(task)
    return compared(
        {
            name: {"hit": one.dram_ms, "own_hit": one.own_ms, "recompute": one.recompute_ms}
            for name, one in hits.items()
        },
        asked_again={name: one.lookups_too_late for name, one in hits.items()},
    )


def measure_file(
    sides: Sequence[Side], prompts: Sequence[Prompt], rounds: int, progress: Progress
) -> Any:
    """Store all prompts; then in each round, with dram and page cache emptied, the first request
    for each prompt is the hit on disk. It counts if it came from the cache as a whole."""
    task = progress.add_task("file hits", total=len(prompts) * (1 + rounds))
    times: dict[Name, dict[str, list[float]]] = {
        side.name: {"hit": [], "own_hit": [], "recompute": []} for side in sides
    }
    partial: dict[Name, list[int]] = {side.name: [] for side in sides}
    for turn, prompt in enumerate(prompts):
        for side in _turned(sides, turn):
            times[side.name]["recompute"].append(ask(side.engine, prompt)[0])
        progress.advance(task)
    for side in sides:
        side.rest(len(prompts) * (PROMPT_TOKENS // BLOCK_TOKENS))
    for number in range(rounds):
        for side in sides:
            side.empty_dram()
        for turn, prompt in enumerate(prompts):
            for side in _turned(sides, turn + number):
                side.engine.forget()
                time_ms, found = ask(side.engine, prompt)
                own_ms, _ = ask(side.engine, prompt)
                times[side.name]["own_hit"].append(own_ms)
                if found == HIT_TOKENS:
                    times[side.name]["hit"].append(time_ms)
                else:
                    partial[side.name].append(found)
            progress.advance(task)
    if not all(one["hit"] for one in times.values()):
        raise BenchError(f"No request was served from disk as a whole; tokens found: {partial}")
    return compared(times, not_whole_tokens=partial)


def measure_cold(
    engines: dict[str, VllmServer], prompts: Sequence[Prompt], progress: Progress
) -> dict[str, Any]:
    """Seconds of bursts of fresh prompts with each cache and without any; all orders in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    orders = list(itertools.permutations(engines))
    turns = len(prompts) // BURST
    task = progress.add_task("cold throughput", total=turns)
    for turn in range(turns):
        burst = prompts[turn * BURST : (turn + 1) * BURST]
        for name in orders[turn % len(orders)]:
            answers = [engines[name].complete(prompt, max_tokens=1) for prompt in burst]
            if any(answer.cached_tokens for answer in answers):
                raise BenchError("A prompt that was meant to be fresh was found in a cache.")
            seconds[name].append(sum(answer.duration_s for answer in answers))
            engines[
                name
            ].forget()  # returns when no store is under way: the next one's turn is calm
        progress.advance(task)
    tokens = sum(map(len, prompts[: turns * BURST]))
    alone = seconds["vLLM alone"]
    return {
        "turns": turns,
        "prompts_per_turn": BURST,
        "prompt_tokens": len(prompts[0]),
        "tokens_per_s": {name: tokens / sum(taken) for name, taken in seconds.items()},
        "over_vllm_alone": {
            name: {
                "ratio": sum(alone) / sum(taken),
                "interval_95": record.bootstrap_interval(alone, taken, seed=1),
            }
            for name, taken in seconds.items()
            if taken is not alone
        },
        "samples_s": seconds,
    }


def ask(engine: VllmServer, prompt: Prompt) -> tuple[float, int]:
    """Milliseconds to the first token, and tokens that came from the cache beside the engine."""
    before = engine.hits().external_hits
    answer = engine.complete(prompt, max_tokens=1)
    return 1000 * answer.ttft_s, round(engine.hits().external_hits - before)


def _turned(sides: Sequence[Side], turn: int) -> Sequence[Side]:
    return sides if turn % 2 == 0 else sides[::-1]


def _order(sides: Sequence[Side], turn: int) -> list[Name]:
    return [side.name for side in _turned(sides, turn)]


def compared(times: dict[Name, dict[str, list[float]]], **notes: Any) -> dict[str, Any]:
    """Both sides' summaries, and their ratio."""
    ours, theirs = times["kvstore"], times["LMCache"]
    paired = min(len(ours["hit"]), len(theirs["hit"]))
    return {
        **{
            name: {
                **{f"{kind}_ms": record.summary(values) for kind, values in one.items()},
                "hit_over_own_hit": float(np.median(one["hit"]) / np.median(one["own_hit"])),
                "added_to_own_hit_ms": float(np.median(one["hit"]) - np.median(one["own_hit"])),
            }
            for name, one in times.items()
        },
        "kvstore_over_lmcache": ratio(ours["hit"][:paired], theirs["hit"][:paired]),
        **notes,
        "samples_ms": times,
    }

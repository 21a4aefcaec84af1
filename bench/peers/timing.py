"""Time to first token of each kind of hit, and cold throughput, on both sides in turn.

Covers: the order in which requests are sent, and ratios within the run. Does not cover: starting
anything (`bench.peers.sides`) and figures of one side (`bench.hits`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from rich.progress import Progress

from bench import record
from bench.hits import Hit, ask, figures, hit
from bench.peers.sides import Name, Side
from bench.scenarios.single import (
    HIT_TOKENS,
    PROMPT_TOKENS,
    BenchError,
    Prompt,
    median_ratio_interval,
)
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS

BURST: Final = 2
HITS_PER_PROMPT: Final = 6
_SIDES: Final[tuple[Name, Name]] = ("kvstore", "LMCache")


class Request(NamedTuple):
    """The same prompt, asked on both sides in turn."""

    round: int
    prompt: int
    """Its number."""
    hits: dict[Name, Hit]

    def row(self) -> dict[str, Any]:
        """As it stands in the record."""
        hits: dict[str, Any] = msgspec.to_builtins(self.hits)
        return {"round": self.round, "prompt": self.prompt, **hits}


def measure_dram(sides: Sequence[Side], prompts: Sequence[Prompt], progress: Progress) -> Any:
    """Per fresh prompt a recompute, then pairs of a dram hit and an own hit over all prompts seen.
    Each step is done on one side and at once on the other, the first to go alternating."""
    computed_ms: dict[Name, list[float]] = {side.name: [] for side in sides}
    requests: list[Request] = []
    task = progress.add_task("dram hits", total=len(prompts) * (1 + HITS_PER_PROMPT))
    for seen, prompt in enumerate(prompts, start=1):
        for side in _turned(sides, seen):
            computed_ms[side.name].append(ask(side.engine, prompt)[0])
        progress.advance(task)
        for _ in range(HITS_PER_PROMPT):
            turn = len(requests) + 1
            hits = {s.name: hit(s.engine, prompts[turn % seen]) for s in _turned(sides, turn)}
            requests.append(Request(turn, turn % seen, hits))
            progress.advance(task)
    return compared(requests, computed_ms, stored_tokens=HIT_TOKENS)


def measure_file(
    sides: Sequence[Side], prompts: Sequence[Prompt], rounds: int, progress: Progress
) -> Any:
    """Store all prompts; then in each round, with dram and page cache emptied, the first request
    for each prompt is the one for what is on disk. It counts whatever it found there."""
    task = progress.add_task("file hits", total=len(prompts) * (1 + rounds))
    computed_ms: dict[Name, list[float]] = {side.name: [] for side in sides}
    for turn, prompt in enumerate(prompts):
        for side in _turned(sides, turn):
            computed_ms[side.name].append(ask(side.engine, prompt)[0])
        progress.advance(task)
    for side in sides:
        side.rest(len(prompts) * (PROMPT_TOKENS // BLOCK_TOKENS))
    requests: list[Request] = []
    for number in range(rounds):
        for side in sides:
            side.empty_dram()
        for turn, prompt in enumerate(prompts):
            hits = {s.name: hit(s.engine, prompt) for s in _turned(sides, turn + number)}
            requests.append(Request(number, turn, hits))
            progress.advance(task)
    return compared(requests, computed_ms, stored_tokens=HIT_TOKENS)


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


def _turned(sides: Sequence[Side], turn: int) -> Sequence[Side]:
    return sides if turn % 2 == 0 else sides[::-1]


def compared(
    requests: Sequence[Request], computed_ms: dict[Name, list[float]], *, stored_tokens: int
) -> dict[str, Any]:
    """Each side's figures and kvstore's over LMCache's, all requests in; beside them the ratio over
    the requests that found everything on both sides."""
    hits = {name: [request.hits[name] for request in requests] for name in computed_ms}
    ours, theirs = ([one.ms for one in hits[name]] for name in _SIDES)
    whole = [
        tuple(request.hits[name].ms for name in _SIDES)
        for request in requests
        if all(one.found_tokens >= stored_tokens for one in request.hits.values())
    ]
    return {
        **{
            name: {
                **figures(hits[name], stored_tokens=stored_tokens),
                "recompute_ms": record.summary(computed_ms[name]),
            }
            for name in _SIDES
        },
        "kvstore_over_lmcache": {
            **_over(ours, theirs),
            "ratio_of_means": float(np.mean(ours) / np.mean(theirs)),
            "complete_on_both": {"pairs": len(whole), **_over(*zip(*whole, strict=True))}
            if whole
            else None,
        },
        "stored_tokens": stored_tokens,
        "samples": [request.row() for request in requests],
        "recompute_samples_ms": computed_ms,
    }


def _over(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Of the medians, which stand beside it, with its interval."""
    low, high = median_ratio_interval(over, under)
    middle = float(np.median(over)), float(np.median(under))
    return {"ratio": middle[0] / middle[1], "medians_ms": middle, "interval_95": (low, high)}

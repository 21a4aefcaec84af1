"""Multi-round question answering whose histories are five times what the engine's own cache holds.

The same questions go to vLLM alone, with LMCache and with kvstore, each turn to all three one after
the other, the first to go rotating, so that a machine that slows down does so for all. Each engine
keeps the history of its own answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from rich.progress import Progress

from bench import record
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS
from kvstore.demo.workload import ConversationPlan, Conversations, Encode

TIMES_OWN_CACHE: Final = 5


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One answered turn."""

    round: int
    prompt_tokens: int
    cached_tokens: int
    """From the engine's own cache and the one beside it."""
    ttft_s: float
    duration_s: float
    answer: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def measure_rounds(
    engines: dict[str, VllmServer], plan: ConversationPlan, encode: Encode, progress: Progress
) -> dict[str, list[Served]]:
    """Every turn of the plan on every engine."""
    for engine in engines.values():
        engine.forget()
    talks = {name: Conversations(plan, encode) for name in engines}
    turns = {name: chain.from_iterable(talk.rounds()) for name, talk in talks.items()}
    served: dict[str, list[Served]] = {name: [] for name in engines}
    names = list(engines)
    count = plan.users * plan.rounds
    task = progress.add_task("multi-round questions", total=count)
    for number in range(count):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            turn = next(turns[name])
            answer = engines[name].complete(turn.prompt, max_tokens=plan.answer_tokens)
            talks[name].answer(turn, answer.tokens)
            served[name].append(
                Served(
                    round=turn.round,
                    prompt_tokens=len(turn.prompt),
                    cached_tokens=answer.cached_tokens,
                    ttft_s=answer.ttft_s,
                    duration_s=answer.duration_s,
                    answer=answer.tokens,
                )
            )
        progress.advance(task)
    return served


def working_set_tokens(plan: ConversationPlan, encode: Encode) -> int:
    """Tokens of all histories at the end, the system prompt that they share counted once."""
    talk = Conversations(plan, encode)
    prompts: dict[int, tuple[int, ...]] = {}
    for turn in chain.from_iterable(talk.rounds()):
        prompts[turn.user] = turn.prompt
        talk.answer(turn, [0] * plan.answer_tokens)
    shared = _common(list(prompts.values()))
    return shared + sum(len(p) + plan.answer_tokens - shared for p in prompts.values())


def own_cache_blocks(working_set: int) -> int:
    """Blocks of an own cache that holds one part in TIMES_OWN_CACHE of it."""
    return working_set // (TIMES_OWN_CACHE * BLOCK_TOKENS)


def report(served: dict[str, list[Served]]) -> dict[str, Any]:
    """Per engine: throughput, times, hit rate; and how many answers equal those of the first."""
    first = next(iter(served.values()))
    return {name: _row(turns, first) for name, turns in served.items()}


def by_hit_rate(turns: Sequence[Served], edges: Sequence[float]) -> list[dict[str, float]]:
    """Turns in bins of hit rate: [edges[i], edges[i + 1]), the last one closed. Empty bins left
    out."""
    rates = np.array([turn.hit_rate for turn in turns])
    bins = np.clip(np.digitize(rates, edges) - 1, 0, len(edges) - 2)
    rows = []
    for number in sorted(set(bins.tolist())):
        inside = [1000 * turns[i].ttft_s for i in np.flatnonzero(bins == number)]
        rows.append(
            {
                "from": float(edges[number]),
                "to": float(edges[number + 1]),
                "hit_rate": float(rates[bins == number].mean()),
                "ttft_ms_p50": float(np.median(inside)),
                "turns": len(inside),
            }
        )
    return rows


def _row(turns: Sequence[Served], first: Sequence[Served]) -> dict[str, Any]:
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    seconds = sum(turn.duration_s for turn in turns)
    return {
        "prompt_tokens_per_s": prompt_tokens / seconds,
        "requests_per_s": len(turns) / seconds,
        "ttft_ms": record.summary([1000 * turn.ttft_s for turn in turns]),
        "hit_rate": sum(turn.cached_tokens for turn in turns) / prompt_tokens,
        "answers": len(turns),
        "answers_as_first": sum(a.answer == b.answer for a, b in zip(turns, first, strict=True)),
        "by_hit_rate": by_hit_rate(turns, EDGES),
        "turns": [
            [turn.round, turn.prompt_tokens, turn.cached_tokens, round(1000 * turn.ttft_s, 2)]
            for turn in turns
        ],
    }


EDGES: Final = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)


def _common(prompts: Sequence[tuple[int, ...]]) -> int:
    """Length of the prefix that all share."""
    for place, tokens in enumerate(zip(*prompts, strict=False)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, prompts))

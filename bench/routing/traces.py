"""Traces for the router's simulation: recorded ones in Mooncake's form, and generated ones.

Covers: the conversation trace, at another speed where it is asked for; tool agents (figures of the
trace that is not published with this one: 8,596 tokens in and 182 out in the mean, 59 % of blocks
hit by a cache without limit); shared prefixes; short unique prompts; S1 to S3. Times are seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from bench.routing.engine import BLOCK_TOKENS, Job


class RouterTrace(msgspec.Struct, frozen=True):
    """Requests in the order of their arrival."""

    name: str
    jobs: tuple[Job, ...]

    def at_speed(self, factor: float) -> RouterTrace:
        """The same requests, closer together."""
        jobs = tuple(
            msgspec.structs.replace(job, arrival_s=job.arrival_s / factor) for job in self.jobs
        )
        return RouterTrace(f"{self.name} {factor:g}x", jobs)

    def fresh(self) -> list[Job]:
        """Jobs for one run."""
        return [msgspec.structs.replace(job) for job in self.jobs]

    @property
    def shared(self) -> float:
        """Share of blocks that a cache without limit hits."""
        seen: set[int] = set()
        total = hit = 0
        for job in self.jobs:
            hit += sum(block in seen for block in job.blocks)
            total += len(job.blocks)
            seen.update(job.blocks)
        return hit / max(1, total)


def conversation(path: Path, *, requests: int | None = None) -> RouterTrace:
    """Mooncake's: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512 tokens."""
    jobs = []
    for number, line in enumerate(path.read_text().splitlines()[:requests]):
        entry = json.loads(line)
        full = entry["input_length"] // BLOCK_TOKENS
        jobs.append(
            Job(
                number,
                entry["timestamp"] / 1000,
                entry["input_length"],
                entry["output_length"],
                tuple(entry["hash_ids"][:full]),
            )
        )
    return RouterTrace("conversation", tuple(jobs))


class _Blocks:
    """Numbers of blocks that nobody has had."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> tuple[int, ...]:
        first, self._next = self._next, self._next + count
        return tuple(range(first, self._next))


def tool_agents(seed: int, *, requests: int = 3000, rate: float = 6.6) -> RouterTrace:
    """Agents that call tools: 12 system prompts of 2 to 4 blocks; an agent makes some 2 calls, each
    with what the last one returned behind it."""
    random, blocks = np.random.default_rng(seed), _Blocks()
    systems = [blocks.take(int(n)) for n in random.integers(*SYSTEM_BLOCKS, size=12)]
    jobs: list[Job] = []
    clock = 0.0
    agent = 0
    while len(jobs) < requests:
        clock += random.exponential(CALLS / rate)
        history = systems[int(random.choice(12, p=_zipf(12, 1.0)))]
        at, agent = clock, agent + 1
        for _ in range(int(random.geometric(1 / CALLS))):
            history = history + blocks.take(1 + int(random.gamma(1.0, GROWTH)))
            tail = int(random.integers(1, BLOCK_TOKENS))
            output = 1 + int(random.gamma(1.5, 120))
            job = Job(0, at, len(history) * BLOCK_TOKENS + tail, output, history, f"agent{agent}")
            jobs.append(job)
            at += output * 0.012 + random.exponential(6.0)
            if len(history) > 60:
                break
    return _in_order("tool-agent", jobs[:requests])


def shifting_mix(seed: int, *, phases: Sequence[tuple[float, float, int, int]]) -> RouterTrace:
    """Unique prompts whose ratio of input to output shifts. Args: `phases`: seconds, requests a
    second, mean tokens in, mean tokens out."""
    random, blocks, clock, end = np.random.default_rng(seed), _Blocks(), 0.0, 0.0
    jobs = []
    for seconds, rate, tokens_in, tokens_out in phases:
        clock, end = end, end + seconds
        while (clock := clock + random.exponential(1 / rate)) < end:
            tokens = max(16, int(random.normal(tokens_in, tokens_in / 5)))
            output = max(2, int(random.normal(tokens_out, tokens_out / 5)))
            jobs.append(Job(0, clock, tokens, output, blocks.take(tokens // BLOCK_TOKENS)))
    return _in_order("shifting", jobs)


def shared_prefix(
    seed: int,
    *,
    groups: int = 150,
    system_tokens: int = 6000,
    question_tokens: int = 1200,
    output_tokens: int = 300,
    requests: int = 2500,
    rate: float = 14.0,
) -> RouterTrace:
    """Questions under one of many system prompts, each group as likely as the next."""
    random, blocks = np.random.default_rng(seed), _Blocks()
    systems = [blocks.take(system_tokens // BLOCK_TOKENS) for _ in range(groups)]
    jobs, clock = [], 0.0
    for _ in range(requests):
        clock += random.exponential(1 / rate)
        prompt = system_tokens + max(1, int(random.normal(question_tokens, question_tokens / 5)))
        system = systems[int(random.integers(groups))]
        own = blocks.take(prompt // BLOCK_TOKENS - len(system))
        output = 1 + int(random.exponential(output_tokens))
        jobs.append(Job(0, clock, prompt, output, system + own))
    return _in_order("shared-prefix", jobs)


def low_sharing(seed: int, *, requests: int = 2500, rate: float = 14.0) -> RouterTrace:
    """Prompts that share nothing, of lognormal length."""
    random, blocks = np.random.default_rng(seed), _Blocks()
    jobs, clock = [], 0.0
    for _ in range(requests):
        clock += random.exponential(1 / rate)
        prompt = int(min(32_000, max(64, random.lognormal(7.6, 1.0))))
        jobs.append(
            Job(
                0,
                clock,
                prompt,
                1 + int(random.exponential(250)),
                blocks.take(prompt // BLOCK_TOKENS),
            )
        )
    return _in_order("low-sharing", jobs)


def shape(tokens: int, seed: int, *, requests: int = 1300, rate: float = 8.0) -> RouterTrace:
    """S1 to S3: one of 40 shared prefixes of `tokens`, 100 tokens of one's own, 100 out."""
    made = shared_prefix(
        seed,
        groups=40,
        system_tokens=tokens // BLOCK_TOKENS * BLOCK_TOKENS,
        question_tokens=100,
        output_tokens=100,
        requests=requests,
        rate=rate,
    )
    return RouterTrace(f"shape-{tokens // 1000}k", made.jobs)


SEEDS: Final = (1, 2, 3)
CALLS, GROWTH, SYSTEM_BLOCKS = 2.0, 6.0, (2, 5)
SHAPES: Final = {"S1": 20_000, "S2": 12_000, "S3": 8_000}
GENERATED: Final[dict[str, Callable[[int], RouterTrace]]] = {
    "tool-agent": tool_agents,
    "shared-prefix": shared_prefix,
    "low-sharing": low_sharing,
}


def samples(name: str, path: Path, *, requests: int) -> list[RouterTrace]:
    """A trace by its name: the recorded one once, a generated one by each seed of `SEEDS`. From
    seed to seed goodput differs more than from router to router."""
    seeds = SEEDS if name.partition("@")[0] in GENERATED else SEEDS[:1]
    return [named(name, path, requests=requests, seed=seed) for seed in seeds]


def named(name: str, path: Path, *, requests: int, seed: int = 1) -> RouterTrace:
    """A trace by its name, `NAME@SPEED`: `conversation`, one that is generated, or S1 to S3."""
    base, _, speed = name.partition("@")
    if base == "conversation":
        trace = conversation(path, requests=requests)
    elif base in SHAPES:
        trace = shape(SHAPES[base], seed)
    else:
        trace = GENERATED[base](seed)
    return trace.at_speed(float(speed or 1))


def _zipf(count: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, count + 1) ** -exponent
    normal: np.ndarray = weights / weights.sum()
    return normal


def _in_order(name: str, jobs: list[Job]) -> RouterTrace:
    ordered = sorted(jobs, key=lambda job: job.arrival_s)
    return RouterTrace(
        name,
        tuple(msgspec.structs.replace(job, number=n) for n, job in enumerate(ordered)),
    )

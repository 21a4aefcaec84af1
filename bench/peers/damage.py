"""What becomes of answers when the files behind a cache are damaged.

Float32, so that answers from a cache are the same tokens as computed ones unless bytes differ. Each
prompt is answered three times with greedy decoding: computed, from intact files, and from files in
which one bit was flipped in every 50 kB while the cache was down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from rich.progress import Progress

from bench import disk
from bench.peers.sides import Side
from kvstore.demo.engine import EngineError, VllmServer
from kvstore.demo.models import BLOCK_TOKENS

EVERY_BYTES: Final = 50_000
ANSWER_TOKENS: Final = 12

Prompt = tuple[int, ...]
Answer = tuple[int, ...] | None
"""None: the request failed."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over all prompts."""

    answers: int
    wrong: int
    """Answered with other tokens than those computed, and reported as success."""
    failed: int
    """Not answered."""
    hit_rate: float
    """Share of the prompts' tokens that came from the cache."""


def judge(truth: Sequence[Answer], given: Sequence[Answer], hit_rate: float) -> Verdict:
    """Compare answers with those that were computed."""
    pairs = list(zip(truth, given, strict=True))
    return Verdict(
        answers=len(pairs),
        wrong=sum(answer is not None and answer != true for true, answer in pairs),
        failed=sum(answer is None for _, answer in pairs),
        hit_rate=hit_rate,
    )


def measure_damage(
    sides: Sequence[Side], prompts: Sequence[Prompt], seed: int, progress: Progress
) -> dict[str, Any]:
    """All three passes on each side."""
    task = progress.add_task("damaged files", total=3 * len(prompts) * len(sides))
    return {
        "flipped_bits": "one in every 50 kB of each file, at a random place",
        **{side.name: _one(side, prompts, seed, lambda: progress.advance(task)) for side in sides},
    }


def _one(
    side: Side, prompts: Sequence[Prompt], seed: int, advance: Callable[[], None]
) -> dict[str, Any]:
    flipped = 0

    def damage() -> None:
        nonlocal flipped
        flipped = disk.flip_bits(side.files, every_bytes=EVERY_BYTES, seed=seed)

    truth, found = _pass(side.engine, prompts, advance)
    assert found == 0, "a fresh prompt was in a cache"
    side.rest(sum(len(prompt) // BLOCK_TOKENS for prompt in prompts))
    side.empty_dram()
    intact = judge(truth, *_pass(side.engine, prompts, advance))
    side.restart(damage)
    damaged = judge(truth, *_pass(side.engine, prompts, advance))
    return {
        "bits_flipped": flipped,
        "intact": msgspec.to_builtins(intact),
        "damaged": msgspec.to_builtins(damaged),
    }


def _pass(
    engine: VllmServer, prompts: Sequence[Prompt], advance: Callable[[], None]
) -> tuple[list[Answer], float]:
    """The answer to each prompt, never from the engine's own cache, and the cache's hit rate."""
    answers: list[Answer] = []
    before = engine.hits().external_hits
    for prompt in prompts:
        engine.forget()
        try:
            answers.append(engine.complete(prompt, max_tokens=ANSWER_TOKENS).tokens)
        except EngineError:
            answers.append(None)
        advance()
    found = engine.hits().external_hits - before
    return answers, found / sum(map(len, prompts))

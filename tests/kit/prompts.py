"""Seeded prompts of many lengths and overlaps, for tests of equality."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvstore.demo.workload import Encode, text_tokens


def varied_prompts(
    seed: int, *, count: int, block_tokens: int, blocks_max: int, encode: Encode
) -> tuple[tuple[int, ...], ...]:
    """Prompts that meet the edges of block caching, at least one of each kind when count >= 12.

    Kinds, in turn: shorter than a block; one token below, at, and above a block edge; a random
    length; the same as an earlier prompt; an earlier prompt cut at a block edge, in the middle of
    a block, or continued; the first blocks of an earlier prompt with another rest; an earlier
    prompt with one token changed in its first block, so that all its keys differ.
    """
    assert blocks_max >= 2, "prefixes need two blocks"
    rng = random.Random(seed)
    longest = blocks_max * block_tokens

    def fresh(length: int) -> tuple[int, ...]:
        return text_tokens(rng, encode, length)

    def edge(delta: int) -> tuple[int, ...]:
        return fresh(rng.randint(1, blocks_max - 1) * block_tokens + delta)

    def earlier() -> tuple[int, ...]:
        return rng.choice([p for p in prompts if len(p) > block_tokens])

    def cut(prompt: tuple[int, ...], delta: int) -> tuple[int, ...]:
        return prompt[: rng.randint(1, (len(prompt) - 1) // block_tokens) * block_tokens + delta]

    def changed(prompt: tuple[int, ...]) -> tuple[int, ...]:
        place = rng.randrange(block_tokens)
        return (*prompt[:place], (prompt[place] + 1) % 256, *prompt[place + 1 :])

    kinds: tuple[Callable[[], tuple[int, ...]], ...] = (
        lambda: edge(1),
        lambda: fresh(rng.randint(1, block_tokens - 1)),
        lambda: edge(-1),
        lambda: edge(0),
        lambda: fresh(rng.randint(block_tokens, longest)),
        earlier,
        lambda: cut(earlier(), 0),
        lambda: cut(earlier(), -rng.randint(1, block_tokens - 1)),
        lambda: (*earlier(), *fresh(rng.randint(1, block_tokens)))[:longest],
        lambda: (*cut(earlier(), 0), *fresh(rng.randint(1, block_tokens)))[:longest],
        lambda: changed(earlier()),
        lambda: fresh(longest),
    )
    prompts: list[tuple[int, ...]] = []
    while len(prompts) < count:
        prompts.append(kinds[len(prompts) % len(kinds)]())
    return tuple(prompts)

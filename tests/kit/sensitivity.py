"""How surely a damaged cached block of a demo's model shows in its output.

Runs in transformers with its own cache: the answer is a property of the model, known before any
engine takes part.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvstore.demo.models import BLOCK_TOKENS


class Sensitivity(msgspec.Struct, frozen=True):
    """Numbers of damaged caches that changed the greedy continuation."""

    trials: int
    changed_by_one_byte: int
    """One byte of one K or V element of one cached block was flipped."""
    changed_by_other_block: int
    """One block was exchanged for the block of another prompt, as by a mixed-up key."""
    distinct_tokens: int
    """Different tokens over all undamaged outputs; few would make equality an empty statement."""


def measure_sensitivity(
    directory: Path,
    *,
    seed: int,
    prompts: int = 4,
    trials_per_prompt: int = 6,
    blocks: int = 3,
    output_tokens: int = 16,
) -> Sensitivity:
    """Damage one cached block of `blocks`, again and again, and compare greedy outputs.

    Runs in transformers with its own cache, in float32 on the CPU: the answer is a property of the
    model, known before any engine takes part.
    """
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps this small lose far more by waiting for a busy second core
    try:
        return _measure(model, seed, prompts, trials_per_prompt, blocks, output_tokens)
    finally:
        torch.set_num_threads(threads)


def _measure(
    model: Any, seed: int, prompts: int, trials_per_prompt: int, blocks: int, output_tokens: int
) -> Sensitivity:
    import numpy as np

    rng = np.random.default_rng(seed)
    length = blocks * BLOCK_TOKENS + 17
    by_byte = by_block = 0
    seen: set[int] = set()
    for _ in range(prompts):
        prompt, other = rng.integers(0, 256, size=(2, length)).tolist()
        cache, foreign = _prefill(model, prompt), _prefill(model, other)
        expected = _continue(model, cache, prompt[-1], output_tokens)
        seen.update(expected)
        for _ in range(trials_per_prompt):
            block = int(rng.integers(blocks))
            damaged = copy.deepcopy(cache)
            _flip_byte(damaged, block, rng)
            by_byte += _continue(model, damaged, prompt[-1], output_tokens) != expected
            damaged = copy.deepcopy(cache)
            _exchange_block(damaged, foreign, block)
            by_block += _continue(model, damaged, prompt[-1], output_tokens) != expected
    return Sensitivity(
        trials=prompts * trials_per_prompt,
        changed_by_one_byte=by_byte,
        changed_by_other_block=by_block,
        distinct_tokens=len(seen),
    )


def _prefill(model: Any, prompt: Sequence[int]) -> Any:
    """Cache of all tokens but the last: per layer keys and values [1, heads, tokens, 64]."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([prompt[:-1]]), past_key_values=cache, use_cache=True)
    return cache


def _continue(model: Any, cache: Any, token: int, count: int) -> list[int]:
    """Greedy continuation on a copy of the cache."""
    import torch

    cache, output = copy.deepcopy(cache), []
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.tensor([[token]])
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            token = int(logits[0, -1].argmax())
            output.append(token)
    return output


def _flip_byte(cache: Any, block: int, rng: Any) -> None:
    """Flip the top exponent bit of one element: one byte differs from the stored one."""
    layer = cache.layers[rng.integers(len(cache.layers))]
    elements = (layer.keys, layer.values)[rng.integers(2)].numpy()
    _, heads, _, dimension = elements.shape
    token = block * BLOCK_TOKENS + rng.integers(BLOCK_TOKENS)
    element = elements[0, rng.integers(heads), token, rng.integers(dimension), None]
    element.view("u1")[3] ^= 0x40


def _exchange_block(cache: Any, foreign: Any, block: int) -> None:
    span = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
    for layer, other in zip(cache.layers, foreign.layers, strict=True):
        layer.keys[:, :, span] = other.keys[:, :, span]
        layer.values[:, :, span] = other.values[:, :, span]

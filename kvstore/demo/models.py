"""Small local models with seeded weights, whose output shows a wrong KV cache.

Covers: building a Llama checkpoint with a byte-level tokenizer in a directory, and measuring how
surely a damaged cached block shows in the output. Does not cover: engines (`kvstore.demo.engine`)
and prompts (`kvstore.demo.workload`).

Weights are drawn with a large standard deviation: with the customary 0.02 attention is almost
uniform, and an engine fed with another prompt's KV goes on producing much the same tokens.

    python -m kvstore.demo.models DIR --size tiny
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

Size = Literal["tiny", "tiny-one-head", "long", "medium", "bench"]
SIZES: Final[tuple[Size, ...]] = ("tiny", "tiny-one-head", "long", "medium", "bench")
RECIPE_FILE: Final = "recipe.json"
"""Name of the recipe, which is written last into a model directory."""
RECIPE_VERSION: Final = 1
SPECIAL_TOKENS: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY_SIZE: Final = 256 + len(SPECIAL_TOKENS)
HEAD_DIMENSION: Final = 64
BLOCK_TOKENS: Final = 128
"""Tokens in a KV block of vLLM on a CPU."""

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Architecture of one size. Heads are HEAD_DIMENSION wide."""

    layer_count: int
    hidden: int
    intermediate: int
    head_count: int
    kv_head_count: int
    deviation: float
    """Standard deviation of weights. Shrinks with the square root of `hidden`, so that attention is
    as sharp in each size."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored weights."""
    position_count: int = 4096
    """Longest request, in tokens."""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one token, all layers."""
        return self.layer_count * self.kv_head_count * HEAD_DIMENSION * 2 * element_bytes


SHAPES: Final[dict[Size, Shape]] = {
    # 2.5 M parameters, 4 KiB of KV per token in float32: functional tests.
    "tiny": Shape(
        layer_count=4, hidden=256, intermediate=512, head_count=4, kv_head_count=2, deviation=0.08
    ),
    # The same with one KV head, which ranks of a tensor-parallel engine hold alike.
    "tiny-one-head": Shape(
        layer_count=4, hidden=256, intermediate=512, head_count=4, kv_head_count=1, deviation=0.08
    ),
    # 0.1 M parameters, 1 KiB of KV per token in float32: prompts of thousands of blocks, whose
    # attention is what takes the time.
    "long": Shape(
        layer_count=2,
        hidden=64,
        intermediate=128,
        head_count=1,
        kv_head_count=1,
        deviation=0.16,
        position_count=1 << 18,
    ),
    # 25 M parameters, 16 KiB of KV per token in float32: the demo, whose tokens must be identical.
    "medium": Shape(
        layer_count=8, hidden=512, intermediate=1536, head_count=8, kv_head_count=4, deviation=0.06
    ),
    # 194 M parameters, 16 KiB of KV per token in bfloat16: timing.
    "bench": Shape(
        layer_count=16,
        hidden=1024,
        intermediate=3072,
        head_count=16,
        kv_head_count=4,
        deviation=0.05,
        dtype="bfloat16",
    ),
}


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Input of a model directory; equal recipes give equal bytes."""

    size: Size
    weights_seed: int
    version: int = RECIPE_VERSION


def build_model(directory: Path, *, size: Size, weights_seed: int = 1) -> Path:
    """Make `directory` hold the model of that size and seed; returns it.

    A directory of the same recipe stays. The model is built beside the target and renamed into
    place, so that a reader sees the old one, the new one, or none. Another recipe is replaced.

    Raises:
        FileExistsError: the directory has files that this function did not build.
    """
    recipe = Recipe(size=size, weights_seed=weights_seed)
    if read_recipe(directory) == recipe:
        return directory
    if directory.is_dir() and any(directory.iterdir()) and read_recipe(directory) is None:
        raise FileExistsError(f"{directory} is not empty and holds no model built here")
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        fresh, old = work / "new", work / "old"
        fresh.mkdir()
        _write_tokenizer(fresh, SHAPES[recipe.size])
        _write_weights(fresh, recipe)
        (fresh / RECIPE_FILE).write_bytes(msgspec.json.encode(recipe))
        if directory.exists():
            directory.rename(old)
        try:
            fresh.rename(directory)
        except OSError:  # another builder was quicker; equal recipes are equal models
            if read_recipe(directory) != recipe:
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return directory


def read_recipe(directory: Path) -> Recipe | None:
    """The recipe of a complete model directory; None without one."""
    try:
        return msgspec.json.decode((directory / RECIPE_FILE).read_bytes(), type=Recipe)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def encoder(directory: Path) -> Callable[[str], list[int]]:
    """The model's tokenizer as a function, for `kvstore.demo.workload`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _write_tokenizer(directory: Path, shape: Shape) -> None:
    """Byte-level BPE without merges: one token per byte of text, so lengths are predictable."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        model_max_length=shape.position_count,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(str(directory))


def _write_weights(directory: Path, recipe: Recipe) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    _silence_transformers()
    shape = SHAPES[recipe.size]
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layer_count,
        num_attention_heads=shape.head_count,
        num_key_value_heads=shape.kv_head_count,
        head_dim=HEAD_DIMENSION,
        max_position_embeddings=shape.position_count,
        initializer_range=shape.deviation,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.weights_seed)
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, shape.dtype)).save_pretrained(str(directory))


def _silence_transformers() -> None:
    """No progress bars of its own under ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


# ── sensitivity to a wrong block ─────────────────────────────────────────────────────────────────


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

    _silence_transformers()
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvstore.demo.models", description="Build a model.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--weights-seed", type=int, default=1)
    parser.add_argument("--sensitivity", action="store_true", help="measure and report as JSON")
    chosen = parser.parse_args(arguments)
    build_model(chosen.directory, size=chosen.size, weights_seed=chosen.weights_seed)
    if chosen.sensitivity:
        result = measure_sensitivity(chosen.directory, seed=1)
        sys.stdout.write(json.dumps(msgspec.to_builtins(result)) + "\n")
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())

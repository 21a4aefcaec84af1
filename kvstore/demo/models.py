"""Small local models with seeded weights, whose output shows a wrong KV cache.

Covers: building a Llama checkpoint with a byte-level tokenizer in a directory. Does not cover:
engines (`kvstore.demo.engine`) and prompts (`kvstore.demo.workload`).

Weights are drawn with a large standard deviation: with the customary 0.02 attention is almost
uniform, and an engine fed with another prompt's KV goes on producing much the same tokens. A test
measures how surely a damaged block shows (`tests/kit/sensitivity.py`).

    python -m kvstore.demo.models DIR
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

import msgspec

RECIPE_FILE: Final = "recipe.json"
"""Name of the recipe, which is written last into a model directory."""
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
    """Architecture of a model, with heads HEAD_DIMENSION wide. The demo's has 25 M parameters
    and, in float32, 16 KiB of KV per token."""

    size: str = "medium"
    """Name of the shape, in recipes."""
    layer_count: int = 8
    hidden: int = 512
    intermediate: int = 1536
    head_count: int = 8
    kv_head_count: int = 4
    deviation: float = 0.06
    """Standard deviation of weights. Shrinks with the square root of `hidden`, so that attention is
    as sharp in each size."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored weights."""
    position_count: int = 4096
    """Longest request, in tokens."""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one token, all layers."""
        return self.layer_count * self.kv_head_count * HEAD_DIMENSION * 2 * element_bytes


MEDIUM: Final = Shape()


def default_cache() -> Path:
    """Directory that keeps the demo's model between runs."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvstore"


def build_model(directory: Path, *, shape: Shape = MEDIUM, weights_seed: int = 1) -> Path:
    """Make `directory` hold the model of that shape and seed; returns it.

    A directory of the same recipe stays; equal recipes give equal bytes. The model is built beside
    the target and renamed into place, so that a reader sees the old one, the new one, or none.
    Another recipe is replaced.

    Raises:
        FileExistsError: the directory has files that this function did not build.
    """
    recipe = msgspec.json.encode({"size": shape.size, "weights_seed": weights_seed, "version": 1})
    kept = directory / RECIPE_FILE
    if kept.exists() and kept.read_bytes() == recipe:
        return directory
    if not kept.exists() and directory.is_dir() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty and holds no model built here")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as work:
        fresh = Path(work, "new")
        fresh.mkdir()
        _write_tokenizer(fresh, shape)
        _write_weights(fresh, shape, weights_seed)
        (fresh / RECIPE_FILE).write_bytes(recipe)
        if directory.exists():
            directory.rename(Path(work, "old"))
        try:
            fresh.rename(directory)
        except OSError:  # another builder was quicker; equal recipes are equal models
            if not kept.exists() or kept.read_bytes() != recipe:
                raise
    return directory


def encoder(directory: Path) -> Callable[[str], list[int]]:
    """Function from a text to token ids, by the model's tokenizer; for `kvstore.demo.workload`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


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


def _write_weights(directory: Path, shape: Shape, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the stage says a line for it
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
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, shape.dtype)).save_pretrained(str(directory))


if __name__ == "__main__":
    build_model(Path(sys.argv[1]))

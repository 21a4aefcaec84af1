"""Models of tests and benchmarks, of other sizes than the demo's."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from kvstore.demo import models
from kvstore.demo.models import MEDIUM, Shape

Size = Literal["tiny", "tiny-one-head", "long", "medium", "bench"]
SHAPES: Final[dict[Size, Shape]] = {
    # 2.5 M parameters, 4 KiB of KV per token in float32: functional tests.
    "tiny": Shape(
        size="tiny",
        layer_count=4,
        hidden=256,
        intermediate=512,
        head_count=4,
        kv_head_count=2,
        deviation=0.08,
    ),
    # The same with one KV head, which ranks of a tensor-parallel engine hold alike.
    "tiny-one-head": Shape(
        size="tiny-one-head",
        layer_count=4,
        hidden=256,
        intermediate=512,
        head_count=4,
        kv_head_count=1,
        deviation=0.08,
    ),
    # 0.1 M parameters, 1 KiB of KV per token in float32: prompts of thousands of blocks, whose
    # attention is what takes the time.
    "long": Shape(
        size="long",
        layer_count=2,
        hidden=64,
        intermediate=128,
        head_count=1,
        kv_head_count=1,
        deviation=0.16,
        position_count=1 << 18,
    ),
    "medium": MEDIUM,
    # 194 M parameters, 16 KiB of KV per token in bfloat16: timing.
    "bench": Shape(
        size="bench",
        layer_count=16,
        hidden=1024,
        intermediate=3072,
        head_count=16,
        kv_head_count=4,
        deviation=0.05,
        dtype="bfloat16",
    ),
}


def build_model(directory: Path, *, size: Size, weights_seed: int = 1) -> Path:
    """As `kvstore.demo.models.build_model`."""
    return models.build_model(directory, shape=SHAPES[size], weights_seed=weights_seed)

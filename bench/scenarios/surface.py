"""`make bench-surface`: time to first token over hit rate, load and tier, beside an engine alone.

A burst is `load` requests at once, each for a prompt of 1,027 tokens of which a part was stored
before and the rest is fresh. The stored part lies in one tier: `dram` of the node, `file` (the node
was killed and started again, and the page cache told to drop its files), or `peer` (the dram of
another node; this one was cleared). The engine's own cache is emptied before each burst. An engine
without the connector gets the same burst of fresh prompts in the same turn: all it can do is
compute them. Settings are the defaults: the node may refuse a load that it expects to be slower
than computing, so the tokens that came from it stand beside what was stored.

Every request counts, whatever it found. Processor seconds are those of the engine and of the nodes
that serve it, from before the burst until the machine is idle again, so that stores are in. A row's
ratio is that of the printed medians; its 95 % interval resamples the requests of both sides.

Writes bench/results/surface.json.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import disk, record
from bench.hits import rest_until_idle
from bench.scenarios.single import processor_s
from kvstore.cli.ask import node_client
from kvstore.demo.engine import VllmServer
from kvstore.demo.models import BLOCK_TOKENS, encoder
from kvstore.demo.stage import settled
from kvstore.demo.workload import fresh_prompts
from kvstore.errors import KVStoreError
from kvstore.testing.process import NodeFailed, NodeProcess
from tests.kit.engines import EngineConfig, server_pid
from tests.kit.models import SHAPES, build_model
from tests.kit.peers import PeerPair

SIZE: Final = "medium"
MODEL: Final = record.ROOT / ".cache" / "models" / SIZE
WORK: Final = record.ROOT / ".cache" / "bench-surface"
STORED_TOKENS: Final = 8 * BLOCK_TOKENS
PROMPT_TOKENS: Final = STORED_TOKENS + 3
HIT_RATES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
BURSTS: Final = {1: 4, 4: 2, 16: 1}
"""By load: how often. Computing on two cores, 16 prompts take half a minute."""
TIERS: Final = ("dram", "file", "peer")
ENGINE_BLOCKS: Final = 192
DRAM, FILE = "4GiB", "8GiB"
SEED: Final = 20261129

Prompt = tuple[int, ...]


class Burst(msgspec.Struct, frozen=True):
    """So many requests at once."""

    ttft_ms: list[float]
    found_tokens: int
    """Of all prompts together, from the cache beside the engine."""
    processor_s: float
    is_rested: bool
    """Whether the machine was idle before it."""


class Side(NamedTuple):
    """An engine and whose processors work for it."""

    engine: VllmServer
    nodes: Callable[[], list[NodeProcess]]

    def processor_s(self) -> float:
        return processor_s(server_pid(self.engine), *(node.supervisor_pid for node in self.nodes()))

    def ask(self, prompts: Sequence[Prompt]) -> Burst:
        """All at once, with the engine's own cache empty."""
        self.engine.forget()
        is_rested = rest_until_idle()
        before_s, found = self.processor_s(), self.engine.hits().external_hits
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(
                threads.map(lambda one: self.engine.complete(one, max_tokens=1), prompts)
            )
        rest_until_idle()
        return Burst(
            ttft_ms=[1000 * answer.ttft_s for answer in answers],
            found_tokens=round(self.engine.hits().external_hits - found),
            processor_s=self.processor_s() - before_s,
            is_rested=is_rested,
        )


class Stage(NamedTuple):
    """One tier: the engine that asks, the one that stored, and how its prompts get there again."""

    asks: Side
    stores: VllmServer
    hide: Callable[[], None]
    """Leave the stored prompts in this tier alone."""


def figures(bursts: Sequence[Burst], plain: Sequence[Burst], *, hit_rate: float) -> dict[str, Any]:
    """Of one tier, load and hit rate: all requests, beside those without the cache."""
    with_ms = [ms for burst in bursts for ms in burst.ttft_ms]
    without_ms = [ms for burst in plain for ms in burst.ttft_ms]
    found = sum(burst.found_tokens for burst in bursts)
    shape = SHAPES[SIZE]
    return {
        "hit_rate": hit_rate,
        "requests": len(with_ms),
        "not_rested": sum(not burst.is_rested for burst in bursts),
        "ttft_ms": record.summary(with_ms),
        "without_ttft_ms": record.summary(without_ms),
        "ttft_over_without": float(np.median(with_ms) / np.median(without_ms)),
        "ttft_over_without_interval_95": list(_interval(with_ms, without_ms)),
        "found_tokens_of_a_request": found / len(with_ms),
        "loaded_mib_of_a_request": found * shape.kv_bytes_per_token(4) / len(with_ms) / 2**20,
        "processor_s_of_a_request": sum(burst.processor_s for burst in bursts) / len(with_ms),
        "without_processor_s_of_a_request": sum(burst.processor_s for burst in plain)
        / len(without_ms),
        "samples": [msgspec.to_builtins(burst) for burst in bursts],
    }


def _interval(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of median(over) / median(under), each resampled by itself."""
    random = np.random.default_rng(SEED)
    medians = [
        np.median(random.choice(np.asarray(values), size=(10_000, len(values))), axis=1)
        for values in (over, under)
    ]
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return float(low), float(high)


# ── tiers ────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _engine(name: str, socket: Path | None) -> Iterator[VllmServer]:
    config = EngineConfig(
        model=MODEL, dtype="float32", kv_blocks=ENGINE_BLOCKS, max_num_seqs=16, socket=socket
    )
    with VllmServer.start(config, log=WORK / f"engine-{name}.log") as engine:
        yield engine


@contextlib.contextmanager
def _one_node(tier: str) -> Iterator[Stage]:
    folder = WORK / tier
    folder.mkdir(parents=True)
    files = folder / "files"
    flags = ["--file", f"{files}:{FILE}"] if tier == "file" else []

    with contextlib.ExitStack() as stack:

        def start() -> NodeProcess:
            node = NodeProcess.start(folder, dram=DRAM, flags=flags)
            return stack.enter_context(node)

        nodes = [start()]
        engine = stack.enter_context(_engine(tier, folder / "node.sock"))

        def hide() -> None:
            if tier == "dram":
                return
            held = settled(engine, nodes[-1], lambda dram, on_disk: on_disk >= dram)
            nodes[-1].kill()
            nodes.append(start())
            settled(engine, nodes[-1], lambda _, on_disk: on_disk >= held)
            disk.drop_page_cache(files)

        yield Stage(Side(engine, lambda: nodes[-1:]), engine, hide)


@contextlib.contextmanager
def _two_nodes() -> Iterator[Stage]:
    folder = WORK / "peer"
    folder.mkdir(parents=True)
    with (
        PeerPair.start(folder, transport="tcp", dram=DRAM) as pair,
        _engine("there", pair.a.socket) as there,
        _engine("here", pair.b.socket) as here,
    ):

        def hide() -> None:
            with node_client(pair.b.socket) as client:
                client.clear(space="")

        settled(here, pair.b, lambda *_: True)
        yield Stage(Side(here, lambda: [pair.a, pair.b]), there, hide)


def _stage(tier: str) -> contextlib.AbstractContextManager[Stage]:
    return _two_nodes() if tier == "peer" else _one_node(tier)


# ── run ──────────────────────────────────────────────────────────────────────────────────────────


class Prompts:
    """Stored prompts, and as many fresh ones as are asked for; no two begin alike."""

    def __init__(self, seed: int, fresh: int) -> None:
        made = fresh_prompts(
            seed, count=max(BURSTS) + fresh, tokens=PROMPT_TOKENS, encode=encoder(MODEL)
        )
        self.stored = made[: max(BURSTS)]
        self._fresh = iter(made[max(BURSTS) :])

    def burst(self, load: int, hit_rate: float) -> list[Prompt]:
        """The first part of each is that of a stored one."""
        part = round(hit_rate * STORED_TOKENS)
        return [one[:part] + next(self._fresh)[part:] for one in self.stored[:load]]


def measure(
    bursts_of: Mapping[int, int], tiers: Sequence[str], seed: int, progress: Progress
) -> dict[str, Any]:
    """All cells, tier by tier. `bursts_of`: how many bursts of each load."""
    fresh = sum(load * count for load, count in bursts_of.items()) * (len(HIT_RATES) + 1)
    task = progress.add_task("", total=len(tiers) * sum(bursts_of.values()))
    rows: list[dict[str, Any]] = []
    for number, tier in enumerate(tiers):
        prompts = Prompts(seed + number, fresh)
        with _stage(tier) as stage, _engine("plain", None) as alone:
            plain = Side(alone, list)
            for prompt in prompts.stored:
                stage.stores.complete(prompt, max_tokens=1)
            rest_until_idle()
            for load, count in bursts_of.items():
                progress.update(task, description=f"{tier}, {load} at once")
                without: list[Burst] = []
                bursts: dict[float, list[Burst]] = {rate: [] for rate in HIT_RATES}
                for _ in range(count):
                    without.append(plain.ask(prompts.burst(load, 0.0)))
                    for rate in HIT_RATES:
                        stage.hide()
                        bursts[rate].append(stage.asks.ask(prompts.burst(load, rate)))
                    progress.advance(task)
                rows.append(
                    {
                        "tier": tier,
                        "load": load,
                        "without_samples": [msgspec.to_builtins(one) for one in without],
                        "cells": [
                            figures(bursts[rate], without, hit_rate=rate) for rate in HIT_RATES
                        ],
                    }
                )
    return {
        "what": "time to first token over hit rate, load and tier, beside vLLM alone",
        "model": {"size": SIZE, "dtype": "float32"},
        "prompt_tokens": PROMPT_TOKENS,
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Time to first token: hit rate, load, tier.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--quick", action="store_true", help="one burst of each load")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS)
    parser.add_argument("--no-record", dest="record", action="store_false", help="print it alone")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The benchmark was terminated."))
    console = Console()
    console.print(f"seed {options.seed}", highlight=False)
    bursts = dict.fromkeys(BURSTS, 1) if options.quick else BURSTS
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    try:
        build_model(MODEL, size=SIZE)
        with Progress(console=console) as progress:
            result = measure(bursts, options.tiers, options.seed, progress)
    except (KVStoreError, NodeFailed, OSError, ImportError) as error:
        console.print(f"[red]✗[/] {error}", highlight=False)
        return 1
    for row in result["rows"]:
        cells = "  ".join(
            f"{cell['hit_rate']:.2f}: {cell['ttft_over_without']:.2f}" for cell in row["cells"]
        )
        console.print(f"{row['tier']:5} {row['load']:2} at once   {cells}", highlight=False)
    if options.record:
        path = record.write("surface", result, seed=options.seed)
        console.print(f"wrote {path.relative_to(record.ROOT)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

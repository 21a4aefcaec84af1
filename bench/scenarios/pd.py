"""`make bench-pd`: prefill on one engine and decode on another, in ratios within this run.

hand_over    from the prefill engine's answer to the decode engine's first token, kvstore beside
             vLLM's own NixlConnector (both engines of either pair run all the time, and take turns)
ttft         time to first token through the proxy, legs in turn and together, beside the prefill
             engine's own
decode       time per output token of an answer while long prompts arrive, beside one engine that
             does both
turns        blocks that the second turn of a conversation moves

All four engines share this machine's cores, which favours one engine: two of them never compute at
the same time as two machines would. Judges nothing: goals stand beside the figures.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from bench.cluster.figures import SEED, at_most, plain, ratio, spread
from bench.scenarios.cluster import measured, table
from kvstore.demo.completions import CompletionClient
from kvstore.demo.engine import VllmServer
from kvstore.demo.engine_config import SERVED_NAME, ServerConfig
from kvstore.demo.models import BLOCK_TOKENS, Size, build_model, encoder
from kvstore.demo.pair import PdPair, pd_pair
from kvstore.demo.pd import PUSHED, answer_beside_prompts, metric
from kvstore.demo.workload import Encode, fresh_prompts, text_tokens
from kvstore.testing.pd_process import PdProxyProcess

PROMPT_TOKENS: Final = 3283
TO_PREFILL: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
GOALS: Final = {"hand_over": 0.8, "ttft": 1.15, "decode": 0.5}
SIDE_PORT: Final = 17600


class Legs(NamedTuple):
    """Seconds of one request."""

    prefill_s: float
    """Until the prefill engine had answered."""
    hand_over_s: float
    """From there to the decode engine's first token."""


def prefill_leg(port: int, prompt: Sequence[int]) -> dict[str, Any] | None:
    """Parameters for the decode engine."""
    body = {"model": SERVED_NAME, "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0}
    data = json.dumps({**body, "kv_transfer_params": TO_PREFILL}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found: dict[str, Any] = json.loads(answer.read())
    connection.close()
    assert answer.status == 200, found
    parameters: dict[str, Any] | None = found.get("kv_transfer_params")
    return parameters


def both_legs(p: VllmServer, d: VllmServer, prompt: Sequence[int]) -> Legs:
    """One after the other, as vLLM's proxies do it."""
    begin = time.perf_counter()
    parameters = prefill_leg(p.port, prompt)
    prefill_s = time.perf_counter() - begin
    assert parameters is not None, "the prefill engine's answer has no parameters"
    answer = d.complete(prompt, max_tokens=2, extra={"kv_transfer_params": parameters})
    return Legs(prefill_s, answer.ttft_s)


class Bench:
    """The engines of one run."""

    def __init__(
        self, pair: PdPair, nixl: tuple[VllmServer, VllmServer] | None, encode: Encode
    ) -> None:
        self._pair, self._nixl, self._encode = pair, nixl, encode
        self._prompts = iter(fresh_prompts(SEED, count=400, tokens=PROMPT_TOKENS, encode=encode))

    def hand_over(self, rounds: int) -> dict[str, Any]:
        """See the module."""
        times: dict[str, list[Legs]] = {"kvstore": [], "nixl": []}
        for number in range(rounds + 1):
            mine = both_legs(self._pair.p, self._pair.d, next(self._prompts))
            theirs = mine
            if self._nixl is not None:
                theirs = both_legs(*self._nixl, next(self._prompts))
            if number:  # the first warms the way
                times["kvstore"].append(mine)
                times["nixl"].append(theirs)
        its = {name: [legs.hand_over_s for legs in all_] for name, all_ in times.items()}
        shown = {name: [round(1000 * s, 1) for s in all_] for name, all_ in its.items()}
        if self._nixl is None:
            return {"figures": {}, "detail": {"hand_over_ms": {"kvstore": shown["kvstore"]}}}
        value, interval = ratio(its["kvstore"], its["nixl"])
        return {
            "figures": {
                "hand_over_over_nixl_connector": at_most(
                    GOALS["hand_over"], value, interval_95=interval
                )
            },
            "detail": {
                "hand_over_ms": shown,
                "prefill_ms": {
                    name: spread([1000 * legs.prefill_s for legs in all_])
                    for name, all_ in times.items()
                },
            },
        }

    def ttft(self, rounds: int, together: CompletionClient) -> dict[str, Any]:
        """See the module."""
        sides: dict[str, CompletionClient] = {
            "own": self._pair.p,
            "in_turn": self._pair.proxy,
            "together": together,
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            for name, side in sides.items():
                took_s = side.complete(next(self._prompts), max_tokens=2).ttft_s
                times[name] += [took_s] if number else []
        figures = {}
        for name in ("in_turn", "together"):
            value, interval = ratio(times[name], times["own"])
            figures[f"ttft_{name}_over_own"] = at_most(GOALS["ttft"], value, interval_95=interval)
        return {"figures": figures, "detail": {"ttft_s": times}}

    def decode(self, rounds: int) -> dict[str, Any]:
        """See the module."""
        sides: dict[str, CompletionClient] = {"one": self._pair.p, "pd": self._pair.proxy}
        per_token: dict[str, list[float]] = {name: [] for name in sides}
        longest: dict[str, list[float]] = {name: [] for name in sides}
        last: dict[str, tuple[float, ...]] = {}
        for number in range(rounds):
            for place, (name, side) in enumerate(sides.items()):
                seed = SEED + 1000 * (1 + number) + place
                token_s = answer_beside_prompts(side, self._encode, seed=seed)
                per_token[name].append(token_s[-1] / (len(token_s) - 1))
                longest[name].append(float(np.diff(token_s).max()))
                last[name] = token_s
        value, interval = ratio(per_token["pd"], per_token["one"])
        gap, _ = ratio(longest["pd"], longest["one"])
        return {
            "figures": {
                "time_per_output_token_over_one_engine": at_most(
                    GOALS["decode"], value, interval_95=interval
                ),
                "longest_gap_over_one_engine": plain(gap),
            },
            "detail": {"per_token_s": per_token, "longest_gap_s": longest, "token_s": last},
        }

    def turns(self, rounds: int) -> dict[str, Any]:
        """See the module."""
        rng, moved = random.Random(SEED), []
        for _ in range(rounds):
            first = next(self._prompts)[:2000]
            answer = self._pair.proxy.complete(first, max_tokens=140).tokens
            second = (*first, *answer, *text_tokens(rng, self._encode, 300))
            before = metric(self._pair.node_d, PUSHED)
            self._pair.proxy.complete(second, max_tokens=2)
            new = len(second) // BLOCK_TOKENS - (len(first) + len(answer) - 1) // BLOCK_TOKENS
            moved.append(metric(self._pair.node_d, PUSHED) - before - new)
        return {
            "figures": {"second_turn_moves_more_than_new_blocks": at_most(1, max(moved))},
            "detail": {"moved_minus_new": moved},
        }


@contextmanager
def nixl_pair(config: ServerConfig, folder: Path) -> Iterator[tuple[VllmServer, VllmServer] | None]:
    """vLLM's own connector; None where nixl is not installed."""
    if importlib.util.find_spec("nixl") is None:
        yield None
        return
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }
    engines = []
    try:
        for number, name in enumerate(("p", "d")):
            flags = ("--kv-transfer-config", json.dumps({**transfer, "engine_id": f"nixl-{name}"}))
            port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_PORT + number)}
            its = replace(config, arguments=flags, environment=port)
            engines.append(VllmServer.start(its, log=folder / f"nixl-{name}.log"))
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            engine.stop()


def run(*, rounds: int, size: Size, transport: str) -> dict[str, Any]:
    """All parts."""
    model = build_model(record.ROOT / ".cache" / "models" / size, size=size)
    config = ServerConfig(model=model, dtype="bfloat16", kv_blocks=96, max_num_seqs=8)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        folder = Path(name)
        (folder / "pair").mkdir()
        with (
            pd_pair(
                folder / "pair",
                config,
                lambda config, log: VllmServer.start(config, log=log),
                dram="1GiB",
                transport=transport,
            ) as pair,
            nixl_pair(config, folder) as nixl,
            PdProxyProcess.start(
                folder,
                prefill=[pair.p.port],
                decode=[pair.d.port],
                flags=("--legs", "together"),
            ) as process,
        ):
            bench, together = Bench(pair, nixl, encoder(model)), CompletionClient(process.port)
            parts = {
                "hand_over": lambda: bench.hand_over(rounds),
                "ttft": lambda: bench.ttft(rounds, together),
                "decode": lambda: bench.decode(max(2, rounds // 2)),
                "turns": lambda: bench.turns(max(1, rounds // 3)),
            }
            return {part: measured(measure) for part, measure in parts.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Prefill and decode on two engines, in numbers.")
    parser.add_argument("--quick", action="store_true", help="tiny amounts, which say nothing")
    parser.add_argument("--rounds", type=int, default=9, help="requests of each kind")
    parser.add_argument("--transport", default="tcp", help="of blocks between the nodes")
    options = parser.parse_args(arguments)
    console = Console()
    size: Size = "tiny" if options.quick else "bench"
    rounds = 2 if options.quick else options.rounds
    results = run(rounds=rounds, size=size, transport=options.transport)
    console.print(table(results), highlight=False)
    if options.quick:
        print(json.dumps(results, indent=1))
        return 0
    what = "prefill on one engine, decode on another, beside one engine and vLLM's NixlConnector"
    about = {"what": what, "prompt_tokens": PROMPT_TOKENS, "transport": options.transport}
    path = record.write("pd", {**about, **results}, seed=SEED)
    if all("detail" in part for part in results.values()):
        plot.draw(path)
    console.print(f"wrote {path.relative_to(record.ROOT)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

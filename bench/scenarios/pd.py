"""`make bench-pd`: prefill on one engine and decode on another, in ratios within this run.

push         64 MiB from node to node beside NIXL by itself, for blocks of 2 MiB and of 64 KiB; and
             through transfer workers, paced beside unpaced
hidden       part of a push that goes on after the prefill has ended, when both legs begin together,
             of a whole push that begins then
hand_over    from the prefill engine's answer to the decode engine's first token, legs in turn and
             together, beside vLLM's own NixlConnector, whose legs are always in turn, and whose
             NIXL rests as ours does; all take turns
ttft         time to first token through the router, beside the prefill engine's own
decode       time per output token of an answer while long prompts arrive, beside one engine that
             does both
pushing      time per output token on the prefill engine while its node pushes, beside the same
             requests of the decode engine with blocks of its own node
turns        blocks that the second turn of a conversation moves
sweep        prompts and answers in proportions of 20:1 to 1:1, beside the same engines colocated

Each engine has one core, as it would have a GPU of its own; nodes and the router take what engines
leave of both. Processes of vLLM that wait for each other do so without spinning, those of every
side (`bench.pd.engines`): a core that spins is missing to a node. Judges nothing: goals stand
beside the figures. `--quick` takes a tiny model and few requests: whether all of it runs, within
minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence, Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from bench.cluster.figures import SEED, NotMeasured, at_least, at_most, plain, ratio, spread
from bench.micro import push_speed
from bench.pd.engines import frugal_environment, nixl_pair, on_its_core
from bench.pd.legs import Legs, ended_s, fresh_name, in_turn, together
from bench.pd.sweep import per_token_s, sweep
from bench.scenarios.cluster import measured, table
from kvstore.demo.engine import Completion, CompletionClient, VllmServer, samples
from kvstore.demo.models import BLOCK_TOKENS, encoder
from kvstore.demo.play import PUSHED, answer_beside_prompts
from kvstore.demo.workload import Encode, fresh_prompts, text_tokens
from tests.kit.engines import Dtype, EngineConfig, EngineServer
from tests.kit.models import Size, build_model
from tests.kit.pd_pair import ALL_REMOTE, PdPair, pd_pair

PROMPT_TOKENS: Final = 3283
CHUNK_TOKENS: Final = 512
"""Of a prompt that a step computes: blocks are stored after each."""
ANSWER: Final = 160
"""Tokens of an answer beside other work."""
GOALS: Final = {
    "hand_over": 0.8,
    "ttft": 1.15,
    "decode": 0.5,
    "hidden": 0.1,
    "pushing": 1.03,
    "paced": 1.0,
}
PARTS: Final = (*("push", "hand_over", "hidden", "ttft", "decode", "pushing", "turns", "sweep"),)


class Bench:
    """The engines of one run."""

    def __init__(self, pair: PdPair, encode: Encode, rounds: int) -> None:
        self._pair, self._encode, self._rounds = pair, encode, rounds
        self._prompts = iter(fresh_prompts(SEED, count=900, tokens=PROMPT_TOKENS, encode=encode))

    def hidden(self) -> dict[str, Any]:
        """See the module. The prompt is computed in chunks, so blocks leave while it is."""
        shown: list[float] = []
        whole: list[float] = []
        for number in range(self._rounds + 1):
            name = fresh_name()
            legs = together(self._pair, next(self._prompts), name)
            rest_s = max(0.0, ended_s(self._pair, name) - legs.prefill_s)
            name = fresh_name()
            in_turn(self._pair.p, self._pair.d, next(self._prompts), name)
            if number:
                shown.append(rest_s)
                whole.append(ended_s(self._pair, name))
        value, interval = ratio(shown, whole)
        figure = at_most(GOALS["hidden"], value, interval_95=interval)
        return {
            "figures": {"not_hidden_over_whole_push": figure},
            "detail": {"after_prefill_s": shown, "whole_push_s": whole},
        }

    def pushing(self) -> dict[str, Any]:
        """See the module."""
        pair = self._pair
        per_token: dict[str, list[float]] = {"pushing": [], "not": []}
        for _ in range(max(2, self._rounds // 2)):
            prompts = [next(self._prompts) for _ in range(3)]
            for prompt in prompts:
                pair.p.complete(prompt, max_tokens=1)
            for name in per_token:
                done = self._answer_beside(lambda: self._decode_all(prompts))  # noqa: B023
                per_token[name].append(per_token_s(done))
                pair.d.forget()
        value, interval = ratio(per_token["pushing"], per_token["not"])
        figure = at_most(GOALS["pushing"], value, interval_95=interval)
        return {
            "figures": {"time_per_output_token_while_pushing_over_not": figure},
            "detail": {"per_token_s": per_token},
        }

    def _decode_all(self, prompts: Sequence[Sequence[int]]) -> None:
        """Requests of the decode engine for what the prefill node holds."""
        for prompt in prompts:
            early = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "kvstore": {"node": "p", "transfer": fresh_name()},
            }
            self._pair.d.complete(prompt, max_tokens=1, extra={"kv_transfer_params": early})

    def _answer_beside(self, work: Callable[[], None]) -> Completion:
        """An answer of the prefill engine, with work beside it from its first tokens on."""
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            extra: dict[str, object] = {"ignore_eos": True}
            answer = pool.submit(
                self._pair.p.complete, next(self._prompts)[:300], max_tokens=ANSWER, extra=extra
            )
            begun.wait(0.3)
            work()
            return answer.result()

    def sweep(self, total_tokens: int) -> dict[str, Any]:
        """See the module."""
        return sweep(
            split=self._pair.router,
            colocated=(self._pair.p, self._pair.d),
            fresh=lambda: next(self._prompts),
            total_tokens=total_tokens,
            count=4 if self._rounds < 4 else 8,
            rounds=1 if self._rounds < 9 else 2,
        )

    def hand_over(self, nixl: tuple[VllmServer, VllmServer] | str) -> dict[str, Any]:
        """See the module. `nixl` is a text: why there is no such pair."""
        if isinstance(nixl, str):
            raise NotMeasured(nixl)
        pair, sides = self._pair, ("in_turn", "together", "nixl")
        times: dict[str, list[Legs]] = {name: [] for name in sides}
        for number in range(self._rounds + 1):
            prompts = [next(self._prompts) for _ in sides]
            took = {
                "in_turn": in_turn(pair.p, pair.d, prompts[0]),
                "together": together(pair, prompts[1], fresh_name()),
                "nixl": in_turn(*nixl, prompts[2]),
            }
            shown = (f"{side} {legs.hand_over_s:.3f} s" for side, legs in took.items())
            print(" ", *shown, flush=True)
            for side, legs in took.items():
                times[side] += [legs] if number else []  # the first warms the way
        its = {name: [legs.hand_over_s for legs in all_] for name, all_ in times.items()}
        shown_ms = {name: [round(1000 * s, 1) for s in all_] for name, all_ in its.items()}
        figures = {}
        for name, figure in (("in_turn", "hand_over"), ("together", "hand_over_together")):
            value, interval = ratio(its[name], its["nixl"])
            goal = at_most(GOALS["hand_over"], value, interval_95=interval)
            figures[f"{figure}_over_nixl_connector"] = goal
        return {
            "figures": figures,
            "detail": {
                "hand_over_ms": shown_ms,
                "prefill_ms": {
                    name: spread([1000 * legs.prefill_s for legs in all_])
                    for name, all_ in times.items()
                },
            },
        }

    def ttft(self) -> dict[str, Any]:
        """See the module."""
        sides: dict[str, CompletionClient] = {"own": self._pair.p, "together": self._pair.router}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(self._rounds + 1):
            for name, side in sides.items():
                took_s = side.complete(next(self._prompts), max_tokens=2).ttft_s
                times[name] += [took_s] if number else []
        value, interval = ratio(times["together"], times["own"])
        figure = at_most(GOALS["ttft"], value, interval_95=interval)
        return {"figures": {"ttft_together_over_own": figure}, "detail": {"ttft_s": times}}

    def decode(self) -> dict[str, Any]:
        """See the module."""
        rounds = max(2, self._rounds // 2)
        sides: dict[str, CompletionClient] = {"one": self._pair.p, "pd": self._pair.router}
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

    def turns(self) -> dict[str, Any]:
        """See the module."""
        rounds = max(1, self._rounds // 3)
        rng, moved = random.Random(SEED), []
        for _ in range(rounds):
            first = next(self._prompts)[:2000]
            answer = self._pair.router.complete(first, max_tokens=140).tokens
            second = (*first, *answer, *text_tokens(rng, self._encode, 300))
            before = samples(self._pair.node_d.metrics_url).get(PUSHED, 0.0)
            self._pair.router.complete(second, max_tokens=2)
            new = len(second) // BLOCK_TOKENS - (len(first) + len(answer) - 1) // BLOCK_TOKENS
            after = samples(self._pair.node_d.metrics_url).get(PUSHED, 0.0)
            moved.append(after - before - new)
        return {
            "figures": {"second_turn_moves_more_than_new_blocks": at_most(1, max(moved))},
            "detail": {"moved_minus_new": moved},
        }


def push(rounds: int) -> dict[str, Any]:
    """See the module."""
    if importlib.util.find_spec("nixl_cu13") is None:
        raise NotMeasured("nixl is not installed")
    figures, detail = {}, push_speed.measure(rounds)
    for label, times in detail.items():
        raw_s = push_speed.quicker(times)
        value, interval = ratio(raw_s, times["node"])  # speeds: the inverse of times
        goal = push_speed.GOALS[label]
        figures[f"push_over_raw_write_{label}"] = at_least(goal, value, interval_95=interval)
        value, interval = ratio(raw_s, times["transfer_worker"])
        figures[f"transfer_worker_over_raw_write_{label}"] = plain(value, interval_95=interval)
        value, interval = ratio(times["paced"], times["transfer_worker"])
        paced = at_most(GOALS["paced"], value, interval_95=interval)
        figures[f"paced_over_unpaced_{label}"] = paced
    return {"figures": figures, "detail": {"seconds": detail}}


def start_on_its_core(config: EngineConfig, log: Path) -> EngineServer:
    """Engine p on the first core, engine d on the second."""
    return EngineServer.start(on_its_core(config, int(config.engine_id.endswith("d"))), log=log)


def told(name: str, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`measured`, with a line that says when it begins."""
    print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
    return measured(part)


def run(
    *,
    rounds: int,
    size: Size,
    dtype: Dtype,
    transport: str,
    total_tokens: int,
    parts: AbstractSet[str],
) -> dict[str, Any]:
    """These parts."""
    results: dict[str, Any] = {}
    if "push" in parts:
        results["push"] = told("push", lambda: push(max(2, rounds)))
    if not parts - {"push"}:
        return results
    model = build_model(record.ROOT / ".cache" / "models" / size, size=size)
    config = EngineConfig(
        model=model,
        dtype=dtype,
        kv_blocks=96,
        max_num_seqs=8,
        arguments=("--max-num-batched-tokens", str(CHUNK_TOKENS)),
    )
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        folder = Path(name)
        config = replace(config, environment=frugal_environment(folder))
        (folder / "pair").mkdir()
        with pd_pair(
            folder / "pair",
            config,
            start_on_its_core,
            dram="1GiB",
            policy=ALL_REMOTE,
            transport=transport,
        ) as pair:
            bench = Bench(pair, encoder(model), rounds)
            if "hand_over" in parts:
                with nixl_pair(config, folder) as nixl:
                    results["hand_over"] = told("hand_over", lambda: bench.hand_over(nixl))
            others: dict[str, Callable[[], dict[str, Any]]] = {
                "hidden": bench.hidden,
                "ttft": bench.ttft,
                "decode": bench.decode,
                "pushing": bench.pushing,
                "turns": bench.turns,
                "sweep": lambda: bench.sweep(total_tokens),
            }
            wanted = {part: measure for part, measure in others.items() if part in parts}
            return results | {part: told(part, measure) for part, measure in wanted.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Prefill and decode on two engines, in numbers.")
    parser.add_argument("--quick", action="store_true", help="tiny amounts, which say nothing")
    parser.add_argument("--rounds", type=int, default=9, help="requests of each kind")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="of weights and blocks: processors without AVX-512 compute bfloat16 very slowly",
    )
    parser.add_argument("--transport", default="tcp", help="of blocks between the nodes")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; no record is made")
    parser.add_argument("--again", choices=PARTS, help="one part anew, in the last record")
    options = parser.parse_args(arguments)
    if options.again and (options.quick or options.only):
        parser.error("--again replaces a part of the record: it takes no --quick and no --only")
    console = Console()
    console.width = max(console.width, 120)  # names of figures must not be cut
    size: Size = "tiny" if options.quick else "bench"
    rounds = 2 if options.quick else options.rounds
    total_tokens = 420 if options.quick else 1600
    results = run(
        rounds=rounds,
        size=size,
        dtype=options.dtype,
        transport=options.transport,
        total_tokens=total_tokens,
        parts=frozenset([options.again] if options.again else options.only or PARTS),
    )
    console.print(table(results), highlight=False)
    if options.only:
        print(json.dumps(results, indent=1))
        return 0
    what = "prefill on one engine, decode on another, beside one engine and vLLM's NixlConnector"
    about = {
        "what": what,
        "model": size,
        "dtype": options.dtype,
        "prompt_tokens": PROMPT_TOKENS,
        "transport": options.transport,
    }
    if options.again:  # of what machine and commit, the part says itself
        path = record.RESULTS / "pd.json"
        its = {"dtype": options.dtype, "measured_later": record.environment()}
        later = {**results[options.again], **its}
        renewed = {**json.loads(path.read_text()), options.again: later}
        path.write_text(json.dumps(renewed, indent=1) + "\n")
    elif options.quick:  # beside the models: a record of it would say nothing
        path = record.ROOT / ".cache" / "pd_quick.json"
        path.write_text(json.dumps({"environment": record.environment(), **about, **results}))
    else:
        path = record.write("pd", {**about, **results}, seed=SEED)
    plot.draw(path, "pd")
    console.print(f"wrote {path.relative_to(record.ROOT)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

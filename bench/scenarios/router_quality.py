"""`make bench-router-quality`: does the router's core choose well, beside others.

quality  Each trace through eight simulated engines (`bench.routing`): every policy of the core, and
         Dynamo's `SelectionService` where .venv-dynamo has it. Goodput: TTFT ≤ 2 s and ITL ≤ 25 ms.
         Beside them what no router beats (`bench.routing.bounds`).
shell    Some of the traces through the whole router in virtual time (`bench.routing.shell`): HTTP,
         probes, races, breakers, limits; all requests streamed, and one in four not. Beside the
         core, to which streamed first tokens and loads are known at once.
shapes   S1 to S3 (20k, 12k, 8k shared + 100): the highest rate at which the TTFT p95 keeps 1 s,
         beside a cache-blind router.
overload 1.5 × capacity with all classes of service: the share of inline requests within 1 s.
disaggregated   Goodput an engine with prefill and decode apart, beside engines that do both.

Traces: the conversation log where its path is given (argument or KVSTORE_TRACE), others generated.
Virtual time, no clock: one seed gives one result; figures of generated traces are means over seeds.
The index is up to date without delay.

Writes bench/results/router_quality.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.routing.baselines import other_router
from bench.routing.bounds import mean_alone_s
from bench.routing.disaggregated import disaggregated
from bench.routing.drive import CoreChooser, figures, mean_figures, run
from bench.routing.engine import EngineModel
from bench.routing.overload import overload
from bench.routing.shell import run_shell
from bench.routing.traces import SHAPES, RouterTrace, named, samples
from kvstore.routing.policy import PolicyCosts, RoutingPolicy
from tests.kit.routing_check import check

SEED: Final = 1
WORKERS: Final = 8
GENERATED: Final = (
    *("tool-agent@1", "tool-agent@4", "shared-prefix@1", "shared-prefix@4", "low-sharing@1"),
)
RECORDED: Final = ("conversation@1", "conversation@3")
MODEL: Final = EngineModel()
COSTS: Final = PolicyCosts(
    prefill_tokens_per_s=MODEL.tokens_per_s, attention_tokens=MODEL.attention_tokens
)
POLICIES: Final = {
    "round-robin": RoutingPolicy(policy="round-robin"),
    "least-load": RoutingPolicy(policy="least-load"),
    "prefix-load": other_router("prefix-load"),
    "weighted": other_router("weighted"),
    "cost": RoutingPolicy(policy="cost", costs=COSTS),
}
P95_S: Final = 1.0
WARM_UP: Final = 500
"""Requests of a shape after which caches are as full as they get."""
SHELL_REQUESTS: Final = 3000
SHELLED: Final = ("tool-agent@4", "shared-prefix@4")
PARTS: Final = ("quality", "shell", "shapes", "overload", "disaggregated")


def measure(trace: RouterTrace, policy: RoutingPolicy, *, warm_up: int = 0) -> dict[str, Any]:
    """One run; the first `warm_up` requests are in no figure."""
    chooser = CoreChooser(policy, MODEL, WORKERS, seed=SEED)
    row = figures(run(trace, chooser, MODEL, workers=WORKERS)[warm_up:])
    check(chooser.core)
    return row


def dynamo(names: list[str], trace: str, requests: int) -> dict[str, Any]:
    """Figures of Dynamo by trace; empty: it is not installed."""
    python = record.ROOT / ".venv-dynamo" / "bin" / "python"
    if not python.exists():
        print("Dynamo is not measured: there is no .venv-dynamo (make .venv-dynamo/.base).")
        return {}
    command = [str(python), "-m", "bench.routing.dynamo", trace, str(WORKERS), str(requests)]
    done = subprocess.run(
        [*command, *names], cwd=record.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"Dynamo is not measured: {done.stderr.splitlines()[-1:]}")
        return {}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def quality(trace: str, requests: int, names: list[str], known: dict[str, Any]) -> dict[str, Any]:
    """Figures by trace and router. `known`: of the last result, for routers that did not change."""
    missing = [name for name in names if name not in known]
    rivals = dynamo(missing, trace or "none", requests) if missing else {}
    result: dict[str, Any] = {}
    for name in names:
        its = samples(name, Path(trace), requests=requests)
        kept = known[name]["routers"] if name in known else {}
        rows = {router: row for router, row in kept.items() if router in (*POLICIES, "dynamo")}
        changed = {"cost": POLICIES["cost"]} if rows else POLICIES
        rows |= {
            router: mean_figures([measure(each, policy) for each in its])
            for router, policy in changed.items()
        }
        rows |= {"dynamo": rivals[name]} if name in rivals else {}
        others = {router: row for router, row in rows.items() if router != "cost"}
        ours, prefix_load_s = rows["cost"], rows["prefix-load"]["ttft_mean_s"]
        sizes = None, WORKERS * MODEL.cache_blocks
        bound_s, pooled_s = (
            sum(mean_alone_s(each, MODEL, size) for each in its) / len(its) for size in sizes
        )
        result[name] = {
            "shared_blocks": round(its[0].shared, 3),
            "routers": rows,
            "goodput_over_best_other": round(
                ours["goodput"] / max(row["goodput"] for row in others.values()), 3
            ),
            "ttft_p99_over_best_other": round(
                ours["ttft_p99_s"] / min(row["ttft_p99_s"] for row in others.values()), 3
            ),
            "ttft_mean_gain_over_prefix_load": round(prefix_load_s / ours["ttft_mean_s"], 3),
            "that_gain_of_the_bound": round(prefix_load_s / bound_s, 3),
            "that_gain_with_one_lru_cache_and_no_queue": round(prefix_load_s / pooled_s, 3),
            "ttft_mean_gain_over_round_robin": round(
                rows["round-robin"]["ttft_mean_s"] / ours["ttft_mean_s"], 3
            ),
        }
        for router, row in rows.items():
            parts = [f"{row[k]:8.3f}" for k in ("goodput", "ttft_mean_s", "ttft_p99_s")]
            print(f"{name:18} {router:20} {' '.join(parts)}", flush=True)
    return result


def shell(trace: str) -> dict[str, Any]:
    """Figures by trace: of the core by itself, and of the router."""
    result: dict[str, Any] = {}
    for name in (*(RECORDED if trace else ()), *SHELLED):
        its, policy = samples(name, Path(trace), requests=SHELL_REQUESTS), POLICIES["cost"]
        rows = {"core": mean_figures([measure(each, policy) for each in its])}
        for side, whole_every in (("router", 0), ("router, 1 in 4 whole", 4)):
            ran = [
                run_shell(each, policy, MODEL, workers=WORKERS, whole_every=whole_every)
                for each in its
            ]
            rows[side] = mean_figures([figures(jobs) for jobs in ran])
        result[name] = rows
        for side, row in rows.items():
            parts = [f"{row[k]:8.3f}" for k in ("goodput", "ttft_mean_s", "ttft_p99_s")]
            print(f"{name:18} {side:20} {' '.join(parts)}", flush=True)
    return result


def highest_rate(name: str, policy: RoutingPolicy) -> float:
    """Requests a second at which the TTFT p95 is within P95_S; by bisection. 1.0, the lowest rate
    that is tried, stands for none: an S1 prompt that hits nothing takes all of P95_S to compute."""
    low, high = 1.0, 256.0
    base = named(name, Path(), requests=0, seed=SEED)
    rate = len(base.jobs) / base.jobs[-1].arrival_s
    for _ in range(6):
        middle = (low * high) ** 0.5
        row = measure(base.at_speed(middle / rate), policy, warm_up=WARM_UP)
        low, high = (middle, high) if row["ttft_p95_s"] <= P95_S else (low, middle)
    return round(low, 2)


def shapes() -> dict[str, Any]:
    """Highest rates by shape."""
    result = {}
    for name in SHAPES:
        blind = highest_rate(name, POLICIES["least-load"])
        ours = highest_rate(name, POLICIES["cost"])
        result[name] = {
            "least_load_per_s": blind,
            "cost_per_s": ours,
            "gain": round(ours / blind, 2),
        }
        print(name, result[name], flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Quality of routing decisions, simulated.")
    parser.add_argument("trace", nargs="?", default=os.environ.get("KVSTORE_TRACE", ""))
    parser.add_argument("--requests", type=int, default=100_000, help="of the recorded trace")
    parser.add_argument("--only", choices=PARTS, help="replace one part of the last result")
    parser.add_argument("--names", help="traces of `quality` to replace, such as tool-agent@4,…")
    parser.add_argument("--ours", action="store_true", help="keep the others of the last result")
    options = parser.parse_args()
    if options.trace and not Path(options.trace).is_file():
        print("The request log is not there: give another path, or none.", file=sys.stderr)
        return 2
    names = [*(RECORDED if options.trace else ()), *GENERATED]
    if options.names:
        names = options.names.split(",")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "quality": lambda: quality(
            options.trace,
            options.requests,
            names,
            last.get("quality", {}) if options.ours else {},
        ),
        "shell": lambda: shell(options.trace),
        "shapes": shapes,
        "overload": lambda: overload(MODEL, COSTS),
        "disaggregated": lambda: disaggregated(MODEL, COSTS),
    }
    result: dict[str, Any] = {
        "workers": WORKERS,
        "engine": {name: getattr(MODEL, name) for name in MODEL.__struct_fields__},
    }
    last_path = record.RESULTS / "router_quality.json"
    last = json.loads(last_path.read_text()) if options.only and last_path.exists() else {}
    result |= {part: last[part] for part in PARTS if part in last}
    for part in [options.only] if options.only else PARTS:
        result[part] = (result.get(part, {}) if options.names else {}) | parts[part]()
    print(f"written: {record.write('router_quality', result, seed=SEED).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-policy-keys`: which keys of the routing policy change what a router does.

Each number of the policy four times as large and a quarter of it, each switch the other way, by
itself, in simulated fleets (`bench.routing`) that reach what the key is about:

traces          eight engines, the index exact: goodput (`make bench-router-quality`)
dram            the same with nodes that hold four times what an engine does
overload        all classes at 1.5 × capacity: inline requests within 1 s
disaggregated   two prefillers of four engines: requests within 2 s and 10 ms a token
planner         four engines whose roles the planner gives: the same

The effect of a key is the largest change of a share in any of them. Virtual time: one seed gives
one result, so a key that nothing reads changes nothing. Any change of the choices changes the rest
of a run: `noise` is the largest change of each share by other seeds of the core alone, and an
effect below it is none. The simulator has no races, adapters, nodes that fetch, or restarts: keys
about these are not seen here (`unseen`, and effects of 0).

Writes bench/results/policy_keys.json. The record in this tree was made with all keys that there
were; those without an effect became constants.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.routing.disaggregated import ENGINES, ITL_S, TTFT_S
from bench.routing.drive import CoreChooser, figures, run
from bench.routing.engine import EngineModel
from bench.routing.overload import WORKERS as OVERLOADED, trace as overload_trace, within
from bench.routing.traces import RouterTrace, low_sharing, named
from kvstore.routing.policy import PolicyCosts, RoutingPolicy, parse

SEED: Final = 1
SEEDS: Final = (1, 2)
WORKERS: Final = 8
NOISE_SEEDS: Final = (2, 3, 4, 5, 6)
FACTOR: Final = 4.0
REQUESTS: Final = 2000
GENERATED: Final = ("tool-agent@4", "shared-prefix@4")
RATE: Final = 6.0
"""Requests a second for four engines apart: near the highest that they attain."""
MODEL: Final = EngineModel()
NODES: Final = EngineModel(dram_blocks=4 * MODEL.cache_blocks)
COSTS: Final = PolicyCosts(
    prefill_tokens_per_s=MODEL.tokens_per_s, attention_tokens=MODEL.attention_tokens
)
CLASSES: Final = {
    name: msgspec.structs.replace(its, tenants=("*",))
    for name, its in RoutingPolicy().classes.items()
}
BASE: Final = RoutingPolicy(costs=COSTS, classes=CLASSES)
UNSEEN: Final = {"probes", "races", "ahead"}
"""Sections that the simulator does not reach."""
REACHED: Final = {"classes": "overload", "planner": "planner", "split": "disaggregated"}
"""Sections that are about one fleet only."""


def shares(trace: str, seed: int = SEED) -> dict[str, Callable[[RoutingPolicy], float]]:
    """The figure of each fleet under a policy. `seed`: of the core."""
    names = [*(("conversation@3",) if trace else ()), *GENERATED]
    traces = [
        (f"{name} {made}", named(name, Path(trace), requests=REQUESTS, seed=made))
        for name in names
        for made in (SEEDS if name in GENERATED else SEEDS[:1])
    ]

    def goodput(its: RouterTrace, policy: RoutingPolicy, model: EngineModel = MODEL) -> float:
        chooser = CoreChooser(policy, model, WORKERS, seed=seed)
        return float(figures(run(its, chooser, model, workers=WORKERS))["goodput"])

    def inline(policy: RoutingPolicy) -> float:
        its = overload_trace(MODEL, SEED, requests=REQUESTS)
        chooser = CoreChooser(policy, MODEL, OVERLOADED, seed=seed)
        return within(run(its, chooser, MODEL, workers=OVERLOADED), "inline")

    def apart(policy: RoutingPolicy, prefillers: int | None) -> float:
        its = low_sharing(3, requests=600, rate=RATE)
        if prefillers is None:
            planner = msgspec.structs.replace(policy.planner, is_on=True)
            policy = msgspec.structs.replace(policy, planner=planner)
        chooser = CoreChooser(policy, MODEL, ENGINES, seed=seed, prefillers=prefillers)
        jobs = run(its, chooser, MODEL, workers=ENGINES)
        return float(figures(jobs, ttft_s=TTFT_S, itl_s=ITL_S)["goodput"])

    return {
        **{name: lambda policy, its=its: goodput(its, policy) for name, its in traces},  # type: ignore[misc]
        "dram": lambda policy: goodput(traces[0][1], policy, NODES),
        "overload": inline,
        "disaggregated": lambda policy: apart(policy, 2),
        "planner": lambda policy: apart(policy, None),
    }


def others(value: object) -> Sequence[object]:
    """Other values of a key, that are far from it."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({max(1, int(value / FACTOR)), int(value * FACTOR) or 1} - {value})
    if isinstance(value, float):
        return [value / FACTOR, value * FACTOR] if value else [1.0]
    return []


def changes() -> Iterator[tuple[str, RoutingPolicy]]:
    """Each key with each of its other values that is allowed."""
    plain: dict[str, Any] = msgspec.to_builtins(BASE)
    for section, fields in plain.items():
        rows = fields if isinstance(fields, dict) else {"": fields}
        if section == "classes":
            rows = {f"{name}.{key}": its for name in fields for key, its in fields[name].items()}
        for key, value in rows.items():
            for other in others(value) if section not in UNSEEN else ():
                mapping = msgspec.to_builtins(BASE)
                at, last = mapping, section
                for part in key.split(".") if key else ():
                    at, last = at[last], part
                at[last] = other
                try:
                    yield f"{section}.{key}".rstrip("."), parse(mapping)
                except ValueError:
                    continue


def main() -> int:
    parser = argparse.ArgumentParser(description="Effect of each key of the routing policy.")
    parser.add_argument("trace", nargs="?", default=os.environ.get("KVSTORE_TRACE", ""))
    trace = parser.parse_args().trace
    its = shares(trace)
    plain = {name: figure(BASE) for name, figure in its.items()}
    noise = dict.fromkeys(its, 0.0)
    for seed in NOISE_SEEDS:
        for name, figure in shares(trace, seed).items():
            noise[name] = max(noise[name], round(abs(figure(BASE) - plain[name]), 4))
    print(plain, noise, flush=True)
    effects: dict[str, dict[str, Any]] = {}
    for key, policy in changes():
        only = REACHED.get(key.partition(".")[0])
        reached = {only: its[only]} if only else its
        rows = {name: figure(policy) - plain[name] for name, figure in reached.items()}
        where = max(rows, key=lambda name: abs(rows[name]) - noise[name])
        over = round(abs(rows[where]) - noise[where], 4)
        if over >= effects.get(key, {"over_noise": -1.0})["over_noise"]:
            effects[key] = {"effect": round(rows[where], 4), "over_noise": over, "where": where}
        print(f"{key:32} {rows[where]:+.4f} over noise {over:+.4f} {where}", flush=True)
    ordered = dict(sorted(effects.items(), key=lambda each: -each[1]["over_noise"]))
    result: dict[str, Any] = {"shares": plain, "noise": noise, "effects": ordered}
    result |= {"unseen": sorted(UNSEEN), "factor": FACTOR}
    print(f"written: {record.write('policy_keys', result, seed=SEED).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

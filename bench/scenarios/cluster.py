"""`make bench-cluster`: nodes as one cache, in numbers that are ratios within this run.

index       the prefix index beside Dynamo's, in process
index_grpc  the same over gRPC
fetch       a fetch of another node's blocks, end to end, beside raw NIXL reads of the same bytes
ttft        time to first token of what another node holds, beside the engine's own cache
congestion  how much reads slow another flow on a link, paced and not
scale       an index of 1,000 nodes and 100,000,000 blocks, simulated

What a machine cannot measure is in the record as "not_measured", and why. Only a run of all parts
at full size writes bench/results/cluster.json and cluster.png, and meanwhile what it has so far to
build/cluster.json; `--only` and `--quick` print, and `--again` measures one part of the last record
anew. Judges nothing: goals stand beside the figures, and whether they were met.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import plot, record
from bench.cluster import congestion, fetch, index, scale, ttft
from bench.cluster.figures import SEED, NotMeasured
from kvstore.units import GIB, MIB

Part = Callable[[], dict[str, Any]]
FULL: Final[dict[str, Part]] = {
    "index": lambda: index.measure(entries=10_000_000, matches=2000),
    "index_grpc": lambda: index.measure_served(rounds=3),
    "fetch": lambda: fetch.measure(bytes_a_round=64 * MIB, rounds=9),
    "ttft": lambda: ttft.measure(prompts=12, size="bench"),
    "congestion": lambda: congestion.measure(flow_bytes=GIB, read_bytes=GIB, rounds=4),
    "scale": lambda: scale.measure(entries=100_000_000, nodes=1000),
}
QUICK: Final[dict[str, Part]] = {
    "index": lambda: index.measure(entries=500_000, matches=50),
    "index_grpc": lambda: index.measure_served(rounds=1),
    "fetch": lambda: fetch.measure(bytes_a_round=8 * MIB, rounds=2),
    "ttft": lambda: ttft.measure(prompts=2, size="tiny"),
    "congestion": lambda: congestion.measure(flow_bytes=8 * MIB, read_bytes=8 * MIB, rounds=2),
    "scale": lambda: scale.measure(entries=2_000_000, nodes=20),
}


def measured(part: Part) -> dict[str, Any]:
    """What it found and how long it took, or why it found nothing."""
    begin_s = time.perf_counter()
    try:
        found = part()
    except NotMeasured as error:
        return {"not_measured": str(error)}
    except Exception as error:  # noqa: BLE001  one part that fails does not cost the others
        traceback.print_exc()
        return {"not_measured": f"it failed: {type(error).__name__}: {error}"}
    return {**found, "took_s": round(time.perf_counter() - begin_s, 1)}


_MET: Final = {True: "yes", False: "no", None: ""}


def table(results: dict[str, Any]) -> Table:
    """One row for each figure."""
    made = Table("part", "figure", "value", "goal", "met")
    for name, part in results.items():
        if "not_measured" in part:
            made.add_row(name, "not measured", part["not_measured"], "", "")
            continue
        for title, figure in part["figures"].items():
            value = f"{figure['value']:g}"
            if "interval_95" in figure:
                value += " [{:g}, {:g}]".format(*figure["interval_95"])
            made.add_row(name, title, value, _goal(figure), _MET[figure.get("met")])
    return made


def _goal(figure: dict[str, Any]) -> str:
    for bound, sign in (("at_least", ">="), ("at_most", "<=")):
        if bound in figure:
            return f"{sign} {figure[bound]:g}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Nodes as one cache, in numbers.")
    parser.add_argument("--only", choices=list(FULL), help="one part, which is printed")
    parser.add_argument("--again", choices=list(FULL), help="one part anew, in the last record")
    parser.add_argument("--quick", action="store_true", help="tiny amounts, which say nothing")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The benchmark was terminated."))
    console = Console()
    parts = QUICK if options.quick else FULL
    if options.again:
        return _again(console, options.again)
    results: dict[str, Any] = {}
    for name, part in parts.items():
        if options.only in (None, name):
            console.print(f"{name} …", highlight=False)
            results[name] = measured(part)
            _keep(results)
    console.print(table(results), highlight=False)
    if options.quick or options.only:
        print(json.dumps(results, indent=1))
        return 0
    what = "nodes as one cache: index, fetches, other flows, scale"
    path = record.write("cluster", {"what": what, **results}, seed=SEED)
    _draw(path)
    console.print(f"wrote {path.relative_to(record.ROOT)}", highlight=False)
    return 0


def _again(console: Console, name: str) -> int:
    """One part of the last record replaced; of what machine and commit, it says itself."""
    path = record.RESULTS / "cluster.json"
    before = json.loads(path.read_text())
    console.print(f"{name} …", highlight=False)
    before[name] = {**measured(FULL[name]), "measured_later": record.environment()}
    console.print(table({name: before[name]}), highlight=False)
    path.write_text(json.dumps(before, indent=1) + "\n")
    _draw(path)
    return 0


def _draw(path: Path) -> None:
    """The picture, where its two parts were measured."""
    result = json.loads(path.read_text())
    if all("detail" in result[part] for part in ("fetch", "ttft")):
        plot.draw(path)


def _keep(results: dict[str, Any]) -> None:
    """What there is so far, should the rest be cut short."""
    place = record.ROOT / "build"
    place.mkdir(exist_ok=True)
    (place / "cluster.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

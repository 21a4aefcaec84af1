"""A real vLLM on this machine's GPU through kvstore: right tokens, hits after a restart, and time.

    python3 bench/gpu/vllm/run.py [--pack build/gpu-vllm] [--out build/gpu_vllm.json]

One node and three engines, one after the other, each a process of its own (`engine.py`):

plain  vLLM by itself: each prompt computed, then found in its own prefix cache.
store  With kvstore, prompts that the node does not have.
load   Another engine on the same node, as after a restart: the node has them all.
graphs (--graphs) Once more with decodes in CUDA graphs; reported, not judged.

Right: `store` computes plain's tokens; `load` finds as many prompt tokens as plain's own prefix
cache, and then its tokens are those of plain's hit, bit for bit the same computation. A hit against
a full computation is reported only, since other kernels compute it. Two prompts that give the same
tokens prove nothing about their KV.

Exit code 0: all of it; 1: something is wrong; 3: nothing was measured. At most 420 s in all.
`--device cpu` and `--device virtual` run the same without a GPU; their times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[3]))  # bench/ is not installed

from bench.gpu.vllm.pack import PACK, ROOT, PackError, unpack

OK, WRONG, NOTHING = 0, 1, 3
SECONDS: Final = 420
ENGINES: Final = ("plain", "store", "load")
TAIL_LINES: Final = 12
LOG_LINES: Final = 120
"""Of a failed engine, in the result."""
SMALL: Final = {
    # device: prompts, their tokens, new tokens, MiB of the engine's own cache
    "cpu": (3, 600, 16, 0),
    "virtual": (2, 70, 4, 64),
}
LARGE: Final = (3, 8000, 24, 4096)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run showed."""

    code: int
    reasons: tuple[str, ...] = ()
    ratios: Mapping[str, float] = field(default_factory=dict)


def judge(found: Mapping[str, Any]) -> Verdict:
    """By what the engines wrote; one that failed has `failed`."""
    plain = found.get("plain", {})
    if "first" not in plain or not plain["first"]:
        reason = plain.get("failed", "not begun")
        return Verdict(NOTHING, (f"vLLM by itself did not run: {reason}",))
    if len({tuple(row["tokens"]) for row in plain["first"]}) < len(plain["first"]):
        return Verdict(NOTHING, ("two prompts have the same tokens, whatever their KV is",))
    expected = [row["cached"] for row in plain["again"]]
    if not all(expected):
        return Verdict(NOTHING, ("vLLM's own prefix cache found nothing to compare with",))
    broken = [
        f"{name}: the engine did not end: {found.get(name, {}).get('failed', 'not begun')}"
        for name in ("store", "load")
        if "first" not in found.get(name, {})
    ]
    if broken:
        return Verdict(WRONG, tuple(broken))
    reasons = [
        *_differences("store", found["store"]["first"], plain["first"], cached=[0] * len(expected)),
        *_differences("store, again", found["store"]["again"], plain["again"], cached=expected),
        *_differences("load", found["load"]["first"], plain["again"], cached=expected),
        *_differences("load, again", found["load"]["again"], plain["again"], cached=expected),
    ]
    return Verdict(WRONG if reasons else OK, tuple(reasons), _ratios(found))


def _differences(
    name: str, rows: Sequence[Mapping[str, Any]], like: Sequence[Mapping[str, Any]], *, cached: Any
) -> list[str]:
    if len(rows) != len(like):
        return [f"{name}: {len(rows)} of {len(like)} prompts"]
    found = []
    for number, (row, other, tokens) in enumerate(zip(rows, like, cached, strict=True)):
        if row["cached"] != tokens:
            found.append(f"{name}: prompt {number} found {row['cached']} of {tokens} tokens cached")
        if row["tokens"] != other["tokens"]:
            found.append(f"{name}: prompt {number} has other tokens than vLLM by itself")
    return found


def _ratios(found: Mapping[str, Any]) -> dict[str, float]:
    """Medians of seconds to the first token, against vLLM by itself."""

    def seconds(name: str, turn: str) -> float:
        return float(median(row["ttft_s"] for row in found[name][turn]))

    computed, hit = seconds("plain", "first"), seconds("plain", "again")
    full = zip(found["load"]["first"], found["plain"]["first"], strict=True)
    graphs = found.get("graphs", {}).get("first", ())
    hits = zip(graphs, found["plain"]["again"], strict=False)
    return {
        "computed_s": computed,
        "own_hit_s": hit,
        "store_over_computed": seconds("store", "first") / computed,
        "load_over_computed": seconds("load", "first") / computed,
        "load_over_own_hit": seconds("load", "first") / hit,
        "same_as_full_computation": sum(a["tokens"] == b["tokens"] for a, b in full),
        **(
            {"graphs_same_as_hit": sum(a["tokens"] == b["tokens"] for a, b in hits)}
            if graphs
            else {}
        ),
    }


class Run:
    """Processes of one run, within one deadline."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        self.deadline: float = time.monotonic() + options.seconds
        self._device = options.device
        self._size = "large" if options.device == "cuda" else "small"
        self._amounts = SMALL.get(options.device, LARGE)
        paths = [] if options.device == "cpu" else unpack(options.pack, folder)
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "PYTHONUNBUFFERED": "1",
        }

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def model(self) -> str:
        """Write the model; why not, if not."""
        here = Path(__file__).with_name("model.py")
        return self._python(here, str(self.folder / "model"), "--size", self._size)

    def engine(self, name: str, *more: str) -> dict[str, Any]:
        """What one engine wrote, or `failed`; `seconds` in either case."""
        out = self.folder / f"{name}.json"
        begin = time.monotonic()
        prompts, tokens, new, mib = map(str, self._amounts)
        failed = self._python(
            Path(__file__).with_name("engine.py"),
            *(str(self.folder / "model"), str(out), "--device", self._device),
            *("--prompts", prompts, "--prompt-tokens", tokens, "--new-tokens", new),
            *("--kv-mib", mib, *more),
        )
        found = json.loads(out.read_text()) if out.exists() else {"failed": failed or "no answer"}
        said = (self.folder / "log.txt").read_text(errors="replace").splitlines()
        found["kvstore_log"] = [line for line in said if "kvstore:" in line][-TAIL_LINES:]
        if "failed" in found:
            found["log"] = said[-LOG_LINES:]
        seconds = round(time.monotonic() - begin, 1)
        print(f"{name:8} {seconds:6.1f} s  {found.get('failed', 'ended')}", flush=True)
        return {**found, "seconds": seconds}

    def _python(self, program: Path, *given: str) -> str:
        """Run it; the end of what it said, if it failed."""
        if self.left_s < 1:
            return "no time was left"
        command = [sys.executable, str(program), *given]
        log = self.folder / "log.txt"
        with log.open("w") as said:
            try:
                done = subprocess.run(
                    command,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    timeout=self.left_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return "it was not ready in time: " + _tail(log)
        return f"exit code {done.returncode}: {_tail(log)}" if done.returncode else ""


def _tail(log: Path) -> str:
    lines = (line.strip() for line in log.read_text(errors="replace").splitlines())
    said = [line for line in lines if line.strip("^ ~")]
    return " | ".join(said[-TAIL_LINES:])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All engines, as far as time and errors allow."""
    found: dict[str, Any] = {"device": options.device, "card": card(options.device)}
    if options.device == "cuda" and not found["card"] and not Path("/dev/nvidiactl").exists():
        return {**found, "plain": {"failed": "there is no NVIDIA GPU on this machine"}}
    with tempfile.TemporaryDirectory(prefix="kvstore-gpu-vllm-") as name:
        run = Run(options, Path(name))
        if failed := run.model():
            return {**found, "plain": {"failed": f"no model: {failed}"}}
        found["plain"] = run.engine("plain")
        if "failed" in found["plain"]:
            return found
        sys.path[:0] = run.environment["PYTHONPATH"].split(os.pathsep)  # the node's wheels
        os.environ["PYTHONPATH"] = run.environment["PYTHONPATH"]
        from kvstore.testing.process import NodeFailed, NodeProcess

        dram = "6GiB" if options.device == "cuda" else "256MiB"
        flags = ["--hbm", options.hbm] if options.hbm else []
        try:
            node = NodeProcess.start(run.folder, dram=dram, flags=flags, timeout_s=60)
        except NodeFailed as error:
            return {**found, "store": {"failed": f"no node: {error}"}}
        with node:
            more = ("--socket", str(node.socket))
            for each in ENGINES[1:]:
                found[each] = run.engine(each, *more)
            if options.graphs and run.left_s > 1:
                found["graphs"] = run.engine("graphs", *more, "--graphs")
            with contextlib.suppress(OSError):
                found["node_log"] = node.log.splitlines()[-TAIL_LINES:]
    return found


def card(device: str) -> str:
    """Name of the GPU; empty without one."""
    if device != "cuda":
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0]


def say(verdict: Verdict, found: Mapping[str, Any]) -> None:
    for reason in verdict.reasons:
        print(f"{'NOTHING WAS MEASURED' if verdict.code == NOTHING else 'WRONG'}: {reason}")
    if verdict.code == WRONG:
        for name in ("store", "load"):
            print(*found.get(name, {}).get("kvstore_log", ()), sep="\n")
    for name, value in verdict.ratios.items():
        print(f"{name:28} {value:8.3f}")
    print({OK: "all right", WRONG: "wrong", NOTHING: "NOTHING WAS MEASURED"}[verdict.code])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu", "virtual"), default="cuda")
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_vllm.json")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--hbm", default="", help="size of the node's tier on the GPU")
    parser.add_argument("--graphs", action="store_true", help="one more engine, with CUDA graphs")
    options = parser.parse_args()
    try:
        found = measure(options)
    except PackError as error:
        found = {"device": options.device, "plain": {"failed": str(error)}}
    verdict = judge(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    answer = {"code": verdict.code, "reasons": verdict.reasons, "ratios": verdict.ratios, **found}
    options.out.write_text(json.dumps(answer, indent=1) + "\n")
    say(verdict, found)
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())

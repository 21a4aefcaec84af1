"""A real vLLM on this machine's GPU through kvstore: right tokens, hits after a restart, and time.

    python3 bench/gpu/vllm/run.py [--pack build/gpu-vllm] [--out FILE] [--seconds N]

One node and three engines, one after the other, each a process of its own (`engine.py`):

plain  vLLM by itself: each prompt computed, then found in its own prefix cache.
store  With kvstore, prompts that the node does not have.
load   Another engine on the same node, as after a restart: the node has them all.
graphs (--graphs) Once more with decodes in CUDA graphs; reported, not judged.

Right: `store` computes plain's tokens; `load` finds as many prompt tokens as plain's own prefix
cache, and then its tokens are those of plain's hit, bit for bit the same computation. A hit against
a full computation is reported only, since other kernels compute it. Two prompts that give the same
tokens prove nothing about their KV.

Prints one table, and writes one JSON, after each engine what there is so far: FILE, or
build/gpu_vllm.json, whose name says if it is a rehearsal (`_cpu`, `_virtual`), if nothing was
measured (`_nothing`), and if the run did not come to its end (`_partial`). SIGTERM and SIGINT end
the engine that runs, and then the run in order.

Exit code 0: all of it; 1: something is wrong; 3: nothing was measured; 4: an engine was not
finished in time, and nothing is wrong in what there is. At most 420 s in all, without a GPU 900.
`--device cpu` and `--device virtual` run the same without a GPU; their times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[3]))  # bench/ is not installed

from bench.gpu.report import new, unwritable
from bench.gpu.smi import describe_gpu, why_none
from bench.gpu.stop import Stop, run_process
from bench.gpu.vllm.engine import SEED
from bench.gpu.vllm.pack import PACK, ROOT, PackError, unpack

OK, WRONG, NOTHING, UNFINISHED = 0, 1, 3, 4
SECONDS: Final = {"cuda": 420.0, "cpu": 900.0, "virtual": 900.0}
"""For all of it. Without a GPU kernels are compiled and interpreted."""
LATE: Final = "NOT FINISHED in time"
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
    there = [name for name in ENGINES[1:] if "first" in found.get(name, {})]
    lacking = {name: found.get(name, {}).get("failed", LATE) for name in ENGINES[1:]}
    lacking = {name: reason for name, reason in lacking.items() if name not in there}
    late = [f"{name}: {why}" for name, why in lacking.items() if why.startswith(LATE)]
    reasons = [
        f"{name}: the engine did not end: {why}"
        for name, why in lacking.items()
        if not why.startswith(LATE)
    ]
    nothing = [0] * len(expected)
    for name in there:
        like, cached = (plain["first"], nothing) if name == "store" else (plain["again"], expected)
        reasons += _differences(name, found[name]["first"], like, cached=cached)
        again = found[name]["again"]
        reasons += _differences(f"{name}, again", again, plain["again"], cached=expected)
    code = WRONG if reasons else UNFINISHED if late else OK
    return Verdict(code, (*reasons, *late), _ratios(found, there))


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


def _ratios(found: Mapping[str, Any], there: Sequence[str]) -> dict[str, float]:
    """Of the engines that ended: medians of seconds to the first token, against vLLM by itself."""
    plain = found["plain"]
    computed, hit = seconds(plain["first"]), seconds(plain["again"])
    ratios = {"computed_s": computed, "own_hit_s": hit}
    if "store" in there:
        ratios["store_over_computed"] = seconds(found["store"]["first"]) / computed
    if "load" in there:
        first = found["load"]["first"]
        ratios["load_over_computed"] = seconds(first) / computed
        ratios["load_over_own_hit"] = seconds(first) / hit
        ratios["same_as_full_computation"] = _same(first, plain["first"])
    if graphs := found.get("graphs", {}).get("first", ()):
        ratios["graphs_same_as_hit"] = _same(graphs, plain["again"])
    return ratios


def seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(median(row["ttft_s"] for row in rows))


def _same(rows: Sequence[Mapping[str, Any]], like: Sequence[Mapping[str, Any]]) -> int:
    return sum(a["tokens"] == b["tokens"] for a, b in zip(rows, like, strict=False))


class Run:
    """Processes of one run, within one deadline."""

    def __init__(self, options: argparse.Namespace, folder: Path, stop: Stop) -> None:
        self.folder, self._stop = folder, stop
        self.deadline: float = time.monotonic() + (options.seconds or SECONDS[options.device])
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
        if self.left_s < 1 or self._stop.reason:
            return f"{LATE}: {self._stop.because('none was left for it')}"
        log = self.folder / "log.txt"
        code = run_process(
            [sys.executable, str(program), *given],
            log=log,
            environment=self.environment,
            limit_s=self.left_s,
            stop=self._stop,
        )
        if code is None:
            return f"{LATE}: {self._stop.because('more than --seconds')}: {_tail(log)}"
        return f"exit code {code}: {_tail(log)}" if code else ""


def _tail(log: Path) -> str:
    lines = (line.strip() for line in log.read_text(errors="replace").splitlines())
    said = [line for line in lines if line.strip("^ ~")]
    return " | ".join(said[-TAIL_LINES:])


Found = dict[str, Any]


def measure(
    options: argparse.Namespace,
    folder: Path,
    stop: Stop,
    keep: Callable[[Found], object],
) -> Found:
    """All engines, as far as time and errors allow. `keep`: after each one, all so far. Raises
    PackError."""
    gpu = describe_gpu() if options.device == "cuda" else {}
    found: Found = {"device": options.device, "gpu": gpu}
    if options.device == "cuda" and not gpu:
        return {**found, "plain": {"failed": why_none()}}
    run = Run(options, folder, stop)
    if failed := run.model():
        return {**found, "plain": {"failed": f"no model: {failed}"}}
    found["plain"] = run.engine("plain")
    if "failed" in found["plain"]:
        return found
    keep(found)
    sys.path[:0] = run.environment["PYTHONPATH"].split(os.pathsep)  # the node's wheels
    os.environ["PYTHONPATH"] = run.environment["PYTHONPATH"]
    from kvstore.testing.process import NodeFailed, NodeProcess

    dram = "6GiB" if options.device == "cuda" else "256MiB"
    flags = ["--hbm", options.hbm] if options.hbm else []
    try:
        node = NodeProcess.start(folder, dram=dram, flags=flags, timeout_s=60)
    except NodeFailed as error:
        return {**found, "store": {"failed": f"no node: {error}"}}
    with node:
        more = ("--socket", str(node.socket))
        for each in ENGINES[1:]:
            found[each] = run.engine(each, *more)
            keep(found)
        if options.graphs and run.left_s > 1 and not stop.reason:
            found["graphs"] = run.engine("graphs", *more, "--graphs")
        with contextlib.suppress(OSError):
            found["node_log"] = node.log.splitlines()[-TAIL_LINES:]
    return found


def place(out: Path | None, device: str, code: int, *, is_complete: bool) -> Path:
    """Of the record: a run on a GPU, a rehearsal, and one that measured nothing share no file."""
    if out is not None:
        return out
    marks = ("" if device == "cuda" else device, "nothing" if code == NOTHING else "")
    name = "_".join(filter(None, ("gpu_vllm", *marks, "" if is_complete else "partial")))
    return ROOT / "build" / f"{name}.json"


def write(out: Path | None, found: Found, *, is_complete: bool) -> Path:
    """The record so far; returns where. Raises OSError."""
    from bench import record  # which needs numpy

    verdict = judge(found)
    path = place(out, found["device"], verdict.code, is_complete=is_complete)
    answer = {"is_complete": is_complete, "code": verdict.code, "reasons": verdict.reasons}
    answer |= {"ratios": verdict.ratios, **found}
    record.write("gpu_vllm", answer, seed=SEED, path=new(path)).replace(path)
    return path


def table(found: Mapping[str, Any]) -> str:
    """A row for each round of each engine."""
    name = found.get("gpu", {}).get("name") or f"REHEARSAL: no GPU ({found['device']})"
    lines = [name, f"{'engine':14} {'TTFT s':>8} {'of computed':>12}  num_cached_tokens"]
    computed = seconds(found["plain"]["first"])
    for engine in (*ENGINES, "graphs"):
        for turn in ("first", "again"):
            rows = found.get(engine, {}).get(turn, ())
            if rows:
                label = engine if turn == "first" else f"{engine}, again"
                cached = " ".join(str(row["cached"]) for row in rows)
                took = seconds(rows)
                lines.append(f"{label:14} {took:8.3f} {took / computed:12.3f}  {cached}")
    return "\n".join(lines)


def say(verdict: Verdict, found: Mapping[str, Any]) -> None:
    if verdict.code != NOTHING:
        print(table(found))
    for reason in verdict.reasons:
        mark = "NOTHING WAS MEASURED: " if verdict.code == NOTHING else "WRONG: "
        print(f"{'' if LATE in reason else mark}{reason}")
    if verdict.code == WRONG:
        for name in ("store", "load"):
            print(*found.get(name, {}).get("kvstore_log", ()), sep="\n")
    for name, value in verdict.ratios.items():
        print(f"{name:28} {value:8.3f}")
    said = {OK: "all right", WRONG: "wrong", NOTHING: "NOTHING WAS MEASURED"}
    print(said.get(verdict.code, "NOT FINISHED: what there is is right"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=tuple(SECONDS), default="cuda")
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--out", type=Path, help="default: build/gpu_vllm.json")
    parser.add_argument("--seconds", type=float, default=0.0, help="for all of it")
    parser.add_argument("--hbm", default="", help="size of the node's tier on the GPU")
    parser.add_argument("--graphs", action="store_true", help="one more engine, with CUDA graphs")
    options = parser.parse_args(arguments)
    why = unwritable(place(options.out, options.device, OK, is_complete=True))
    if importlib.util.find_spec("numpy") is None:
        why = "this Python has no numpy: name another by GPU_PYTHON, or install it"
    if why:
        print(f"NOTHING WAS MEASURED: {why}", file=sys.stderr)
        return NOTHING
    stop = Stop()

    def keep(found: Found) -> None:
        with contextlib.suppress(OSError):  # tried again in the end
            write(options.out, found, is_complete=False)

    with (
        stop.listening(),
        tempfile.TemporaryDirectory(
            prefix="kvstore-gpu-vllm-", ignore_cleanup_errors=True
        ) as folder,
    ):
        try:
            found = measure(options, Path(folder), stop, keep)
        except PackError as error:
            found = {"device": options.device, "plain": {"failed": str(error)}}
        verdict = judge(found)
        is_complete = verdict.code in (OK, WRONG, NOTHING) and not stop.reason
        say(verdict, found)
        try:
            print(f"gpu-vllm: {write(options.out, found, is_complete=is_complete)}")
        except OSError as error:
            print(f"gpu-vllm: the record was not written: {error}", file=sys.stderr)
            return verdict.code or WRONG
        if is_complete and options.out is None:  # what this run wrote before its end
            partial = place(None, options.device, OK, is_complete=False)
            partial.unlink(missing_ok=True)
    return UNFINISHED if stop.reason and verdict.code == OK else verdict.code


if __name__ == "__main__":
    sys.exit(main())

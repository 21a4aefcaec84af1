"""The prepared run for a machine with an NVIDIA GPU: everything that only a device can show.

    python bench/gpu/run.py [--out FILE] [--log FILE] [--seed N] [--only PART …] [--rehearse]

    edges     what CUDA does where the simulated device assumes: pins, batches, costs of calls
    contract  the contract of copy engines, on real copies, bytes by cupy
    kernels   every kernel against a reference, fresh random data, poisoned outputs
    copies    rates of blocks of six models as a ratio of cupy's pinned copy; bytes at random
    node      a node with dram and hbm, the connector's worker side on torch caches, kill -9
    hbm       a slab between processes: IPC, fencing, the death of either, rates beside dram
    beside    matrix products, CUDA graphs and marks beside copies
    arena     two processes that register the node's memory, one killed
    memcheck  the kernels under compute-sanitizer

Each part is a process with a limit of its own, which can stop no other; what one leaves unused the
next ones have. Data is fresh with each run, and the seed is printed. Prints one table, and writes
bench/results/gpu.json unless nothing was measured. Wheels of `make gpu-pack` are used if they are
there. `--rehearse`: what runs over the simulated device, without a GPU; it is not recorded unless
`--out` says where.

Exit code 0: all parts ran and all goals were met; 1: a part failed, or a goal was missed; 3:
nothing was measured, for want of a GPU or a driver that works.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.gpu import pack
from bench.gpu.findings import NAMES, NOT_HERE
from bench.gpu.report import Outcome, table
from bench.gpu.smi import describe_gpu
from bench.record import ROOT

NOTHING_MEASURED = 3
BUDGET_S = 470
LIMITS_S = dict(zip(NAMES, (40, 60, 45, 90, 80, 40, 55, 30, 30), strict=True))
"""Seconds of each part, at most: together the budget."""
NO_DEVICE = {
    "beside": "needs torch.cuda",
    "memcheck": "needs kernels on a GPU",
}
"""Parts that cannot be rehearsed."""
TAIL_LINES = 12
KILL_S_MAX = 5.0


class Part(NamedTuple):
    """A process to run."""

    name: str
    command: Sequence[str]
    """Takes `--into FILE` for its findings, too."""
    limit_s: float


def parts(names: Sequence[str], seed: int, *, is_rehearsal: bool) -> list[Part]:
    """Those with these names, in the order of the run."""
    command = [sys.executable, "-m", "bench.gpu.part"]
    more = ["--seed", str(seed), *(["--rehearse"] * is_rehearsal)]
    return [Part(name, [*command, name, *more], LIMITS_S[name]) for name in NAMES if name in names]


def run_all(
    todo: Sequence[Part], folder: Path, log: Path, environment: Mapping[str, str]
) -> list[Outcome]:
    """Run them one after the other; each has what those before it left of their time."""
    begin = time.monotonic()
    given_s, outcomes = 0.0, []
    for part in todo:
        given_s += part.limit_s
        left_s = begin + given_s - time.monotonic()
        outcome = run_part(part, left_s, folder, environment)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"\n═══ {part.name}: {outcome.code} after {outcome.seconds:.1f} s\n")
            file.write((folder / f"{part.name}.log").read_text(errors="replace"))
        print(f"{part.name}: rc {outcome.code}, {outcome.seconds:.1f} s", flush=True)
        outcomes.append(outcome)
    return outcomes


def run_part(part: Part, limit_s: float, folder: Path, environment: Mapping[str, str]) -> Outcome:
    """One part, killed with all of its processes when its time is over."""
    into, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    begin, why = time.monotonic(), ""
    with log.open("w") as file:
        process = subprocess.Popen(
            [*part.command, "--into", str(into)],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=dict(environment),
            start_new_session=True,
        )
    code: int | None = None
    try:
        code = process.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        why = f"killed after {limit_s:.0f} s"
    finally:
        _kill(process)
    code = -signal.SIGKILL if code is None else code
    try:
        found = json.loads(into.read_text())
    except (OSError, ValueError):
        found = {}
    if code == NOT_HERE:
        why = f"not run: {found.get('not_here')}"
    lines = tuple(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    seconds = time.monotonic() - begin
    return Outcome(part.name, code, seconds, found, lines if code else (), why)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part. A process that a driver holds is left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(KILL_S_MAX)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        return


def environment(folder: Path, site: Path | None) -> dict[str, str]:
    """Of the parts. Kernels are compiled anew: nothing of an earlier run is trusted."""
    path = [*([str(site)] if site else []), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TMPDIR": str(folder),
    }


def not_rehearsed(outcome: Outcome) -> Outcome:
    """The same, if a part was not here to be rehearsed: it has not failed."""
    return outcome._replace(code=None, tail=()) if outcome.code == NOT_HERE else outcome


def finished(
    outcomes: Sequence[Outcome],
    *,
    gpu: Mapping[str, str],
    seed: int,
    out: Path | None,
    is_rehearsal: bool = False,
) -> int:
    """Print the table, write the JSON; the exit code."""
    rows = {each.name: each.record(is_rehearsal=is_rehearsal) for each in outcomes}
    print(f"\n{gpu.get('name') or 'REHEARSAL: no GPU'}, seed {seed}\n{table(rows)}\n", flush=True)
    if not any(each.has_measured for each in outcomes):
        shout("NOTHING WAS MEASURED: no part came to its end with a finding")
        return NOTHING_MEASURED
    failed = [name for name, row in rows.items() if row["rc"]]
    lacking = [name for name, row in rows.items() if row["missed"]]
    if out is not None:
        result = {"gpu": dict(gpu), "is_rehearsal": is_rehearsal, "parts": rows}
        print(f"gpu: {record.write('gpu', result, seed=seed, path=out)}")
    for what, names in (("failed", failed), ("missed goals", lacking)):
        if names:
            print(f"gpu: {what}: {', '.join(names)}")
    return 1 if failed or lacking else 0


def shout(text: str) -> None:
    """What must not look like success."""
    line = "!" * 100
    print(f"\n{line}\n{text}\n{line}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "gpu.log")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args(arguments)
    gpu = {} if given.rehearse else describe_gpu()
    if not gpu and not given.rehearse:
        shout("NOTHING WAS MEASURED: nvidia-smi names no NVIDIA GPU on this machine")
        return NOTHING_MEASURED
    given.log.parent.mkdir(parents=True, exist_ok=True)
    given.log.write_text("")
    names = [name for name in given.only if not (given.rehearse and name in NO_DEVICE)]
    with tempfile.TemporaryDirectory(prefix="kvstore-gpu-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        site = pack.unpack(folder / "site")
        todo = parts(names, given.seed, is_rehearsal=given.rehearse)
        outcomes = run_all(todo, folder, given.log, environment(folder, site))
    out = given.out
    if given.rehearse:
        left = [name for name in given.only if name in NO_DEVICE]
        outcomes = [not_rehearsed(each) for each in outcomes]
        outcomes += [
            Outcome(name, None, 0.0, {}, why=f"not rehearsed: {NO_DEVICE[name]}") for name in left
        ]
    elif out is None:
        out = record.RESULTS / "gpu.json"
    return finished(outcomes, gpu=gpu, seed=given.seed, out=out, is_rehearsal=given.rehearse)


if __name__ == "__main__":
    sys.exit(main())

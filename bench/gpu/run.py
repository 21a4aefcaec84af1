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
one JSON, after each part what there is so far (`is_complete` is false until the end): FILE, or
bench/results/gpu.json for a run of all parts to its end and build/gpu.json for any other. SIGTERM
and SIGINT end the part that runs, with its processes, and then the run in order. Wheels of `make
gpu-pack` are used if they are there. `--rehearse`: what runs over the simulated device, without a
GPU; it is not recorded unless `--out` says where.

Exit code 0: all parts ran and all goals were met; 1: a part failed, a goal was missed, or the run
was stopped; 3: nothing was measured, for want of a GPU or a driver that works.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench.gpu import pack
from bench.gpu.findings import NAMES, NOT_HERE, read_findings
from bench.gpu.pack import ROOT
from bench.gpu.report import Outcome, Record, append, table
from bench.gpu.smi import describe_gpu, why_none
from bench.gpu.stop import Stop, run_process

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
NOBODY = Stop()
"""Never stops."""


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
    todo: Sequence[Part],
    folder: Path,
    log: Path,
    environment: Mapping[str, str],
    *,
    stop: Stop = NOBODY,
    after: Callable[[Sequence[Outcome]], object] = len,
) -> list[Outcome]:
    """Run them one after the other; each has what those before it left of their time. `after`: each
    one, with all so far."""
    begin = time.monotonic()
    given_s, outcomes = 0.0, list[Outcome]()
    for part in todo:
        if stop.reason:
            outcomes.append(Outcome(part.name, None, 0.0, {}, why=f"not run: {stop.reason}"))
            continue
        given_s += part.limit_s
        left_s = begin + given_s - time.monotonic()
        outcome = run_part(part, left_s, folder, environment, stop)
        append(log, f"\n═══ {part.name}: {outcome.code} after {outcome.seconds:.1f} s\n")
        append(log, _said(folder, part.name))
        print(f"{part.name}: rc {outcome.code}, {outcome.seconds:.1f} s", flush=True)
        outcomes.append(outcome)
        after(outcomes)
    return outcomes


def run_part(
    part: Part, limit_s: float, folder: Path, environment: Mapping[str, str], stop: Stop = NOBODY
) -> Outcome:
    """One part, killed with all of its processes when its time is over, or the run's."""
    into = folder / f"{part.name}.json"
    begin = time.monotonic()
    code = run_process(
        [*part.command, "--into", str(into)],
        log=folder / f"{part.name}.log",
        environment=environment,
        limit_s=max(1.0, limit_s),
        stop=stop,
        folder=ROOT,
    )
    why = "" if code is not None else stop.because(f"killed after {limit_s:.0f} s")
    code = -signal.SIGKILL if code is None else code
    found = read_findings(into)
    if code == NOT_HERE:
        why = f"not run: {found.get('not_here')}"
    lines = tuple(_said(folder, part.name).splitlines()[-TAIL_LINES:])
    seconds = time.monotonic() - begin
    return Outcome(part.name, code, seconds, found, lines if code else (), why)


def _said(folder: Path, name: str) -> str:
    try:
        return (folder / f"{name}.log").read_text(errors="replace")
    except OSError as error:
        return f"what it said cannot be read: {error}\n"


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


def finished(outcomes: Sequence[Outcome], kept: Record, *, stopped: str = "") -> int:
    """Print the table, write the JSON; the exit code. `stopped`: why before its end."""
    rows = kept.rows(outcomes)
    name = kept.gpu.get("name") or "REHEARSAL: no GPU"
    print(f"\n{name}, seed {kept.seed}\n{table(rows, kept.headlines(outcomes))}\n", flush=True)
    has_measured = any(each.has_measured for each in outcomes)
    is_complete = has_measured and not stopped
    try:
        written = kept.write(outcomes, is_complete=is_complete)
    except OSError as error:
        shout(f"THE RECORD WAS NOT WRITTEN: {error}")
        written, stopped = None, stopped or "the record was not written"
    if written is not None:
        print(f"gpu: {written}")
    if not has_measured:
        shout("NOTHING WAS MEASURED: no part came to its end with a finding")
        return NOTHING_MEASURED
    failed = [name for name, row in rows.items() if row["rc"]]
    lacking = [name for name, row in rows.items() if row["missed"]]
    for what, names in (("failed", failed), ("missed goals", lacking)):
        if names:
            print(f"gpu: {what}: {', '.join(names)}")
    if stopped:
        shout(f"THE RUN IS NOT WHOLE: {stopped}")
    return 1 if failed or lacking or stopped else 0


def shout(text: str) -> None:
    """What must not look like success."""
    line = "!" * 100
    print(f"\n{line}\n{text}\n{line}", file=sys.stderr, flush=True)


def trouble(given: argparse.Namespace, gpu: Mapping[str, str], kept: Record) -> str:
    """Why nothing can be measured; empty: it can be tried."""
    if not gpu and not given.rehearse:
        return why_none()
    if importlib.util.find_spec("numpy") is None:
        return "this Python has no numpy: name another by GPU_PYTHON, or install it"
    try:
        given.log.parent.mkdir(parents=True, exist_ok=True)
        given.log.write_text("")
    except OSError as error:
        return f"{given.log} cannot be written ({error.strerror}): name another place by --log"
    return kept.trouble()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "gpu.log")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args(arguments)
    gpu = {} if given.rehearse else describe_gpu()
    is_whole = set(given.only) == set(NAMES)
    kept = Record(gpu, given.seed, given.out, is_rehearsal=given.rehearse, is_whole=is_whole)
    if why := trouble(given, gpu, kept):
        shout(f"NOTHING WAS MEASURED: {why}")
        return NOTHING_MEASURED
    names = [name for name in given.only if not (given.rehearse and name in NO_DEVICE)]
    stop = Stop()

    def keep(outcomes: Sequence[Outcome]) -> None:
        with contextlib.suppress(OSError):  # said in the end
            kept.write(outcomes, is_complete=False)

    with (
        stop.listening(),
        tempfile.TemporaryDirectory(prefix="kvstore-gpu-", ignore_cleanup_errors=True) as made,
    ):
        folder = Path(made)
        site = pack.unpack(folder / "site")
        if said := pack.forgotten(site):
            shout(said)
        todo = parts(names, given.seed, is_rehearsal=given.rehearse)
        around = environment(folder, site)
        outcomes = run_all(todo, folder, given.log, around, stop=stop, after=keep)
        if given.rehearse:
            outcomes = [not_rehearsed(each) for each in outcomes]
            outcomes += [
                Outcome(name, None, 0.0, {}, why=f"not rehearsed: {NO_DEVICE[name]}")
                for name in given.only
                if name in NO_DEVICE
            ]
        return finished(outcomes, kept, stopped=stop.reason)


if __name__ == "__main__":
    sys.exit(main())

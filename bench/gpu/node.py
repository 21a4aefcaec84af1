"""Part `node`: a real node with dram and hbm, and a rank of the connector on torch's caches.

    1  the rank attaches, and stores blocks that the engine's stream filled
    2  verified loads four times: the second lease within a minute has blocks copied to hbm; then
       loads that are not verified, which come from there
    3  the node process is killed (SIGKILL) in the middle of loads; its supervisor starts another
    4  the rank attaches again, and loads what is in dram still

Every block that was loaded is compared by torch. In a rehearsal the node's CUDA and the rank's are
simulated, and the caches are the host's.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import stubs
from bench.gpu.engine import Engine, Loaded
from bench.gpu.findings import Findings, NotHere, Options
from bench.record import ROOT
from kvstore.connector.devices import cache_pages, open_copies, value_type
from kvstore.connector.mapping import GroupLayers
from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.device import DeviceCopies
from kvstore.kernels.port import DeviceCache
from kvstore.ports import CopyEngine
from kvstore.testing.process import NodeProcess

BLOCKS, BLOCKS_REHEARSED = 192, 6
VERIFIED, UNVERIFIED = 4, 2
PROMOTED_S = 1.0
KILL_AFTER_S = 0.002
"""Of a load: that of all blocks takes about 10 ms on a GPU."""
LOADS_MAX, KILL_WITHIN_S = 20, 10.0
ATTACHED_S_MAX = 25.0
PROMOTED = "kvstore_hbm_blocks_promoted_total "
_PAUSE = threading.Event()
"""Never set."""


def run(findings: Findings, options: Options) -> None:
    try:
        import torch
    except ImportError as error:
        raise NotHere("torch") from error
    if not (options.is_rehearsal or torch.cuda.is_available()):
        raise NotHere("a torch that can use the GPU")
    stubs.install()
    count = BLOCKS_REHEARSED if options.is_rehearsal else BLOCKS
    flags = ["--hbm", "64MiB" if options.is_rehearsal else "1GiB"]
    if options.is_rehearsal:
        simulated = str(ROOT / "tests" / "kit" / "simulated_cuda")
        os.environ["PYTHONPATH"] = os.pathsep.join([simulated, os.environ["PYTHONPATH"]])
    dram = "256MiB" if options.is_rehearsal else "4GiB"
    with (
        tempfile.TemporaryDirectory() as folder,
        NodeProcess.start(Path(folder), dram=dram, flags=flags, timeout_s=40) as node,
    ):
        findings.say(ready=node.ready_line.strip()[-200:])
        try:
            _all_steps(findings, node, count, options)
        finally:
            findings.say(log_tail=node.log.splitlines()[-6:])


def _all_steps(findings: Findings, node: NodeProcess, count: int, options: Options) -> None:
    begin = time.perf_counter()
    device, opens = ("cpu", simulated) if options.is_rehearsal else ("cuda", open_copies)
    engine = Engine(node.socket, device, 2 * count + 8, opens=opens)
    findings.say(attach_s=round(time.perf_counter() - begin, 2))
    sources, targets = list(range(count)), list(range(count, 2 * count))
    keys = [engine.fill(block, options.seed + block) for block in sources]
    stored = engine.store(sources, keys)
    size = count * engine.block_bytes / 1e9
    findings.say(store=stored | {"gb_per_s": round(size / stored["seconds"], 2)})
    checks = {"all_blocks_are_stored": stored["sealed"] == count}
    rounds: list[tuple[str, Loaded]] = []
    for number in range(VERIFIED + UNVERIFIED):
        engine.spoil(targets, float(number))
        got = engine.load(targets, keys, is_verified=number < VERIFIED)
        rounds.append(("verified" if number < VERIFIED else "unverified", got))
        findings.say(loads=[_row(kind, each, engine.block_bytes) for kind, each in rounds])
        _PAUSE.wait(PROMOTED_S)
    checks["all_blocks_are_loaded"] = all((got.leased, got.bad) == (count, 0) for _, got in rounds)
    metrics = hbm_metrics(node)
    findings.say(metrics=metrics)
    checks["blocks_were_promoted_to_hbm"] = promoted(metrics) > 0
    beside, was_loading = loads_beside_a_kill(engine, node.crash, targets, keys)
    findings.say(beside_the_kill=[each._asdict() for each in beside])
    checks["a_load_was_under_way_at_the_kill"] = was_loading
    begin = time.perf_counter()
    _attach_again(engine)
    findings.say(attach_again_s=round(time.perf_counter() - begin, 2))
    engine.spoil(targets, 0.0)
    after = engine.load(targets, keys)
    findings.say(after_the_kill=_row("verified", after, engine.block_bytes))
    checks["all_blocks_are_loaded_after_the_kill"] = (after.leased, after.bad) == (count, 0)
    wrong = sum(got.wrong for got in [*(got for _, got in rounds), *beside, after])
    engine.side.shutdown()
    failed = [check for check, held in checks.items() if not held]
    findings.say(failed=failed, checks=checks, wrong=wrong)


def _row(kind: str, got: Loaded, block_bytes: int) -> dict[str, Any]:
    speed = got.leased * block_bytes / 1e9 / got.seconds if got.seconds else 0.0
    return {"kind": kind, "gb_per_s": round(speed, 2), **got._asdict()}


def loads_beside_a_kill(
    engine: Engine, crash: Callable[[], object], targets: Sequence[int], keys: Sequence[bytes]
) -> tuple[list[Loaded], bool]:
    """Loads until the scheduler knows that the node is gone, and whether one was under way when it
    was killed. Raises TimeoutError: a load did not end."""
    was_loading: list[bool] = []

    def kill() -> None:
        end = time.monotonic() + KILL_WITHIN_S
        while engine.loading.wait(max(0.0, end - time.monotonic())):
            _PAUSE.wait(KILL_AFTER_S)
            if engine.loading.is_set():
                break
        was_loading.append(engine.loading.is_set())
        crash()

    killer = threading.Thread(target=kill)
    found: list[Loaded] = []
    engine.spoil(targets, 8.0)
    killer.start()
    try:
        found.append(engine.load(targets, keys))
        while (len(found) < LOADS_MAX or not was_loading) and not engine.scheduler.gone:
            engine.spoil(targets, 9.0)  # where nothing arrives, nothing right is found
            found.append(engine.load(targets, keys))
    except TimeoutError:  # it hangs, which is an OSError too
        raise
    except (RuntimeError, OSError):  # no lease any more
        pass
    finally:
        killer.join()
    return found, was_loading[0]


def _attach_again(engine: Engine) -> None:
    """With the next process of the node."""
    end = time.monotonic() + ATTACHED_S_MAX
    while True:
        try:
            engine.scheduler.connect()
            engine.scheduler.until(lambda: engine.scheduler.session != 0, "a session", 10.0)
        except (RuntimeError, TimeoutError, OSError):
            if time.monotonic() > end:
                raise
            _PAUSE.wait(0.2)
        else:
            return


def promoted(metrics: Sequence[str]) -> float:
    """Blocks that the node says it copied to hbm."""
    return sum(float(line.split()[1]) for line in metrics if line.startswith(PROMOTED))


def hbm_metrics(node: NodeProcess) -> list[str]:
    """What the node says of its slab, if anything."""
    try:
        with urllib.request.urlopen(node.metrics_url, timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError as error:
        return [f"no metrics: {error}"]
    return [line for line in lines if "hbm" in line and not line.startswith("#")][:12]


def simulated(groups: Sequence[GroupLayers], block_count: int) -> CopyEngine:
    """Copies by a simulated CUDA, whose memory the host's is."""
    from tests.kit.fake_cuda import FakeCuda, FakeKernels
    from tests.kit.simulated_device import SEED, SimulatedDevice

    device = SimulatedDevice(SEED)
    runtime = FakeCuda(device)
    cuda = CudaDevice(
        0,
        engine_stream=lambda: runtime.engine_stream,
        runtime=runtime,
        driver=runtime,
        kernels=FakeKernels(device),
    )
    caches = []
    for group in groups:
        pages = cache_pages(group.caches, block_count=block_count)
        caches.append(DeviceCache(pages, block_count, values=value_type(group.caches)))
    return DeviceCopies(cuda, caches)

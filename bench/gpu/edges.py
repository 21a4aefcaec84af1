"""Part `edges`: what CUDA does where the product, and the simulated device, only assume.

    across   a copy whose host side lies in two registrations, by copy engines and by a kernel
    batch    which entries happen of a batch that has one such copy
    calls    microseconds of marks, waits, looks, and of a batch by its number of entries
    pins     registering chunks of a node's own memory: milliseconds, the longest launch of another
             thread meanwhile, and what the GPU's own page tables take of its memory
    torch    whether PyTorch sees an error of ours

Beside versions and attributes. Nothing here is a goal: the answers are held against what the code
says in words.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.gpu.findings import Findings, Options
from bench.gpu.machine import Gpu, cuda, one, open_gpu, pages
from kvstore.arena import Arena
from kvstore.kernels.pinning import CHUNK_BYTES
from kvstore.kernels.port import DeviceError
from kvstore.types import Incarnation
from kvstore.units import KIB, MIB

PIN_BYTES = 2 * MIB
SIZE = 8 * KIB
ARENA_BYTES = 1024 * MIB
CHUNKS = (CHUNK_BYTES, 8 * CHUNK_BYTES)
ENTRIES = (1, 16, 128, 1024)
CALLS = 2000
_ATTRIBUTES = (
    *("CanUseHostPointerForRegisteredMem", "HostRegisterSupported", "UnifiedAddressing"),
    *("ComputeCapabilityMajor", "ComputeCapabilityMinor", "AsyncEngineCount"),
    *("MultiProcessorCount", "ConcurrentKernels", "PageableMemoryAccess"),
)
_PACKAGES = ("cuda-bindings", "nvidia-cuda-nvrtc", "torch", "triton", "cupy-cuda13x", "numpy")


def run(findings: Findings, options: Options) -> None:
    gpu = open_gpu(options)
    findings.say(kernel_trouble=gpu.device.kernel_trouble())
    if not options.is_rehearsal:
        findings.say(attributes=attributes(), versions=versions())
    findings.say(calls=calls(gpu, 20 if options.is_rehearsal else CALLS))
    findings.say(across_two_pins=across_two_pins(gpu), batch_with_one_across=partial_batch(gpu))
    if options.is_rehearsal:
        findings.say(not_rehearsed="attributes, versions, pins, torch")
        return
    for chunk in CHUNKS:
        findings.say(**{f"pins_of_{chunk // MIB}_mib": registrations(gpu, chunk)})
    findings.say(torch_after_our_error=torch_after_an_error(gpu))


# ── two registrations ────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def two_pins(gpu: Gpu) -> Iterator[np.ndarray[Any, Any]]:
    """The host's memory, in two registrations that follow one another."""
    host = pages(2 * PIN_BYTES)
    begins = [host.ctypes.data, host.ctypes.data + PIN_BYTES]
    for begin in begins:
        gpu.device.pin(begin, PIN_BYTES)
    try:
        yield host
    finally:
        for begin in begins:
            gpu.device.unpin(begin)


def across_two_pins(gpu: Gpu) -> dict[str, str]:
    """How each ends, and whether the bytes are right."""
    found = {}
    with two_pins(gpu) as host, gpu.memory(SIZE) as there:
        place = host[PIN_BYTES - SIZE // 2 :][:SIZE]
        for verb, ends in (
            ("load", (there, place.ctypes.data)),
            ("store", (place.ctypes.data, there)),
        ):
            for way in ("copy", "move"):
                place[:] = 1 + (verb == "load")
                gpu.witness.write(there, np.full(SIZE, 2 - (verb == "load"), np.uint8))
                reason = _tried(gpu, way, *map(one, (*ends, SIZE)))
                got = gpu.witness.read(there, SIZE) if verb == "load" else place
                found[f"{verb} by {way}"] = reason or ("right" if (got == 2).all() else "wrong")
    return found


def _tried(gpu: Gpu, way: str, *arguments: Any) -> str:
    """Why it was refused; empty: it was not. The simulated device's kernels stay on the device."""
    stream, event = gpu.device.stream(is_urgent=False), gpu.device.event()
    try:
        getattr(gpu.device, way)(stream, *arguments)
        gpu.finish(stream, event)
    except (DeviceError, AssertionError) as error:
        return f"{error}"
    return ""


def partial_batch(gpu: Gpu) -> dict[str, Any]:
    """Four entries, of which the third lies in both."""
    begins = [0, 64 * KIB, PIN_BYTES - SIZE // 2, PIN_BYTES + 64 * KIB]
    with two_pins(gpu) as host, gpu.memory(SIZE) as there:
        host[:] = 1
        gpu.witness.write(there, np.full(SIZE, 2, np.uint8))
        targets = np.array([host.ctypes.data + begin for begin in begins], np.uint64)
        sources, sizes = np.full(4, there, np.uint64), np.full(4, SIZE, np.uint64)
        reason = _tried(gpu, "copy", targets, sources, sizes)
        gpu.witness.wait()
        happened = [bool((host[begin : begin + SIZE] == 2).all()) for begin in begins]
    return {"reason": reason, "entries_that_happened": happened}


# ── the machine ──────────────────────────────────────────────────────────────────────────────────


def attributes() -> dict[str, int]:
    from cuda.bindings import runtime

    found = {}
    for name in _ATTRIBUTES:
        attribute = getattr(runtime.cudaDeviceAttr, f"cudaDevAttr{name}")
        (value,) = cuda("cudaDeviceGetAttribute", attribute, 0)
        found[name] = int(value)
    return found


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {
        "runtime": cuda("cudaRuntimeGetVersion")[0],
        "driver": cuda("cudaDriverGetVersion")[0],
    }
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# ── costs ────────────────────────────────────────────────────────────────────────────────────────


def calls(gpu: Gpu, count: int) -> dict[str, float]:
    """Microseconds of the host's for each call."""
    device = gpu.device
    stream, event = device.stream(is_urgent=True), device.event()
    found = {
        "mark": _each_us(count, lambda: device.record(event, None)),
        "wait": _each_us(count, lambda: device.wait(stream, event)),
        "look": _each_us(count, lambda: device.has_happened(event)),
    }
    host = pages(max(ENTRIES) * 4 * KIB)
    device.pin(host.ctypes.data, host.size)
    with gpu.memory(host.size) as there:
        for entries in ENTRIES:
            steps = np.arange(entries, dtype=np.uint64) * np.uint64(4 * KIB)
            ends = (np.uint64(host.ctypes.data) + steps, np.uint64(there) + steps)
            sizes = np.full(entries, 4 * KIB, np.uint64)
            found[f"batch of {entries}"] = _each_us(
                max(2, count // 100),
                lambda: device.copy(stream, *ends, sizes),  # noqa: B023
            )
            gpu.finish(stream, event)
    device.unpin(host.ctypes.data)
    return found


def _each_us(count: int, call: Callable[[], object]) -> float:
    call()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return round((time.perf_counter() - begin) / count * 1e6, 2)


def registrations(gpu: Gpu, chunk: int) -> dict[str, float]:
    """Of an arena as a node makes it, with all its pages, and launches beside them."""
    import cupy

    arena = Arena(arena_bytes=ARENA_BYTES, incarnation=Incarnation(1))
    begin = time.perf_counter()
    arena.populate(0, ARENA_BYTES)
    populated_s = time.perf_counter() - begin
    address, small = int(arena.array.ctypes.data), cupy.ones(1024)

    def launch() -> None:
        nonlocal small
        small += 1

    launch()
    quiet = beside(launch, lambda: threading.Event().wait(0.3))
    took: list[float] = []

    def pin() -> None:
        for at in range(0, ARENA_BYTES, chunk):
            begin = time.perf_counter()
            gpu.device.pin(address + at, chunk)
            took.append(time.perf_counter() - begin)

    free, _ = cupy.cuda.runtime.memGetInfo()
    loud = beside(launch, pin)
    left, _ = cupy.cuda.runtime.memGetInfo()
    for at in range(0, ARENA_BYTES, chunk):
        gpu.device.unpin(address + at)
    arena.close()
    return {
        "populate_s_per_gib": round(populated_s * 1024 * MIB / ARENA_BYTES, 3),
        "pin_ms": round(float(np.median(took)) * 1e3, 2),
        "pin_ms_max": round(max(took) * 1e3, 2),
        "gpu_mib_per_gib": round((free - left) / MIB * 1024 * MIB / ARENA_BYTES, 2),
        "launch_us_max_quiet": round(quiet * 1e6),
        "launch_us_max_beside": round(loud * 1e6),
    }


def beside(launch: Callable[[], None], work: Callable[[], object]) -> float:
    """Seconds of the longest launch of another thread while this one works."""
    stop, gaps = threading.Event(), [0.0]

    def run() -> None:
        while not stop.wait(0.0002):
            begin = time.perf_counter()
            launch()
            gaps.append(time.perf_counter() - begin)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        work()
    finally:
        stop.set()
        thread.join()
    return max(gaps)


def torch_after_an_error(gpu: Gpu) -> str:
    """How its next launch ends."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    small = torch.ones(1024, device="cuda")
    with contextlib.suppress(DeviceError):
        gpu.device.pin(8, 4096)
    try:
        small.add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "right" if bool((small == 2).all()) else "wrong"

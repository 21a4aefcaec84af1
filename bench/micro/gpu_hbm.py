"""Open questions about hbm: a node's slab, mapped by an engine, and the end of either.

    python bench/micro/gpu_hbm.py [--rounds 2000] [--out FILE]

A node process that is not dumpable allocates a slab and shares it by CUDA IPC; an engine process
opens it and copies from it, as `kernels.device` does. Steps, each checked:

    1  the engine reads what the node wrote
    2  the node takes its place back, writes other bytes and shows it again, without end; the engine
       reads the word of the place before its copy and after it: bytes under one word are its own
    3  the node is killed (SIGKILL): the engine reads the old bytes or an error, nobody opens the
       handle any more, and used device memory is at the baseline once the engine has ended
    4  an engine is killed while it copies: the node goes on, and its memory comes back

Without an NVIDIA GPU both processes have the simulated device, where memory in use is not asked
for. Prints one JSON object. Exit code 0: every check held; 1: one did not ("failed"); 2: a process
failed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench.micro.gpu_arena import Child, back_at, gpu_name, memory_in_use
from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.device import Device, DeviceError
from kvstore.types import PAGE_BYTES

SLAB_BYTES = 8 << 20
"""Large enough that a copy takes longer than looking at a word."""
READS_FOR_KILL = 50
_PR_SET_DUMPABLE = 4


def open_device(*, is_simulated: bool) -> Device:
    if not is_simulated:
        return CudaDevice(0, engine_stream=lambda: 0)
    from tests.kit.simulated_device import SimulatedDevice

    return SimulatedDevice(os.getpid(), PAGE_BYTES)


class Side:
    """One process: a device, a stream, pinned memory for a slab, and the word of its place."""

    def __init__(self, word_fd: int, *, is_simulated: bool) -> None:
        self.device = open_device(is_simulated=is_simulated)
        self.word = np.frombuffer(mmap.mmap(word_fd, PAGE_BYTES), np.uint64)[:1]
        self.host = np.zeros(SLAB_BYTES, np.uint8)
        self.device.pin(self.host.ctypes.data, SLAB_BYTES)
        self.stream, self.event = self.device.stream(is_urgent=True), self.device.event()
        self.slab = 0

    def copy(self, target: int, source: int) -> None:
        ends = (np.array([end], np.uint64) for end in (target, source, SLAB_BYTES))
        self.device.copy(self.stream, *ends)
        self.device.record(self.event, self.stream)
        while not self.device.has_happened(self.event):
            pass


class Node(Side):
    """It owns the slab."""

    def share(self) -> dict[str, Any]:
        self.slab = self.device.allocate(SLAB_BYTES)
        assert self.slab, "the device has no memory left"
        self._write(1)
        return {"handle": self.device.share(self.slab).hex()}

    def churn(self, rounds: int) -> dict[str, Any]:
        first = int(self.word[0]) + 1
        for number in range(first, first + rounds):
            self._write(number)
        return {"written": rounds}

    def check(self) -> dict[str, Any]:
        """Whether the slab still holds what was written last."""
        self.copy(self.host.ctypes.data, self.slab)
        return {"is_right": bool((self.host == int(self.word[0]) % 251).all())}

    def _write(self, number: int) -> None:
        self.word[0] = 0
        self.host[:] = number % 251
        self.copy(self.slab, self.host.ctypes.data)
        self.word[0] = number


class Engine(Side):
    """It maps the slab, and reads through memory of its own as a load does."""

    def map(self, handle: str) -> dict[str, Any]:
        try:
            self.slab = self.device.open(bytes.fromhex(handle))
        except DeviceError as error:
            return {"error": str(error)}
        self.pages = self.device.allocate(SLAB_BYTES)
        return {"error": ""}

    def read(self, rounds: int) -> dict[str, Any]:
        """Bytes under one word, compared; `void`: the word changed meanwhile."""
        void = wrong = good = 0
        for _ in range(rounds):
            before = int(self.word[0])
            self._load()
            if not before or int(self.word[0]) != before:
                void += 1
            elif (self.host == before % 251).all():
                good += 1
            else:
                wrong += 1
        return {"good": good, "void": void, "wrong": wrong}

    def after(self, number: int) -> dict[str, Any]:
        """What a slab gives whose node was killed with this word."""
        try:
            self._load()
        except DeviceError as error:
            return {"found": "error", "error": str(error)}
        is_old = bool((self.host == number % 251).all())
        return {"found": "the old bytes" if is_old else "other bytes"}

    def _load(self) -> None:
        self.copy(self.pages, self.slab)
        self.copy(self.host.ctypes.data, self.pages)


def work(options: argparse.Namespace) -> None:
    """Obey the parent's lines: a verb and what it takes."""
    role, word_fd = options.role, options.word
    if role == "node":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    side = (Node if role == "node" else Engine)(word_fd, is_simulated=options.simulated)
    print(json.dumps({"ready": role}), flush=True)
    for line in sys.stdin:
        verb, *given = line.split()
        arguments = [each if verb == "map" else int(each) for each in given]
        print(json.dumps(getattr(side, verb)(*arguments)), flush=True)


Start = Callable[[str], Child]


def asked(start: Start, word: Any, rounds: int) -> tuple[dict[str, Any], dict[str, bool]]:
    """Steps 1 to 4 but for the memory in use."""
    node, engine = start("node"), start("engine")
    handle = node.ask("share")["handle"]
    mapped = engine.ask(f"map {handle}")
    if mapped["error"]:
        return {"mapping": mapped}, {"an_engine_maps_the_slab": False}
    checks = {"an_engine_maps_the_slab": engine.ask("read 1") == _ALL_GOOD}
    node.send(f"churn {rounds}")
    fenced = engine.ask(f"read {rounds}")
    node.answer()
    quiet = engine.ask("read 1")
    checks["generations_fence_stale_bytes"] = fenced["wrong"] == 0 and quiet == _ALL_GOOD
    last = int(word[0])
    node.end()
    after = engine.ask(f"after {last}")
    checks["a_killed_node_leaves_old_bytes_or_an_error"] = after["found"] != "other bytes"
    late = start("engine").ask(f"map {handle}")
    checks["its_handle_has_ended"] = bool(late["error"])
    engine.end()

    node, engine = start("node"), start("engine")
    engine.ask(f"map {node.ask('share')['handle']}")
    engine.send(f"read {1 << 30}")
    node.ask(f"churn {READS_FOR_KILL}")
    engine.end()
    node.ask(f"churn {READS_FOR_KILL}")
    checks["a_node_goes_on_without_its_engine"] = node.ask("check")["is_right"]
    return {"fenced": fenced, "after_the_node": after}, checks


_ALL_GOOD = {"good": 1, "void": 0, "wrong": 0}


def run(rounds: int, *, is_simulated: bool) -> dict[str, Any]:
    """The answers, with the checks that failed."""
    baseline = {} if is_simulated else memory_in_use()
    word_fd = os.memfd_create("word", os.MFD_CLOEXEC)
    os.ftruncate(word_fd, PAGE_BYTES)
    word = np.frombuffer(mmap.mmap(word_fd, PAGE_BYTES), np.uint64)
    children: list[Child] = []

    def start(role: str) -> Child:
        command = [sys.executable, __file__, "--role", role, "--word", str(word_fd)]
        children.append(Child([*command, *(["--simulated"] * is_simulated)], [word_fd]))
        return children[-1]

    try:
        result, checks = asked(start, word, rounds)
    finally:
        for child in children:
            child.end()
        os.close(word_fd)
    if baseline:
        checks["device_memory_at_baseline"] = back_at(baseline, "device")
    failed = [check for check, held in checks.items() if not held]
    return {"failed": failed, "checks": checks} | result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", choices=("node", "engine"), help=argparse.SUPPRESS)
    parser.add_argument("--word", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--simulated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        work(options)
        return 0
    name = gpu_name()
    if not name and os.geteuid() != 0:
        print("hbm: skipped, because there is no NVIDIA GPU on this machine, and only root shares")
        print("     memory of the simulated device")
        return 0
    try:
        result = {"device": name or "simulated"} | run(options.rounds, is_simulated=not name)
    except (RuntimeError, DeviceError, OSError, subprocess.SubprocessError) as error:
        print(f"hbm: {error}", file=sys.stderr)
        return 2
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    if not name:
        print("hbm: on the simulated device, because there is no NVIDIA GPU on this machine")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

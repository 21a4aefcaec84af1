"""Part `hbm`: a node's slab on the GPU, mapped by an engine, and the end of either.

A node process that is not dumpable allocates a slab and shares it by CUDA IPC; an engine process
opens it and copies from it. Each step is checked:

    1  the engine reads what the node wrote
    2  the node takes its place back, writes other bytes and shows them for a while, again and
       again; the engine reads the word of the place before its copy and after it: bytes under one
       word are its own, and reads of both kinds happen, within a word and across a change
    3  verified loads come through the copy engine from the slab and from slots in dram: rates
    4  the node is killed (SIGKILL): the engine reads the old bytes or an error, nobody opens the
       handle any more, and used device memory is at the baseline once the engine has ended
    5  an engine is killed while it copies: the node goes on, and its memory comes back

In a rehearsal both processes have the simulated device, whose memory only root shares.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.gpu.child import Child, serve
from bench.gpu.findings import Findings, NotHere, Options
from bench.gpu.machine import one, open_gpu, pages
from bench.gpu.rank import HEADER, Rank, Shape
from bench.gpu.smi import device_memory_checks, memory_in_use
from kvstore.kernels.port import DeviceError
from kvstore.ports import CopyWay
from kvstore.types import PAGE_BYTES
from kvstore.units import KIB, MIB
from kvstore.wire.record import checksum_of
from kvstore.wire.space import Slab

SLAB_BYTES, SLAB_BYTES_REHEARSED = 8 * MIB, MIB
"""Large enough that a copy takes longer than looking at a word."""
SHOWN_S = (0.001, 0.003)
"""How long bytes are shown, between these: some reads fit into it, and some do not."""
CHURN_S_MAX = 20.0
SHAPE, BLOCKS = Shape(32, 64 * KIB), 64
"""Llama-3-8B: blocks of 2 MiB."""
SHAPE_REHEARSED, BLOCKS_REHEARSED = Shape(4, 4 * KIB), 4
ROUNDS, ROUNDS_REHEARSED = 300, 100
READS_FOR_KILL = 50
SECONDS = 0.5
_PR_SET_DUMPABLE = 4
_PAUSE = threading.Event()
"""Never set."""
_ALL_GOOD = {"good": 1, "void": 0, "wrong": 0}


# ── both processes ───────────────────────────────────────────────────────────────────────────────


class Side:
    """One process: a device, a stream, pinned memory for a slab, and the word of its place."""

    def __init__(self, word_fd: int, options: Options) -> None:
        self.options = options
        self.gpu = open_gpu(options)
        self.device = self.gpu.device
        self.word, self.churning = np.frombuffer(mmap.mmap(word_fd, PAGE_BYTES), np.uint64)[
            :2
        ].reshape(2, 1)
        self.size = SLAB_BYTES_REHEARSED if options.is_rehearsal else SLAB_BYTES
        self.host = pages(self.size)
        self.device.pin(self.host.ctypes.data, self.size)
        self.stream, self.event = self.device.stream(is_urgent=True), self.device.event()
        self.slab = 0

    @property
    def shape(self) -> tuple[Shape, int]:
        """A block, and how many there are in the slab of `share_blocks`."""
        is_small = self.options.is_rehearsal
        return (SHAPE_REHEARSED, BLOCKS_REHEARSED) if is_small else (SHAPE, BLOCKS)

    def greeting(self) -> dict[str, Any]:
        return {"ready": type(self).__name__}

    def copy(self, target: int, source: int, size: int = 0) -> None:
        """`size`: 0: of the slab."""
        self.device.copy(self.stream, *map(one, (target, source, size or self.size)))
        self.gpu.finish(self.stream, self.event)


class Node(Side):
    """It owns the slab."""

    def share(self) -> dict[str, Any]:
        self.slab = self.device.allocate(self.size)
        assert self.slab, "the device has no memory left"
        self._write(1)
        return {"handle": self.device.share(self.slab).hex()}

    def share_blocks(self) -> dict[str, Any]:
        """Another slab, of blocks that both sides can make: bytes go as the product's do."""
        shape, blocks = self.shape
        slab = self.device.allocate(blocks * shape.block_bytes)
        for block in range(blocks):
            for at in range(0, shape.block_bytes, self.size):
                part = contents(block, shape)[at : at + self.size]
                self.host[: part.size] = part
                place = slab + block * shape.block_bytes + at
                self.copy(place, self.host.ctypes.data, part.size)
        return {"handle": self.device.share(slab).hex()}

    def churn(self, rounds: int) -> dict[str, Any]:
        first, draw = int(self.word[0]) + 1, np.random.default_rng(self.options.seed)
        self.churning[0] = 1
        for number in range(first, first + rounds):
            self._write(number)
            _PAUSE.wait(draw.uniform(*SHOWN_S))
        self.churning[0] = 0
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
        self.pages = self.device.allocate(self.size)
        return {"error": ""}

    def read(self, rounds: int) -> dict[str, Any]:
        """Bytes under one word, compared; `void`: the word changed meanwhile."""
        found = dict.fromkeys(_ALL_GOOD, 0)
        for _ in range(rounds):
            found[self._read()] += 1
        return found

    def read_beside(self) -> dict[str, Any]:
        """The same while the node writes; reads that ended after its last one do not count."""
        found, end = dict.fromkeys(_ALL_GOOD, 0), time.monotonic() + CHURN_S_MAX
        while not self.churning[0] and time.monotonic() < end:
            _PAUSE.wait(SHOWN_S[0])
        while time.monotonic() < end:
            kind = self._read()
            if not self.churning[0]:
                break
            found[kind] += 1
        return found

    def _read(self) -> str:
        before = int(self.word[0])
        self._load()
        if not before or int(self.word[0]) != before:
            return "void"
        return "good" if (self.host == before % 251).all() else "wrong"

    def after(self, number: int) -> dict[str, Any]:
        """What a slab gives whose node was killed with this word."""
        try:
            self._load()
        except DeviceError as error:
            return {"found": "error", "error": str(error)}
        is_old = bool((self.host == number % 251).all())
        return {"found": "the old bytes" if is_old else "other bytes"}

    def rates(self, handle: str) -> dict[str, Any]:
        """GB/s of verified loads by the copy engine, from dram and from the slab."""
        shape, blocks = self.shape
        seconds = 0.01 if self.options.is_rehearsal else SECONDS
        rank = Rank(self.gpu, shape, blocks, seed=self.options.seed)
        slab = Slab(rank.copies.gpu, blocks * shape.block_bytes, bytes.fromhex(handle))
        found: dict[str, Any] = {"dram_gb_per_s": round(rank.rate((CopyWay.LOAD,), seconds), 3)}
        reason = rank.copies.map_slab(slab)
        if reason:
            return {"error": reason}
        wrong = 0
        for block in range(blocks):
            end = rank.do(CopyWay.LOAD, block, block, slab_begin=block * shape.block_bytes)
            data = contents(block, shape)
            is_right = not end.reason and np.array_equal(rank.read(block), data)
            wrong += not (is_right and end.checksum == checksum_of(HEADER, [data.data]))
        found["hbm_gb_per_s"] = round(rank.rate((CopyWay.LOAD,), seconds, from_slab=True), 3)
        rank.close()
        ratio = round(found["hbm_gb_per_s"] / found["dram_gb_per_s"], 3)
        return {"error": "", "hbm_of_dram": ratio, "wrong_blocks": wrong, **found}

    def _load(self) -> None:
        self.copy(self.pages, self.slab)
        self.copy(self.host.ctypes.data, self.pages)


def contents(block: int, shape: Shape) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Of a block of the slab: noise that both processes make."""
    return np.random.default_rng(block).integers(0, 256, shape.block_bytes, np.uint8)


# ── the part ─────────────────────────────────────────────────────────────────────────────────────

Start = Callable[[str], Child]


def asked(start: Start, word: Any, rounds: int, findings: Findings) -> dict[str, bool]:
    """The checks of all steps but for the memory in use."""
    node, engine = start("node"), start("engine")
    handle = node.ask("share")["handle"]
    mapped = engine.ask(f"map {handle}")
    if mapped["error"]:
        findings.say(mapping=mapped)
        return {"an_engine_maps_the_slab": False}
    checks = {"an_engine_maps_the_slab": engine.ask("read 1") == _ALL_GOOD}
    node.send(f"churn {rounds}")
    fenced = engine.ask("read_beside")
    node.answer()
    quiet = engine.ask("read 1")
    findings.say(fenced=fenced)
    checks["generations_fence_stale_bytes"] = fenced["wrong"] == 0 and quiet == _ALL_GOOD
    checks["reads_fell_within_words_and_across"] = bool(fenced["good"] and fenced["void"])
    loads = engine.ask(f"rates {node.ask('share_blocks')['handle']}")
    findings.say(loads=loads)
    checks["verified_loads_are_right"] = loads.get("wrong_blocks") == 0
    last = int(word[0])
    node.end()
    after = engine.ask(f"after {last}")
    findings.say(after_the_node=after)
    checks["a_killed_node_leaves_old_bytes_or_an_error"] = after["found"] != "other bytes"
    late = start("engine").ask(f"map {handle}")
    findings.say(handle_of_the_dead=late)
    checks["its_handle_has_ended"] = bool(late["error"])
    engine.end()

    node, engine = start("node"), start("engine")
    engine.ask(f"map {node.ask('share')['handle']}")
    engine.send(f"read {1 << 30}")
    node.ask(f"churn {READS_FOR_KILL}")
    engine.end()
    node.ask(f"churn {READS_FOR_KILL}")
    checks["a_node_goes_on_without_its_engine"] = node.ask("check")["is_right"]
    return checks


def run(findings: Findings, options: Options) -> None:
    if options.is_rehearsal and os.geteuid() != 0:
        raise NotHere("root: only it shares memory of the simulated device")
    baseline = {} if options.is_rehearsal else memory_in_use()
    word_fd = os.memfd_create("word", os.MFD_CLOEXEC)
    os.ftruncate(word_fd, PAGE_BYTES)
    word = np.frombuffer(mmap.mmap(word_fd, PAGE_BYTES), np.uint64)
    children: list[Child] = []

    def start(role: str) -> Child:
        arguments = ["--role", role, "--word", str(word_fd), "--seed", str(options.seed)]
        arguments += ["--rehearse"] * options.is_rehearsal
        children.append(Child("bench.gpu.hbm", arguments, [word_fd]))
        return children[-1]

    rounds = ROUNDS_REHEARSED if options.is_rehearsal else ROUNDS
    try:
        checks = asked(start, word, rounds, findings)
    finally:
        for child in children:
            child.end()
        os.close(word_fd)
    checks |= device_memory_checks(baseline, findings)
    failed = [check for check, held in checks.items() if not held]
    findings.say(failed=failed, checks=checks)


def main() -> None:
    parser = argparse.ArgumentParser(description="A process of the part `hbm`.")
    parser.add_argument("--role", choices=("node", "engine"), required=True)
    parser.add_argument("--word", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    if given.role == "node":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    options = Options(given.seed, is_rehearsal=given.rehearse)
    serve(functools.partial(Node if given.role == "node" else Engine, given.word, options))


if __name__ == "__main__":
    main()

"""Part `arena`: two processes register a node's memory, copy both ways, and one is killed.

The parent makes the memory as a node does and never touches CUDA; workers get its descriptors, as
the ranks of an engine do, and pin it chunk by chunk through the product's copy engine. Each step is
checked, blocks by cupy:

    1  A and B map the memory and store blocks of theirs
    2  B loads what A stored, and A what B stored
    3  A copies both ways without end and is killed (SIGKILL) in the middle
    4  B stores and loads again; a new process C registers the same memory and loads B's blocks
    5  everybody ends: used device memory and the machine's shared memory are back at the baseline
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import xxhash

from bench.gpu.child import Child, say, serve
from bench.gpu.findings import Findings, Options
from bench.gpu.machine import Bytes, noise, open_gpu
from bench.gpu.rank import Rank, Shape
from bench.gpu.smi import back_at, device_memory_checks, memory_in_use
from kvstore.arena import Arena, ArenaView, GenerationView
from kvstore.kernels.pinning import CHUNK_BYTES
from kvstore.ports import CopyWay
from kvstore.types import Incarnation
from kvstore.units import KIB, MIB

ARENA_BYTES, ARENA_BYTES_REHEARSED = 512 * MIB, 136 * MIB
SHAPE, SHAPE_REHEARSED = Shape(16, 128 * KIB), Shape(3, 8 * KIB)
MOVED = 16
"""Blocks of a worker."""
FIRST_S, UNTIL_KILLED_S = 0.05, 30.0
"""Of copies: the second is one call, so that there is no pause in which the kill could fall."""
INCARNATION = 1


class Worker:
    """One rank: a cache on the GPU, and the node's memory behind the product's copy engine."""

    def __init__(
        self, arena_fd: int, generation_fd: int, first: int, *, options: Options, arena_bytes: int
    ) -> None:
        """`first`: byte at which its own blocks begin."""
        gpu = open_gpu(options)
        size = os.fstat(generation_fd).st_size
        page = GenerationView(
            generation_fd, size_bytes=size, arena_bytes=arena_bytes, incarnation=INCARNATION
        )
        self.view = ArenaView(arena_fd, size_bytes=arena_bytes, generations=page)
        shape = SHAPE_REHEARSED if options.is_rehearsal else SHAPE
        self._seed, self._stored = options.seed, 0
        """How often its blocks were stored: each time others."""
        self.rank = Rank(
            gpu,
            shape,
            MOVED,
            seed=options.seed,
            slots=self.view.array,
            slots_begin=first,
        )

    def greeting(self) -> dict[str, Any]:
        return {"pinned_mib": self.rank.copies.pinned_bytes // MIB}

    def expected(self) -> dict[str, Any]:
        """Digest of its blocks, from the host's own copy."""
        blocks = np.concatenate([self._contents(block) for block in range(MOVED)])
        return {"digest": xxhash.xxh3_128_hexdigest(blocks.data)}

    def _contents(self, block: int) -> Bytes:
        return noise(self.rank.block_bytes, self._seed + MOVED * self._stored + block)

    def store(self) -> dict[str, Any]:
        """Its blocks, written anew, to its place in the memory."""
        self._stored += 1
        for block in range(MOVED):
            self.rank.write(block, self._contents(block))
        self.rank.mark()
        return {"failed": self._all(CopyWay.STORE)}

    def load(self, first: int) -> dict[str, Any]:
        """Blocks at that place; returns a digest of what the GPU has then."""
        own, self.rank.slots_begin = self.rank.slots_begin, first
        failed = self._all(CopyWay.LOAD)
        self.rank.slots_begin = own
        arrived = np.concatenate([self.rank.read(block) for block in range(MOVED)])
        return {"failed": failed, "digest": xxhash.xxh3_128_hexdigest(arrived.data)}

    def churn(self) -> dict[str, Any]:
        """Copy both ways until killed; says once that copies have ended and more are to come."""
        rate = self.rank.rate((CopyWay.STORE, CopyWay.LOAD), FIRST_S)
        say({"churning": True, "gb_per_s": round(rate, 3)})
        while True:
            self.rank.rate((CopyWay.STORE, CopyWay.LOAD), UNTIL_KILLED_S)

    def close(self) -> dict[str, Any]:
        self.rank.close()
        return {"closed": True}

    def _all(self, way: CopyWay) -> list[str]:
        ends = [self.rank.do(way, block, block) for block in range(MOVED)]
        return [end.reason for end in ends if end.reason]


def spike(
    arena: Arena, options: Options, baseline: dict[str, int], findings: Findings
) -> dict[str, bool]:
    """Whether each check of steps 1 to 5 held, but for the shared memory."""
    block = (SHAPE_REHEARSED if options.is_rehearsal else SHAPE).block_bytes
    border = arena.arena_bytes // 2 // CHUNK_BYTES * CHUNK_BYTES
    places = (0, border - MOVED // 2 * block - block // 2)  # a block of B lies in two chunks
    checks: dict[str, bool] = {}
    children: list[Child] = []

    def start(number: int, first: int) -> Child:
        fds = (arena.arena_fd, arena.generation_fd)
        given = [*fds, first, arena.arena_bytes, options.seed + 1000 * number]
        arguments = ["--worker", *map(str, given), *(["--rehearse"] * options.is_rehearsal)]
        children.append(Child("bench.gpu.arena", arguments, fds))
        return children[-1]

    try:
        a, b = start(1, places[0]), start(2, places[1])
        findings.say(pinned_mib=[a.greeting["pinned_mib"], b.greeting["pinned_mib"]])
        ends = [a.ask("store"), b.ask("store")]
        checks["both_store"] = not (ends[0]["failed"] or ends[1]["failed"])
        loads = [b.ask(f"load {places[0]}"), a.ask(f"load {places[1]}")]
        expected = [each.ask("expected")["digest"] for each in (a, b)]
        checks["b_loads_what_a_stored"] = loads[0]["digest"] == expected[0]
        checks["a_loads_what_b_stored"] = loads[1]["digest"] == expected[1]
        with_both = memory_in_use() if baseline else {}
        a.ask("store")
        findings.say(killed_while_copying=a.ask("churn"))
        a.end()
        b.ask("store")
        again, expected = b.ask(f"load {places[1]}"), [b.ask("expected")["digest"]]
        checks["b_goes_on_after_a_was_killed"] = again["digest"] == expected[0]
        if "device" in baseline and "device" in with_both:
            only_b = baseline["device"] + (with_both["device"] - baseline["device"]) // 2
            checks["a_gave_its_device_memory_back"] = back_at({"device": only_b}, "device")
        c = start(3, places[0])
        found = c.ask(f"load {places[1]}")["digest"]
        checks["c_registers_the_same_memory"] = found == expected[0]
        for child in (b, c):
            child.ask("close")
    finally:
        for child in children:
            child.end()
    checks |= device_memory_checks(baseline, findings)
    return checks


def run(findings: Findings, options: Options) -> None:
    baseline = {} if options.is_rehearsal else memory_in_use()
    size = ARENA_BYTES_REHEARSED if options.is_rehearsal else ARENA_BYTES
    arena = Arena(arena_bytes=size, incarnation=Incarnation(INCARNATION))
    try:
        arena.populate(0, size)
        arena.set_ready(size)
        checks = spike(arena, options, baseline, findings)
    finally:
        arena.close()
    if baseline:
        checks["shared_memory_at_baseline"] = back_at(baseline, "shared")
    findings.say(failed=[check for check, held in checks.items() if not held], checks=checks)


def main() -> None:
    parser = argparse.ArgumentParser(description="A process of the part `arena`.")
    parser.add_argument("--worker", type=int, nargs=5, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    arena_fd, generation_fd, first, arena_bytes, seed = given.worker
    options = Options(seed, is_rehearsal=given.rehearse)
    serve(lambda: Worker(arena_fd, generation_fd, first, options=options, arena_bytes=arena_bytes))


if __name__ == "__main__":
    main()

"""Part `kernels`: every kernel against its reference, with fresh random bytes in poisoned outputs.

    moves    pieces of any size and alignment, few (`move_pieces`) and many (`move_many`)
    digests  checksums of 81 sizes, beside xxhash's
    cycles   stores and loads of caches of random shapes, both ways of `DeviceCopies`; all memory is
             compared, gaps between pages and what lies around a slot too
    rates    beside a copy within the GPU by the witness; none is judged

Does not cover: copies at their full rate (`copies.py`).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.gpu.findings import Findings, Options
from bench.gpu.machine import Bytes, Gpu, noise, open_gpu, pages
from kvstore.kernels import launches
from kvstore.kernels.device import DeviceCopies
from kvstore.kernels.launches import Launch
from kvstore.kernels.port import DeviceCache, LayerPages
from kvstore.ports import BlockCopy, CopyWay
from kvstore.types import CHECKSUM_BYTES
from kvstore.units import KIB, MIB
from kvstore.wire.record import PIECE_BYTES, checksum_of

PIECES = (3, launches.PIECES_MAX, launches.PIECES_MAX + 1, launches.MANY_MAX)
"""Pieces of a launch: the first two are `move_pieces`, the others `move_many`."""
EDGES = (
    *(1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 256, 1023, 1024, 1025, 65_536),
    *(PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * MIB, 5 * MIB),
)
"""Sizes at which XXH3 changes its ways."""
RANDOM_SIZES = 60
CYCLES, CYCLES_SHORT = 400, 12
BLOCKS = 4
HEADER = b"cycle"
RUNS = 5


class Memory(Protocol):
    """Memory of a device, whose kernels are launched on one stream."""

    @property
    def launch(self) -> Launch: ...
    def put(self, data: Bytes) -> int: ...
    def get(self, address: int, size: int) -> bytes: ...
    def wait(self) -> None: ...
    def free(self) -> None: ...


class GpuMemory:
    """`Memory` of the GPU: filled and read by the witness."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._stream, self._event = gpu.device.stream(is_urgent=False), gpu.device.event()
        self._held: list[int] = []
        self.launch: Launch = gpu.device.launcher(self._stream)

    def put(self, data: Bytes) -> int:
        self._held.append(self._gpu.witness.allocate(data.size))
        self._gpu.witness.write(self._held[-1], data)
        return self._held[-1]

    def get(self, address: int, size: int) -> bytes:
        return self._gpu.witness.read(address, size).tobytes()

    def wait(self) -> None:
        self._gpu.finish(self._stream, self._event)

    def free(self) -> None:
        while self._held:
            self._gpu.witness.free(self._held.pop())


def run(findings: Findings, options: Options) -> None:
    gpu = open_gpu(options)
    memory = GpuMemory(gpu)
    is_small = options.is_rehearsal or options.is_short
    findings.say(moves=moves(memory, options.seed))
    sizes = digest_sizes(options.seed)
    findings.say(digests=digests(memory, options.seed, sizes[:21:4] if is_small else sizes))
    count = CYCLES_SHORT if is_small else CYCLES
    found = {}
    for name, by_pieces in (("staged", False), ("pieces", True)):
        found[name] = cycles(gpu, options.seed, count, by_pieces=by_pieces)
        findings.say(cycles=found)
    if not options.is_short:
        within = gpu.witness.peak_within(0.01 if options.is_rehearsal else 0.3)
        size = MIB // 4 if options.is_rehearsal else 64 * MIB
        findings.say(rates={"copy_within": round(within, 1)} | rates(memory, options.seed, size))


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────


def moves(memory: Memory, seed: int) -> dict[str, dict[str, int]]:
    """Pieces with gaps, targets in another order than sources: all of the target is compared."""
    found = {}
    for count in PIECES:
        rng = np.random.default_rng(seed + count)
        sizes = rng.choice([1, 7, 16, 100, 4096, 8192, 3 * KIB + 5], count)
        source, target = (_places(sizes, rng) for _ in range(2))
        data, poison = (noise(int(ends[-1]), seed + n) for n, ends in ((1, source), (2, target)))
        begins = memory.put(data), memory.put(poison)
        launches.moved(
            memory.launch,
            (begins[1] + target[:-1]).astype(np.uint64),
            (begins[0] + source[:-1]).astype(np.uint64),
            sizes.astype(np.uint64),
        )
        memory.wait()
        for at, to, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=False):
            poison[to : to + size] = data[at : at + size]
        wrong = differing(memory.get(begins[1], poison.size), poison)
        found[f"{count} pieces"] = {"wrong_bytes": wrong}
        memory.free()
    return found


def _places(sizes: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Where pieces of these sizes begin, in any order with gaps, and where all end."""
    gaps = rng.choice([0, 1, 8, 16, 32], len(sizes))
    order = rng.permutation(len(sizes))
    spans = (sizes + gaps)[order]
    begins = np.zeros(len(sizes) + 1, np.int64)
    begins[order] = np.cumsum(spans) - spans
    begins[-1] = int(spans.sum()) + 1
    return begins


# ── checksums ────────────────────────────────────────────────────────────────────────────────────


def digest_sizes(seed: int) -> list[int]:
    """Those of the edges, and as many again at random."""
    drawn = np.random.default_rng(seed).integers(1, 3 * MIB, RANDOM_SIZES)
    return [*EDGES, *drawn.tolist()]


def digests(memory: Memory, seed: int, sizes: list[int]) -> dict[str, Any]:
    """Of one payload and of three."""
    wrong, pieces = [], 0
    for number, size in enumerate(sizes):
        payloads = [noise(size, seed + 7 * number + n) for n in range(1 + 2 * (number % 2))]
        each = -(-size // PIECE_BYTES)
        places = np.array([memory.put(data) for data in payloads], np.uint64)
        sums = memory.put(noise(launches.sums_bytes(len(payloads), size), seed))
        answer = memory.put(noise(CHECKSUM_BYTES * each * len(payloads), seed))
        launches.digests(memory.launch, places, size, sums=sums, found=answer)
        memory.wait()
        expected = b"".join(
            xxhash.xxh3_128_digest(data[at : at + PIECE_BYTES].tobytes())
            for data in payloads
            for at in range(0, size, PIECE_BYTES)
        )
        pieces += each * len(payloads)
        wrong += [size] * (memory.get(answer, len(expected)) != expected)
        memory.free()
    return {"sizes": len(sizes), "pieces": pieces, "wrong_sizes": wrong}


# ── stores and loads ─────────────────────────────────────────────────────────────────────────────


def cycles(gpu: Gpu, seed: int, count: int, *, by_pieces: bool) -> dict[str, int]:
    """Each cycle loads a block and stores another one, of a cache with a new shape now and then."""
    draw, wrong = np.random.default_rng(seed), 0
    for begin in range(0, count, BLOCKS):
        wrong += _cycle(gpu, draw, min(BLOCKS, count - begin), by_pieces=by_pieces)
    return {"cycles": count, "wrong_bytes": wrong}


def _cycle(gpu: Gpu, draw: np.random.Generator, times: int, *, by_pieces: bool) -> int:
    """Wrong bytes of a cache of one shape; a wrong checksum counts as a byte."""
    sizes = draw.choice([1, 16, 96, 1000, 2048, 8192, 9 * KIB], int(draw.integers(1, 81)))
    gaps = draw.choice([0, 8, 64], len(sizes))
    spans = (sizes * BLOCKS + gaps).tolist()
    begins = np.concatenate(([0], np.cumsum(spans)[:-1])).tolist()
    block_bytes, wrong = int(sizes.sum()), 0
    skew = int(draw.choice([0, 1, 8, 16]))
    slots = pages(skew + 2 * block_bytes + 64)
    with gpu.memory(sum(spans)) as address:
        pieces = list(zip(begins, sizes.tolist(), strict=True))
        layers = [LayerPages(address + at, size, size) for at, size in pieces]
        cache_of = DeviceCache(layers, BLOCKS)
        copies = DeviceCopies(gpu.open_device(), [cache_of], by_pieces=by_pieces)
        copies.attach(slots, lambda: slots.size)
        for number in range(times):
            cache = noise(sum(spans), int(draw.integers(1 << 31)))
            slots[:] = noise(slots.size, int(draw.integers(1 << 31)))
            expected, held = slots.copy(), cache.copy()
            gpu.witness.write(address, cache)
            stored, loaded = map(int, draw.choice(BLOCKS, 2, replace=False))
            ways = ((CopyWay.STORE, stored, skew), (CopyWay.LOAD, loaded, skew + block_bytes))
            mark = copies.mark()
            for n, (way, block, begin) in enumerate(ways):
                copies.begin(BlockCopy(2 * number + n, way, 0, block, begin, HEADER, after=mark))
            sums = _checksums(copies)
            expected[skew : skew + block_bytes] = _block(cache, pieces, stored)
            _put(held, pieces, loaded, slots[skew + block_bytes :])
            got = gpu.witness.read(address, held.size)
            wrong += differing(slots, expected) + differing(got, held)
            for n, (_, _, begin) in enumerate(ways):
                data = expected[begin : begin + block_bytes]
                wrong += sums.get(2 * number + n) != checksum_of(HEADER, [data.data])
        copies.close()
    return wrong


def _checksums(copies: DeviceCopies) -> dict[int, bytes]:
    """Of two copies, once both have ended."""
    ends: dict[int, bytes] = {}
    deadline = time.monotonic() + 20
    while len(ends) < 2:
        assert time.monotonic() < deadline, "a copy did not end"
        for end in copies.ended():
            assert not end.reason, end.reason
            ends[end.number] = end.checksum
    return ends


def _block(cache: Bytes, pieces: list[tuple[int, int]], block: int) -> Bytes:
    return np.concatenate([cache[at + block * size :][:size] for at, size in pieces])


def _put(cache: Bytes, pieces: list[tuple[int, int]], block: int, data: Bytes) -> None:
    for at, size in pieces:
        cache[at + block * size :][:size] = data[:size]
        data = data[size:]


# ── rates ────────────────────────────────────────────────────────────────────────────────────────


def rates(memory: Memory, seed: int, size: int) -> dict[str, float]:
    """GB/s of payload, each kernel alone."""
    found = {}
    for each in (8 * KIB, 64 * KIB):
        count = min(launches.MANY_MAX, size // each)
        ends = [memory.put(noise(count * each, seed + n)) for n in range(2)]
        steps = np.arange(count, dtype=np.uint64) * np.uint64(each)
        targets, sources = (np.uint64(end) + steps for end in ends)
        sizes = np.full(count, each, np.uint64)
        move = functools.partial(launches.moved, memory.launch, targets, sources, sizes)
        found[f"move of {each // KIB} KiB"] = rate(move, memory.wait, count * each)
        memory.free()
    block, count = 2 * MIB, max(1, size // (2 * MIB))
    places = np.array([memory.put(noise(block, seed + n)) for n in range(count)], np.uint64)
    sums = memory.put(noise(launches.sums_bytes(count, block), seed))
    answer = memory.put(noise(count * block // PIECE_BYTES * CHECKSUM_BYTES, seed))

    def digest() -> None:
        launches.digests(memory.launch, places, block, sums=sums, found=answer)

    found["digests of 2 MiB"] = rate(digest, memory.wait, count * block)
    memory.free()
    return found


def rate(work: Callable[[], None], wait: Callable[[], None], size: int) -> float:
    """GB/s, of the median run. The first one warms up."""
    seconds = []
    for _ in range(RUNS + 1):
        begin = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - begin)
    return round(size / statistics.median(seconds[1:]) / 1e9, 3)


def differing(found: bytes | Bytes, expected: Bytes) -> int:
    """Bytes that are not those expected."""
    return int((np.frombuffer(found, np.uint8) != expected).sum())

"""The kernels on this machine's NVIDIA GPU: right bytes, rates, and where the ways change places.

    python bench/micro/gpu_kernels.py [--cycles 10000] [--mib 64] [--check]

`cycles`: random blocks go from pages into slots and back, each way of `kernels.strategy` in turn,
and every byte is compared. `kernels`: reshard, checksums and both codecs against their references,
with their rate beside that of a copy within the device. `ways`: the rate of each way by the size of
a piece and the number of pieces, beside one large copy from or to pinned memory, and the fastest:
what `kernels.strategy.Thresholds` should say. `checksums`: blocks hashed by one thread of the host,
by its threads, and by kernels from the device's memory, by the size of a block, and the fastest:
what `kernels.device` should do for stores. Rates are in wall time of one stream, the median of
several runs, GB/s of payload.

Writes bench/results/gpu_kernels.json; with `--check` bytes are compared, little is measured and
nothing is written. Without an NVIDIA GPU only the host's checksums are measured, and printed. Exit
code 0: all bytes were right, or there is no GPU; 1: a byte was wrong. No rate is judged here.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from bench.micro.gpu_arena import gpu_name
from bench.micro.gpu_memory import (
    LOOK_S,
    SEED,
    Addresses,
    DeviceMemory,
    Memory,
    finish,
    noise,
    one,
    rate,
)
from kvstore.kernels import fp8, launches, planes
from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.device import COPIES_MAX, Device, DeviceError
from kvstore.kernels.hashes import Hashes, HashesAtOnce, Hashing, HashThreads
from kvstore.kernels.reference import Bytes
from kvstore.kernels.strategy import BlockMoves, Strategy, Thresholds
from kvstore.types import Shard
from kvstore.units import KIB, MIB
from kvstore.wire.checksum import PIECE_BYTES
from kvstore.wire.layout import corners, layer_offsets, shared

SIZES = (4 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, 256 * KIB)
SHAPES = [(pieces, size) for size in SIZES for pieces in (8, 80)]
"""Pieces of a block, and their sizes."""
BLOCK_SIZES = (64 * KIB, 256 * KIB, 640 * KIB, 2 * MIB, 5 * MIB)


class Blocks(NamedTuple):
    """Two blocks' pages in the device's memory, at odd distances, and pinned memory for a slot."""

    pages: tuple[Addresses, Addresses]
    sizes: Addresses
    offsets: Addresses
    memory: int
    span: int


def place(device: Device, sizes: NDArray[np.int64], gaps: NDArray[np.int64]) -> Blocks:
    spans = sizes + gaps
    begins = np.cumsum(spans) - spans
    memory = device.allocate(2 * int(spans.sum()))
    assert memory, "the device has no memory left"
    pages = tuple((memory + begins + at * int(spans.sum())).astype(np.uint64) for at in (0, 1))
    offsets = (np.cumsum(sizes) - sizes).astype(np.uint64)
    return Blocks(
        (pages[0], pages[1]), sizes.astype(np.uint64), offsets, memory, 2 * int(spans.sum())
    )


def cycles(device: Device, count: int) -> dict[str, int]:
    """Random blocks out of pages into a slot, and out of another slot into other pages. All memory
    is compared, gaps between pages and what lies around the slot too."""
    rng = np.random.default_rng(SEED)
    stream, event = device.stream(is_urgent=False), device.event()
    host = np.zeros((4, 2 * 80 * (2 * KIB + 64)), np.uint8)
    device.pin(host.ctypes.data, host.nbytes)
    wrong = 0
    for number in range(count):
        sizes = rng.choice([1, 15, 16, 100, 512, 2 * KIB], rng.integers(2, 80)).astype(np.int64)
        blocks = place(device, sizes, rng.choice([0, 1, 8, 16, 64], len(sizes)))
        strategy = list(Strategy)[number % len(Strategy)]
        moves = BlockMoves(device, [stream], [blocks.sizes], Thresholds.that_choose(strategy))
        assert moves.way(stream, 0) is strategy, moves.trouble
        host[:] = rng.integers(0, 256, host.shape, np.uint8)
        memory, stored, loaded, back = host
        expected, skew = stored.copy(), int(rng.choice([0, 1, 8, 16]))
        ends = blocks.memory, memory.ctypes.data, back.ctypes.data
        device.copy(stream, *map(one, (*ends[:2], blocks.span)))
        for move, pages, slot in zip(
            (moves.store, moves.load), blocks.pages, (stored, loaded), strict=True
        ):
            move(stream, 0, pages[None], one(slot.ctypes.data + skew), blocks.offsets)
        device.copy(stream, *map(one, (ends[2], ends[0], blocks.span)))
        finish(device, stream, event)
        moves.close()
        device.free(blocks.memory)
        _expect(memory, blocks, expected[skew:], loaded[skew:])
        wrong += int((memory[: blocks.span] != back[: blocks.span]).sum())
        wrong += int((expected != stored).sum())
    device.unpin(host.ctypes.data)
    return {"cycles": count, "wrong_bytes": wrong}


def _expect(memory: Bytes, blocks: Blocks, stored: Bytes, loaded: Bytes) -> None:
    """What the device's memory and the slot of the store hold in the end."""
    lists = (blocks.pages[0].tolist(), blocks.pages[1].tolist(), blocks.offsets.tolist())
    for source, target, at, size in zip(*lists, blocks.sizes.tolist(), strict=True):
        begin = source - blocks.memory
        stored[at : at + size] = memory[begin : begin + size]
        begin = target - blocks.memory
        memory[begin : begin + size] = loaded[at : at + size]


class Bench(NamedTuple):
    """A stream of a device, and pinned memory."""

    device: Device
    stream: int
    event: int
    host: int
    size: int

    def wait(self) -> None:
        finish(self.device, self.stream, self.event)

    def peak(self, target: int, source: int, span: int) -> float:
        """Of large copies."""
        times = max(1, self.size // span)

        def work() -> None:
            for _ in range(times):
                self.device.copy(self.stream, one(target), one(source), one(span))

        return rate(work, self.wait, times * span)

    def rate_of(self, strategy: Strategy, verb: str, blocks: Blocks) -> float:
        """Of one way, many blocks long."""
        moves = BlockMoves(
            self.device, [self.stream], [blocks.sizes], Thresholds.that_choose(strategy)
        )
        assert moves.way(self.stream, 0) is strategy, moves.trouble
        block_bytes, move = int(blocks.sizes.sum()), getattr(moves, verb)
        count = max(1, self.size // block_bytes)

        def work() -> None:
            for number in range(count):
                slot = self.host + number * block_bytes
                move(self.stream, 0, blocks.pages[number % 2][None], one(slot), blocks.offsets)

        found = rate(work, self.wait, count * block_bytes)
        moves.close()
        return found


def ways(device: Device, size: int, shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Rates of each way, by shape and direction; `size`: bytes moved for each."""
    host = np.zeros(max(size, *(pieces * each for pieces, each in shapes)), np.uint8)
    device.pin(host.ctypes.data, host.nbytes)
    stream, event = device.stream(is_urgent=False), device.event()
    bench = Bench(device, stream, event, host.ctypes.data, size)
    found = []
    for pieces, each in shapes:
        blocks = place(device, np.full(pieces, each), np.zeros(pieces, np.int64))
        row: dict[str, Any] = {"pieces": pieces, "piece_bytes": each}
        for verb, ends in (
            ("store", (bench.host, blocks.memory)),
            ("load", (blocks.memory, bench.host)),
        ):
            rates = {way.value: bench.rate_of(way, verb, blocks) for way in Strategy}
            fastest = max(rates, key=rates.__getitem__)
            peak = bench.peak(*ends, min(host.size, blocks.span))
            row[verb] = rates | {"one_copy": peak, "fastest": fastest}
        device.free(blocks.memory)
        found.append(row)
    device.unpin(bench.host)
    return found


# ── reshard, checksums, codecs ───────────────────────────────────────────────────────────────────


class Outcome(NamedTuple):
    """Of a kernel."""

    wrong: int
    """Bytes that differ from the reference's."""
    gb_per_s: float


def differing(found: bytes, expected: bytes) -> int:
    return sum(a != b for a, b in zip(found, expected, strict=True)) if found != expected else 0


def digests(memory: Memory, size: int) -> Outcome:
    each, count = 2 * PIECE_BYTES + 300, max(1, size // (2 * PIECE_BYTES))
    payloads = [noise(each, seed).tobytes() for seed in range(count)]
    places = np.array([memory.put(payload) for payload in payloads], np.uint64)
    sums, found = memory.room(launches.sums_bytes(count, each)), memory.room(count * 48)

    def work() -> None:
        launches.digests(memory.launch, places, each, sums=sums, found=found)

    speed = rate(work, memory.wait, count * each)
    expected = [
        xxhash.xxh3_128_digest(payload[at : at + PIECE_BYTES])
        for payload in payloads
        for at in range(0, each, PIECE_BYTES)
    ]
    return Outcome(differing(memory.get(found, count * 48), b"".join(expected)), speed)


def reshard(memory: Memory, size: int) -> Outcome:
    """From two ranks to four, 80 layers with 8 heads of 1 KiB."""
    layers, heads, head_bytes = 80, 8, 1024
    sides = [
        [Shard(0, layers, at, at + heads // ranks) for at in range(0, heads, heads // ranks)]
        for ranks in (2, 4)
    ]
    runs = shared(*map(corners, sides), offsets=layer_offsets([head_bytes], layers))
    whole = layers * heads * head_bytes
    blocks = [noise(whole, seed) for seed in range(max(1, size // whole))]

    def cut(block: Bytes, shard: Shard) -> bytes:
        by_head = block.reshape(layers, heads, head_bytes)
        return by_head[:, shard.head_begin : shard.head_end].tobytes()

    sources = [[memory.put(cut(block, shard)) for shard in sides[0]] for block in blocks]
    targets = [[memory.room(whole // 4) for _ in sides[1]] for _ in blocks]
    tables = [memory.put(np.array(each, np.uint64)) for each in (sources, targets)]
    table = memory.put(launches.run_table(runs))

    def work() -> None:
        launches.resharded(
            memory.launch,
            runs=table,
            run_count=len(runs.lengths),
            sources=tables[0],
            targets=tables[1],
            shard_counts=(2, 4),
            block_count=len(blocks),
            run_bytes=int(runs.lengths.max()),
        )

    speed = rate(work, memory.wait, len(blocks) * whole)
    wrong = sum(
        differing(memory.get(address, whole // 4), cut(block, shard))
        for block, row in zip(blocks, targets, strict=True)
        for address, shard in zip(row, sides[1], strict=True)
    )
    return Outcome(wrong, speed)


def normal(size: int) -> NDArray[np.uint16]:
    """bfloat16, normally distributed."""
    numbers = np.random.default_rng(SEED).standard_normal(size // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def fp8_rows(memory: Memory, size: int) -> dict[str, Outcome]:
    rows = normal(size - size % 8192).reshape(-1, 4096)
    expected, count = fp8.encode(rows, "bfloat16"), len(rows)
    places = {"largest": memory.put(bytes(4 * count)), "scales": memory.room(count)}
    places |= {"codes": memory.room(rows.size), "errors": memory.put(bytes(4 * count))}
    values, back = memory.put(rows), memory.room(rows.nbytes)
    ends = {"scales": places["scales"], "values": back}

    def encode() -> None:
        launches.fp8_encoded(memory.launch, values, rows.shape, "bfloat16", **places)

    def decode() -> None:
        launches.fp8_decoded(memory.launch, places["codes"], rows.shape, "bfloat16", **ends)

    speeds = [rate(work, memory.wait, rows.nbytes) for work in (encode, decode)]
    decoded = fp8.decode(expected.scales, expected.codes, "bfloat16").tobytes()
    wrong = differing(memory.get(places["codes"], rows.size), expected.codes.tobytes())
    wrong += differing(memory.get(places["scales"], count), expected.scales.tobytes())
    wrong += differing(memory.get(places["errors"], 4 * count), expected.errors.tobytes())
    return {
        "fp8_encode": Outcome(wrong, speeds[0]),
        "fp8_decode": Outcome(differing(memory.get(back, rows.nbytes), decoded), speeds[1]),
    }


def plane_groups(memory: Memory, size: int) -> dict[str, Outcome]:
    payload = normal(size).tobytes()
    expected, plan = planes.encode(payload, 2), planes.Plan(len(payload), 2)
    assert expected is not None
    data, encoded, back = memory.put(payload), memory.room(size), memory.room(size)
    sizes, faults = memory.room(4 * 2 * plan.tiles), memory.put(bytes(4))
    words = (len(expected) - plan.words_at) // 4

    def encode() -> None:
        launches.planes_encoded(memory.launch, data, plan, sizes=sizes, encoded=encoded)

    def decode() -> None:
        launches.planes_decoded(memory.launch, encoded, plan, words, data=back, faults=faults)

    speeds = [rate(work, memory.wait, len(payload)) for work in (encode, decode)]
    wrong = differing(memory.get(back, len(payload)), payload)
    wrong += int(memory.get(faults, 4) != bytes(4))
    made = memory.get(encoded, len(expected))
    return {
        "planes_encode": Outcome(differing(made, expected), speeds[0]),
        "planes_decode": Outcome(wrong, speeds[1]),
    }


def hashed_by_host(hashes: Hashes, memory: Bytes, block_bytes: int) -> float:
    """GB/s of checksums of the blocks of memory, as many at once as copies are."""
    blocks = [memory[at : at + block_bytes] for at in range(0, memory.size, block_bytes)]
    under_way: deque[Hashing] = deque()
    pause = threading.Event()

    def work() -> None:
        for block in blocks:
            under_way.append(hashes.begin(b"header", block))
            if len(under_way) == COPIES_MAX:
                wait(1)

    def wait(count: int = COPIES_MAX) -> None:
        for _ in range(min(count, len(under_way))):
            one = under_way.popleft()
            while one() is None:
                pause.wait(LOOK_S)  # as the copy thread does: it leaves the GIL to the others

    return rate(work, wait, memory.size)


def checksums(memory: Memory | None, size: int) -> list[dict[str, Any]]:
    """Rates of checksums by the size of a block, of `size` bytes; without a device the host's."""
    found, data = [], noise(size)
    for block_bytes in (each for each in BLOCK_SIZES if each <= size):
        held, threads = data[: size // block_bytes * block_bytes], HashThreads()
        rates = {"one": hashed_by_host(HashesAtOnce(), held, block_bytes)}
        rates["threads"] = hashed_by_host(threads, held, block_bytes)
        threads.close()
        if memory is not None:
            rates["kernels"] = hashed_by_kernels(memory, held, block_bytes)
        fastest = max(rates, key=rates.__getitem__)
        found.append({"block_bytes": block_bytes, **rates, "fastest": fastest})
    return found


def hashed_by_kernels(memory: Memory, data: Bytes, block_bytes: int) -> float:
    """GB/s of digests of the blocks, one a launch as loads are, of memory of the device's."""
    begin, pieces = memory.put(data), -(-block_bytes // PIECE_BYTES)
    sums, found = memory.room(launches.sums_bytes(1, block_bytes)), memory.room(16 * pieces)

    def work() -> None:
        for at in range(0, data.size, block_bytes):
            launches.digests(memory.launch, one(begin + at), block_bytes, sums=sums, found=found)

    speed = rate(work, memory.wait, data.size)
    memory.free()
    return speed


def kernels(memory: Memory, size: int) -> dict[str, Any]:
    """Every kernel's outcome, beside a copy within the device."""
    ends = memory.room(size), memory.put(noise(size))
    copied = rate(lambda: memory.copy(*ends, size), memory.wait, size)
    memory.free()
    found: dict[str, Any] = {}
    for name, work in (
        ("digests", digests),
        ("reshard", reshard),
        ("", fp8_rows),
        ("", plane_groups),
    ):
        outcome = work(memory, size)
        memory.free()
        found |= {name: outcome} if isinstance(outcome, Outcome) else outcome
    rows = {
        name: each._asdict() | {"of_a_copy": round(each.gb_per_s / copied, 3)}
        for name, each in found.items()
    }
    return {"copy_within_gb_per_s": copied} | rows


def measured(size: int, count: int, *, is_check: bool) -> dict[str, Any]:
    device = CudaDevice(0, engine_stream=lambda: 0)
    memory = DeviceMemory(device, 2 * size)
    found: dict[str, Any] = {"kernels": kernels(memory, size)}
    if not is_check:
        found["checksums"] = checksums(memory, size)
    memory.close()
    found["cycles"] = cycles(device, count)
    return found if is_check else found | {"ways": ways(device, size, SHAPES)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    name = gpu_name()
    if not name:
        print("kernels: skipped, because there is no NVIDIA GPU on this machine")
        if not options.check:
            print("checksums by the host alone: " + json.dumps(checksums(None, 16 * MIB)))
        return 0
    try:
        result = {"gpu": name} | measured(options.mib * MIB, options.cycles, is_check=options.check)
    except DeviceError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=1))
    if not options.check:
        print(f"kernels: {record.write('gpu_kernels', result, seed=SEED)}")
    wrong = result["cycles"]["wrong_bytes"] + sum(
        each["wrong"] for each in result["kernels"].values() if isinstance(each, dict)
    )
    if wrong:
        print(f"kernels: {wrong} bytes were wrong", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

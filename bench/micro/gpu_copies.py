"""Stores and loads of blocks through the copy engine on a GPU, beside what its link can do.

    python bench/micro/gpu_copies.py [--seconds 2] [--out FILE]

Blocks of 16 tokens of a model with 80 layers and 8 KV heads of 128 in bf16: the shard of one rank
of 8, and all of it. Measured in one run, on the first NVIDIA GPU:

    peak         one large copy between pinned and device memory, each way, and both at once
    store, load  blocks through `kernels.device.DeviceCopies`, verified, eight under way; each way,
                 and both at once; with checksums made at once and by threads
    pieces       the same of a cache whose pieces have 64 KiB
    matmul       rate of matrix products beside stores, and beside loads (needs torch)
    cycles       random stores and loads, compared byte by byte

Goals: 0.90 of the peak each way (0.80 in pieces of 64 KiB), 0.85 of the sum at once; at most 5 % of
the matrix products lost to stores, 10 % to loads; no wrong byte. Prints one JSON object. Exit code
0: goals met, or no GPU here; 1: one was missed ("missed"); 2: the measurement failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.kernels.caches import DeviceCache, LayerPages
from kvstore.kernels.cuda import CudaDevice, cuda_runtime
from kvstore.kernels.device import Device, DeviceCopies, DeviceError
from kvstore.kernels.hashes import Hashes, HashesAtOnce, HashThreads
from kvstore.ports import BlockCopy, CopyWay
from kvstore.wire.checksum import checksum_of

LAYERS, TOKENS, HEAD_BYTES = 80, 16, 128 * 2 * 2
BLOCKS = 64
SHARDS = {"tp8": 1, "tp1": 8}
"""KV heads of a rank."""
PEAK_BYTES = 256 << 20
CYCLES = 10_000
HEADER = b"bench"
GOALS = {"each": 0.90, "pieces": 0.80, "both": 0.85, "store_loss": 0.05, "load_loss": 0.10}


class Gpu:
    """The first device, with memory that ends with the run."""

    def __init__(self) -> None:
        self.runtime = cuda_runtime()
        self.call("cudaSetDevice", 0)
        (self.name,) = (self.call("cudaGetDeviceProperties", 0)[0].name.decode(),)
        (self.engine,) = self.call("cudaStreamCreate")
        self.device = CudaDevice(0, engine_stream=lambda: int(self.engine))

    def call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        status, *values = getattr(self.runtime, name)(*arguments)
        if status != self.runtime.cudaError_t.cudaSuccess:
            raise DeviceError(f"{name}: {status.name}")
        return tuple(values)

    @contextlib.contextmanager
    def memory(self, size_bytes: int) -> Iterator[int]:
        (address,) = self.call("cudaMalloc", size_bytes)
        try:
            yield int(address)
        finally:
            self.call("cudaFree", address)

    def peak(self, seconds: float) -> dict[str, float]:
        """GB/s of one large copy: to the device, from it, and the sum of both at once."""
        host = [pages(PEAK_BYTES) for _ in range(2)]
        streams = [self.call("cudaStreamCreate")[0] for _ in range(2)]
        with self.memory(PEAK_BYTES) as first, self.memory(PEAK_BYTES) as second:
            for each in host:
                self.device.pin(each.ctypes.data, PEAK_BYTES)
            ways = [(first, host[0].ctypes.data), (host[1].ctypes.data, second)]
            rates = {}
            for name, used in (("load", ways[:1]), ("store", ways[1:]), ("both", ways)):
                count, begin = 0, time.perf_counter()
                while time.perf_counter() - begin < seconds:
                    for (target, source), stream in zip(used, streams, strict=False):
                        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDefault
                        self.call("cudaMemcpyAsync", target, source, PEAK_BYTES, kind, stream)
                        count += 1
                    self.call("cudaDeviceSynchronize")
                rates[name] = count * PEAK_BYTES / (time.perf_counter() - begin) / 1e9
            for each in host:
                self.device.unpin(each.ctypes.data)
        return rates


def pages(size_bytes: int) -> NDArray[np.uint8]:
    """Memory of whole pages."""
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)


class Rank:
    """A cache on the device and slots on the host, and the copy engine between them."""

    def __init__(
        self, device: Device, address: int, page_bytes: int, layers: int, hashes: Hashes
    ) -> None:
        places = [
            LayerPages(address + layer * page_bytes * BLOCKS, page_bytes, page_bytes)
            for layer in range(layers)
        ]
        cache = DeviceCache(places, BLOCKS)
        self.copies = DeviceCopies(device, [cache], hashes=hashes)
        self.block_bytes = cache.block_bytes
        self.slots = pages(BLOCKS * self.block_bytes)
        self.copies.attach(self.slots, lambda: self.slots.size)
        self._numbers = itertools.count(1)
        for block in range(BLOCKS):  # pins the memory
            self.do(CopyWay.STORE, block, block)

    def order(self, way: CopyWay, block: int, slot: int) -> int:
        number = next(self._numbers)
        begin = slot * self.block_bytes
        copy = BlockCopy(number, way, 0, block, begin, HEADER, after=self.copies.mark())
        self.copies.begin(copy)
        return number

    def do(self, way: CopyWay, block: int, slot: int) -> bytes:
        """Returns the checksum."""
        self.order(way, block, slot)
        while not (ends := self.copies.ended()):
            pass
        assert not ends[0].reason, ends[0].reason
        return ends[0].checksum

    def rate(self, ways: tuple[CopyWay, ...], seconds: float) -> float:
        """GB/s, with as many copies under way as there may be."""
        under_way = done = 0
        turns, begin = itertools.cycle(ways), time.perf_counter()
        numbers = itertools.count()
        while time.perf_counter() - begin < seconds:
            while under_way < self.copies.copies_max:
                at = next(numbers) % BLOCKS
                self.order(next(turns), at, at)
                under_way += 1
            ended = len(self.copies.ended())
            under_way, done = under_way - ended, done + ended
        taken = time.perf_counter() - begin
        while under_way:
            under_way -= len(self.copies.ended())
        return done * self.block_bytes / taken / 1e9

    def slot(self, number: int) -> NDArray[np.uint8]:
        return self.slots[number * self.block_bytes : (number + 1) * self.block_bytes]

    def wrong_cycles(self, count: int) -> int:
        """Cycles of a random load and store whose bytes or checksums are not those expected."""
        draw, wrong = random.Random(7), 0
        for _ in range(count):
            block, source, target = draw.randrange(BLOCKS), *draw.sample(range(BLOCKS), 2)
            at = draw.randrange(self.block_bytes)
            self.slot(source)[at] ^= 0x5A
            loaded = self.do(CopyWay.LOAD, block, source)
            stored = self.do(CopyWay.STORE, block, target)
            expected = checksum_of(HEADER, [self.slot(source).data])
            is_equal = np.array_equal(self.slot(source), self.slot(target))
            wrong += not (is_equal and loaded == stored == expected)
        return wrong


def matmul_loss(rank: Rank, way: CopyWay, seconds: float) -> float | None:
    """Share of the matrix products lost beside copies; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    made = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def products(beside: Callable[[], object]) -> float:
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for _ in range(20):
                made @ made
            beside()
            torch.cuda.current_stream().synchronize()
            count += 20
        return count / (time.perf_counter() - begin)

    alone = products(lambda: None)
    return 1 - products(lambda: rank.rate((way,), 0.01)) / alone


def measured(gpu: Gpu, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"device": gpu.name, "peak_gb_per_s": (peak := gpu.peak(seconds))}
    makers: dict[str, Callable[[], Hashes]] = {"at_once": HashesAtOnce, "threads": HashThreads}
    shapes = {name: (LAYERS, heads * TOKENS * HEAD_BYTES) for name, heads in SHARDS.items()}
    shapes["pieces"] = (8, 64 << 10)
    for (name, (layers, page_bytes)), (kind, make) in itertools.product(
        shapes.items(), makers.items()
    ):
        with gpu.memory(layers * page_bytes * BLOCKS) as address:
            rank = Rank(gpu.device, address, page_bytes, layers, make())
            ways = (CopyWay.STORE, CopyWay.LOAD)
            row: dict[str, float | None] = {way.value: rank.rate((way,), seconds) for way in ways}
            both = rank.rate(ways, seconds)
            row |= {f"{each}_ratio": (row[each] or 0) / peak[each] for each in ("store", "load")}
            row |= {"both": both, "both_ratio": both / (peak["store"] + peak["load"])}
            if (name, kind) == ("tp1", "at_once"):
                row["store_loss"] = matmul_loss(rank, CopyWay.STORE, seconds)
                row["load_loss"] = matmul_loss(rank, CopyWay.LOAD, seconds)
            if (name, kind) == ("tp8", "at_once"):
                found["wrong_cycles"] = rank.wrong_cycles(CYCLES)
            found[f"{name}_{kind}"] = row
            rank.copies.close()
    return found


def missed(found: dict[str, Any]) -> list[str]:
    """Goals that no way of hashing met."""
    lacking = ["wrong_cycles"] if found["wrong_cycles"] else []
    for name in (*SHARDS, "pieces"):
        rows = [found[f"{name}_at_once"], found[f"{name}_threads"]]
        goals = dict.fromkeys(("store", "load"), GOALS["pieces" if name == "pieces" else "each"])
        for way, goal in (goals | {"both": GOALS["both"]}).items():
            if max(row[f"{way}_ratio"] for row in rows) < goal:
                lacking.append(f"{name} {way}")
    losses = {way: found["tp1_at_once"].get(way) for way in ("store_loss", "load_loss")}
    return lacking + [way for way, loss in losses.items() if loss is not None and loss > GOALS[way]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        gpu = Gpu()
    except DeviceError as error:
        print(json.dumps({"ran": False, "reason": f"no NVIDIA GPU was used: {error}"}))
        return 0
    try:
        found = measured(gpu, options.seconds)
    except (DeviceError, AssertionError) as error:
        print(json.dumps({"ran": False, "device": gpu.name, "reason": str(error)}))
        return 2
    result = {"ran": True, "missed": missed(found)} | found
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast blocks are packed and unpacked, beside one-core memcpy in the same run.

    python bench/micro/pack_speed.py [--rounds 31] [--out bench/results/pack_speed.json]

The geometry is that of the 194 M model: 16 layers, 4 KV heads, 128 tokens, 64 + 64 dimensions in
bfloat16: 128 KiB a page, 2 MiB a block; 25 blocks scattered over a cache of 1 GiB, into scattered
slots, caches flushed before each timing. Ways are interleaved; figures are medians over the rounds.
`memcpy` copies the same number of 2 MiB runs, scattered alike, with libc's memcpy.

`beside_torch`: the same while another thread runs small torch operations, as an engine does, which
wants the interpreter's lock again and again. Exit code 0; no figure is judged here.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.arena import Arena
from kvstore.kernels.host import PagedCache
from kvstore.types import Incarnation

LAYERS, PAGE_BYTES, BLOCKS, MOVED = 16, 128 << 10, 512, 25
BLOCK_BYTES = LAYERS * PAGE_BYTES
ARENA_BYTES = 512 << 20
HEADER = bytes(96)
Way = Callable[[list[int], list[int]], None]

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p


class Memory:
    """A cache and an arena, both resident."""

    def __init__(self) -> None:
        self.cache = np.full((LAYERS, BLOCKS, PAGE_BYTES), 7, np.uint8)
        self.arena = Arena(arena_bytes=ARENA_BYTES, incarnation=Incarnation(1))
        self.arena.populate(0, ARENA_BYTES)
        self.slots = self.arena.array
        self.slots[:] = 1
        self.packed = PagedCache(list(self.cache))
        self.flush = np.zeros(128 << 20, np.uint8)

    def slot(self, index: int) -> NDArray[np.uint8]:
        return self.slots[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]


def ways(memory: Memory) -> dict[str, Way]:
    """By name: copies that many blocks into that many slots, or back."""
    cache, packed = memory.cache, memory.packed
    cache_at, slots_at = cache.ctypes.data, memory.slots.ctypes.data

    def memcpy(blocks: list[int], slots: list[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            at = slots_at + slot * BLOCK_BYTES
            _libc.memcpy(at, cache_at + block * BLOCK_BYTES, BLOCK_BYTES)

    def store(blocks: list[int], slots: list[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            packed.store(block, memory.slot(slot), HEADER)

    def load(blocks: list[int], slots: list[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            packed.load(memory.slot(slot), block)

    def load_checked(blocks: list[int], slots: list[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            packed.load_checked(memory.slot(slot), block, HEADER)

    def ctypes_store(blocks: list[int], slots: list[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            digest, view = xxhash.xxh3_128(HEADER), memory.slot(slot)
            for layer in range(LAYERS):
                begin = layer * PAGE_BYTES
                source = cache_at + (layer * BLOCKS + block) * PAGE_BYTES
                _libc.memcpy(slots_at + slot * BLOCK_BYTES + begin, source, PAGE_BYTES)
                digest.update(view[begin : begin + PAGE_BYTES].data)
            digest.digest()

    found = {
        "memcpy": memcpy,
        "store": store,
        "load": load,
        "load_checked": load_checked,
        "other_store_ctypes": ctypes_store,
    }
    return found | _torch_ways(memory)


def _torch_ways(memory: Memory) -> dict[str, Way]:
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(1)
    words = torch.from_numpy(memory.cache).view(torch.int64).view(LAYERS, BLOCKS, -1)
    slots_words = torch.from_numpy(memory.slots).view(torch.int64).view(-1, LAYERS, words.shape[2])

    def torch_store(blocks: list[int], slots: list[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            slots_words[slot].copy_(words[:, block])
            xxhash.xxh3_128(HEADER).update(memory.slot(slot).data)

    return {"other_store_torch": torch_store}


@contextmanager
def busy_torch(*, active: bool) -> Iterator[None]:
    """While inside, another thread runs small torch operations, if `active`."""
    if not active:
        yield
        return
    import torch

    stop = threading.Event()

    def work() -> None:
        left, right = torch.ones(256, 256), torch.ones(256, 256)
        while not stop.is_set():
            torch.mm(left, right)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure(memory: Memory, *, rounds: int, beside_torch: bool) -> dict[str, dict[str, float]]:
    """Median seconds, GiB/s and share of memcpy by way."""
    rng = np.random.default_rng(1)
    chosen = ways(memory)
    times: dict[str, list[float]] = {name: [] for name in chosen}
    with busy_torch(active=beside_torch):
        for _ in range(rounds):
            for name, way in chosen.items():
                blocks = rng.choice(BLOCKS, MOVED, replace=False).tolist()
                slots = rng.choice(ARENA_BYTES // BLOCK_BYTES, MOVED, replace=False).tolist()
                memory.flush += 1
                begin = time.perf_counter()
                way(blocks, slots)
                times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        name: {
            "median_ms": round(median * 1e3, 3),
            "gib_per_s": round(MOVED * BLOCK_BYTES / median / 2**30, 2),
            "share_of_memcpy": round(medians["memcpy"] / median, 3),
        }
        for name, median in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=Path("bench/results/pack_speed.json"))
    options = parser.parse_args()
    memory = Memory()
    measure(memory, rounds=2, beside_torch=False)  # warm: page tables, code
    result: dict[str, object] = {
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "block_bytes": BLOCK_BYTES,
        "blocks_moved": MOVED,
        "alone": measure(memory, rounds=options.rounds, beside_torch=False),
    }
    if "other_store_torch" in ways(memory):
        rounds = max(options.rounds // 3, 3)
        result["beside_torch"] = measure(memory, rounds=rounds, beside_torch=True)
    text = json.dumps(result, indent=1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text + "\n")
    print(text)
    memory.arena.close()


if __name__ == "__main__":
    main()

"""What the checksum of a block costs as a tree of pieces, beside one hash over everything.

    python bench/micro/checksum.py [--rounds 41]

Blocks of 64 KiB to 8 MiB out of an arena of 256 MiB, each read from memory and not from a cache:
`hash`, as a disk read, a scrub or a fetch verifies it; `store` and `load`, the copies of the
connector that hash on the way, with 16 layers. Each way does 16 MiB a round, or one block; ways are
interleaved, a ratio is the median of those within a round, in processor time of one thread.
`two_threads`, in wall time: whole blocks on two threads at once; `shared`: one block whose pieces
two threads share. Writes bench/results/checksum.json. Exit code 0; no figure is judged here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import xxhash
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench import record
from kvstore.arena import Arena
from kvstore.kernels import host
from kvstore.types import Incarnation
from kvstore.units import GIB, KIB, MIB
from kvstore.wire import record as wire

ARENA_BYTES, ROUND_BYTES, LAYERS = 256 * MIB, 16 * MIB, 16
SIZES = (64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB)
PIECES = (128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB)
HEADER = bytes(96)
SEED = 1
Sum = Callable[[bytes, Iterable[memoryview]], bytes]


def one_hash(header: bytes, parts: Iterable[memoryview]) -> bytes:
    """Header and payload in one."""
    digest = xxhash.xxh3_128(header)
    for part in parts:
        digest.update(part)
    return digest.digest()


@contextmanager
def pieces_of(size: int) -> Iterator[Sum]:
    """The tree with pieces of this size; 0: no tree."""
    its: Sum = wire.checksum_of if size else one_hash
    with (
        mock.patch.object(wire, "PIECE_BYTES", size or wire.PIECE_BYTES),
        mock.patch.object(host, "checksum_of", its),
    ):
        yield its


class Blocks:
    """Of one size: in an arena, and in an engine's cache."""

    def __init__(self, arena: NDArray[np.uint8], size: int) -> None:
        self.size, self.batch = size, max(1, ROUND_BYTES // size)
        count = len(arena) // size
        self.slots = [arena[at * size : (at + 1) * size] for at in range(count)]
        cache = np.full((LAYERS, count, size // LAYERS), 7, np.uint8)
        self.cache = host.PagedCache(list(cache))
        self._order = itertools.cycle(np.random.default_rng(SEED).permutation(count).tolist())

    def next(self) -> list[int]:
        return list(itertools.islice(self._order, self.batch))

    def hash(self, its: Sum, chosen: list[int]) -> None:
        for at in chosen:
            its(HEADER, [self.slots[at].data])

    def store(self, _: Sum, chosen: list[int]) -> None:
        for at in chosen:
            self.cache.store(at, self.slots[at], HEADER)

    def load(self, _: Sum, chosen: list[int]) -> None:
        for at in chosen:
            self.cache.load_checked(self.slots[at], at, HEADER)

    def shared(self, pool: ThreadPoolExecutor, chosen: list[int]) -> None:
        for at in chosen:
            digests = [b""] * wire.piece_count(self.size)
            other = pool.submit(self._half, digests, at, 1)
            self._half(digests, at, 0)
            other.result()
            wire.root_of(HEADER, b"".join(digests))

    def _half(self, digests: list[bytes], at: int, first: int) -> None:
        step, data = wire.PIECE_BYTES, self.slots[at].data
        for index in range(first, len(digests), 2):
            digests[index] = xxhash.xxh3_128_digest(data[index * step : (index + 1) * step])


def measure(blocks: Blocks, *, rounds: int) -> dict[str, object]:
    """Per verb: GiB/s of one hash and of the tree, and by piece size what the tree costs more."""
    verbs = {"hash": blocks.hash, "store": blocks.store, "load": blocks.load}
    found: dict[str, object] = {}
    for name, verb in verbs.items():
        times: dict[int, list[float]] = {size: [] for size in (0, *PIECES)}
        for _ in range(rounds):
            for size, its in times.items():
                chosen = blocks.next()
                with pieces_of(size) as its_sum:
                    its.append(_timed(verb, its_sum, chosen, clock=time.thread_time))
        ratios = {f"{size // KIB} KiB": _median_ratio(times[size], times[0]) for size in PIECES}
        found[name] = {
            "one_hash_gib_per_s": _speed(blocks, times[0]),
            "tree_gib_per_s": _speed(blocks, times[wire.PIECE_BYTES]),
            "tree_over_one_hash": ratios,
        }
    return found | _threads(blocks, rounds=rounds)


def _threads(blocks: Blocks, *, rounds: int) -> dict[str, object]:
    """GiB/s of two threads."""
    times: dict[str, list[float]] = {"one_hash": [], "tree": [], "shared": []}
    with ThreadPoolExecutor(1) as pool:

        def both(its: Sum, chosen: list[int]) -> None:
            other = pool.submit(blocks.hash, its, chosen[::2])
            blocks.hash(its, chosen[1::2])
            other.result()

        for _ in range(rounds):
            one, two, three = (blocks.next() for _ in range(3))
            times["one_hash"].append(_timed(both, one_hash, one))
            times["tree"].append(_timed(both, wire.checksum_of, two))
            times["shared"].append(_timed(blocks.shared, pool, three))
    return {"two_threads_gib_per_s": {name: _speed(blocks, its) for name, its in times.items()}}


def _timed(
    call: Callable[..., None], *args: object, clock: Callable[[], float] = time.perf_counter
) -> float:
    begin = clock()
    call(*args)
    return clock() - begin


def _speed(blocks: Blocks, times: list[float]) -> float:
    return round(blocks.batch * blocks.size / statistics.median(times) / GIB, 1)


def _median_ratio(over: list[float], under: list[float]) -> float:
    pairs = zip(over, under, strict=True)
    return round(statistics.median(one / other for one, other in pairs), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    arena = Arena(arena_bytes=ARENA_BYTES, incarnation=Incarnation(1))
    arena.populate(0, ARENA_BYTES)
    arena.array[:] = np.random.default_rng(SEED).integers(0, 256, ARENA_BYTES, np.uint8)
    sizes = {}
    for size in SIZES:
        blocks = Blocks(arena.array, size)
        measure(blocks, rounds=2)  # warm: page tables, code
        sizes[f"{size // KIB} KiB"] = measure(blocks, rounds=options.rounds)
    result = {
        "rounds": options.rounds,
        "piece_bytes": wire.PIECE_BYTES,
        "layers": LAYERS,
        "blocks": sizes,
    }
    print(json.dumps(result, indent=1))
    record.write("checksum", result, seed=SEED)
    arena.close()


if __name__ == "__main__":
    main()

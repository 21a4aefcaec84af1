"""Launches of the kernels in `csrc/`: grids and arguments, for whatever runs them.

    moved, resharded     bytes of many pieces or blocks, between any memory that the device reaches
    digests              the leaves of a checksum (`wire.checksum`)
    fp8_*, planes_*      the two codecs; `fp8.py` and `planes.py` define their bytes

`Launch` is a device's (`cuda.CudaKernels`) or the host's, which the tests use. Addresses are those
of the device; nothing is allocated or waited for. The kernels of one call are given to one stream,
in order.

Does not cover: which way a block goes (`strategy.py`), compiling (`compiled.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.kernels.planes import Plan
from kvstore.wire.checksum import PIECE_BYTES

THREADS: Final = 256
"""Threads of a block of the grid."""
MOVE_BLOCKS_MAX: Final = 32
"""Blocks of a grid that moves pieces: 32 × 256 threads with four loads of 16 bytes each have 512
KiB under way, several times what PCIe 5 needs, and leave the other multiprocessors to the engine.
Assumed."""
BLOCKS_MAX: Final = 1024
"""Blocks of the other grids, whose threads take what is left in turns."""
PIECES_MAX: Final = 160
MANY_MAX: Final = 1360
"""Pieces of a launch, and of one that moves several blocks."""
PAYLOADS_MAX: Final = 256
KINDS: Final = {"bfloat16": 0, "float16": 1}
"""Values of FP8 rows."""

Addresses = NDArray[np.uint64]


class Kernel(NamedTuple):
    """A function of `csrc/`."""

    source: str
    """Its file, without `.cu`."""
    name: str


Launch = Callable[[Kernel, tuple[int, int], Sequence[Any]], None]
"""Kernel; blocks of a row of the grid, and rows; arguments as ctypes objects."""

MOVE_PIECES: Final = Kernel("move", "move_pieces")
MOVE_MANY: Final = Kernel("move", "move_many")
RESHARD: Final = Kernel("move", "reshard")
DIGESTS: Final = tuple(
    Kernel("checksum", name) for name in ("sum_stripes", "chain_blocks", "finish_pieces")
)
"""Those that `digests` launches, one after the other."""
_SUM, _CHAIN, _FINISH = DIGESTS
_FP8_MEASURE, _FP8_ENCODE, _FP8_DECODE = (
    Kernel("fp8", f"fp8_{verb}") for verb in ("measure", "encode", "decode")
)
_MEASURE, _COUNT, _PLACE, _WRITE, _READ = (
    Kernel("planes", f"planes_{verb}") for verb in ("measure", "count", "place", "write", "read")
)
KERNELS: Final = (
    *(MOVE_PIECES, MOVE_MANY, RESHARD, *DIGESTS, _FP8_MEASURE, _FP8_ENCODE, _FP8_DECODE),
    *(_MEASURE, _COUNT, _PLACE, _WRITE, _READ),
)

_PIECES: Final = {room: ctypes.c_uint64 * (3 * room + 1) for room in (PIECES_MAX, MANY_MAX)}
_Payloads = ctypes.c_uint64 * (PAYLOADS_MAX + 2)
_Shape = ctypes.c_uint64 * 5


def _address(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(value))


def _number(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(int(value))


def _row(count: int) -> tuple[int, int]:
    """A grid of one row, for so many things of one thread each."""
    return max(1, min(BLOCKS_MAX, -(-count // THREADS))), 1


def _rows(rows: int, length: int, blocks_max: int) -> tuple[int, int]:
    """A grid of at most so many blocks for rows of so many elements."""
    high = max(1, min(rows, blocks_max))
    return max(1, min(blocks_max // high, -(-length // THREADS))), high


def moved(
    launch: Launch,
    targets: Addresses,
    sources: Addresses,
    sizes: Addresses,
    *,
    blocks_max: int = MOVE_BLOCKS_MAX,
) -> None:
    """Copy pieces: `sizes[i]` bytes from `sources[i]` to `targets[i]`, in any order."""
    for begin in range(0, len(sizes), MANY_MAX):
        end = min(begin + MANY_MAX, len(sizes))
        count, largest = end - begin, int(sizes[begin:end].max())
        kernel, room = (MOVE_PIECES, PIECES_MAX) if count <= PIECES_MAX else (MOVE_MANY, MANY_MAX)
        table = np.zeros(3 * room + 1, np.uint64)
        table[-1] = count
        for column, values in enumerate((targets, sources, sizes)):
            table[column * room : column * room + count] = values[begin:end]
        grid = _rows(count, largest // 16, blocks_max)
        launch(kernel, grid, [_PIECES[room].from_buffer(table.data)])


def run_table(runs: Sequence[NDArray[np.int64]]) -> NDArray[np.uint64]:
    """The table of runs for `resharded`, u64 [run][5], of the columns of `layout.Runs`."""
    return np.ascontiguousarray(np.array(runs, np.int64).T).astype(np.uint64)


def resharded(
    launch: Launch,
    *,
    runs: int,
    run_count: int,
    sources: int,
    targets: int,
    shard_counts: tuple[int, int],
    block_count: int,
    run_bytes: int,
) -> None:
    """Copy the runs that two sets of shards of each block share.

    Args:
        runs: address of a table [run_count][5] (`run_table`).
        sources, targets: addresses of tables u64 [block_count][shards] of addresses of slots.
        shard_counts: of sources and of targets.
        run_bytes: length of the longest run.
    """
    of_sources, of_targets = shard_counts
    tables = (runs, run_count, sources, of_sources, targets, of_targets)
    arguments = [(_number if at % 2 else _address)(value) for at, value in enumerate(tables)]
    grid = _rows(run_count * block_count, run_bytes // 16, BLOCKS_MAX)
    launch(RESHARD, grid, [*arguments, _number(block_count)])


# ── checksums ────────────────────────────────────────────────────────────────────────────────────


def sums_bytes(count: int, size: int) -> int:
    """Bytes of the scratch that `digests` needs for so many payloads of that size."""
    return min(count, PAYLOADS_MAX) * -(-size // 1024) * 64


def digests(launch: Launch, payloads: Addresses, size: int, *, sums: int, found: int) -> None:
    """The xxh3-128 of every piece of payloads, which all have one size.

    Args:
        payloads: their addresses, multiples of 16.
        size: of each in bytes, not 0.
        sums: scratch of `sums_bytes`, aligned to 8.
        found: u8 [payload][piece][16].
    """
    assert size > 0, "a payload has bytes"
    assert not (payloads % np.uint64(16)).any(), "a payload begins at a multiple of 16"
    pieces = -(-size // PIECE_BYTES)
    for begin in range(0, len(payloads), PAYLOADS_MAX):
        some = payloads[begin : begin + PAYLOADS_MAX]
        count, table = len(some), np.zeros(PAYLOADS_MAX + 2, np.uint64)
        table[:count] = some
        table[PAYLOADS_MAX:] = count, size
        given = _Payloads.from_buffer(table.data)
        launch(_SUM, _row(count * -(-size // 1024) * 4), [given, _address(sums)])
        arguments = [_address(sums), _number(count), _number(size)]
        launch(_CHAIN, _row(count * pieces * 8), arguments)
        end = _address(found + begin * pieces * 16)
        launch(_FINISH, _row(count * pieces), [given, _address(sums), end])


# ── codecs ───────────────────────────────────────────────────────────────────────────────────────


def fp8_encoded(
    launch: Launch,
    values: int,
    shape: tuple[int, int],
    kind: str,
    *,
    largest: int,
    scales: int,
    codes: int,
    errors: int,
) -> None:
    """Encode rows of values; `fp8.encode` has the meaning of each array.

    Args:
        values: u16 [rows][length], `shape`; `kind`: a key of KINDS.
        largest: scratch u32 [rows], zeros.
        scales: u8 [rows]. codes: u8 [rows][length].
        errors: f32 [rows], zeros.
    """
    head = [_address(values), *map(_number, shape)]
    grid = _rows(*shape, BLOCKS_MAX)
    launch(_FP8_MEASURE, grid, [*head, _address(largest)])
    arrays = map(_address, (largest, scales, codes, errors))
    launch(_FP8_ENCODE, grid, [*head, ctypes.c_uint32(KINDS[kind]), *arrays])


def fp8_decoded(
    launch: Launch, codes: int, shape: tuple[int, int], kind: str, *, scales: int, values: int
) -> None:
    """The values of rows; arguments as of `fp8_encoded`."""
    head = [_address(codes), *map(_number, shape), ctypes.c_uint32(KINDS[kind])]
    launch(_FP8_DECODE, _rows(*shape, BLOCKS_MAX), [*head, _address(scales), _address(values)])


def _shape(plan: Plan, words: int) -> Any:
    return _Shape(plan.elements, plan.groups, plan.tiles, plan.planes, words)


def planes_encoded(launch: Launch, data: int, plan: Plan, *, sizes: int, encoded: int) -> None:
    """Encode a payload as of `planes.encode`, but for its tail, which is copied as it is.

    Args:
        data: the payload, aligned to 4.
        sizes: scratch u32 [planes][tiles].
        encoded: room for as many bytes as the payload has, aligned to 4. If more words are needed
            than fit (`plan.words_max`), which the last of the offsets says, none are written.
    """
    if not plan.elements or plan.words_max < 0:
        return
    shape, groups = _shape(plan, plan.words_max), _address(encoded + plan.groups_at)
    offsets, each = _address(encoded), _row(plan.planes * plan.groups)
    launch(_MEASURE, each, [_address(data), shape, groups])
    launch(_COUNT, _row(plan.planes * plan.tiles), [groups, shape, _address(sizes)])
    launch(_PLACE, _row(plan.planes * plan.tiles + 1), [_address(sizes), shape, offsets])
    words = _address(encoded + plan.words_at)
    launch(_WRITE, each, [_address(data), shape, groups, offsets, words])


def planes_decoded(
    launch: Launch, encoded: int, plan: Plan, words: int, *, data: int, faults: int
) -> None:
    """Decode what `planes_encoded` made; `words`: how many it has. `faults`: u32, zero: not zero
    afterwards if it is damaged, and then the payload is of no use."""
    parts = (encoded + plan.groups_at, encoded, encoded + plan.words_at)
    ends = (_address(data), _address(faults))
    launch(_READ, _row(plan.groups), [*map(_address, parts), _shape(plan, words), *ends])

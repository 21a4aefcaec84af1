"""Launches of the kernels in `csrc/`: grids and arguments, for whatever runs them.

    moved      bytes of many pieces, between any memory that the device reaches
    digests    the leaves of checksums (`wire.record`)

`Launch` is a device's (`cuda.CudaKernels`) or the host's, which the tests use. Addresses are those
of the device; nothing is allocated or waited for. The kernels of one call are given to one stream,
in order.

Does not cover: which way a block goes (`moves.py`), compiling (`compiled.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.wire.record import PIECE_BYTES

THREADS: Final = 256
"""Threads of a block of the grid."""
MOVE_BLOCKS_MAX: Final = 32
"""Blocks of a grid that moves pieces: 32 × 256 threads with four loads of 16 bytes each have 512
KiB under way, several times what PCIe 5 needs behind them, and leave the other multiprocessors to
the engine. Assumed."""
BLOCKS_MAX: Final = 1024
"""Blocks of the other grids, whose threads take what is left in turns."""
PIECES_MAX: Final = 160
MANY_MAX: Final = 1360
"""Most pieces of a launch: PIECES_MAX of `move_pieces`, MANY_MAX of `move_many`."""
PAYLOADS_MAX: Final = 256
"""Most payloads of a launch."""

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
DIGESTS: Final = tuple(
    Kernel("checksum", name) for name in ("sum_stripes", "chain_blocks", "finish_pieces")
)
"""Kernels that `digests` launches, one after the other."""
_SUM, _CHAIN, _FINISH = DIGESTS
KERNELS: Final = (MOVE_PIECES, MOVE_MANY, *DIGESTS)

_PIECES: Final = {room: ctypes.c_uint64 * (3 * room + 1) for room in (PIECES_MAX, MANY_MAX)}
_Payloads = ctypes.c_uint64 * (PAYLOADS_MAX + 2)


def _address(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(value))


def _number(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(int(value))


def _row(count: int) -> tuple[int, int]:
    """(blocks, rows) of a grid of one row with at least `count` threads, unless BLOCKS_MAX is
    less."""
    return max(1, min(BLOCKS_MAX, -(-count // THREADS))), 1


def _rows(rows: int, length: int, blocks_max: int) -> tuple[int, int]:
    """(blocks of a row, rows) of a grid of at most `blocks_max` blocks, for `rows` rows of `length`
    elements."""
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


# ── checksums ────────────────────────────────────────────────────────────────────────────────────


def sums_bytes(count: int, size: int) -> int:
    """Bytes of the scratch that `digests` needs for `count` payloads of `size` bytes."""
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

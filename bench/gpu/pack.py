"""What travels to a machine with a GPU that reaches no package registry: wheels beside the sources.

    python bench/gpu/pack.py        judges what `make gpu-pack` has fetched: its size

`build/gpu-pack` has the wheels of requirements/gpu.txt; together with the tracked files it stays
below what may be brought along. `unpack` is the other end: wheels are archives, and those of this
list run from any folder on the path, so the machine needs no pip and gets no environment.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "build" / "gpu-pack"
PYTHON = (3, 12)
"""Of the wheels."""
BYTES_MAX = 64 << 20
MODULES = ("msgspec", "cbor2", "grpc", "google.protobuf", "xxhash", "cuda.bindings", "pytest")
"""Without which most parts do not begin."""
_MIB = 1 << 20


def unpack(into: Path) -> Path | None:
    """The folder for the path; None: there are no wheels, or they are for another Python."""
    wheels = sorted(PACK.glob("*.whl"))
    if not wheels:
        return None
    if sys.version_info[:2] != PYTHON:
        wanted = ".".join(map(str, PYTHON))
        print(f"gpu: the wheels of {PACK.name} are left out: they are for Python {wanted}")
        return None
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    return into


def forgotten(site: Path | None) -> str:
    """What to say where nothing was unpacked and this interpreter lacks modules; else empty."""
    lacking = [name for name in MODULES if not _is_here(name)]
    if site is not None or not lacking or any(PACK.glob("*.whl")):
        return ""
    # The last two of a path: no folder of this machine.
    return (
        f"{'/'.join(PACK.parts[-2:])} is not here: make gpu-pack, and bring it along"
        f" ({sys.executable.rpartition('/')[2]} has no {', '.join(lacking)})"
    )


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package that it is in
        return False


def wanting(wheels: list[Path]) -> list[str]:
    """Wheels that do not run from a folder: those with files for other places."""
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            found += [wheel.name] * any(".data/" in name for name in archive.namelist())
    return found


def tracked_bytes() -> int:
    """Of the sources, which travel as well."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    done = subprocess.run(
        [*command, "--exclude-standard"], capture_output=True, text=True, check=True
    )
    paths = (ROOT / name for name in done.stdout.split("\0") if name)
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> int:
    wheels = sorted(PACK.glob("*.whl"))
    sizes = {"wheels": sum(each.stat().st_size for each in wheels), "sources": tracked_bytes()}
    total = sum(sizes.values())
    parts = ", ".join(f"{name} {size / _MIB:.1f}" for name, size in sizes.items())
    print(f"gpu-pack: {len(wheels)} wheels; {total / _MIB:.1f} of {BYTES_MAX >> 20} MiB ({parts})")
    if not wheels:
        print("gpu-pack: it has no wheels", file=sys.stderr)
    for name in (other := wanting(wheels)):
        print(
            f"gpu-pack: {name} has files that a folder on the path does not serve", file=sys.stderr
        )
    if total > BYTES_MAX:
        print("gpu-pack: too much to bring along: leave a wheel out", file=sys.stderr)
    return 1 if other or total > BYTES_MAX or not wheels else 0


if __name__ == "__main__":
    sys.exit(main())

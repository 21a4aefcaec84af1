"""Free resources of the machine: memory and file systems.

Covers: the least of the machine's and its memory cgroups' room. Does not cover: sizes chosen by it
(`config`).
"""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import ConfigError


def file_system_bytes(directory: Path) -> int:
    """Size of the file system that a directory, made or not yet, lies in."""
    found = _file_system(directory)
    return found.f_blocks * found.f_frsize


def file_system_free_bytes(directory: Path) -> int:
    """Bytes of that file system that this user may still fill."""
    found = _file_system(directory)
    return found.f_bavail * found.f_frsize


def _file_system(directory: Path) -> os.statvfs_result:
    # Not Path.exists, which raises for a name that is too long: whoever makes it will say so.
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    return os.statvfs(existing)


def available_memory() -> tuple[int, str]:
    """(free bytes, name): the least of the machine and every cgroup above this process.

    Page cache that can be dropped counts as available, as it does for the kernel's own limits.
    """
    candidates = [(_machine_available(), "the machine")]
    for directory, limit, usage in _cgroup_levels():
        left = _cgroup_left(directory, limit_file=limit, usage_file=usage)
        if left is not None:
            candidates.append((left, "the memory cgroup"))
    return min(candidates)


def _machine_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable: give --dram a size")


def _cgroup_levels() -> list[tuple[Path, str, str]]:
    """(directory, limit file, usage file) of this process's memory cgroups, v2 and v1.

    Inside a container the path is relative to the container's own root or, without a cgroup
    namespace, not visible at all: then the mount point itself is the container's group.
    """
    levels = []
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
            files = ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            roots = [Path("/sys/fs/cgroup/memory")]
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        relative = Path(path.lstrip("/"))
        for root in roots:
            levels += [(root / part, *files) for part in (relative, *relative.parents)]
    return levels


def _cgroup_left(directory: Path, *, limit_file: str, usage_file: str) -> int | None:
    """Bytes left in one cgroup; None when it has no limit or is not there."""
    try:
        limit = (directory / limit_file).read_text(encoding="utf-8").strip()
        usage = int((directory / usage_file).read_text(encoding="utf-8"))
        stat = (directory / "memory.stat").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    fields = dict(line.split() for line in stat.splitlines())
    cache = int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))
    return max(0, int(limit) - max(0, usage - cache))

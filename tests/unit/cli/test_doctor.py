"""`kvstore doctor`: both states of each check, files below a fake root, nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.cli import doctor as shell, doctor_reads as reads
from kvstore.cli.doctor_checks import CHECKS, SYMPTOMS
from kvstore.cli.doctor_facts import (
    ERROR,
    NOT_APPLICABLE,
    OK,
    RANGES,
    WARNING,
    Diagnosis,
    DiskFacts,
    EngineFacts,
    Facts,
    NodeFacts,
)
from kvstore.cli.main import cli
from kvstore.config.machine import memory_cgroups
from kvstore.tiers.file.config import FileConfig
from kvstore.units import GIB, MIB
from tests.style.tree import ROOT

BY_NAME = {check.name: check for check in CHECKS}
FACTS = Facts(socket="/run/kvstore/node.sock", dram_bytes=8 * GIB, versions={"vllm": "0.32.0+cpu"})
NO_POOL = "MemTotal: 16777216 kB\nHugepagesize: 2048 kB\nHugePages_Total: 0\n"
POOL = "MemTotal: 16777216 kB\nHugepagesize: 2048 kB\nHugePages_Total: {0}\nHugePages_Free: {0}\n"
LIMITS = "Max locked memory         {0}              {0}              bytes     \n"
NODES = {f"/sys/devices/system/node/node{n}/cpulist": str(n) for n in (0, 1)}
GPU = {
    f"/sys/bus/pci/devices/0000:01:00.0/{name}": value
    for name, value in {"class": "0x030200", "vendor": "0x10de", "numa_node": "1"}.items()
}
IB = "/sys/class/infiniband/mlx5_0"
PORT = {f"{IB}/ports/1/state": "4: ACTIVE", f"{IB}/ports/1/gids/0": "fe80:0000::1"}
UVERBS = {"/dev/infiniband/uverbs0": ""}
SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
GB_POOL = "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages"
V2, V1 = "/sys/fs/cgroup/a/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
NO_LIMIT = "9223372036854771712\n"
FLAGS = {"prefix-caching-hash-algo": "sha256_cbor"}
TRANSFER = {"kv_connector": "KVStoreConnector", "kv_load_failure_policy": "recompute"}
ENGINE = EngineFacts(7, FLAGS, TRANSFER, {})
NODE = NodeFacts(0, (), 8 * GIB, 8 * GIB)
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _judge(name: str, texts: dict[str, str], **its: Any) -> Diagnosis:
    return BY_NAME[name].judge(texts, dataclasses.replace(FACTS, **its))


def _engine(**its: Any) -> dict[str, Any]:
    return {"engines": (ENGINE._replace(**its),)}


@pytest.mark.parametrize(
    ("verdict", "name", "texts", "its"),
    [
        (OK, "kernel", {"/proc/sys/kernel/osrelease": "6.1.0-13-amd64\n"}, {}),
        (WARNING, "kernel", {"/proc/sys/kernel/osrelease": "5.10.0\n"}, {}),
        (ERROR, "kernel", {"/proc/sys/kernel/osrelease": "4.18.0-553.el8\n"}, {}),
        (OK, "memory", {"/proc/meminfo": NO_POOL}, {}),
        (OK, "memory", {"/proc/meminfo": NO_POOL, V2: "max\n", V1: NO_LIMIT}, {}),
        (OK, "memory", {"/proc/meminfo": NO_POOL, V2: str(10 * GIB)}, {}),
        (WARNING, "memory", {"/proc/meminfo": NO_POOL, V2: str(10 * GIB - 1)}, {}),
        (ERROR, "memory", {"/proc/meminfo": NO_POOL, V2: "max", V1: str(8 * GIB)}, {}),
        (ERROR, "memory", {"/proc/meminfo": NO_POOL}, {"dram_bytes": 16 * GIB}),
        (NOT_APPLICABLE, "memlock", {"/proc/self/limits": LIMITS.format(65536)}, {}),
        (OK, "memlock", {f"{IB}/node_type": "", "/proc/7/limits": LIMITS.format("unlimited")}, {}),
        (ERROR, "memlock", {f"{IB}/node_type": "", "/proc/7/limits": LIMITS.format(65536)}, {}),
        (NOT_APPLICABLE, "huge-pages", {"/proc/meminfo": NO_POOL}, {}),
        (OK, "huge-pages", {"/proc/meminfo": POOL.format(4096)}, {}),
        (WARNING, "huge-pages", {"/proc/meminfo": POOL.format(4095)}, {}),
        (WARNING, "huge-pages", {"/proc/meminfo": NO_POOL, GB_POOL: "4"}, {}),
        (NOT_APPLICABLE, "thp", {"/proc/meminfo": POOL.format(4096), SHMEM: "[never]"}, {}),
        (OK, "thp", {"/proc/meminfo": NO_POOL, SHMEM: "always [advise] never"}, {}),
        (WARNING, "thp", {"/proc/meminfo": NO_POOL, SHMEM: "always advise [never] deny"}, {}),
        (WARNING, "thp", {"/proc/meminfo": NO_POOL}, {}),
        (NOT_APPLICABLE, "numa", {"/sys/devices/system/node/node0/cpulist": "0-3"}, {}),
        (OK, "numa", NODES | GPU | {"/proc/self/status": "Mems_allowed_list:\t1\n"}, {}),
        (WARNING, "numa", NODES | GPU | {"/proc/self/status": "Mems_allowed_list:\t0-1\n"}, {}),
        (WARNING, "numa", NODES | GPU | {f"{IB}/device/numa_node": "0"}, {}),
        (NOT_APPLICABLE, "rdma", PORT, {"transport": "tcp"}),
        (OK, "rdma", PORT | UVERBS, {"transport": "nixl"}),
        (WARNING, "rdma", {}, {"transport": "nixl"}),
        (ERROR, "rdma", PORT, {"transport": "ucx"}),
        (ERROR, "rdma", PORT | UVERBS | {f"{IB}/ports/1/state": "1: DOWN"}, {"transport": "ucx"}),
        (ERROR, "rdma", {f"{IB}/ports/1/state": "4: ACTIVE"} | UVERBS, {"transport": "ucx"}),
        (NOT_APPLICABLE, "transport", {}, {"transport": "tcp"}),
        (ERROR, "transport", {}, {"transport": "nixl"}),
        (OK, "transport", {}, {"transport": "nixl", "versions": {"nixl": "1.5.1"}}),
        (ERROR, "transport", {}, {"transport": "nixl", "versions": {"nixl": "1.4.9"}}),
        (OK, "transport", {}, {"transport": "ucx", "versions": {"ucx": "0.52.0"}}),
        (NOT_APPLICABLE, "disk", {}, {}),
        (OK, "disk", {}, {"file": DiskFacts(GIB, GIB)}),
        (OK, "disk", {}, {"file": DiskFacts(GIB, GIB, rates=(1.0, 400.0 * MIB))}),
        (WARNING, "disk", {}, {"file": DiskFacts(GIB, GIB, rates=(1.0, 399.0 * MIB))}),
        (WARNING, "disk", {}, {"file": DiskFacts(GIB, GIB - 1)}),
        (WARNING, "disk", {}, {"file": DiskFacts(GIB, GIB, is_direct=False)}),
        (ERROR, "disk", {}, {"file": DiskFacts(GIB, refusal="it is full: make room")}),
        (NOT_APPLICABLE, "clock", {}, {"clock": (5, 64)}),
        (OK, "clock", {}, {"clock": (0, 1), "has_cluster": True}),
        (WARNING, "clock", {}, {"clock": (5, 64), "has_cluster": True}),
        (WARNING, "clock", {}, {"has_cluster": True}),
        (NOT_APPLICABLE, "certificates", {}, {}),
        (OK, "certificates", {}, {"certificate_days": 30.0}),
        (WARNING, "certificates", {}, {"certificate_days": 29.9}),
        (ERROR, "certificates", {}, {"certificate_refusal": "--cert x expired"}),
        (OK, "vllm", {}, {}),
        (NOT_APPLICABLE, "vllm", {}, {"versions": {}}),
        (ERROR, "vllm", {}, {"versions": {"vllm": "0.31.9"}}),
        (ERROR, "vllm", {}, {"versions": {"vllm": "0.34.0"}}),
        (NOT_APPLICABLE, "engine-flags", {}, {}),
        (OK, "engine-flags", {}, {"engines": (ENGINE,), "node": NODE}),
        (WARNING, "engine-flags", {}, {"engines": (ENGINE,), "node": NODE, "socket": "/a"}),
        (ERROR, "engine-flags", {}, _engine(flags={})),
        (ERROR, "engine-flags", {}, _engine(transfer={"kv_connector": "KVStoreConnector"})),
        (ERROR, "engine-flags", {}, _engine(transfer=None)),
        (WARNING, "engine-flags", {}, _engine(transfer={})),
        (WARNING, "engine-flags", {}, _engine(flags={"config": "a.yaml"})),
        (OK, "sleep-mode", {}, _engine()),
        (ERROR, "sleep-mode", {}, _engine(flags={"enable-sleep-mode": ""})),
        (OK, "allocator", {}, _engine()),
        (WARNING, "allocator", {}, _engine(environment=EXPANDABLE)),
        (
            OK,
            "allocator",
            {},
            _engine(environment=EXPANDABLE, flags={"enable-cumem-allocator": ""}),
        ),
        (WARNING, "allocator", {}, {"allocator": "expandable_segments:True"}),
        (NOT_APPLICABLE, "hash-seed", {}, {}),
        (OK, "hash-seed", {}, _engine(environment={"PYTHONHASHSEED": "0"})),
        (WARNING, "hash-seed", {}, _engine(environment=None)),
        (
            *(WARNING, "hash-seed", {}),
            {"engines": (ENGINE, ENGINE._replace(environment={"PYTHONHASHSEED": "0"}))},
        ),
        (NOT_APPLICABLE, "node", {}, {"no_node": "there is none"}),
        (OK, "node", {}, {"node": NODE}),
        (WARNING, "node", {}, {"node": NODE._replace(ready_bytes=GIB)}),
        (ERROR, "node", {}, {"node": NODE._replace(troubles=(("breaker open", "dmesg"),))}),
        (NOT_APPLICABLE, "hits", {}, {"node": NODE}),
        (OK, "hits", {}, {"node": NODE._replace(blocks_hit=1)}),
        (WARNING, "hits", {}, {"node": NODE._replace(blocks_missed=4, outcomes=("evicted",))}),
    ],
)
def test_a_check_in_each_state(
    verdict: str, name: str, texts: dict[str, str], its: dict[str, Any]
) -> None:
    found = _judge(name, texts, **its)
    assert found.verdict == verdict, found
    assert bool(found.mend) == (verdict in (WARNING, ERROR)), found
    assert found.text


def test_locked_memory_is_no_matter_for_a_process_with_the_capability() -> None:
    texts = {f"{IB}/node_type": "", "/proc/7/limits": LIMITS.format(65536)}
    assert _judge("memlock", texts | {"/proc/7/status": "CapEff:\t0000000000004000"}).verdict == OK
    assert (
        _judge("memlock", texts | {"/proc/7/status": "CapEff:\t000000000000bfff"}).verdict == ERROR
    )


def test_the_pages_of_a_running_node_are_its_own() -> None:
    used = POOL.format(4096).replace("Free: 4096", "Free: 0")
    assert _judge("huge-pages", {"/proc/meminfo": used}, node=NODE).verdict == OK
    found = _judge("huge-pages", {"/proc/meminfo": used})
    assert (found.verdict, found.mend) == (WARNING, "sysctl vm.nr_hugepages=8192")


def test_every_symptom_names_checks_and_every_check_explains_some() -> None:
    assert tuple(SYMPTOMS) == shell._SYMPTOMS
    named = [name for names in SYMPTOMS.values() for name in names.split()]
    assert set(named) == BY_NAME.keys()


def test_the_supported_versions_are_those_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {name: extras[name][0] for name in RANGES} == RANGES


def test_the_memory_beyond_dram_is_that_of_the_chart() -> None:
    chart = (ROOT / "deploy/chart/templates/_helpers.tpl").read_text()
    assert "233 bytes for each block of 256 KiB" in chart


@pytest.mark.parametrize(
    ("cgroup", "at", "limits"),
    [
        ("0::/a/b\n", "", {"a/b/memory.max": "max", "a/memory.max": "7"}),
        ("4:memory:/a/b\n0::/\n", "memory/", {"a/memory.limit_in_bytes": "7"}),
        ("4:memory:/not/visible\n", "memory/", {"memory.limit_in_bytes": "7"}),
        ("1:name=systemd:/\n0::/a\n", "unified/", {"a/memory.max": "7", "memory.max": "9"}),
    ],
    ids=["v2, nested", "v1, nested", "v1, in a container", "hybrid"],
)
def test_limits_of_every_cgroup_above_are_read(
    tmp_path: Path, cgroup: str, at: str, limits: dict[str, str]
) -> None:
    files = {f"sys/fs/cgroup/{at}{name}": text for name, text in limits.items()}
    for name, text in (files | {"proc/self/cgroup": cgroup}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = reads.expand("{cgroup}", tmp_path, node="self", engines=())
    texts, hidden = reads.read_texts(tmp_path, paths)
    assert set(texts) == {f"/sys/fs/cgroup/{at}{name}" for name in limits}
    assert not hidden
    found = _judge("memory", texts | {"/proc/meminfo": NO_POOL})
    assert f"/sys/fs/cgroup/{at}" in found.text
    assert "has 7 B" in found.text


def test_a_container_without_cgroups_is_judged_by_the_machine(tmp_path: Path) -> None:
    assert memory_cgroups(tmp_path) == []
    assert "no limit of a memory cgroup" in _judge("memory", {"/proc/meminfo": NO_POOL}).text


def _process(root: Path, pid: int, *argv: str, environ: str = "") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_text("\0".join(argv) + "\0")
    (folder / "environ").write_text(environ)


def test_engines_are_found_by_their_command_lines(tmp_path: Path) -> None:
    transfer = json.dumps(TRANSFER)
    _process(
        *(tmp_path, 5, "/opt/bin/python3", "/opt/bin/vllm", "serve", "m", "--api-key", "secret"),
        *("--prefix_caching_hash_algo=sha256_cbor", "--kv-transfer-config", transfer),
        environ="PYTHONHASHSEED=0\0TOKEN=secret\0",
    )
    _process(
        *(tmp_path, 6, "python3", "-m", "vllm.entrypoints.openai.api_server"),
        *("--kv-transfer-config.kv_connector", "KVStoreConnector", "--enable-sleep-mode"),
    )
    _process(tmp_path, 7, "bash", "-c", "vllm serve m")
    _process(tmp_path, 8, "VLLM::EngineCore")
    (tmp_path / "proc" / "9").mkdir()  # it ends
    first, second = reads.engines(tmp_path)
    assert (first.pid, first.transfer, first.environment) == (5, TRANSFER, {"PYTHONHASHSEED": "0"})
    assert second.transfer == {"kv_connector": "KVStoreConnector"}
    facts = dataclasses.replace(FACTS, engines=(first, second))
    found = [check.judge({"/proc/meminfo": NO_POOL, "/r": "6.1"}, facts) for check in CHECKS]
    assert "engine 6" in str(found)
    assert "secret" not in str(found)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole fake one, on which all is well."""
    files = {
        "proc/sys/kernel/osrelease": "6.1.0",
        "proc/meminfo": NO_POOL,
        "proc/self/status": "Mems_allowed_list: 0",
        SHMEM[1:]: "[advise]",
    }
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    monkeypatch.setattr(shell, "_ROOT", tmp_path / "root")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return tmp_path / "root"


def _run(*arguments: str) -> Any:
    given = ["doctor", "--dram", "8GiB", "--socket", "/none/node.sock", *arguments]
    return CliRunner().invoke(cli, given)


def test_exit_status_and_json_follow_the_worst_finding(machine: Path) -> None:
    done = _run("--json", "--symptom", "memory")
    found = json.loads(done.output)
    assert (done.exit_code, found["verdict"], found["symptom"]) == (0, "ok", "memory")
    assert [row["check"] for row in found["checks"]] == SYMPTOMS["memory"].split()
    assert {*found["checks"][0]} == {"check", "verdict", "finding", "mend", "reads"}
    (machine / SHMEM[1:]).write_text("[never]")
    done = _run()
    assert done.exit_code == 1
    assert re.search(r"^warning  thp .*\n +mend: echo advise > /sys", done.output, re.MULTILINE)
    (machine / "proc/sys/kernel/osrelease").write_text("4.18")
    assert _run().exit_code == 2


@pytest.mark.usefixtures("machine")
def test_only_errors_of_certificates_are_findings_about_them() -> None:
    done = _run("--index", "127.0.0.1:1")
    assert re.search(r"^error    certificates  the index needs TLS", done.output, re.MULTILINE)
    done = _run("--index", "127.0.0.1:1", "--insecure", "--node-name", "a b")
    assert done.exit_code != 0
    assert "certificates" not in done.output


def test_a_file_that_may_not_be_read_is_said(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def refuse(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == "shmem_enabled":
            raise PermissionError(13, "Permission denied")
        return real(path, *how, **more)

    monkeypatch.setattr(Path, "open", refuse)
    done = _run()
    assert f"warning  thp           not readable: {SHMEM}" in done.output
    assert done.exit_code == 1


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_a_disk_is_measured_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_unnamed: bool
) -> None:
    monkeypatch.setattr(reads, "RATE_BYTES", 4 * MIB)
    if not has_unnamed:
        monkeypatch.setattr(os, "O_TMPFILE", 1 << 40)  # no open takes it
        real = os.open
        monkeypatch.setattr(
            *(os, "open"),
            lambda path, flags, *how, **more: (
                (_ for _ in ()).throw(OSError(95, "unsupported"))
                if flags & 1 << 40
                else real(path, flags, *how, **more)
            ),
        )
    file = FileConfig(directory=tmp_path, capacity_bytes=64 * MIB)
    found = reads.disk(file, with_rate=True)
    assert found.rates is not None
    assert min(found.rates) > 0
    assert reads.disk(file, with_rate=False).rates is None

    def interrupt(_fd: int) -> tuple[float, float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(reads, "_rates", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reads.disk(file, with_rate=True)
    assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.config.machine.file_system_free_bytes", lambda _: 100 * MIB)
    file = FileConfig(directory=tmp_path, capacity_bytes=64 * MIB)
    assert reads.disk(file, with_rate=True).rates is None
    gone = FileConfig(directory=tmp_path / "a" / "b", capacity_bytes=64 * MIB)
    assert "mount its disk" in reads.disk(gone, with_rate=True).refusal

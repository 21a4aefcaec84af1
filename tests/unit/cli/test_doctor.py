"""`kvstore doctor`: both states of each check below a fake root, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
from click.testing import CliRunner

from kvstore.cli import doctor_checks, look_commands as shell
from kvstore.cli.doctor_checks import CHECKS, RANGES, Diagnosis, Machine, judge
from kvstore.cli.main import cli
from kvstore.config.machine import memory_cgroups
from kvstore.config.node import load_config
from kvstore.config.reading import load_settings
from kvstore.config.settings import NodeSettings
from kvstore.config.values import size_of
from kvstore.engine.sessions.owners import UnservedReport
from kvstore.engine.why.reasons import Reason
from kvstore.engine.why.report import SpaceReport, TierReport
from kvstore.errors import ConfigError
from kvstore.testing.process import Lab
from kvstore.tiers.file.config import FileConfig
from kvstore.units import GIB, MIB
from tests.style.tree import ROOT

OK, WARNING, ERROR, NOT_APPLICABLE = "ok", "warning", "error", "not applicable"
MEMINFO, RELEASE = "/proc/meminfo", "/proc/sys/kernel/osrelease"
NO_POOL = "MemAvailable: 16777216 kB\nHugepagesize: 2048 kB\nHugePages_Total: 0\n"
POOL = (
    "MemAvailable: 16777216 kB\nHugepagesize: 2048 kB\nHugePages_Total: {0}\nHugePages_Free: {0}\n"
)
USED = POOL.format(4096).replace("Free: 4096", "Free: 0")
LIMITS = "Max locked memory         {0}              {0}              bytes     \n"
NODES = {f"/sys/devices/system/node/node{n}/cpulist": str(n) for n in (0, 1)}
GPU = {"/sys/bus/pci/drivers/nvidia/0000:01:00.0/numa_node": "1\n"}
IB = "/sys/class/infiniband/mlx5_0"
PORT = {f"{IB}/ports/1/state": "4: ACTIVE", f"{IB}/ports/1/gids/0": "fe80:0000::1"}
DOWN = {f"{IB}/ports/2/state": "1: DOWN", f"{IB}/ports/2/gids/0": "fe80:0000::1"}
UVERBS = {"/dev/infiniband/uverbs0": ""}
SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
NO_LIMIT = "9223372036854771712\n"
TRANSFER = json.dumps({"kv_connector": "KVStoreConnector", "kv_load_failure_policy": "recompute"})
SERVE = ("/opt/bin/python3", "/opt/bin/vllm", "serve", "m")
HASHES = ("--prefix_caching_hash_algo=sha256_cbor",)
GOOD = (*SERVE, *HASHES, "--kv-transfer-config", TRANSFER)
EXPANDABLE = "A=b\0PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\0"
DRAM = TierReport(tier="dram", capacity_bytes=8 * GIB, ready_bytes=8 * GIB)
DISK = TierReport(tier="file", capacity_bytes=GIB, ready_bytes=GIB)
ANSWERS: dict[str, list[Any]] = {
    "tiers": [DRAM, DISK],
    "unserved": [],
    "spaces": [],
    "requests": [],
    "state": [{"hits": {}, "misses": {}}],
}
FILE = FileConfig(directory=Path("/x"), capacity_bytes=GIB)


def _limits(v2: str, v1: str = NO_LIMIT, used: int = 0) -> dict[str, str]:
    """Files of a process in a memory cgroup of each version."""
    one, two = "/sys/fs/cgroup/memory/b/memory.", "/sys/fs/cgroup/a/memory."
    files = {"/proc/self/cgroup": "4:memory:/b\n0::/a\n", f"{one}stat": "", f"{two}stat": ""}
    files |= {f"{one}limit_in_bytes": v1, f"{one}usage_in_bytes": str(used)}
    return files | {f"{two}max": v2, f"{two}current": str(used)}


def _engine(*argv: str, pid: int = 7, environ: str = "") -> dict[str, str]:
    folder = f"/proc/{pid}"
    return {f"{folder}/cmdline": "\0".join((*argv, "")), f"{folder}/environ": environ}


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        (root / name[1:]).write_text(text)


def _machine(root: Path, files: dict[str, str], **its: Any) -> Machine:
    """`its`: facts that are not files, in place of those that would be read."""
    _write(root, {MEMINFO: NO_POOL} | files)
    flags = {"dram": "8GiB", "socket": "/run/none/node.sock"}
    machine = Machine(load_settings(None, flags, NodeSettings), root)
    for name, value in its.items():
        setattr(machine, name, value)
    return machine


def _judge(name: str, machine: Machine) -> Diagnosis:
    (found,) = judge(name, machine)
    return found


def _version(text: str) -> Any:
    return lambda _name: text


def _disk(*found: Any) -> dict[str, Any]:
    return {"file": FILE, "disk": lambda _file: found}


def _answers(**rows: Any) -> dict[str, Any]:
    return {"node": ANSWERS | rows}


def _ends_in(days: float) -> Any:
    return SimpleNamespace(ends_s=time.time() + days * 86_400)


SPACE = SpaceReport(
    *("3f9a" * 16, "", "m", ""),
    blocks_dram=0,
    blocks_file=0,
    bytes_dram=0,
    engines=0,
    off="all",
)
OPEN = TierReport(tier="file", capacity_bytes=GIB, ready_bytes=GIB, reads="open")
UNREADY = TierReport(tier="dram", capacity_bytes=8 * GIB, ready_bytes=GIB)
UNSERVED = UnservedReport(engine="e", tenant="", reason="its user is not allowed")
MISS = SimpleNamespace(outcome=Reason.EVICTED_FOR_STORES)
OWN = SimpleNamespace(outcome=Reason.OWN_CACHE)


def test_a_request_that_needed_no_block_is_no_miss(tmp_path: Path) -> None:
    state = {"hits": {"dram": 3}, "misses": {"evicted": 1}}
    found = _judge("hits", _machine(tmp_path, {}, **_answers(state=[state], requests=[OWN, MISS])))
    assert found.finding.endswith("% of 4 blocks were hits; latest misses: 1 × evicted")


@pytest.mark.parametrize(
    ("verdict", "name", "files", "its"),
    [
        (OK, "kernel", {RELEASE: "6.1.0-13-amd64\n"}, {}),
        (WARNING, "kernel", {RELEASE: "5.10.0\n"}, {}),
        (ERROR, "kernel", {RELEASE: "4.18.0-553.el8\n"}, {}),
        (OK, "memory", {}, {}),
        (OK, "memory", _limits(v2="max\n", v1=NO_LIMIT), {}),
        (OK, "memory", _limits(v2=str(10 * GIB)), {}),
        (WARNING, "memory", _limits(v2=str(10 * GIB - 1)), {}),
        (WARNING, "memory", _limits(v2=str(10 * GIB)), {"file": FILE}),
        (ERROR, "memory", _limits(v2="max", v1=str(8 * GIB - 1)), {}),
        (ERROR, "memory", _limits(v2=str(16 * GIB), used=9 * GIB), {}),
        (WARNING, "memory", _limits(v2=str(16 * GIB), used=9 * GIB), _answers(tiers=[UNREADY])),
        (OK, "memory", _limits(v2=str(16 * GIB), used=9 * GIB), _answers()),
        (ERROR, "memory", {}, {"dram_bytes": 17 * GIB}),
        (WARNING, "memory", {}, {"dram_bytes": 16 * GIB}),
        (OK, "memory", {MEMINFO: POOL.format(4096).replace("16777216", "1")}, {}),
        (NOT_APPLICABLE, "memlock", {"/proc/self/limits": LIMITS.format(65536)}, {}),
        (
            *(OK, "memlock"),
            {f"{IB}/node_type": "", "/proc/self/limits": LIMITS.format("unlimited")},
            {},
        ),
        (ERROR, "memlock", {f"{IB}/node_type": "", "/proc/self/limits": LIMITS.format(65536)}, {}),
        (
            *(ERROR, "memlock"),
            _engine(*GOOD) | {f"{IB}/node_type": "", "/proc/7/limits": LIMITS.format(65536)},
            {},
        ),
        (NOT_APPLICABLE, "huge-pages", {}, {}),
        (OK, "huge-pages", {MEMINFO: POOL.format(4096)}, {}),
        (WARNING, "huge-pages", {MEMINFO: POOL.format(4095)}, {}),
        (OK, "huge-pages", {MEMINFO: USED}, _answers()),
        (WARNING, "huge-pages", {MEMINFO: USED}, {}),
        (WARNING, "huge-pages", {MEMINFO: POOL.format(9999)}, {"dram_bytes": 8 * GIB + 4096}),
        (NOT_APPLICABLE, "thp", {MEMINFO: POOL.format(4096), SHMEM: "[never]"}, {}),
        (OK, "thp", {SHMEM: "always [advise] never"}, {}),
        (WARNING, "thp", {SHMEM: "always advise [never] deny"}, {}),
        (NOT_APPLICABLE, "thp", {}, {}),
        (NOT_APPLICABLE, "numa", {"/sys/devices/system/node/node0/cpulist": "0-3"}, {}),
        (OK, "numa", NODES | GPU | {"/proc/self/status": "Mems_allowed_list:\t1\n"}, {}),
        (WARNING, "numa", NODES | GPU | {"/proc/self/status": "Mems_allowed_list:\t0-1\n"}, {}),
        (OK, "numa", NODES | {"/proc/self/status": "Mems_allowed_list:\t0-1\n"}, {}),
        (NOT_APPLICABLE, "rdma", PORT, {"transport": "tcp"}),
        (OK, "rdma", PORT | UVERBS, {"transport": "nixl"}),
        (WARNING, "rdma", {}, {"transport": "nixl"}),
        (ERROR, "rdma", PORT, {"transport": "ucx"}),
        (WARNING, "rdma", PORT | DOWN | UVERBS, {"transport": "ucx"}),
        (ERROR, "rdma", DOWN | UVERBS, {"transport": "ucx"}),
        (ERROR, "rdma", {f"{IB}/ports/1/state": "4: ACTIVE"} | UVERBS, {"transport": "ucx"}),
        (NOT_APPLICABLE, "transport", {}, {"transport": "tcp"}),
        (ERROR, "transport", {}, {"transport": "nixl", "version": _version("")}),
        (OK, "transport", {}, {"transport": "nixl", "version": _version("1.5.1")}),
        (ERROR, "transport", {}, {"transport": "nixl", "version": _version("1.4.9")}),
        (OK, "transport", {}, {"transport": "ucx", "version": _version("0.52.0")}),
        (NOT_APPLICABLE, "disk", {}, {}),
        (OK, "disk", {}, _disk(GIB, True, None)),
        (OK, "disk", {}, _disk(GIB, None, None)),
        (OK, "disk", {}, _disk(GIB, True, (1, 400 * MIB))),
        (WARNING, "disk", {}, _disk(GIB, True, (1, 399 * MIB))),
        (WARNING, "disk", {}, _disk(GIB - 1, True, None)),
        (WARNING, "disk", {}, _disk(GIB, False, None)),
        (
            *(ERROR, "disk", {}),
            {"file": FileConfig(directory=Path("/none/a/b"), capacity_bytes=GIB)},
        ),
        (NOT_APPLICABLE, "clock", {}, {"is_clock_set": lambda: False}),
        (OK, "clock", {}, {"is_clock_set": lambda: True, "has_cluster": True}),
        (WARNING, "clock", {}, {"is_clock_set": lambda: False, "has_cluster": True}),
        (NOT_APPLICABLE, "certificates", {}, {}),
        (OK, "certificates", {}, {"tls": _ends_in(30.1)}),
        (WARNING, "certificates", {}, {"tls": _ends_in(29.9)}),
        (ERROR, "certificates", {}, {"tls_refusal": "--cert x expired"}),
        (OK, "vllm", {}, {"version": _version("0.32.0+cpu")}),
        (NOT_APPLICABLE, "vllm", {}, {"version": _version("")}),
        (ERROR, "vllm", {}, {"version": _version("0.31.9")}),
        (ERROR, "vllm", {}, {"version": _version("0.34.0")}),
        (NOT_APPLICABLE, "engine-flags", {}, {}),
        (OK, "engine-flags", _engine(*GOOD), {}),
        (WARNING, "engine-flags", _engine(*GOOD), _answers()),
        (OK, "engine-flags", _engine(*GOOD), _answers() | {"socket": "/run/kvstore/node.sock"}),
        (ERROR, "engine-flags", _engine(*SERVE, "--kv-transfer-config", TRANSFER), {}),
        (
            *(ERROR, "engine-flags"),
            _engine(*SERVE, *HASHES, "--kv-transfer-config.kv_connector=KVStoreConnector"),
            {},
        ),
        (
            *(OK, "engine-flags"),
            _engine(
                *(*SERVE, *HASHES, "--kv-transfer-config.kv_connector", "KVStoreConnector"),
                *("--kv-transfer-config.kv_load_failure_policy", "recompute"),
            ),
            {},
        ),
        (WARNING, "engine-flags", _engine(*SERVE), {}),
        (WARNING, "engine-flags", _engine(*SERVE, "--config", "a.yaml"), {}),
        (ERROR, "engine-flags", _engine(*GOOD, "--enable-sleep-mode"), {}),
        (WARNING, "engine-flags", _engine(*GOOD, environ=EXPANDABLE), {}),
        (OK, "engine-flags", _engine(*GOOD, "--enable-cumem-allocator", environ=EXPANDABLE), {}),
        (WARNING, "engine-flags", {"/proc/self/environ": EXPANDABLE}, {}),
        (OK, "engine-flags", _engine(*GOOD, environ="PYTHONHASHSEED=0\0"), {}),
        (
            *(WARNING, "engine-flags"),
            _engine(*GOOD, environ="PYTHONHASHSEED=0\0") | _engine(*GOOD, pid=8),
            {},
        ),
        (NOT_APPLICABLE, "node", {}, {}),
        (NOT_APPLICABLE, "node", _engine(*SERVE), {}),
        (WARNING, "node", _engine(*GOOD), {}),
        (WARNING, "node", _engine(*GOOD), {"socket": "/run/kvstore/node.sock"}),
        (WARNING, "node", {}, {"has_socket": True}),
        (OK, "node", {}, _answers()),
        (WARNING, "node", {}, _answers(tiers=[UNREADY])),
        (ERROR, "node", {}, _answers(tiers=[DRAM, OPEN])),
        (ERROR, "node", {}, _answers(unserved=[UNSERVED])),
        (ERROR, "node", {}, _answers(spaces=[SPACE])),
        (NOT_APPLICABLE, "hits", {}, _answers()),
        (NOT_APPLICABLE, "hits", {}, _answers(state=[{}])),
        (OK, "hits", {}, _answers(state=[{"hits": {"dram": 1}, "misses": {}}])),
        (
            WARNING,
            "hits",
            {},
            _answers(state=[{"hits": {}, "misses": {"other": 4}}], requests=[MISS]),
        ),
    ],
)
def test_a_check_in_each_state(
    verdict: str, name: str, files: dict[str, str], its: dict[str, Any], tmp_path: Path
) -> None:
    found = _judge(name, _machine(tmp_path, files, **its))
    assert found.verdict == verdict, found
    assert bool(found.mend) == (verdict in (WARNING, ERROR)), found
    assert found.finding


def test_each_thing_that_is_wrong_is_said_with_its_mend(tmp_path: Path) -> None:
    argv = (*SERVE, "--kv-transfer-config", TRANSFER, "--enable-sleep-mode")
    found = judge("engine-flags", _machine(tmp_path, _engine(*argv, environ=EXPANDABLE)))
    assert found == [
        Diagnosis(
            *(ERROR, "engine 7 hashes blocks in another way than other engines"),
            "--prefix-caching-hash-algo sha256_cbor",
        ),
        Diagnosis(ERROR, "engine 7 may unmap its KV cache", "drop --enable-sleep-mode"),
        Diagnosis(
            *(WARNING, "engine 7: vLLM refuses connectors with expandable_segments"),
            "unset PYTORCH_CUDA_ALLOC_CONF, or add --enable-cumem-allocator",
        ),
    ]


@pytest.mark.parametrize("named", ["b.sock", "../run/b.sock", "{}/run/b.sock", "{}/link/b.sock"])
def test_a_socket_is_the_file_that_an_engine_means_not_its_text(named: str, tmp_path: Path) -> None:
    extra = {"socket": named.format(tmp_path)}
    transfer = json.dumps(json.loads(TRANSFER) | {"kv_connector_extra_config": extra})
    argv = (*SERVE, *HASHES, "--kv-transfer-config", transfer)
    machine = _machine(tmp_path, _engine(*argv), **_answers(), socket=tmp_path / "run" / "b.sock")
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "proc/7/cwd").symlink_to(tmp_path / "run")
    assert _judge("engine-flags", machine).verdict == OK
    (tmp_path / "proc/7/cwd").unlink()
    (tmp_path / "proc/7/cwd").symlink_to(tmp_path / "proc")
    is_relative = named == "b.sock"
    assert _judge("engine-flags", machine).verdict == (WARNING if is_relative else OK)


def test_a_disk_that_is_not_used_is_explained_by_the_nodes_health(tmp_path: Path) -> None:
    text = "ok, but the disk tier in /x takes no writes: its file system is full: make room"
    full = msgspec.structs.replace(DISK, writes="open")
    said = "the disk tier in /x takes no writes: its file system is full"
    for more in "; engine e is not", ", and it serves without TLS (--insecure): mind", "":
        state = ANSWERS["state"][0] | {"health": {"is_ok": True, "text": text + more}}
        answers = _answers(tiers=[DRAM, full], state=[state])
        found = _judge("node", _machine(tmp_path, {}, **answers))
        assert found == Diagnosis(ERROR, said, "make room")
    found = _judge("node", _machine(tmp_path, {}, **_answers(tiers=[DRAM, full])))
    assert found.finding == "circuit breakers of the file tier: reads ok, writes off: errors"


def test_locked_memory_is_no_matter_for_a_process_with_the_capability(tmp_path: Path) -> None:
    files = {f"{IB}/node_type": "", "/proc/self/limits": LIMITS.format(65536)}
    for capabilities, verdict in {"0000000000004000": OK, "000000000000bfff": ERROR}.items():
        status = {"/proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\n"}
        assert _judge("memlock", _machine(tmp_path, files | status)).verdict == verdict


def test_the_pages_of_others_are_kept_by_the_mend(tmp_path: Path) -> None:
    found = _judge("huge-pages", _machine(tmp_path, {MEMINFO: USED}))
    assert found.mend == "sysctl vm.nr_hugepages=8192; --dram 8192MiB"


def test_every_symptom_names_checks_and_every_check_explains_some() -> None:
    named = [name for names in shell.SYMPTOMS.values() for name in names.split()]
    assert set(named) == CHECKS.keys()


def test_the_documented_checks_are_those_that_run() -> None:
    page = (ROOT / "kvstore/docs/guides/troubleshooting.md").read_text()
    for symptom, names in shell.SYMPTOMS.items():
        listed = ", ".join(f"`{name}`" for name in names.split())
        assert f"| `{symptom}` | {listed} |" in page


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
    files = {"/proc/self/cgroup": cgroup}
    for name, text in limits.items():
        limit = f"/sys/fs/cgroup/{at}{name}"
        files |= {limit: text, f"{limit.rpartition('/')[0]}/memory.stat": ""}
        files |= {re.sub("max$", "current", limit.replace("limit_in", "usage_in")): "2"}
    least = min(int(text) for text in limits.values() if text != "max") - 2
    found = _judge("memory", _machine(tmp_path, files))
    assert "; the memory cgroup /sys/fs/cgroup" in found.finding
    assert f"has {least} B available" in found.finding


@pytest.mark.parametrize("dram", ["15GiB", "64GiB"])
def test_the_size_that_doctor_names_is_one_that_a_node_takes(
    dram: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = _machine(tmp_path, {}, dram_bytes=size_of("dram", dram))
    mend = _judge("memory", machine).mend
    available = machine.available_memory()
    monkeypatch.setattr("kvstore.config.node.available_memory", lambda: available)
    if dram == "64GiB":
        with pytest.raises(ConfigError, match="the machine has available"):
            load_config(None, {"dram": dram})
    size = mend.removeprefix("--dram ")
    assert load_config(None, {"dram": size}).dram_bytes == size_of("dram", size)
    assert _judge("memory", _machine(tmp_path, {}, dram_bytes=size_of("dram", size))).verdict == OK


def test_a_container_without_cgroups_is_judged_by_the_machine(tmp_path: Path) -> None:
    assert memory_cgroups(tmp_path) == []
    assert "the machine has 16 GiB" in _judge("memory", _machine(tmp_path, {})).finding


def test_engines_are_found_by_their_command_lines(tmp_path: Path) -> None:
    transfer = ("--kv-transfer-config", TRANSFER)
    files = {
        **_engine(*SERVE, "--api-key", "secret", *transfer, pid=5, environ="TOKEN=secret\0"),
        **_engine("python3", "-m", "vllm.entrypoints.openai.api_server", *transfer, pid=6),
        **_engine("vllm", "serve", "m", *transfer, pid=7),
        **_engine("bash", "-c", "vllm serve m", pid=8),
        **_engine("VLLM::EngineCore", pid=9),
    }
    machine = _machine(tmp_path, files)
    (tmp_path / "proc" / "10").mkdir()  # it ends
    assert list(machine.engines) == ["5", "6", "7"]
    found = [judge(name, machine) for name in CHECKS]
    assert "engine 6" in str(found)
    assert "secret" not in str(found)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole fake one, on which all is well."""
    files = {RELEASE: "6.1.0", MEMINFO: NO_POOL, "/proc/self/environ": "", SHMEM: "[advise]"}
    _write(tmp_path / "root", files)
    monkeypatch.setattr(shell, "_ROOT", tmp_path / "root")
    return tmp_path / "root"


def _run(*arguments: str) -> Any:
    given = ["doctor", "--dram", "8GiB", "--socket", "/none/node.sock", *arguments]
    return CliRunner().invoke(cli, given)


def test_exit_status_and_json_follow_the_worst_finding(machine: Path) -> None:
    done = _run("--json", "--symptom", "memory")
    found = json.loads(done.output)
    assert (done.exit_code, found["verdict"], found["symptom"]) == (0, "ok", "memory")
    assert [row["check"] for row in found["checks"]] == shell.SYMPTOMS["memory"].split()
    assert {*found["checks"][0]} == {"check", "verdict", "finding", "mend"}
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
    real = Path.read_text

    def refuse(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == "shmem_enabled" or path.parts[-2:] == ("7", "environ"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *how, **more)

    _write(machine, _engine(*SERVE, "--kv-transfer-config", TRANSFER, "--enable-sleep-mode"))
    monkeypatch.setattr(Path, "read_text", refuse)
    done = _run()
    assert f"warning  thp           not readable: {machine}{SHMEM}" in done.output
    assert "engine-flags  engine 7 may unmap its KV cache" in done.output
    assert f"engine-flags  not readable: {machine}/proc/7/environ" in done.output
    assert done.exit_code == 2


def _measured(tmp_path: Path, file: FileConfig) -> Any:
    machine = _machine(tmp_path / "root", {})
    machine.with_rate = True
    return machine.disk(file)


def test_a_disk_is_measured_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "RATE_BYTES", 4 * MIB)
    (tmp_path / "disk").mkdir()
    file = FileConfig(directory=tmp_path / "disk", capacity_bytes=64 * MIB)
    room_bytes, is_direct, rates = _measured(tmp_path, file)
    assert room_bytes > 64 * MIB
    assert is_direct
    assert min(rates) > 0
    assert _machine(tmp_path / "root", {}).disk(file)[2] is None
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(doctor_checks, "disk_rates", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _measured(tmp_path, file)
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(file.directory) == []


def test_a_file_system_without_unnamed_files_or_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = FileConfig(directory=tmp_path / "disk", capacity_bytes=64 * MIB)
    monkeypatch.setattr("fcntl.fcntl", mock.Mock(side_effect=OSError(22, "Invalid argument")))
    assert _measured(tmp_path, file)[1:] == (False, None)
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # a directory cannot be opened to write
    assert _measured(tmp_path, file)[1:] == (None, None)


def test_a_disk_without_room_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.config.machine.file_system_free_bytes", lambda _: 100 * MIB)
    file = FileConfig(directory=tmp_path / "disk", capacity_bytes=64 * MIB)
    assert _measured(tmp_path, file)[2] is None
    gone = FileConfig(directory=tmp_path / "a" / "b", capacity_bytes=64 * MIB)
    found = _judge("disk", _machine(tmp_path / "root", {}, file=gone))
    assert "give --file another directory" in found.mend


@pytest.mark.parametrize("shared", [False, True])
def test_a_directory_that_the_node_would_refuse_is_an_error(
    tmp_path: Path, *, shared: bool
) -> None:
    (tmp_path / "disk").mkdir()
    file = FileConfig(tmp_path / "disk", 64 * MIB, shared=shared, node="n" * shared)
    assert _judge("disk", _machine(tmp_path / "root", {}, file=file)).verdict is OK
    (tmp_path / "disk" / "store").write_bytes(b"of a single node")
    (file.home / "notes.txt").parent.mkdir(exist_ok=True)
    (file.home / "notes.txt").touch()
    if not shared:
        (tmp_path / "disk" / "store").unlink()
    found = _judge("disk", _machine(tmp_path / "root", {}, file=file))
    assert found.verdict is ERROR
    assert ("single node" if shared else "holds other files") in found.finding


def test_a_shared_directory_has_the_part_of_the_node_in_the_certificate(tmp_path: Path) -> None:
    files = Lab(tmp_path / "pki").files("node", "n1")
    tls = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
    flags = tls | {"dram": "8GiB", "index": ["127.0.0.1:1"], "file": "/mnt/x:1GiB,shared"}
    machine = Machine(load_settings(None, flags, NodeSettings), tmp_path)
    assert machine.file is not None
    assert machine.file.home == Path("/mnt/x/n1")

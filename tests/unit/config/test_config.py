"""Flags and YAML to one checked tree; every mistake is one sentence that says how to mend it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvstore import arena
from kvstore.config import machine, node as config_module, reading
from kvstore.config.machine import (
    available_memory,
    file_system_bytes,
    refuse_what_cannot_hold,
    warn_of_too_little_room,
)
from kvstore.config.node import EventsConfig, load_config
from kvstore.config.values import HostPort
from kvstore.errors import ConfigError
from kvstore.installation import lacking
from kvstore.tiers.file.config import AUTO, CAPACITY_BYTES_MIN, FileConfig, ScrubRate
from kvstore.units import GIB, KIB, MIB

LEAST = {"dram": "1MiB", "metrics": "off"}


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "available_memory", lambda: (8 * GIB, "the machine"))
    monkeypatch.setattr(arena, "huge_page_pool", lambda: (0, 2 * MIB))
    monkeypatch.setattr(machine, "file_system_bytes", lambda _: 4 << 40)


pytestmark = pytest.mark.usefixtures("plenty")


def test_defaults() -> None:
    config = load_config(None, {})
    assert config.socket == Path("/run/kvstore/node.sock")
    assert config.dram_bytes == 4 * GIB
    assert config.dram_note == "half of the 8 GiB that the machine has available"
    assert config.slab_bytes == 64 * MIB
    assert config.metrics == HostPort(host="127.0.0.1", port=9464)
    assert config.published is None
    assert config.quotas == ()
    assert config.allow_uid == {os.geteuid(), 0}
    assert config.log_level == "info"
    assert config.policy == "lru"
    assert config.file_admission == "all"
    assert config.file_writes_per_day is None


def test_what_to_keep_and_what_to_write(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("policy: reuse\nfile: /x:1TiB\nfile-writes-per-day: 200GiB\n")
    config = load_config(file, LEAST | {"file-admission": "second-sight"})
    assert config.policy == "reuse"
    assert config.file_admission == "second-sight"
    assert config.file_writes_per_day == 200 * GIB


def test_a_file_tier_and_a_shared_one() -> None:
    own = load_config(None, LEAST | {"file": "/var/lib/kvstore:2TiB"}).disk
    assert own is not None
    assert (own.directory, own.capacity_bytes, own.shared) == (
        Path("/var/lib/kvstore"),
        2 << 40,
        False,
    )
    shared = load_config(None, LEAST | {"file": "/mnt/a:b:1GiB,shared", "node-name": "n7"}).disk
    assert shared is not None
    assert (shared.home, shared.shared) == (Path("/mnt/a:b/n7"), True)
    assert load_config(None, LEAST).disk is None


def test_a_relative_file_path_is_seen_from_where_the_node_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = load_config(None, LEAST | {"file": "files:1GiB"}).disk
    assert relative is not None
    assert relative.home == tmp_path / "files"


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("dram: 2GiB\nslab: 1MiB\nmetrics: off\nallow-uid: [5, 6]\nlog-level: debug\n")
    config = load_config(file, {"dram": "3GiB", "slab": None, "allow-uid": None})
    assert (config.dram_bytes, config.slab_bytes, config.metrics) == (3 * GIB, MIB, None)
    assert config.allow_uid == {5, 6, os.geteuid()}
    assert config.log_level == "debug"


@pytest.mark.parametrize(
    ("dram", "slab", "dram_bytes", "slab_bytes"),
    [
        ("256KiB", "auto", 256 * KIB, 64 * KIB),
        ("300KiB", "auto", 256 * KIB, 64 * KIB),
        ("1000000", "auto", 960 * KIB, 192 * KIB),
        (1 << 20, "auto", MIB, 256 * KIB),
        ("8GiB", "auto", 8 * GIB, 64 * MIB),
        ("1MiB", "128KiB", MIB, 128 * KIB),
        ("1MiB", "1MiB", MIB, MIB),
    ],
)
def test_sizes(dram: str | int, slab: str, dram_bytes: int, slab_bytes: int) -> None:
    config = load_config(None, LEAST | {"dram": dram, "slab": slab})
    assert (config.dram_bytes, config.slab_bytes) == (dram_bytes, slab_bytes)


@pytest.mark.parametrize(
    ("scrub", "rate"),
    [
        ("auto", AUTO),
        ("64MiB", ScrubRate(64 * MIB, daily=False)),
        (1 << 20, ScrubRate(MIB, daily=False)),
        ("off", None),
        (False, None),
    ],
)
def test_the_scrub_is_that_of_memory_and_disk(scrub: Any, rate: ScrubRate | None) -> None:
    config = load_config(None, LEAST | {"scrub": scrub, "file": "/x:1GiB"})
    assert config.scrub_rate == rate
    assert config.disk is not None
    assert config.disk.scrub == rate
    assert load_config(None, LEAST).scrub_rate == AUTO


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"dram": "9GiB"}, "more than the 8 GiB that the machine has available: choose a smaller"),
        ({"dram": "64"}, "--dram 64 is too small: give at least 256 KiB"),
        ({"dram": "64G"}, "'64G' is not a size: write a number and a unit (B, KiB, MiB"),
        ({"dram": "-1"}, "is not a size"),
        ({"dram": "9" * 400}, "is more than any machine has"),
        ({"dram": [1]}, "configuration: dram must be a number or a text, not a list"),
        ({"allow-uid": ["vllm"]}, "allow-uid 'vllm' must be a numeric user id, such as 1000: 'id"),
        ({"socket": ""}, "socket must be a path, such as /run/kvstore/node.sock"),
        ({"metrics-beyond-loopback": 1.5}, "must be true or false, not a fraction"),
        ({"slab": "2MiB"}, "must be a multiple of 64 KiB and at most dram, 1 MiB"),
        ({"slab": "65KiB"}, "must be a multiple of 64 KiB"),
        ({"slab": "0"}, "must be a multiple of 64 KiB"),
        ({"scrub": "fast"}, "scrub 'fast' must be the bytes to read per second and tier"),
        ({"scrub": "1KiB"}, "at least 64 KiB, such as 64MiB, or auto, or off"),
        ({"scrub": True}, "such as 64MiB, or auto, or off"),
        ({"file": "/x:1GiB,mine"}, "ends in 'mine': only 'shared' may stand there"),
        ({"file": "/x:1MiB"}, "the disk tier needs at least 2 MiB"),
        ({"file": "/x:5TiB"}, "more than the 4 TiB that the file system of /x has"),
        ({"file": "/x:1GiB,shared", "node-name": "a/b"}, "a shared disk tier needs a node name"),
        *(({"hbm": text}, "must be SIZE or SIZE,gpu=N, such as") for text in ("0:1GiB", "1GiB,1")),
        ({"file": "/x"}, "must be PATH:SIZE or PATH:SIZE,shared, such as"),
        (
            {"node-name": "n7"},
            "node-name is for a shared directory, for events and for a cluster: add",
        ),
        ({"file": "/x:1GiB", "node-name": "n7"}, "node-name is for a shared directory"),
        (
            {"file": "/x:1GiB,shared", "node-name": "n" * 300},
            f"begins with '{'n' * 32}' has 300 characters, more than the 128",
        ),
        (
            {"file": "/x/y:1GiB"},
            "disk tier in /x/y: /x does not exist: mount its disk, make it, or",
        ),
        ({"file": f"{__file__}:1GiB"}, f"{__file__} is a file, not a directory: give --file a"),
        ({"file": f"{__file__}/x:1GiB"}, f"{__file__} is a file, not a directory: give --file a"),
        ({"file": "/x:big"}, "file: 'big' is not a size"),
        ({"quota": {"llama": 30}}, "quota llama=30 is 30 B, less than any block"),
        ({"policy": "fifo"}, "policy 'fifo' must be one of lru, reuse"),
        (
            {"file": "/x:1GiB", "file-admission": "some"},
            "file-admission 'some' must be one of all, second-sight",
        ),
        (
            {"file-admission": "second-sight"},
            "does nothing without --file: add that, or leave --file-",
        ),
        (
            {"file-writes-per-day": "1TiB"},
            "does nothing without --file: add that, or leave --file-",
        ),
        ({"file": "/x:1GiB", "file-writes-per-day": "much"}, "'much' is not a size"),
        (
            {"file": "/x:1GiB", "file-writes-per-day": "511KiB"},
            "is too small: give at least 512 KiB, two slabs, with its unit, such as 1TiB",
        ),
        ({"metrics": "0.0.0.0:9464"}, "can be read from other machines"),
        ({"metrics": "10.0.0.3:9464"}, "--metrics-beyond-loopback"),
        ({"metrics": "9464"}, "must be an IP address and a port"),
        ({"metrics": "127.0.0.1:99999"}, "must be an IP address and a port"),
        ({"metrics": "example.org:1"}, "must be an IP address and a port"),
        ({"metrics": True}, "must be an IP address and a port"),
        (
            {"trace": "127.0.0.1:4317"},
            "must be http://HOST:PORT or https://HOST:PORT of a collector",
        ),
        ({"trace": "grpc://127.0.0.1:4317"}, "such as http://127.0.0.1:4317"),
        ({"trace": "http://127.0.0.1"}, "must be http://HOST:PORT"),
        ({"trace": "http://127.0.0.1:4317/v1/traces"}, "must be http://HOST:PORT"),
        ({"trace": "http://u:p@127.0.0.1:4317"}, "must be http://HOST:PORT"),
        ({"trace": "http://127.0.0.1:4317\n"}, "must be http://HOST:PORT"),
        (
            {"trace": "http://10.0.0.3:4317"},
            "names of models and tenants: use https://, a collector",
        ),
        ({"trace": "http://otel.example:4317"}, "or --insecure"),
        ({"trace-sample": 5}, "--trace-sample does nothing without --trace: add that"),
        ({"trace": "http://127.0.0.1:4317", "trace-sample": 101}, "a number from 0 to 100"),
        ({"events": "tcp://0.0.0.0:5557"}, "can be read from other machines: use 127.0.0.1 or ipc"),
        ({"events": "tcp://10.0.0.3:5557"}, "or add --insecure if intended"),
        ({"events": "127.0.0.1:5557"}, "must be ipc:///PATH or tcp://ADDRESS:PORT, such as ipc://"),
        ({"events": "tcp://*:5557"}, "must be ipc:///PATH or tcp://ADDRESS:PORT"),
        ({"events": "tcp://127.0.0.1:65535"}, "must be ipc:///PATH or tcp://ADDRESS:PORT"),
        ({"events": "ipc://events"}, "must be ipc:///PATH or tcp://ADDRESS:PORT"),
        ({"events": "inproc://x"}, "must be ipc:///PATH or tcp://ADDRESS:PORT"),
        ({"events": True}, "must be ipc:///PATH or tcp://ADDRESS:PORT"),
        ({"events": "ipc:///" + "x" * 105}, "choose a shorter one"),
        ({"engine-events": ["e=ipc:///x"]}, "engine-events does nothing without --index"),
        ({"event-hashes": "int"}, "--event-hashes does nothing without --events: add that"),
        (
            {"events": "ipc:///x", "event-hashes": "hex"},
            "event-hashes 'hex' must be one of bytes, int",
        ),
        (
            {"quota": {"llama": "60%", "qwen": "50%"}},
            "quotas reserve 1.1 MiB, more than dram has, 1",
        ),
        ({"quota": {"llama": "lots"}}, "quota: 'lots' is not a size"),
        ({"quota": {"llama": "0%"}}, "quota llama=0% must be NAME=SHARE, such as llama=30%"),
        ({"quota": {"llama": ""}}, "quota llama must be NAME=SHARE, such as llama=30%"),
        ({"quota": {"": "30%"}}, "must be NAME=SHARE"),
        ({"quota": {str(n): "1%" for n in range(65)}}, "65 quotas are more than 64: give fewer"),
        ({"quota": ["llama"]}, "quota must be a mapping or empty, not a list"),
        ({"log-level": "loud"}, "log-level 'loud' must be one of debug, error, info, warning"),
        ({"allow-uid": [-1]}, "allow-uid '-1' must be a numeric user id"),
        ({"allow-uid": 0xFFFF_FFFF}, "allow-uid '4294967295' must be a numeric user id"),
        ({"allow-uid": []}, "must name numeric user ids"),
        ({"socket": "/" + "x" * 110}, "choose a shorter one"),
        ({"sokcet": "/x"}, "unknown key 'sokcet': did you mean 'socket'?"),
    ],
)
def test_what_cannot_work_says_so(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, LEAST | wrong)
    text = str(caught.value)
    assert sentence in text
    assert "\n" not in text
    assert "$" not in text, "no path notation of a library"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("dram: [\n", "is not YAML"),
        ("dram: 1GiB\n slab: 2MiB\n", "is not YAML: line 2, column 6: mapping values are not"),
        ("- dram\n", "must hold lines such as 'log-level: info'"),
        ("1: 2\n", "must hold lines such as"),
        ("dram_size: 1GiB\n", "unknown key 'dram_size'"),
        ("!!python/object/apply:os.system ['true']\n", "is not YAML"),
        ("dram: \xff", "is not YAML"),
        ("{a: " * 2_000, "is nested too deeply"),
        ("dram: 2024-13-45\n", "is not YAML: month must be"),
        ("dram: 64MiB\nallow-uid: 1000\nallow-uid: 5\n", "'allow-uid' twice"),
    ],
)
def test_a_yaml_file_that_is_wrong_says_so(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "node.yaml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load_config(file, LEAST)
    assert sentence in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_yaml_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml", LEAST)


def test_an_empty_yaml_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("# nothing yet\n")
    assert vars(load_config(file, LEAST)) == vars(load_config(None, LEAST))


@pytest.mark.parametrize("metrics", ["localhost:1", "127.0.0.1:1", "[::1]:1"])
def test_loopback_needs_no_opt_in(metrics: str) -> None:
    http = load_config(None, LEAST | {"metrics": metrics}).metrics
    assert http is not None
    assert http.port == 1


def test_a_pods_address_needs_the_opt_in() -> None:
    settings = LEAST | {"metrics": "10.0.0.3:9464", "metrics-beyond-loopback": True}
    assert load_config(None, settings).metrics == HostPort(host="10.0.0.3", port=9464)


@pytest.mark.parametrize(
    ("address", "endpoint", "replay"),
    [
        ("ipc:///run/x", "ipc:///run/x", "ipc:///run/x.replay"),
        ("tcp://localhost:5557", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ("tcp://[::1]:0", "tcp://[::1]:*", "tcp://[::1]:*"),
    ],
)
def test_events_and_their_replay(address: str, endpoint: str, replay: str) -> None:
    events = load_config(None, LEAST | {"events": address, "node-name": "n7"}).published
    assert events == EventsConfig(
        endpoint=endpoint,
        replay_endpoint=replay,
        node="n7",
        beyond_loopback=False,
        whole_hashes=False,
    )


def test_events_for_other_machines_need_the_opt_in() -> None:
    settings = {"events": "tcp://10.0.0.3:5557", "insecure": True, "event-hashes": "bytes"}
    events = load_config(None, LEAST | settings).published
    assert events is not None
    assert (events.beyond_loopback, events.whole_hashes) == (True, True)


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("http://127.0.0.1:4317/", {}),
        ("http://localhost:4317", {}),
        ("http://[::1]:4317", {}),
        ("https://otel.example:4317", {}),
        ("http://otel.example:4317", {"insecure": True}),
    ],
)
def test_traces_go_to_this_machine_or_by_tls(url: str, more: dict[str, Any]) -> None:
    config = load_config(None, LEAST | {"trace": url} | more)
    assert (config.trace, config.trace_sample) == (url.rstrip("/"), 100)
    assert load_config(None, LEAST | {"trace": ""}).trace is None


def test_traces_without_their_library_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "is_installed", lambda _: False)
    assert load_config(None, LEAST).trace is None
    with pytest.raises(ConfigError) as caught:
        load_config(None, LEAST | {"trace": "http://127.0.0.1:4317"})
    exporter = "opentelemetry-exporter-otlp-proto-grpc"
    assert str(caught.value) == lacking("--trace", exporter, "trace")
    assert "pip install" in str(caught.value)


def test_quotas_are_parts_or_sizes() -> None:
    settings = {"dram": "1MiB", "quota": {"meta/llama": "12.5%", "team": "256KiB", "x": 65536}}
    config = load_config(None, LEAST | settings)
    assert config.quotas == (("meta/llama", 128 * KIB), ("team", 256 * KIB), ("x", 64 * KIB))


def test_huge_pages_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "huge_page_pool", lambda: (16 * GIB, 2 * MIB))
    assert load_config(None, LEAST | {"dram": "16GiB"}).dram_bytes == 16 * GIB


# ── what is available ────────────────────────────────────────────────────────────────────────────


def cgroup(directory: Path, *, limit: str, usage: int, stat: str, v2: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if v2 else CGROUP_V1
    for name, text in zip((*names, "memory.stat"), (limit, str(usage), stat), strict=True):
        (directory / name).write_text(text)


CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize("v2", [True, False])
def test_the_tightest_cgroup_counts_and_its_droppable_cache_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, v2: bool
) -> None:
    outer, inner = tmp_path / "a", tmp_path / "a" / "b"
    stat = "inactive_file 100\n" if v2 else "inactive_file 5\ntotal_inactive_file 100\n"
    unlimited = "max" if v2 else str(2**63 - 4096)
    cgroup(inner, limit=unlimited, usage=700, stat=stat, v2=v2)
    cgroup(outer, limit="1000", usage=700, stat=stat, v2=v2)
    names = ("memory.max", "memory.current") if v2 else CGROUP_V1
    levels = [(path, *names) for path in (inner, outer, tmp_path)]
    monkeypatch.setattr(machine, "memory_cgroups", lambda *_: levels)
    assert available_memory() == (400, f"the memory cgroup {outer}")


def test_a_file_system_is_found_by_a_path_that_is_not_there_yet(tmp_path: Path) -> None:
    for name in ("new", "a" * 300, "a\0b"):
        assert file_system_bytes(tmp_path / name / "deeper") == file_system_bytes(tmp_path)


def test_this_machine_has_memory() -> None:
    size, source = available_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < size <= total
    assert source.startswith(("the machine", "the memory cgroup /"))


# ── a disk that cannot hold the file tier ─────────────────────────────────────────────────────────


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileConfig:
    """200 GiB of it are wanted, 76 GiB are free."""
    free(monkeypatch, 76 * GIB)
    monkeypatch.setattr(machine, "file_system_bytes", lambda _: 1000 * GIB)
    return FileConfig(directory=tmp_path / "tier", capacity_bytes=200 * GIB)


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(machine, "file_system_free_bytes", lambda _: size)


def hold(directory: Path, size: int) -> None:
    directory.mkdir()
    (directory / "segment").write_bytes(bytes(size))


def test_too_little_room_is_a_warning_with_the_numbers(
    disk: FileConfig, caplog: pytest.LogCaptureFixture
) -> None:
    hold(disk.directory, 64 * KIB)
    refuse_what_cannot_hold(disk)
    warn_of_too_little_room(disk)
    (line,) = caplog.messages
    assert "may grow to 200 GiB, but has 64 KiB and its file system 76 GiB free" in line


def test_what_is_there_already_counts(
    disk: FileConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that starts again on a disk that it has filled itself."""
    hold(disk.directory, 64 * KIB)
    free(monkeypatch, 200 * GIB - 64 * KIB)
    warn_of_too_little_room(disk)
    assert not caplog.messages
    free(monkeypatch, CAPACITY_BYTES_MIN - 64 * KIB)
    refuse_what_cannot_hold(disk)


def test_a_full_disk_is_refused(disk: FileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, CAPACITY_BYTES_MIN - 1)
    with pytest.raises(ConfigError, match="its file system is full: make room for at least 2 MiB"):
        refuse_what_cannot_hold(disk)


def test_a_mount_that_did_not_come_up_is_refused(tmp_path: Path) -> None:
    """Else its directories would be made on the disk of the system."""
    file = FileConfig(directory=tmp_path / "nvme" / "tier", capacity_bytes=4 << 20)
    with pytest.raises(ConfigError, match=r"nvme does not exist: mount its disk, make it, or"):
        refuse_what_cannot_hold(file)
    shared = FileConfig(directory=tmp_path / "tier", capacity_bytes=4 << 20, shared=True, node="n")
    refuse_what_cannot_hold(shared)
    assert list(tmp_path.iterdir()) == []

"""The images, built and run: user 10001 without capabilities, on a root that nobody can write to.

Takes minutes, and pip needs a package index: `make images`, and part of `make nightly`. Does not
cover: the official base image, which needs a registry; the base here is the same Debian with its
own Python of the same version.
"""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvstore.testing.raw_engine import RawEngine
from tests.amounts import IS_NIGHTLY
from tests.kit.images import BASE, RECIPE, SOURCE, Container, Storage
from tests.kit.programs import need
from tests.kit.router_thread import ASK, ask
from tests.kit.scripted_worker import ScriptedWorker
from tests.unit.deploy.test_images import LABELS, ROLES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # an end within two seconds is measured
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not IS_NIGHTLY, reason="it takes minutes: make images, make nightly"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a Debian and mounts"),
]

NODE_MB_MAX: Final = 500
END_S: Final = 2.0
USER: Final = 10001
COMPILERS: Final = {"gcc", "cc", "g++", "c++", "clang", "tcc", "as", "ld", "make", "cargo", "go"}


def mounts() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    need("buildah")
    need("debootstrap")
    before = sorted(mounts())
    folder = tmp_path_factory.mktemp("images")
    with Storage(folder) as made:
        yield made
    assert not folder.exists()
    assert sorted(mounts()) == before


def config(storage: Storage, role: str) -> dict[str, Any]:
    found: dict[str, Any] = storage.image(storage.build(role))["OCIv1"]["config"]
    return found


def page(container: Container, name: str) -> str:
    base = container.metrics_url.removesuffix("/metrics")
    with urllib.request.urlopen(f"{base}/{name}", timeout=30) as answer:
        return str(answer.read().decode())


def volume(folder: Path, mode: int = 0o700) -> Path:
    """A folder of the image's user, as a named volume is one."""
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, USER, USER)
    return folder


def assert_confined(container: Container, writable: set[str]) -> None:
    """Every process: the user, no capability, none to be had, a root that is read-only."""
    for process in container.processes:
        proc = Path(f"/proc/{process.pid}")
        status = dict(re.findall(r"^(\w+):\t(.+)$", (proc / "status").read_text(), re.MULTILINE))
        assert status["Uid"].split() == status["Gid"].split() == [str(USER)] * 4
        assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {
            0
        }
        assert (status["NoNewPrivs"], status.get("Groups", "").strip()) == ("1", "")
        rows = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
        places = {row[4] for row in rows if "rw" in row[5].split(",")}
        devices = {f"/dev/{name}" for name in ("null", "zero", "random", "urandom")}
        assert places - devices == {"/proc", "/tmp", "/dev/shm", *writable}


def megabytes(root: Path) -> float:
    """Of all files, each once."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(root):
        for name in names:
            status = (Path(place) / name).lstat()
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values()) / 1e6


# ── what is in them ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", ROLES)
def test_an_image_has_nothing_to_build_or_to_raise_privileges_with(
    storage: Storage, role: str
) -> None:
    root = storage.root(storage.build(role))
    programs = {path.name for path in root.glob("usr/*bin/*")} | {
        path.name for path in root.glob("usr/local/*bin/*")
    }
    assert "env" in programs
    assert programs & COMPILERS == set()
    assert {path.name for path in (root / "opt/kvstore/bin").glob("pip*")} == set()
    modes = [
        (path, path.lstat().st_mode)
        for place, _, names in os.walk(root)
        for path in (Path(place) / name for name in names)
    ]
    assert [path for path, mode in modes if mode & 0o6000 and path.is_file()] == []
    assert not (root / "src").exists()
    assert list((root / "root").glob(".cache/*")) == []


def test_a_role_has_its_own_packages_only(storage: Storage) -> None:
    having = {
        package: {
            role
            for role in ROLES
            if any(
                storage.root(storage.build(role)).glob(
                    f"opt/kvstore/lib/python3*/site-packages/{package}"
                )
            )
        }
        for package in (
            *("grpc", "llvmlite", "zmq", "redis", "aiohttp", "nixl_cu13", "nixl_ep_*"),
            *("cuda", "nvidia"),
        )
    }
    assert having == {
        "grpc": {"node", "index", "router"},
        "llvmlite": {"index"},
        "redis": {"index"},
        "zmq": {"node"},
        "nixl_cu13": {"node"},
        "aiohttp": {"router"},
        **{package: set() for package in ("nixl_ep_*", "cuda", "nvidia")},
    }


def test_the_node_is_small(storage: Storage) -> None:
    sizes = {role: round(megabytes(storage.root(storage.build(role)))) for role in ROLES}
    print(f"\nMB with a base of debootstrap: {sizes}")  # noqa: T201
    assert sizes["node"] < NODE_MB_MAX


def test_a_node_for_gpus_has_their_compiler(storage: Storage) -> None:
    """Which needs no GPU itself."""
    asks = "from kvstore.kernels.launches import compiled; print(compiled('move', 'sm_90')[0][:4])"
    image = storage.build("node", gpu=1)
    assert storage.run(image, "python", "-c", asks) == r"b'\x7fELF'"
    print(f"\nMB with GPU=1: {megabytes(storage.root(image)):.0f}")  # noqa: T201


@pytest.mark.parametrize("role", ROLES)
def test_labels_name_base_and_source(storage: Storage, role: str) -> None:
    prefix = "org.opencontainers.image."
    found = {
        name.removeprefix(prefix): text
        for name, text in config(storage, role)["Labels"].items()
        if name.startswith(prefix)
    }
    assert found.keys() == LABELS
    assert found["base.name"] == BASE
    assert found["base.digest"] == storage.digest
    assert (found["title"], found["source"]) == (f"kvstore-{role}", SOURCE)
    (tag,) = re.findall(r"^ARG PYTHON_IMAGE=\S+python:(\S+)-slim", RECIPE.read_text(), re.MULTILINE)
    assert storage.run(storage.build(role), "python", "--version").startswith(f"Python {tag}.")


@pytest.mark.parametrize("role", ROLES)
def test_buildah_runs_them_without_capabilities(storage: Storage, role: str) -> None:
    assert storage.run(storage.build(role), "kvstore", "--version").startswith("kvstore")
    assert f"Usage: kvstore {role}" in storage.run(storage.build(role), "kvstore", role, "--help")


# ── what they do ─────────────────────────────────────────────────────────────────────────────────


def test_the_node_serves_an_engine_from_a_read_only_root(storage: Storage, tmp_path: Path) -> None:
    run = volume(tmp_path / "run", 0o711)
    blocks = volume(tmp_path / "blocks")
    root, told = storage.root(storage.build("node")), config(storage, "node")
    arguments = [
        *("node", "--socket", "/run/kvstore/node.sock", "--dram", "64MiB", "--allow-uid", "0"),
        *("--file", "/var/lib/kvstore:64MiB", "--metrics", "127.0.0.1:0", "--node-name", "n1"),
        *("--index", "127.0.0.1:1", "--peer-listen", "127.0.0.1:0", "--transport", "nixl"),
        "--insecure",
    ]
    keys = [bytes([n]) * 32 for n in range(4)]
    places = {run: "/run/kvstore", blocks: "/var/lib/kvstore"}
    with Container.start(root, told, arguments, volumes=places, log=tmp_path / "node.log") as node:
        with RawEngine(run / "node.sock") as engine:
            engine.open()
            engine.store(keys)
            reply = engine.lease_stored(keys)
            assert len(engine.read(reply)) == len(keys)
            engine.release(reply)
        assert page(node, "healthz").startswith("ok")
        assert re.search(r"^kvstore_blocks\b.* [1-9]", page(node, "metrics"), re.MULTILINE)
        assert len(node.processes) >= 2, "supervisor and node"
        assert_confined(node, set(places.values()))
        assert node.terminated(END_S) == 0, node.log
    assert any(blocks.iterdir()), "the disk tier lies in its volume"


def test_the_index_runs_from_a_read_only_root(storage: Storage, tmp_path: Path) -> None:
    root, told = storage.root(storage.build("index")), config(storage, "index")
    arguments = ["index", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--insecure"]
    with Container.start(root, told, arguments, volumes={}, log=tmp_path / "index.log") as index:
        assert page(index, "healthz").startswith("ok")
        assert "kvstore_index_" in page(index, "metrics")
        assert_confined(index, set())
        assert index.terminated(END_S) == 0, index.log


def test_the_router_forwards_from_a_read_only_root(storage: Storage, tmp_path: Path) -> None:
    root, told = storage.root(storage.build("router")), config(storage, "router")
    with ScriptedWorker.start(tmp_path, "a") as worker:
        arguments = [
            *("router", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--insecure"),
            *("--worker", worker.flag, "--drain-delay", "0"),
        ]
        with Container.start(
            root, told, arguments, volumes={}, log=tmp_path / "router.log"
        ) as router:
            port = int(router.address.rpartition(":")[2])
            assert ask(port, ASK)[0] == 200
            assert page(router, "healthz").startswith("ok")
            assert "kvstore_router_" in page(router, "metrics")
            assert_confined(router, set())
            assert router.terminated(END_S) == 0, router.log

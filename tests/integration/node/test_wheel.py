"""What `make wheel` builds, installed where nothing else is: the node, its commands, one sentence
where the extra `node` is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvstore import __version__
from kvstore.__main__ import NODE_NEEDS
from kvstore.testing.process import NodeProcess

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).resolve().parents[3]
PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")
BASE: Final = {"cbor2", "msgspec", "numpy", "xxhash"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves folders in the tree that it builds."""
    source = tmp_path_factory.mktemp("source") / "kvstore"
    source.mkdir()
    for folder in ("kvstore", "connector", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    built = source.parent / "dist"
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^\t\$\(PIP\) (wheel .+)$", makefile, re.MULTILINE)
    assert recipe.endswith(" --wheel-dir dist .")
    command = [*PIP, *recipe.split()[:-2], str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = built.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and nothing else."""
    there = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", there], check=True)
    python = there / "bin" / "python"
    command = [*PIP, "--python", str(python), "install", "-qq", "--no-deps", str(wheel)]
    subprocess.run(command, check=True)
    return python


@pytest.fixture
def complete(installed: Path) -> Iterator[Path]:
    """The same with the packages of this environment: a test reaches no registry."""
    modules = {*NODE_NEEDS, *BASE} - {"google.protobuf"}
    specs = [importlib.util.find_spec(module) for module in modules]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    assert len(origins) == len(modules)
    purelib = _site_packages(installed)
    fetched = purelib / "fetched.pth"
    # Of such folders, no .pth is followed: an editable kvstore is not found through them.
    folders = sorted({str(Path(origin).parents[1]) for origin in origins})
    fetched.write_text("\n".join(folders) + "\n")
    yield installed
    fetched.unlink()


def _site_packages(python: Path) -> Path:
    base = str(python.parents[1])
    return Path(sysconfig.get_path("purelib", vars={"base": base, "platbase": base}))


def _kvstore(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The console script, from a folder that has no kvstore in it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python.with_name("kvstore"), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    assert wheel.name == f"kvstore_llm-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode().partition("\n\n")[0]
        names = archive.namelist()
    needs = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==).*$", text, re.MULTILINE)
    assert set(needs) == BASE
    assert "Provides-Extra: node" in text
    assert "Project-URL: " not in text, "nobody has registered an address of the project yet"
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"kvstore", "kvstore_llm"}
    assert {"kvstore/connector/vllm.py", "kvstore/kernels/host.py", "kvstore/py.typed"} <= {*names}
    sources = {f"kvstore/kernels/csrc/{file.name}" for file in (ROOT / "kernels/csrc").iterdir()}
    assert sources <= {*names}
    assert {f"kvstore/net/site/{name}" for name in ("index.html", "app.js", "app.css")} <= {*names}


def test_without_the_extra_a_command_says_what_to_install(
    installed: Path, wheel: Path, tmp_path: Path
) -> None:
    for arguments in (("node", "--dram", "1MiB"), ("inspect",)):
        done = _kvstore(installed, *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("kvstore: every command needs click, cryptography, ")
        assert done.stderr.endswith(f": pip install '{wheel}[node]'\n")


def test_what_is_installed_runs(complete: Path, tmp_path: Path) -> None:
    where = subprocess.run(
        [complete, "-c", "import kvstore.connector as c, kvstore; print(c.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(_site_packages(complete))
    made = _kvstore(complete, "certs", "pki", "--node", "n1", "--index", "i1", cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, f"made the directory {tmp_path / 'pki'}\n")
    assert (tmp_path / "pki" / "node-n1.key").exists()
    with NodeProcess.start(tmp_path, python=complete, program=("-P", "-m", "kvstore")) as node:
        for command in ("inspect", "explain", "top --once"):
            told = _kvstore(complete, *command.split(), "--socket", str(node.socket), cwd=tmp_path)
            assert (told.returncode, told.stderr) == (0, ""), command
        with urllib.request.urlopen(node.metrics_url.removesuffix("metrics")) as page:
            assert b'<script src="app.js" defer>' in page.read()
        assert node.stop() == 0

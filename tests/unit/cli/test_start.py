"""How a command begins: with what is installed, and with as few imports as it needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from kvstore import __main__ as program
from kvstore.cli.main import cli
from kvstore.installation import pip_install
from tests.style.tree import files

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"cryptography", "grpc", "msgspec", "numba", "numpy", "prometheus_client", "rich", "yaml"}

_ROOTS_IMPORTED = """
import contextlib, io, sys
sys.argv = ["kvstore", *{arguments!r}]
from kvstore.__main__ import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
print(*sys.modules)
"""
_BLOCK = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in {allowed!r} and root not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def _run(code: str) -> str:
    """What this code prints in a Python of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _names(requirements: list[str]) -> set[str]:
    return {Requirement(line).name for line in requirements}


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("--help", set[str]()),
        ("--version", set[str]()),
        *((f"{name} --help", set[str]()) for name in ("node", "index", "inspect", "explain")),
        *(
            (f"{name} --help", set[str]())
            for name in ("top", "clear", "upgrade", "fsck", "certs", "plan", "demo", "up")
        ),
        ("inspect everything", {"msgspec"}),
        ("certs /none", set[str]()),
        ("certs /none --node A!", {"cryptography"}),
        ("explain --socket /none/node.sock", {"grpc", "msgspec", "numpy", "rich"}),
        ("node --dram none", {"msgspec"}),
        ("node --index localhost:1 --peer-listen localhost:1", {"msgspec"}),
        (
            "node --index localhost:1 --ca /none --cert /none --key /none",
            {"msgspec", "cryptography"},
        ),
        ("node --config /none", {"msgspec", "yaml"}),
        ("index --listen none", {"msgspec"}),
        ("doctor --help", set[str]()),
        ("doctor --socket /none/node.sock", {"msgspec"}),
    ],
)
def test_a_command_imports_what_it_needs(command: str, needed: set[str]) -> None:
    modules = _run(_ROOTS_IMPORTED.format(arguments=command.split())).split()
    assert {module.partition(".")[0] for module in modules} & HEAVY <= needed
    assert not {"kvstore.engine.engine", "kvstore.node.node", "asyncio.streams"} & set(modules) or (
        "grpc" in needed
    )
    assert "kvstore.engine.engine" not in modules


def test_an_environment_without_the_extra_is_told_what_to_install() -> None:
    allowed = _names(PROJECT["dependencies"]) | {"kvstore"}
    code = _BLOCK.format(allowed=allowed) + "from kvstore.__main__ import main\nmain()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    lacking = ", ".join(program.NODE_NEEDS.values())
    assert done.stderr == (
        f"kvstore: every command needs {lacking}, not installed here: {pip_install('node')}\n"
    )


def test_what_is_looked_for_is_what_the_extra_installs() -> None:
    assert set(program.NODE_NEEDS.values()) == _names(PROJECT["optional-dependencies"]["node"])
    assert program.missing_packages() == []


def test_receipts_are_read_without_the_router_s_packages() -> None:
    node = {module.partition(".")[0] for module in program.NODE_NEEDS} | {"typing_extensions"}
    allowed = _names(PROJECT["dependencies"]) | node | {"kvstore"}
    assert not allowed & _names(PROJECT["optional-dependencies"]["router"])
    _run(_BLOCK.format(allowed=allowed) + "import kvstore.router.receipt_log")


def test_the_connector_needs_the_base_dependencies_only() -> None:
    allowed = _names(PROJECT["dependencies"]) | {"kvstore"}
    assert allowed == {"kvstore", "msgspec", "xxhash", "numpy", "cbor2"}
    # vllm.py and stats.py are about classes of the engine; the import rules of pyproject.toml hold
    # for what these two import.
    modules = [
        *_modules(ROOT / "connector", "kvstore.connector", but={"vllm", "stats"}),
        *_modules(ROOT / "kvstore" / "client" / "core", "kvstore.client.core"),
        *_modules(ROOT / "kvstore" / "wire", "kvstore.wire"),
        *_modules(ROOT / "kernels", "kvstore.kernels"),
        *("kvstore.client.link", "kvstore.index.chain"),
    ]
    assert len(modules) > 30
    _run(_BLOCK.format(allowed=allowed) + "\n".join(f"import {module}" for module in modules))


def _modules(folder: Path, package: str, but: frozenset[str] | set[str] = frozenset()) -> list[str]:
    stems = sorted(file.stem for file in folder.glob("*.py") if file.stem not in but)
    return [package if stem == "__init__" else f"{package}.{stem}" for stem in stems]


_BY_NAME = re.compile(
    r"(?i)(?<!helm )(?<!--)\binstall (?:-\S+ )*[`'\"]?kvstore(?:[-_]llm)?(?![\w/-])"
)
"""Nobody owns `kvstore-llm` on the public index, and `kvstore` there is another project."""
_PRODUCT = {"kvstore", "connector", "kernels"}


def test_no_sentence_has_pip_look_up_our_name() -> None:
    suffixes = {".md", ".py", ".yaml", ".toml", ".txt", "run", "Dockerfile", "Makefile"}
    folders = _PRODUCT | {"deploy", "requirements", "scripts", ".ci"}
    texts = {
        file: (ROOT / file).read_text()
        for file in files()
        if (file.suffix or file.name) in suffixes
        and (len(file.parts) == 1 or file.parts[0] in folders)
    }
    assert {"README.md", "deploy/images/Dockerfile", ".ci/run"} <= set(map(str, texts))
    texts = {file: re.sub(r"\*\*Never run `[^`]*`", "", text) for file, text in texts.items()}
    assert [file for file, text in texts.items() if _BY_NAME.search(text)] == []
    commands = {
        str(file)
        for file, text in texts.items()
        if file.parts[0] in _PRODUCT and file.suffix == ".py" and "pip install" in text
    }
    assert commands == {"kvstore/installation.py", "kvstore/cli/main.py"}, "one place makes them"


@pytest.mark.parametrize(
    "wrong",
    ["pip install 'kvstore-llm[node]'", "pip install --upgrade kvstore", "Install `kvstore-llm`"],
)
def test_a_sentence_with_our_name_is_seen(wrong: str) -> None:
    assert _BY_NAME.search(wrong)


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["--version"]])
def test_output_that_cannot_be_written_is_one_sentence(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "kvstore: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("at", ["kvstore.__main__.is_installed", "kvstore.cli.main.main"])
def test_ctrl_c_is_no_traceback_however_early(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at, mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="1"):
        program.main()


def test_a_module_that_cannot_be_read_is_one_sentence() -> None:
    code = """
import importlib.machinery as machinery, sys
real = machinery.SourceFileLoader.get_data
def get_data(loader, path):
    if "/config/settings." in path or "settings.cpython" in path:
        raise PermissionError(13, "Permission denied", path)
    return real(loader, path)
machinery.SourceFileLoader.get_data = get_data
from kvstore.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"kvstore: \S+/settings\.py cannot be read: install it .*\n", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        (["index", "--insecure"], "kvstore.indexer.replica.run_index"),
        (["router", "--worker", "a=http://127.0.0.1:1"], "kvstore.router.process.run_router"),
    ],
)
def test_a_server_has_its_limits_and_log_before_it_runs(arguments: list[str], run: str) -> None:
    calls = mock.Mock()
    with (
        mock.patch(run, calls.run),
        mock.patch("kvstore.net.process.harden_process", calls.harden),
        mock.patch("kvstore.obs.logs.setup", calls.log),
    ):
        done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert [call[0] for call in calls.mock_calls] == ["log", "harden", "run"]

"""README and the documentation say what is true: commands parse, tables agree, links lead on."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import msgspec
import pytest
from packaging.requirements import Requirement

from kvstore.cli.main import cli
from kvstore.config.transports import parse_transport
from kvstore.connector.config import ConnectorConfig, parse_config
from kvstore.obs.metrics import BY_NAME
from kvstore.units import GIB
from tests.docs.commands import index_config, is_name, node_config, parse
from tests.style.tree import ROOT, files

PAGES = [file for file in files() if file.suffix == ".md"]
DOCS = Path("kvstore/docs")
GUIDES = [
    *(Path(name) for name in ("README.md", "SECURITY.md", "deploy/README.md")),
    *(page for page in PAGES if DOCS in page.parents and page.parent != DOCS / "adr"),
]
"""Pages for users."""
GUIDES.remove(DOCS / "reference" / "cli.md")  # made by the command line itself
SETTINGS = DOCS / "reference" / "settings.md"
README_WORDS_MAX = 1200
_FENCE = re.compile(r"([^\n]*)\n```(python|bash|sh)\n(.*?)```", re.DOTALL)
_MARK = re.compile(r"<!-- not run: .{10,} -->")
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_IN_SENTENCE = re.compile(r"`(?:\S*/)?kvstore ([^`]+)`")
_METRIC = re.compile(r"(?<![\w:])kvstore_\w+(?![\w*])")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")


def _blocks(page: Path) -> list[tuple[str, str, str]]:
    """(line before, language, code) of every fenced block of Python or shell."""
    return _FENCE.findall((ROOT / page).read_text())


def _commands() -> list[list[str]]:
    """Every command line in the shell blocks of the pages for users."""
    commands = []
    for language, code in (block[1:] for page in GUIDES for block in _blocks(page)):
        if language != "python":
            lexer = shlex.shlex(code.replace("\\\n", " "), posix=True, punctuation_chars="\n")
            lexer.whitespace, lexer.whitespace_split = " \t", True
            line: list[str] = []
            for word in [*lexer, "\n"]:
                if set(word) != {"\n"}:
                    line.append(word)
                elif line:
                    commands.append(line)
                    line = []
    return commands


def _in_sentences(page: Path) -> list[list[str]]:
    """Arguments of every `kvstore …` outside of the fenced blocks."""
    text = _FENCED.sub("", (ROOT / page).read_text())
    return [shlex.split(found) for found in _IN_SENTENCE.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_code_block_runs_or_says_why_not(page: Path) -> None:
    for before, language, code in _blocks(page):
        if not _MARK.fullmatch(before):
            assert language == "python", f"say why this block is not run:\n{code}"
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    targets = _LINK.findall((ROOT / page).read_text())
    missing = [target for target in targets if not (ROOT / page.parent / target).exists()]
    assert not missing


def test_the_dependency_table_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {(Requirement(line).name, "base") for line in project["dependencies"]}
    for extra, lines in project["optional-dependencies"].items():
        wanted |= {(Requirement(line).name, f"`[{extra}]`") for line in lines}
    table = (ROOT / DOCS / "reference" / "dependencies.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| (base|`\[\w+\]`) \| .{5,} \|$", table, re.MULTILINE)
    assert sorted(rows) == sorted(wanted)


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS_MAX


def test_the_commands_of_the_guides_parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = set()
    monkeypatch.chdir(tmp_path)
    for program, *arguments in _commands():
        if program != "kvstore":
            continue
        name, _ = parse(arguments)
        seen.add(name)
        if name == "certs":  # which the commands behind it read
            cli.main(["certs", *arguments[1:]], prog_name="kvstore", standalone_mode=False)
        if name == "node":
            assert node_config(arguments[1:], monkeypatch).dram_bytes == 64 * GIB
        if name == "index":
            assert not index_config(arguments[1:]).replica.host.startswith("127.")
    assert seen == {
        *("certs", "index", "top", "node", "inspect", "explain", "clear", "upgrade", "fsck")
    }


def _look_at(arguments: list[str]) -> None:
    """Raises click.UsageError."""
    if not is_name(arguments):
        parse(arguments)


def _objection(arguments: list[str]) -> str:
    try:
        _look_at(arguments)
    except click.UsageError as error:
        return f"{arguments}: {error.format_message()}"
    return ""


@pytest.mark.parametrize("page", GUIDES, ids=str)
def test_commands_in_sentences_parse(page: Path) -> None:
    assert list(filter(None, map(_objection, _in_sentences(page)))) == []


def test_there_are_commands_in_sentences() -> None:
    assert len([found for page in GUIDES for found in _in_sentences(page)]) > 40


def test_the_keys_of_the_connector_are_in_the_table() -> None:
    row = re.compile(r"^\| `(\w+)` \| `?([^|`]+?)`? \| ", re.MULTILINE)
    fields = msgspec.structs.fields(ConnectorConfig)
    defaults = [(field.name, str(field.default).replace("False", "false")) for field in fields]
    assert sorted(row.findall((ROOT / SETTINGS).read_text())) == sorted(defaults)


def test_transports_that_are_named_are_taken() -> None:
    pattern = r"`(?:--transport )?((?:tcp|nixl|ucx),[^`]+)`"
    named = [name for page in GUIDES for name in re.findall(pattern, (ROOT / page).read_text())]
    assert named
    for text in named:
        parse_transport(text, has_tls=True)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_metrics_that_are_named_exist(page: Path) -> None:
    named = set(_METRIC.findall((ROOT / page).read_text())) - {"kvstore_llm"}  # the wheel
    assert named <= BY_NAME.keys()


@pytest.mark.parametrize(
    "wrong",
    [
        *("node --drams 64GiB", "nodes", "certs --client NAME", "inspect everything"),
        *("node --index-listens", "upgrade now"),
    ],
)
def test_a_command_that_is_wrong_is_seen(wrong: str) -> None:
    with pytest.raises(click.UsageError):
        _look_at(wrong.split())


def test_the_engine_command_has_the_public_names() -> None:
    (vllm,) = (command for command in _commands() if command[0] == "vllm")
    assert vllm[vllm.index("--prefix-caching-hash-algo") + 1] == "sha256_cbor"
    config = json.loads(vllm[vllm.index("--kv-transfer-config") + 1])
    assert parse_config(config.pop("kv_connector_extra_config")).socket == "/run/kvstore/node.sock"
    assert config == {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def test_make_knows_the_targets_that_are_named() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|\n)make ([a-z-]+)", (ROOT / page).read_text()))
        assert named <= known, page

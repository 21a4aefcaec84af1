"""README and the documentation are true: commands parse, tables agree, links and anchors exist."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement
from rich.console import Console

from kvstore.cli import tables
from kvstore.cli.main import cli
from kvstore.client import index as module
from kvstore.config.cluster import parse_transport
from kvstore.connector.config import parse_config
from kvstore.engine.why.reasons import Reason
from kvstore.engine.why.report import NodeReport
from kvstore.obs.metrics import BY_NAME
from kvstore.obs.reasons import word
from kvstore.proto.rows import MemberReport
from kvstore.testing.process import Lab
from kvstore.units import GIB, TIB
from scripts import reference
from tests.docs.commands import index_config, is_name, node_config, parse
from tests.kit.processes import IndexProcess
from tests.style.tree import ROOT, files

PAGES = [file for file in files() if file.suffix == ".md"]
DOCS = Path("kvstore", "docs")
GUIDES = [
    *map(Path, ("README.md", "SECURITY.md", "deploy/README.md")),
    *(page for page in PAGES if DOCS in page.parents and page.parent != DOCS / "adr"),
]
"""Whose commands are parsed."""
ONE_MACHINE = DOCS / "guides" / "one-machine.md"
"""Whose index is on loopback."""
WORDS_MAX = 1200
FOREIGN = {  # flags of vLLM, pip, docker and programs of the repository
    *("--prefix-caching-hash-algo", "--kv-transfer-config", "--kv-events-config"),
    *(
        "--mamba-cache-mode",
        "--enable-sleep-mode",
        "--enable-cumem-allocator",
        "--prefix-cache-retention-interval",
        "--speculative-config",
        "--mm-processor-cache-gb",
        "--no-enable-prefix-caching",
    ),
    *(
        "--gpu-memory-utilization",
        "--enable-scale-out",
        "--otlp-traces-endpoint",
        "--enable-prompt-tokens-details",
        "--ssl-certfile",
        "--ssl-keyfile",
    ),
    *("--enable-metrics", "--served-model-name", "--model", "--enforce-eager"),  # SGLang's, vLLM's
    *("--build-arg", "--extra-index-url", "--again", "--seed", "--seeds", "--type", "--patch-file"),
}
_FENCE = re.compile(r"([^\n]*)\n```(python|bash|sh)\n(.*?)```", re.DOTALL)
_MARK = re.compile(r"<!-- not run: .{10,} -->")
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LOG = re.compile(r" > \S+\.log 2>&1")
_COMMENT = re.compile(r"(?:^|(?<= ))#.*$", re.MULTILINE)
_IN_SENTENCE = re.compile(r"`(?:\S*/)?kvstore ([^`]+)`")
_METRIC = re.compile(r"(?<![\w:])kvstore_(?!llm\b)\w+(?![\w*])")
_ENGINE_METRIC = re.compile(r"vllm:kvstore_\w+(?![\w*])")
ENGINE_METRICS = {row[0].strip("`") for row in reference._engine_rows()}
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")
_ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
_SPAN = re.compile(r"`([^`]+)`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_QUOTED = re.compile(r"(?:log|log:|`/healthz`:|status 503:) (`[^`]+`)")


def _blocks(page: Path) -> list[tuple[str, str, str]]:
    """(line before, language, code) of every fenced block of Python or shell."""
    return _FENCE.findall((ROOT / page).read_text())


def _commands(page: Path) -> list[list[str]]:
    """Every command line in the shell blocks of a page."""
    commands = []
    for _, language, code in _blocks(page):
        if language != "python":
            code = _COMMENT.sub("", _LOG.sub("", code.replace("\\\n", " ")))
            lexer = shlex.shlex(code, posix=True, punctuation_chars="\n")
            lexer.whitespace, lexer.whitespace_split = " \t", True
            line: list[str] = []
            for word in [*lexer, "\n"]:
                if set(word) != {"\n"}:
                    line.append(word)
                elif line := [word for word in line if word != "&"]:  # in the background
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


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_anchors_lead_to_a_heading(page: Path) -> None:
    for target, anchor in _ANCHOR.findall((ROOT / page).read_text()):
        text = _FENCED.sub("", (ROOT / page.parent / target if target else ROOT / page).read_text())
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert anchor in slugs, f"{target}#{anchor}"


def test_the_dependency_table_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {(Requirement(line).name, "base") for line in project["dependencies"]}
    for extra, lines in project["optional-dependencies"].items():
        wanted |= {(Requirement(line).name, f"`[{extra}]`") for line in lines}
    table = (ROOT / DOCS / "reference" / "dependencies.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| (base|`\[\w+\]`) \| .{5,} \|$", table, re.MULTILINE)
    assert sorted(rows) == sorted(wanted)


@pytest.mark.parametrize("page", GUIDES, ids=str)
def test_the_commands_of_a_page_parse(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for program, *arguments in _commands(page):
        if program != "kvstore":
            continue
        name, _ = parse(arguments)
        if name == "certs":  # which the commands behind it read
            cli.main(["certs", *arguments[1:]], prog_name="kvstore", standalone_mode=False)
        if name == "node":
            on_one_machine, automatic = 2 * GIB, TIB // 2
            found = node_config(arguments[1:], monkeypatch).dram_bytes
            assert found in (64 * GIB, on_one_machine, automatic)
        if name == "index":
            is_on_loopback = index_config(arguments[1:]).listen.host.startswith("127.")
            assert is_on_loopback == (page == ONE_MACHINE)


def test_every_command_is_shown_on_some_page() -> None:
    lines = [line for page in GUIDES for line in _commands(page) if line[0] == "kvstore"]
    assert {line[1] for line in lines} == cli.commands.keys() - {"demo"}


def _look_at(arguments: list[str]) -> None:
    """Raises click.UsageError."""
    if not is_name(arguments):
        parse(arguments)


def _parses(arguments: list[str]) -> bool:
    try:
        _look_at(arguments)
    except click.UsageError:
        return False
    return True


@pytest.mark.parametrize("page", GUIDES, ids=str)
def test_commands_in_sentences_parse(page: Path) -> None:
    assert [arguments for arguments in _in_sentences(page) if not _parses(arguments)] == []


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md", "deploy/README.md"])
def test_commands_are_found_in_sentences(page: str) -> None:
    assert _in_sentences(Path(page))


@pytest.mark.parametrize("page", GUIDES, ids=str)
def test_flags_that_are_named_exist(page: Path) -> None:
    known = {flag for command in cli.commands.values() for flag in _flags(command)} | FOREIGN
    spans = _SPAN.findall(_FENCED.sub("", (ROOT / page).read_text()))
    named = {flag for span in spans for flag in _FLAG.findall(span)}
    assert named <= known


def _flags(command: click.Command) -> set[str]:
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return (
        set().union(*map(_flags, inner))
        | {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        | {"--help"}
    )


def test_transports_that_are_named_are_taken() -> None:
    pattern = r"`(?:--transport )?((?:tcp|nixl|ucx),[^`]+)`"
    named = [text for page in GUIDES for text in re.findall(pattern, (ROOT / page).read_text())]
    assert named
    for text in named:
        parse_transport(text, has_tls=True)


def test_log_lines_and_reasons_of_the_troubleshooting_page_are_in_the_code() -> None:
    page = (ROOT / DOCS / "guides" / "troubleshooting.md").read_text()
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    sources = [
        path.read_text()
        for folder in ("kvstore", "connector", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    code = re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(sources))
    quoted = [found.strip("`") for found in _QUOTED.findall(page)]
    quoted += re.findall(r"^\| `([^`]+)`", sections["vLLM does not start"], re.MULTILINE)
    rows = re.findall(r"^\| (`.+?`) \|", sections["A request missed"], re.MULTILINE)
    reasons = [reason for row in rows for reason in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= 19
    assert len(reasons) > 20
    missing = [text for text in quoted if text not in code]
    missing += {*reasons} - {*map(word, Reason)}
    assert not missing
    assert not [text for text in quoted if "%" in text], "it is searched for as it is printed"


def test_no_page_installs_by_a_name_that_nobody_owns() -> None:
    """Whoever registers it would run code on the reader's machine."""
    lines = [line for page in GUIDES for line in (ROOT / page).read_text().splitlines()]
    named = [line for line in lines if re.search(r"pip install [^`\n]*kvstore-llm", line)]
    assert [line for line in named if "Never run" not in line] == []
    assert len(named) == 2


def test_the_output_of_inspect_nodes_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    page, node = (ROOT / ONE_MACHINE).read_text(), NodeReport("7c21", 1, 1, 1, 0, 0, 0, 0)
    member = MemberReport("a", "exact", "127.0.0.1:9480", "7c21", 4, 1, "demo")
    printed = io.StringIO()
    monkeypatch.setattr(tables, "console", lambda: Console(file=printed, width=120))
    tables.show({"nodes": [node], "members": [member]})
    shown = page[page.index("```text\nnodes\n") :].split("```")[1].splitlines()[1:]
    heads = [line.split() for line in printed.getvalue().splitlines()]
    assert [line.split() for line in shown[:2]] == heads[:2]
    assert [line.split() for line in shown[4:6]] == heads[4:6]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= WORDS_MAX


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_metrics_that_are_named_exist(page: Path) -> None:
    text = (ROOT / page).read_text()
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in _METRIC.findall(text)}
    assert names <= BY_NAME.keys()
    assert set(_ENGINE_METRIC.findall(text)) <= ENGINE_METRICS


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


@pytest.mark.parametrize(
    ("page", "sockets"),
    [
        (Path("README.md"), ["/run/kvstore/node.sock"]),
        (DOCS / "index.md", ["/run/kvstore/node.sock"]),
        (DOCS / "install.md", ["/run/kvstore/node.sock"]),
        (DOCS / "guides" / "cluster.md", ["p.sock", "d.sock"]),
        (ONE_MACHINE, ["a.sock", "b.sock"]),
    ],
    ids=str,
)
def test_the_engine_command_has_the_public_names(page: Path, sockets: list[str]) -> None:
    engines = [command for command in _commands(page) if "--kv-transfer-config" in command]
    named = []
    for vllm in engines:
        assert vllm[vllm.index("--prefix-caching-hash-algo") + 1] == "sha256_cbor"
        config = json.loads(vllm[vllm.index("--kv-transfer-config") + 1])
        named.append(parse_config(config.pop("kv_connector_extra_config")).socket)
        assert config == {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
    assert named == sockets


def test_make_knows_the_targets_that_are_named() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|\n)make ([a-z-]+)", (ROOT / page).read_text()))
        assert named <= known, page


@pytest.mark.slow
def test_the_example_of_the_client_runs(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "pki")
    assert module.__doc__ is not None
    (example,) = re.findall(r"\n\n((?:    .*\n)+)\n", module.__doc__)
    files = lab.files("client", "c1")
    names = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
    code = textwrap.dedent(example).replace("ca=…, cert=…, key=…", "**paths")
    with IndexProcess.start(tmp_path, lab.flags("index", "i1")) as index:
        program = f"""
from pathlib import Path
from kvstore.client.index import IndexClient
from kvstore.client.tls import TlsFiles
paths = {{name: Path(path) for name, path in {names}.items()}}
space, keys = bytes(32), bytes(64)
{code.replace("10.0.0.1:9470", index.address)}
print(best)
"""
        for _ in range(5):
            done = subprocess.run(
                [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
            )
            if "the index did not answer" not in done.stderr:  # late, on a busy machine
                break
    assert (done.stdout, done.stderr) == ("None\n", "")

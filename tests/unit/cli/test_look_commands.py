"""Commands that look into a cluster, without one: what was typed wrong, paths that are closed, an
index that is stale."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from kvstore.cli import look, top
from kvstore.cli.commands import as_json
from kvstore.cli.main import cli, main
from kvstore.cli.tables import show
from kvstore.client.index import Members
from kvstore.engine.why.report import SpaceReport
from kvstore.index.feed import Holder, Trust
from kvstore.index.index import Answer, Match, Member
from kvstore.proto.rows import Row
from kvstore.types import Incarnation

Typed = Callable[..., tuple[object, str, str]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Runs a command line: exit status, what it printed, what it complained of."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvstore", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tiers", "--index", "h:1", "--insecure"], "--index is for 'kvstore inspect nodes' and"),
        (["nodes", "--insecure"], "--insecure does nothing without --index: add that, or leave"),
        (["nodes", "--index", "h:1"], "the index needs TLS: give --ca, --cert and --key"),
        (["nodes", "--index", "h", "--insecure"], "index 'h' must be HOST:PORT"),
        (["prefix", "--keys-file", "x", "--text", "y"], "name one prompt: --tokens-file FILE, --"),
        (["prefix", "--keys-file", "x", "--cache-salt", "y"], "--cache-salt is in the keys"),
        (["prefix", "--keys-file", "/none"], "/none cannot be read"),
        (["prefix"], "name one prompt"),
        (["prefix", "--text", "x"], "--text and --tokenizer go together"),
        (["prefix", "--text", "x", "--limit", "3"], "--limit chooses blocks"),
        (["blocks", "--text", "x"], "a prompt is for 'kvstore inspect prefix'"),
        (["blocks", "--limit", "0"], "'--limit': 0 is not in the range"),
        (["tiers", "--space", "ab"], "--limit and --space choose blocks"),
        (["--limit", "5"], "--limit and --space choose blocks"),
        (["tiers", "--gpu-hour", "2"], "--gpu-hour is for 'kvstore inspect savings'"),
        (
            ["savings", "--gpu-hour", "-1"],
            "invalid value for '--gpu-hour': -1.0 is not in the range",
        ),
        (["node"], "there is no topic 'node': did you mean 'nodes'?"),
        (["everything"], "there is no topic 'everything': use one of nodes, tiers, "),
    ],
)
def test_a_wrong_question_is_one_sentence(
    arguments: list[str], sentence: str, typed: Typed
) -> None:
    code, out, err = typed("inspect", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["inspect nodes", "top --once", "top --json"])
def test_an_index_that_is_not_there_is_one_sentence(command: str, typed: Typed) -> None:
    code, out, err = typed(*command.split(), "--index", "127.0.0.1:1", "--insecure")
    assert (code, out) == (1, "")
    assert err.startswith("kvstore: the index did not answer")
    assert "127.0.0.1:1" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "top draws on a terminal: add --once or --json for scripts"),
        (["--once", "--ca", "x"], "--ca does nothing without --index: add that, or leave --ca out"),
        (["--json", "--interval", "0.1"], "'--interval': 0.1 is not in the range 0.5<=x<=60"),
        (["--once", "--index", "h:1"], "the index needs TLS: give --ca, --cert and --key"),
    ],
)
def test_what_top_cannot_do_is_one_sentence(
    arguments: list[str], sentence: str, typed: Typed
) -> None:
    code, out, err = typed("top", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "command", ["inspect", "explain", "clear", "upgrade", "top --once", "top --json"]
)
def test_a_socket_that_is_none_or_another_file(command: str, tmp_path: Path, typed: Typed) -> None:
    path = tmp_path / "file"
    code, out, err = typed(*command.split(), "--socket", str(path))
    assert (code, out) == (1, "")
    way_out = f"start one with 'kvstore node --socket {path} --dram auto', or name another --socket"
    assert err == f"kvstore: no node at {path}: {way_out}\n"
    path.touch()
    code, _, err = typed(*command.split(), "--socket", str(path))
    assert code == 1
    assert err == f"kvstore: {path} is no socket: name the --socket of a node\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("node --dram 1MiB --metrics 9999", "metrics '9999' must be an IP address and a port: 127"),
        (
            "node --dram 1MiB --allow-uid vllm",
            "allow-uid 'vllm' must be a numeric user id, such as",
        ),
        ("index --insecure --entries 10X", "entries '10X' must be a number from 65536 to "),
        ("inpsect", "no such command 'inpsect': did you mean 'inspect'? See 'kvstore --help'"),
        ("nodee", "no such command 'nodee': did you mean 'node'? See 'kvstore --help'"),
        ("xyz", "no such command 'xyz': see 'kvstore --help'"),
        ("top --interval x", "invalid value for '--interval': 'x' is not a valid number: see"),
        ("explain x --last 3", "--last lists the latest requests"),
        ("explain --last 0", "invalid value for '--last': 0 is not in the range"),
        ("explain --last x", "invalid value for '--last': 'x' is not a valid whole number: see"),
        ("node --drma 1MiB", "no such option '--drma': did you mean '--dram'? See 'kvstore node"),
        ("node --event-hashes hex", "invalid value for '--event-hashes': 'hex' is not one of"),
        ("node --quota llama", "quota llama must be NAME=SHARE, such as llama=30%"),
        ("node --quota llama=", "quota llama must be NAME=SHARE, such as llama=30%"),
        ("node --quota a=1% --quota a=2%", "--quota names 'a' twice: keep one"),
        ("node --config /none", "--config /none cannot be read"),
        ("node --xyz", "no such option '--xyz': see 'kvstore node --help'"),
        ("inspect --xyz", "no such option '--xyz': see 'kvstore inspect --help'"),
    ],
)
def test_a_wrong_flag_is_one_sentence(arguments: str, sentence: str, typed: Typed) -> None:
    code, out, err = typed(*arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"kvstore: {sentence}")
    assert len(err.splitlines()) == 1


# ── paths that this user may not read or enter ────────────────────────────────────────────────────


_ALL = """
import contextlib, io, json, sys
from kvstore.cli.main import main
for arguments in json.load(sys.stdin):
    sys.argv = ["kvstore", *arguments]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            main()
        status = 0
    except SystemExit as end:
        status = end.code
    except Exception as error:
        status, said = repr(error), said
    print(json.dumps([status, said.getvalue()]))
"""
WORKER = "--worker=a=http://127.0.0.1:1"
STORE = ("--insecure", "--store=rediss://127.0.0.1:1")
READ = "{} cannot be read: Permission denied"
COMMANDS = {
    "certs {}/pki --node n1": "{}/pki cannot be used: Permission denied; name a DIRECTORY that",
    "certs {}/sub/pki --node n1": "{}/sub/pki cannot be used: Permission denied; name a DIRECTORY",
    "fsck {}": READ,
    "fsck {}/sub": READ.format("{}/sub"),
    "node --config {}/file": f"--config {READ.format('{}/file')}",
    "inspect --socket {}/n.sock": "the node at {}/n.sock belongs to user ",
    "upgrade --socket {}/n.sock": "the node at {}/n.sock belongs to user ",
    "inspect --socket {}": "{} is no socket: name the --socket of a node",
    "inspect prefix --tokens-file {}/file": READ.format("{}/file"),
    "inspect nodes --index 127.0.0.1:1 --ca {}/ca --cert {}/c --key {}/k": "--ca {}/ca cannot be",
    "route explain id --receipts {}/file": READ.format("{}/file"),
    "route explain --dry-run {}": "'--dry-run': File '{}' is a directory",
    "route explain --dry-run {}/file": f"--dry-run {READ.format('{}/file')}",
    f"router {WORKER} --policy {{}}/file": f"--policy {READ.format('{}/file')}",
    f"router {WORKER} --receipts {{}}/file": "--receipts {}/file must be a file, in a directory",
    f"router {WORKER} --index 127.0.0.1:1 --insecure --tokenizer m={{}}": "that this user can read",
    f"index {' '.join(STORE)} --store-ca {{}}/file": "--store-ca {}/file cannot be read: name",
    f"index {' '.join(STORE)} --store-password-file {{}}/file": "file {}/file cannot be read: name",
}


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A directory with files, which nobody may enter."""
    made = tmp_path / "closed"
    made.mkdir()
    (made / "file").touch()
    made.chmod(0)
    yield made
    made.chmod(0o700)


def test_a_path_that_is_closed_is_one_sentence(closed: Path) -> None:
    asked = [each.format(*[closed] * 3).split() for each in COMMANDS]
    # Root may do all, but without its capabilities.
    plain = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    done = subprocess.run(
        [*plain, sys.executable, "-c", _ALL],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for command, (status, said) in zip(COMMANDS, answers, strict=True):
        expected = COMMANDS[command].format(*[closed] * 3)
        assert status in (1, 2), (command, status)
        assert expected in said, command
        assert said.startswith("kvstore: "), command
        assert said.count("\n") == 1, command
    owner = pwd.getpwuid(os.getuid()).pw_name
    assert f"belongs to user {owner}: run this as that user or root\n" in answers[5][1]


def _parameters(command: click.Command) -> Iterator[click.Parameter]:
    yield from command.params
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        yield from _parameters(each)


def test_click_says_nothing_about_what_it_cannot_read() -> None:
    """Its sentence would come before ours, and not say whose file it is."""
    paths = [each for each in _parameters(cli) if isinstance(each.type, click.Path)]
    assert len(paths) > 10
    assert [each.name for each in paths if each.type.readable or each.type.exists] == []  # type: ignore[attr-defined]


# ── an index that is stale, and no node to make keys ──────────────────────────────────────────────


Said = Callable[..., str]
KEYS = [bytes([n]) * 32 for n in range(3)]
SPACE = "aB" * 32
STALE = "the index is stale"
LAB = ("--index", "h:1", "--insecure")


class Index:
    """Knows a node that it does not hear, and who holds two blocks; `trust`: of itself."""

    trust = Trust.STALE

    def nodes(self, *, engines: bool = False, timeout_s: float = 0) -> Members:
        return Members(self.trust, [Member("n1", Incarnation(1), "h:1", None, 5)])

    def match(self, tenant: str, space: bytes, keys: bytes) -> Answer:
        assert (tenant, space.hex(), keys) == ("default", SPACE.lower(), b"".join(KEYS))
        if self.trust is Trust.STALE:
            return Answer(Trust.STALE, [])
        return Answer(self.trust, [Match(Holder("n1"), 0, 2, 2, Trust.EXACT)])


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], index: Index) -> Said:
    """What a command that is answered prints."""

    @contextlib.contextmanager
    def client(flags: object) -> Iterator[Index]:
        yield index

    def run(*arguments: str) -> str:
        monkeypatch.setattr(look, "index_client", client)
        monkeypatch.setattr(top, "index_client", client)
        monkeypatch.setattr(sys, "argv", ["kvstore", *arguments, *LAB])
        main()
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def test_top_by_a_stale_index_calls_nobody_gone(said: Said, index: Index) -> None:
    shown = said("top", "--once", "--interval", "0.5").splitlines()
    assert shown[:2] == ["kvstore index at h:1", STALE]
    assert shown[-1].split()[:2] == ["n1", "unknown"]
    index.trust = Trust.EXACT
    (found,) = json.loads(said("top", "--json", "--interval", "0.5"))["processes"]
    state = found["state"]
    assert (state["health"]["text"], state["nodes"][0]["trust"]) == ("ok", "out")


def test_nodes_by_a_stale_index_are_unknown(said: Said, index: Index) -> None:
    shown = said("inspect", "nodes")
    assert shown.splitlines()[0] == STALE
    assert shown.splitlines()[-1].split()[:2] == ["n1", "unknown"]
    found = json.loads(said("inspect", "nodes", "--json"))
    assert (found["index"], found["members"][0]["trust"]) == ("stale", "unknown")
    assert (found["members"][0]["sequence"], found["members"][0]["engines"]) == (None, None)
    index.trust = Trust.EXACT
    found = json.loads(said("inspect", "nodes", "--json"))
    assert (found["index"], found["members"][0]["trust"]) == ("exact", "out")
    header, row = said("inspect", "nodes").splitlines()[-2:]
    assert dict(zip(header.split(), row.split(), strict=True))["engines"] == "-", "not 0"


def test_keys_need_no_node_and_a_stale_index_does_not_know(
    said: Said, index: Index, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("\n".join(key.hex() for key in KEYS))
    asked = ["inspect", "prefix", "--keys-file", str(tmp_path / "keys"), "--space", SPACE]
    asked += ["--socket", str(tmp_path / "none.sock")]
    shown = said(*asked)
    assert "not known: the index is stale" in shown
    assert "no node holds" not in shown
    assert "at most" not in shown
    index.trust = Trust.EXACT
    assert "3 blocks asked for; at most 2 of them at one location" in said(*asked)
    found = json.loads(said(*asked, "--json"))["prefix"]
    assert (found["held_blocks"], found["held_tokens"], found["block_tokens"]) == (2, None, None)
    assert found["holders"][0]["node"] == "n1"


def test_a_space_is_whole_for_programs_and_short_for_people(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: dict[str, list[Row]] = {"spaces": [SpaceReport(SPACE, "t", "m", "", 1, 2, 3, 4, "")]}
    show(rows)
    shown = capsys.readouterr().out
    assert SPACE[:16] in shown
    assert SPACE[:17] not in shown
    assert json.loads(as_json(**rows))["spaces"][0]["space"] == SPACE


@pytest.mark.parametrize("space", ["", SPACE[:16], "z" * 64])
def test_without_a_node_and_the_whole_space_it_says_what_is_needed(
    typed: Typed, tmp_path: Path, space: str
) -> None:
    (tmp_path / "keys").write_text(KEYS[0].hex())
    asked = ["inspect", "prefix", "--keys-file", str(tmp_path / "keys"), "--space", space]
    code, _, err = typed(*asked, "--socket", str(tmp_path / "none.sock"), *LAB)
    assert code == 1
    (line,) = err.splitlines()
    assert "keys are computed with the settings of the engines at --socket" in line
    assert "--keys-file and all 64 digits of --space" in line


def test_a_question_that_is_none_is_one_sentence(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS[0].hex())
    asked = ["inspect", "prefix", "--keys-file", str(tmp_path / "keys"), "--space", SPACE]
    code, _, err = typed(*asked, "--tenant", "t" * 999, *LAB)
    assert (code, err) == (2, "kvstore: a name is longer than 256\n")

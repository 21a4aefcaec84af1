"""Paths that this user may not read or enter: each command says so in one sentence of its own."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvstore.cli.main import cli

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

"""Commands that look into a cluster, as far as they get without one: what was typed wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.cli.main import main

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

"""`kvstore route explain` of a request with a remote prefill, and of one without."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvstore.cli.route import route
from tests.kit.turns_core import RECEIPT


@pytest.mark.parametrize(
    ("prefiller", "reason", "line"),
    [
        ("p", "long", "prefill at p (long)"),
        ("", "fell-back", "prefill local (fell-back)"),
        ("", "no-prefillers", None),
    ],
)
def test_both_workers_are_named_and_why(
    tmp_path: Path, prefiller: str, reason: str, line: str | None
) -> None:
    receipt = msgspec.structs.replace(
        RECEIPT, request_id="req-1", chosen="d", prefill_worker=prefiller, split_reason=reason
    )
    log = tmp_path / "receipts"
    log.write_bytes(msgspec.json.encode(receipt) + b"\n")
    lines = CliRunner().invoke(route, ["explain", "req-1", "--receipts", str(log)]).output
    assert "request req-1: d" in lines.splitlines()
    assert [each for each in lines.splitlines() if each.startswith("prefill")] == [line] * bool(
        line
    )


def test_a_race_is_shown(tmp_path: Path) -> None:
    outcome = msgspec.structs.replace(RECEIPT.outcome, raced_s=0.5, race_winner="b", race_loser="a")
    receipt = msgspec.structs.replace(RECEIPT, request_id="req-1", outcome=outcome)
    log = tmp_path / "receipts"
    log.write_bytes(msgspec.json.encode(receipt) + b"\n")
    lines = CliRunner().invoke(route, ["explain", "req-1", "--receipts", str(log)]).output
    assert "raced after 500 ms: b won, a lost" in lines.splitlines()


def shown(tmp_path: Path, **fields: Any) -> list[str]:
    log = tmp_path / "receipts"
    log.write_bytes(msgspec.json.encode(RECEIPT_OF | fields) + b"\n")
    output = CliRunner().invoke(route, ["explain", "req-1", "--receipts", str(log)]).output
    return output.splitlines()


RECEIPT_OF = msgspec.to_builtins(msgspec.structs.replace(RECEIPT, request_id="req-1", chosen="b"))


@pytest.mark.parametrize(
    ("trust", "degraded", "line"),
    [
        (
            "none",
            ["prefix-approximate"],
            "approximate (by what this router sent)",
        ),
        ("none", [], "none (routed by load)"),
        ("exact", [], "exact (index epoch 7)"),
    ],
)
def test_the_source_of_prefixes_is_said(
    tmp_path: Path, trust: str, degraded: list[str], line: str
) -> None:
    fields = {"index_trust": trust, "index_epoch": 7, "degraded": degraded}
    assert f"prefixes {line}" in shown(tmp_path, **fields)


@pytest.mark.parametrize(
    ("is_estimated", "end"), [(False, ""), (True, " (estimated: it was not tokenized)")]
)
def test_an_estimate_of_prompt_tokens_is_said_to_be_one(
    tmp_path: Path, is_estimated: bool, end: str
) -> None:
    lines = shown(tmp_path, prompt_tokens=34, prompt_is_estimated=is_estimated)
    assert f"model , pool , prompt tokens: 34{end}" in lines


def test_tokens_that_are_cached_are_shown_as_expected_and_as_found(tmp_path: Path) -> None:
    fields = {"workers": ["a", "b"], "scores": [2.0, 1.0], "cached": [0.0, 96.4]}
    lines = shown(tmp_path, **fields)
    assert "cached tokens: 96 expected" in lines
    assert [each.split() for each in lines[-3:]] == [
        ["worker", "score", "cached"],
        ["b", "1.0000", "96.4000"],
        ["a", "2.0000", "0.0000"],
    ]
    lines = shown(tmp_path, **fields, outcome={"cached_tokens": 80})
    assert "cached tokens: 96 expected, 80 by the engine" in lines
    older = shown(tmp_path, workers=["a", "b"], scores=[2.0, 1.0])
    assert not any("cached" in each for each in older)


def test_a_request_is_recorded_or_not_sent_and_not_both(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text("{}")
    found = CliRunner().invoke(route, ["explain", "req-1", "--dry-run", str(body)])
    assert found.exit_code == 2
    assert "give REQUEST_ID and --receipts FILE, or --dry-run FILE alone" in found.output


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("127.0.0.1", "connection refused: is it running, with --listen at this address?"),
        ("no.such.host.invalid", "its host has no address"),
    ],
)
def test_a_router_that_does_not_answer_is_one_sentence(
    tmp_path: Path, host: str, sentence: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://{host}:{gone.getsockname()[1]}"
    body = tmp_path / "body.json"
    body.write_text("{}")
    found = CliRunner().invoke(route, ["explain", "--dry-run", str(body), "--router", url])
    assert str(found.exception) == f"{url} did not answer: {sentence}"


def test_what_speaks_no_http_is_one_sentence(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            asked, _ = listening.accept()
            with asked:
                assert asked.recv(1 << 16)
                asked.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        found = CliRunner().invoke(route, ["explain", "--dry-run", str(body), "--router", url])
        thread.join()
    expected = f"{url} did not answer: it does not speak HTTP: is it https:// there?"
    assert str(found.exception) == expected


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--router", "http://[::1"],
            "http://[::1 did not answer: this is no URL, such as http://",
        ),
        (["--router", "http://"], "this is no URL, such as http://127.0.0.1:8080"),
        (["--router", "127.0.0.1:8080"], "must be a URL, such as http://127.0.0.1:8080"),
        (["--api-key", "a\nb"], "--api-key has a character that no HTTP header may have"),
        (["--api-key", "schlüssel"], "--api-key has a character that no HTTP header may have"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(
    tmp_path: Path, flags: list[str], sentence: str
) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"model": "m", "prompt": "p"}')
    found = CliRunner().invoke(route, ["explain", "--dry-run", str(body), *flags])
    assert sentence in str(found.exception), found.output

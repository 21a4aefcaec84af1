"""`kvstore route explain` of a request with a remote prefill, and of one without."""

from __future__ import annotations

from pathlib import Path

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

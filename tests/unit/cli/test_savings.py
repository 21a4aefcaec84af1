"""`kvstore inspect savings`: hours, money, and losses that are shown as such."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.cli import look
from kvstore.cli.look_commands import InspectSettings
from kvstore.engine.why.ledger import SavingsReport

HOUR_MS = 3_600_000
ROWS = [
    SavingsReport("llama", "shop", "dram", 123_456, 100 * HOUR_MS, 2 * HOUR_MS, 0, 392 * HOUR_MS),
    SavingsReport("llama", "\x1b[31m", "file", 99, HOUR_MS, 3 * HOUR_MS, 2 * HOUR_MS, -8 * HOUR_MS),
]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[SavingsReport]:
    """Rows that the node answers with."""
    answer = list(ROWS)

    @contextlib.contextmanager
    def node(_socket: Path) -> Iterator[Any]:
        yield SimpleNamespace(rows=lambda topic, _kind: answer if topic == "savings" else [])

    monkeypatch.setattr(look, "node_client", node)
    return answer


def printed(capsys: pytest.CaptureFixture[str], **flags: Any) -> str:
    look.inspect_savings(InspectSettings(**flags))
    return capsys.readouterr().out


def test_each_tier_and_the_sum_in_hours_and_money(
    rows: list[SavingsReport], capsys: pytest.CaptureFixture[str]
) -> None:
    title, head, *lines = printed(capsys, gpu_hour=2.5).splitlines()
    assert title.rstrip() == "savings"
    assert head.split("  ")[-1].strip() == "net money"
    assert [line.split() for line in lines] == [
        ["llama", "shop", "dram", "123,456", "100.00", "2.0000", "0.0000", "392.00", "980.00"],
        ["llama", "?[31m", "file", "99", "1.0000", "3.0000", "2.0000", "-8.0000", "-20.00"],
        ["(all)", "(all)", "(all)", "123,555", "101.00", "5.0000", "2.0000", "384.00", "960.00"],
    ]
    assert "money" not in printed(capsys)


def test_a_loss_too_small_to_show_is_no_negative_zero(
    rows: list[SavingsReport], capsys: pytest.CaptureFixture[str]
) -> None:
    rows[:] = [SavingsReport("m", "t", "none", 0, 0, 24, 24, -25)]
    assert "-0.0000" not in printed(capsys, gpu_hour=2.5)


def test_a_node_that_only_lost_says_so(
    rows: list[SavingsReport], capsys: pytest.CaptureFixture[str]
) -> None:
    del rows[0]
    found = json.loads(printed(capsys, json=True, gpu_hour=0.5))
    (row,), (total,) = found["savings"], found["total"]
    assert (row["model"], row["tier"], row["net_gpu_hours"], row["net_money"]) == (
        *("llama", "file"),
        *(-8, -4),
    )
    assert {name: total[name] for name in total if name.endswith(("hours", "money"))} == {
        name: row[name] for name in row if name.endswith(("hours", "money"))
    }
    assert json.loads(printed(capsys, json=True))["total"][0]["net_money"] is None


def test_nothing_yet(rows: list[SavingsReport], capsys: pytest.CaptureFixture[str]) -> None:
    rows.clear()
    assert printed(capsys).startswith("no request has loaded or waited")
    assert json.loads(printed(capsys, json=True))["savings"] == []

"""What inspect looks like in a terminal: every figure with its name, on one line, in 80 columns;
and its savings, with losses that are shown as such."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvstore.cli import look, tables
from kvstore.cli.look_commands import InspectSettings
from kvstore.engine.trust import NO_PASS
from kvstore.engine.why.ledger import SavingsReport
from kvstore.engine.why.report import NO_BUDGET, LeaseReport, NodeReport, QuotaReport, TierReport
from kvstore.proto.rows import Row, TransferReport
from kvstore.supervisor.sockets import not_yours, why_no_answer

GIB = 1 << 30
NEVER = ("closed", "closed", 0, 0, 0, NO_PASS)
DRAM = TierReport(
    *(
        "dram",
        64 * GIB,
        64 * GIB,
        2 * GIB,
        63 * GIB,
        1_234_567,
        1_234_567,
        500,
        3,
        12_345,
        "reuse",
        0,
        0,
    ),
    *(NO_BUDGET, "closed", "closed", 1_000_000, 50 * GIB, 0, 86_400_000),
)
FILE = TierReport(
    *(
        "file",
        2048 * GIB,
        2048 * GIB,
        0,
        1999 * GIB,
        9_876_543,
        0,
        0,
        0,
        0,
        "second-sight",
        1_234_567,
    ),
    *(7_654_321, 17 * GIB, "half-open", "closed", 9_000_000, 1024 * GIB, 3, NO_PASS),
)
ABSENT = TierReport(*("file", 0, 0, 0, 0, 0, 0, 0, 0, 0, "all", 0, 0, NO_BUDGET), *NEVER)
QUOTAS = [QuotaReport("llama", 20 * GIB, 30 * GIB), QuotaReport("", 44 * GIB, 0)]


def shown(monkeypatch: pytest.MonkeyPatch, found: dict[str, list[Row]]) -> list[list[str]]:
    """Each line, by columns."""
    page = io.StringIO()
    out = Console(file=page, width=80, highlight=False)
    monkeypatch.setattr(tables, "console", lambda: out)
    tables.show(found)
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_durations_and_rates_have_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = TransferReport("move", "tcp", 9, 3 * GIB, GIB, 940, 12_345, 1_500_000)
    lease = LeaseReport("a", 1, 2, 3, age_ms=1500, expires_in_ms=28_500)
    _, names, row, _, _, lease_names, lease_row = shown(
        monkeypatch, {"transfers": [moves], "leases": [lease]}
    )
    assert names[3:] == ["size", "bytes/s", "p50", "p95", "p99"]
    assert row[3:] == ["3 GiB", "1 GiB", "0.9 ms", "12.3 ms", "1.5 s"]
    assert (lease_names[-2:], lease_row[-2:]) == (["age", "expires in"], ["1.5 s", "28.5 s"])


def test_tiers_and_quotas_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, {"tiers": [DRAM, FILE], "quotas": [*QUOTAS]}) == [
        ["tiers"],
        ["dram", "file"],
        ["capacity", "64 GiB", "2 TiB"],
        ["ready", "64 GiB", "2 TiB"],
        ["pinned", "2 GiB", "-"],
        ["used", "63 GiB", "1.952 TiB"],
        ["blocks", "1234567", "9876543"],
        ["slots sealed", "1234567", "-"],
        ["slots granted", "500", "-"],
        ["slots quarantined", "3", "-"],
        ["slots leased", "12345", "-"],
        ["policy", "reuse", "second-sight"],
        ["not admitted", "-", "1234567"],
        ["over budget", "-", "7654321"],
        ["budget left", "-", "17 GiB"],
        ["reads", "-", "breaker being tried again"],
        ["writes", "-", "breaker ok"],
        ["scrubbed blocks", "1000000", "9000000"],
        ["scrubbed", "50 GiB", "1 TiB"],
        ["scrub bad", "0", "3"],
        ["scrub age", "24.0 h", "-"],
        [],
        ["quotas"],
        ["quota", "promised", "used"],
        ["llama", "20 GiB", "30 GiB"],
        ["(all others)", "44 GiB", "0 B"],
    ]


def test_a_node_without_a_disk_says_nothing_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, {"tiers": [DRAM, ABSENT]})
    assert lines[1] == ["dram"]
    assert ["policy", "reuse"] in lines
    assert all(len(line) == 2 for line in lines[2:])


def test_a_node_without_engines_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = NodeReport(
        "1f", connections=0, owners=0, sessions=0, leases=0, blocks=7, restarts=0, blocks_kept=0
    )
    assert shown(monkeypatch, {"nodes": [idle]}) == [
        ["nodes no engine is attached, incarnation 1f, blocks 7"]
    ]
    busy = msgspec.structs.replace(idle, connections=1)
    assert shown(monkeypatch, {"nodes": [busy]})[0] == ["nodes"]


def test_no_budget_is_any_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    file = msgspec.structs.replace(FILE, budget_left_bytes=NO_BUDGET)
    lines = shown(monkeypatch, {"tiers": [DRAM, file]})
    assert ["budget left", "-", "any"] in lines


def test_somebody_elses_node_is_named(tmp_path: Path) -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    closed = tmp_path / "n.sock"
    expected = f"the node at {closed} belongs to user {me}: run this as that user or root"
    assert not_yours(closed) == expected, "by its directory, where it cannot be seen"
    closed.touch()
    assert not_yours(closed) == expected


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(errno.EACCES, "no"), "the node at n.sock belongs to user"),
        (FileNotFoundError(errno.ENOENT, "no"), "no node at n.sock: start one with 'kvstore node"),
        (NotADirectoryError(errno.ENOTDIR, "no"), "no node at n.sock: start one"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "no"), "no node at n.sock: start one"),
        (OSError(errno.EMFILE, "Too many"), "no answer from n.sock.rpc: Too many"),
    ],
)
def test_why_no_node_answers(error: OSError, says: str) -> None:
    assert why_no_answer(Path("n.sock"), error, "no answer from n.sock.rpc").startswith(says)


# ── savings: hours, money, and losses that are shown as such ──────────────────────────────────────


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

"""Pages of the documentation that are made from the code: commands, metrics, the list of ADRs.

    python scripts/reference.py [FOLDER]     # rewrites them, by default in kvstore/docs

`tests/docs/test_reference.py` compares the pages with what this makes.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import click

from kvstore.cli.main import cli
from kvstore.obs.metrics import INDEX_METRICS, METRICS, Metric

DOCS = Path(__file__).resolve().parents[1] / "kvstore" / "docs"
_MADE = "<!-- made by scripts/reference.py from the code; do not edit -->\n\n"


def pages() -> dict[str, str]:
    """Text of each page, by its path below the documentation."""
    return {
        "reference/cli.md": _MADE + _commands(),
        "reference/metrics.md": _MADE + _metrics(),
        "decisions.md": _MADE + _decisions(),
    }


def _commands() -> str:
    parts = ["# Commands", "Every command has `--help` with examples."]
    with click.Context(cli, info_name="kvstore") as context:
        for name, command in sorted(cli.commands.items()):
            with click.Context(command, info_name=name, parent=context) as inner:
                parts += [f"## kvstore {name}", *_command(command, inner)]
    return "\n\n".join(parts) + "\n"


def _command(command: click.Command, context: click.Context) -> list[str]:
    about = inspect.cleandoc(command.help or "").replace("\b\n", "").partition("\f")[0]
    usage = command.get_usage(context).removeprefix("Usage: ")
    rows = []
    for option in command.params:
        record = option.get_help_record(context)
        if record is not None and not getattr(option, "hidden", False):
            rows.append(f"| `{_cell(record[0])}` | {_cell(record[1])} |")
    table = "\n".join(["| flag | |", "|---|---|", *rows])
    return [f"`{' '.join(usage.split())}`", "```text\n" + about.strip() + "\n```", table]


def _metrics() -> str:
    parts = ["# Metrics", "Of a node: `http://127.0.0.1:9464/metrics`."]
    parts += [_metric_table(METRICS), "## Index", "Of `kvstore index`: port 9471. A node that is a"]
    parts[-1] += " replica serves them beside its own."
    parts.append(_metric_table(INDEX_METRICS))
    return "\n\n".join(parts) + "\n"


def _metric_table(metrics: tuple[Metric, ...]) -> str:
    rows = [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {_cell(metric.help)} |"
        for metric in metrics
    ]
    return "\n".join(["| metric | kind | labels | |", "|---|---|---|---|", *rows])


def _decisions() -> str:
    rows = []
    for file in sorted((DOCS / "adr").glob("[0-9]*.md")):
        title, _, rest = file.read_text().partition("\n")
        number, _, words = title.removeprefix("# ").partition(". ")
        status = re.search(r"Status: (\w+)", rest)
        assert status is not None, f"{file.name} has no status"
        rows.append(f"| {number} | [{words}](adr/{file.name}) | {status[1]} |")
    about = "Each decision, what it gave up, and how a wrong one would be noticed."
    return (
        "\n\n".join(
            ["# Decisions", about, "\n".join(["| | decision | status |", "|---|---|---|", *rows])]
        )
        + "\n"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    for path, text in pages().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)

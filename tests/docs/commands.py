"""Commands as documents and manifests write them, parsed by the real command line."""

from __future__ import annotations

from typing import Any

import click
import pytest

from kvstore.serve import config
from kvstore.serve.main import cli
from kvstore.units import TIB


def parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The subcommand and its parameters. Raises click.UsageError as the program would."""
    name, *rest = arguments
    with cli.commands[name].make_context(name, rest) as context:
        return name, context.params


def node_config(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> config.NodeConfig:
    """What `kvstore node FLAGS` would run with on a machine with a tebibyte of memory and four of
    disk."""
    monkeypatch.setattr(config, "available_memory", lambda: (TIB, "the test"))
    monkeypatch.setattr(config, "file_system_bytes", lambda _: 4 * TIB)
    seen: list[config.NodeConfig] = []
    monkeypatch.setattr("kvstore.serve.main.supervise", lambda made, _: seen.append(made))
    try:
        cli.main(["node", *flags], prog_name="kvstore", standalone_mode=False)
    except click.ClickException as error:
        pytest.fail(error.format_message())
    (made,) = seen
    return made

"""Commands as documents and manifests write them, parsed by the real command line."""

from __future__ import annotations

from typing import Any

import click
import pytest

from kvstore.cli.main import cli
from kvstore.config import machine, node as config
from kvstore.config.cluster import IndexConfig, load_index_config
from kvstore.config.router import RouterConfig, load_router_config
from kvstore.units import TIB


def parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The subcommand and its parameters. Raises click.UsageError as the program would."""
    name, *rest = arguments
    with _command(name).make_context(name, rest) as context:
        return name, context.params


def is_name(arguments: list[str]) -> bool:
    """Whether they name a command, or one flag of it, and are none that could be run. Raises
    click.UsageError when there is no such command."""
    name, *rest = arguments
    flags = {flag for option in _command(name).params for flag in option.opts} | {"--help"}
    return not rest or (len(rest) == 1 and rest[0] in flags)


def _command(name: str) -> click.Command:
    if name not in cli.commands:
        raise click.UsageError(f"there is no kvstore {name}")
    return cli.commands[name]


def index_config(flags: list[str]) -> IndexConfig:
    """What `kvstore index FLAGS` would run with."""
    _, given = parse(["index", *flags])
    path = given.pop("config_path")
    return load_index_config(path, {key.replace("_", "-"): v for key, v in given.items()})


def router_config(flags: list[str]) -> RouterConfig:
    """What `kvstore router FLAGS` would run with."""
    _, given = parse(["router", *flags])
    path = given.pop("config_path")
    return load_router_config(path, {key.replace("_", "-"): v for key, v in given.items()})


def node_config(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> config.NodeConfig:
    """What `kvstore node FLAGS` would run with on a machine with a tebibyte of memory and four of
    disk."""
    monkeypatch.setattr(config, "available_memory", lambda: (TIB, "the test"))
    monkeypatch.setattr(machine, "file_system_bytes", lambda _: 4 * TIB)
    seen: list[config.NodeConfig] = []
    monkeypatch.setattr(
        "kvstore.supervisor.supervisor.supervise", lambda made, _: seen.append(made)
    )
    try:
        cli.main(["node", *flags], prog_name="kvstore", standalone_mode=False)
    except click.ClickException as error:
        pytest.fail(error.format_message())
    (made,) = seen
    return made

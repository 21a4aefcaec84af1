"""The command line: flags to configuration, answers to tables.

Errors are one sentence on stderr; exit code 2 for a wrong flag or configuration, 1 when there is
no node to talk to.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click

from kvstore.errors import AttachError, ConfigError
from kvstore.obs import logs
from kvstore.serve.ask import SUMMARY, TOPICS, NodeClient, as_json, show
from kvstore.serve.config import (
    DEFAULT_METRICS,
    DEFAULT_SOCKET,
    EXAMPLE_EVENTS,
    HASH_FORMS,
    LOG_LEVELS,
    load_config,
)
from kvstore.serve.executor import Poisoned
from kvstore.serve.fsck import fsck as check_directory
from kvstore.serve.inspect import BLOCK_ROWS_MAX
from kvstore.serve.node import run_node

BLOCKS_LISTED = 100
DEMO_NEEDS = ("vllm", "psutil")
EXIT_POISONED = 70
"""EX_SOFTWARE: a bug of ours; a supervisor may start the node again."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kvstore", prog_name="kvstore", message="%(prog)s %(version)s")
def cli() -> None:
    """A shared, verified KV cache for LLM engines.

    \b
    Examples:
      kvstore node --dram 64GiB        start the cache of this machine
      kvstore inspect                  what is cached, by whom
      kvstore clear                    forget it all
    """


@cli.command()
@click.option("--socket", help=f"Attach socket of the node.  [default: {DEFAULT_SOCKET}]")
@click.option(
    "--dram",
    metavar="SIZE|auto",
    help="Memory for blocks; auto takes half of what is available.  [default: auto]",
)
@click.option(
    "--policy",
    metavar="lru|reuse",
    help="What leaves memory first: what was used longest ago, or what was used once. "
    " [default: lru]",
)
@click.option(
    "--file",
    metavar="PATH:SIZE[,shared]",
    help="Keep blocks on disk too; ',shared' for one directory of several nodes.",
)
@click.option(
    "--file-admission",
    metavar="all|second-sight",
    help="Blocks to write to disk: all, or those that a second request names.  [default: all]",
)
@click.option(
    "--file-writes-per-day",
    metavar="SIZE",
    help="What the disk is to endure; near the end of it only second-sight is written, then"
    " nothing. Reading goes on.  [default: no limit]",
)
@click.option(
    "--node-name",
    metavar="NAME",
    help="Its part of a shared directory, and its name in events.  [default: the host's name]",
)
@click.option(
    "--slab", metavar="SIZE|auto", help="Unit in which dram goes to block sizes.  [default: auto]"
)
@click.option(
    "--metrics",
    metavar="ADDR|off",
    help=f"Where /metrics and /healthz are; port 0 picks one.  [default: {DEFAULT_METRICS}]",
)
@click.option(
    "--metrics-beyond-loopback/--metrics-loopback-only",
    default=None,
    help="Allow an address that other machines can read, such as a pod's.",
)
@click.option(
    "--events",
    metavar="ADDR|off",
    help=f"Publish KV events for indexers, such as {EXAMPLE_EVENTS}.  [default: off]",
)
@click.option(
    "--event-hashes",
    type=click.Choice(HASH_FORMS),
    help="Form of block hashes in events: that of the engines' own events.  [default: int]",
)
@click.option(
    "--insecure/--secure",
    default=None,
    help="Let other machines read events without TLS; for labs.",
)
@click.option(
    "--allow-uid",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="UID",
    help="User whose engines may attach; repeatable.  [default: own uid and 0]",
)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), help="[default: info]")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML with the same names as the flags; flags win.",
)
def node(config_path: Path | None, allow_uid: tuple[int, ...], **flags: str | bool | None) -> None:
    """Run the cache of this machine until SIGTERM.

    \b
    Examples:
      kvstore node --socket /run/kvstore/node.sock --dram 64GiB
      kvstore node --dram 64GiB --file /var/lib/kvstore:2TiB --file-writes-per-day 1TiB
      kvstore node --config node.yaml --metrics off
      kvstore node --events tcp://127.0.0.1:5557 --node-name $HOSTNAME
    \b
    node.yaml:
      dram: 64GiB
      allow-uid: [1000, 1001]
    """
    settings: dict[str, object] = {name.replace("_", "-"): value for name, value in flags.items()}
    settings["allow-uid"] = list(allow_uid) or None
    try:
        config = load_config(config_path, settings)
        logs.setup(config.log_level)
        run_node(config, lambda running: click.echo(running.line()))
    except ConfigError as error:
        fail(str(error), code=2)
    except Poisoned as error:
        fail(f"stopped to protect readers: {error}", code=EXIT_POISONED)


SOCKET_OPTION = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    default=Path(DEFAULT_SOCKET),
    show_default=True,
    help="Attach socket of the node.",
)


@cli.command()
@click.argument("topic", type=click.Choice(TOPICS), required=False, metavar="[TOPIC]")
@SOCKET_OPTION
@click.option("--json", "json_", is_flag=True, help="One JSON object, a list per topic.")
@click.option(
    "--limit",
    type=click.IntRange(1, BLOCK_ROWS_MAX),
    help=f"Most blocks to list.  [default: {BLOCKS_LISTED}]",
)
@click.option("--space", metavar="HEX", help="List blocks of this space only.")
def inspect(
    topic: str | None, socket: Path, limit: int | None, space: str | None, *, json_: bool
) -> None:
    """Show what a node holds: everything but single blocks, or one TOPIC.

    \b
    Topics:
      nodes    who is attached, how much is cached
      tiers    memory: capacity, in use, being written, leased
      spaces   models: what their engines share
      blocks   single blocks
      leases   what is being read
      jobs     what is being written
    \b
    Examples:
      kvstore inspect
      kvstore inspect blocks --space 3f9a --limit 20
      kvstore inspect tiers --json | jq '.tiers[0].used_bytes'
    """
    if topic != "blocks" and (limit is not None or space is not None):
        raise click.UsageError("--limit and --space choose blocks: use 'kvstore inspect blocks'")
    topics = SUMMARY if topic is None else (topic,)
    with _client(socket) as client:
        found = {
            name: client.rows(name, limit=limit or BLOCKS_LISTED, space=space or "")
            for name in topics
        }
    if json_:
        click.echo(as_json(found))
    else:
        show(found)


@cli.command()
@SOCKET_OPTION
@click.option("--space", default="", metavar="HEX", help="Only this space; its first digits do.")
def clear(socket: Path, space: str) -> None:
    """Forget cached blocks. Engines go on: what they look for is a miss until stored again.

    \b
    Examples:
      kvstore clear
      kvstore clear --space 3f9a
    """
    with _client(socket) as client:
        blocks = client.clear(space=space)
    click.echo(f"{blocks} block{'' if blocks == 1 else 's'} forgotten")


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--quarantine",
    is_flag=True,
    help="Save the good records of damaged segments and move those aside; no node may be running.",
)
def fsck(directory: Path, *, quarantine: bool) -> None:
    """Read every byte of a file tier's DIRECTORY and say what is wrong with it.

    The exit status is 0 when all is well, 1 when there is damage, 2 when it is no file tier. Of a
    shared directory name one node's part.

    \b
    Examples:
      kvstore fsck /var/lib/kvstore
      kvstore fsck /var/lib/kvstore --quarantine
    """
    try:
        report = check_directory(directory, quarantine=quarantine)
    except ConfigError as error:
        fail(str(error), code=2)
    click.echo(report.text())
    sys.exit(report.status)


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """A real vLLM without and with kvstore, in a few minutes; --keep lets all go on.

    \b
    Examples:
      kvstore demo
      kvstore demo --keep
    """
    missing = [name for name in DEMO_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        fail(
            f"the demo runs a real vLLM, and this Python has no {' and no '.join(missing)}: "
            "'make demo' in a clone installs all of it",
            code=2,
        )
    # A program of its own: the node needs neither the engine nor the test kit that it is made of.
    command = [sys.executable, "-P", "-m", "kvstore.testing.demo", *arguments]
    os.execv(sys.executable, command)  # noqa: S606


@contextlib.contextmanager
def _client(socket: Path) -> Iterator[NodeClient]:
    """A client; what goes wrong with it ends the program with code 1."""
    try:
        with contextlib.closing(NodeClient(socket)) as client:
            yield client
    except AttachError as error:
        fail(str(error), code=1)


def fail(sentence: str, *, code: int) -> NoReturn:
    """Say what is wrong and leave."""
    click.echo(f"kvstore: {sentence}", err=True)
    sys.exit(code)


def main() -> None:
    """Entry point of the console script."""
    try:
        cli(prog_name="kvstore", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "kvstore"
        message = error.format_message().rstrip(".")
        fail(f"{message[0].lower()}{message[1:]}: see '{path} --help'", code=2)
    except click.ClickException as error:
        fail(error.format_message(), code=2)
    except (click.Abort, BrokenPipeError):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The command line: flags to configuration, answers to tables.

Errors are one sentence on stderr; exit code 2 for a wrong flag or configuration, 1 when there is
no node to talk to.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from kvstore import __version__
from kvstore.cli.commands import (
    A_DIRECTORY,
    A_FILE,
    NodeCommand,
    Whole,
    fail,
    option,
    options,
    settings_options,
)
from kvstore.cli.look_commands import doctor, explain, inspect, top
from kvstore.cli.plan import plan_command
from kvstore.cli.route import route
from kvstore.config.defaults import CERTIFICATE_DAYS
from kvstore.config.settings import IndexSettings, NodeSettings, RouterSettings, Settings
from kvstore.errors import ConfigError, KVStoreError
from kvstore.installation import is_installed

DEMO_NEEDS = ("vllm", "psutil")
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvstore", message="%(prog)s %(version)s")
def cli() -> None:
    """A shared, verified KV cache for LLM engines.

    \b
    Examples:
      kvstore node --dram 64GiB        run the cache of this machine
      kvstore inspect                  list engines, tiers, models and leases
      kvstore explain                  show why recent requests hit or missed
      kvstore top                      show current memory, hits and flows
      kvstore doctor                   check this machine, with a mend for each finding
      kvstore clear                    drop all cached blocks
      kvstore plan config.json         size a deployment for a model
      kvstore upgrade                  run the newly installed code, keep the memory
      kvstore index                    run a replica of the prefix index
      kvstore router                   send requests to the engines that hold their prefixes
      kvstore up MODEL                 run all of it on this machine, engines included
    """


@cli.command()
@settings_options(NodeSettings)
def node(config_path: Path | None, **flags: Any) -> None:
    """Run the cache of this machine until SIGTERM.

    A supervisor process holds the memory and restarts the node process when it ends: cached blocks
    survive. 'kvstore upgrade' starts the newly installed code on the same memory. Settings are read
    once at start; changing them needs a restart of the supervisor, which empties the memory.

    \b
    Examples:
      kvstore node --socket /run/kvstore/node.sock --dram 64GiB
      kvstore node --dram 64GiB --file /var/lib/kvstore:2TiB --file-writes-per-day 1TiB
      kvstore node --config node.yaml --metrics off
      kvstore node --events tcp://127.0.0.1:5557 --node-name $HOSTNAME
      kvstore node --index 10.0.0.1:9470 --ca ca.crt --cert node-n1.crt --key node-n1.key

    \b
    node.yaml:
      dram: 64GiB
      allow-uid: [1000, 1001]
      quota: {llama: 30%, team-a: 20GiB}
    """
    from kvstore.config.node import load_config
    from kvstore.config.reading import read_settings
    from kvstore.supervisor.supervisor import supervise

    supervise(load_config(config_path, flags), read_settings(config_path, flags))


@cli.command()
@settings_options(IndexSettings)
def index(config_path: Path | None, **flags: Any) -> None:
    """Run a replica of the prefix index until SIGTERM: the nodes and tiers that hold each prefix.

    Every node publishes to every replica; name all replicas to each node. A replica keeps nothing
    on disk and is filled again by the nodes within seconds. Replicas with --store share one state,
    so that a new one is complete at once.

    \b
    Examples:
      kvstore certs pki --index i1 --node n1
      kvstore index --ca pki/ca.crt --cert pki/index-i1.crt --key pki/index-i1.key
      kvstore index --store rediss://valkey.example:6379/0 --store-password-file pw --ca …
      kvstore index --insecure
    """
    from kvstore.config.cluster import load_index_config

    config = load_index_config(config_path, flags)
    from kvstore.indexer.replica import run_index

    _set_up(config.log_level)
    run_index(config)


@cli.command()
@settings_options(RouterSettings)
def router(config_path: Path | None, **flags: Any) -> None:
    """Run an OpenAI-compatible router in front of engines until SIGTERM.

    Each request goes to the worker with the least expected time to its first token, by its queue
    and the prefix that it holds: as the index says, or as this router has sent. Workers with
    role=prefill compute long prompts for those with role=decode or both.

    \b
    Examples:
      kvstore router --worker a=http://127.0.0.1:8001 --worker b=http://127.0.0.1:8002
      kvstore router --worker a=http://127.0.0.1:8001,node=n1 --index 127.0.0.1:9470 --insecure
      kvstore router --worker-dns http://vllm.example:8000 --policy policy.yaml --insecure
      kvstore router --worker p=http://127.0.0.1:8100,role=prefill \\
        --worker d=http://127.0.0.1:8200,role=decode
    """
    from kvstore.config.router import load_router_config

    config = load_router_config(config_path, flags)
    from kvstore.router.process import run_router

    _set_up(config.log_level)
    run_router(config)


def _set_up(log_level: str) -> None:
    """Set up logs and limits of this process before it serves."""
    from kvstore.net.process import harden_process
    from kvstore.obs import logs

    logs.setup(log_level)
    harden_process()


class CertsSettings(Settings):
    """Settings of `kvstore certs`."""

    node: tuple[str, ...] = option(multiple=True, metavar="NAME")(
        "Issue a certificate for this node; repeatable."
    )
    index: tuple[str, ...] = option(multiple=True, metavar="NAME")(
        "For this index replica; repeatable."
    )
    client: tuple[str, ...] = option(multiple=True, metavar="NAME")(
        "For a router or script; repeatable."
    )
    with_index: bool = option(is_flag=True)("The nodes are index replicas too (--index-listen).")
    hosts: str | None = option(metavar="HOST,…")(
        "Further names and addresses in the certificates: those by which clients reach a router."
    )
    days: int = option(type=Whole(1, 3650), default=CERTIFICATE_DAYS, show_default=True)(
        "Validity of the certificates."
    )


@cli.command()
@click.argument("directory", type=A_DIRECTORY)
@options(CertsSettings)
def certs(asked: CertsSettings, directory: Path) -> None:
    """Create a CA in DIRECTORY, once, and issue certificates. No file is overwritten.

    A node speaks only for the name in its certificate. The owner of ca.key can impersonate every
    component: keep the file off the nodes. A site's own CA works as well; the DNS names are
    NAME.node.kvstore, NAME.index.kvstore together with index.kvstore, and NAME.client.kvstore.

    \b
    Examples:
      kvstore certs pki --index i1 --node n1 --node n2 --client router
      kvstore certs pki --node n3 --with-index
    """
    if not (asked.node or asked.index or asked.client):
        raise click.UsageError("name at least one owner: --node, --index or --client")
    if asked.with_index and not asked.node:
        raise click.UsageError("--with-index is about nodes: add --node NAME")
    from kvstore.cli.certs import make_certificates
    from kvstore.wire.identity import ROLES, Identity

    is_new = not os.path.lexists(directory)
    made = make_certificates(
        directory,
        [Identity(role, name) for role in ROLES for name in getattr(asked, role)],
        hosts=asked.hosts.split(",") if asked.hosts else (),
        days=asked.days,
        nodes_are_indexes=asked.with_index,
    )
    if is_new:
        click.echo(f"made the directory {directory.absolute()}", err=True)
    click.echo("\n".join(map(str, made)))


for _command in (inspect, explain, top, route, doctor, plan_command):
    cli.add_command(_command)


@cli.command()
@options(NodeCommand)
@click.option("--space", metavar="HEX", help="Only this space; its first digits suffice.")
def clear(asked: NodeCommand, space: str | None) -> None:
    """Drop cached blocks. Engines keep running; dropped blocks are misses until stored again.

    Exit status 1: the disk did not record the deletion, so a restart would bring its blocks back.
    A node drops its own blocks only, also in a shared directory, and may fetch the same blocks
    from other nodes: run the command on each node.

    \b
    Examples:
      kvstore clear
      kvstore clear --space 3f9a
    """
    if space == "":
        raise click.UsageError("--space is empty: give its first digits, or leave it out for all")
    from kvstore.cli.ask import node_client

    with node_client(asked.socket) as client:
        blocks = client.clear(space=space or "")
    click.echo(f"{blocks} block{'' if blocks == 1 else 's'} forgotten")


@cli.command()
@options(NodeCommand)
def upgrade(asked: NodeCommand) -> None:
    """Run the newly installed code and keep the cached blocks. Engines keep running.

    The new code loads while the old one serves. The switch takes less than a second, during which
    requests are computed. If the new code does not start or cannot use the memory, the old code
    stays and the exit status is 1. Settings stay; certificate files are read again.

    \b
    Example:
      pip install --upgrade kvstore_llm-*.whl && kvstore upgrade
    """
    from kvstore.supervisor.sockets import ask_for_upgrade

    click.echo(ask_for_upgrade(asked.socket))


class FsckSettings(Settings):
    """Settings of `kvstore fsck`."""

    quarantine: bool = option(is_flag=True)(
        "Copy the intact records of damaged segments, then move those segments aside; needs a"
        " stopped node."
    )
    json: bool = option(is_flag=True)("Print one JSON object with a list of directories.")


@cli.command()
@click.argument("directory", type=A_DIRECTORY)
@options(FsckSettings)
def fsck(asked: FsckSettings, directory: Path) -> None:
    """Read every byte of a disk tier's DIRECTORY and report damage.

    The node may be running, except with --quarantine. In a shared directory the parts of all nodes
    are read. Exit status 0: no damage. 1: damage found (with --quarantine: moved aside, so that a
    second run returns 0). 2: the directory is no disk tier, or --quarantine failed. An open
    segment is what a killed node leaves; it is not damage. One that was cut short from outside
    looks the same, unless a later segment records that it was closed.

    \b
    Examples:
      kvstore fsck /var/lib/kvstore
      kvstore fsck /var/lib/kvstore --quarantine
      kvstore fsck /mnt/shared --json | jq '.directories[] | select(.status > 0)'
    """
    from kvstore.cli.fsck import fsck as check, reports_as_json, stores_in

    reports = [check(store, quarantine=asked.quarantine) for store in stores_in(directory)]
    if asked.json:
        click.echo(reports_as_json(reports))
    else:
        for report in reports:
            if not report.is_store:
                fail(report.text(), code=report.status)
            if len(reports) > 1:
                click.echo(f"{report.directory}:")
            click.echo(report.text())
    sys.exit(max(report.status for report in reports))


@cli.command()
@click.option("--seed", type=int, help="Seed of the conversations.")
@click.option("--users", type=Whole(min=1), help="Concurrent users.")
@click.option("--rounds", type=Whole(min=2), help="Questions per user; the first has no history.")
@click.option("--cluster", is_flag=True, help="Two nodes and two engines that are one cache.")
@click.option("--pd", is_flag=True, help="Prefill on one engine and node, decode on another.")
@click.option("--router", is_flag=True, help="Two engines behind the router, beside round robin.")
@click.option("--plot", type=A_FILE, help="Picture of the run.  [default: in the cache]")
def demo(**flags: Any) -> None:
    """Run a real vLLM without and with kvstore, in a few minutes.

    \b
    Examples:
      kvstore demo
      kvstore demo --cluster
      kvstore demo --pd --plot pd.png
      kvstore demo --router
      kvstore demo --users 2
    """
    acts = [name for name in ("cluster", "pd", "router") if flags.pop(name)]
    if len(acts) > 1:
        raise click.UsageError(f"--{acts[0]} and --{acts[1]} are two demos: give one of them")
    _start("demo", "play", act="".join(acts), **flags)


class UpCommand(click.Command):
    """A command whose arguments behind ``--`` are for the engines."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments before ``--``; the others are the parameter `flags`."""
        end = args.index("--") if "--" in args else len(args)
        ctx.params["flags"] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


@cli.command(cls=UpCommand)
@click.argument("model", required=False, metavar="[MODEL] [-- VLLM_FLAG ...]")
@click.option("--engines", type=Whole(1), default=2, show_default=True, help="Number of engines.")
@click.option("--port", type=Whole(0, 65535), default=8000, show_default=True, help="API port.")
@click.option("--dram", help="Memory of the node.  [default: auto; without a MODEL 2GiB]")
@click.option("--file", metavar="DIRECTORY:SIZE", help="Disk tier of the node.")
def up(**flags: Any) -> None:
    """Run a node, engines that share it and a router on this machine, until Ctrl-C.

    MODEL is a directory or a name in a hub [default: the demo's, of random weights, on a CPU].
    VLLM_FLAGs are flags of each engine.

    \b
    Examples:
      kvstore up
      kvstore up Qwen/Qwen3-8B --engines 2 --dram 64GiB
      kvstore up /models/llama --file /var/lib/kvstore:1TiB -- --tensor-parallel-size 4
    """
    _start("up", "up", **flags)


def _start(name: str, module: str, **flags: Any) -> NoReturn:
    """Run a program of `kvstore.demo`, and exit with its status; with 2: a package is missing. Only
    here it is imported: a node needs neither the engine nor the test kit that it is made of.
    """
    missing = [need for need in DEMO_NEEDS if not is_installed(need)]
    if missing:
        fail(
            f"'kvstore {name}' runs a real vLLM, and this Python has no"
            f" {' and no '.join(missing)}: 'make demo' in a clone installs all of it",
            code=2,
        )
    sys.exit(importlib.import_module(f"kvstore.demo.{module}").main(**flags))


def main() -> None:
    """Entry point of the program."""
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _discard_output()
        fail(f"the output cannot be written: {error.strerror}", code=1)


def _discard_output() -> None:
    """Send stdout to /dev/null: Python flushes it at exit, and would report the failed write a
    second time.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _run() -> None:
    try:
        cli(prog_name="kvstore", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "kvstore"
        message = error.format_message().rstrip(".")
        near = getattr(error, "possibilities", None)  # of an unknown option or command
        if near:  # click counts dashes as likeness
            from kvstore.wording import did_you_mean

            word = getattr(error, "option_name", "") or getattr(error, "command_name", "")
            message = error.message.rstrip(".") + did_you_mean(word, near)
        see = " See" if message.endswith("?") else ": see"
        fail(f"{message[0].lower()}{message[1:]}{see} '{path} --help'", code=2)
    except click.ClickException as error:
        fail(error.format_message(), code=2)
    except KVStoreError as error:
        fail(str(error), code=2 if isinstance(error, ConfigError) else 1)
    except click.Abort:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C would be a traceback
        sys.exit(1)


if __name__ == "__main__":
    main()
